"""Workers: answers page by page, in the order of submission; hung calls are given up; faults."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvpact.cache.storage import SealedPage
from kvpact.cache.storage.memory import MemoryBackend
from kvpact.cache.storage.requests import PagePlan, PlanPage, WorkersBase
from kvpact.cache.storage.workers import (
    CALL_PAGES,
    NO_PAGE_FAULT,
    DeferredWorkers,
    Kind,
    StorageEnding,
    StorageRequest,
    StorageWorkers,
)
from kvpact.consensus.core.errors import InternalError, Misuse
from tests.storage_pages import key_of, page_of, sealed

LONG_S = 20.0  # never reached unless something is broken
Make = Callable[..., WorkersBase]


def put(ticket: int, *numbers: int) -> StorageRequest:
    return StorageRequest(ticket, Kind.PUT, pages=tuple(sealed(n) for n in numbers))


def get(ticket: int, *numbers: int) -> StorageRequest:
    return StorageRequest(ticket, Kind.GET, tuple(key_of(n) for n in numbers))


def exists(ticket: int, *numbers: int) -> StorageRequest:
    return StorageRequest(ticket, Kind.EXISTS, tuple(key_of(n) for n in numbers))


class Gated(MemoryBackend):
    """Waits in every put and get until ``gate`` is set; notes its batches and threads."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.batches: list[int] = []
        self.threads: set[str] = set()

    def _store(self, pages: Sequence[SealedPage]) -> list[bool]:
        self._wait(len(pages))
        return super()._store(pages)

    def _load(self, keys: Sequence[bytes]) -> list[SealedPage | None]:
        self._wait(len(keys))
        return super()._load(keys)

    def _wait(self, num_pages: int) -> None:
        self.batches.append(num_pages)
        self.threads.add(threading.current_thread().name)
        self.entered.release()
        assert self.gate.wait(LONG_S)


@pytest.fixture
def gated() -> Iterator[Gated]:
    backend = Gated()
    yield backend
    backend.gate.set()


@pytest.fixture(params=[StorageWorkers, DeferredWorkers])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[WorkersBase] = []

    def build(
        plan_page: PlanPage | None = None, max_requests: int = 16, capacity_bytes: int = 1 << 20
    ) -> WorkersBase:
        backend = MemoryBackend(capacity_bytes)
        workers = request.param(backend, plan_page=plan_page, max_requests=max_requests)
        made.append(workers)
        return workers

    yield build
    for workers in made:
        workers.check_integrity()
        assert workers.close(LONG_S)


def ended(workers: WorkersBase) -> list[StorageEnding]:
    """One step of the caller: what runs ends, then it is collected."""
    assert workers.wait_all(LONG_S)
    endings = workers.collect()
    workers.check_integrity()
    return endings


def planned(faults: dict[tuple[Kind, int], PagePlan]) -> PlanPage:
    by_key = {(str(kind), key_of(number)): plan for (kind, number), plan in faults.items()}
    return lambda site, key: by_key.get((site, key), NO_PAGE_FAULT)


def test_each_kind_answers_page_by_page(make: Make) -> None:
    workers = make()
    assert workers.submit(put(1, 1, 2))
    assert ended(workers) == [StorageEnding(1, Kind.PUT, (True, True))]
    assert workers.submit(exists(2, 1, 3, 2))
    assert workers.submit(get(3, 1, 3, 2))
    assert workers.submit(StorageRequest(4, Kind.EXISTS, (key_of(1),)))
    found = (True, False, True)
    assert ended(workers) == [
        StorageEnding(2, Kind.EXISTS, found),
        StorageEnding(3, Kind.GET, found, (page_of(1), None, page_of(2))),
        StorageEnding(4, Kind.EXISTS, (True,)),
    ]
    assert workers.submit(StorageRequest(5, Kind.REMOVE, (key_of(1), key_of(3))))
    assert ended(workers) == [StorageEnding(5, Kind.REMOVE, (True, False))]
    assert workers.submit(StorageRequest(6, Kind.CLEAR))
    assert ended(workers) == [StorageEnding(6, Kind.CLEAR, ())]
    assert workers.backend.exists([key_of(2)]) == [False]
    assert workers.in_flight == 0


def test_leading_is_what_a_prefix_can_use() -> None:
    assert StorageEnding(1, Kind.GET, (True, True, False, True)).leading == 2
    assert StorageEnding(1, Kind.GET, (False,)).leading == 0
    assert StorageEnding(1, Kind.GET, (True, True)).leading == 2


def test_the_number_of_open_requests_is_bounded(make: Make) -> None:
    workers = make(max_requests=2)
    assert workers.submit(put(1, 1))
    assert workers.submit(put(2, 2))
    assert workers.room == 0
    assert not workers.submit(put(3, 3))
    assert [ending.ticket for ending in ended(workers)] == [1, 2]
    assert workers.submit(put(3, 3))
    assert [ending.ticket for ending in ended(workers)] == [3]


def test_requests_that_make_no_sense_change_nothing(make: Make) -> None:
    workers = make()
    assert workers.submit(put(1, 1))
    for wrong in (
        put(1, 2),
        StorageRequest(2, Kind.PUT, (key_of(1),)),
        StorageRequest(2, Kind.GET),
        StorageRequest(2, Kind.CLEAR, (key_of(1),)),
        StorageRequest(2, Kind.GET, (b"short",)),
        get(2, *[1] * 5000),
    ):
        with pytest.raises(InternalError):
            workers.submit(wrong)
    assert workers.in_flight == 1
    assert [ending.ticket for ending in ended(workers)] == [1]
    with pytest.raises(InternalError, match="not open"):
        workers.abandon(1)
    assert workers.close(LONG_S)
    with pytest.raises(Misuse, match="closed"):
        workers.submit(put(2, 2))


def test_a_backend_that_is_closed_costs_the_pages(make: Make) -> None:
    workers = make()
    assert workers.backend.close()
    assert workers.submit(get(1, 1))
    (ending,) = ended(workers)
    assert (ending.found, ending.pages) == ((False,), (None,))
    assert "closed" in ending.why


# -- faults ----------------------------------------------------------------------------------------


def test_a_page_that_is_delayed_holds_its_request_only(make: Make) -> None:
    workers = make(planned({(Kind.PUT, 2): PagePlan(delay_collects=2)}))
    assert workers.submit(put(1, 1, 2, 3))
    assert workers.submit(put(2, 4))
    assert [ending.ticket for ending in ended(workers)] == [2]
    assert workers.backend.exists([key_of(n) for n in (1, 2, 3)]) == [True, False, True]
    assert ended(workers) == []
    assert ended(workers) == [StorageEnding(1, Kind.PUT, (True,) * 3)]


def test_what_hangs_ends_after_heal_or_when_it_is_abandoned(make: Make) -> None:
    hang = PagePlan(delay_collects=None)
    workers = make(planned({(Kind.PUT, 2): hang, (Kind.GET, 2): hang}))
    assert workers.submit(put(1, 1, 2))
    assert workers.submit(get(2, 1, 2))
    for _ in range(3):
        assert ended(workers) == []
    ending = workers.abandon(2)
    assert ending.found == (True, False)
    assert ending.pages == (page_of(1), None)
    assert ending.why == "abandoned"
    assert workers.in_flight == 1
    workers.heal()
    assert ended(workers) == [StorageEnding(1, Kind.PUT, (True, True))]


def test_fail_miss_and_corrupt(make: Make) -> None:
    workers = make(
        planned(
            {
                (Kind.PUT, 2): PagePlan(ok=False),
                (Kind.EXISTS, 1): PagePlan(miss=True),
                (Kind.GET, 3): PagePlan(miss=True),
                (Kind.GET, 4): PagePlan(corrupt=True),
            }
        )
    )
    assert workers.submit(put(1, 1, 2, 3, 4))
    why = "failed by the fault plan"
    assert ended(workers) == [StorageEnding(1, Kind.PUT, (True, False, True, True), why=why)]
    assert workers.submit(exists(2, 1, 3))
    assert ended(workers) == [StorageEnding(2, Kind.EXISTS, (False, True))]
    assert workers.submit(get(3, 1, 3, 4))
    assert ended(workers) == [
        StorageEnding(3, Kind.GET, (True, False, False), (page_of(1), None, None))
    ]
    assert workers.backend.counters["wrong"] == 1
    assert workers.backend.spoils is None


def test_a_plan_that_raises_leaves_nothing_open(make: Make) -> None:
    def plan(site: str, key: bytes) -> PagePlan:
        raise ValueError("no such fault")

    workers = make(plan)
    with pytest.raises(ValueError, match="no such fault"):
        workers.submit(put(1, 1, 2))
    assert workers.in_flight == 0
    assert ended(workers) == []


def test_deferred_does_nothing_before_it_is_collected() -> None:
    workers = DeferredWorkers(MemoryBackend(1 << 20))
    workers.submit(put(1, 1))
    assert workers.backend.exists([key_of(1)]) == [False]
    assert len(workers.collect()) == 1
    assert workers.backend.exists([key_of(1)]) == [True]


# -- threads ---------------------------------------------------------------------------------------


def test_only_threads_call_and_endings_keep_their_order(gated: Gated) -> None:
    workers = StorageWorkers(gated, num_threads=2)
    workers.submit(get(1, 1))  # hangs at the gate
    assert gated.entered.acquire(timeout=LONG_S)
    for ticket in range(2, 8):
        workers.submit(exists(ticket, 1))  # overtake it on the other thread
    wait_for(lambda: not workers._desk.waiting)
    assert workers.in_flight == 7
    seen = [ending.ticket for ending in until(workers, 6)]
    assert seen == [2, 3, 4, 5, 6, 7]
    gated.gate.set()
    assert [ending.ticket for ending in until(workers, 1)] == [1]
    assert threading.current_thread().name not in gated.threads
    assert workers.close(LONG_S)


def test_small_puts_share_a_batch_and_large_requests_are_cut(gated: Gated) -> None:
    workers = StorageWorkers(gated, num_threads=1)
    workers.submit(put(1, 1))
    assert gated.entered.acquire(timeout=LONG_S)  # the others wait behind it
    for ticket in range(2, 12):
        workers.submit(put(ticket, 10 * ticket, 10 * ticket + 1))
    workers.submit(get(20, *range(CALL_PAGES + 5)))
    gated.gate.set()
    endings = until(workers, 12)
    assert gated.batches == [1, 20, CALL_PAGES, 5]
    assert [ending.ticket for ending in endings] == [*range(1, 12), 20]
    assert all(all(ending.found) for ending in endings[:-1])
    assert [n for n, one in enumerate(endings[-1].found) if one] == [1, 20, 21, 30, 31]
    assert workers.close(LONG_S)


def test_a_hung_call_is_given_up_and_others_go_on(gated: Gated) -> None:
    workers = StorageWorkers(gated, num_threads=1, call_timeout_s=0.05, max_abandoned=2)
    workers.submit(get(1, 1))
    workers.submit(exists(2, 1))
    first, second = until(workers, 2)
    assert (first.found, first.pages) == ((False,), (None,))
    assert "no answer within 0.05 s" in first.why
    assert second == StorageEnding(2, Kind.EXISTS, (False,))
    # The second and the third hang too: then there is no thread left, and nothing is taken.
    for ticket in (3, 4):
        assert workers.submit(get(ticket, 1))
        (ending,) = until(workers, 1)
        assert "no answer" in ending.why
    assert not workers.submit(exists(5, 1))
    assert threading.active_count() < 20
    # Once the storage answers again, it is used again; what came late is dropped.
    gated.gate.set()
    wait_for(lambda: workers.submit(exists(6, 1)))
    (ending,) = until(workers, 1)
    assert ending == StorageEnding(6, Kind.EXISTS, (False,))
    assert workers.num_abandoned_ever == 3
    assert workers.close(LONG_S)


def test_waiting_requests_fail_when_every_thread_hangs(gated: Gated) -> None:
    workers = StorageWorkers(gated, num_threads=1, call_timeout_s=0.05, max_abandoned=0)
    for ticket in range(1, 4):
        assert workers.submit(get(ticket, 1))
    endings = until(workers, 3)
    assert ["no answer" in endings[0].why, *("hangs" in e.why for e in endings[1:])] == [True] * 3
    gated.gate.set()
    assert workers.close(LONG_S)


def test_an_abandoned_request_is_taken_back_or_its_answer_dropped(gated: Gated) -> None:
    workers = StorageWorkers(gated, num_threads=1)
    workers.submit(put(1, 1))
    assert gated.entered.acquire(timeout=LONG_S)
    workers.submit(put(2, 2))
    assert workers.abandon(1).found == (False,)
    assert workers.abandon(2).found == (False,)
    assert workers.in_flight == 0
    assert not workers._desk.waiting
    gated.gate.set()
    assert workers.wait_all(LONG_S)
    assert workers.collect() == []
    assert gated.batches == [1]
    assert workers.close(LONG_S)


def test_close_is_bounded_and_says_what_still_runs(gated: Gated) -> None:
    workers = StorageWorkers(gated, num_threads=1)
    workers.submit(put(1, 1))
    assert gated.entered.acquire(timeout=LONG_S)
    started = time.monotonic()
    assert not workers.close(0.05)
    assert time.monotonic() - started < 5
    assert not gated.close(0.05), "the backend is not taken from under a call"
    gated.gate.set()
    assert workers.close(LONG_S)
    assert gated.close(LONG_S)


def test_workers_that_nobody_closed_end_their_threads() -> None:
    workers = StorageWorkers(MemoryBackend(1000))
    threads = [lane.thread for lane in workers._lanes]
    del workers
    gc.collect()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


FAULTS = [
    NO_PAGE_FAULT,
    NO_PAGE_FAULT,
    PagePlan(delay_collects=1),
    PagePlan(delay_collects=None),
    PagePlan(ok=False),
    PagePlan(corrupt=True),
    PagePlan(miss=True, delay_collects=1),
]
NUMBERS = st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True)


class Alike(RuleBasedStateMachine):
    """No two open requests name one page: which of them comes first is nobody's promise."""

    def __init__(self) -> None:
        super().__init__()
        self.plan: list[PagePlan] = []
        self.ticket = 0
        self.both: list[WorkersBase] = [
            StorageWorkers(MemoryBackend(1 << 20), plan_page=self.next_plan(0)),
            DeferredWorkers(MemoryBackend(1 << 20), plan_page=self.next_plan(1)),
        ]
        self.at = [0, 0]

    def next_plan(self, which: int) -> PlanPage:
        def plan(site: str, key: bytes) -> PagePlan:
            self.at[which] += 1
            return self.plan[self.at[which] - 1]

        return plan

    def open_keys(self) -> set[bytes]:
        requests = [opened.request for opened in self.both[0]._open.values()]
        return {one.key(index) for one in requests for index in range(one.num_pages)}

    @rule(
        make=st.sampled_from([put, get, exists]),
        numbers=NUMBERS,
        chosen=st.lists(st.sampled_from(FAULTS), min_size=5, max_size=5),
    )
    def submit(
        self,
        make: Callable[..., StorageRequest],
        numbers: list[int],
        chosen: list[PagePlan],
    ) -> None:
        numbers = [number for number in numbers if key_of(number) not in self.open_keys()]
        if not numbers:
            return
        self.plan, self.at = chosen, [0, 0]
        self.ticket += 1
        assert [one.submit(make(self.ticket, *numbers)) for one in self.both] == [True, True]
        self.collect()

    @rule()
    def collect(self) -> None:
        threaded, deferred = (ended(workers) for workers in self.both)
        assert threaded == deferred

    @rule()
    def heal(self) -> None:
        for workers in self.both:
            workers.heal()
        self.collect()

    @rule(which=st.integers(0, 9))
    def abandon(self, which: int) -> None:
        open_now = list(self.both[0]._open)
        if open_now:
            ticket = open_now[which % len(open_now)]
            one, other = (workers.abandon(ticket) for workers in self.both)
            assert one == other

    @invariant()
    def nothing_wrong_is_stored_or_kept_open(self) -> None:
        assert self.both[0].in_flight == self.both[1].in_flight
        for workers in self.both:
            for number in range(6):
                if key_of(number) in self.open_keys():
                    continue
                assert workers.backend.get([key_of(number)])[0] in (None, page_of(number))

    def teardown(self) -> None:
        for workers in self.both:
            workers.heal()
        self.collect()
        assert self.both[0].in_flight == 0
        assert all(workers.close(LONG_S) for workers in self.both)


def test_both_kinds_end_alike_under_the_same_faults() -> None:
    run_state_machine_as_test(Alike)


def until(workers: StorageWorkers, number: int) -> list[StorageEnding]:
    """Collect until so many requests have ended."""
    endings: list[StorageEnding] = []

    def enough() -> bool:
        endings.extend(workers.collect())
        return len(endings) >= number

    wait_for(enough)
    return sorted(endings, key=lambda ending: ending.ticket) if number > 1 else endings


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not done():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.002)

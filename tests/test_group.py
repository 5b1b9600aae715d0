"""One conformance suite for every kind of group, and what only real processes can show.

A scenario is a function that every rank runs with a :class:`Bench`; a crew is a set of ranks that
can run one. A simulated group joins by adding its crew to ``CREWS``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self

import numpy as np
import pytest
import torch
import torch.distributed as dist  # noqa: TID251  only to see that it stays untouched
from numpy.typing import NDArray

from kvpact.consensus.core.errors import (
    KvpactError,
    Misuse,
    PeerError,
    PeerLost,
    ResourceError,
    StoreSilent,
)
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.epoch.report import LastSeen
from kvpact.consensus.step.step import StepLimits, Stepper
from kvpact.consensus.transport import bounded
from kvpact.consensus.transport import gloo as group_module
from kvpact.consensus.transport.gloo import (
    MAX_OUTSTANDING,
    GlooGroup,
    Group,
    NcclGroup,
    Work,
    open_tcp_store,
    serve_tcp_store,
)
from kvpact.consensus.transport.store import NamedStore, Store, TcpStore
from kvpact.harness.rank.launch import Launch, RankContext
from kvpact.harness.rank.sim import SimClock, SimGroup, SimNet
from kvpact.harness.rank.store import MemoryStore
from tests.closing_ranks import Nothing
from tests.foreign import Engine, Owner, make_manager

pytestmark = pytest.mark.ranks

WIDTH = 550
NUM_RANKS = 3
LONG_S = 20.0


class Bench(Protocol):
    """What a scenario gets, in each rank."""

    rank: int
    store: Store

    def meeting(self) -> Store:
        """A store that all ranks share, for this scenario alone."""
        ...

    def form(
        self, ranks: Sequence[int], *, name: str = "", width: int = WIDTH, timeout_s: float = LONG_S
    ) -> Group:
        """A new group; ``name`` where one scenario forms several."""
        ...

    def reach(self, mark: str) -> None:
        """Tell all ranks that this one has come to ``mark``."""
        ...

    def until(self, mark: str, rank: int) -> None:
        """Wait until ``rank`` has come to ``mark``."""
        ...


class Crew(Protocol):
    """Ranks that run scenarios."""

    def run(self, scenario: Callable[[Any], Any], ranks: Sequence[int] = ()) -> list[Any]:
        """Run it on ``ranks`` (default: all); returns what each returned, or raises its error."""
        ...


# ------------------------------------------------------------------------------- the real crews

REAL: dict[str, Any] = {"gloo": GlooGroup, "nccl": NcclGroup}
#: Several ranks on one device, where there are not enough for all.
SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"


def _lacks_nccl(num_ranks: int) -> str:
    """Why NCCL groups cannot be tried here; empty: they can."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return "no CUDA device, or a torch without NCCL"
    cuda: Any = torch.cuda
    if torch.cuda.device_count() < num_ranks and cuda.nccl.version() < (2, 30):
        return f"{num_ranks} ranks need {num_ranks} CUDA devices, or NCCL 2.30 to share one"
    return ""


class RealBench:
    """A bench in a real process, whose groups are of ``kind``: gloo or NCCL."""

    def __init__(self, context: RankContext, kind: str, scenario: str, serial: int) -> None:
        self.rank = context.rank
        self._kind = kind
        self.store: Store = TcpStore(context.store_host, context.store_port)
        self._raw = open_tcp_store(context.store_host, context.store_port, 10.0)
        self._name = f"{scenario}.{serial}"

    def form(
        self, ranks: Sequence[int], *, name: str = "", width: int = WIDTH, timeout_s: float = LONG_S
    ) -> Group:
        where: dict[str, Any] = {}
        if self._kind == "nccl":
            os.environ.update({SHARED: "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
            where["device_index"] = self.rank % torch.cuda.device_count()
        return REAL[self._kind].form(
            self._raw,
            f"{self._name}.{name}",
            ranks,
            self.rank,
            width,
            timeout_s,
            form_timeout_s=LONG_S,
            **where,
        )

    def meeting(self) -> Store:
        return NamedStore(self.store, self._name)

    def reach(self, mark: str) -> None:
        self.store.set(f"{self._name}/{mark}/{self.rank}", b"1")

    def until(self, mark: str, rank: int) -> None:
        end_s = time.monotonic() + LONG_S
        while self.store.get(f"{self._name}/{mark}/{rank}") is None:
            assert time.monotonic() < end_s, f"rank {rank} never came to {mark}"
            time.sleep(0.002)


def run_scenarios(context: RankContext, args: Any) -> None:
    for _ in range(1_000):
        name, serial = context.receive(100.0)
        if name == "end":
            return
        context.send(globals()[name](RealBench(context, args, name, serial)))


class RealCrew:
    """Real ranks that stay for many scenarios: starting one costs two seconds of torch."""

    def __init__(self, kind: str) -> None:
        scenarios = f"{__name__}:run_scenarios"
        self._ranks = Launch(scenarios, NUM_RANKS, [kind] * NUM_RANKS, deadline_s=110.0)
        self._serial = 0

    def __enter__(self) -> Self:
        self._ranks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for rank in range(NUM_RANKS):
                with contextlib.suppress(KvpactError):
                    self._ranks.send(rank, ["end", 0])
            report = self._ranks.join()
        finally:
            self._ranks.__exit__(None, None, None)
        assert [rank.exit_code for rank in report.ranks] == [0] * NUM_RANKS, report

    def run(self, scenario: Callable[[Any], Any], ranks: Sequence[int] = ()) -> list[Any]:
        members = list(ranks) or list(range(NUM_RANKS))
        self._serial += 1
        for rank in members:
            self._ranks.send(rank, [scenario.__name__, self._serial])
        return [self._ranks.receive(rank, 90.0) for rank in members]


# -------------------------------------------------------------------------- the simulated crew


class RealTime(SimClock):
    """A simulated network whose seconds are those of the machine."""

    @property
    def now_s(self) -> float:
        return time.monotonic()

    @now_s.setter
    def now_s(self, value: float) -> None:
        """It goes on by itself."""


class BlockingGroup(SimGroup):
    """A simulated group whose works can be waited for: a rank a thread."""

    def __init__(self, guard: threading.RLock, timeout_s: float, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.guard = guard
        self.timeout_s = timeout_s
        self.is_broken = False

    def leave(self) -> None:
        """Its connections are closed, for good."""
        self._net.leave(self.rank, self._epoch)

    def min(self, vector: NDArray[np.int64]) -> BlockingWork:
        with self.guard:
            return BlockingWork(self, super().min(vector))


class BlockingWork:
    """Breaks its group for good once the group's own timeout has passed, as gloo does."""

    def __init__(self, group: BlockingGroup, work: Work) -> None:
        self._group = group
        self._work = work
        self._end_s = time.monotonic() + group.timeout_s

    def done(self) -> bool:
        with self._group.guard:
            if self._group.is_broken:
                raise PeerLost("the group is broken")
            if self._work.done():
                return True
            if time.monotonic() >= self._end_s:
                self._group.is_broken = True
                self._group.leave()
                raise PeerLost("the group's timeout has passed")
            return False

    def wait(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.0005)
        return True

    def result(self) -> NDArray[np.int64]:
        self.done()
        with self._group.guard:
            return self._work.result()


class SimBench:
    """A bench in a thread of this process."""

    def __init__(self, crew: SimCrew, rank: int, marks: dict[tuple[str, int], bool]) -> None:
        self.rank = rank
        self.store: Store = crew.store
        self._crew = crew
        self._marks = marks

    def meeting(self) -> Store:
        return self._crew.store

    def form(
        self, ranks: Sequence[int], *, name: str = "", width: int = WIDTH, timeout_s: float = LONG_S
    ) -> Group:
        net = self._crew.net(name, len(ranks), width)
        return BlockingGroup(self._crew.guard, timeout_s, net, self.rank, ranks=list(ranks))

    def reach(self, mark: str) -> None:
        self._marks[mark, self.rank] = True

    def until(self, mark: str, rank: int) -> None:
        end_s = time.monotonic() + LONG_S
        while (mark, rank) not in self._marks:
            assert time.monotonic() < end_s, f"rank {rank} never came to {mark}"
            time.sleep(0.002)


class SimCrew:
    """Simulated ranks, each on a thread, over one network a group."""

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self.store = MemoryStore()
        self._nets: dict[str, SimNet] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def net(self, name: str, size: int, width: int) -> SimNet:
        with self.guard:
            return self._nets.setdefault(name, SimNet(size, width, RealTime()))

    def run(self, scenario: Callable[[Any], Any], ranks: Sequence[int] = ()) -> list[Any]:
        members = list(ranks) or list(range(NUM_RANKS))
        self._nets.clear()
        self.store = MemoryStore()
        marks: dict[tuple[str, int], bool] = {}
        found: dict[int, Any] = {}
        errors: list[BaseException] = []

        def live(rank: int) -> None:
            try:
                found[rank] = scenario(SimBench(self, rank, marks))
            except BaseException as error:  # noqa: BLE001  raised again below
                errors.append(error)

        threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * LONG_S)
        if errors:
            raise errors[0]
        return [found[rank] for rank in members]


CREWS: dict[str, Callable[[], contextlib.AbstractContextManager[Crew]]] = {
    "gloo": lambda: RealCrew("gloo"),
    "nccl": lambda: RealCrew("nccl"),
    "sim": SimCrew,
}
NCCL = pytest.param("nccl", marks=pytest.mark.gpu)


@pytest.fixture(scope="module", params=["gloo", NCCL, "sim"])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    if request.param == "nccl" and (reason := _lacks_nccl(NUM_RANKS)):
        pytest.skip(reason)
    with CREWS[request.param]() as ranks:
        yield ranks


# ----------------------------------------------------------------------------------- scenarios


def _vector(rank: int, round_: int, width: int = WIDTH) -> NDArray[np.int64]:
    """Numbers of all sizes and both signs, different on each rank and in each round."""
    values = np.random.default_rng([rank, round_]).integers(-(2**62), 2**62, width)
    values[0], values[1] = 2**63 - 1 - rank, -(2**63) + rank
    return values


def _expected(ranks: Sequence[int], round_: int, width: int = WIDTH) -> NDArray[np.int64]:
    return np.min([_vector(rank, round_, width) for rank in ranks], axis=0)


def _is_right(group: Group, ranks: Sequence[int], round_: int) -> bool:
    """One collective, from start to end, gives the minimum over ``ranks``."""
    vector = _vector(group.rank, round_, group.width)
    work = group.min(vector)
    vector[:] = -1  # it was copied
    return work.wait(LONG_S) and bool(
        (work.result() == _expected(ranks, round_, group.width)).all()
    )


def lag_0(bench: Bench) -> Any:
    group = bench.form(range(NUM_RANKS))
    right = [_is_right(group, range(NUM_RANKS), round_) for round_ in range(20)]
    work = group.min(_vector(bench.rank, 99))
    assert work.wait(LONG_S)
    assert work.done()
    assert work.wait(0.0)
    with pytest.raises(ValueError, match="read-only"):
        work.result()[0] = 1
    group.close()
    return [all(right), group.rank, group.size, group.width, dist.is_initialized()]


def outstanding_in_reverse(bench: Bench) -> bool:
    group = bench.form(range(NUM_RANKS))
    works = [group.min(_vector(bench.rank, round_)) for round_ in range(64)]
    right: list[bool] = []
    for round_ in reversed(range(64)):
        assert works[round_].wait(LONG_S)
        right.append(bool((works[round_].result() == _expected(range(NUM_RANKS), round_)).all()))
    group.close()
    return all(right)


def subset_beside_the_whole(bench: Bench) -> Any:
    whole = bench.form(range(NUM_RANKS), name="whole")
    if bench.rank == 1:
        return [_is_right(whole, range(NUM_RANKS), 5)]
    part = bench.form([0, 2], name="part", width=7)
    right = [
        _is_right(part, [0, 2], 3),
        _is_right(whole, range(NUM_RANKS), 5),
        _is_right(part, [0, 2], 4),
    ]
    assert (part.rank, part.size, part.width) == (bench.rank, 2, 7)
    part.close()
    whole.close()
    return right


def misuse_stays_here(bench: Bench) -> Any:
    """Rank 0 does everything wrong; then all ranks reduce, and nobody has noticed."""
    group = bench.form([0, 1])
    right = [_is_right(group, [0, 1], 0)]
    errors: list[str] = []
    if bench.rank == 0:
        good = _vector(0, 1)
        wrong: list[Any] = [
            good[:-1],
            np.append(good, 1),
            good.reshape(2, -1),
            good.astype(np.float64),
            good.astype(np.int32),
            good.astype(">i8"),
            good.tolist(),
            torch.from_numpy(good),
        ]
        for vector in wrong:
            with pytest.raises(Misuse):
                group.min(vector)

        def elsewhere() -> None:
            try:
                group.min(good)
            except Misuse as error:
                errors.append(str(error))

        thread = threading.Thread(target=elsewhere, name="elsewhere")
        thread.start()
        thread.join()
        work = group.min(_vector(0, 1))
        with pytest.raises(Misuse, match="before the collective is done"):
            work.result()
        bench.reach("done")
        right.append(work.wait(LONG_S) and bool((work.result() == _expected([0, 1], 1)).all()))
    else:
        bench.until("done", 0)
        right.append(_is_right(group, [0, 1], 1))
    right.append(_is_right(group, [0, 1], 2))
    group.close()
    group.close()
    with pytest.raises(Misuse, match="closed"):
        group.min(_vector(bench.rank, 3))
    return [right, errors]


def late_rank(bench: Bench) -> Any:
    """A wait ends within its bound, cancels nothing, and the group goes on."""
    group = bench.form([0, 1])
    if bench.rank == 1:
        bench.until("waited", 0)
        return [_is_right(group, [0, 1], 0), _is_right(group, [0, 1], 1)]
    work = group.min(_vector(0, 0))
    waits_s: list[float] = []
    for timeout_s in (-1.0, 0.0, 0.0005, 0.001, 0.2):
        began_s = time.monotonic()
        assert not work.wait(timeout_s)
        waits_s.append(time.monotonic() - began_s - max(0.0, timeout_s))
    assert not work.done()
    bench.reach("waited")
    right = work.wait(LONG_S) and bool((work.result() == _expected([0, 1], 0)).all())
    assert max(waits_s) < 5.0, waits_s
    return [right, _is_right(group, [0, 1], 1)]


def never_comes(bench: Bench) -> Any:
    """Beyond the group's own timeout the group breaks, for good."""
    group = bench.form([0, 1], timeout_s=0.4)
    if bench.rank == 1:
        bench.until("lost", 0)
        with pytest.raises(PeerLost):
            group.min(_vector(1, 0)).wait(LONG_S)
        return None
    began_s = time.monotonic()
    first, second = group.min(_vector(0, 0)), group.min(_vector(0, 1))
    with pytest.raises(PeerLost):
        first.wait(LONG_S)
    took_s = time.monotonic() - began_s
    for work in (first, second, group.min(_vector(0, 2))):
        with pytest.raises(PeerLost):
            work.wait(LONG_S)
        with pytest.raises(PeerLost):
            work.done()
        with pytest.raises(PeerLost):
            work.result()
    bench.reach("lost")
    group.close()
    return took_s


def close_with_outstanding(bench: Bench) -> Any:
    group = bench.form([0, 1], name="first", timeout_s=2.0)
    took_s = 0.0
    if bench.rank == 0:
        works = [group.min(_vector(0, round_)) for round_ in range(3)]
        began_s = time.monotonic()
        group.close()
        group = bench.form([0], name="alone")  # neither does a new group wait for the old one
        assert _is_right(group, [0], 0)
        group.close()
        took_s = time.monotonic() - began_s
        del works
        bench.reach("closed")
        assert bounded.drain(LONG_S)
    else:
        bench.until("closed", 0)
        bench.until("drained", 0)
        with pytest.raises(PeerLost):
            group.min(_vector(1, 0)).wait(LONG_S)
    bench.reach("drained")
    bench.until("drained", 1 - bench.rank)
    again = bench.form([0, 1], name="second")
    assert _is_right(again, [0, 1], 7)
    again.close()
    return took_s


def too_many_outstanding(bench: Bench) -> bool:
    group = bench.form([0, 1], width=2)
    works = []
    if bench.rank == 0:
        works = [group.min(_vector(0, round_, 2)) for round_ in range(MAX_OUTSTANDING)]
        with pytest.raises(ResourceError, match="in flight"):
            group.min(_vector(0, 0, 2))
        bench.reach("full")
    else:
        bench.until("full", 0)
        works = [group.min(_vector(1, round_, 2)) for round_ in range(MAX_OUTSTANDING)]
    right = all(work.wait(LONG_S) for work in works) and _is_right(group, [0, 1], 1)
    group.close()
    return right


# --------------------------------------------------- ranks that do not do what all must do


def _steps(
    bench: Bench, ranks: Sequence[int], before: Callable[[Stepper, int], int], **limits: float
) -> Any:
    """Eight steps; ``before(stepper, iteration)`` is this rank's misdeed, and its iteration.

    What it ends with: the error's class, ranks, field, and the steps settled.
    """
    manager = make_manager(bench.rank, Owner({"a": 9}))
    group = bench.form(ranks, width=manager.schema.width)
    store = bench.meeting()
    stepper = Stepper(
        manager,
        group,
        store,
        Engine(manager),
        limits=StepLimits(deadline_s=3.0, grace_s=0.5, slice_s=0.05, **limits),
        locator=Nowhere(),
        carrier=Baggage(manager),
    )
    try:
        for iteration in range(1, 9):
            stepper.run(before(stepper, iteration))
    except PeerError as error:
        field = getattr(error, "field", "")
        return [type(error).__name__, list(error.ranks), field, manager.settled_step]
    finally:
        group.close()
    return ["", [], "", manager.settled_step]


class Baggage(Nothing):
    """Nothing is carried into an epoch that is begun by a call."""

    def __init__(self, manager: TransactionManager) -> None:
        self._manager = manager

    def restart(self, epoch: int, usable: dict[str, int]) -> None:
        self._manager.begin_epoch(epoch, usable)


class Nowhere:
    """Nothing is known of anybody."""

    def is_gone(self, rank: int) -> bool:
        return False

    def is_paused(self, rank: int) -> bool:
        return False

    def last_seen(self, ranks: Sequence[int], *, asks: bool = True) -> dict[int, LastSeen | None]:
        return dict.fromkeys(ranks)


def all_in_step(bench: Bench) -> Any:
    return _steps(bench, range(NUM_RANKS), lambda _, iteration: iteration)


def one_iteration_ahead(bench: Bench) -> Any:
    def ahead(_: Stepper, iteration: int) -> int:
        return iteration + (bench.rank == 1 and iteration >= 5)

    return _steps(bench, range(NUM_RANKS), ahead)


def one_posts_twice(bench: Bench) -> Any:
    """A collective more: the next ballot of rank 2 meets the others' ballot after it."""

    def twice(stepper: Stepper, iteration: int) -> int:
        if bench.rank == 2 and iteration == 5:
            stepper.manager.step += 1
        return iteration

    return _steps(bench, range(NUM_RANKS), twice)


def somebody_elses_collective(bench: Bench) -> Any:
    """Rank 0 lets a vector into the group that is no ballot: it pairs with the others' step 5."""

    def intrude(stepper: Stepper, iteration: int) -> int:
        if bench.rank == 0 and iteration == 5:
            stepper.group.min(np.full(stepper.group.width, 7, dtype=np.int64))
        return iteration

    return _steps(bench, range(NUM_RANKS), intrude)


def another_schema(bench: Bench) -> Any:
    def other(stepper: Stepper, iteration: int) -> int:
        if bench.rank == 0 and iteration == 3:
            stepper.manager._schema_digest += 1
        return iteration

    return _steps(bench, range(NUM_RANKS), other)


def another_epoch(bench: Bench) -> Any:
    def newer(stepper: Stepper, iteration: int) -> int:
        if bench.rank == 2 and iteration == 4:
            stepper.renew({"a": 9})
        return iteration

    return _steps(bench, range(NUM_RANKS), newer)


def one_never_comes_back(bench: Bench) -> Any:
    def stay_away(_: Stepper, iteration: int) -> int:
        if bench.rank == 1 and iteration == 5:
            bench.until("over", 0)
        return iteration

    found = _steps(bench, range(NUM_RANKS), stay_away)
    bench.reach("over")
    return found


def test_ranks_in_step_agree(crew: Crew) -> None:
    assert crew.run(all_in_step) == [["", [], "", 8]] * NUM_RANKS


@pytest.mark.parametrize(
    "scenario, rank, field, settled",
    [
        (one_iteration_ahead, 1, "iteration", 4),
        (one_posts_twice, 2, "step", 4),
        (another_schema, 0, "schema", 2),
        (another_epoch, 2, "epoch", 3),
    ],
)
def test_a_rank_out_of_step_is_named_by_all(
    crew: Crew, scenario: Callable[[Bench], Any], rank: int, field: str, settled: int
) -> None:
    found = crew.run(scenario)
    assert [one[:3] for one in found] == [["Divergence", [rank], field]] * NUM_RANKS
    there = [one[3] for number, one in enumerate(found) if number != rank]
    assert there == [settled] * (NUM_RANKS - 1), "nothing of the wrong ballot was settled"


def test_what_is_no_ballot_decides_nothing(crew: Crew) -> None:
    found = crew.run(somebody_elses_collective)
    assert [one[0] for one in found] == ["Divergence"] * NUM_RANKS
    assert [one[3] for one in found] == [4] * NUM_RANKS


def test_a_rank_that_skips_a_collective_for_good_is_named_by_all(crew: Crew) -> None:
    """The one that stayed away finds the seal when it comes, and raises the same."""
    found = crew.run(one_never_comes_back)
    assert found == [["RankStalled", [1], "", 4]] * NUM_RANKS


def test_min_is_right_without_lag(crew: Crew) -> None:
    assert crew.run(lag_0) == [[True, rank, NUM_RANKS, WIDTH, False] for rank in range(NUM_RANKS)]


def test_min_is_right_with_64_outstanding_waited_in_reverse(crew: Crew) -> None:
    assert crew.run(outstanding_in_reverse) == [True] * NUM_RANKS


def test_a_subset_and_the_whole_do_not_disturb_each_other(crew: Crew) -> None:
    assert crew.run(subset_beside_the_whole) == [[True] * 3, [True], [True] * 3]


def test_misuse_is_found_here_and_the_peers_see_nothing(crew: Crew) -> None:
    (right, errors), (peer_right, _) = crew.run(misuse_stays_here, [0, 1])
    assert right == peer_right == [True] * 3
    assert len(errors) == 1
    assert "not elsewhere" in errors[0]


def test_a_late_rank_costs_a_bounded_wait_and_nothing_else(crew: Crew) -> None:
    assert crew.run(late_rank, [0, 1]) == [[True, True], [True, True]]


def test_a_rank_that_never_comes_is_lost_at_the_groups_timeout(crew: Crew) -> None:
    took_s, _ = crew.run(never_comes, [0, 1])
    assert 0.3 < took_s < LONG_S / 2


def test_close_with_outstanding_works_blocks_nobody(crew: Crew) -> None:
    took_s, _ = crew.run(close_with_outstanding, [0, 1])
    assert took_s < 1.5  # 5 ms; the release itself waits for the group's timeout of 2 s


def test_collectives_in_flight_have_a_limit(crew: Crew) -> None:
    assert crew.run(too_many_outstanding, [0, 1]) == [True, True]


# --------------------------------------------------------------- real: killed and stopped ranks


def meet_signals(context: RankContext, args: Any) -> Any:
    """Rank 2 is stopped for a while, then killed with collectives in flight; then rank 1 is."""
    bench = RealBench(context, args, "signals", 0)
    # Who dies is noticed by gloo at once, and by NCCL only when the group's timeout has passed.
    timeout_s = LONG_S if args == "gloo" else LONG_S / 4
    group = bench.form(range(3), name="all", timeout_s=timeout_s)
    assert _is_right(group, range(3), 0)
    context.send("formed")
    assert context.receive(LONG_S) == "rank 2 is stopped"
    work = group.min(_vector(bench.rank, 1))
    stopped_waits = [work.wait(0.1) for _ in range(2)]
    context.send(stopped_waits)
    assert work.wait(LONG_S)
    went_on = bool((work.result() == _expected(range(3), 1)).all())
    if bench.rank == 2:
        context.send("went on")
        time.sleep(60.0)
    works = [group.min(_vector(bench.rank, round_)) for round_ in range(2, 6)]
    context.send("in flight")
    assert context.receive(LONG_S) == "rank 2 is killed"
    _all_lost(works)
    group.close()

    pair = bench.form([0, 1], name="pair", timeout_s=timeout_s)
    assert _is_right(pair, [0, 1], 6)
    context.send("paired")
    if bench.rank == 1:
        time.sleep(60.0)
    assert context.receive(LONG_S) == "rank 1 is killed"
    _all_lost([pair.min(_vector(0, 7))])
    return went_on


def _all_lost(works: Sequence[Any]) -> None:
    began_s = time.monotonic()
    for work in works:
        with pytest.raises(PeerLost):
            work.wait(LONG_S)
    assert time.monotonic() - began_s < LONG_S / 2  # 3 ms on an idle machine


@pytest.mark.parametrize("kind", ["gloo", NCCL])
def test_stopped_and_killed_ranks(kind: str) -> None:
    if kind == "nccl" and (reason := _lacks_nccl(3)):
        pytest.skip(reason)
    with Launch(f"{__name__}:meet_signals", 3, [kind] * 3, grace_s=LONG_S) as ranks:
        assert [ranks.receive(rank, 90.0) for rank in range(3)] == ["formed"] * 3
        ranks.signal(2, signal.SIGSTOP)
        for rank in range(3):
            ranks.send(rank, "rank 2 is stopped")
        assert [ranks.receive(rank, LONG_S) for rank in (0, 1)] == [[False, False]] * 2
        ranks.signal(2, signal.SIGCONT)
        assert ranks.receive(2, LONG_S)  # its own waits: it may well be in time
        assert ranks.receive(2, LONG_S) == "went on"
        assert [ranks.receive(rank, LONG_S) for rank in (0, 1)] == ["in flight"] * 2
        ranks.signal(2, signal.SIGKILL)
        for rank in (0, 1):
            ranks.send(rank, "rank 2 is killed")
        assert [ranks.receive(rank, LONG_S) for rank in (0, 1)] == ["paired"] * 2
        ranks.signal(1, signal.SIGKILL)
        ranks.send(0, "rank 1 is killed")
        report = ranks.join()
    assert report.ranks[0].error is None, report.ranks[0].output
    assert (report.ranks[0].ended, report.ranks[0].result) == ("returned", True)
    assert [rank.exit_code for rank in report.ranks] == [0, -signal.SIGKILL, -signal.SIGKILL]


def leave_untidily(context: RankContext, args: Any) -> None:
    """Return with a collective in flight, in an open or closed group, and a hanging store call."""
    bench = RealBench(context, "gloo", "untidy", 0)
    groups = [bench.form([0, 1], name=str(number), timeout_s=80.0) for number in range(2)]
    groups[bench.rank].min(_vector(bench.rank, 0))
    bench.reach("posted")
    bench.until("posted", 1 - bench.rank)
    if bench.rank == 0:
        for group in groups:
            group.close()
    deaf = socket.create_server(("127.0.0.1", 0))  # lets everyone in and says nothing
    store = TcpStore("127.0.0.1", deaf.getsockname()[1], call_timeout_s=0.1)
    with pytest.raises(StoreSilent):
        store.get("a")
    globals()["kept"] = (groups, deaf)  # until the interpreter ends
    context.send("leaving")


def test_the_end_of_a_process_waits_for_no_peer_and_is_no_crash() -> None:
    with Launch(f"{__name__}:leave_untidily", 2, deadline_s=100.0) as ranks:
        assert [ranks.receive(rank, 90.0) for rank in range(2)] == ["leaving"] * 2
        began_s = time.monotonic()
        report = ranks.join()
        took_s = time.monotonic() - began_s
    assert report.results() == [None, None]
    assert [rank.exit_code for rank in report.ranks] == [0, 0], report.ranks[0].output
    assert took_s < 40.0  # about 3 s; destroying a group would wait for its timeout of 80 s


# ------------------------------------------------------------------- gloo: forming, in one process


@pytest.fixture(scope="module")
def served() -> tuple[Any, int]:
    return serve_tcp_store()


@pytest.fixture
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def _form_in_threads(
    port: int, name: str, widths: Sequence[int], num_ranks: int, timeout_s: float
) -> list[GlooGroup | KvpactError]:
    """Form one group in one process, a thread per rank; returns groups or errors by rank."""
    formed: dict[int, GlooGroup | KvpactError] = {}

    def form(rank: int) -> None:
        try:
            formed[rank] = GlooGroup.form(
                open_tcp_store("127.0.0.1", port, 5.0),
                name,
                range(num_ranks),
                rank,
                widths[rank],
                timeout_s,
            )
        except KvpactError as error:
            formed[rank] = error

    threads = [threading.Thread(target=form, args=(rank,)) for rank in range(len(widths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    return [formed[rank] for rank in range(len(widths))]


@pytest.mark.usefixtures("on_loopback")
def test_forming_again_and_again_leaves_nothing_in_the_store(served: tuple[Any, int]) -> None:
    server, port = served
    before = sorted(server.list_keys())
    for number in range(5):
        for group in _form_in_threads(port, f"again.{number}", [4, 4], 2, 10.0):
            assert isinstance(group, GlooGroup)
            group.close()
    assert bounded.drain(10.0)
    assert sorted(server.list_keys()) == before


@pytest.mark.usefixtures("on_loopback")
def test_a_rank_that_does_not_come_to_a_new_group_is_named(served: tuple[Any, int]) -> None:
    began_s = time.monotonic()
    errors = _form_in_threads(served[1], "absent", [4, 4], 3, 0.5)
    assert time.monotonic() - began_s < LONG_S / 2
    for error in errors:
        assert isinstance(error, PeerLost)
        assert error.ranks == (2,)
        assert "ranks [2] did not come" in str(error)


@pytest.mark.usefixtures("on_loopback")
def test_another_width_is_refused_before_the_group_is_formed(served: tuple[Any, int]) -> None:
    errors = _form_in_threads(served[1], "widths", [4, 5], 2, 0.5)
    refused = [error for error in errors if isinstance(error, Misuse)]
    waiting = [error for error in errors if isinstance(error, PeerLost)]
    assert (len(refused), len(waiting)) == (1, 1)  # the second that came, and the first
    assert "width=4" in str(refused[0])
    assert "width=5" in str(refused[0])
    assert waiting[0].ranks == (refused[0].rank,)


@pytest.mark.usefixtures("on_loopback")
def test_a_group_that_is_dropped_is_released(served: tuple[Any, int]) -> None:
    (group,) = _form_in_threads(served[1], "dropped", [4], 1, 5.0)
    assert isinstance(group, GlooGroup)
    work = group.min(np.zeros(4, dtype=np.int64))
    assert work.wait(5.0)
    del group, work
    assert bounded.drain(5.0)


def test_members_are_checked(served: tuple[Any, int]) -> None:
    raw = open_tcp_store("127.0.0.1", served[1], 5.0)
    for ranks, rank, width in [
        ([], 0, 4),
        ([0, 0], 0, 4),
        ([1, 0], 0, 4),
        ([1, 2], 0, 4),
        ([0], 0, 0),
    ]:
        with pytest.raises(Misuse):
            GlooGroup.form(raw, "checked", ranks, rank, width, 1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without CUDA")
def test_nccl_without_cuda_says_so(served: tuple[Any, int]) -> None:
    raw = open_tcp_store("127.0.0.1", served[1], 5.0)
    with pytest.raises(Misuse, match="CUDA"):
        NcclGroup.form(raw, "nccl", [0], 0, 4, 1.0)


class PretendedDevice:
    """Events that pass, and communicators that are aborted, when a test says so."""

    def __init__(self) -> None:
        self.has_passed = False
        self.num_aborts = 0

    def query(self) -> bool:
        return self.has_passed

    def abort(self) -> None:
        self.num_aborts += 1
        self.has_passed = True  # as CUDA does: the stream goes on, with whatever is in the buffer


def _nccl_work(timeout_s: float, arrived: Sequence[int]) -> tuple[PretendedDevice, Any, Any]:
    device = PretendedDevice()
    health = group_module._Health("pretended", len(arrived))
    health.timeout_s, health.process_group = timeout_s, device
    host = torch.tensor([7, 8, *arrived])
    return device, health, group_module._NcclWork(health, host, host, device)


def test_a_collective_of_nccl_is_done_when_every_rank_has_put_something_in() -> None:
    device, health, work = _nccl_work(LONG_S, [0, 0, 0])
    assert not work.done()
    assert not work.wait(0.001)
    with pytest.raises(Misuse, match="before the collective is done"):
        work.result()
    device.has_passed = True
    assert work.wait(0.0)
    assert work.result().tolist() == [7, 8]
    assert not health.is_broken


def test_an_aborted_collective_of_nccl_is_no_result() -> None:
    device, health, work = _nccl_work(LONG_S, [0, 1, 0])
    device.has_passed = True
    for ask in (work.done, work.result):
        with pytest.raises(PeerLost):
            ask()
    assert health.is_broken
    assert work.is_completed(), "the release thread does not wait for it"


def test_a_collective_of_nccl_that_outlives_the_timeout_breaks_its_group() -> None:
    device, health, work = _nccl_work(0.05, [0, 0])
    _, _, other = _nccl_work(LONG_S, [0, 0])
    other._health = health
    with pytest.raises(PeerLost, match=r"within 0.05 s"):
        work.wait(LONG_S)
    assert device.num_aborts == 1
    assert device.has_passed
    for late in (work, other):
        with pytest.raises(PeerLost, match="broken"):
            late.done()
    assert device.num_aborts == 1

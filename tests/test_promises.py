"""One test by name for each promise of the design: it fails where the promise is broken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpact.cache.requests.ticket import TicketState
from kvpact.cache.tree.node import Residency, Tier
from kvpact.consensus.core.errors import Divergence, InternalError, PeerError, RankStalled
from kvpact.consensus.core.participant import OutcomeKind
from tests.cache_world import World, outcome, prompt

DEVICE, HOST = Tier.DEVICE, Tier.HOST
LAGS = pytest.mark.parametrize("lag", [0, 1, 2])


def busy(world: World) -> None:
    """A little of everything, with local faults on the way."""
    world.fault(0, "host.reserve", "refuse", after=1)
    world.fault(1, "device.reserve", "refuse", after=2)
    world.fault(1, "write", "fail", after=1)
    world.fault(0, "write", "delay", steps=2)
    for text in ("abcd", "abef", "xy", "xyz"):
        world.put(text)
        world.step()
    world.evict(DEVICE, 4)
    world.load("abcd", "one")
    world.step()
    world.put("abcdgh", "two", hold=True)
    world.step_all(2)
    for request in ("one", "two"):
        world.abort(request)
    world.drain()


@LAGS
@pytest.mark.parametrize("mode", ["write_through", "buffer_only"])
def test_what_is_queued_has_a_fate(lag: int, mode: str) -> None:
    """Every inserted node is backed up, refused or counted; one that just vanishes is found."""
    world = World(lag=lag, mode=mode, storage=mode == "buffer_only", device_pages=8)
    busy(world)
    for text in ("pq", "rs", "tu", "vw", "pqrs"):
        world.put(text)
        world.match(text[:1])
        world.evict(DEVICE, 3)
        world.step()
    world.put("zz")
    world.each(
        lambda cache: [setattr(n, "is_queued", False) for n in cache.core.backup.waiting_nodes()]
    )
    with pytest.raises(AssertionError, match="nodes were queued"):
        world.step()


@LAGS
def test_agreement(lag: int) -> None:
    """After each step all ranks have applied the same mutations; one that has not is found."""
    world = World(lag=lag)
    busy(world)  # snapshots are compared after each step
    assert len(world.snapshots) > 5
    assert len({snaps[0].fingerprint for snaps in world.snapshots}) > 3
    world.checks = False
    world.caches[1].evict(DEVICE, 1)  # this rank alone
    with pytest.raises(Divergence) as caught:
        world.step_all(lag + 1)
    assert caught.value.field == "fingerprint"
    assert "evict" in str(caught.value)


@LAGS
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("site", ["device.reserve", "host.reserve"])
def test_atomicity(lag: int, rank: int, site: str) -> None:
    """An intent holds pages on every rank or on none, whoever could not."""
    world = World(lag=lag)
    world.fault(rank, site, "refuse")
    world.put("abc")
    world.drain()
    tier = Tier(site.split(".", maxsplit=1)[0])
    assert world.peek("abc")[tier.value] == 0
    assert world.free_pages(tier) == [16, 16]
    assert world.same(lambda cache: cache.core.manager.ledger.charged(tier.value)) == 0
    world.is_empty()


@LAGS
def test_conservation(lag: int) -> None:
    """Each page has one owner at every step; a page that is lost or owned twice is found."""
    world = World(lag=lag)
    busy(world)  # audited after each step
    world.store("abcd", "mn")
    cache = world.caches[0]
    lost = cache.core.tiers.pools[DEVICE].reserve(1)
    with pytest.raises(InternalError, match="are not 16 pages"):
        cache.check_integrity()
    assert lost is not None
    cache.core.tiers.pools[DEVICE].free(lost)
    cache.check_integrity()
    cache.core.manager.ledger.charge("host", 1)
    with pytest.raises(InternalError, match="ledger"):
        cache.check_integrity()
    cache.core.manager.ledger.refund("host", 1)
    pages = world.node("abcd").device.pages
    world.node("abcd").device.pages = (world.node("mn").device.pages[0], *pages[1:])
    with pytest.raises(InternalError, match="two owners"):
        cache.check_integrity()


@LAGS
def test_no_reuse_in_flight(lag: int) -> None:
    """Until a copy has ended everywhere its pages are pinned; given up, they wait for its end."""
    world = World(lag=lag, device_pages=4, host_pages=4, copy_timeout_s=0.05)
    world.fault(1, "write", "hang")
    world.put("abcd")
    world.step_all(1 + lag)
    for cache in world.caches:
        assert cache.evict(DEVICE, 4) == 0
        assert cache.room() == 0
    world.step_all(10)  # given up by all: the device is free, the host pages of rank 1 are not
    assert world.same(lambda cache: cache.room()) == 4
    assert world.free_pages(HOST) == [4, 0]
    busy_pages = world.caches[1].core.tiers.pools[DEVICE]
    assert world.evict(DEVICE, 4) == 4
    assert (busy_pages.num_free, busy_pages.num_limbo) == (0, 4)  # the copy still reads them
    world.put("wxyz")
    world.drain()
    assert world.peek("wxyz")["device"] == 0  # nobody can have pages that rank 1 cannot have
    world.heal()
    world.step_all(2 + lag)
    assert (busy_pages.num_free, busy_pages.num_limbo) == (4, 0)
    assert world.put("wxyz")
    world.drain()
    assert world.peek("wxyz") == {"device": 4, "host": 4, "usable": 4}


@LAGS
def test_one_collective(lag: int) -> None:
    """One collective of one shape per step on every rank: idle, busy, refused or failed."""
    world = World(lag=lag)
    shapes: set[tuple[int, ...]] = set()
    put = world.net.put

    def watch(rank: int, index: Any, vector: NDArray[np.int64]) -> None:
        shapes.add(vector.shape)
        put(rank, index, vector)

    world.net.put = watch
    world.step_all(5)
    busy(world)
    for cache in world.caches:
        assert cache.metrics()["collectives"] == world.iteration == cache.core.manager.step
    assert len(shapes) == 1


@LAGS
def test_one_outcome(lag: int) -> None:
    """A step is settled on all ranks or on none, and an error is the same on all."""
    world = World(lag=lag)
    world.put("abcd")
    results = world.step_all(1 + lag)
    kinds = [[(o.kind, o.intent.serial) for o in result.outcomes] for result in results]
    assert kinds[0] == kinds[1]
    assert (OutcomeKind.COMMIT, 0) in kinds[0]
    world.checks = False

    def breaks() -> None:
        raise MemoryError("no more")

    world.caches[1].core.tiers.copier.collect = breaks
    errors: list[str] = []
    for cache in world.caches:
        cache.begin_step(world.iteration + 1)
    for _ in range(200):
        for cache in world.caches:
            try:
                cache.poll_step()
            except PeerError as error:
                errors.append(f"{type(error).__name__}: {error}")
        world.clock.now_s += 0.01
        if len(errors) >= 2:
            break
        if lag and not errors:
            world.iteration += 1
            _begin(world)
    assert len(set(errors)) == 1
    assert "MemoryError" in errors[0]
    assert "rank 1" in errors[0]
    assert len({cache.core.manager.settled_step for cache in world.caches}) == 1


def _begin(world: World) -> None:
    for cache in world.caches:
        if cache.stepper.stage == "idle":
            cache.begin_step(world.iteration + 1)


@LAGS
def test_bounded(lag: int) -> None:
    """A step ends within its deadline: where a rank does not come, with an error that names it."""
    world = World(3, lag=lag, deadline_s=1.0, grace_s=0.2)
    world.step_all(3)
    started = world.clock.now_s
    waiting = world.caches[:2]
    errors: dict[int, RankStalled] = {}
    for iteration in range(4, 5 + lag):
        for cache in waiting:
            cache.begin_step(iteration)
        for _ in range(1000):
            left = [cache for cache in waiting if cache.rank not in errors]
            done = 0
            for cache in left:
                try:
                    done += cache.poll_step() is not None
                except RankStalled as error:
                    errors[cache.rank] = error
            if done == len(left):
                break
            world.clock.now_s += 0.01
    assert sorted(errors) == [0, 1]
    assert {(error.ranks, error.step) for error in errors.values()} == {((2,), 4)}
    assert world.clock.now_s - started < 1.0 + 0.2 + 1.0 + 0.5


@LAGS
def test_progress(lag: int) -> None:
    """Once faults stop, every intent is decided, every queue drains, counters are back."""
    world = World(lag=lag, copy_timeout_s=0.08)
    for rank in (0, 1):
        world.fault(rank, "write", "hang", after=rank, times=2)
        world.fault(rank, "load", "hang", times=1)
        world.fault(rank, "device.reserve", "refuse", after=3, times=2)
        world.fault(rank, "host.reserve", "refuse", after=2, times=1)
    for text in ("abcd", "abef", "xy", "xyz"):
        world.put(text)
        world.step()
    world.evict(DEVICE, 6)
    tickets = world.load("abcd", "one")
    world.each(lambda cache: cache.request_pages("two", 3))
    world.step_all(3)
    world.heal()
    world.drain()
    assert outcome(tickets)[0] is not TicketState.PENDING
    for request in ("one", "two"):
        world.abort(request)
    world.drain()
    world.step_all(2 + lag)
    assert not any(cache.core.manager.open_intents for cache in world.caches)
    world.is_empty()
    for tier in (HOST, DEVICE, HOST):
        world.evict(tier, 100)
    assert world.free_pages(DEVICE) == world.free_pages(HOST) == [16, 16]
    assert world.same(lambda cache: cache.room()) == 16


@LAGS
@pytest.mark.parametrize("site", ["write", "load"])
def test_right_bytes(lag: int, site: str) -> None:
    """What is loaded is what was written, on each rank; bytes that went wrong are a miss."""
    world = World(lag=lag)
    world.fault(1, site, "corrupt")
    world.put("abcd")
    world.drain()
    world.evict(DEVICE, 9)
    if site == "write":
        assert world.peek("abcd")["usable"] == 0
        world.host_only("abcd")
    world.load("abcd", "one")
    world.drain()  # bytes of everything that is resident are checked after each step
    loaded = world.peek("abcd")["device"]
    assert loaded == (4 if site == "write" else 0)
    assert world.same(lambda cache: cache.metrics()["copies_wrong"] <= 1)
    assert sum(cache.metrics()["copies_wrong"] for cache in world.caches) == 1
    world.abort("one")
    world.host_only("abcd")  # a source that failed is computed anew
    page = world.node("abcd").host.pages[0]
    tensors = world.ranks[0].tensors[HOST]
    tensors.write_page(page, bytes(len(tensors.read_page(page))))
    assert world.ranks[0].wrong_bytes()  # and the check would see it


@LAGS
def test_degrade(lag: int) -> None:
    """Every copy fails, every reservation of the host is refused: the engine goes on serving."""
    world = World(lag=lag)
    world.fault(0, "host.reserve", "refuse", times=-1)
    world.fault(1, "write", "fail", times=-1)
    for text in ("abcd", "abef", "uvwx", "mnop", "qrst"):
        world.match(text, text)
        world.own(text, text)
        world.insert(text, text)
        world.each(lambda cache, t=text: cache.finish_request(t))
        world.step()
    assert world.peek("qrst") == {"device": 4, "host": 0, "usable": 4}
    world.heal()
    world.drain()
    world.put("qrst")
    world.drain()
    assert world.peek("qrst")["host"] == 4
    assert world.node("qrst").host.state is Residency.RESIDENT
    assert world.caches[0].core.tree.match(prompt("qrst"))
    world.is_empty()

"""What may hang: bounded calls and releases, with stand-ins for torch."""

from __future__ import annotations

import collections
import threading
import time
import weakref

import pytest

from kvpact.consensus.core.errors import PeerLost, ResourceError, StoreSilent
from kvpact.consensus.transport import bounded


class _Collective:
    def __init__(self) -> None:
        self.ended = False

    def is_completed(self) -> bool:
        return self.ended


class _ProcessGroup:
    pass


class _Owner:
    pass


def _until_dead(reference: weakref.ref[_ProcessGroup]) -> None:
    end_s = time.monotonic() + 10.0
    while reference() is not None:
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_bounded_returns_and_raises_what_the_call_does() -> None:
    assert bounded.bounded(lambda: 7, 10.0, "silent") == 7

    def lost() -> None:
        raise PeerLost("gone", rank=3)

    with pytest.raises(PeerLost, match="gone"):
        bounded.bounded(lost, 10.0, "silent")


def test_a_call_that_hangs_is_abandoned_and_how_many_may_hang_is_limited() -> None:
    release = threading.Event()
    for _ in range(bounded.MAX_ABANDONED):
        with pytest.raises(StoreSilent, match="host:1 hangs"):
            bounded.bounded(lambda: release.wait(30.0), 0.001, "host:1 hangs")
    with pytest.raises(ResourceError, match="still hang; host:1"):
        bounded.bounded(lambda: 1, 0.001, "host:1 hangs")
    release.set()
    end_s = time.monotonic() + 10.0
    value = 0
    while value != 1:
        try:
            value = bounded.bounded(lambda: 1, 10.0, "host:1 hangs")
        except ResourceError:
            assert time.monotonic() < end_s
            time.sleep(0.005)


def test_who_looks_out_may_end_the_wait() -> None:
    release = threading.Event()

    def look_out() -> None:
        raise PeerLost("another rank failed", rank=1)

    began_s = time.monotonic()
    with pytest.raises(PeerLost, match="another rank failed"):
        bounded.bounded(lambda: release.wait(30.0), 30.0, "silent", look_out)
    with pytest.raises(StoreSilent, match="silent"):
        bounded.bounded(lambda: release.wait(30.0), 0.2, "silent", lambda: None)
    assert time.monotonic() - began_s < 10.0
    release.set()


def test_a_group_is_released_when_its_collectives_have_ended_and_not_before() -> None:
    owner, group, collective = _Owner(), _ProcessGroup(), _Collective()
    alive = weakref.ref(group)
    release = bounded.entrust(owner, group, collections.deque([collective]))
    del group
    assert alive() is not None
    release()
    release()  # only once
    assert not bounded.drain(0.1)
    assert alive() is not None
    collective.ended = True
    assert bounded.drain(10.0)
    assert alive() is None


def test_one_group_that_waits_does_not_hold_up_another() -> None:
    slow = _Collective()
    owners = [_Owner(), _Owner()]
    groups = [_ProcessGroup(), _ProcessGroup()]
    alive = [weakref.ref(group) for group in groups]
    bounded.entrust(owners[0], groups[0], collections.deque([slow]))()
    bounded.entrust(owners[1], groups[1], collections.deque())()
    groups.clear()
    _until_dead(alive[1])
    assert alive[0]() is not None
    slow.ended = True
    assert bounded.drain(10.0)


def test_dropping_the_owner_releases_too() -> None:
    owner, group = _Owner(), _ProcessGroup()
    alive = weakref.ref(group)
    bounded.entrust(owner, group, collections.deque())
    del group
    assert alive() is not None
    del owner
    _until_dead(alive)
    assert bounded.drain(10.0)


def test_new_groups_are_refused_while_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MAX_UNRELEASED", 2)
    collective = _Collective()
    owners = [_Owner() for _ in range(3)]
    releases = [
        bounded.entrust(owner, _ProcessGroup(), collections.deque([collective])) for owner in owners
    ]
    for release in releases:
        release()  # closing never fails, not even beyond the limit
    with pytest.raises(ResourceError, match="closed groups still wait"):
        bounded.entrust(_Owner(), _ProcessGroup(), collections.deque())
    collective.ended = True
    assert bounded.drain(10.0)
    last = _Owner()
    bounded.entrust(last, _ProcessGroup(), collections.deque())()
    assert bounded.drain(10.0)

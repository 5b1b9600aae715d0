"""Limbo: what quarantined copies still use stays out of use until they have really ended."""

from __future__ import annotations

import pytest

from kvpact.consensus import Limbo, Misuse
from tests.foreign import Owner, make_manager


def test_pages_come_back_once_when_the_copy_has_ended() -> None:
    limbo, freed = Limbo(), list[str]()
    limbo.keep("a", {"host": 3, "device": 1}, lambda: freed.append("a"))
    limbo.keep("b", {"host": 2}, lambda: freed.append("b"))
    assert (limbo.num_pages("host"), limbo.num_pages("device"), len(limbo)) == (5, 1, 2)
    assert limbo.ended("a")
    assert not limbo.ended("a"), "a second ending is not the business of limbo"
    assert freed == ["a"]
    assert (limbo.num_pages("host"), limbo.num_pages("device")) == (2, 0)


def test_one_key_keeps_one_thing() -> None:
    limbo = Limbo()
    limbo.keep("a", {"host": 1}, lambda: None)
    with pytest.raises(Misuse, match="holds something under a"):
        limbo.keep("a", {"host": 1}, lambda: None)
    assert limbo.num_pages("host") == 1


class Loses(Owner):
    """A participant that puts what was lost into limbo."""

    def __init__(self) -> None:
        super().__init__({"a": 10})
        self.limbo = Limbo()

    def lost(self, intent: object) -> None:
        self.calls.append(("lost", intent.key))  # type: ignore[attr-defined]
        self.limbo.keep("x", {"a": 4}, lambda: self._give({"a": 4}))

    def usable(self, pool: str) -> int:
        return self.capacity[pool] - self.limbo.num_pages(pool)


def test_what_is_lost_lowers_what_everybody_plans_with_until_it_ends() -> None:
    owner = Loses()
    manager = make_manager(0, owner, copy_timeout_s=1.0)

    def step(now_ms: int) -> list[str]:
        manager.reserve_open()
        outcomes = manager.settle(manager.read(manager.post(manager.step + 1, now_ms=now_ms)))
        return [one.kind.value for one in outcomes]

    manager.open("copy", "x", {"a": 4}, owner)
    assert step(0) == ["commit"]
    assert step(1500) == ["quarantine"]
    assert ("lost", "x") in owner.calls
    assert ("ended", "x") not in owner.calls, "lost is called instead of ended"
    step(1600)
    assert manager.room("a") == owner.free["a"] == 6
    owner.limbo.ended("x")
    step(1700)
    assert manager.room("a") == owner.free["a"] == 10

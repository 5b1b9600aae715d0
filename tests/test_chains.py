"""Chains of nodes: parents first, one eviction for the sum, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.consensus import ChainFate, ChainPlan, Intent, Link
from kvpact.consensus.core.transaction import State
from tests.foreign import Owner, Replica, only

Chain = tuple[str, ...]
ROOM = 12


class World:
    """A few ranks, each with a tree of names ("a" above "ab"), its backups, and a plan."""

    def __init__(self, num_ranks: int = 2, *, lag: int = 0, num_slots: int = 8, spare: int = 0):
        self.replica = Replica([{"a": ROOM}] * num_ranks, lag=lag, num_slots=num_slots)
        self.evictions: list[int] = []
        self.plans: list[ChainPlan[str]] = [
            ChainPlan(manager, "copy", owner, self._evictor(rank), spare_slots=spare)
            for rank, (manager, owner) in enumerate(
                zip(self.replica.managers, self.replica.owners, strict=True)
            )
        ]

    def _evictor(self, rank: int) -> Callable[[str, int], None]:
        def evict(pool: str, num_pages: int) -> None:
            """Leaves of the tree that is backed up go, the last name first."""
            if rank == 0:
                self.evictions.append(num_pages)
            manager, owner = self.replica.managers[rank], self.replica.owners[rank]
            open_keys = {intent.key for intent in manager.open_intents}
            done = 0
            for key in sorted(owner.tree, key=str, reverse=True):
                is_leaf = not any(str(k).startswith(str(key)) for k in owner.tree if k != key)
                if (
                    done < num_pages
                    and is_leaf
                    and not any(str(k).startswith(str(key)) for k in open_keys)
                ):
                    gone = owner.tree.pop(key)[pool]
                    owner.free[pool] += gone
                    manager.give_back(pool, gone)
                    done += gone

        return evict

    def links(self, owner: Owner, node: str) -> Sequence[Link]:
        names = [node[: n + 1] for n in range(len(node))]
        return [Link(name, {"a": 1 + len(name)}) for name in names if name not in owner.tree]

    def plan(self, *nodes: str) -> dict[str, ChainFate]:
        return only(
            plan.open(nodes, lambda node, owner=owner: self.links(owner, node))
            for plan, owner in zip(self.plans, self.replica.owners, strict=True)
        )

    def end_all(self) -> None:
        for manager in self.replica.managers:
            for intent in manager.open_intents:
                if not intent.local_ended and intent.state is not State.PROPOSED:
                    manager.mark_ended(intent)

    def opened(self) -> list[Intent]:
        return list(self.replica.managers[0].open_intents)


def test_a_chain_is_opened_root_first_each_on_its_parent() -> None:
    world = World()
    assert world.plan("abc") == {"abc": ChainFate.OPENED}
    assert [intent.key for intent in world.opened()] == ["a", "ab", "abc"]
    assert [[p.key for p in i.parents] for i in world.opened()] == [[], ["a"], ["ab"]]


def test_two_chains_share_their_front() -> None:
    world = World()
    world.plan("ab", "ac")
    assert [intent.key for intent in world.opened()] == ["a", "ab", "ac"]
    assert world.opened()[2].parents[0].key == "a"


def test_there_is_one_eviction_for_the_sum() -> None:
    world = World()
    for node in ("x", "y", "z"):
        world.plan(node)
    world.replica.decide()
    world.end_all()
    world.replica.decide()
    assert world.replica.room() == ROOM - 6
    world.plan("ab", "c")  # 2 + 3 + 2 pages, where 6 are free
    assert world.evictions == [1]
    assert [intent.key for intent in world.opened()] == ["a", "ab", "c"]


def test_what_never_fits_is_refused_with_its_front_kept() -> None:
    world = World()
    assert world.plan("abcd") == {"abcd": ChainFate.REFUSED}  # 2 + 3 + 4 + 5 of 12
    assert [intent.key for intent in world.opened()] == ["a", "ab", "abc"]


def test_a_chain_waits_while_an_ancestor_that_was_aborted_drains() -> None:
    world = World()
    world.replica.owners[1].refuse.add(("a", "a"))
    world.plan("a")
    assert world.replica.decide() == ["abort a"]
    assert world.plan("ab") == {"ab": ChainFate.WAITS}
    world.replica.owners[1].refuse.clear()
    world.end_all()
    world.replica.decide()
    assert world.plan("ab") == {"ab": ChainFate.OPENED}


def test_a_child_of_a_refused_parent_aborts_on_every_rank() -> None:
    world = World()
    world.replica.owners[1].refuse.add(("a", "a"))
    world.plan("ab")
    assert world.replica.decide() == ["abort a", "abort ab"]
    assert all(owner.tree == {} for owner in world.replica.owners)


@pytest.mark.parametrize("spare, opened", [(0, 3), (1, 2), (3, 0)])
def test_slots_are_left_for_others(spare: int, opened: int) -> None:
    world = World(num_slots=3, spare=spare)
    fates = world.plan("a", "b", "c", "d")
    assert len(world.opened()) == opened
    assert list(fates.values()) == [ChainFate.OPENED] * opened + [ChainFate.WAITS] * (4 - opened)


NODES = st.text("ab", min_size=1, max_size=4)


@given(
    lag=st.integers(0, 2),
    steps=st.lists(
        st.tuples(st.lists(NODES, max_size=3, unique=True), st.sets(NODES, max_size=2)),
        max_size=12,
    ),
)
def test_what_is_published_hangs_together_on_every_rank(
    lag: int, steps: list[tuple[list[str], set[str]]]
) -> None:
    world = World(num_ranks=3, lag=lag)
    for nodes, refused in steps:
        for rank, owner in enumerate(world.replica.owners):
            owner.refuse = {(key, "a") for n, key in enumerate(sorted(refused)) if n % 3 == rank}
        world.plan(*nodes)
        world.replica.step()
        world.end_all()
        published = only(set(owner.tree) for owner in world.replica.owners)
        for key in published:
            assert len(str(key)) == 1 or str(key)[:-1] in published, f"{key} hangs in the air"
    for owner in world.replica.owners:
        owner.refuse.clear()
    for _ in range(3 * (lag + 2)):
        world.end_all()
        world.replica.step()
    assert world.opened() == [], "everything drains"

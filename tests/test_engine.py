"""`kvpact.consensus.join`: one object for an engine with pools of its own, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpact.consensus import CarriesNothing, Intent, Misuse, Policy, join
from kvpact.consensus.core.manager import TransactionManager
from kvpact.consensus.engine.replica import Replica
from kvpact.harness import RankContext, launch
from tests.foreign import make_manager

HERE = Path(__file__).parent


class Counted:
    """A participant that counts pages. ``short`` intents are refused on this rank."""

    def __init__(self, short: set[str]) -> None:
        self.short = short
        self.manager: TransactionManager | None = None
        self.calls: list[str] = []

    def opened(self, intent: Intent) -> None:
        self.calls.append(f"opened {intent.key}")

    def reserve_all(self, intent: Intent) -> bool:
        return intent.key not in self.short

    def reserve(self, intent: Intent, pool: str, num_pages: int) -> int:
        raise AssertionError("all pools are reserved at once")

    def unreserve(self, intent: Intent, pool: str) -> None:
        raise AssertionError("all pools are reserved at once")

    def start(self, intent: Intent) -> None:
        assert self.manager is not None
        self.manager.mark_ended(intent)

    def commit(self, intent: Intent) -> None:
        self.calls.append(f"commit {intent.key} {intent.payload}")

    def abort(self, intent: Intent) -> None:
        self.calls.append(f"abort {intent.key}")

    def ended(self, intent: Intent) -> None:
        self.calls.append(f"ended {intent.key}")


def rank_main(context: RankContext, lag: int) -> dict[str, object]:
    """Two backups, the second refused on rank 1; then a new epoch and one more."""
    pool = Counted({"b"} if context.rank == 1 else set())
    order: list[str] = []
    wishes = ["a", "b"]
    found: list[Replica] = []

    def plan() -> None:
        order.append("plan")
        if wishes:
            key = wishes.pop(0)
            found[0].manager.open("back_up", key, {"host": 2, "side": 1}, pool, payload=f"<{key}>")

    with join(
        context.store_host,
        context.store_port,
        name="replica",
        rank=context.rank,
        ranks=range(context.num_ranks),
        pools={"host": 8 + context.rank, "side": 4},
        plan=plan,
        submit=lambda: order.append("submit"),
        settled=lambda outcomes: order.append(f"settled {len(outcomes)}"),
        lag=lag,
    ) as replica:
        found.append(replica)
        pool.manager = replica.manager
        for _ in range(3 + lag):
            replica.step()
        before = {"calls": list(pool.calls), "room": replica.manager.room("host")}
        replica.renew()
        wishes.append("c")
        for _ in range(2 + lag):
            replica.step()
        return {
            **before,
            "order": order[:3],
            "agreed": replica.agreed,
            "after": pool.calls[-2:],
            "room_after": replica.manager.room("host"),
            "collectives": replica.stepper.num_collectives - replica.iteration,
        }


@pytest.mark.ranks
@pytest.mark.parametrize("lag", [0, 1])
def test_two_ranks_decide_alike_and_a_new_epoch_begins_empty(lag: int) -> None:
    ranks = launch(f"{__name__}:rank_main", 2, [lag, lag]).ranks
    results = [rank.result for rank in ranks]
    assert all(rank.error is None for rank in ranks), [rank.error for rank in ranks]
    assert results[0] == results[1]
    assert results[0]["calls"] == [
        "opened a",
        "commit a <a>",
        "ended a",
        "opened b",
        "abort b",
        "ended b",
    ]
    assert results[0]["room"] == 6, "what is resident stays charged"
    assert results[0]["agreed"] == {"host": 8, "side": 4}
    assert results[0]["after"] == ["commit c <c>", "ended c"]
    assert results[0]["room_after"] == 6
    assert results[0]["order"] == ["plan", "submit", "settled 2"]
    assert results[0]["collectives"] == 0, "one a step"


def test_a_policy_that_drops_a_tree_needs_a_carrier() -> None:
    with pytest.raises(Misuse, match="policy 'reset' needs a carrier"):
        join("127.0.0.1", 1, name="x", rank=0, ranks=[0], pools={"a": 1}, policy=Policy("reset"))


def test_who_carries_nothing_says_what_is_charged_and_begins_empty() -> None:
    manager = make_manager(0)
    manager.hold("a", 3)
    carrier = CarriesNothing(manager, lambda: {"a": 9})
    assert (carrier.live(), carrier.kept(), carrier.usable()) == ({}, [], {"a": 9})
    assert carrier.pools() == {"a": {"usable": 10, "charged": 3}}
    carrier.restart(1, {"a": 9})
    assert (manager.epoch, manager.room("a")) == (1, 9)

"""What a live request holds."""

from __future__ import annotations

import pytest

from kvpact.cache.requests.table import RequestTable
from kvpact.cache.tree.eviction import LeastRecentlyUsed
from kvpact.cache.tree.node import Node, Residency, Tier
from kvpact.cache.tree.radix_tree import RadixTree
from kvpact.consensus.core.errors import Misuse
from tests.cache_world import PAGE_SIZE, no_note, prompt


def make() -> tuple[RadixTree, RequestTable, list[Node]]:
    tree = RadixTree(PAGE_SIZE, LeastRecentlyUsed(), no_note)
    for text in ("ab", "abcd", "xy"):
        for node in tree.insert(prompt(text)):
            if not node.device.state:
                tree.place(node, Tier.DEVICE, Residency.RESIDENT, list(range(node.num_pages)))
    return tree, RequestTable(tree), tree.match(prompt("abcd"))


def test_digest_names_who_lives_not_when_they_came() -> None:
    _, one, _ = make()
    _, two, _ = make()
    for name in "abc":
        one.open(name)
    for name in "cb":
        two.open(name)
    assert one.digest != two.digest
    one.close(one.require("a"))
    assert one.digest == two.digest
    two.close(two.require("b"))
    two.close(two.require("c"))
    assert two.digest == 0
    assert len(two) == 0


def test_open_is_idempotent_and_require_is_not_forgiving() -> None:
    _, table, _ = make()
    request = table.open("a")
    assert table.open("a") is request
    assert table.get("b") is None
    with pytest.raises(Misuse, match="'b' is not live"):
        table.require("b")
    assert [live.name for live in table] == ["a"]


def test_hold_never_drops_the_common_path() -> None:
    tree, table, (upper, lower) = make()
    request = table.open("a")
    table.hold(request, upper)
    assert (upper.device.pins, lower.device.pins) == (1, 0)
    table.hold(request, lower)
    assert (upper.device.pins, lower.device.pins) == (1, 1)
    assert request.held_pages == 4
    table.close(request)
    assert tree.num_pinned[Tier.DEVICE] == 0


def test_void_moves_pins_up_and_names_those_below() -> None:
    tree, table, (upper, lower) = make()
    other = tree.match(prompt("xy"))[0]
    for name, node in (("deep", lower), ("above", upper), ("beside", other)):
        table.hold(table.open(name), node)
    table.open("holds nothing")
    assert table.void(lower) == ["deep"]
    assert table.require("deep").held is upper
    assert table.void(upper) == ["deep", "above"]
    assert table.require("above").held is None
    assert [live.name for live in table if live.must_recompute] == ["deep", "above"]
    assert tree.num_pinned[Tier.DEVICE] == 2

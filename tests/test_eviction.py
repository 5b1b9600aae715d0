"""The order of eviction against a dumb twin that sorts everything at each pop."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from cache.eviction import EvictionOrder, LeastRecentlyUsed
from cache.node import Node, Residency, Tier
from cache.radix_tree import RadixTree
from tests.cache_world import PAGE_SIZE, no_note, prompt

POLICY = LeastRecentlyUsed()


def make_tree() -> RadixTree:
    return RadixTree(PAGE_SIZE, POLICY, no_note)


def fill(tree: RadixTree, text: str, tier: Tier) -> None:
    for node in tree.insert(prompt(text)):
        if not node.at(tier).state:
            tree.place(node, tier, Residency.RESIDENT, list(range(node.num_pages)))


def slow_next(tree: RadixTree, tier: Tier) -> Node | None:
    """Leaves of the tier that are resident and unpinned, the one with the least key."""
    leaves = [
        node
        for node in tree.nodes()
        if node.at(tier).state is Residency.RESIDENT
        and not node.at(tier).pins
        and not any(child.at(tier).state for child in node.children.values())
    ]
    return min(leaves, key=POLICY.key, default=None)


TEXTS = st.text(alphabet="abc", min_size=1, max_size=5)
CALLS = st.lists(
    st.tuples(st.sampled_from(["insert", "match", "pin", "unpin", "evict"]), TEXTS), max_size=40
)


@given(calls=CALLS, seed=st.integers(0, 9))
def test_order_equals_a_full_sort_at_every_pop(calls: list[tuple[str, str]], seed: int) -> None:
    tree = make_tree()
    choose = random.Random(seed)
    pins: list[tuple[Node, Tier]] = []
    for call, text in calls:
        tier = choose.choice(list(Tier))
        match call:
            case "insert":
                fill(tree, text, tier)
            case "match":
                tree.match(prompt(text))
            case "pin":
                path = tree.match(prompt(text))
                if path:
                    tree.pin_path(path[-1], tier)
                    pins.append((path[-1], tier))
            case "unpin" if pins:
                tree.unpin_path(*pins.pop(choose.randrange(len(pins))))
            case _:
                node = slow_next(tree, tier)
                assert tree.order[tier].pop() is node
                if node is not None:
                    tree.place(node, tier, Residency.ABSENT)
    for node, tier in pins:
        tree.unpin_path(node, tier)
    for tier in Tier:
        while (node := slow_next(tree, tier)) is not None:
            assert tree.order[tier].pop() is node
            tree.place(node, tier, Residency.ABSENT)
        assert tree.order[tier].pop() is None
        assert tree.num_evictable[tier] == 0


def test_leaves_go_first_in_each_tier() -> None:
    tree = make_tree()
    for tier in Tier:
        fill(tree, "abcd", tier)
    tree.match(prompt("ab"))  # splits; now "ab" is above "cd", and used last
    upper, lower = tree.match(prompt("abcd"))
    assert tree.order[Tier.DEVICE].pop() is lower
    tree.place(lower, Tier.DEVICE, Residency.ABSENT)
    assert tree.order[Tier.DEVICE].pop() is upper  # its child is only on HOST
    assert tree.order[Tier.HOST].pop() is lower  # there it still has one


def test_equal_recency_goes_by_node_id() -> None:
    tree = make_tree()
    fill(tree, "ab", Tier.DEVICE)
    tree.match(prompt("a"))
    tree.match(prompt("ab"))
    upper, lower = tree.match(prompt("ab"))
    assert upper.last_access == lower.last_access
    assert POLICY.key(lower) < POLICY.key(upper)


def test_stale_entries_are_bounded() -> None:
    tree = make_tree()
    texts = [chr(ord("A") + i // 26) + chr(ord("a") + i % 26) for i in range(300)]
    for text in texts:
        fill(tree, text, Tier.DEVICE)
    order = tree.order[Tier.DEVICE]
    bound = max(EvictionOrder._REBUILD_FLOOR, EvictionOrder._REBUILD_FACTOR * 2 * len(texts))
    choose = random.Random(1)
    for _ in range(4000):
        tree.match(prompt(choose.choice(texts)))
        assert len(order._heap) <= bound + 1
    expected = slow_next(tree, Tier.DEVICE)
    assert order.pop() is expected


def test_clear_forgets_everything() -> None:
    tree = make_tree()
    fill(tree, "ab", Tier.DEVICE)
    tree.order[Tier.DEVICE].clear()
    assert tree.order[Tier.DEVICE].pop() is None

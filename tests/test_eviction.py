"""The order of eviction against a dumb twin that sorts everything at each pop."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.cache.tree.eviction import POLICIES, EvictionOrder, EvictionPolicy, LeastRecentlyUsed
from kvpact.cache.tree.node import Node, Residency, Tier
from kvpact.cache.tree.radix_tree import RadixTree
from tests.cache_world import PAGE_SIZE, no_note, prompt

POLICY = LeastRecentlyUsed()
EACH_POLICY = pytest.mark.parametrize("name", sorted(POLICIES))


def make_tree(policy: EvictionPolicy = POLICY) -> RadixTree:
    return RadixTree(PAGE_SIZE, policy, no_note)


def fill(tree: RadixTree, text: str, tier: Tier) -> None:
    for node in tree.insert(prompt(text)):
        if not node.at(tier).state:
            tree.place(node, tier, Residency.RESIDENT, list(range(node.num_pages)))


def slow_next(tree: RadixTree, tier: Tier, policy: EvictionPolicy = POLICY) -> Node | None:
    """Leaves of the tier that are resident and unpinned, the one with the least key."""
    leaves = [
        node
        for node in tree.nodes()
        if node.at(tier).state is Residency.RESIDENT
        and not node.at(tier).pins
        and not any(child.at(tier).state for child in node.children.values())
    ]
    return min(leaves, key=lambda node: (node.is_queued, policy.key(node)), default=None)


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


# -- other policies --------------------------------------------------------------------------------

PRIORITY_CALLS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "match", "queue", "leave", "evict"]), TEXTS, st.integers(0, 2)
    ),
    max_size=40,
)


@EACH_POLICY
@given(calls=PRIORITY_CALLS, seed=st.integers(0, 9))
def test_each_policy_equals_a_full_sort(
    name: str, calls: list[tuple[str, str, int]], seed: int
) -> None:
    """Hits, priorities and the queue move nodes, too, and a node that moves is not forgotten."""
    policy = POLICIES[name]()
    tree = make_tree(policy)
    choose = random.Random(seed)
    for call, text, priority in calls:
        tier = choose.choice(list(Tier))
        match call:
            case "insert":
                for node in tree.insert(prompt(text), priority=priority):
                    # Not always closed towards the root: write-back demotes leaves first.
                    if not node.at(tier).state and choose.random() < 0.7:
                        pages = list(range(node.num_pages))
                        tree.place(node, tier, Residency.RESIDENT, pages)
            case "match":
                tree.match(prompt(text))
            case "queue" | "leave":
                for node in tree.walk(prompt(text))[0]:
                    tree.mark_queued(node, call == "queue")
            case _:
                node = slow_next(tree, tier, policy)
                assert tree.order[tier].pop() is node
                if node is not None:
                    tree.place(node, tier, Residency.ABSENT)
    for tier in Tier:
        while (node := slow_next(tree, tier, policy)) is not None:
            assert tree.order[tier].pop() is node
            tree.place(node, tier, Residency.ABSENT)
        assert tree.order[tier].pop() is None


@EACH_POLICY
def test_each_policy_is_a_total_order(name: str) -> None:
    policy = POLICIES[name]()
    tree = make_tree(policy)
    for text in ("a", "b", "ab", "abc", "c"):
        fill(tree, text, Tier.DEVICE)
    keys = [policy.key(node) for node in tree.nodes()]
    assert len(set(keys)) == len(keys)
    assert all(key[-1] == node.node_id for key, node in zip(keys, tree.nodes(), strict=True))


def victims(name: str, *calls: tuple[str, int]) -> str:
    """The order in which prompts of one page go; ``calls`` are prompts and their priorities."""
    tree = make_tree(POLICIES[name]())
    for text, priority in calls:
        for node in tree.insert(prompt(text), priority=priority):
            if not node.device.state:
                tree.place(node, Tier.DEVICE, Residency.RESIDENT, [0])
    gone = ""
    while (node := tree.order[Tier.DEVICE].pop()) is not None:
        gone += chr(int(node.tokens[0]))
        tree.place(node, Tier.DEVICE, Residency.ABSENT)
    return gone


def test_who_goes_first() -> None:
    calls = [("a", 0), ("a", 0), ("a", 0), ("b", 0), ("b", 0), ("c", 2), ("d", 1), ("a", 0)]
    assert victims("lru", *calls) == "bcda"
    assert victims("lfu", *calls) == "cdba"
    assert victims("slru", *calls) == "cdba"
    assert victims("priority", *calls) == "badc"
    assert (
        victims("slru", ("a", 0), ("a", 0), ("b", 0), ("b", 0), ("b", 0), ("c", 0), ("a", 0))
        == "cba"
    )
    assert victims("lfu", ("a", 0), ("a", 0), ("b", 0), ("b", 0), ("b", 0), ("c", 0)) == "cab"

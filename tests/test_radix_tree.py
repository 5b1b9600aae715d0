"""The radix tree against a dumb twin: a dictionary of prefixes, one entry per page."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpact.cache.tree.eviction import LeastRecentlyUsed
from kvpact.cache.tree.node import MOVES, Carriage, Node, Presence, Residency, Standing, Tier
from kvpact.cache.tree.radix_tree import RadixTree
from kvpact.consensus.core.errors import InternalError
from tests.cache_world import PAGE_SIZE, no_note, prompt

ABSENT, RESERVED, COPYING, RESIDENT = Residency

TEXTS = st.text(alphabet="ab", min_size=0, max_size=6)
NAMESPACES = st.sampled_from(["", "tenant"])
TIERS = st.sampled_from(list(Tier))
PUBLISHED = st.sampled_from([COPYING, RESIDENT])


def make_tree() -> RadixTree:
    return RadixTree(PAGE_SIZE, LeastRecentlyUsed(), no_note)


class Page:
    """One page of the twin: what the tree must say of it, whichever node it is in."""

    def __init__(self, key: tuple[str, str]) -> None:
        self.key = key
        self.state = dict.fromkeys(Tier, ABSENT)
        self.page = dict.fromkeys(Tier, -1)
        self.pins = dict.fromkeys(Tier, 0)


class Twin(RuleBasedStateMachine):
    """Every call is made on the tree and on a dictionary from (namespace, prefix) to page."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = make_tree()
        self.pages: dict[tuple[str, str], Page] = {}
        self.pins: list[tuple[Tier, Node, list[Page]]] = []
        self.carriages: list[tuple[Carriage, list[Page]]] = []
        self.num_used = 0

    # -- the twin --------------------------------------------------------------------------------

    def path(self, namespace: str, text: str) -> list[Page]:
        found: list[Page] = []
        for end in range(1, len(text) + 1):
            page = self.pages.get((namespace, text[:end]))
            if page is None:
                break
            found.append(page)
        return found

    def of(self, node: Node) -> list[Page]:
        """The twin's pages of a node that is in the tree."""
        start = sum(above.num_pages for above in node.path()[:-1])
        text = "".join(
            chr(n.tokens[i * PAGE_SIZE]) for n in node.path() for i in range(n.num_pages)
        )
        return [self.pages[node.namespace, text[:end]] for end in range(start + 1, len(text) + 1)]

    def below(self, page: Page) -> Iterable[Page]:
        namespace, text = page.key
        return (p for (n, t), p in self.pages.items() if n == namespace and t.startswith(text))

    def expect_path(self, nodes: list[Node], pages: list[Page]) -> None:
        assert [page for node in nodes for page in self.of(node)] == pages

    def fresh(self, num_pages: int) -> list[int]:
        self.num_used += num_pages
        return list(range(self.num_used - num_pages, self.num_used))

    # -- rules -----------------------------------------------------------------------------------

    @rule(text=TEXTS, namespace=NAMESPACES)
    def insert(self, text: str, namespace: str) -> None:
        nodes = self.tree.insert(prompt(text), namespace)
        for end in range(1, len(text) + 1):
            self.pages.setdefault((namespace, text[:end]), Page((namespace, text[:end])))
        self.expect_path(nodes, self.path(namespace, text))

    @rule(text=TEXTS, namespace=NAMESPACES, rest=st.integers(0, PAGE_SIZE - 1))
    def match(self, text: str, namespace: str, rest: int) -> None:
        tokens = np.concatenate([prompt(text), np.zeros(rest, dtype=np.int32)])
        self.expect_path(self.tree.match(tokens, namespace), self.path(namespace, text))

    @rule(text=TEXTS, namespace=NAMESPACES)
    def walk(self, text: str, namespace: str) -> None:
        before = len(list(self.tree.nodes()))
        nodes, shared = self.tree.walk(prompt(text), namespace)
        total = sum(node.num_pages for node in nodes[:-1]) + shared
        assert total == len(self.path(namespace, text))
        assert len(list(self.tree.nodes())) == before

    def pick(self, data: st.DataObject, nodes: list[Node]) -> Node | None:
        return data.draw(st.sampled_from(nodes)) if nodes else None

    @rule(data=st.data(), tier=TIERS, state=PUBLISHED)
    def publish(self, data: st.DataObject, tier: Tier, state: Residency) -> None:
        """A node below a published one gets its pages."""
        allowed = [
            node
            for node in self.tree.nodes()
            if node.parent is not None
            and (node.parent.is_root or node.parent.at(tier).is_published)
            and node.at(tier).carriage is None
            and (node.at(tier).state is ABSENT or state in MOVES[node.at(tier).state])
        ]
        node = self.pick(data, allowed)
        if node is None:
            return
        own = self.fresh(node.num_pages)
        if state not in MOVES[node.at(tier).state]:
            self.tree.place(node, tier, RESERVED)
        self.tree.place(node, tier, state, list(own))
        for page, index in zip(self.of(node), own, strict=True):
            page.state[tier], page.page[tier] = state, index

    @rule(data=st.data(), tier=TIERS)
    def leave(self, data: st.DataObject, tier: Tier) -> None:
        """A leaf of the tier goes, whether pinned or not; what is then nowhere is deleted."""
        leaves = [n for n in self.tree.nodes() if n.at(tier).state and not n.at(tier).num_children]
        node = self.pick(data, [leaf for leaf in leaves if leaf.at(tier).carriage is None])
        if node is None:
            return
        for page in self.of(node):
            page.state[tier], page.page[tier] = ABSENT, -1
        self.tree.place(node, tier, ABSENT)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        leaves = [
            node
            for node in self.tree.nodes()
            if not node.children and not node.device.state and not node.host.state
        ]
        node = self.pick(data, leaves)
        if node is None:
            return
        for page in self.of(node):
            del self.pages[page.key]
        self.tree.delete(node)
        assert not node.is_alive

    @rule(data=st.data(), tier=TIERS)
    def pin(self, data: st.DataObject, tier: Tier) -> None:
        node = self.pick(data, list(self.tree.nodes()))
        if node is None:
            return
        pages = [page for above in node.path() for page in self.of(above)]
        self.tree.pin_path(node, tier)
        for page in pages:
            page.pins[tier] += 1
        self.pins.append((tier, node, pages))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """Also pins of nodes that were split or deleted meanwhile."""
        index = data.draw(st.integers(0, len(self.pins) - 1))
        tier, node, pages = self.pins.pop(index)
        self.tree.unpin_path(node, tier)
        for page in pages:
            page.pins[tier] -= 1

    @rule(data=st.data(), tier=TIERS)
    def open_carriage(self, data: st.DataObject, tier: Tier) -> None:
        """An intent brings a node into a tier, and splits must not get between them."""
        free = [
            node
            for node in self.tree.nodes()
            if node.parent is not None
            and (node.parent.is_root or node.parent.at(tier).state)
            and not node.at(tier).state
        ]
        node = self.pick(data, free)
        if node is None:
            return
        carriage = Carriage(tier, [node], node.parent)
        carriage.pages = self.fresh(node.num_pages)
        carriage.attach()
        pages = self.of(node)
        self.tree.place(node, tier, RESERVED)
        for page in pages:
            page.state[tier] = RESERVED
        self.carriages.append((carriage, pages))

    @precondition(lambda self: self.carriages)
    @rule(commits=st.booleans())
    def close_carriage(self, commits: bool) -> None:
        carriage, pages = self.carriages.pop()  # the last one: nothing builds on it
        tier = carriage.tier
        own = {node.node_id: carriage.pages_of(node) for node in carriage.nodes}
        above = carriage.nodes[0].parent
        commits = commits and above is not None and (above.is_root or above.at(tier).is_published)
        for node in carriage.detach():
            if commits:
                self.tree.place(node, tier, RESIDENT, own[node.node_id])
            else:
                self.tree.place(node, tier, ABSENT)
            assert node.at(tier).carriage is None
            assert carriage not in node.carriages
        for page, index in zip(pages, carriage.pages, strict=True):
            page.state[tier] = RESIDENT if commits else ABSENT
            page.page[tier] = index if commits else -1

    # -- what must agree -------------------------------------------------------------------------

    @invariant()
    def same_pages(self) -> None:
        self.tree.check_integrity()
        seen = 0
        for node in self.tree.nodes():
            for offset, page in enumerate(self.of(node)):
                seen += 1
                for tier in Tier:
                    presence = node.at(tier)
                    assert presence.state is page.state[tier]
                    assert presence.pins == page.pins[tier]
                    if presence.is_published:
                        assert presence.pages[offset] == page.page[tier]
        assert seen == len(self.pages)

    @invariant()
    def same_carriages(self) -> None:
        for carriage, pages in self.carriages:
            covered = [page for node in carriage.nodes for page in self.of(node)]
            assert covered == pages
            assert all(node.at(carriage.tier).carriage is carriage for node in carriage.nodes)
            assert [p for node in carriage.nodes for p in carriage.pages_of(node)] == carriage.pages

    @invariant()
    def same_counters(self) -> None:
        """Pinned pages include those of deleted nodes; evictable is what could really all go."""
        ghosts = {page: None for _, _, pages in self.pins for page in pages}
        known = list(dict.fromkeys([*self.pages.values(), *ghosts]))
        for tier in Tier:
            assert self.tree.num_pinned[tier] == sum(page.pins[tier] > 0 for page in known)
            stays = [
                page
                for page in self.pages.values()
                if page.state[tier] and (page.state[tier] is not RESIDENT or page.pins[tier])
            ]
            blocked = {
                (page.key[0], page.key[1][:end])
                for page in stays
                for end in range(len(page.key[1]) + 1)
            }
            may_go = [
                page
                for page in self.pages.values()
                if page.state[tier] is RESIDENT and page.key not in blocked
            ]
            assert self.tree.num_evictable[tier] == len(may_go)


TestTwin = Twin.TestCase
TestTwin.settings = settings(max_examples=40, stateful_step_count=30)


def test_namespaces_share_nothing_and_leave_nothing() -> None:
    tree = make_tree()
    (one,) = tree.insert(prompt("ab"), "one")
    assert tree.match(prompt("ab"), "two") == []
    assert tree.match(prompt("ab")) == []
    (two,) = tree.insert(prompt("ab"), "two")
    assert two is not one
    tree.delete(one)
    assert tree.match(prompt("ab"), "one") == []
    assert tree.match(prompt("ab"), "two") == [two]
    tree.delete(two)
    assert not tree._roots  # tenants that left hold no memory


def test_illegal_calls_raise_and_change_nothing() -> None:
    tree = make_tree()
    (node,) = tree.insert(prompt("abc"))
    for num_pages in (0, 3, -1):
        with pytest.raises(InternalError, match="cannot split"):
            tree.split(node, num_pages)
    with pytest.raises(InternalError, match="not pinned"):
        tree.unpin(node, Tier.DEVICE)
    with pytest.raises(InternalError, match="gets 1 pages"):
        tree.place(node, Tier.DEVICE, RESIDENT, [7])
    tree.check_integrity()
    tree.place(node, Tier.DEVICE, RESIDENT, [7, 8, 9])
    with pytest.raises(InternalError, match="still in device"):
        tree.delete(node)
    tree.match(prompt("ab"))
    upper = tree.match(prompt("ab"))[0]
    with pytest.raises(InternalError, match="children"):
        tree.delete(upper)
    tree.check_integrity()


def _tell(story: list[object], *note: object) -> None:
    story.append(note)


def test_the_same_calls_give_the_same_notes() -> None:
    """Ids and recency come from a logical clock: two ranks write the same journal."""
    stories: list[list[object]] = []
    for first_page in (0, 100):
        story: list[object] = []
        tree = RadixTree(PAGE_SIZE, LeastRecentlyUsed(), partial(_tell, story))
        (node,) = tree.insert(prompt("abc"))
        tree.place(node, Tier.DEVICE, RESIDENT, [first_page, first_page + 1, first_page + 2])
        tree.match(prompt("abd"))
        tree.insert(prompt("abde"))
        stories.append(story)
    assert stories[0] == stories[1]
    assert len(stories[0]) >= 5


def test_check_integrity_finds_what_is_wrong() -> None:
    tree = make_tree()
    (node,) = tree.insert(prompt("abc"))
    tree.place(node, Tier.DEVICE, RESIDENT, [0, 1, 2])
    tree.check_integrity()
    node.device.pins += 1
    with pytest.raises(InternalError, match="counts as FREE"):
        tree.check_integrity()
    node.device.pins -= 1
    tree.num_pinned[Tier.HOST] += 1
    with pytest.raises(InternalError, match="pinned"):
        tree.check_integrity()
    tree.num_pinned[Tier.HOST] -= 1
    node.device.pages = node.device.pages[:-1]
    with pytest.raises(InternalError, match="2 pages"):
        tree.check_integrity()


def test_a_tree_knows_which_nodes_are_its_own() -> None:
    tree, other = make_tree(), make_tree()
    node, theirs = tree.insert(prompt("ab"))[-1], other.insert(prompt("ab"))[-1]
    assert tree.has(node)
    assert not tree.has(theirs)
    upper = tree.split(node, 1)
    assert tree.has(upper)
    assert tree.has(node)
    tree.delete(node)
    assert not tree.has(node)
    tree.clear()
    tree.insert(prompt("ab"))
    assert not tree.has(upper), "it is of the tree before"


# --- a split divides every field ---------------------------------------------------------------


def split_in_use() -> tuple[Node, Node, Node, Carriage, tuple[Carriage, ...]]:
    """A node of 4 pages with something in every field, cut after 1: upper, lower, a child of the
    lower one, the carriage that brings it to HOST, and the loads that it was computed on."""
    tree = make_tree()
    node = tree.insert(prompt("abcd"), "tenant", priority=3)[-1]
    child = tree.insert(prompt("abcdx"), "tenant", priority=2)[-1]
    tree.match(prompt("abcd"), "tenant")
    tree.place(node, Tier.DEVICE, RESIDENT, [10, 11, 12, 13])
    tree.place(child, Tier.DEVICE, RESIDENT, [14])
    tree.place(node, Tier.HOST, RESERVED)
    tree.pin(node, Tier.DEVICE)
    tree.pin(child, Tier.DEVICE)
    node.device.side = {"every": [(0, 20), (1, 21), (2, 22), (3, 23)], "last": [(3, 24)]}
    node.keys = (b"a", b"b", b"c", b"d")
    node.hashes = (1, 2, 3, 4)
    node.is_queued = node.is_stored = node.is_dropped = True
    built_on = (Carriage(Tier.DEVICE, [], None),)
    node.built_on = built_on
    carriage = Carriage(Tier.HOST, [node], None)
    carriage.attach()
    upper = tree.split(node, 1)
    tree.check_integrity()
    return upper, node, child, carriage, built_on


def plain(node: Node, name: str) -> object:
    """A field in a form that can be compared."""
    if name == "children":
        return list(node.children.values())
    return node.tokens.tolist() if name == "tokens" else getattr(node, name)


def test_a_split_says_for_every_field_of_a_node_what_becomes_of_it() -> None:
    upper, lower, child, carriage, built_on = split_in_use()
    both: dict[str, tuple[object, object]] = {  # field: what the upper, and what the lower part has
        "built_on": (built_on, built_on),
        "carriages": ((carriage,), (carriage,)),
        "children": ([lower], [child]),
        "hashes": ((1,), (2, 3, 4)),
        "hits": (3, 3),
        "is_alive": (True, True),
        "is_dropped": (True, True),
        "is_queued": (True, True),
        "is_stored": (True, True),
        "keys": ((b"a",), (b"b", b"c", b"d")),
        "last_access": (3, 3),
        "namespace": ("tenant", "tenant"),
        "node_id": (3, 1),
        "num_pages": (1, 3),
        "parent": (upper.parent, upper),
        "priority": (3, 3),
        "tokens": (prompt("a").tolist(), prompt("bcd").tolist()),
    }
    assert {*both, "device", "host"} == set(Node.__slots__), (
        "say what a split does with a new field"
    )
    for name, (first, second) in both.items():
        assert plain(upper, name) == first, name
        assert plain(lower, name) == second, name
    assert carriage.nodes == [upper, lower]


def test_a_split_says_for_every_field_of_a_presence_what_becomes_of_it() -> None:
    upper, lower, _, carriage, _ = split_in_use()
    device: dict[str, tuple[object, object]] = {
        "carriage": (None, None),
        "num_children": (1, 1),
        "num_stuck": (1, 1),
        "pages": ((10,), (11, 12, 13)),
        "pins": (1, 1),
        "side": (
            {"every": [(0, 20)], "last": []},
            {"every": [(0, 21), (1, 22), (2, 23)], "last": [(2, 24)]},
        ),
        "standing": (Standing.STUCK, Standing.STUCK),
        "state": (RESIDENT, RESIDENT),
    }
    assert device.keys() == set(Presence.__slots__), "a new field: what of it?"
    for name, expected in device.items():
        assert (getattr(upper.device, name), getattr(lower.device, name)) == expected, name
    assert (upper.host.carriage, lower.host.carriage) == (carriage, carriage)
    assert (upper.host.state, lower.host.state) == (RESERVED, RESERVED)
    assert (upper.host.num_children, lower.host.num_children) == (1, 0)


def test_a_leaf_costs_the_collector_three_objects() -> None:
    """It stops a rank while it walks all objects, and the other ranks wait: node and presences."""
    tree = make_tree()
    count = 1000
    gc.collect()
    before = len(gc.get_objects())
    for number in range(count):
        tokens = np.full(PAGE_SIZE, number, dtype=np.int32)
        (leaf,) = tree.insert(tokens)
        for tier in Tier:
            tree.place(leaf, tier, Residency.RESIDENT, [number])
    for order in tree.order.values():
        order.clear()
    gc.collect()  # tuples of numbers are let go when they are first walked
    assert (len(gc.get_objects()) - before) / count < 3.1

"""The border: what callers hand in is refused by name before anything changes.

One test goes over every public call of the cache and every parameter: a wrong value on one rank is
a Misuse there, and the next step of all ranks is a good one.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpact.cache.choices import Eviction, Mode, PrefetchPolicy, SideNeed
from kvpact.cache.config import CacheConfig
from kvpact.cache.hierarchical_cache import HierarchicalCache
from kvpact.cache.join import join_cache
from kvpact.cache.requests.results import Match
from kvpact.cache.tree.node import Tier
from kvpact.cache.tree.side import SideSpec
from kvpact.consensus.core.border import MOST, as_count, as_seconds, as_text
from kvpact.consensus.core.errors import Misuse
from kvpact.consensus.core.journal import Journal
from kvpact.consensus.epoch.report import Policy, PolicyKind
from tests.cache_world import World, prompt

SURROGATE = "salt\ud800"
TEXTS: list[Any] = [SURROGATE, 7, None, b"r", 1.5, ["r"]]
COUNTS: list[Any] = [1.5, True, "3", None, -1, 10**30, np.float64(2), np.array([1, 2]), [1]]
TOKENS: list[Any] = [
    [1, 2, 3, 4],
    "abcd",
    7,
    prompt("ab").astype(np.int64),
    prompt("ab").reshape(2, -1),
]

#: By parameter: a right value, and wrong ones.
VALUES: dict[str, tuple[Any, list[Any]]] = {
    "complete": (True, [1, None, "yes"]),
    "extra_pages": (1, COUNTS),
    "fill": (None, [7, "fill"]),
    "fill_side": (None, [7, "fill"]),
    "hold": (False, [1, "no", None]),
    "iteration": (1, COUNTS),
    "layer": (0, [*COUNTS, 2]),
    "loads": ((), [7, None, "12", [1.5], [-1]]),
    "match": (None, [None, 7, (1, 2)]),
    "minimum_pages": (None, [0, *(one for one in COUNTS if one is not None)]),
    "namespace": ("", TEXTS),
    "num_pages": (1, COUNTS),
    "pages_max": (None, [one for one in COUNTS if one is not None]),
    "priority": (0, [*COUNTS, 2**70]),
    "reason": ("capture", TEXTS),
    "request": ("r", TEXTS),
    "requests": (["r"], [7, None, "r", [SURROGATE], [7]]),
    "tier": (Tier.HOST, ["storage", "DEVICE", 7, None, ["host"]]),
    "timeout_s": (0.0, [-1.0, float("nan"), float("inf"), "1", None, True]),
    "tokens": (prompt("abcd"), TOKENS),
    "version": ("2", [*TEXTS, ""]),
}
#: Where nothing at all is a right value.
OPTIONAL = {("match_prefix", "request")}


def public_calls() -> list[str]:
    """The methods that a scheduler may call."""
    members = inspect.getmembers(HierarchicalCache, inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_")]


def parameters(name: str) -> list[str]:
    signature = inspect.signature(getattr(HierarchicalCache, name))
    return [one for one in signature.parameters if one != "self"]


def running_world() -> World:
    """Two ranks with a storage and a live request that holds two pages and owns two."""
    world = World(storage=True, headroom_pages=2)
    world.store("ab")
    world.match("abcd", "r")
    world.own("abcd", "r")
    return world


@pytest.mark.parametrize("name", public_calls())
def test_a_wrong_value_is_a_misuse_that_changes_nothing_and_the_next_step_is_good(
    name: str,
) -> None:
    assert set(parameters(name)) <= VALUES.keys(), "say what is right and wrong for a new parameter"
    world = running_world()
    matches = world.match("ab")
    for parameter in parameters(name):
        for wrong in VALUES[parameter][1]:
            if wrong is None and (name, parameter) in OPTIONAL:
                continue
            given_values = {one: VALUES[one][0] for one in parameters(name)}
            given_values |= {"match": matches[0]} if "match" in given_values else {}
            given_values[parameter] = wrong
            before = world.caches[0].journal.fingerprint, world.caches[0].core.requests.digest
            with pytest.raises(Misuse) as caught:
                getattr(world.caches[0], name)(**given_values)
            told = str(caught.value)
            assert parameter.partition("_")[0] in told, f"{told!r} does not say where"
            assert (
                world.caches[0].journal.fingerprint,
                world.caches[0].core.requests.digest,
            ) == before
    world.step()
    world.insert("abcd", "r")
    world.finish("r")
    world.drain()
    world.is_empty()


def other_prompt(cache: HierarchicalCache) -> object:
    cache.free("r", 2)
    return cache.match_prefix(prompt("xy"), request="r")


def clearing(cache: HierarchicalCache) -> HierarchicalCache:
    cache.clear_storage()
    return cache


CALLS: list[tuple[str, Callable[[HierarchicalCache], object]]] = [
    ("not live", lambda cache: cache.allocate("unknown", 1)),
    ("at most 16", lambda cache: cache.expect_pages(17)),
    ("matches other tokens", other_prompt),
    ("it is attached", lambda cache: cache.attach_storage()),
    ("being cleared", lambda cache: clearing(cache).attach_storage()),
    ("being cleared", lambda cache: clearing(cache).detach_storage()),
    ("being cleared", lambda cache: clearing(cache).clear_storage()),
    ("inside a step", lambda cache: (cache.begin_step(50), cache.reset())),
    ("inside a step", lambda cache: (cache.begin_step(50), cache.new_weights("2"))),
    ("before it had returned", lambda cache: (cache.begin_step(50), cache.begin_step(51))),
]


@pytest.mark.parametrize("message,call", CALLS)
def test_what_is_not_for_now_is_a_misuse_and_the_next_step_is_good(
    message: str, call: Callable[[HierarchicalCache], object]
) -> None:
    world = running_world()
    world.drain()
    world.iteration = 49
    for cache in world.caches:
        with pytest.raises(Misuse, match=message):
            call(cache)
    if "step" in message or "returned" in message:
        world.iteration = 50
        world.finish_step()
    world.step()
    world.drain()
    world.abort("r")
    world.drain()
    world.is_empty()


def test_numbers_of_numpy_are_numbers() -> None:
    one: Any = np.int64(1)
    two: Any = np.int32(2)
    world = running_world()
    assert world.each(lambda cache: len(cache.allocate("r", one) or [])) == [1, 1]
    tickets = world.each(lambda cache: cache.request_pages("r", two))
    world.each(lambda cache: cache.expect_pages(one))
    world.drain()
    assert [ticket.num_pages for ticket in tickets] == [2, 2]
    world.abort("r")
    world.drain()
    world.is_empty()


@given(st.text(st.characters(categories=["Cs", "Lu", "Zs"]), max_size=6))
def test_a_text_passes_exactly_if_it_can_be_written(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        with pytest.raises(Misuse, match="surrogate"):
            as_text("request", text)
    else:
        assert as_text("request", text) is text
        Journal(0).note("match", text)


@given(st.integers(-10, 2**70), st.integers(0, 5))
def test_a_count_passes_exactly_within_its_limits(number: int, least: int) -> None:
    if least <= number <= MOST:
        assert as_count("pages", number, least) == number
    else:
        with pytest.raises(Misuse, match=r"pages must be at (least|most)"):
            as_count("pages", number, least)


def test_seconds_are_finite() -> None:
    assert as_seconds("timeout_s", 0) == 0.0
    for wrong in VALUES["timeout_s"][1]:
        with pytest.raises(Misuse, match="timeout_s must be a finite number"):
            as_seconds("timeout_s", wrong)


def test_a_decision_that_cannot_be_written_is_refused_before_it_counts() -> None:
    journal = Journal(0)
    for wrong in (SURROGATE, 2**70, object()):
        with pytest.raises(Misuse, match=r"match .* cannot be written into the journal"):
            journal.note("match", wrong)  # type: ignore[arg-type]
    assert (journal.count, journal.fingerprint) == (0, 0)


# --- configurations -----------------------------------------------------------------------------


def config(**fields: Any) -> CacheConfig:
    known: dict[str, Any] = {"page_size": 4, "device_pages": 8, "host_pages": 8}
    return CacheConfig(**(known | fields))


CHOICES: dict[str, type[enum.StrEnum]] = {
    "mode": Mode,
    "eviction": Eviction,
    "prefetch_policy": PrefetchPolicy,
    "policy": PolicyKind,
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_closed_choice_is_read_once_and_a_wrong_word_names_field_and_choices(name: str) -> None:
    for word in CHOICES[name]:
        assert getattr(config(**{name: str(word)}), name) is word
        assert getattr(config(**{name: word}), name) is word
    first = str(next(iter(CHOICES[name])))
    for wrong in ("writeback", "", 7, None, ["lru"]):
        with pytest.raises(Misuse, match=f"{name} must be one of {first!r}, "):
            config(**{name: wrong})


def test_every_field_of_a_configuration_is_checked() -> None:
    wrongs: dict[type, list[Any]] = {
        int: [1.5, "4", None, True, -1, 2**70],
        float: ["1", None, float("nan"), float("inf"), -1.0, True],
        bool: [1, "no", None],
        str: ["panic", 7, None],
    }
    for field in msgspec.structs.fields(CacheConfig):
        for wrong in wrongs.get(field.type, []):
            if wrong == "panic" and field.name not in CHOICES:
                continue  # a free text
            with pytest.raises(Misuse, match=field.name):
                config(**{field.name: wrong})
    spec = SideSpec("mamba", "per_node")
    for pages in ((1,), (1, 2, 3), (1.5, 2), (-1, 2)):
        with pytest.raises(Misuse, match="side_pages of 'mamba'"):
            config(side_pools=(spec,), side_pages={"mamba": pages})


def test_the_need_of_a_side_pool_and_the_kind_of_a_policy_are_closed_choices() -> None:
    assert SideSpec("mamba", "per_node").need is SideNeed.PER_NODE
    assert Policy("reset").kind is PolicyKind.RESET
    with pytest.raises(Misuse, match="side pool mamba: need must be one of 'per_page', "):
        SideSpec("mamba", "per_block")
    with pytest.raises(Misuse, match="policy must be one of 'raise', "):
        Policy("restart")


# --- joining ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message,given_values",
    [
        ("rank 5 is not one of the ranks", {"rank": 5}),
        ("each rank is there once", {"ranks": [0, 0]}),
        ("numbers from 0 on", {"ranks": [0, -1]}),
        ("port must be at most 65535", {"port": 70_000}),
        ("name .* cannot be written", {"name": SURROGATE}),
        ("model must be a text", {"model": None}),
    ],
)
def test_who_joins_in_a_wrong_place_is_told_at_once(
    message: str, given_values: dict[str, Any]
) -> None:
    values: dict[str, Any] = {"port": 1, "name": "r", "rank": 0, "ranks": [0], "model": "m"}
    values |= given_values
    port = values.pop("port")
    with pytest.raises(Misuse, match=message):
        join_cache(config(), "127.0.0.1", port, **values)


def test_side_pools_must_be_those_of_the_configuration() -> None:
    spec = SideSpec("mamba", "per_node")
    wanted = config(side_pools=(spec,), side_pages={"mamba": (4, 4)})
    with pytest.raises(Misuse, match=r"differ in \['mamba'\]"):
        join_cache(wanted, "127.0.0.1", 1, name="r", rank=0, ranks=[0])


def test_a_match_says_of_which_epoch_it_is() -> None:
    world = World()
    assert {match.epoch for match in world.match("ab")} == {0}
    world.each(lambda cache: cache.reset())
    first: Match = world.match("ab")[0]
    assert first.epoch == 1

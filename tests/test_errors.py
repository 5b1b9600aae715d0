"""Errors: split by blame, complete after pickling, readable."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from kvpact.consensus.core import errors
from kvpact.consensus.core.ballot import HEADER_FIELDS
from kvpact.consensus.core.errors import (
    BadInput,
    Divergence,
    InternalError,
    KvpactError,
    Misuse,
    PeerError,
    PeerLost,
    ProgressLost,
    RankStalled,
    ResourceError,
    StoreSilent,
)

WHERE: dict[str, Any] = {"ranks": (2, 5), "epoch": 3, "step": 41, "story": ("first", "then")}
EXTRA: dict[type[KvpactError], dict[str, Any]] = {
    Divergence: {"field": "iteration", "ours": 7, "theirs": 8},
    RankStalled: {"phase": "waiting", "waited_s": 1.5, "dead": True},
}
CLASSES = [getattr(errors, name) for name in errors.__all__]


def make(kind: type[KvpactError]) -> KvpactError:
    return kind("it went wrong", **WHERE, **EXTRA.get(kind, {}))


@pytest.mark.parametrize(
    "kind,blame",
    [
        (Misuse, KvpactError),
        (BadInput, Misuse),
        (PeerError, KvpactError),
        (Divergence, PeerError),
        (RankStalled, PeerError),
        (PeerLost, PeerError),
        (ProgressLost, PeerError),
        (ResourceError, KvpactError),
        (StoreSilent, ResourceError),
        (InternalError, KvpactError),
    ],
)
def test_hierarchy_says_who_is_to_blame(kind: type[KvpactError], blame: type[KvpactError]) -> None:
    assert kind.__bases__ == (blame,)
    others = {Misuse, PeerError, ResourceError, InternalError} - set(kind.__mro__)
    assert len(others) == 3, "exactly one is to blame"


@pytest.mark.parametrize("kind", CLASSES)
def test_everything_survives_pickling(kind: type[KvpactError]) -> None:
    error = make(kind)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert again.__dict__ == error.__dict__
        assert again.args == error.args
        assert str(again) == str(error)
    assert set(error.__dict__) >= {"message", "rank", "ranks", "epoch", "step", "story"}
    assert set(error.__dict__) >= set(EXTRA.get(kind, {}))


@pytest.mark.parametrize("kind", CLASSES)
def test_text_says_what_where_and_what_to_do(kind: type[KvpactError]) -> None:
    lines = str(make(kind)).splitlines()
    assert lines[0] == "it went wrong (epoch 3, step 41)"
    assert lines[1:3] == ["    first", "    then"]
    advice = make(kind).advice
    assert lines[3:] == ([f"  what to do: {advice}"] if advice else [])
    own_bug_or_peers = not issubclass(kind, Misuse) and kind is not KvpactError
    assert bool(advice) == own_bug_or_peers, "a misuse says in its message what to do"


def test_text_of_an_error_from_nowhere_is_its_message() -> None:
    assert str(Misuse("do it otherwise")) == "do it otherwise"
    assert str(Misuse("no", epoch=0, step=0)) == "no (epoch 0, step 0)", "zero is a place too"


def test_rank_and_ranks_name_the_same() -> None:
    assert (PeerError("x").rank, PeerError("x").ranks) == (None, ())
    assert (PeerError("x", rank=0).rank, PeerError("x", rank=0).ranks) == (0, (0,))
    assert (PeerError("x", ranks=[4, 6]).rank, PeerError("x", ranks=[4, 6]).ranks) == (4, (4, 6))


def test_extra_attributes_have_defaults() -> None:
    divergence, stall = Divergence("x"), RankStalled("x")
    assert (divergence.field, divergence.ours, divergence.theirs) == ("", 0, 0)
    assert (stall.phase, stall.waited_s, stall.dead) == ("", 0.0, False)


@pytest.mark.parametrize("field", HEADER_FIELDS)
def test_a_divergence_says_where_to_look_for_each_field(field: str) -> None:
    advice = {name: Divergence("x", field=name).advice for name in HEADER_FIELDS}
    assert len(set(advice.values())) == len(HEADER_FIELDS)
    assert advice[field]
    assert "majority" not in advice[field]
    assert "majority" in Divergence("x", field=field, ranks=(0, 1)).advice


def test_a_dead_rank_is_looked_for_elsewhere_than_a_stuck_one() -> None:
    assert "paused(reason)" in RankStalled("x").advice
    assert "has ended" in RankStalled("x", dead=True).advice


@pytest.mark.parametrize("kind", CLASSES)
def test_its_repr_says_all_on_one_line(kind: type[KvpactError]) -> None:
    told = repr(make(kind))
    assert told == (
        f"{kind.__name__}('it went wrong', ranks=(2, 5), epoch=3, step=41, story=('first', 'then'))"
    )
    assert repr(kind("no place")) == f"{kind.__name__}('no place')"
    assert repr(pickle.loads(pickle.dumps(make(kind)))) == told

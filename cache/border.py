"""The border of the cache: tokens, tiers and handles that callers hand in.

See :mod:`kvpact.consensus.core.border` for what is not the cache's alone.
"""

from __future__ import annotations

from typing import TypeVar, cast

import numpy as np

from kvpact.cache.requests.results import Match
from kvpact.cache.tree.node import Fill, FillSide, Tier, Tokens
from kvpact.consensus.core.border import as_choice, told
from kvpact.consensus.core.errors import Misuse

__all__ = ["as_call", "as_match", "as_tier", "as_tokens"]

_INT32 = np.dtype(np.int32)
_Call = TypeVar("_Call", Fill | None, FillSide | None)


def as_tokens(value: object) -> Tokens:
    """Token ids: a 1-D int32 array. Children are found by the bytes of a page: other types would
    never match."""
    if not isinstance(value, np.ndarray):
        raise Misuse(f"tokens must be a 1-D int32 array, got {told(value)}")
    tokens = cast("Tokens", value)
    if tokens.dtype != _INT32 or tokens.ndim != 1:
        raise Misuse(f"tokens must be a 1-D int32 array, got {tokens.dtype} {tokens.shape}")
    return tokens


def as_tier(value: str) -> Tier:
    """A tier that has pages: DEVICE or HOST."""
    return as_choice("tier", Tier, value)


def as_match(value: object) -> Match:
    """A match as ``match_prefix`` returned it, at whatever time."""
    if not isinstance(value, Match):
        raise Misuse(f"match must be what match_prefix() returned, got {told(value)}")
    return value


def as_call(what: str, arguments: str, value: _Call) -> _Call:
    """A function for such ``arguments``, or nothing."""
    if value is not None and not callable(value):
        raise Misuse(f"{what} must be callable with ({arguments}), got {told(value)}")
    return value

"""Results of the cache's calls."""

from __future__ import annotations

import msgspec
import numpy as np

from kvpact.cache.tree.node import Node, Tokens
from kvpact.consensus.core.participant import Outcome

__all__ = ["EMPTY", "InsertResult", "Match", "StepResult"]

#: No tokens at all.
EMPTY: Tokens = np.empty(0, dtype=np.int32)


class Match(msgspec.Struct, frozen=True):
    """A prefix that can be served. Lengths in pages: ``host_pages`` lie beyond ``device_pages``.

    ``pages`` are the device page indices of this rank, in order: they are good for as long as a
    request pins them, and no longer than ``epoch``. The rest may be used at any later time.
    """

    node: Node | None
    pages: list[int]
    device_pages: int
    host_pages: int
    epoch: int
    storage_pages: int = 0
    tokens: Tokens = EMPTY
    namespace: str = ""


class InsertResult(msgspec.Struct, frozen=True):
    """``pages``: device page indices of the whole inserted prefix, for the engine's rows.

    ``new_pages`` entered the tree; ``duplicate_pages`` of the request's own were there already and
    have been freed. The request pins the prefix; what it owns beyond stays its own.
    """

    pages: list[int]
    new_pages: int
    duplicate_pages: int


class StepResult(msgspec.Struct, frozen=True):
    """The result of one step.

    ``must_recompute``: requests whose loaded bytes turned out void. ``was_reset``: the step ended
    an epoch and began another (policy reset or detach); ``lost`` are the live requests that were
    not the same on all ranks: the engine aborts them, the others go on with the pages they hold.
    """

    outcomes: list[Outcome]
    must_recompute: tuple[str, ...]
    lost: tuple[str, ...] = ()
    was_reset: bool = False

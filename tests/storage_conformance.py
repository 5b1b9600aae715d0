"""What every storage backend must do, as a Hypothesis machine beside a dictionary that is its twin.

Keys and pages are few and small, so that they are put again, replaced, removed and evicted often.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvpact.cache.storage import BackendBase, seal
from kvpact.consensus.core.errors import Misuse
from tests.storage_pages import key_of, page_of, sealed

NUM_KEYS = 12
VERSIONS = 3


class Make(Protocol):
    """Opens a backend; again for ``reopens``: what the one closed before has left."""

    def __call__(self) -> BackendBase: ...


class Conformance(RuleBasedStateMachine):
    """See `check_conformance`; it is given its world by a subclass."""

    make: Make
    roomy: bool
    reopens: bool
    keeps_open: bool

    def wipe(self) -> None:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.wipe()
        self.backend = type(self).make()
        self.twin: dict[int, bytes] = {}  # by number, what may be served

    def teardown(self) -> None:
        if not self.keeps_open:
            assert self.backend.close()

    @rule(
        batch=st.lists(
            st.tuples(st.integers(0, NUM_KEYS - 1), st.integers(0, VERSIONS - 1)),
            max_size=6,
            unique_by=lambda pair: pair[0],
        )
    )
    def put(self, batch: list[tuple[int, int]]) -> None:
        kept = self.backend.put([sealed(*pair) for pair in batch])
        assert len(kept) == len(batch)
        for (number, version), is_kept in zip(batch, kept, strict=True):
            if is_kept:
                self.twin[number] = page_of(number, version)
        assert not self.roomy or all(kept)
        # Exact: what was acknowledged is there now, whatever else had to go for it.
        there = self.backend.get([key_of(number) for number, _ in batch])
        for (number, version), is_kept, page in zip(batch, kept, there, strict=True):
            assert not is_kept or page == page_of(number, version)

    @rule(numbers=st.lists(st.integers(0, NUM_KEYS + 2), max_size=8))
    def get(self, numbers: list[int]) -> None:
        keys = [key_of(number) for number in numbers]
        exist = self.backend.exists(keys)
        pages = self.backend.get(keys)
        assert exist == [page is not None for page in pages]
        for number, page in zip(numbers, pages, strict=True):
            assert page is None or page == self.twin.get(number)
            assert not self.roomy or (page is not None) == (number in self.twin)

    @rule(numbers=st.lists(st.integers(0, NUM_KEYS - 1), max_size=4, unique=True))
    def remove(self, numbers: list[int]) -> None:
        removed = self.backend.remove([key_of(number) for number in numbers])
        if self.roomy:
            assert removed == [number in self.twin for number in numbers]
        for number in numbers:
            self.twin.pop(number, None)
        assert not any(self.backend.exists([key_of(number) for number in numbers]))

    @rule(number=st.integers(0, NUM_KEYS - 1))
    def read_wrong_bytes(self, number: int) -> None:
        """What comes back spoilt is a miss, counted, and can be stored again."""
        before = dict(self.backend.counters)
        self.backend.spoils = lambda _: True
        there = self.backend.exists([key_of(number)])[0]
        assert self.backend.get([key_of(number)]) == [None]
        self.backend.spoils = None
        assert self.backend.counters["wrong"] == before["wrong"] + there
        assert self.backend.counters["hits"] == before["hits"]
        assert not self.backend.exists([key_of(number)])[0]
        version = number % VERSIONS
        (kept,) = self.backend.put([sealed(number, version)])
        self.twin.pop(number, None)
        if kept:
            self.twin[number] = page_of(number, version)

    @rule(number=st.integers(0, NUM_KEYS - 1))
    def put_what_was_reused_meanwhile(self, number: int) -> None:
        """A page whose memory changed after it was sealed is never served."""
        page = bytearray(page_of(number, 1))
        torn = seal(key_of(number), page)
        page[100] ^= 1
        self.backend.remove([key_of(number)])
        self.twin.pop(number, None)
        assert self.backend.put([torn]) == [False]
        assert self.backend.get([key_of(number)]) == [None]

    @rule()
    def clear(self) -> None:
        assert self.backend.clear()
        self.twin.clear()

    @rule()
    def reopen(self) -> None:
        if not self.reopens:
            return
        assert self.backend.close()
        self.backend = type(self).make()

    @invariant()
    def is_sound(self) -> None:
        check = getattr(self.backend, "check_integrity", None)
        if check is not None:
            check()


def check_conformance(
    make: Make,
    *,
    roomy: bool,
    reopens: bool,
    wipe: Callable[[], object] = lambda: None,
    keeps_open: bool = False,
    **options: Any,
) -> None:
    """``roomy``: there is room for all, so nothing may be missing. ``wipe``: start from nothing."""

    class World(Conformance):
        def wipe(self) -> None:
            wipe()

    World.make, World.roomy = staticmethod(make), roomy
    World.reopens, World.keeps_open = reopens, keeps_open
    run_state_machine_as_test(World, settings=settings(**options) if options else None)


def check_calls(backend: BackendBase) -> None:
    """Empty batches, unknown keys, mistakes of the caller, and the end. ``backend`` is closed."""
    assert backend.exists([]) == [] == backend.get([])
    assert backend.put([]) == [] == backend.remove([])
    assert backend.get([key_of(1), key_of(2)]) == [None, None]
    assert backend.remove([key_of(1)]) == [False]
    assert backend.put([sealed(1), sealed(2)]) == [True, True]
    assert backend.get([key_of(2), key_of(9), key_of(1), key_of(2)]) == [
        page_of(2),
        None,
        page_of(1),
        page_of(2),
    ]
    for wrong in ([b"short"], [key_of(1)] * 4097):
        for call in (backend.exists, backend.get, backend.remove):
            with pytest.raises(Misuse):
                call(wrong)
    assert backend.close()
    assert backend.close(), "a second close is harmless"
    for late in (backend.clear, lambda: backend.put([]), lambda: backend.get([])):
        with pytest.raises(Misuse, match="closed"):
            late()

"""The physical pages of one tier on this rank.

Local facts only: which pages are free, which are out, which are still touched by a copy. Nothing
here is agreed between ranks and no tensor is involved; page ids may differ from rank to rank.

A page is in one of three states::

    FREE  --reserve-->  OUT  --free, not held-->  FREE
                        OUT  --free, held----->   LIMBO  --last release-->  FREE

*Held* means that a copy in flight reads or writes the page. A held page is never handed out, so
that no copy can spoil, or read, what the page's next owner writes.

Not thread-safe: only the thread that steps the cache calls a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvpact.consensus.core.errors import ConservationBroken, InternalError, Misuse

__all__ = ["PagePool"]

_FREE, _OUT, _LIMBO = 0, 1, 2
_STATE_NAMES = ("free", "out", "in limbo")


class PagePool:
    """Pages ``0 .. num_pages - 1`` of the pool ``name``.

    Every call costs O(1) per page it names, whatever the size of the pool. A call that raises has
    changed nothing.
    """

    __slots__ = ("_free", "_holds", "_num_limbo", "_state", "fact", "name", "num_pages")

    def __init__(self, name: str, num_pages: int) -> None:
        if num_pages < 0:
            raise Misuse(f"pool {name!r}: num_pages must be at least 0, not {num_pages}")
        self.name = name
        self.num_pages = num_pages
        # A stack: the end is handed out first. A page freed last is used first, which makes a
        # reuse that comes too early show at once instead of a whole turn of the pool later.
        self._free: list[int] = list(range(num_pages - 1, -1, -1))
        self._state: list[int] = [_FREE] * num_pages
        self._holds: list[int] = [0] * num_pages
        self._num_limbo = 0
        #: Where the moves of pages are written down (the journal's file); ``None``: nowhere.
        self.fact: Callable[..., None] | None = None

    @property
    def num_free(self) -> int:
        """Pages that a reservation can take now."""
        return len(self._free)

    @property
    def num_limbo(self) -> int:
        """Pages without an owner that a copy still reads or writes."""
        return self._num_limbo

    @property
    def num_out(self) -> int:
        """Pages that have an owner."""
        return self.num_pages - len(self._free) - self._num_limbo

    @property
    def usable(self) -> int:
        """Pages this rank can really use: all but those in limbo."""
        return self.num_pages - self._num_limbo

    def reserve(self, num_pages: int) -> list[int] | None:
        """Take exactly ``num_pages`` pages, or none at all and return ``None``.

        The order is deterministic: the page freed last comes first, and pages freed in one call
        come back in the order of that call. Raises `InternalError` for a negative number.
        """
        if num_pages < 0:
            raise InternalError(f"pool {self.name!r}: cannot reserve {num_pages} pages")
        if num_pages > len(self._free):
            return None
        return self._take(num_pages)

    def reserve_up_to(self, num_pages: int) -> list[int]:
        """Take ``num_pages`` pages or as many as there are; order and raises as `reserve`."""
        if num_pages < 0:
            raise InternalError(f"pool {self.name!r}: cannot reserve {num_pages} pages")
        return self._take(min(num_pages, len(self._free)))

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back; those held by a copy go to limbo until their last release.

        Raises `InternalError` for a page that is unknown, not out, or named twice.
        """
        self._require_out(pages, "free")
        if len(set(pages)) != len(pages):
            twice = _first_repeated(pages)
            raise InternalError(f"pool {self.name!r}: page {twice} is freed twice in one call")
        state, holds, free = self._state, self._holds, self._free
        if self.fact is not None:
            self._note("put back", [page for page in pages if not holds[page]])
            self._note("limbo", [page for page in pages if holds[page]])
        # Backwards, so that freeing what was just reserved restores the stack exactly.
        for page in reversed(pages):
            if holds[page]:
                state[page] = _LIMBO
                self._num_limbo += 1
            else:
                state[page] = _FREE
                free.append(page)

    def hold(self, pages: Sequence[int]) -> None:
        """A copy that reads or writes ``pages`` starts. Counted: a page may have many holders.

        Raises `InternalError` for a page that is unknown or not out (a page without an owner is
        nothing that a new copy may touch).
        """
        self._require_out(pages, "hold")
        holds = self._holds
        for page in pages:
            holds[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """A copy that held ``pages`` has ended; pages in limbo return with their last holder.

        Raises `InternalError` for a page that is unknown or not held.
        """
        self._require_known(pages)
        state, holds, free = self._state, self._holds, self._free
        for position, page in enumerate(pages):
            if not holds[page]:
                for undone in pages[:position]:
                    holds[undone] += 1
                raise InternalError(
                    f"pool {self.name!r}: page {page} is released but no copy holds it"
                )
            holds[page] -= 1
        if self.fact is not None:
            back = [page for page in pages if state[page] == _LIMBO and not holds[page]]
            self._note("out of limbo", list(dict.fromkeys(back)))
        for page in reversed(pages):
            if state[page] == _LIMBO and not holds[page]:
                state[page] = _FREE
                self._num_limbo -= 1
                free.append(page)

    def reset(self, keep: Iterable[int] = ()) -> None:
        """Take back everything that is out, but for the pages to ``keep``.

        Held pages go to limbo: their copies still run. The free pages are in their first order
        again, lowest page first.
        """
        self._state = [_LIMBO if held else _FREE for held in self._holds]
        for page in keep:
            self._state[page] = _OUT
        state = self._state
        self._free = [page for page in range(self.num_pages - 1, -1, -1) if state[page] == _FREE]
        self._num_limbo = state.count(_LIMBO)
        if self.fact is not None:
            self.fact("pool reset", self.name)
            self._note("take", [page for page, one in enumerate(state) if one == _OUT])
            self._note("limbo", [page for page, one in enumerate(state) if one == _LIMBO])

    def check_integrity(self) -> None:
        """Count everything anew; raises `ConservationBroken` naming what is wrong first."""
        counts = [0, 0, 0]
        for page, (state, held) in enumerate(zip(self._state, self._holds, strict=True)):
            counts[state] += 1
            wrong = held < 0 or (state == _FREE and held) or (state == _LIMBO and not held)
            if wrong:
                raise ConservationBroken(
                    f"pool {self.name!r}: page {page} is {_STATE_NAMES[state]} with {held} holders"
                )
        listed = [False] * self.num_pages
        for page in self._free:
            if self._state[page] != _FREE or listed[page]:
                raise ConservationBroken(
                    f"pool {self.name!r}: page {page} is on the free list"
                    f" {'twice' if listed[page] else 'but ' + _STATE_NAMES[self._state[page]]}"
                )
            listed[page] = True
        if counts[_FREE] != len(self._free) or counts[_LIMBO] != self._num_limbo:
            raise ConservationBroken(
                f"pool {self.name!r}: counted {counts[_FREE]} free and {counts[_LIMBO]} in limbo,"
                f" kept {len(self._free)} and {self._num_limbo}"
            )

    def _take(self, num_pages: int) -> list[int]:
        if num_pages == 0:
            return []
        taken = self._free[-num_pages:]
        del self._free[-num_pages:]
        taken.reverse()
        state = self._state
        for page in taken:
            state[page] = _OUT
        if self.fact is not None:
            self._note("take", taken)
        return taken

    def _note(self, tag: str, pages: list[int]) -> None:
        if self.fact is not None and pages:
            self.fact(tag, self.name, *pages)

    def _require_known(self, pages: Sequence[int]) -> None:
        # Negative ids would silently index from the end.
        if pages and (min(pages) < 0 or max(pages) >= self.num_pages):
            unknown = next(page for page in pages if not 0 <= page < self.num_pages)
            raise InternalError(
                f"pool {self.name!r}: page {unknown} is unknown (it has {self.num_pages} pages)"
            )

    def _require_out(self, pages: Sequence[int], verb: str) -> None:
        self._require_known(pages)
        state = self._state
        for page in pages:
            if state[page] != _OUT:
                raise InternalError(
                    f"pool {self.name!r}: cannot {verb} page {page}: it is"
                    f" {_STATE_NAMES[state[page]]}"
                )


def _first_repeated(pages: Sequence[int]) -> int:
    seen: set[int] = set()
    for page in pages:
        if page in seen:
            return page
        seen.add(page)
    raise InternalError("no page is repeated")

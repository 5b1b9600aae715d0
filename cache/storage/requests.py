"""Requests to storage, their endings, and the books that all kinds of workers keep.

A `StorageRequest` is a batch of pages under one ticket. It ends when every page of it has ended,
and its `StorageEnding` tells page by page how. Endings come from `collect` in the order of
submission, whatever thread was quicker; that is the only order there is.

The fault seam is that of the movers: ``plan_page`` is asked once per page, at `submit`, and its
`PagePlan` says whether the page is delayed, hangs, fails, is a miss or comes back with wrong bytes.
A page with a fault is *withheld*: carried out by the `collect` at which it is due.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvpact.cache.storage.checksum import Page, SealedPage
from kvpact.cache.storage.keys import KEY_BYTES
from kvpact.cache.storage.protocol import MAX_BATCH_PAGES, BackendBase
from kvpact.consensus.core.errors import InternalError, Misuse

__all__ = [
    "MAX_REQUESTS",
    "NO_PAGE_FAULT",
    "Answer",
    "Kind",
    "Open",
    "PagePlan",
    "PlanPage",
    "StorageEnding",
    "StorageRequest",
    "Workers",
    "WorkersBase",
    "ask",
]

MAX_REQUESTS = 256
"""Open requests that workers take unless told otherwise; open = submitted, ending not collected."""


class Kind(enum.StrEnum):
    """The kind of a request. The value is the site at which faults strike, once a page."""

    EXISTS = "storage.exists"
    GET = "storage.get"
    PUT = "storage.put"
    REMOVE = "storage.remove"
    CLEAR = "storage.clear"  # of everything: it has no keys, and no page for a fault


class StorageRequest(msgspec.Struct, frozen=True):
    """Ask ``kind`` for ``keys``. ``ticket`` names it in its ending and is unique among open ones.

    For PUT, ``pages`` are the sealed pages and ``keys`` stays empty. They are sealed before it is
    submitted; so where the request is abandoned and their memory is used again while a thread still
    reads it, what is stored does not fit its envelope and is never served.
    """

    ticket: int
    kind: Kind
    keys: tuple[bytes, ...] = ()
    pages: tuple[SealedPage, ...] = ()

    @property
    def num_pages(self) -> int:
        """Pages that it asks for."""
        return len(self.pages) or len(self.keys)

    def key(self, page_index: int) -> bytes:
        """The key of its ``page_index``-th page."""
        return self.pages[page_index].key if self.pages else self.keys[page_index]


class StorageEnding(msgspec.Struct, frozen=True):
    """How a request ended. ``found[i]``: page ``i`` is there, was stored, was removed.

    ``pages`` belong to GET: the checked bytes of each page, None where it is a miss. ``why`` is
    empty unless there was trouble beyond misses. A CLEAR has no pages: it went well if not ``why``.
    """

    ticket: int
    kind: Kind
    found: tuple[bool, ...]
    pages: tuple[Page | None, ...] = ()
    why: str = ""

    @property
    def leading(self) -> int:
        """How many pages from the first on went well without a gap: what a prefix can use."""
        return self.found.index(False) if False in self.found else len(self.found)


class PagePlan(msgspec.Struct, frozen=True):
    """The effect of a fault on one page.

    ``delay_collects`` are the calls of `collect` it is late by (0: on time, None: it hangs until
    `heal`). Not ``ok``: it fails. ``miss``: it is not found, whatever the backend has. ``corrupt``:
    its bytes are spoilt between the backend and the check (GET only).
    """

    delay_collects: int | None = 0
    ok: bool = True
    corrupt: bool = False
    miss: bool = False

    def __post_init__(self) -> None:
        if self.delay_collects is not None and self.delay_collects < 0:
            raise Misuse(f"delay_collects must be at least 0 or None, not {self.delay_collects}")


NO_PAGE_FAULT = PagePlan()

PlanPage = Callable[[str, bytes], PagePlan]
"""``plan_page(site, key)``, with a site of `Kind`."""

Answer = tuple[list[bool], list[Page | None], str]
"""Of some pages: found, bytes (GET only), why."""


class Workers(Protocol):
    """Carries storage requests out beside the thread that steps the cache, which alone calls it."""

    plan_page: PlanPage | None

    @property
    def in_flight(self) -> int:
        """Requests whose ending was not collected yet, also those that hang."""
        ...

    @property
    def room(self) -> int:
        """Requests that `submit` would still take."""
        ...

    def submit(self, request: StorageRequest) -> bool:
        """Take a request; False: there is no room, and nothing happened. Never blocks.

        Raises `Misuse` after `close`, `InternalError` for a request that makes no sense.
        """
        ...

    def collect(self) -> list[StorageEnding]:
        """Return the endings since the last call, in the order of submission. Never blocks."""
        ...

    def abandon(self, ticket: int) -> StorageEnding:
        """End a request here and now with the pages that have ended; the others count as failed.

        A thread may still run for it; what comes of that is dropped. A page it was putting may or
        may not be stored later, and never with other bytes than were sealed.
        """
        ...

    def wait_all(self, timeout_s: float) -> bool:
        """Wait until what ends by itself has ended; False: not within ``timeout_s``."""
        ...

    def heal(self) -> None:
        """End every withheld page at the next `collect`, as its plan says it ends."""
        ...

    def close(self, timeout_s: float = 1.0) -> bool:
        """Take no more requests and end the threads; False: one still ran after ``timeout_s``."""
        ...


class Open:
    """A request that has not been collected. ``gone``: it was abandoned, answers are dropped."""

    __slots__ = ("found", "gone", "left", "pages", "request", "why")

    def __init__(self, request: StorageRequest) -> None:
        self.request = request
        self.found: list[bool | None] = [None] * request.num_pages
        self.pages: list[Page | None] = [None] * (
            request.num_pages if request.kind is Kind.GET else 0
        )
        # A CLEAR has no pages, and yet an answer to wait for.
        self.left = max(1, request.num_pages)
        self.why = ""
        self.gone = False

    def answer(self, indices: Sequence[int], answer: Answer) -> None:
        """Enter what became of the pages ``indices``."""
        found, pages, why = answer
        for place, index in enumerate(indices):
            self.found[index] = found[place]
            if self.pages:
                self.pages[index] = pages[place]
        self.left -= max(1, len(indices))
        self.why = self.why or why

    def ending(self) -> StorageEnding:
        """As it stands now; what has not ended counts as failed."""
        why = self.why or ("abandoned" if self.left else "")
        found = tuple(bool(one) for one in self.found)
        return StorageEnding(self.request.ticket, self.request.kind, found, tuple(self.pages), why)


class _Withheld:
    """Pages of a request with the same plan, that wait for the ``due``-th `collect`."""

    __slots__ = ("due", "indices", "opened", "plan")

    def __init__(self, opened: Open, indices: list[int], plan: PagePlan, due: int | None) -> None:
        self.opened = opened
        self.indices = indices
        self.plan = plan
        self.due = due


class WorkersBase:
    """The base of all workers: checks, tickets, order, the bound and the fault seam."""

    withholds_all = False

    def __init__(
        self,
        backend: BackendBase,
        *,
        plan_page: PlanPage | None = None,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        if max_requests < 1:
            raise Misuse(f"max_requests must be at least 1, not {max_requests}")
        self.backend = backend
        self.plan_page = plan_page
        self._max_requests = max_requests
        self._open: dict[int, Open] = {}  # by ticket, in the order of submission
        self._withheld: list[_Withheld] = []
        self._num_collects = 0
        self._closed = False

    @property
    def in_flight(self) -> int:
        """See `Workers`."""
        return len(self._open)

    @property
    def room(self) -> int:
        """See `Workers`."""
        return self._max_requests - len(self._open)

    def submit(self, request: StorageRequest) -> bool:
        """See `Workers`."""
        self._require_sound(request)
        if self.room < 1 or not self._has_room():
            return False
        opened = Open(request)
        prompt = self._withhold(opened)
        self._open[request.ticket] = opened
        if prompt or (not request.num_pages and not self.withholds_all):
            self._start(opened, prompt)
        return True

    def collect(self) -> list[StorageEnding]:
        """See `Workers`."""
        self._num_collects += 1
        self._drain()
        self._carry_due()
        ended = [opened for opened in self._open.values() if not opened.left]
        for opened in ended:
            del self._open[opened.request.ticket]
        return [opened.ending() for opened in ended]

    def abandon(self, ticket: int) -> StorageEnding:
        """See `Workers`."""
        self._drain()
        opened = self._require_open(ticket)
        del self._open[ticket]
        opened.gone = True
        self._withheld = [held for held in self._withheld if held.opened is not opened]
        return opened.ending()

    def heal(self) -> None:
        """See `Workers`."""
        for held in self._withheld:
            held.due = self._num_collects + 1

    def wait_all(self, timeout_s: float) -> bool:
        """See `Workers`; nothing ends by itself here."""
        return True

    def close(self, timeout_s: float = 1.0) -> bool:
        """See `Workers`; there is no thread to end."""
        self._closed = True
        return True

    def check_integrity(self) -> None:
        """Raises `InternalError` unless what waits for a `collect` belongs to an open request."""
        for held in self._withheld:
            opened = self._open.get(held.opened.request.ticket)
            if opened is not held.opened or held.opened.left < len(held.indices):
                raise InternalError(
                    f"request {held.opened.request.ticket} is not open, yet withheld"
                )

    # -- for those that have threads ---------------------------------------------------------

    def _has_room(self) -> bool:
        return True

    def _start(self, opened: Open, indices: list[int]) -> None:
        raise NotImplementedError

    def _drain(self) -> None:
        """Enter what threads have posted."""

    # -- withheld pages ----------------------------------------------------------------------

    def _withhold(self, opened: Open) -> list[int]:
        """Set aside the pages that a fault concerns; returns the others."""
        request, planned = opened.request, self.plan_page
        every = range(request.num_pages)
        if planned is None and not self.withholds_all:
            return list(every)
        plans = [
            NO_PAGE_FAULT if planned is None else planned(request.kind, request.key(index))
            for index in every
        ]
        if not plans and self.withholds_all:
            self._set_aside(opened, [], NO_PAGE_FAULT)
        prompt: list[int] = []
        merged: dict[PagePlan, list[int]] = {}
        for index, plan in enumerate(plans):
            if plan == NO_PAGE_FAULT and not self.withholds_all:
                prompt.append(index)
            else:
                merged.setdefault(plan, []).append(index)
        for plan, indices in merged.items():
            self._set_aside(opened, indices, plan)
        return prompt

    def _set_aside(self, opened: Open, indices: list[int], plan: PagePlan) -> None:
        delay = plan.delay_collects
        due = None if delay is None else self._num_collects + 1 + delay
        self._withheld.append(_Withheld(opened, indices, plan, due))

    def _carry_due(self) -> None:
        now = self._num_collects
        due = [held for held in self._withheld if held.due is not None and held.due <= now]
        if not due:
            return
        self._withheld = [held for held in self._withheld if held.due is None or held.due > now]
        for held in due:
            request = held.opened.request
            held.opened.answer(held.indices, self._carry_planned(request, held.indices, held.plan))

    def _carry_planned(self, request: StorageRequest, indices: list[int], plan: PagePlan) -> Answer:
        if not plan.ok or plan.miss:
            why = "" if plan.ok else "failed by the fault plan"
            return [False] * len(indices), [None] * len(indices), why
        if plan.corrupt:
            here = threading.get_ident()  # other threads read at the same time
            self.backend.spoils = lambda _: threading.get_ident() == here
        try:
            return ask(self.backend, request, indices)
        finally:
            self.backend.spoils = None

    # -- checks ------------------------------------------------------------------------------

    def _require_open(self, ticket: int) -> Open:
        opened = self._open.get(ticket)
        if opened is None:
            raise InternalError(f"storage request {ticket} is not open")
        return opened

    def _require_sound(self, request: StorageRequest) -> None:
        if self._closed:
            raise Misuse("the storage workers are closed: nothing can be submitted any more")
        what = f"storage request {request.ticket} ({request.kind})"
        if request.ticket in self._open:
            raise InternalError(f"{what}: its ticket is open")
        if request.num_pages > MAX_BATCH_PAGES:
            raise InternalError(f"{what}: {request.num_pages} pages, at most {MAX_BATCH_PAGES}")
        has = (bool(request.keys), bool(request.pages))
        wanted = {Kind.PUT: (False, True), Kind.CLEAR: (False, False)}.get(
            request.kind, (True, False)
        )
        if has != wanted:
            raise InternalError(f"{what}: a PUT has pages, a CLEAR nothing, every other has keys")
        if any(len(key) != KEY_BYTES for key in request.keys):
            raise InternalError(f"{what}: a key has {KEY_BYTES} bytes")


def ask(backend: BackendBase, request: StorageRequest, indices: Sequence[int]) -> Answer:
    """Call the backend for some pages of a request. Whatever it raises costs those pages."""
    nothing: list[Page | None] = []
    try:
        match request.kind:
            case Kind.EXISTS:
                return backend.exists([request.keys[i] for i in indices]), nothing, ""
            case Kind.GET:
                pages = backend.get([request.keys[i] for i in indices])
                return [page is not None for page in pages], pages, ""
            case Kind.PUT:
                return backend.put([request.pages[i] for i in indices]), nothing, ""
            case Kind.REMOVE:
                return backend.remove([request.keys[i] for i in indices]), nothing, ""
            case Kind.CLEAR:
                return [], nothing, "" if backend.clear() else "not everything could be cleared"
    except Exception as error:  # noqa: BLE001 - trouble costs hits, never the engine
        why = f"{type(error).__name__}: {error}"
        return [False] * len(indices), [None] * len(indices), why

"""Storage backends: their protocol, and the promises that all of them share.

A `Backend` keeps pages under keys (`kvpact.cache.storage.keys`). It is a cache: it may forget any
page at any time, so a page that `exists` said is there may still be a miss. What it never does is
serve a wrong one: each page is checked against its envelope on every read.

Trouble costs hits, never the engine: a call that cannot be carried out answers with misses and
``False``, is logged and counted. Only a caller's mistake raises (`Misuse`).

Calls may come from several threads at once, and may take long; `kvpact.cache.storage.workers` keeps
them away from the thread that steps the cache.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvpact.cache.storage.checksum import Page, SealedPage, fits
from kvpact.cache.storage.keys import KEY_BYTES
from kvpact.consensus.core.errors import Misuse

__all__ = ["COUNTERS", "MAX_BATCH_PAGES", "Backend", "BackendBase", "log"]

log = logging.getLogger("kvpact.storage")

MAX_BATCH_PAGES = 4096
"""Pages of one call. Every call has a bound; a longer batch is the caller's to split."""

CLOSE_WAIT_S = 5.0
"""How long `close` waits for calls in flight unless told otherwise."""

COUNTERS: tuple[str, ...] = (
    "stored",  # pages that a put wrote (not those that were there already)
    "refused",  # pages that a put could not keep: no room, or trouble
    "hits",  # pages that a get served
    "misses",  # pages that a get did not have
    "wrong",  # pages that did not fit their envelope: never served, never written
    "evicted",  # pages that had to go for others
    "errors",  # calls that met trouble
    "skipped",  # segments that were not understood at start
)


class Backend(Protocol):
    """See the module. All batches have at most `MAX_BATCH_PAGES` and no limit is waited for."""

    name: str
    counters: dict[str, int]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Key by key: would `get` most likely find it? Reads no page."""
        ...

    def get(self, keys: Sequence[bytes]) -> list[Page | None]:
        """Key by key the page, checked, or None. The caller must not write to what it gets."""
        ...

    def put(self, pages: Sequence[SealedPage]) -> list[bool]:
        """Keep these pages; page by page: is it there now? Exact: True was acknowledged.

        A page of that key is replaced where its checksum differs. Pages may be read until the
        call returns, and not after. Where there is not room for all, the leading ones are kept.
        """
        ...

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """Forget these; key by key: was it there?"""
        ...

    def clear(self) -> bool:
        """Forget every page of this namespace. False: some may still be there."""
        ...

    def close(self, timeout_s: float = CLOSE_WAIT_S) -> bool:
        """End it; every later call is `Misuse`. False: a call still ran after ``timeout_s``.

        What was acknowledged stays, where the storage outlives the process. May be called again.
        """
        ...


class BackendBase:
    """The base of all backends: bounds, the end, checks on read, counting and logging.

    A subclass fills in the hooks below, and may let any `Exception` out of them. ``spoils`` is the
    seam for faults: it is asked for each page that was read, and True turns a bit of it over.
    """

    name = "backend"

    def __init__(self) -> None:
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.spoils: Callable[[bytes], bool] | None = None
        self._gate = threading.Condition()
        self._calls = 0
        self._closed = False
        self._released = False

    # -- the hooks ---------------------------------------------------------------------------

    def _exists(self, keys: Sequence[bytes]) -> list[bool]:
        raise NotImplementedError

    def _load(self, keys: Sequence[bytes]) -> list[SealedPage | None]:
        """Return the stored pages, unchecked."""
        raise NotImplementedError

    def _store(self, pages: Sequence[SealedPage]) -> list[bool]:
        raise NotImplementedError

    def _remove(self, keys: Sequence[bytes]) -> list[bool]:
        raise NotImplementedError

    def _clear(self) -> bool:
        raise NotImplementedError

    def _drop_wrong(self, wrong: Sequence[SealedPage]) -> None:
        """Forget pages that were found wrong, so that they can be stored again."""
        raise NotImplementedError

    def _release(self) -> None:
        """Give back files, locks and connections. No call is in flight."""

    # -- the calls ---------------------------------------------------------------------------

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend`."""
        _require_keys(keys)
        with self._call():
            try:
                return self._exists(keys)
            except Exception as error:  # noqa: BLE001 - trouble costs hits, never the engine
                self._trouble("exists", error)
        return [False] * len(keys)

    def get(self, keys: Sequence[bytes]) -> list[Page | None]:
        """See `Backend`."""
        _require_keys(keys)
        with self._call():
            try:
                found = self._load(keys)
            except Exception as error:  # noqa: BLE001
                self._trouble("get", error)
                found = [None] * len(keys)
            return self._checked(found)

    def put(self, pages: Sequence[SealedPage]) -> list[bool]:
        """See `Backend`."""
        _require_keys([page.key for page in pages])
        with self._call():
            # Memory that was used again since it was sealed need not even be written.
            sound = [fits(page) for page in pages]
            self._count("wrong", sound.count(False))
            try:
                kept = self._store([one for one, fit in zip(pages, sound, strict=True) if fit])
            except Exception as error:  # noqa: BLE001
                self._trouble("put", error)
                kept = [False] * sound.count(True)
            answers = iter(kept)
            kept = [fit and next(answers) for fit in sound]
            self._count("refused", kept.count(False))
            return kept

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Backend`."""
        _require_keys(keys)
        with self._call():
            try:
                return self._remove(keys)
            except Exception as error:  # noqa: BLE001
                self._trouble("remove", error)
        return [False] * len(keys)

    def clear(self) -> bool:
        """See `Backend`."""
        with self._call():
            try:
                return self._clear()
            except Exception as error:  # noqa: BLE001
                self._trouble("clear", error)
        return False

    def close(self, timeout_s: float = CLOSE_WAIT_S) -> bool:
        """See `Backend`."""
        deadline = time.monotonic() + timeout_s
        with self._gate:
            self._closed = True
            while self._calls:
                if not self._gate.wait(max(0.0, deadline - time.monotonic())):
                    return False  # what a call still uses is not taken from under it
            if self._released:
                return True
            self._released = True
        try:
            self._release()
        except Exception as error:  # noqa: BLE001
            self._trouble("close", error)
        return True

    # -- for all of them ---------------------------------------------------------------------

    def _call(self) -> _Call:
        return _Call(self)

    def _enter(self) -> None:
        with self._gate:
            if self._closed:
                raise Misuse(f"the storage {self.name} is closed: nothing can be asked any more")
            self._calls += 1

    def _leave(self) -> None:
        with self._gate:
            self._calls -= 1
            self._gate.notify_all()

    def _count(self, counter: str, number: int = 1) -> None:
        if number:
            with self._gate:
                self.counters[counter] += number

    def _trouble(self, what: str, error: object) -> None:
        self._count("errors")
        text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else error
        log.warning("storage %s: %s failed, which costs hits: %s", self.name, what, text)

    def _checked(self, found: Sequence[SealedPage | None]) -> list[Page | None]:
        spoils = self.spoils
        pages: list[Page | None] = []
        wrong: list[SealedPage] = []
        for one in found:
            if one is not None and spoils is not None and spoils(one.key):
                one = _spoilt(one)
            if one is not None and not fits(one):
                log.warning(
                    "storage %s: page %s has wrong bytes, it is a miss", self.name, one.key.hex()
                )
                wrong.append(one)
                one = None
            pages.append(None if one is None else one.page)
        misses = pages.count(None)
        self._count("misses", misses)
        self._count("hits", len(pages) - misses)
        if wrong:
            self._count("wrong", len(wrong))
            try:
                self._drop_wrong(wrong)
            except Exception as error:  # noqa: BLE001
                self._trouble("dropping a wrong page", error)
        return pages


class _Call:
    """A call in flight: `close` waits for it."""

    __slots__ = ("_backend",)

    def __init__(self, backend: BackendBase) -> None:
        self._backend = backend

    def __enter__(self) -> None:
        self._backend._enter()  # pyright: ignore[reportPrivateUsage]

    def __exit__(self, *_: object) -> None:
        self._backend._leave()  # pyright: ignore[reportPrivateUsage]


def _spoilt(sealed: SealedPage) -> SealedPage:
    wrong = bytearray(sealed.page)
    wrong[len(wrong) // 2] ^= 0x10
    return SealedPage(sealed.key, wrong, sealed.checksum)


def _require_keys(keys: Sequence[bytes]) -> None:
    if len(keys) > MAX_BATCH_PAGES:
        raise Misuse(f"a batch of {len(keys)} pages: at most {MAX_BATCH_PAGES} go in one call")
    for key in keys:
        if len(key) != KEY_BYTES:
            raise Misuse(f"a key has {KEY_BYTES} bytes, not {len(key)}: {key!r}")

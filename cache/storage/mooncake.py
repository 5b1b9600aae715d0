"""Mooncake Store, a distributed store of pages in the memory of many hosts. The extra `mooncake`.

The wrapper exists because of what the store does at its edges (all observed, each one a test):

- A missing key is an empty value or a status below zero: misses are told by status and envelope.
- A second put of a key says ok and keeps the *old* value: this always replaces (`upsert`).
- A value larger than the client's buffer, and an empty one, are refused: checked here first.
- A full store says so for a moment although it evicts: a put is tried a few times, then dropped.
- A page that was just read is leased and cannot be removed: removals are forced.
- For up to 10 s after its owner died a page exists and cannot be read: a miss like any other.
- Without a master `setup` blocks for 90 s and calls for 4 s each: its port is probed first. A
  silent master makes every call a miss at once until it answers again; its health check is not
  asked, it says 0 for too long. After a restart the master knows no page; the client reconnects.
- `setup` and `close` keep the GIL while they block (calls do not), so no thread could bound them:
  `setup` is tried in a process of its own first, and a client whose master is gone is left open.
- A call after `close` crashes the process: `BackendBase` lets none through, and does not close
  while one is under way.
- Tenants are not kept apart: keys hold the namespace, and names start with the identity's digest.
- The client listens on ports of its choice on *all* interfaces. That cannot be turned off, so it
  is logged: keep a firewall before it.
"""

from __future__ import annotations

import importlib
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvpact.cache.storage.checksum import SealedPage
from kvpact.cache.storage.keys import Identity
from kvpact.cache.storage.protocol import BackendBase, log
from kvpact.consensus.core.errors import BadInput

__all__ = ["MooncakeBackend"]

LENT_BYTES_MIN = 16 << 20
"""The store takes no smaller segment."""

SETUP_TIMEOUT_S = 15.0
PROBE_TIMEOUT_S = 1.0
PROBE_EVERY_S = 0.1
"""A master that answered so recently is not probed before a call."""
SILENT_S = 1.0
"""How long a master that did not answer is left alone."""
PUT_TRIES = 4
PUT_PAUSE_S = 0.02
"""Before the second try; twice as long before each further one, while the store evicts."""

_ENVELOPE = struct.Struct("<QQ")  # checksum, bytes of the page
_OK, _FULL, _TOO_SMALL, _NO_MASTER = 0, -200, -600, -900

_TRIAL = """
import json, os, sys
from mooncake.store import MooncakeDistributedStore
print(MooncakeDistributedStore().setup(*json.loads(sys.argv[1])), flush=True)
os._exit(0)
"""

_left_open: list[Any] = []


class MooncakeBackend(BackendBase):
    """Pages in the store whose master is at ``master`` (``host:port``).

    ``lent_bytes`` of this process's memory join the store (0: none, it only uses it), and
    ``buffer_bytes`` hold what is on its way: no page may be larger. ``host`` is the name under
    which other hosts reach this one. Calls take turns. Raises `BadInput` where the wheel is
    missing, nobody listens at ``master`` or the store refuses.
    """

    name = "mooncake"

    def __init__(
        self,
        master: str,
        identity: Identity,
        *,
        lent_bytes: int,
        buffer_bytes: int = 64 << 20,
        host: str = "127.0.0.1",
        protocol: str = "tcp",
        devices: str = "",
    ) -> None:
        super().__init__()
        self._master = _address(master)
        self._prefix = f"kvpact-{identity.digest[:8].hex()}-"
        self._turn = threading.Lock()
        self._answered = 0.0
        self._silent_until = 0.0
        if 0 < lent_bytes < LENT_BYTES_MIN:
            raise BadInput(
                f"storage mooncake: lend no memory or at least {LENT_BYTES_MIN} bytes, not"
                f" {lent_bytes}"
            )
        make = _store_type()
        if not self._probe():
            raise BadInput(f"storage mooncake: nobody listens at {master}: start mooncake_master")
        arguments = (host, "P2PHANDSHAKE", lent_bytes, buffer_bytes, protocol, devices, master)
        _try_setup((*arguments[:2], 0, LENT_BYTES_MIN, *arguments[4:]))
        self._client: Any = make()
        status: int = self._client.setup(*arguments)
        if status != _OK:
            raise BadInput(f"storage mooncake: the store at {master} refused: status {status}")
        self._buffer = np.empty(buffer_bytes, dtype=np.uint8)
        self._bytes = self._buffer.data
        self._start: int = self._buffer.ctypes.data
        status = self._client.register_buffer(self._start, buffer_bytes)
        if status != _OK:
            self._client.close()
            raise BadInput(
                f"storage mooncake: a buffer of {buffer_bytes} bytes could not be registered:"
                f" status {status}"
            )
        self._value_bytes = 0  # of the largest value met so far; pages of an identity are alike
        log.warning("storage mooncake: this process now listens on ports on all its interfaces")

    # -- the hooks of BackendBase ------------------------------------------------------------

    def _exists(self, keys: Sequence[bytes]) -> list[bool]:
        with self._turn:
            if not keys or not self._reachable():
                return [False] * len(keys)
            statuses: list[int] = self._client.batch_is_exist(self._names(keys))
            self._heard(statuses)
            return [status == 1 for status in statuses]

    def _load(self, keys: Sequence[bytes]) -> list[SealedPage | None]:
        found: dict[bytes, SealedPage | None] = {}
        wanted = list(dict.fromkeys(keys))
        with self._turn:
            if wanted and not self._value_bytes and self._reachable():
                self._learn_size(wanted)
            while wanted and self._value_bytes and self._reachable():
                chunk = wanted[: max(1, len(self._bytes) // self._value_bytes)]
                wanted = wanted[len(chunk) :]
                found.update(self._load_chunk(chunk))
        return [found.get(key) for key in keys]

    def _store(self, pages: Sequence[SealedPage]) -> list[bool]:
        kept: list[bool] = []
        with self._turn:
            while len(kept) < len(pages) and self._reachable():
                chunk = self._staged(pages[len(kept) :])
                if chunk:
                    kept += self._put(pages[len(kept) : len(kept) + len(chunk)], chunk)
                else:
                    size = len(pages[len(kept)].page)
                    self._trouble("put", f"a page of {size} bytes is more than the buffer holds")
                    kept.append(False)
        self._count("stored", kept.count(True))
        return kept + [False] * (len(pages) - len(kept))

    def _remove(self, keys: Sequence[bytes]) -> list[bool]:
        with self._turn:
            if not keys or not self._reachable():
                return [False] * len(keys)
            statuses: list[int] = self._client.batch_remove(self._names(keys), True)
            self._heard(statuses)
            return [status == _OK for status in statuses]

    def _clear(self) -> bool:
        with self._turn:
            if not self._reachable():
                return False
            status: int = self._client.remove_by_regex(f"^{re.escape(self._prefix)}.*", True)
            self._heard([status])
            return status >= 0

    def _drop_wrong(self, wrong: Sequence[SealedPage]) -> None:
        self._remove([page.key for page in wrong])

    def _release(self) -> None:
        with self._turn:
            if self._probe():
                self._client.unregister_buffer(self._start)
                self._client.close()
            else:
                # Nor may it be collected as garbage, which closes it too.
                _left_open.append((self._client, self._buffer))
                log.warning("storage mooncake: the master is gone, the client is left open")

    # -- one call of the store, with the turn held -------------------------------------------

    def _load_chunk(self, keys: Sequence[bytes]) -> dict[bytes, SealedPage | None]:
        size = self._value_bytes
        places = [self._start + index * size for index in range(len(keys))]
        names = self._names(keys)
        lengths: list[int] = self._client.batch_get_into(names, places, [size] * len(keys))
        self._heard(lengths)
        found: dict[bytes, SealedPage | None] = {}
        larger: list[bytes] = []
        for index, (key, length) in enumerate(zip(keys, lengths, strict=True)):
            found[key] = self._opened(key, index * size, length)
            if length == _TOO_SMALL:
                larger.append(key)
        # Only where pages differ in size, which they do not within one identity.
        if larger and self._learn_size(larger):
            for key in larger:
                found.update(self._load_chunk([key]))
        return found

    def _opened(self, key: bytes, at: int, length: int) -> SealedPage | None:
        """Take the page that a get left at ``at`` out of its envelope."""
        if length <= _ENVELOPE.size:
            return None  # a status, or the empty value of a key that is not there
        checksum, page_bytes = _ENVELOPE.unpack_from(self._bytes, at)
        start = at + _ENVELOPE.size
        # Cut where the envelope says more than there is: then its checksum does not fit.
        end = min(start + page_bytes, at + length)
        return SealedPage(key, bytes(self._bytes[start:end]), checksum)

    def _learn_size(self, keys: Sequence[bytes]) -> bool:
        """Ask how large the values of ``keys`` are; True: larger than known, and the buffer does.

        One answer is enough where nothing was known yet.
        """
        before = self._value_bytes
        for name in self._names(keys):
            size: int = self._client.get_size(name)
            self._heard([size])
            if size > self._value_bytes and size <= len(self._bytes):
                self._value_bytes = size
            if size == _NO_MASTER or (not before and self._value_bytes):
                break
        return self._value_bytes > before

    def _staged(self, pages: Sequence[SealedPage]) -> list[tuple[int, int]]:
        """Copy leading pages in their envelopes into the buffer: their places and lengths."""
        chunk: list[tuple[int, int]] = []
        at = 0
        for page in pages:
            size = _ENVELOPE.size + len(page.page)
            if at + size > len(self._bytes):
                break
            _ENVELOPE.pack_into(self._bytes, at, page.checksum, len(page.page))
            self._bytes[at + _ENVELOPE.size : at + size] = page.page
            chunk.append((at, size))
            self._value_bytes = max(self._value_bytes, size)
            at += size
        return chunk

    def _put(self, pages: Sequence[SealedPage], chunk: Sequence[tuple[int, int]]) -> list[bool]:
        statuses = [_FULL] * len(pages)
        names = self._names([page.key for page in pages])
        pause_s = PUT_PAUSE_S
        for attempt in range(PUT_TRIES):
            again = [index for index, status in enumerate(statuses) if status == _FULL]
            if not again:
                break
            if attempt:
                time.sleep(pause_s)
                pause_s *= 2
            answers: list[int] = self._client.batch_upsert_from(
                [names[index] for index in again],
                [self._start + chunk[index][0] for index in again],
                [chunk[index][1] for index in again],
            )
            self._heard(answers)
            for index, status in zip(again, answers, strict=True):
                statuses[index] = status
        return [status == _OK for status in statuses]

    # -- is the master there? ----------------------------------------------------------------

    def _reachable(self) -> bool:
        """Would the master answer now? A call that it does not answer blocks for seconds."""
        now = time.monotonic()
        if now < self._silent_until:
            return False
        if now - self._answered < PROBE_EVERY_S or self._probe():
            return True
        self._fell_silent("nobody listens at its port")
        return False

    def _probe(self) -> bool:
        try:
            socket.create_connection(self._master, PROBE_TIMEOUT_S).close()
        except OSError:
            return False
        self._answered = time.monotonic()
        return True

    def _heard(self, statuses: Sequence[int]) -> None:
        if _NO_MASTER in statuses:
            self._fell_silent(f"status {_NO_MASTER}")
        else:
            self._answered = time.monotonic()

    def _fell_silent(self, why: str) -> None:
        self._trouble("asking the master", why)
        self._silent_until = time.monotonic() + SILENT_S

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]


def _address(master: str) -> tuple[str, int]:
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise BadInput(f"storage mooncake: the master must be given as host:port, not {master!r}")
    return host, int(port)


def _store_type() -> Callable[[], Any]:
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise BadInput(
            f"storage mooncake cannot be used here: {error}. Install the extra `mooncake`, and the"
            " system library libibverbs.so.1 (Debian: libibverbs1)"
        ) from error
    return module.MooncakeDistributedStore


def _try_setup(arguments: tuple[object, ...]) -> None:
    """Set a client up in a process that can be ended. Raises `BadInput`."""
    command = [sys.executable, "-c", _TRIAL, json.dumps(arguments)]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=SETUP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        why = f"no answer within {SETUP_TIMEOUT_S} s: is it a mooncake_master?"
    else:
        if run.stdout.strip() == str(_OK):
            return
        why = run.stdout.strip() or run.stderr.strip().rpartition("\n")[2]
    raise BadInput(f"storage mooncake: the store at {arguments[-1]} refused a client: {why}")

"""The directory of one rank's segments: its lock, whose it is, and what is found in it at start."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from kvpact.cache.storage.keys import Identity
from kvpact.cache.storage.protocol import log
from kvpact.cache.storage.segment_file import FORMAT, create, open_to_read, sync_directory
from kvpact.consensus.core.errors import BadInput

__all__ = ["DISK_FULL", "open_directory"]

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_LOCK, _IDENTITY, _PROBE = "LOCK", "IDENTITY", "probe.tmp"
_MAX_IDENTITY_BYTES = 1 << 16


class _Owner(msgspec.Struct, frozen=True):
    """The content of the file IDENTITY."""

    format: int
    identity: Identity


def open_directory(path: Path, identity: Identity, *, durable: bool) -> int:
    """Make ``path`` if need be, lock it and check whose it is; returns the lock, an open file.

    What an earlier process left half-written is deleted. Raises `BadInput` where ``path`` cannot
    be a writable directory, where another process holds it, and where its pages are of another
    model, layout, page size or rank; then nothing in it was changed.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = _open_lock(path / _LOCK)
    except OSError as error:
        _cannot_use(path, error)
    try:
        _take(lock, path)
        owner = _read_owner(path)
        if owner is not None:
            _require_same(owner, _Owner(FORMAT, identity), path)
        for left in path.glob("*.tmp"):
            left.unlink(missing_ok=True)
        _probe(path, may_be_full=owner is not None)
        if owner is None:
            text = msgspec.json.encode(_Owner(FORMAT, identity))
            _write_file(path / _IDENTITY, text, durable=durable)
            if durable:
                sync_directory(path)
    except OSError as error:
        os.close(lock)
        _cannot_use(path, error)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _open_lock(path: Path) -> int:
    """The lock, a file of this directory: what a link points to is not ours to write to."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        os.close(lock)
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file")
    return lock


def _take(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        raise BadInput(
            f"storage directory {path} is in use by process {holder}: each rank needs a directory"
            " of its own, and the process before it must have ended"
        ) from None
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        if error.errno not in DISK_FULL:  # then the next message does not say who, that is all
            raise


def _probe(path: Path, *, may_be_full: bool) -> None:
    """A directory may hold a lock that can be opened and yet take no new files."""
    try:
        os.close(create(path / _PROBE))
        (path / _PROBE).unlink()
    except OSError as error:
        # Full of our own segments: what is there can be read, and gives way to what is new.
        if error.errno not in DISK_FULL or not may_be_full:
            raise


def _read_owner(path: Path) -> _Owner | None:
    try:
        file = open_to_read(path / _IDENTITY)
    except FileNotFoundError:
        return None
    with os.fdopen(file, "rb") as reader:
        text = reader.read(_MAX_IDENTITY_BYTES)
    try:
        return msgspec.json.decode(text, type=_Owner)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        # Each segment says itself whose it is, so this file is only the clear error made sooner.
        log.warning("storage directory %s: IDENTITY is damaged, written anew: %s", path, error)
        return None


def _require_same(found: _Owner, wanted: _Owner, path: Path) -> None:
    if found == wanted:
        return
    ours, theirs = _flat(wanted), _flat(found)
    different = "; ".join(
        f"{name} is {theirs[name]!r} there, {ours[name]!r} here"
        for name in ours
        if ours[name] != theirs[name]
    )
    raise BadInput(
        f"storage directory {path} holds pages of another kind: {different}. Name another"
        " directory, or delete this one"
    )


def _flat(owner: _Owner) -> dict[str, Any]:
    return {"format": owner.format, **msgspec.structs.asdict(owner.identity)}


def _write_file(path: Path, text: bytes, *, durable: bool) -> None:
    temporary = path.with_suffix(".tmp")
    with os.fdopen(create(temporary), "wb") as file:
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)


def _cannot_use(path: Path, error: OSError) -> NoReturn:
    raise BadInput(
        f"storage directory {path} cannot be used: {error.strerror or error}. It must be, or"
        " become, a directory that this process may write to, on a disk that is not full"
    ) from error

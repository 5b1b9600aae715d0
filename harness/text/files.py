"""Whole files in and out, with one clear error for everything that can be wrong with a path."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

from kvpact.consensus.core.errors import BadInput

__all__ = ["read_text", "write_bytes"]

MAX_FILE_BYTES: Final = 1 << 30
_GZIP_MAGIC: Final = b"\x1f\x8b"


def read_text(path: str | os.PathLike[str], *, what: str) -> str:
    """The UTF-8 text of a whole file; ``what`` names the kind of file expected, for the message.

    Raises BadInput for everything that stands between a path and its text: no such file, a
    directory, no permission, a device, more than MAX_FILE_BYTES, gzip, not UTF-8.
    """
    try:
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
            raise BadInput(f"{path}: is {kind}; expected {what}")
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; expected {what}") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read: {_reason(error)}") from None
    if len(data) > MAX_FILE_BYTES:
        raise BadInput(f"{path}: is larger than {MAX_FILE_BYTES} bytes; expected {what}")
    if data.startswith(_GZIP_MAGIC):
        raise BadInput(f"{path}: is gzip-compressed; unpack it first (gunzip)")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{path}:{line}: is not UTF-8 text; expected {what}") from None


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all. Raises BadInput where that is impossible.

    The file is written beside its place and moved there; what is not a regular file (a pipe,
    ``/dev/stdout``) is written to directly, never replaced.
    """
    target = Path(path)
    spare = target.with_name(f".{target.name}.part") if target.name else target
    try:
        if target.is_dir():
            raise BadInput(f"{path}: is a directory; expected a file to write")
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        try:
            spare.write_bytes(data)
            os.replace(spare, target)
        except OSError:
            with contextlib.suppress(OSError):
                spare.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be written: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)

"""Whole files in and out, with one clear error for everything that can be wrong with a path."""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from kvpact.consensus.core.errors import BadInput
from kvpact.consensus.core.files import open_regular, reason

__all__ = ["parse_toml", "read_json", "read_text", "write_bytes"]

MAX_FILE_BYTES: Final = 1 << 30
MAX_DEPTH: Final = 100
_GZIP_MAGIC: Final = b"\x1f\x8b"


def read_text(path: str | os.PathLike[str], *, what: str) -> str:
    """The UTF-8 text of a whole file; ``what`` names the kind of file expected, for the message.

    Raises BadInput for everything that stands between a path and its text: no such file, no regular
    one, no permission, more than MAX_FILE_BYTES, gzip, not UTF-8.
    """
    try:
        with open_regular(path, what=what) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {reason(error)}") from None
    if len(data) > MAX_FILE_BYTES:
        raise BadInput(f"{path}: is larger than {MAX_FILE_BYTES} bytes; expected {what}")
    if data.startswith(_GZIP_MAGIC):
        raise BadInput(f"{path}: is gzip-compressed; unpack it first (gunzip)")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInput(f"{path}:{line}: is not UTF-8 text; expected {what}") from None


def read_json(path: str | os.PathLike[str], *, what: str) -> object:
    """The value in a JSON file, no deeper than MAX_DEPTH. Raises BadInput."""
    text = read_text(path, what=what)
    try:
        value: object = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise BadInput(f"{path}: is not JSON ({error}); expected {what}") from None
    except RecursionError:
        raise BadInput(f"{path}: is nested too deeply; expected {what}") from None
    _require_flat(value, str(path), what)
    return value


def parse_toml(text: str, path: str) -> dict[str, Any]:
    """The tables of a TOML text, no deeper than MAX_DEPTH. Raises BadInput with line and column."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what = str(error)
        match = re.search(r" \(at line (\d+), column (\d+)\)$", what)
        if match:
            raise BadInput(
                f"{path}:{match[1]}: column {match[2]}: not valid TOML: {what[: match.start()]}"
            ) from None
        raise BadInput(f"{path}: not valid TOML: {what}") from None
    except RecursionError:
        raise BadInput(f"{path}: is nested too deeply") from None
    except ValueError as error:
        raise BadInput(f"{path}: not valid TOML: {error}") from None
    _require_flat(tables, path, "tables")
    return tables


def _require_flat(value: object, path: str, what: str) -> None:
    """Who walks the value may then call itself for each level."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for one in level:
            if isinstance(one, dict):
                below += cast("dict[str, object]", one).values()
            elif isinstance(one, list):
                below += cast("list[object]", one)
        if not below:
            return
        level = below
    raise BadInput(f"{path}: is nested more than {MAX_DEPTH} deep; expected {what}")


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
        raise BadInput(f"{path}: cannot be written: {reason(error)}") from None

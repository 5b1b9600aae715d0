"""The one way into a file that somebody names: regular files only, and one clear error."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

from kvpact.consensus.core.errors import BadInput

__all__ = ["open_regular", "reason"]


def open_regular(path: str | os.PathLike[str], *, what: str) -> BinaryIO:
    """Open a regular file for reading; ``what`` names the kind of file expected, for the message.

    Never waits: a FIFO without a writer and a device are refused like a directory. Raises BadInput.
    """
    try:
        # Without O_NONBLOCK the open itself waits until somebody writes into a FIFO.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; expected {what}") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read: {reason(error)}") from None
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise BadInput(f"{path}: is {kind}; expected {what}")
    return os.fdopen(number, "rb")


def reason(error: Exception) -> str:
    """Return the system's reason, without the number and the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)

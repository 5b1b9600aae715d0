"""Are the files that run the ones that were installed?

A replica whose ranks run different code is the very thing this library exists to prevent. Another
distribution that ships a package ``kvpact`` overwrites our files when it is installed, and a copy
that was mended by hand on one host is easily forgotten; pip says nothing in either case. So
start-up looks.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from kvpact.consensus.core.errors import Misuse

__all__ = ["require_installed_files"]

DISTRIBUTION = "kvpact"
_ROOT = Path(__file__).absolute().parent.parent.parent
_MAX_NAMED_FILES = 5


def require_installed_files() -> Path:
    """Return the folder that ``kvpact`` is imported from.

    Where an installed wheel was unpacked to it, each source file must be byte for byte what that
    wheel recorded (an editable installation and a checkout record none).

    Raises:
        Misuse: a file is missing or is not the installed one. The message names the files.
    """
    installed = _installed_here()
    if installed is not None:
        _require_recorded_files(installed)
    return _ROOT


def _installed_here() -> Distribution | None:
    """Return the distribution that was unpacked to where this file is, if there is one."""
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return None  # run from a checkout
    return installed if Path(str(installed.locate_file(""))).resolve() == _ROOT.resolve() else None


def _require_recorded_files(installed: Distribution) -> None:
    changed = [
        str(path)
        for path in installed.files or ()
        if path.parts[0] == DISTRIBUTION
        and path.suffix == ".py"
        and path.hash is not None
        and path.hash.value != _digest(Path(str(installed.locate_file(path))), path.hash.mode)
    ]
    if changed:
        named = ", ".join(changed[:_MAX_NAMED_FILES])
        more = f" and {len(changed) - _MAX_NAMED_FILES} more" * (len(changed) > _MAX_NAMED_FILES)
        raise Misuse(
            f"files of {DISTRIBUTION} {installed.version} are missing or not the installed ones:"
            f" {named}{more}. They were changed by hand, or another distribution has overwritten"
            f" them: reinstall {DISTRIBUTION}"
        )


def _digest(path: Path, algorithm: str) -> str | None:
    """Return the digest of a file as RECORD writes it (unpadded base64), ``None`` if it is gone."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return base64.urlsafe_b64encode(hashlib.new(algorithm, content).digest()).rstrip(b"=").decode()

"""Are the packages that run the ones that were installed together?

``consensus``, ``cache`` and ``harness`` are plain top-level names. A folder ``cache`` nearer on the
path takes the place of ours, and a second distribution that ships a ``cache`` overwrites our files
when it is installed; pip says nothing in either case. A replica whose ranks run different code is
the very thing this library exists to prevent, so start-up looks. Nothing is imported to find out,
which keeps the look below the packages it is about.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from consensus.errors import Misuse

__all__ = ["PACKAGES", "require_one_origin"]

DISTRIBUTION = "kvpact"
PACKAGES: tuple[str, ...] = ("consensus", "cache", "harness")
_MAX_NAMED_FILES = 5


def require_one_origin(packages: Sequence[str] = PACKAGES) -> Path:
    """Return the one folder that all ``packages`` come from.

    Where that folder is the one that an installed wheel was unpacked to, each of their source
    files must also be byte for byte what that wheel recorded (an editable installation and a
    checkout record none).

    Raises:
        Misuse: a package is missing, comes from another folder than the first one, or a file of it
            is not the installed one. The message names the folders or files and what to do.
    """
    folders = {name: _folder_of(name) for name in packages}
    if len(set(folders.values())) > 1:
        places = ", ".join(f"{name} from {folder}" for name, folder in folders.items())
        raise Misuse(
            f"the packages of {DISTRIBUTION} come from different places: {places}. Another"
            " package or folder has taken one of the names; uninstall it, or start where no such"
            " folder lies on the Python path"
        )
    root = next(iter(folders.values()))
    installed = _installed_at(root)
    if installed is not None:
        _require_recorded_files(installed, packages)
    return root


def _folder_of(name: str) -> Path:
    """Return the folder that holds package ``name``, without importing it."""
    spec = find_spec(name)  # a top-level name: looks, does not import
    if spec is None:
        raise Misuse(
            f"the package {name} of {DISTRIBUTION} is not on the Python path; install"
            f" {DISTRIBUTION}"
        )
    if spec.origin is None or Path(spec.origin).name != "__init__.py":
        where = spec.origin or ", ".join(spec.submodule_search_locations or ())
        raise Misuse(
            f"{name} at {where} is not the package of {DISTRIBUTION}: it has no __init__.py. Move"
            f" or uninstall what took the name, then install {DISTRIBUTION} again"
        )
    return Path(spec.origin).resolve().parent.parent


def _installed_at(root: Path) -> Distribution | None:
    """Return the installed distribution if ``root`` is where it was unpacked to."""
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return None  # run from a checkout
    return installed if Path(str(installed.locate_file(""))).resolve() == root else None


def _require_recorded_files(installed: Distribution, packages: Iterable[str]) -> None:
    ours = set(packages)
    changed = [
        str(path)
        for path in installed.files or ()
        if path.parts[0] in ours
        and path.suffix == ".py"
        and path.hash is not None
        and path.hash.value != _digest(Path(str(installed.locate_file(path))), path.hash.mode)
    ]
    if changed:
        named = ", ".join(changed[:_MAX_NAMED_FILES])
        more = f" and {len(changed) - _MAX_NAMED_FILES} more" * (len(changed) > _MAX_NAMED_FILES)
        raise Misuse(
            f"files of {DISTRIBUTION} {installed.version} are missing or not the installed ones:"
            f" {named}{more}. Another distribution that ships a package of the same name has"
            f" probably overwritten them; uninstall it, then reinstall {DISTRIBUTION}"
        )


def _digest(path: Path, algorithm: str) -> str | None:
    """Return the digest of a file as RECORD writes it (unpadded base64), ``None`` if it is gone."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return base64.urlsafe_b64encode(hashlib.new(algorithm, content).digest()).rstrip(b"=").decode()

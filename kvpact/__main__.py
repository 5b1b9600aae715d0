"""The command: ``kvpact``, or ``python -m kvpact``."""

from __future__ import annotations

import sys
from importlib.util import find_spec

_NEEDS = ("typer", "rich")


def main() -> int:
    """Run the command, and return its exit status."""
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        print(  # noqa: T201  it is the command
            f"kvpact: the command needs {' and '.join(missing)}, which the library does not:"
            " install kvpact[cli]",
            file=sys.stderr,
        )
        return 2
    from kvpact.harness.cli.main import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())

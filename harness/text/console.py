"""The terminal: what comes from files, names and errors is shown, never obeyed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

__all__ = ["PlainConsole", "complain", "plain"]

#: C0 but tab and newline, DEL, C1, and what turns the direction of the text around.
_CONTROLS: Final = {
    number: f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
    for number in (
        *(code for code in range(32) if code not in (9, 10)),
        *range(127, 160),
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
        *range(0xD800, 0xE000),  # lone surrogates: no terminal can be sent them
    )
}


def plain(text: str) -> str:
    """``text`` with every control character written out, as in ``\\x1b``."""
    return text.translate(_CONTROLS)


def complain(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"kvpact: {plain(' '.join(text.split()))}\n")


class PlainConsole(Console):
    """A console whose only control characters are its own."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """See :meth:`rich.console.Console.render`."""
        return self._plain(super().render(renderable, options))

    @staticmethod
    def _plain(segments: Iterable[Segment]) -> Iterator[Segment]:
        for segment in segments:
            if segment.control:
                yield segment
            else:
                yield Segment(plain(segment.text), segment.style)

    def render_str(self, text: str, **how: Any) -> Any:
        """See :meth:`rich.console.Console.render_str`; escaped first, so that columns fit."""
        return super().render_str(plain(text), **how)

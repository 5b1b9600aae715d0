"""Arguments of callers, checked at the border before anything changes.

Each function returns the value in the form that the inside works with, or raises :class:`Misuse`
with what is wrong, where, and what to do. Nothing behind the border checks a type again.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterable
from typing import SupportsIndex, TypeVar, cast

import numpy as np

from kvpact.consensus.core.errors import Misuse

__all__ = [
    "MOST",
    "as_choice",
    "as_count",
    "as_counts",
    "as_flag",
    "as_names",
    "as_seconds",
    "as_text",
    "told",
]

#: Counts beyond this do not fit a ballot.
MOST = 2**31 - 1

_Choice = TypeVar("_Choice", bound=enum.StrEnum)


def as_text(what: str, value: object) -> str:
    """A text that every rank can write into its journal and send to the others."""
    if not isinstance(value, str):
        raise Misuse(f"{what} must be a text, got {told(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Misuse(
            f"{what} {value!a} cannot be written: character {error.start} is half of a"
            " surrogate pair; replace it before it reaches the cache"
        ) from None
    return value


def as_names(what: str, value: Iterable[str]) -> list[str]:
    """Several texts; one text alone is not meant as its letters."""
    if isinstance(value, str) or not isinstance(cast("object", value), Iterable):
        raise Misuse(f"{what} must be a list of texts, got {told(value)}")
    return [as_text(f"an entry of {what}", one) for one in value]


def as_count(what: str, value: SupportsIndex, least: int = 0, most: int = MOST) -> int:
    """A whole number from ``least`` to ``most``; numpy's are taken, truth values are not."""
    is_flag = isinstance(value, bool | np.bool_)
    if is_flag or not isinstance(cast("object", value), SupportsIndex):
        raise Misuse(f"{what} must be a whole number, got {told(value)}")
    try:
        number = operator.index(value)
    except TypeError:
        raise Misuse(f"{what} must be a whole number, got {told(value)}") from None
    if not least <= number <= most:
        limit = f"at least {least}" if number < least else f"at most {most}"
        raise Misuse(f"{what} must be {limit}, got {told(number)}")
    return number


def as_counts(what: str, value: Iterable[SupportsIndex]) -> list[int]:
    """Several whole numbers, 0 or more."""
    if isinstance(value, str) or not isinstance(cast("object", value), Iterable):
        raise Misuse(f"{what} must be a list of whole numbers, got {told(value)}")
    return [as_count(f"an entry of {what}", one) for one in value]


def as_flag(what: str, value: object) -> bool:
    """Yes or no."""
    if not isinstance(value, bool | np.bool_):
        raise Misuse(f"{what} must be True or False, got {told(value)}")
    return value is True or bool(cast("int", value))


def as_seconds(what: str, value: float) -> float:
    """A finite time, 0 or more."""
    is_number = isinstance(cast("object", value), float | int | np.floating | np.integer)
    if not is_number or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise Misuse(f"{what} must be a finite number of seconds, 0 or more, got {told(value)}")
    return float(value)


def as_choice(what: str, kind: type[_Choice], value: str) -> _Choice:
    """One of the words of ``kind``."""
    try:
        return kind(value)
    except ValueError:
        words = ", ".join(repr(str(one)) for one in kind)
        raise Misuse(f"{what} must be one of {words}, got {told(value)}") from None


def told(value: object) -> str:
    """A value in a few words, whatever it is."""
    told = ascii(value)
    return f"{type(value).__name__} {told if len(told) <= 60 else told[:57] + '...'}"

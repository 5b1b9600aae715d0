"""One finding of ``kvpact doctor``: how it stands with one thing, and what to do about it."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["Finding", "Level", "good", "note", "wrong"]


class Level(enum.StrEnum):
    """How much a finding matters."""

    GOOD = "good"  # nothing to do
    NOTE = "note"  # works, but may surprise
    WRONG = "wrong"  # a replica will not run well here; the command ends with status 1


class Finding(msgspec.Struct, frozen=True):
    """``subject`` is what was looked at, ``text`` what was found, ``todo`` what to do."""

    level: Level
    subject: str
    text: str
    todo: str = ""


def good(subject: str, text: str) -> Finding:
    """Return a finding with nothing to do."""
    return Finding(Level.GOOD, subject, text)


def note(subject: str, text: str, todo: str) -> Finding:
    """Return a finding that may surprise somebody later."""
    return Finding(Level.NOTE, subject, text, todo)


def wrong(subject: str, text: str, todo: str) -> Finding:
    """Return a finding that must be mended first."""
    return Finding(Level.WRONG, subject, text, todo)

"""What is wrong with a table of a file, in the words of the file.

msgspec checks keys, types and choices strictly; here its complaints become one BadInput that names
the place, the key, what is wrong and what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NoReturn, TypeVar, get_args, get_origin

import msgspec

from kvpact.consensus.core.errors import BadInput

__all__ = ["Place", "allowed", "convert", "explain", "name_type", "reject_unknown"]

Record = TypeVar("Record", bound=msgspec.Struct)
_TYPE_NAMES: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "list": "a list",
    "object": "a table",
    "dict": "a table",
    "null": "nothing",
    "datetime": "a date",
    "date": "a date",
    "time": "a time",
}


class Place:
    """Where in a file its reader is; ``wrong`` is how it says what it found there."""

    __slots__ = ("_where",)

    def __init__(self, where: str) -> None:
        self._where = where

    def wrong(self, key: str, what: str) -> NoReturn:
        """Raise BadInput: the place, the key (where there is one), what is wrong."""
        raise BadInput(f"{self._where}: {key}: {what}" if key else f"{self._where}: {what}")


def convert(
    table: Mapping[str, Any], kind: type[Record], place: Place, *, given: Mapping[str, Any] = {}
) -> Record:
    """Build a ``kind`` from a table, strictly; raises BadInput.

    ``given`` holds the fields that the reader fills in itself: a file may not name them.
    """
    reject_unknown(table, _keys(kind, given), place)
    try:
        return msgspec.convert({**table, **given}, kind, strict=True)
    except msgspec.ValidationError as error:
        place.wrong(*explain(str(error), kind))


def reject_unknown(table: Mapping[str, Any], keys: Sequence[str], place: Place) -> None:
    """Raise BadInput for the first key of the table that is not one of ``keys``."""
    for key in table:
        if key not in keys:
            place.wrong(key, f"unknown key{allowed(keys)}")


def allowed(names: Iterable[str]) -> str:
    """The end of a complaint: what would have been right."""
    listed = ", ".join(names)
    return f"; allowed: {listed}" if listed else ""


def name_type(value: object) -> str:
    """The type of a value, as a person who writes the file calls it."""
    name = type(value).__name__
    return _TYPE_NAMES.get(name, name)


def explain(message: str, kind: type[msgspec.Struct]) -> tuple[str, str]:
    """Key and complaint for the text of a ``msgspec.ValidationError`` about ``kind``."""
    what, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    inner = f"{path}." if path else ""
    rules: Sequence[tuple[str, Callable[[re.Match[str]], tuple[str, str]]]] = (
        (r"Object missing required field `(.+)`", lambda m: (inner + m[1], "is missing")),
        (
            r"Object contains unknown field `(.+)`",
            lambda m: (inner + m[1], f"unknown key{allowed(_keys(_owner(kind, path)))}"),
        ),
        (
            r"Invalid enum value (.+)",
            lambda m: (path, f"{m[1]} is not known{allowed(_choices(kind, path))}"),
        ),
        (r"Expected `\w+` >= (.+)", lambda m: (path, f"must be at least {m[1]}")),
        (r"Expected `\w+` > (.+)", lambda m: (path, f"must be more than {float(m[1]):g}")),
        (r"Expected `\w+` <= (.+)", lambda m: (path, f"must be at most {m[1]}")),
        (r"Expected `str` matching regex (.+)", lambda m: (path, f"must match {m[1]}")),
        (r"Expected `\w+` of length >= 1", lambda _: (path, "must not be empty")),
        (
            r"Expected `(.+)`, got `(\w+)`",
            lambda m: (path, f"expected {_name_types(m[1])}, got {_name_types(m[2])}"),
        ),
    )
    for pattern, words in rules:
        match = re.fullmatch(pattern, what)
        if match:
            return words(match)
    return path, what.replace("`", "")


def _name_types(types: str) -> str:
    names = [name for name in types.split(" | ") if name != "null" or types == "null"]
    return " or ".join(_TYPE_NAMES.get(name, name) for name in names)


def _keys(kind: type[msgspec.Struct], hidden: Iterable[str] = ()) -> list[str]:
    tag = kind.__struct_config__.tag_field
    named = [field.encode_name for field in msgspec.structs.fields(kind)]
    return ([tag] if tag else []) + [name for name in named if name not in hidden]


def _field_type(kind: type[msgspec.Struct], name: str) -> Any:
    for field in msgspec.structs.fields(kind):
        if field.encode_name == name:
            return field.type
    return None


def _owner(kind: type[msgspec.Struct], path: str) -> type[msgspec.Struct]:
    """The record that the complaint at ``path`` is about: ``kind`` or one inside it."""
    for choice in get_args(_field_type(kind, path)):
        if isinstance(choice, type) and issubclass(choice, msgspec.Struct):
            return choice
    return kind


def _choices(kind: type[msgspec.Struct], path: str) -> list[str]:
    field_type = _field_type(kind, path)
    return [str(one) for one in get_args(field_type)] if get_origin(field_type) is Literal else []

"""Writes a scenario as TOML text, which :mod:`kvpact.harness.scenario.read` reads back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from kvpact.harness.scenario.model import Do, Scenario, SidePool, World

__all__ = ["scenario_text"]

_PAGES = ("device_pages", "host_pages")


def scenario_text(scenario: Scenario) -> str:
    """The file of ``scenario``: what has its default is left out; ``path`` is not part of it."""
    lines = [f"name = {_text(scenario.name)}"]
    lines += [f"source = {_text(scenario.source)}"] if scenario.source else []
    lines += [f"about = {_text(scenario.about)}"] if scenario.about else []
    lines += ["", "[world]", *_record(msgspec.structs.replace(scenario.world, side_pools=()))]
    for pool in scenario.world.side_pools:
        lines += ["", "[[world.side_pool]]", *_record(pool)]
    for entry in scenario.do:
        lines += ["", "[[do]]", *_entry(entry)]
    return "\n".join(lines) + "\n"


def _entry(entry: Do) -> list[str]:
    tag = str(type(entry).__struct_config__.tag)
    return [f"op = {_text(tag)}", *_record(entry)]


def _record(record: World | SidePool | Do) -> list[str]:
    lines: list[str] = []
    for field in msgspec.structs.fields(type(record)):
        value = getattr(record, field.name)
        if field.name == "number" or (not field.required and value == field.default):
            continue
        lines.append(f"{field.encode_name} = {_value(field.name, value)}")
    return lines


def _value(name: str, value: Any) -> str:
    if name == "tokens":
        return _text(",".join(f"{start}..{stop}" for start, stop in value))
    if name in _PAGES:
        return _pages(value)
    if name == "free":
        members = cast("Mapping[str, Sequence[int]]", value).items()
        return _table({key: _pages(pages) for key, pages in members})
    if isinstance(value, msgspec.Struct):
        given = msgspec.structs.asdict(value).items()
        return _table({key: _plain(one) for key, one in given if one is not None})
    return _plain(value)


def _pages(pages: Sequence[int]) -> str:
    return str(pages[0]) if len(set(pages)) == 1 else _plain(tuple(pages))


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value).items()
        return _table({key: _plain(one) for key, one in members})
    return "[" + ", ".join(_plain(one) for one in cast("Sequence[Any]", value)) + "]"


def _table(members: Mapping[str, str]) -> str:
    inside = ", ".join(f"{_text(key)} = {value}" for key, value in members.items())
    return f"{{ {inside} }}" if inside else "{}"


def _text(text: str) -> str:
    # JSON's escapes are TOML's too, but for the one control character that JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")

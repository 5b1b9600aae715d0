"""Scenario files: TOML text to checked records.

Everything that is wrong with a file is one BadInput that says where (file, line, ``world`` or the
number of the ``do`` entry), which key, what is wrong and what is allowed. Numbers and tables that
the records hold in another form (token ranges, pages per rank) are read here; keys, types and
choices are msgspec's to check, and its complaints are put in the words of the file.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any, Final, cast, get_args

from kvpact.consensus.core import errors
from kvpact.consensus.core.errors import BadInput
from kvpact.harness.scenario import model
from kvpact.harness.text.files import parse_toml, read_text
from kvpact.harness.text.toml_errors import Place, allowed, convert, name_type, reject_unknown

__all__ = ["parse_scenario", "read_scenario"]

MAX_RANKS: Final = 64
MAX_PAGES: Final = 1 << 20  # of one pool on one rank
MAX_ENTRIES: Final = 10_000
PINNED_TIERS: Final = ("device", "host")

_Table = dict[str, Any]
_ENTRY_KINDS: Final[dict[str, type[model.Do]]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(model.Do)
}


def read_scenario(path: str | os.PathLike[str]) -> model.Scenario:
    """Read and check one scenario file. Raises BadInput."""
    return parse_scenario(read_text(path, what="a scenario (TOML)"), str(path))


def parse_scenario(text: str, path: str) -> model.Scenario:
    """Check the text of a scenario; ``path`` stands in the messages. Raises BadInput."""
    raw = parse_toml(text, path)
    top = Place(path)
    reject_unknown(raw, ("name", "source", "about", "world", "do"), top)
    for key in ("name", "world", "do"):
        if key not in raw:
            top.wrong(key, "is missing")
    for key in ("name", "source", "about"):
        if not isinstance(raw.get(key, ""), str):
            top.wrong(key, f"expected a text, got {name_type(raw[key])}")
    entries = raw["do"]
    if not isinstance(entries, list) or not entries:
        top.wrong("do", "expected at least one [[do]] entry")
    if len(cast("list[Any]", entries)) > MAX_ENTRIES:
        top.wrong("do", f"more than {MAX_ENTRIES} entries")
    world = _world(raw["world"], f"{path}: world")
    lines = _entry_lines(text, len(cast("list[Any]", entries)))
    do: list[model.Do] = []
    for number, entry in enumerate(cast("list[Any]", entries), 1):
        where = f"{path}:{lines[number - 1]}" if lines else path
        do.append(_entry(entry, number, f"{where}: do {number}", world, do))
    return model.Scenario(
        path=path,
        name=raw["name"],
        source=raw.get("source", ""),
        about=raw.get("about", ""),
        world=world,
        do=tuple(do),
    )


def _entry_lines(text: str, num_entries: int) -> list[int]:
    """Line of each ``[[do]]``, or nothing where they cannot be told apart from other text."""
    lines = [
        number
        for number, line in enumerate(text.split("\n"), 1)
        if re.match(r"\s*\[\[\s*do\s*\]\]", line)
    ]
    return lines if len(lines) == num_entries else []


# --- world ---------------------------------------------------------------------------------------


def _world(raw: object, where: str) -> model.World:
    place = Place(where)
    table = _table(raw, place)
    num_ranks = _count(table, "tp", place) * _count(table, "pp", place, default=1)
    if num_ranks > MAX_RANKS:
        place.wrong("tp", f"tp * pp = {num_ranks} ranks, more than {MAX_RANKS}")
    pp = table.get("pp", 1)
    table.setdefault("lag", pp if pp > 1 else 0)
    _read_pages(table, place, num_ranks)
    pools = table.get("side_pool", [])
    if not isinstance(pools, list):
        place.wrong("side_pool", "expected [[world.side_pool]] tables")
    table["side_pool"] = [
        _side_pool(pool, f"{where}.side_pool {number}", num_ranks)
        for number, pool in enumerate(cast("list[Any]", pools), 1)
    ]
    world = convert(table, model.World, place)
    if world.pp > 1 and world.lag < world.pp:
        place.wrong("lag", f"with pp = {world.pp} must be at least {world.pp}, got {world.lag}")
    for key in ("deadline_s", "step_ms", "copy_timeout_s"):
        if not math.isfinite(getattr(world, key)):
            place.wrong(key, f"must be finite, got {getattr(world, key)}")
    names = [pool.name for pool in world.side_pools]
    for name in names:
        if names.count(name) > 1:
            place.wrong("side_pool", f"two pools are named {name!r}")
    return world


def _side_pool(raw: object, where: str, num_ranks: int) -> _Table:
    place = Place(where)
    table = _table(raw, place)
    _read_pages(table, place, num_ranks)
    pool = convert(table, model.SidePool, place)
    if pool.need == "window" and pool.window is None:
        place.wrong("window", 'is missing; need = "window" wants its length in tokens')
    if pool.need != "window" and pool.window is not None:
        place.wrong("window", f'goes with need = "window" only, not {pool.need!r}')
    return table


def _read_pages(table: _Table, place: Place, num_ranks: int) -> None:
    for key, least in (("device_pages", 1), ("host_pages", 0)):
        if key in table:
            table[key] = _per_rank(table[key], key, place, num_ranks, least)


def _count(table: _Table, key: str, place: Place, default: int | None = None) -> int:
    value = table.get(key, default)
    if value is None:
        place.wrong(key, "is missing")
    return _integer(value, key, place, least=1)


# --- do ------------------------------------------------------------------------------------------


def _entry(
    raw: object, number: int, where: str, world: model.World, before: Sequence[model.Do]
) -> model.Do:
    table = _table(raw, Place(where))
    name = table.get("op")
    if not isinstance(name, str) or name not in _ENTRY_KINDS:
        what = "is missing" if name is None else f"{name!r} is not known"
        Place(where).wrong("op", f"{what}; allowed: {', '.join(_ENTRY_KINDS)}")
    place = Place(f"{where} ({name})")
    if name == "expect":
        _read_expect(table, place, world, before)
    if "tokens" in table:
        least = world.page_size if name == "insert" else 0
        table["tokens"] = _prompt(table["tokens"], place, least)
    entry = convert(table, _ENTRY_KINDS[name], place, given={"number": number})
    _check_common(entry, place, world)
    if isinstance(entry, model.Fault):
        _check_fault(entry, place, world)
    if isinstance(entry, model.Admit):
        _check_admit(entry, place)
    if isinstance(entry, model.LoadMatch):
        matched = [one.request for one in before if isinstance(one, model.TakeMatch)]
        if entry.request not in matched:
            place.wrong("request", f"no earlier match names {entry.request!r}")
    if isinstance(entry, model.Restart) and entry.ranks is not None:
        place.wrong("ranks", "a run ends, and another begins, on all ranks: leave it out")
    if isinstance(entry, model.Decide) and world.pp > 1:
        place.wrong("op", "would deadlock against the activations of pipeline stages (pp > 1)")
    return entry


def _check_common(entry: model.Entry, place: Place, world: model.World) -> None:
    for rank in entry.ranks or ():
        _check_rank(rank, "ranks", place, world)
    if len(set(entry.ranks or ())) != len(entry.ranks or ()):
        place.wrong("ranks", "names a rank twice")
    if entry.raises is None:
        return
    kinds = [name for name in errors.__all__ if name != "KvpactError"]
    if entry.raises.kind not in kinds:
        place.wrong("raises.kind", f"{entry.raises.kind!r} is not known{allowed(kinds)}")
    if entry.raises.rank is not None:
        _check_rank(entry.raises.rank, "raises.rank", place, world)


def _check_admit(entry: model.Admit, place: Place) -> None:
    if entry.whole and entry.load:
        place.wrong("load", "is part of whole: leave it out")
    given = {"extra": entry.extra, "least": entry.least, "priority": entry.priority}
    for key, value in given.items():
        if value and not entry.whole:
            place.wrong(key, "belongs to whole = true")


def _check_fault(fault: model.Fault, place: Place, world: model.World) -> None:
    _check_rank(fault.rank, "rank", place, world)
    sites = model.actions(world)
    if fault.site not in sites:
        place.wrong("site", f"{fault.site!r} does not exist in this world{allowed(sites)}")
    if fault.action not in sites[fault.site]:
        place.wrong(
            "action",
            f"{fault.action!r} is not known at {fault.site!r}{allowed(sites[fault.site])}",
        )
    if fault.times < 1 and fault.times != -1:
        place.wrong("times", f"must be at least 1, or -1 for ever, got {fault.times}")
    for key, action in (("steps", "delay"), ("seconds", "late")):
        value = getattr(fault, key)
        if fault.action == action and value is None:
            place.wrong(key, f"is missing; action {action!r} needs it")
        if fault.action != action and value is not None:
            place.wrong(key, f"goes with action {action!r} only, not {fault.action!r}")
    if fault.seconds is not None and not math.isfinite(fault.seconds):
        place.wrong("seconds", f"must be finite, got {fault.seconds}")


def _check_rank(rank: int, key: str, place: Place, world: model.World) -> None:
    if rank >= world.num_ranks:
        place.wrong(key, f"rank {rank} does not exist; ranks are 0..{world.num_ranks - 1}")


# --- expect --------------------------------------------------------------------------------------


def _read_expect(
    table: _Table, place: Place, world: model.World, before: Sequence[model.Do]
) -> None:
    """Put the tables of an ``expect`` entry into their final form, in place."""
    _read_tokens(table, place, world.page_size, before)
    pools = world.pools()
    for pool, value in _members(table, "free", place):
        if pool not in pools:
            place.wrong(f"free.{pool}", f"no such pool in this world{allowed(pools)}")
        table["free"][pool] = _per_rank(value, f"free.{pool}", place, world.num_ranks)
    for key, names in (("pinned", PINNED_TIERS), ("counters", model.COUNTERS)):
        for name, value in _members(table, key, place):
            if name not in names:
                place.wrong(f"{key}.{name}", f"is not known{allowed(names)}")
            _integer(value, f"{key}.{name}", place)


def _read_tokens(table: _Table, place: Place, page_size: int, before: Sequence[model.Do]) -> None:
    """Check what an ``expect`` entry says about prefixes and about requests made before it."""
    for key in ("device", "host", "storage", "usable"):
        for prefix, value in _members(table, key, place):
            where = f'{key}."{prefix}"'
            length = model.num_tokens(_prefix(prefix, where, place, page_size))
            if _tokens(value, where, place, page_size) > length:
                place.wrong(where, f"{value} tokens of a prefix of {length}")
    if isinstance(table.get("right_bytes"), list):
        for index, prefix in enumerate(table["right_bytes"]):
            _prefix(prefix, f"right_bytes[{index}]", place, page_size)
    loads = [one.request for one in before if isinstance(one, model.LoadBack | model.LoadMatch)]
    fetches = [one.request for one in before if isinstance(one, model.Prefetch)]
    wishes = [one.request for one in before if isinstance(one, model.Admit) and one.whole]
    for key, kind, known in (
        ("admitted", "whole admit", wishes),
        ("loaded", "load_back", loads),
        ("prefetched", "prefetch", fetches),
    ):
        for request, value in _members(table, key, place):
            if request not in known:
                place.wrong(f"{key}.{request}", f"no earlier {kind} names it")
            _tokens(value, f"{key}.{request}", place, page_size)
    named = [getattr(one, "request", "") for one in before]
    for request, value in _members(table, "must_recompute", place):
        if request not in named:
            place.wrong(f"must_recompute.{request}", "no earlier entry names it")
        _integer(value, f"must_recompute.{request}", place)


def _members(table: _Table, key: str, place: Place) -> list[tuple[str, Any]]:
    """Members of the table at ``key``; the table itself is replaced by a copy of its own."""
    if key not in table:
        return []
    if not isinstance(table[key], dict):
        place.wrong(key, f"expected a table, got {name_type(table[key])}")
    table[key] = dict(table[key])
    return list(table[key].items())


# --- values --------------------------------------------------------------------------------------


def _table(raw: object, place: Place) -> _Table:
    if not isinstance(raw, dict):
        place.wrong("", f"expected a table, got {name_type(raw)}")
    return dict(cast("_Table", raw))


def _integer(value: object, key: str, place: Place, least: int = 0, most: int = 2**31 - 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        place.wrong(key, f"expected an integer, got {name_type(value)}")
    if not least <= value <= most:
        limit = f"at least {least}" if value < least else f"at most {most}"
        place.wrong(key, f"must be {limit}, got {value}")
    return value


def _tokens(value: object, key: str, place: Place, page_size: int) -> int:
    tokens = _integer(value, key, place)
    if tokens % page_size:
        place.wrong(key, f"{tokens} tokens are not whole pages of {page_size}")
    return tokens


def _ranges(value: object, key: str, place: Place) -> model.Ranges:
    if not isinstance(value, str):
        place.wrong(key, f'expected token ranges like "0..8,100..108", got {name_type(value)}')
    try:
        return model.parse_ranges(value)
    except BadInput as error:
        place.wrong(key, error.message)


def _prompt(value: object, place: Place, least: int) -> model.Ranges:
    """The tokens of an entry: any number, or none, but at least ``least``."""
    ranges = () if value == "" else _ranges(value, "tokens", place)
    if model.num_tokens(ranges) < least:
        place.wrong("tokens", f"an insert is of one page of {least} tokens at least")
    return ranges


def _prefix(value: object, key: str, place: Place, page_size: int) -> model.Ranges:
    """The ranges of a prefix that may name a namespace before a colon."""
    text = value.rpartition(":")[2] if isinstance(value, str) else value
    ranges = _ranges(text, key, place)
    _tokens(model.num_tokens(ranges), key, place, page_size)
    return ranges


def _per_rank(
    value: object, key: str, place: Place, num_ranks: int, least: int = 0
) -> model.PerRank:
    if not isinstance(value, list):
        return (_integer(value, key, place, least, MAX_PAGES),) * num_ranks
    values = cast("list[Any]", value)
    if len(values) != num_ranks:
        place.wrong(
            key, f"expected one number, or one for each of {num_ranks} ranks, got {len(values)}"
        )
    return tuple(
        _integer(one, f"{key}[{rank}]", place, least, MAX_PAGES) for rank, one in enumerate(values)
    )

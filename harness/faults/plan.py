"""What goes wrong in a soak, where and when: a plan file, or one drawn from a seed.

    seed = 7                      # of what is drawn below; default: the soak's own seed
    device_pages = [96, 92]       # optional: pools that are not equal
    host_pages = [192, 180]

    [[fault]]
    site = "write"                # see SITES
    action = "delay"
    ranks = [1]                   # default: every rank
    every_steps = 40              # on average, drawn; or at_step = 1000, once
    times = 2                     # occasions in a row that it strikes
    steps = 5                     # what the action needs, see SITES

    cover = ["abort after partial reserve"]    # must be seen, beside what the faults imply

Times are counted in steps, so that a seed and a plan give the same faults again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, cast

import msgspec

from kvpact.consensus.core.errors import BadInput
from kvpact.harness.text.files import parse_toml, read_text
from kvpact.harness.text.toml_errors import Place, convert, reject_unknown

__all__ = ["SITES", "FaultLine", "Plan", "chaos_plan", "fit_plan", "parse_plan", "read_plan"]

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]

#: site -> action -> the keys that it needs.
SITES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "device.reserve": {"refuse": (), "short": ()},
    "host.reserve": {"refuse": ()},
    "staging.reserve": {"refuse": ()},
    "write": {
        "delay": ("steps",),
        "hang": (),
        "fail": (),
        "corrupt": (),
        "skew": ("steps", "share"),
    },
    "load": {
        "delay": ("steps",),
        "hang": (),
        "fail": (),
        "corrupt": (),
        "skew": ("steps", "share"),
    },
    "storage.put": {"delay": ("steps",), "hang": (), "fail": ()},
    "storage.get": {"delay": ("steps",), "hang": (), "fail": (), "corrupt": (), "miss": ()},
    "storage.exists": {"delay": ("steps",), "hang": (), "fail": (), "miss": ()},
    "scheduler": {"slow": ("seconds",), "diverge": ()},
    "process": {"stop": ("seconds",), "kill": (), "hog": ("seconds",)},
    "network": {
        "delay": ("seconds", "delay_ms", "interface"),
        "loss": ("seconds", "share", "interface"),
    },
}
#: Longer than a copy's timeout, so that it is quarantined; not for ever, or no page would be left.
CHAOS_HANG_S: Final = 6.0
_OPTIONAL: Final = ("steps", "seconds", "share", "delay_ms", "interface")


class FaultLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a plan. ``ranks`` empty: every rank. ``steps`` are calls of ``collect``.

    What hangs does so until the faults are healed at the end, or for ``seconds``: its pages are out
    of use as long, on every rank.
    """

    site: str
    action: str
    ranks: tuple[int, ...] = ()
    at_step: Count | None = None
    every_steps: Count | None = None
    times: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = 1
    steps: Count | None = None
    seconds: Seconds | None = None
    share: Share | None = None
    delay_ms: Seconds | None = None
    interface: str | None = None

    @property
    def name(self) -> str:
        """``write delay``: as the report counts it."""
        return f"{self.site} {self.action}"


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole plan; ``seed`` ``None``: the soak's. Page counts empty: as the soak is told."""

    fault: tuple[FaultLine, ...] = ()
    seed: int | None = None
    device_pages: tuple[int, ...] = ()
    host_pages: tuple[int, ...] = ()
    cover: tuple[str, ...] = ()

    def has(self, *names: str) -> bool:
        """Whether any line is one of ``names`` (``"process kill"``)."""
        return any(line.name in names for line in self.fault)


def read_plan(path: str) -> Plan:
    """Read and check a plan file. Raises BadInput."""
    return parse_plan(read_text(path, what="a fault plan (TOML)"), path)


def parse_plan(text: str, path: str) -> Plan:
    """Check the text of a plan; ``path`` stands in the messages. Raises BadInput."""
    raw = parse_toml(text, path)
    top = Place(path)
    reject_unknown(raw, [field.name for field in msgspec.structs.fields(Plan)], top)
    entries = raw.pop("fault", [])
    if not isinstance(entries, list):
        top.wrong("fault", "expected [[fault]] entries")
    plan = convert(raw, Plan, top)
    lines = [
        _line(cast("dict[str, Any]", entry), Place(f"{path}: fault {number}"))
        for number, entry in enumerate(cast("list[Any]", entries), 1)
    ]
    return msgspec.structs.replace(plan, fault=tuple(lines))


def _line(entry: dict[str, Any], place: Place) -> FaultLine:
    if not isinstance(entry, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        place.wrong("", "expected a table")
    line = convert(entry, FaultLine, place)
    actions = SITES.get(line.site)
    if actions is None:
        place.wrong("site", f"there is no fault at {line.site!r}; there are: {', '.join(SITES)}")
    if line.action not in actions:
        place.wrong("action", f"{line.site} cannot {line.action!r}; it can: {', '.join(actions)}")
    for key in _OPTIONAL:
        given, needed = getattr(line, key) is not None, key in actions[line.action]
        if (line.action, key) != ("hang", "seconds") and given != needed:
            place.wrong(key, f"{'is needed' if needed else 'has no meaning'} for {line.name}")
    if (line.at_step is None) == (line.every_steps is None) and line.action != "skew":
        place.wrong("at_step", "say either at_step or every_steps")
    return line


def fit_plan(plan: Plan, path: str, num_ranks: int) -> None:
    """Raise BadInput where the plan names ranks that do not exist, or too few page counts."""
    for number, line in enumerate(plan.fault, 1):
        for rank in line.ranks:
            if not 0 <= rank < num_ranks:
                raise BadInput(
                    f"{path}: fault {number}: ranks: there is no rank {rank}; the soak has"
                    f" {num_ranks} ranks, 0 to {num_ranks - 1}"
                )
    for key in ("device_pages", "host_pages"):
        counts: tuple[int, ...] = getattr(plan, key)
        if counts and len(counts) != num_ranks:
            raise BadInput(f"{path}: {key}: expected {num_ranks} counts, got {len(counts)}")
        if any(count < 1 for count in counts):
            raise BadInput(f"{path}: {key}: must be at least 1, got {min(counts)}")


def chaos_plan(
    seed: int,
    num_ranks: int,
    device_pages: Sequence[int],
    host_pages: Sequence[int],
    *,
    has_storage: bool = False,
    stages: bool = False,
) -> Plan:
    """A bit of everything that the ranks survive, drawn from ``seed``.

    ``has_storage``: also of the storage; ``stages``: the host is staging only.
    """
    draw = random.Random(f"chaos {seed}")

    def some() -> tuple[int, ...]:
        """One rank, or now and then all of them."""
        return () if draw.random() < 0.25 else (draw.randrange(num_ranks),)

    def every(steps: int) -> int:
        return draw.randint(steps // 2, steps * 3 // 2)

    slow = draw.randrange(num_ranks)
    lines = [
        FaultLine(site="write", action="skew", ranks=(slow,), steps=draw.randint(3, 9), share=0.3),
        FaultLine(site="load", action="skew", ranks=some(), steps=draw.randint(2, 6), share=0.2),
        FaultLine(
            site="staging.reserve" if stages else "host.reserve",
            action="refuse",
            ranks=some(),
            every_steps=every(30),
        ),
        FaultLine(site="device.reserve", action="refuse", ranks=some(), every_steps=every(60)),
        FaultLine(site="device.reserve", action="short", ranks=some(), every_steps=every(60)),
        FaultLine(site="write", action="fail", ranks=some(), every_steps=every(60)),
        FaultLine(site="write", action="corrupt", ranks=some(), every_steps=every(90)),
        FaultLine(site="load", action="fail", ranks=some(), every_steps=every(60)),
        FaultLine(site="load", action="corrupt", ranks=some(), every_steps=every(120)),
        _hang("write", some(), every(300)),
        _hang("load", some(), every(400)),
        FaultLine(
            site="scheduler", action="slow", ranks=some(), every_steps=every(200), seconds=0.05
        ),
        FaultLine(
            site="process", action="stop", ranks=some(), every_steps=every(1500), seconds=0.7
        ),
        FaultLine(
            site="process", action="hog", ranks=(slow,), every_steps=every(2500), seconds=2.0
        ),
    ]
    if has_storage:
        lines += [
            FaultLine(site="storage.put", action="fail", ranks=some(), every_steps=every(60)),
            _hang("storage.put", some(), every(400)),
            FaultLine(
                site="storage.put", action="delay", ranks=some(), every_steps=every(40), steps=7
            ),
            FaultLine(site="storage.get", action="fail", ranks=some(), every_steps=every(60)),
            FaultLine(site="storage.get", action="corrupt", ranks=some(), every_steps=every(80)),
            FaultLine(site="storage.get", action="miss", ranks=some(), every_steps=every(60)),
            _hang("storage.get", some(), every(400)),
            FaultLine(site="storage.exists", action="miss", ranks=some(), every_steps=every(60)),
        ]
    return Plan(
        fault=tuple(lines),
        seed=seed,
        device_pages=tuple(count - draw.randint(0, count // 20) for count in device_pages),
        host_pages=tuple(max(1, count - draw.randint(0, count // 8)) for count in host_pages),
    )


def _hang(site: str, ranks: tuple[int, ...], every_steps: int) -> FaultLine:
    return FaultLine(
        site=site, action="hang", ranks=ranks, every_steps=every_steps, seconds=CHAOS_HANG_S
    )

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpact.cache.core import CacheCore
from kvpact.cache.paths.backup import Backup
from kvpact.cache.paths.completion import SideOnly
from kvpact.cache.residency.path import Path
from kvpact.cache.tree.node import Tier
from kvpact.cache.tree.side import SideSpec
from kvpact.consensus.core.errors import InternalError
from tests.cache_world import World

MODES = ("write_through", "write_through_selective", "write_back", "buffer_only")


def world_of(mode: str) -> World:
    """One rank with all that this mode can have."""
    if mode == "buffer_only":
        return World(1, mode=mode, storage=True)
    spec = SideSpec("mamba", "per_node")
    return World(1, mode=mode, storage=True, side_pools=(spec,), side={"mamba": (4, 4)})


def core_of(mode: str) -> CacheCore:
    return world_of(mode).caches[0].core


def says(value: object) -> Callable[..., object]:
    return lambda *_: value


def of_tier(tier: Tier, value: object, other: object) -> Callable[..., object]:
    return lambda *words: value if words[-1] is tier else other


def hears(called: list[str], name: str) -> Callable[..., None]:
    return lambda *_: called.append(name)


def kinds(base: type[Path]) -> set[type[Path]]:
    below = base.__subclasses__()
    return {one for kind in below for one in {kind} | kinds(kind)}


def test_every_path_stands_in_the_list_of_some_mode() -> None:
    listed = {type(path) for mode in MODES for path in core_of(mode).paths}
    assert listed == kinds(Path) - {Backup, SideOnly}  # what several of them share


PATHS = [(mode, type(path)) for mode in MODES for path in core_of(mode).paths]


@pytest.mark.parametrize("mode, kind", PATHS, ids=lambda one: getattr(one, "__name__", one))
def test_what_a_path_says_is_heard(
    mode: str, kind: type[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in ("plan", "settled", "clear"):
        monkeypatch.setattr(kind, name, hears(called, name))
    world = world_of(mode)
    cache = world.caches[0]
    world.step()
    assert called == ["plan", "settled"]
    cache.reset()
    assert called[2:] == ["clear"]
    assert not cache.has_pending()
    monkeypatch.setattr(kind, "is_pending", True)
    assert cache.has_pending()
    monkeypatch.setattr(kind, "waits", says({"somebody": "something"}))
    assert cache.core.waits() == {"somebody": "something"}
    cache.check_integrity()


@pytest.mark.parametrize("mode, kind", PATHS, ids=lambda one: getattr(one, "__name__", one))
@pytest.mark.parametrize("tier", list(Tier))
def test_pages_of_a_path_count(
    mode: str, kind: type[Path], tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = world_of(mode).caches[0]
    with monkeypatch.context() as patch:
        patch.setattr(kind, "held_pages", of_tier(tier, [0], []))
        with pytest.raises(InternalError, match=f"{tier.value}: 1 owned"):
            cache.check_integrity()
    with monkeypatch.context() as patch:
        patch.setattr(kind, "charged_pages", of_tier(tier, 1, 0))
        with pytest.raises(InternalError, match=f"{tier.value}: the ledger has 0 pages"):
            cache.check_integrity()

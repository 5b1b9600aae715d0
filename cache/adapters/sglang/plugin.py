"""The entry point that SGLang calls: checks the version, then puts kvpact's cache class in.

SGLang logs a plugin's exception and goes on without the plugin. A team that switched kvpact on must
not run without it unawares, so whatever is wrong here ends the process.
"""

# pyright: basic, reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["TESTED", "add", "mode_from"]

_log = logging.getLogger("kvpact")

#: Versions of SGLang that scripts/sglang_check has passed with.
TESTED = ("0.5.23",)
MODES = ("observe", "decide")

_CREATE = "sglang.srt.mem_cache.registry.create_unified_radix_cache"
_ADMIT = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"


def mode_from(environ: Mapping[str, str]) -> str:
    """``KVPACT_MODE``, by default ``observe``. Ends the process for any other word."""
    mode = environ.get("KVPACT_MODE", "observe")
    if mode not in MODES:
        raise SystemExit(f"kvpact: KVPACT_MODE is {mode!r}; say one of {', '.join(MODES)}")
    return mode


def add() -> None:
    """Register the hooks. Ends the process where SGLang is not one that was tested."""
    mode = mode_from(os.environ)
    check_version(_version())
    try:
        _add(mode)
    except Exception as error:
        raise SystemExit(f"kvpact: the plugin cannot be loaded: {error!r}") from error
    _log.warning("kvpact: mode %s; unset SGLANG_PLUGINS or remove kvpact to switch it off", mode)


def check_version(found: str) -> None:
    """End the process unless ``found`` was tested."""
    if found not in TESTED:
        raise SystemExit(
            f"kvpact: SGLang {found} was not tested with this plugin (tested: {', '.join(TESTED)})."
            " Install one of these, or start without it: leave kvpact out of SGLANG_PLUGINS"
        )


def _version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "of an unknown version"


def _add(mode: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvpact.cache.adapters.sglang import admission
    from kvpact.cache.adapters.sglang.cache import DecidingRadixCache
    from kvpact.cache.adapters.sglang.observe import ObservingRadixCache

    chosen = DecidingRadixCache if mode == "decide" else ObservingRadixCache

    def create(original: Callable[..., Any], ctx: Any, *, cache_class: Any = None) -> Any:
        if cache_class is not None:
            raise SystemExit(f"kvpact: another cache class is asked for already: {cache_class}")
        return original(ctx, cache_class=chosen)

    HookRegistry.register(_CREATE, create, HookType.AROUND)
    wanted = {_CREATE}
    if mode == "decide":
        HookRegistry.register(_ADMIT, admission.add_one_req, HookType.AROUND)
        wanted.add(_ADMIT)
    HookRegistry.apply_hooks()  # what is applied already is left alone
    if not wanted <= HookRegistry._patched:
        raise SystemExit(f"kvpact: SGLang did not take the hooks {sorted(wanted)}: see its log")

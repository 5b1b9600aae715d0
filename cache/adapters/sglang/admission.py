"""The hook of the admission loop: a request whose vote is open is skipped, the loop goes on."""

# pyright: basic, reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult

__all__ = ["add_one_req"]


def add_one_req(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **how: Any) -> Any:
    """Ask for the load-back that ``req`` needs; let it in once it is decided.

    SGLang's own code ends the loop where a load-back is not there yet; those behind it need not
    wait.
    """
    must_wait = getattr(adder.tree_cache, "must_wait_for_vote", None)
    if must_wait is not None and must_wait(req):
        return AddReqResult.CONTINUE
    return original(adder, req, *args, **how)

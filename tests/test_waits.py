"""No wait without a bound: every place in ``consensus`` that waits is listed, with who stalls it.

A wait that is added without a line here fails; so does a line whose test is gone.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Calls that can wait. What is taken from a store has its own bound (consensus/transport/store.py).
WAITING = {"wait", "wait_for", "sleep", "select", "acquire", "synchronize"}

#: file: {function: (what bounds it, the test that stalls it)}
WAITS: dict[str, dict[str, tuple[str, str]]] = {
    "gloo.py": {
        "_knock": ("timeout_s", "test_store.py::test_who_finds_nobody_says_so_in_one_line"),
        "_meet": ("form_timeout_s", "test_group.py::test_a_rank_that_does_not_come_to_a_new_group"),
        "done": ("it has ended", "test_group.py::test_stopped_and_killed_ranks"),
        "wait": ("timeout_s", "test_group.py::test_a_late_rank_costs_a_bounded_wait"),
        "_meet_nccl": ("limit_s", "test_group.py::test_a_rank_that_does_not_come_to_a_new_group"),
        "_post": ("orders a stream only", "test_group.py::test_min_is_right_without_lag"),
    },
    "bounded.py": {
        "_run": ("a daemon thread", "test_bounded.py::test_one_group_that_waits_does_not_hold_up"),
        "_join": ("timeout_s", "test_bounded.py::test_who_looks_out_may_end_the_wait"),
        "bounded": ("timeout_s", "test_bounded.py::test_a_call_that_hangs_is_abandoned"),
        "close": ("EXIT_WAIT_S", "test_group.py::test_the_end_of_a_process_waits_for_no_peer"),
        "drain": ("timeout_s", "test_bounded.py::test_a_group_is_released_when_its_collectives"),
    },
    "door.py": {
        "_moved": ("LOOK_S", "test_door.py::test_a_run_on_another_machine_is_known_by"),
        "_wait": ("timeout_s", "test_door.py::test_who_does_not_come_is_named_the_same"),
        "patiently": ("timeout_s", "test_door.py::test_silence_ends_the_start_at_its_bound"),
    },
    "membership.py": {
        "leave": ("wait_s", "test_closing_real.py::test_a_straggler_before_the_deadline"),
    },
    "sentinel.py": {
        "_run": ("a daemon thread", "test_sentinel.py::test_a_silent_store_is_tried_again"),
        "stop": ("timeout_s", "test_sentinel.py::test_a_silent_store_is_tried_again"),
    },
    "step.py": {
        "pause": ("slice_s", "test_step.py::test_a_wait_ends_within_its_bound_and_not_before"),
    },
    "store.py": {
        "_await": ("call_timeout_s", "test_closing_real.py::test_a_stopped_store_host_is_named"),
        "_line": (
            "call_timeout_s",
            "test_store.py::test_a_stopped_host_is_silent_within_the_bound",
        ),
        "_run": ("a daemon thread", "test_store.py::test_a_closed_store_refuses"),
    },
    "watch.py": {
        "_run": ("a daemon thread", "test_watch.py::test_no_exception_leaves_the_thread"),
        "judge": ("within_s", "test_watch.py::test_judge_tells_the_living_from_the_silent"),
        "stacks": ("timeout_s", "test_watch.py::test_stacks_show_where_the_thread_that_steps_is"),
        "stop": ("timeout_s", "test_watch.py::test_stop_does_not_wait_for_a_store_that_hangs"),
    },
}


def waits_in(path: Path) -> set[str]:
    """The functions of a file that call something that waits."""
    found: set[str] = set()
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                name, of = call.func.attr, ast.unparse(call.func.value)
                is_thread = name == "join" and "thread" in of
                is_queue = name == "get" and not call.args and not call.keywords
                is_sleep = name == "_sleep"
                if name in WAITING or is_thread or is_queue or is_sleep:
                    found.add(function.name)
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "consensus").rglob("*.py")), ids=lambda p: p.name)
def test_every_wait_is_listed(path: Path) -> None:
    assert waits_in(path) == set(WAITS.get(path.name, {})), "say what bounds it, and stall it"


@pytest.mark.parametrize(
    "test", sorted({test for waits in WAITS.values() for _, test in waits.values()})
)
def test_the_test_that_stalls_it_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}" in (ROOT / "tests" / file).read_text()

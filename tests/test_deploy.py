"""The manifests and the Dockerfile of docs/deploy hold what their checkers ask for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import kubernetes_validate  # pyright: ignore[reportMissingTypeStubs]
import pytest
import yaml

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "docs" / "deploy"
VERSION = "1.31"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def pods(thing: object) -> list[dict[str, Any]]:
    """The pod templates anywhere in a document, as pods."""
    if isinstance(thing, list):
        return [pod for one in cast("list[object]", thing) for pod in pods(one)]
    if not isinstance(thing, dict):
        return []
    fields = cast("dict[str, object]", thing)
    found = [pod for value in fields.values() for pod in pods(value)]
    if "containers" in fields:
        found.append(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "template"}, "spec": fields}
        )
    return found


@pytest.mark.parametrize("document", documents("replica.yaml"), ids=lambda one: str(one["kind"]))
def test_kubernetes_takes_the_replica(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_kubernetes_takes_the_pods_of_the_soak() -> None:
    (job,) = documents("soak.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    found = pods(job)
    assert len(found) == 2  # the head's and the workers'
    for pod in found:
        kubernetes_validate.validate(pod, VERSION, strict=True)


def test_a_wrong_field_is_noticed() -> None:
    (job,) = documents("soak.yaml")
    pod = pods(job)[0]
    pod["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, VERSION, strict=True)


def test_the_commands_in_them_exist() -> None:
    """What the manifests start is understood by the commands of this version."""
    (job,) = documents("soak.yaml")
    flags = [word for word in job["spec"]["entrypoint"].split() if word.startswith("--")]
    shown = subprocess.run(
        [sys.executable, "-m", "kvpact", "soak", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert flags
    assert all(flag in shown for flag in flags)


def test_hadolint_has_nothing_to_say() -> None:
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [str(program), str(DEPLOY / "Dockerfile")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")

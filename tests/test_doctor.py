"""``kvpact doctor``: what it finds, what it advises, how it ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpact.consensus.core.errors import BadInput
from kvpact.harness.cli.main import main
from kvpact.harness.operate import host
from kvpact.harness.operate.finding import Level
from kvpact.harness.operate.host import fit_host
from kvpact.harness.operate.meeting import parse_address

ROOT = Path(__file__).parent.parent


def levels(num_ranks: int | None = None) -> dict[str, Level]:
    return {finding.subject: finding.level for finding in fit_host(num_ranks)}


def test_everything_that_is_not_good_says_what_to_do() -> None:
    for finding in fit_host(4096):
        assert (finding.level is Level.GOOD) == (finding.todo == ""), finding


def test_a_missing_interface_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    (found,) = [one for one in fit_host(None) if one.subject == "interface"]
    assert found.level is Level.WRONG
    assert "there is no nowhere0" in found.text
    assert "lo" in found.todo


def test_loopback_is_noted_where_there_are_other_interfaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(host, "_interfaces", lambda: ["lo", "net7"])

    def address_of(name: str) -> list[str]:
        return [{"lo": "127.0.0.1", "net7": "10.1.1.1"}[name]]

    monkeypatch.setattr(host, "addresses_of", address_of)
    (found,) = [one for one in fit_host(None) if one.subject == "interface"]
    assert found.level is Level.NOTE
    assert "net7" in found.todo


def test_a_slow_name_server_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> tuple[str, str]:
        time.sleep(0.06)
        return "name", "0"

    monkeypatch.setattr(host, "SLOW_LOOKUP_S", 0.05)
    monkeypatch.setattr(socket, "getnameinfo", slow)
    assert levels()["name look-ups"] is Level.WRONG


def test_a_look_up_without_an_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LOOKUP_LIMIT_S", 0.05)

    def hangs(*_: object) -> list[object]:
        time.sleep(0.5)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    assert levels()["host name"] is Level.NOTE


def test_more_ranks_than_cores_are_noted() -> None:
    assert levels(1)["cores"] is Level.GOOD
    assert levels(4096)["cores"] is Level.NOTE


def test_json_and_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"kvpact", "torch", "interface", "cores"} <= {one["subject"] for one in found}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert main(["doctor", "--json"]) == 1


@pytest.mark.parametrize(
    "text, parsed",
    [("10.0.0.1:29400", ("10.0.0.1", 29400)), ("[::1]:80", ("::1", 80)), ("a.b:1", ("a.b", 1))],
)
def test_addresses(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:65536", "host:x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(BadInput, match="HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ("doctor 127.0.0.1:29400", "--ranks: how many calls will meet there"),
        ("doctor --ranks 0", "--ranks: must be in 1..4096, got 0"),
        ("doctor here --ranks 2", "expected HOST:PORT like"),
        ("doctor --wait-s 0", "--wait-s: must be in 1..3600, got 0"),
    ],
)
def test_bad_input(arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    assert complaint in capsys.readouterr().err


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def call(port: int, *, ranks: int, wait_s: float) -> subprocess.Popen[str]:
    words = [
        "doctor",
        f"127.0.0.1:{port}",
        "--ranks",
        str(ranks),
        "--wait-s",
        str(wait_s),
        "--json",
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "kvpact", *words],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.ranks
def test_two_calls_meet_and_measure() -> None:
    port = free_port()
    ended = [
        one.communicate(timeout=90.0) for one in [call(port, ranks=2, wait_s=60) for _ in "ab"]
    ]
    texts = sorted(
        finding["text"]
        for out, _ in ended
        for finding in json.loads(out)
        if finding["subject"] == "meeting"
    )
    assert [text.partition(":")[0] for text in texts] == ["rank 0 of 2", "rank 1 of 2"]
    assert all("200 collectives, median" in text for text in texts)


@pytest.mark.ranks
def test_who_comes_alone_is_told_within_the_time() -> None:
    alone = call(free_port(), ranks=2, wait_s=2)
    out, _ = alone.communicate(timeout=60.0)
    (found,) = [one for one in json.loads(out) if one["subject"] == "meeting"]
    assert alone.returncode == 1
    assert found["level"] == "wrong"
    assert "ranks [1] have not introduced themselves" in found["text"]
    assert "port" in found["todo"]

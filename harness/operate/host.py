"""Is this host fit for the ranks of a replica? Each check looks, and changes nothing."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path

from kvpact.harness.operate.finding import Finding, good, note, wrong

__all__ = ["addresses_of", "fit_host"]

#: A look-up that takes longer delays every connection to the store by as much.
SLOW_LOOKUP_S = 0.5
#: Beyond it a look-up is given up.
LOOKUP_LIMIT_S = 12.0
#: Descriptors that one rank may need: connections to all peers, files of the storage, its journal.
FILES_WANTED = 1024
SHM_WANTED_BYTES = 64 << 20

_INTERFACES = Path("/sys/class/net")


def fit_host(num_ranks: int | None) -> list[Finding]:
    """Look at the network, the clock, memory and limits; ``num_ranks`` run on this host."""
    checks: tuple[Callable[[], list[Finding]], ...] = (
        _interface,
        _families,
        _lookups,
        lambda: _cores(num_ranks),
        _clock,
        _shared_memory,
        _locked_memory,
        _open_files,
    )
    return [finding for check in checks for finding in check()]


def addresses_of(interface: str) -> list[str]:
    """Return the IPv4 address of ``interface``, or nothing where it has none (Linux)."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface[:15].encode())
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError:
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _interfaces() -> list[str]:
    return sorted(path.name for path in _INTERFACES.iterdir()) if _INTERFACES.is_dir() else []


def _interface() -> list[Finding]:
    """Which interface gloo will bind to."""
    there = _interfaces()
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    others = [name for name in there if name != "lo" and addresses_of(name)]
    if wanted:
        missing = [name for name in wanted.split(",") if there and name not in there]
        if missing:
            return [
                wrong(
                    "interface",
                    f"GLOO_SOCKET_IFNAME={wanted}, but there is no {', '.join(missing)}",
                    f"set it to one of: {', '.join(there)}",
                )
            ]
        found = [address for name in wanted.split(",") for address in addresses_of(name)]
        if not found:
            return [
                wrong(
                    "interface",
                    f"GLOO_SOCKET_IFNAME={wanted} has no IPv4 address",
                    "bring the interface up, or name another one",
                )
            ]
        text = f"GLOO_SOCKET_IFNAME={wanted} ({', '.join(found)})"
        if wanted == "lo" and others:
            todo = f"for ranks on several hosts set it to one of: {', '.join(others)}"
            return [note("interface", f"{text}: ranks on this host only", todo)]
        return [good("interface", text)]
    return [
        note(
            "interface",
            "GLOO_SOCKET_IFNAME is not set: gloo takes the address of this host's name",
            f"set it to the interface between your hosts, one of: {', '.join(others) or 'lo'}",
        )
    ]


def _families() -> list[Finding]:
    findings: list[Finding] = []
    for family, name, loopback in (
        (socket.AF_INET, "IPv4", "127.0.0.1"),
        (socket.AF_INET6, "IPv6", "::1"),
    ):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((loopback, 0))
            findings.append(good(name, f"a server can listen on {loopback}"))
        except OSError as error:
            text = f"nothing can listen on {loopback}: {error.strerror}"
            if family == socket.AF_INET:
                findings.append(
                    wrong(name, text, "bring the loopback interface up: ip link set lo up")
                )
            else:
                findings.append(note(name, text, "nothing, if all hosts of the replica use IPv4"))
    return findings


def _lookups() -> list[Finding]:
    """Torch's store looks up names in its one thread: a slow name server delays every rank."""
    name = socket.gethostname()
    forward_s, forward = _timed(lambda: socket.getaddrinfo(name, None)[0][4][0])
    findings: list[Finding] = []
    if forward is None:
        findings.append(
            note(
                "host name",
                f"{name} cannot be resolved ({forward_s:.1f} s)",
                "set GLOO_SOCKET_IFNAME, or put the name into /etc/hosts",
            )
        )
    else:
        findings.append(good("host name", f"{name} is {forward} ({forward_s * 1000:.0f} ms)"))
    reverse_s, _ = _timed(lambda: socket.getnameinfo((str(forward or "127.0.0.1"), 0), 0)[0])
    if max(forward_s, reverse_s) > SLOW_LOOKUP_S:
        findings.append(
            wrong(
                "name look-ups",
                f"forward {forward_s:.1f} s, reverse {reverse_s:.1f} s",
                "put this host's addresses into /etc/hosts, or RES_OPTIONS='timeout:1 attempts:1'",
            )
        )
    return findings


def _timed(look_up: Callable[[], object]) -> tuple[float, object | None]:
    """Return (seconds, answer); ``None`` where there is none within the limit."""
    began_s = time.monotonic()
    pool = ThreadPoolExecutor(1, thread_name_prefix="kvpact-lookup")
    try:
        return_value = pool.submit(look_up).result(LOOKUP_LIMIT_S)
    except (OSError, NotInTime):
        return_value = None
    finally:
        pool.shutdown(wait=False)
    return time.monotonic() - began_s, return_value


def _cores(num_ranks: int | None) -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    if num_ranks is not None and num_ranks > cores:
        return [
            note(
                "cores",
                f"{cores} cores for {num_ranks} ranks: a collective takes milliseconds",
                "for measurements run at most one rank a core",
            )
        ]
    return [good("cores", str(cores))]


def _clock() -> list[Finding]:
    info = time.get_clock_info("monotonic")
    if info.resolution > 1e-3:
        return [wrong("clock", f"ticks every {info.resolution} s", "use a kernel with fine timers")]
    return [good("clock", f"monotonic, resolution {info.resolution * 1e9:.0f} ns")]


def _shared_memory() -> list[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return [
            note(
                "shared memory",
                f"{folder} cannot be written",
                "mount a tmpfs there (Docker: --ipc)",
            )
        ]
    free = shutil.disk_usage(folder).free
    if free < SHM_WANTED_BYTES:
        todo = "give it more (Docker: --shm-size=1g, Kubernetes: an emptyDir with medium Memory)"
        return [note("shared memory", f"{folder} has {free >> 20} MiB free", todo)]
    return [good("shared memory", f"{folder} has {free >> 20:,} MiB free")]


def _locked_memory() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        return [good("pinned memory", "not needed: no CUDA device here")]
    try:
        torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        return [wrong("pinned memory", f"cannot be had: {text}", "raise the limit: ulimit -l")]
    return [good("pinned memory", "can be had")]


def _open_files() -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES_WANTED:
        return [note("open files", f"at most {soft}", f"ulimit -n {min(4096, max(hard, soft))}")]
    return [good("open files", f"at most {soft}")]

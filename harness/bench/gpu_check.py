"""``scripts/gpu_check``: everything that needs a GPU, in one go.

Without a CUDA device it says so and claims nothing. With one: page-locked pools, streams and
events, copies checked byte by byte, copy bandwidth, the NCCL group, and a short soak on the device
with its step times. Each line says what was checked and how it went; the exit status is 1 where one
failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from kvpact.cache.config import CacheConfig
from kvpact.cache.copies.mover import Direction, Part
from kvpact.cache.join import make_mover, make_tensors
from kvpact.cache.memory.shape import KVShape
from kvpact.cache.tree.node import Tier
from kvpact.consensus.transport.gloo import NcclGroup, open_tcp_store, serve_tcp_store
from kvpact.harness.drive.report import read_report
from kvpact.harness.verify.content import fill_pages, matches_pages

__all__ = ["main"]

LONG_S: Final = 30.0
#: 2 MiB a page, as of a model with 32 layers: what a real copy moves.
BIG: Final = CacheConfig(
    page_size=16, device_pages=512, host_pages=512, kv_shape=KVShape(layers=32, heads=8, dim=128)
)
SMALL: Final = CacheConfig(
    page_size=16, device_pages=64, host_pages=64, kv_shape=KVShape(layers=3, heads=2, dim=8)
)
SLEEP_CYCLES: Final = 100_000_000
SOAK_STEPS: Final = 1500


def main() -> int:
    """Run all checks; 0 where all held, or where there is no GPU to check."""
    if not torch.cuda.is_available():
        _say("gpu_check: no CUDA device here, so nothing was checked and nothing is claimed")
        return 0
    num_gpus = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(index) for index in range(num_gpus)})
    _say(f"gpu_check: {num_gpus} x {', '.join(names)}, torch {torch.__version__}")
    checks: list[tuple[str, Callable[[], str]]] = [
        ("page-locked host pool", _pinned),
        ("copies, byte by byte", _bytes),
        ("a copy waits for the forward stream", _fence),
        ("a forward waits for its layer", _layers),
        ("bandwidth", _bandwidth),
        ("NCCL group", _nccl),
        ("tests marked gpu", _tests),
        ("soak on the device, gloo", lambda: _soak(max(2, min(num_gpus, 4)), "gloo")),
    ]
    if num_gpus >= 2:
        checks.append(("soak on the device, NCCL", lambda: _soak(min(num_gpus, 4), "nccl")))
    failed = [name for name, check in checks if not _run(name, check)]
    if num_gpus < 2:
        _say("not checked: NCCL between ranks (it needs a GPU for each)")
    _say(f"gpu_check: {'failed: ' + ', '.join(failed) if failed else 'all held'}")
    return int(bool(failed))


def _run(name: str, check: Callable[[], str]) -> bool:
    began_s = time.monotonic()
    try:
        told, is_good = check(), True
    except Exception as error:  # noqa: BLE001 - the next check is of interest too
        told, is_good = f"{type(error).__name__}: {error}", False
    took_s = time.monotonic() - began_s
    _say(f"{'ok    ' if is_good else 'FAILED'} {name} ({took_s:.1f} s): {told}")
    return is_good


def _require(held: bool, what: str) -> None:
    if not held:
        raise AssertionError(what)


def _pinned() -> str:
    tensors = make_tensors(BIG, "cuda")
    host, device = tensors[Tier.HOST], tensors[Tier.DEVICE]
    _require(host.words.is_pinned(), "the host tier is not page-locked")
    _require(device.words.is_cuda, "the device tier is not on the device")
    return f"{host.words.nbytes / 2**30:.2f} GiB page-locked, as much on the device"


def _bytes() -> str:
    num_copied = 0
    for config in (SMALL, BIG):
        tensors = make_tensors(config, "cuda")
        device, host = tensors[Tier.DEVICE], tensors[Tier.HOST]
        mover = make_mover(device, host)
        half = config.device_pages // 2
        hashes = list(range(1000, 1000 + half))
        fill_pages(device, range(half), hashes, 0)
        order = [int(page) for page in np.random.default_rng(0).permutation(half)]
        parts = [Part(n + 1, [page], [n]) for n, page in enumerate(order)]
        mover.submit(Direction.TO_HOST, parts)
        _require(mover.wait_all(LONG_S), "backups did not end")
        _require(all(ending.ok for ending in mover.collect()), "a backup failed")
        moved = [hashes[page] for page in order]
        _require(all(matches_pages(host, range(half), moved, 0)), "wrong bytes on the host")
        back = [Part(n + 1, [n], [half + n]) for n in range(half)]
        mover.submit(Direction.TO_DEVICE, back)
        _require(mover.wait_all(LONG_S), "loads did not end")
        _require(all(ending.ok for ending in mover.collect()), "a load failed")
        places = range(half, 2 * half)
        _require(all(matches_pages(device, places, moved, 0)), "wrong bytes on the device")
        num_copied += 2 * half
        _require(mover.close(LONG_S), "the mover's threads did not end")
    return f"{num_copied} pages in merged copies, both ways"


def _fence() -> str:
    tensors = make_tensors(SMALL, "cuda")
    device, host = tensors[Tier.DEVICE], tensors[Tier.HOST]
    mover = make_mover(device, host)
    wanted = device.words[:, 0].clone() + 7
    torch.cuda.synchronize()
    # A forward that writes page 0 late; the copy is asked for at once.
    torch.cuda._sleep(SLEEP_CYCLES)  # pyright: ignore[reportPrivateUsage]
    device.words[:, 0].copy_(wanted)
    launch = mover.mark_launch()
    mover.submit(Direction.TO_HOST, [Part(1, [0], [0], after=launch)])
    _require(mover.wait_all(LONG_S), "the copy did not end")
    mover.collect()
    _require(bool((host.words[:, 0] == wanted.cpu()).all()), "the copy was ahead of the forward")
    mover.close(LONG_S)
    return "the bytes are those that the forward wrote"


def _layers() -> str:
    tensors = make_tensors(BIG, "cuda")
    device, host = tensors[Tier.DEVICE], tensors[Tier.HOST]
    mover = make_mover(device, host)
    pages = list(range(256))
    fill_pages(host, pages, [page + 1 for page in pages], 0)
    expected = host.words[:, pages].cuda()
    mover.submit(Direction.TO_DEVICE, [Part(1, pages, pages)])
    layers = BIG.kv_shape.layers
    seen: list[torch.Tensor] = []
    for layer in range(layers):
        _require(mover.wait_layer(layer, LONG_S, [1]), f"layer {layer} did not come")
        # What a forward would read now, in stream order.
        planes = (layer, layers + layer)
        seen += [(device.words[plane, :256] == expected[plane]).all() for plane in planes]
    _require(all(bool(one) for one in seen), "a forward read a layer before it had arrived")
    _require(mover.wait_all(LONG_S), "the load did not end")
    mover.close(LONG_S)
    return f"{layers} layers, each readable as soon as it was waited for"


def _bandwidth() -> str:
    tensors = make_tensors(BIG, "cuda")
    device, host = tensors[Tier.DEVICE], tensors[Tier.HOST]
    mover = make_mover(device, host)
    pages = list(range(BIG.device_pages))
    told: list[str] = []
    for direction, name in ((Direction.TO_HOST, "to host"), (Direction.TO_DEVICE, "to device")):
        best_s = float("inf")
        for attempt in range(5):
            began_s = time.perf_counter()
            mover.submit(direction, [Part(attempt + 1, pages, pages)])
            _require(mover.wait_all(LONG_S), "the copy did not end")
            best_s = min(best_s, time.perf_counter() - began_s)
            mover.collect()
        size = len(pages) * device.bytes_per_page
        told.append(f"{name} {size / best_s / 1e9:.1f} GB/s")
    mover.close(LONG_S)
    return f"{', '.join(told)} ({len(pages)} pages of {device.bytes_per_page / 2**20:g} MiB)"


def _nccl() -> str:
    """Alone in its group: what several ranks need is checked by the soak, where there are GPUs."""
    store, port = serve_tcp_store()
    width = 534
    raw = open_tcp_store("127.0.0.1", port, 5.0)
    group = NcclGroup.form(raw, "check", [0], 0, width, 30.0)
    try:
        vector = np.arange(width, dtype=np.int64)
        times: list[float] = []
        for _ in range(50):
            began_s = time.perf_counter()
            work = group.min(vector)
            _require(work.wait(LONG_S), "the collective did not end")
            times.append(time.perf_counter() - began_s)
            _require(bool((work.result() == vector).all()), "the minimum of one is itself")
    finally:
        group.close()
        del store
    return f"{sorted(times)[25] * 1e6:.0f} µs for {width} numbers, median of 50"


def _tests() -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    if not os.path.isdir("tests"):
        return "skipped: not in a checkout"
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    _require(done.returncode in (0, 5), f"{last}\n{done.stdout[-3000:]}")
    return last


def _soak(num_ranks: int, backend: str) -> str:
    with tempfile.TemporaryDirectory() as out:
        words = ["--steps", str(SOAK_STEPS), "--chaos", "--device", "cuda", "--backend", backend]
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nproc-per-node", str(num_ranks), "-m", "kvpact.harness.torchrun"]
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
        done = subprocess.run(
            [*command, *words, "--out", out, "--kv-shape", "8x2x64"],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=environment,
        )
        _require(os.path.exists(f"{out}/report.json"), done.stderr[-3000:])
        report = read_report(out)
    why = "; ".join(report.why)
    _require(report.status == 0, f"{report.verdict}: {why}\n{done.stderr[-2000:]}")
    times = report.step_ms
    return (
        f"{num_ranks} ranks, {report.steps:,} steps, {report.compared_trees} trees compared, step"
        f" p50 {times.p50:.2f}, p99 {times.p99:.2f}, max {times.max:.2f} ms"
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

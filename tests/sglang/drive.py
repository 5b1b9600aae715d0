"""Runs SGLang's cache in several gloo ranks, as its scheduler would, and compares the ranks.

    python drive.py SGLANG_DIR < cases.jsonl > verdicts.jsonl

One case a line: {"name", "mode": "stock|observe|decide", "ranks", "core": "python|rust", "lag",
"fault", ...}. SGLang is imported once; each case forks its ranks. Every request's KV is written
from its tokens and what is loaded is compared with that, byte for byte.
"""

# pyright: basic, reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import time
import tomllib
import traceback
from array import array
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import stand_ins

stand_ins.install(sys.argv[1])

import torch
import torch.distributed as dist
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import (
    checkpoint_kv_cache,
    evict_from_tree_cache,
    release_kv_cache,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvpact.cache.adapters.sglang import admission
from kvpact.consensus.transport.gloo import GlooGroup

torch.set_num_threads(1)
CLASSES = {
    "stock": "UnifiedRadixCache",
    "observe": "ObservingRadixCache",
    "decide": "DecidingRadixCache",
}
PAGE, LANES, TURNS, SYSTEM, USER, OUTPUT = 64, 16, 8, 1024, 256, 128
DEVICE_TOKENS, HOST_RATIO, LAYERS, DECODE_STEPS = 16384, 3.0, 2, 4
DEFAULTS = {
    "mode": "decide", "ranks": 2, "core": "python", "lag": 0, "fault": "none", "count": 1, "at": 30,
    "batch": 4, "forward": "sized", "seed": 0, "wild": 0.0, "wall_s": 90,
}  # fmt: skip


def install_entry_point(folder) -> None:
    """Make kvpact look installed, with the entry point of its pyproject.toml."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    group = "sglang.srt.plugins"
    lines = [f"{name} = {value}" for name, value in project["entry-points"][group].items()]
    info = Path(folder) / "kvpact-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpact\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    sys.path.append(str(folder))


class Late:
    """A finish event that is seen only from step ``due`` on."""

    now = 0

    def __init__(self, event, due) -> None:
        self.event, self.due = event, due

    def query(self):
        return Late.now >= self.due and self.event.query()

    def synchronize(self):
        self.event.synchronize()


def build(case, rank, group):
    """One rank's pools and cache; the faulty rank's may be smaller."""
    is_faulty = rank == 1
    device = DEVICE_TOKENS
    if case["fault"] == "device_small" and is_faulty:
        device = device * 3 // 4 // PAGE * PAGE
    ratio = HOST_RATIO * (0.75 if case["fault"] == "host_small" and is_faulty else 1.0)
    args = ServerArgs(
        model_path="none", page_size=PAGE, hicache_io_backend="direct", device="cpu", tp_size=1,
        hicache_mem_layout="layer_first", hicache_write_policy="write_through", hicache_ratio=ratio,
    )  # fmt: skip
    set_global_server_args_for_scheduler(args)
    length = SYSTEM + TURNS * (USER + OUTPUT) + 256
    rows = ReqToTokenPool(
        size=LANES + 4, max_context_len=length, device="cpu", enable_memory_saver=False
    )
    kv = MHATokenToKVPool(
        size=device, page_size=PAGE, dtype=torch.bfloat16, head_num=1, head_dim=16,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    allocator = PagedTokenToKVPoolAllocator(
        size=device, page_size=PAGE, dtype=torch.bfloat16, device="cpu", kvcache=kv, need_sort=False
    )
    params = CacheInitParams(
        req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, page_size=PAGE, disable=False,
        tp_cache_group=group, tree_core_backend=case["core"],
    )  # fmt: skip
    if case["mode"] != "stock":  # as a server's process does, by the entry point
        os.environ.update(SGLANG_PLUGINS="kvpact", KVPACT_MODE=case["mode"])
        load_plugins()
        is_hooked = "PrefillAdder.add_one_req" in str(sorted(HookRegistry._patched))
        assert is_hooked == (case["mode"] == "decide")
    worker = SimpleNamespace(register_hicache_layer_transfer_counter=lambda counter: None)
    context = SimpleNamespace(
        server_args=args,
        params=params,
        tp_worker=worker,
        enable_hierarchical_cache=True,
        is_hybrid_swa=False,
        is_hybrid_ssm=False,
    )
    cache = registry.create_unified_radix_cache(context)
    assert type(cache).__name__ == CLASSES[case["mode"]], type(cache)
    atexit.unregister(cache.shutdown)
    return cache, allocator, rows, kv


def tree_of(cache) -> str:
    """A digest of the whole tree: tokens, where they are, and pins (Python core only)."""
    found, is_python = [], "rust" not in type(cache.tree_core).__module__
    stack = [(cache.tree_core.root_node, b"")] if is_python else []
    while stack:
        node, above = stack.pop()
        for child in node.children.values():
            name = hashlib.sha1(above + array("q", list(child.key.token_ids)).tobytes()).digest()
            data = child.component_data[ComponentType.FULL]
            where = (data.value is not None, data.host_value is not None, data.lock_ref)
            found.append((name.hex()[:16], len(child.key), *where))
            stack.append((child, name))
    sizes = (
        cache.full_evictable_size(), cache.full_protected_size(), list(cache.total_size()),
        len(cache.ongoing_write_through), len(cache.ongoing_load_back),
    )  # fmt: skip
    return hashlib.sha1(repr((sorted(found), sizes)).encode()).hexdigest()[:12]


class Rank:
    """One rank's run of the workload: lanes of conversations that grow turn by turn."""

    def __init__(self, case, rank, group) -> None:
        self.case, self.rank, self.group = case, rank, group
        self.forward_group = dist.new_group(timeout=timedelta(seconds=20))
        self.cache, self.allocator, self.rows, self.kv = build(case, rank, group)
        self.controller = self.cache.cache_controller
        pool = self.controller.mem_pool_host
        self.host = pool.entries[0].host_pool if hasattr(pool, "entries") else pool
        self.step, self.struck, self.collectives, self.checks = 0, 0, 0, 0
        self.trees, self.extends, self.refused = [], [], []
        self.totals = dict.fromkeys(("prompt", "device", "host", "loaded", "waits", "bad"), 0)
        self.seconds = dict.fromkeys(("check", "checkpoint", "finish", "flush", "admit"), 0.0)
        self.delays = random.Random(1000 + rank)
        self._count_collectives()
        self._plant()

    def _count_collectives(self) -> None:
        reduce, reduce_min = dist.all_reduce, GlooGroup.min
        self.reduce = reduce

        def counted(*args, **how):
            self.collectives += 1
            return reduce(*args, **how)

        def counted_min(group, vector):
            self.collectives += 1
            return reduce_min(group, vector)

        dist.all_reduce = torch.distributed.all_reduce = counted
        GlooGroup.min = counted_min

    def _plant(self) -> None:
        fault, chance = self.case["fault"], random.Random(self.case["seed"] * 77 + self.rank)

        def strikes() -> bool:
            if fault == "chaos":
                return chance.random() < 0.2
            is_due = self.rank == 1 and self.step >= self.case["at"]
            return is_due and self.struck < self.case["count"]

        def failing(call):
            def maybe(*args, **how):
                if strikes():
                    self.struck += 1
                    return None
                return call(*args, **how)

            return maybe

        if fault in ("host_fail", "chaos"):
            self.host.alloc = failing(self.host.alloc)
        if fault in ("device_fail", "chaos"):
            self.controller.load = failing(self.controller.load)

    def _delay(self) -> None:
        fault = self.case["fault"]
        if fault not in ("delay_all", "chaos") and (fault, self.rank) != ("delay_one", 1):
            return
        for queue, longest in (
            (self.controller.ack_write_queue, 12),
            (self.controller.ack_load_queue, 3),
        ):
            for place, ack in enumerate(queue):
                if not isinstance(ack.finish_event, Late):
                    due = self.step + self.delays.randint(0, longest)
                    queue[place] = ack._replace(finish_event=Late(ack.finish_event, due))

    def timed(self, name, call, *args, **how):
        """Call, and add the time to ``name``."""
        began = time.perf_counter()
        result = call(*args, **how)
        self.seconds[name] += time.perf_counter() - began
        return result

    def check(self) -> None:
        """The step of the cache, and what every rank must have in common after it."""
        self.step += 1
        Late.now = self.step
        before = self.collectives
        self.timed("check", self.cache.check_hicache_events)
        self.checks += 1
        if self.case["mode"] == "decide":
            assert self.collectives - before == 1, f"{self.collectives - before} collectives"
        self.trees.append(tree_of(self.cache))
        self._delay()

    def run(self) -> None:
        """All turns of all lanes, then idle steps until everything has drained."""
        case = self.case
        rng = random.Random(case["seed"])
        system = [rng.randrange(1, 30000) for _ in range(SYSTEM)]
        self.history = [list(system) for _ in range(LANES)]
        order = [(turn, lane) for turn in range(TURNS) for lane in range(LANES)]
        for first in range(0, len(order), case["batch"]):
            self._batch(order[first : first + case["batch"]])
        for _ in range(24 + 4 * case["lag"]):
            self.check()
        self.cache.sanity_check()

    def _batch(self, places) -> None:
        waiting = {place: self._request(*place) for place in places}
        done = []
        while waiting:
            self.check()
            batch = []
            for place, (req, prompt, output) in list(waiting.items()):
                said = self._admit(req, prompt)
                if said != "waits":
                    del waiting[place]
                if said == "in":
                    batch.append((place, req, prompt, output))
            if batch:
                self._forward(batch)
                done += batch
        for _ in range(DECODE_STEPS):
            self.check()
            self.timed("flush", self.cache.flush_pending_backups)
        for (_, lane), req, prompt, output in done:
            req.output_ids.extend(output)
            req.kv.kv_committed_len = req.kv.kv_allocated_len = len(prompt) + len(output)
            req.finished_reason, req.finished_len = FINISH_LENGTH(len(output)), len(output)
            self.timed("finish", release_kv_cache, req, self.cache, checkpoint=True)
            self.history[lane] = prompt + output
        self.timed("flush", self.cache.flush_pending_backups)
        self._delay()

    def _request(self, turn, lane):
        rng = random.Random(self.case["seed"] * 7919 + turn * 1000 + lane)
        source = self.history[lane]
        if rng.random() < self.case["wild"]:  # cuts nodes where nobody expects it
            source = self.history[rng.randrange(LANES)]
            source = source[: rng.randrange(PAGE, len(source))]
        rng = random.Random(self.case["seed"] * 7919 + turn * 1000 + lane)
        prompt = source + [rng.randrange(1, 30000) for _ in range(USER)]
        output = [rng.randrange(1, 30000) for _ in range(OUTPUT)]
        req = Req(
            rid=f"{lane}.{turn}", origin_input_text="", origin_input_ids=array("q", prompt),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=OUTPUT),
        )  # fmt: skip
        req.is_new = True
        return req, prompt, output

    def _admit(self, req, prompt) -> str:
        """As the scheduler's admission does: match, load back, lock, allocate."""
        cache = self.cache
        req.init_next_round_input(cache)
        if req.is_new:
            req.is_new = False
            self.totals["prompt"] += len(prompt)
            self.totals["device"] += req.prefix_len
            self.totals["host"] += req.host_hit_length
        adder = SimpleNamespace(tree_cache=cache)
        said = self.timed("admit", admission.add_one_req, self._take, adder, req, prompt)
        if said is schedule_policy.AddReqResult.CONTINUE:
            self.totals["waits"] += 1
            return "waits"
        return said

    def _take(self, adder, req, prompt) -> str:
        cache, need = self.cache, len(prompt) + OUTPUT
        ticket = getattr(cache, "load_backs", None) and cache.load_backs.tickets.of(req.rid)
        self.totals["loaded"] += ticket.pages if ticket else 0
        lock = cache.lock(req.last_node)
        if req.needs_host_load_back():
            node = req.best_match_node
            host_lock = cache.inc_host_lock_ref(node).to_dec_params()
            wish = InitLoadBackParams(
                best_match_node=node, host_hit_length=req.host_hit_length, req=req
            )
            req.host_loaded_length, req.last_node = cache.init_load_back(wish)
            cache.unlock(lock)
            cache.dec_host_lock_ref(node, host_lock)
            lock = None
            req.prefix_len += req.host_loaded_length
            req.kv.cache_protected_len = req.prefix_len
            self.totals["loaded"] += req.host_loaded_length
        req.lock = cache.lock(req.last_node)
        if lock is not None:
            cache.unlock(lock)
        num_tokens = -(-(need - req.prefix_len) // PAGE) * PAGE
        evict_from_tree_cache(cache, num_tokens)
        found = self.allocator.alloc(num_tokens)
        if found is None:
            cache.unlock(req.lock)
            req.lock = None
            if self.case["mode"] == "decide":
                cache.load_backs.tickets.drop(req.rid)
            self.refused.append(req.rid)
            return "refused"
        self.rows.alloc([req])
        row, start = req.kv.req_pool_idx, req.prefix_len
        self.rows.write(
            (row, slice(0, start)), cache.prefix_device_indices(req)[:start].to(torch.int32)
        )
        self.rows.write((row, slice(start, need)), found[: need - start].to(torch.int32))
        req.kv.kv_committed_len = req.kv.kv_allocated_len = len(prompt)
        self.extends.append(len(prompt) - start)
        return "in"

    def _forward(self, batch) -> None:
        """Check the bytes of what was cached, compute the rest, talk as a model's ranks do."""
        self.cache.ready_to_load_host_cache()
        num_new = 0
        for _, req, prompt, output in batch:
            tokens = torch.tensor(prompt + output)
            places = self.rows.req_to_token[req.kv.req_pool_idx, : len(tokens)].long()
            right = torch.stack([tokens % 251, tokens.cumsum(0) % 241], 1).to(torch.bfloat16)
            for layer in range(LAYERS):
                held = self.kv.k_buffer[layer][places[: req.prefix_len], 0, :2]
                self.totals["bad"] += int((held != right[: req.prefix_len]).any(1).sum())
                self.kv.k_buffer[layer][places[req.prefix_len :], 0, :2] = right[req.prefix_len :]
            num_new += len(prompt) - req.prefix_len
        if self.case["forward"] == "sized":
            self.reduce(torch.ones(max(num_new, 1), 8), group=self.forward_group)
        for _, req, _, _ in batch:
            self.timed("checkpoint", checkpoint_kv_cache, req, self.cache)
        self.timed("flush", self.cache.flush_pending_backups)
        self._delay()

    def story(self) -> dict:
        """What this rank has to show."""
        cache = self.cache
        left = {
            "backups": len(cache.ongoing_write_through), "loads": len(cache.ongoing_load_back),
            "protected": cache.full_protected_size(),
        }  # fmt: skip
        if self.case["mode"] == "decide":
            manager = cache.replica.manager
            used = cache.replica.pools["host"] - self.host.available_size()
            left |= {
                "tickets": cache.load_backs.tickets.num_pinned, "queue": len(cache.back_ups.queue),
                "intents": len(manager.open_intents),
                "uncharged": manager.ledger.charged("host") - used,
            }  # fmt: skip
        return {
            "steps": self.checks, "collectives": self.collectives, "trees": self.trees,
            "extends": self.extends, "refused": self.refused, "totals": self.totals,
            "seconds": self.seconds, "struck": self.struck, "left": left,
        }  # fmt: skip


class Findings(logging.Handler):
    """Keeps what kvpact logs, with the step of the driver."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[tuple[int, str]] = []

    def emit(self, record) -> None:
        self.found.append((Late.now, record.getMessage()))


def rank_main(case, rank, port, folder) -> None:
    """Run one rank; leaves its story in ``folder``."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), KVPACT_LAG=str(case["lag"]))
    findings = Findings()
    logging.getLogger("kvpact").addHandler(findings)
    story: dict = {}
    try:
        dist.init_process_group(
            "gloo", rank=rank, world_size=case["ranks"], timeout=timedelta(seconds=20)
        )
        one = Rank(case, rank, dist.group.WORLD)
        story = {"error": "did not end"}
        try:
            one.run()
            story = one.story()
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            story = one.story() | {"error": f"{error!r} at {where.filename}:{where.lineno}"}
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        story = {"error": f"{error!r} at {where.filename}:{where.lineno}"}
    story["findings"] = findings.found
    (Path(folder) / f"{rank}.json").write_text(json.dumps(story))
    os._exit(0)  # the other ranks decide when to end


def run(case) -> dict:
    """Fork the ranks of one case, wait for them, compare them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(case["ranks"]):
            child = os.fork()
            if child == 0:
                rank_main(case, rank, port, folder)
            children.append(child)
        hangs = _wait(children, began + case["wall_s"])
        stories = [_read(Path(folder) / f"{rank}.json") for rank in range(case["ranks"])]
    return judge(case, stories, hangs) | {"wall_s": round(time.monotonic() - began, 1)}


def _wait(children, end) -> int:
    left = set(children)
    while left and time.monotonic() < end:
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.02)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return len(left)


def _read(path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {"error": "left nothing"}


def judge(case, stories, hangs) -> dict:
    """What the ranks have in common, and what not."""
    first = stories[0]
    steps = zip(*[one.get("trees", []) for one in stories], strict=False)
    differ = next((n for n, trees in enumerate(steps, 1) if len(set(trees)) > 1), None)
    found = [finding for one in stories for finding in one["findings"]] if not hangs else []
    said = [(step, text) for step, text in found if "observed" in text]
    return {
        "name": case["name"],
        "hangs": hangs,
        "errors": [one["error"] for one in stories if "error" in one],
        "trees_differ_at": differ,
        "extends_equal": len({str(one.get("extends")) for one in stories}) == 1,
        "refused": [len(one.get("refused", ())) for one in stories],
        "refused_equal": len({str(one.get("refused")) for one in stories}) == 1,
        "left": [{k: v for k, v in one.get("left", {}).items() if v} for one in stories],
        "struck": max((one.get("struck", 0) for one in stories), default=0),
        "collectives": first.get("collectives"),
        "steps": first.get("steps"),
        "totals": first.get("totals"),
        "seconds": first.get("seconds"),
        "bad_bytes": sum(one.get("totals", {}).get("bad", 0) for one in stories),
        "observed_at": min((step for step, _ in said), default=None),
        "observed": min(said, default=(0, ""))[1],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as site:
        install_entry_point(site)
        for line in sys.stdin:
            print(json.dumps(run(DEFAULTS | json.loads(line))), flush=True)

"""The tree's eviction against an LRU over blocks that knows no tree: hit for hit."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import pytest

from kvpact.harness.cli.main import main
from kvpact.harness.trace.conversations import shipped_trace
from kvpact.harness.trace.mooncake import TraceRequest, read_trace

LIMIT = 200


def block_lru(requests: list[TraceRequest], capacity: int) -> int:
    """Hits of a plain LRU that touches the blocks of a request from right to left."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for block in request.hash_ids:
            if block not in kept:
                break
            hits += 1
        for block in reversed(request.hash_ids):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > capacity:
            kept.popitem(last=False)
    return hits


@pytest.mark.parametrize("capacity", [20, 47, 150, 400, 4000])
def test_hits_are_those_of_a_block_lru(capacity: int, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    flags = f"--ranks sim --tp 1 --lanes 1 --host-pages 0 --device-pages {capacity}"
    assert main(["replay", *flags.split(), "--limit", str(LIMIT), "--json", str(out)]) == 0
    report = json.loads(out.read_text())

    requests = read_trace(str(shipped_trace()), limit=LIMIT)
    assert report["hits"] == {"device": block_lru(requests, capacity), "host": 0, "storage": 0}
    assert report["blocks"] == sum(len(request.hash_ids) for request in requests)

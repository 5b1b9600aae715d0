"""Copies between a CUDA device and the host: one side stream and one thread per direction.

The thread gathers or scatters on the host side, through page-locked staging, and waits for the
device; the caller only posts. Two fences keep copies and forwards apart, both on the device:

- a copy waits for the forward stream: up to the last launch named by ``Part.after``, or, where a
  part names none, up to everything launched when it was submitted;
- a forward waits for a copy: `CudaMover.wait_layer` makes the forward stream wait for that layer.

Loads are scattered layer by layer, so that a forward can start on layer 0 while later layers are
still on their way; backups are one gather on the device, one copy and one scatter on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, cast

import numpy as np
import torch

from kvpact.cache.copies.cpu import Lane, ThreadMover
from kvpact.cache.copies.mover import MAX_PARTS, Batch, Direction, Part, PlanPart
from kvpact.cache.memory.paged import PagedMemory
from kvpact.consensus.core.errors import Misuse

__all__ = ["CudaMover"]

MAX_LAUNCHES = 64
"""Launches whose events are kept. An older one is replaced by the oldest kept, which is later."""


class CudaMover(ThreadMover):
    """Copies between a CUDA device's tensors and CPU tensors. Raises `Misuse` without CUDA.

    ``forward_stream`` is the stream of the forward passes; None: the current stream of the thread
    that calls the mover. ``host`` should be page-locked memory, staging always is.
    """

    def __init__(
        self,
        device: PagedMemory,
        host: PagedMemory,
        *,
        forward_stream: torch.cuda.Stream | None = None,
        plan_part: PlanPart | None = None,
        max_parts: int = MAX_PARTS,
    ) -> None:
        if not torch.cuda.is_available():
            raise Misuse("CudaMover needs CUDA, which is not available: use CpuMover")
        if device.device.type != "cuda" or host.host_groups is None:
            raise Misuse(
                "CudaMover copies between 'cuda' and 'cpu' tensors, not between"
                f" {str(device.device)!r} and {str(host.device)!r}"
            )
        super().__init__(device, host, plan_part=plan_part, max_parts=max_parts)
        self._host_groups = host.host_groups
        self._forward_stream = forward_stream
        self._launches: deque[tuple[int, Any]] = deque(maxlen=MAX_LAUNCHES)
        self._streams: dict[Direction, Any] = {}
        for direction in Direction:
            self._streams[direction] = torch.cuda.Stream(device.device)
            name = f"kvpact-{direction.name.lower().replace('_', '-')}"
            self._lanes[direction] = Lane(name, self._carry_here, self._mailbox)

    def mark_launch(self) -> int:
        """See `Mover`: call it right after the launch, on the thread that launched."""
        number = super().mark_launch()
        self._launches.append((number, self._record()))
        return number

    def wait_layer(
        self, layer: int, timeout_s: float, tickets: Collection[int] | None = None
    ) -> bool:
        """Blocks only until the load is enqueued; the forward stream waits for its bytes."""
        self._require_layer(layer)

        def all_enqueued() -> bool:
            return all(batch.layer_events for batch in self._loads(tickets))

        if not self._wait(all_enqueued, timeout_s):
            return False
        for batch in self._loads(tickets):
            self._stream().wait_event(batch.layer_events[layer])
        return self._bring_loads(tickets)

    def _start(self, batch: Batch) -> None:
        batch.fence = self._fence(batch.parts)
        super()._start(batch)

    def _carry(self, batch: Batch, invert: bool) -> None:
        batch.fence = self._fence(batch.parts)
        self._carry_here(batch, invert)

    def _post(self, report: tuple[Batch, Any]) -> None:
        batch, found = report
        if isinstance(found, list):
            batch.layer_events = cast("list[Any]", found)  # enqueued, not ended
        else:
            super()._post(report)

    def _carry_here(self, batch: Batch, invert: bool = False) -> None:
        if batch.direction is Direction.TO_HOST:
            self._copy_to_host(batch, invert)
        else:
            self._copy_to_device(batch, invert)

    def _copy_to_host(self, batch: Batch, invert: bool) -> None:
        stream = self._streams[Direction.TO_HOST]
        source, target = batch.pages()
        if not len(source):
            return  # side pages alone: they are another mover's
        index = self._index(source)
        staged: list[torch.Tensor] = []
        with torch.cuda.stream(stream):
            if batch.fence is not None:
                stream.wait_event(batch.fence)
            places = index.to(self.device.groups[0].device, non_blocking=True)
            for words in self.device.groups:
                gathered = words.index_select(1, places)
                staged.append(torch.empty(gathered.shape, dtype=words.dtype, pin_memory=True))
                staged[-1].copy_(gathered, non_blocking=True)
        stream.synchronize()
        for group, pages in zip(self._host_groups, staged, strict=True):
            found = pages.numpy()
            group[:, target] = np.invert(found) if invert else found

    def _copy_to_device(self, batch: Batch, invert: bool) -> None:
        stream = self._streams[Direction.TO_DEVICE]
        source, target = batch.pages()
        staged = [self._staged(number, source, invert) for number in range(len(self._host_groups))]
        events: list[Any] = []
        index = self._index(target)
        with torch.cuda.stream(stream):
            if batch.fence is not None:
                stream.wait_event(batch.fence)
            places = index.to(self.device.groups[0].device, non_blocking=True)
            for planes in self.device.layer_planes:
                for group, plane in planes:
                    pages = staged[group][plane].to(places.device, non_blocking=True)
                    self.device.groups[group][plane].index_copy_(0, places, pages)
                event = torch.cuda.Event()
                event.record(stream)
                events.append(event)
        if not invert:
            self._mailbox.put((batch, events))
        stream.synchronize()

    def _staged(self, number: int, source: Any, invert: bool) -> torch.Tensor:
        """Host pages of one group in page-locked memory, from which the device copies."""
        planes, _, words = self.device.groups[number].shape
        dtype = self.device.groups[number].dtype
        staged = torch.empty((planes, len(source), words), dtype=dtype, pin_memory=True)
        staged.numpy()[:] = self._host_groups[number][:, source]
        if invert:
            torch.bitwise_not(staged, out=staged)
        return staged

    def _index(self, pages: Any) -> torch.Tensor:
        # Page-locked: from ordinary memory the copy would make the thread wait for the fence.
        return torch.from_numpy(pages).pin_memory()

    def _fence(self, parts: Sequence[Part]) -> Any:
        """The event of the forward stream that a copy of ``parts`` must wait for, if any."""
        last = 0
        for part in parts:
            if part.after is None or part.after > self._num_launches:
                return self._record()
            last = max(last, part.after)
        if last == 0:
            return None
        return next(event for number, event in self._launches if number >= last)

    def _record(self) -> Any:
        event = torch.cuda.Event()
        event.record(self._stream())
        return event

    def _stream(self) -> Any:
        return self._forward_stream or torch.cuda.current_stream(self.device.device)

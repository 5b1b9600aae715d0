"""The layouts of real engines on CPU tensors, and what one token keeps in each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpact.cache.memory.engine_tensors import EngineTensors, TensorView

__all__ = ["LAYOUTS", "Layout"]

LAYERS, HEADS, DIM = 3, 2, 8


class Layout:
    """An engine's tensors, the same as kvpact sees them, and how the engine reads a page."""

    def __init__(
        self, layers: Sequence[Sequence[TensorView]], page_size: int, num_pages: int
    ) -> None:
        self.tensors = [view.tensor for views in layers for view in views]
        self.memory = EngineTensors(layers, page_size=page_size)
        self._views = [view for views in layers for view in views]
        self._page_size = page_size
        assert self.memory.num_pages == num_pages

    def read(self, page: int) -> list[torch.Tensor]:
        """Return one page by the engine's own indices: parts of its tensors, not copies."""
        parts: list[torch.Tensor] = []
        for view in self._views:
            if view.pages is not None:
                parts.append(view.tensor.select(view.pages, page))
            elif view.tokens is not None:
                start = page * self._page_size
                parts.append(view.tensor.narrow(view.tokens, start, self._page_size))
        return parts

    def fill(self, page: int, seed: int) -> list[torch.Tensor]:
        """As a forward pass would: write into one page of every tensor; returns what is there."""
        generator = torch.Generator().manual_seed(seed)
        for part in self.read(page):
            part.copy_(torch.randint(1, 100, part.shape, generator=generator).to(part.dtype))
        return [part.clone() for part in self.read(page)]

    def holds(self, page: int, wanted: list[torch.Tensor]) -> bool:
        """Whether the engine finds exactly ``wanted`` in ``page``."""
        return all(map(torch.equal, self.read(page), wanted))


def _zeros(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def sglang(num_pages: int, page_size: int) -> Layout:
    """K and V of a layer apart: [slots, heads, dim]."""
    slots = num_pages * page_size
    layers = [
        [TensorView(_zeros(slots, HEADS, DIM), tokens=0) for _ in ("k", "v")] for _ in range(LAYERS)
    ]
    return Layout(layers, page_size, num_pages)


def vllm(num_pages: int, page_size: int) -> Layout:
    """K and V of a layer in one tensor: [2, blocks, tokens, heads, dim]."""
    shape = (2, num_pages, page_size, HEADS, DIM)
    layers = [[TensorView(_zeros(*shape), pages=1)] for _ in range(LAYERS)]
    return Layout(layers, page_size, num_pages)


def tensorrt(num_pages: int, page_size: int) -> Layout:
    """Blocks first, K and V and heads inside: [blocks, 2, heads, tokens, dim]."""
    shape = (num_pages, 2, HEADS, page_size, DIM)
    layers = [[TensorView(_zeros(*shape), pages=0)] for _ in range(LAYERS)]
    return Layout(layers, page_size, num_pages)


def one_allocation(num_pages: int, page_size: int) -> Layout:
    """All layers in one tensor, blocks first: [blocks, layers, 2, tokens, heads, dim]."""
    pool = _zeros(num_pages, LAYERS, 2, page_size, HEADS, DIM)
    layers = [[TensorView(pool[:, layer], pages=0)] for layer in range(LAYERS)]
    return Layout(layers, page_size, num_pages)


def latent(num_pages: int, page_size: int) -> Layout:
    """Latent attention: one vector a token, no V: [slots, 1, rank + rope]."""
    slots = num_pages * page_size
    layers = [
        [TensorView(_zeros(slots, 1, 9, dtype=torch.bfloat16), tokens=0)] for _ in range(LAYERS)
    ]
    return Layout(layers, page_size, num_pages)


def head_major(num_pages: int, page_size: int) -> Layout:
    """Heads first: [heads, slots, dim]."""
    shape = (HEADS, num_pages * page_size, DIM)
    layers = [
        [TensorView(_zeros(*shape, dtype=torch.float32), tokens=1) for _ in ("k", "v")]
        for _ in range(LAYERS)
    ]
    return Layout(layers, page_size, num_pages)


def quantised(num_pages: int, page_size: int) -> Layout:
    """Bytes with a scale beside each head, and layers that differ in heads."""
    slots = num_pages * page_size
    layers: list[list[TensorView]] = []
    for layer in range(LAYERS):
        heads = HEADS + layer % 2
        values = [_zeros(slots, heads, DIM, dtype=torch.uint8) for _ in ("k", "v")]
        scales = [_zeros(slots, heads) for _ in ("k", "v")]
        layers.append([TensorView(tensor, tokens=0) for tensor in (*values, *scales)])
    return Layout(layers, page_size, num_pages)


LAYOUTS = {
    make.__name__: make
    for make in (sglang, vllm, tensorrt, one_allocation, latent, head_major, quantised)
}

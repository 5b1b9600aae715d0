"""The tensors that an engine keeps its KV cache in, as pages, in whatever order it lays them out.

Nothing is copied or converted: each tensor is described by which of its dimensions counts pages,
or tokens, and is then seen as planes of whole pages. The tensors of three engines::

    SGLang           k, v of a layer   [slots, heads, dim]                  TensorView(k, tokens=0)
    vLLM             kv of a layer     [2, blocks, tokens, heads, dim]      TensorView(kv, pages=1)
    TensorRT-LLM     kv of a layer     [blocks, 2, heads, tokens, dim]      TensorView(kv, pages=0)
    latent attention kv of a layer     [slots, 1, rank + rope]              TensorView(kv, tokens=0)
    head-major       k, v of a layer   [heads, slots, dim]                  TensorView(k, tokens=1)

The dimensions before it each make planes of their own, those behind it belong to the page.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import cast

import msgspec
import torch

from kvpact.cache.memory.paged import PagedMemory, Plane, word_for
from kvpact.consensus.core.errors import Misuse, ResourceError

__all__ = ["EngineTensors", "TensorView", "host_pages_for"]


class TensorView(msgspec.Struct, frozen=True):
    """One tensor of a layer, and its dimension that counts ``pages``, or else ``tokens``.

    With ``tokens`` a page is ``page_size`` neighbours: token ``t`` lies in page
    ``t // page_size``.
    """

    tensor: torch.Tensor
    pages: int | None = None
    tokens: int | None = None


class _Rows(msgspec.Struct, frozen=True):
    """Planes of one tensor that are alike: ``[planes, pages, elements of a page]``."""

    tensor: torch.Tensor
    name: str


class EngineTensors(PagedMemory):
    """The device tier in an engine's own tensors: ``layers[i]`` are those of layer ``i``.

    A layer has K and V, or both in one tensor, or K alone, with scales beside them: as many views
    as it takes, each with a shape of its own; layers may differ. They are read and written in
    place, and must outlive the cache. ``pool`` is what errors call them.

    Raises `Misuse`, in one line that names the layer and the tensor, where a view is no paged
    tensor, a page is not contiguous, the numbers of pages, devices or element types differ, or
    two pages share bytes.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[TensorView]],
        *,
        page_size: int,
        pool: str = "device",
    ) -> None:
        if page_size < 1:
            raise Misuse(f"pool {pool!r}: page_size must be at least 1, not {page_size}")
        groups: list[_Rows] = []
        layer_planes: list[list[Plane]] = []
        for number, views in enumerate(layers):
            planes: list[Plane] = []
            for place, view in enumerate(views):
                name = f"pool {pool!r}, layer {number}, tensor {place}"
                for rows in _rows(view, page_size, name):
                    planes += [(len(groups), at) for at in range(rows.tensor.shape[0])]
                    groups.append(rows)
            layer_planes.append(planes)
        if not groups:
            raise Misuse(f"pool {pool!r} has no tensors: layers must hold at least one TensorView")
        _require_alike(groups, layers, pool)
        _require_apart(groups)
        super().__init__(
            [_as_words(rows) for rows in groups],
            layer_planes,
            num_pages=int(groups[0].tensor.shape[1]),
            page_size=page_size,
            described=_described(layers),
        )


def host_pages_for(device: PagedMemory, num_pages: int, pin_memory: bool = False) -> PagedMemory:
    """Host memory for pages of ``device``: each page in one piece, whatever the device's order.

    A page in one piece is what storage reads and writes. Raises `ResourceError` where the memory
    cannot be had.
    """
    starts = list(itertools.accumulate((_padded(*each) for each in device.layout), initial=0))
    try:
        memory = torch.zeros(num_pages * starts[-1], dtype=torch.uint8, pin_memory=pin_memory)
    except (RuntimeError, MemoryError) as error:
        raise ResourceError(
            f"cannot allocate {num_pages} pages of {starts[-1]} bytes on 'cpu':"
            f" {str(error).splitlines()[0]}"
        ) from error
    groups: list[torch.Tensor] = []
    for group, start, (planes, row_bytes) in zip(
        device.groups, starts, device.layout, strict=False
    ):
        size = group.element_size()
        strides = (row_bytes // size, starts[-1] // size, 1)
        shape = (planes, num_pages, row_bytes // size)
        words = memory.view(group.dtype)
        groups.append(words.as_strided(shape, strides, start // size))
    return PagedMemory(
        groups,
        device.layer_planes,
        num_pages=num_pages,
        page_size=device.page_size,
        described=device.described,
    )


def _described(layers: Sequence[Sequence[TensorView]]) -> str:
    """Shapes and types of all layers, without how many pages there are; equal neighbours once."""
    texts: list[str] = []
    for views in layers:
        tensors: list[str] = []
        for view in views:
            shape, _ = _sizes(view.tensor)
            dim = view.tokens if view.pages is None else view.pages
            kind = "tokens" if view.pages is None else "pages"
            sizes = [kind if at == dim else str(size) for at, size in enumerate(shape)]
            tensors.append(f"{str(view.tensor.dtype).removeprefix('torch.')}[{', '.join(sizes)}]")
        texts.append(" ".join(tensors))
    return ", ".join(f"{len(list(same))} x {text}" for text, same in itertools.groupby(texts))


def _padded(planes: int, row_bytes: int) -> int:
    """Bytes of a group in a page, so that the next group starts where any integer may."""
    return -(-planes * row_bytes // 8) * 8


def _rows(view: TensorView, page_size: int, name: str) -> Iterator[_Rows]:
    """``view`` as planes of pages: one group where its leading dimensions have one stride."""
    tensor: torch.Tensor = view.tensor
    if (view.pages is None) == (view.tokens is None):
        raise Misuse(f"{name}: give the dimension of its pages, or of its tokens, and not both")
    dim = view.tokens if view.pages is None else view.pages
    if dim is None or not 0 <= dim < tensor.dim():
        raise Misuse(f"{name} has dimensions 0 to {tensor.dim() - 1}, there is no {dim}")
    if view.tokens is not None:
        tokens = int(tensor.shape[dim])
        if tokens % page_size:
            raise Misuse(f"{name} has {tokens} tokens: no multiple of page_size {page_size}")
        tensor = cast("torch.Tensor", tensor.unflatten(dim, (tokens // page_size, page_size)))
    shape, strides = _sizes(tensor)
    page, steps = shape[dim + 1 :], strides[dim + 1 :]
    if not _is_contiguous(page, steps):
        raise Misuse(
            f"{name}: a page of shape {page} has strides {steps} and is not contiguous: keep what"
            " lies apart in dimensions before that of the pages"
        )
    # A view or an error: never a copy that nobody would write back.
    rows: torch.Tensor = tensor.view(*shape[: dim + 1], math.prod(page))
    if dim == 0:
        yield _Rows(rows.unsqueeze(0), name)
    else:
        # All but the last leading dimension apart: two strides do not make one.
        for at in itertools.product(*(range(size) for size in shape[: dim - 1])):
            yield _Rows(rows[at], name)


def _sizes(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides, in elements."""
    return tuple(int(size) for size in tensor.shape), tuple(int(step) for step in tensor.stride())


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _require_alike(
    groups: Sequence[_Rows], layers: Sequence[Sequence[TensorView]], pool: str
) -> None:
    """One device and one number of pages; one element type for what stands at one place."""
    first = groups[0]
    for rows in groups[1:]:
        if rows.tensor.device != first.tensor.device:
            raise Misuse(
                f"{rows.name} is on {str(rows.tensor.device)!r},"
                f" its neighbours are on {str(first.tensor.device)!r}"
            )
        if rows.tensor.shape[1] != first.tensor.shape[1]:
            raise Misuse(
                f"{rows.name} has {rows.tensor.shape[1]} pages, its neighbours have"
                f" {first.tensor.shape[1]}"
            )
    types: dict[int, torch.dtype] = {}
    for number, views in enumerate(layers):
        for place, view in enumerate(views):
            known = types.setdefault(place, view.tensor.dtype)
            if known != view.tensor.dtype:
                raise Misuse(
                    f"pool {pool!r}, layer {number}, tensor {place} is {view.tensor.dtype}, that of"
                    f" its neighbours is {known}"
                )


class _Span(msgspec.Struct, frozen=True, order=True):
    """One plane in memory: rows of ``row`` bytes, ``stride`` bytes apart, from ``start``."""

    start: int
    end: int
    row: int
    stride: int
    name: str

    def meets(self, other: _Span) -> bool:
        """Whether they have a byte in common; planes of one stride may be interleaved."""
        if self.end <= other.start or other.end <= self.start:
            return False
        if self.stride != other.stride:
            return True
        offset = (other.start - self.start) % self.stride
        return offset < self.row or offset + other.row > self.stride


def _require_apart(groups: Sequence[_Rows]) -> None:
    """No two pages share a byte: by address, plane by plane."""
    spans: list[_Span] = []
    for rows in groups:
        size = rows.tensor.element_size()
        (planes, pages, elements), (plane_step, step, _) = _sizes(rows.tensor)
        row, stride = elements * size, step * size
        if pages > 1 and stride < row:
            raise Misuse(
                f"{rows.name}: pages overlap, each has {row} bytes and begins {stride} bytes after"
                " the other"
            )
        for plane in range(planes if pages else 0):
            start = rows.tensor.data_ptr() + plane * plane_step * size
            spans.append(_Span(start, start + (pages - 1) * stride + row, row, stride, rows.name))
    spans.sort()
    for number, one in enumerate(spans):
        for two in itertools.islice(spans, number + 1, None):
            if two.start >= one.end:
                break
            if one.meets(two):
                raise Misuse(f"pages overlap: {one.name} and {two.name} share memory")


def _as_words(rows: _Rows) -> torch.Tensor:
    """The same memory as the widest integers that all its strides allow."""
    tensor, size = rows.tensor, rows.tensor.element_size()
    (planes, pages, elements), (plane_step, step, _) = _sizes(tensor)
    # The stride of a single plane, or page, says nothing: but torch wants it in whole words too.
    plane_step = plane_step if planes > 1 else elements
    step = step if pages > 1 else elements
    word = word_for(elements * size, plane_step * size, step * size, tensor.data_ptr(),
                    int(tensor.storage_offset()) * size)  # fmt: skip
    return tensor.as_strided((planes, pages, elements), (plane_step, step, 1)).view(word)

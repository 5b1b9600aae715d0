"""The layout of K and V, and moving whole pages in and out."""

from __future__ import annotations

import pytest
import torch

from kvpact.cache.memory.shape import KVShape
from kvpact.cache.memory.tensors import KVTensors
from kvpact.consensus.core.errors import Misuse, ResourceError

SHAPE = KVShape(layers=3, heads=2, dim=4, dtype="float16")


def numbered(num_pages: int = 5, page_size: int = 4, shape: KVShape = SHAPE) -> KVTensors:
    """Every element of K and V differs from every other."""
    tensors = KVTensors(shape, num_pages, page_size)
    count = tensors.k.numel()
    integers = torch.arange(2 * count, dtype=torch.int16)
    tensors.k.view(torch.int16).copy_(integers[:count].view(tensors.k.shape))
    tensors.v.view(torch.int16).copy_(integers[count:].view(tensors.v.shape))
    return tensors


def test_slots_pages_and_words_are_the_same_memory():
    tensors = numbered()
    assert tensors.k.shape == tensors.v.shape == (3, 20, 2, 4)
    assert tensors.bytes_per_page == 2 * 3 * 4 * 2 * 4 * 2
    for layer in range(3):
        for page in range(5):
            for whole, plane in ((tensors.k, layer), (tensors.v, 3 + layer)):
                slots = whole[layer, page * 4 : (page + 1) * 4].reshape(-1)
                assert torch.equal(slots.view(torch.int64), tensors.words[plane, page])
    tensors.words[1, 2] = -1
    assert bool((tensors.k[1, 8:12].view(torch.int16) == -1).all())


def test_read_page_is_k_of_every_layer_then_v():
    tensors = numbered()
    expected = b"".join(
        whole[layer, 12:16].contiguous().view(torch.uint8).numpy().tobytes()
        for whole in (tensors.k, tensors.v)
        for layer in range(3)
    )
    assert tensors.read_page(3) == expected
    assert len(expected) == tensors.bytes_per_page


def test_pages_written_are_pages_read():
    tensors, other = numbered(), KVTensors(SHAPE, 7, 4)
    other.write_pages([6, 0], [tensors.read_page(1), tensors.read_page(4)])
    assert other.read_pages([0, 6]) == tensors.read_pages([4, 1])
    assert other.same_pages([6, 0, 6], tensors, [1, 4, 4]) == [True, True, False]
    assert other.read_page(3) == bytes(other.bytes_per_page), "another page was touched"
    other.write_page(3, bytearray(tensors.read_page(2)))
    assert other.same_page(3, tensors, 2)
    tensors.write_pages([], [])


@pytest.mark.parametrize("plane", range(6))
def test_same_page_sees_one_bit_in_every_plane(plane: int):
    tensors, other = numbered(), numbered()
    assert tensors.same_page(2, other, 2)
    other.words[plane, 2, -1] ^= 1
    assert not tensors.same_page(2, other, 2)
    assert tensors.same_pages([1, 3], other, [1, 3]) == [True, True]


def test_nan_equals_itself_and_zero_differs_from_minus_zero():
    tensors, other = numbered(), numbered()
    tensors.k[0, 0] = other.k[0, 0] = float("nan")
    assert tensors.same_page(0, other, 0)
    tensors.k[0, 4], other.k[0, 4] = 0.0, -0.0
    assert not tensors.same_page(1, other, 1)


@pytest.mark.parametrize(
    "dtype, dim, word_bytes",
    [
        ("float16", 4, 8),
        ("bfloat16", 1, 2),
        ("float32", 1, 4),
        ("float8_e4m3fn", 3, 1),
        ("float8_e5m2", 8, 8),
        ("uint8", 1, 1),
        ("int8", 2, 2),
    ],
)
def test_words_are_the_widest_that_divide_a_page(dtype: str, dim: int, word_bytes: int):
    tensors = KVTensors(KVShape(2, 1, dim, dtype), 3, 1)
    assert tensors.words.element_size() == word_bytes
    page = bytes(range(1, tensors.bytes_per_page + 1))
    tensors.write_page(1, page)
    assert tensors.read_pages([0, 1, 2]) == [bytes(len(page)), page, bytes(len(page))]


def test_a_tier_may_have_no_pages():
    tensors = KVTensors(SHAPE, 0, 4)
    assert tensors.read_pages([]) == []
    with pytest.raises(Misuse, match="page 0 does not exist: there are 0 pages"):
        tensors.read_page(0)


@pytest.mark.parametrize("page", [-1, 5])
def test_unknown_pages_are_refused(page: int):
    tensors = numbered()
    before = tensors.words.clone()
    with pytest.raises(Misuse, match=f"page {page} does not exist"):
        tensors.read_page(page)
    with pytest.raises(Misuse, match=f"page {page} does not exist"):
        tensors.write_pages([0, page], [bytes(tensors.bytes_per_page)] * 2)
    assert torch.equal(tensors.words, before)


def test_bytes_of_another_length_are_refused_before_any_write():
    tensors = numbered()
    before = tensors.words.clone()
    size = tensors.bytes_per_page
    with pytest.raises(Misuse, match=f"page 1 needs {size} bytes, not {size - 1}"):
        tensors.write_pages([0, 1], [bytes(size), bytes(size - 1)])
    with pytest.raises(Misuse, match="2 pages but the bytes of 1"):
        tensors.write_pages([0, 1], [bytes(size)])
    assert torch.equal(tensors.words, before)


def test_only_tensors_made_alike_compare():
    with pytest.raises(Misuse, match="cannot compare pages"):
        numbered().same_page(0, KVTensors(SHAPE, 5, 2), 0)
    with pytest.raises(Misuse, match="cannot compare 1 pages with 2"):
        numbered().same_pages([0], numbered(), [0, 1])


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: KVShape(0, 1, 1), "KVShape.layers must be at least 1, not 0"),
        (lambda: KVShape(1, 1, 1, "complex64"), "KVShape.dtype must be one of float32, "),
        (lambda: KVTensors(SHAPE, -1, 4), "num_pages >= 0 and page_size >= 1, not -1, 4"),
        (lambda: KVTensors(SHAPE, 1, 0), "num_pages >= 0 and page_size >= 1, not 1, 0"),
        (lambda: KVTensors(SHAPE, 1, 1, "meta", True), "pin_memory needs CUDA and device 'cpu'"),
    ],
)
def test_impossible_arguments_are_misuse(make: object, words: str):
    assert callable(make)
    with pytest.raises(Misuse, match=words):
        make()


def test_too_much_memory_is_a_resource_error_that_says_how_much():
    with pytest.raises(ResourceError, match=r"cannot allocate 1099511627776 pages of 384 bytes"):
        KVTensors(SHAPE, 1 << 40, 4)

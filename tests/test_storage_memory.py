"""Memory: what every backend promises, and strict LRU by bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvpact.cache.storage import SealedPage, open_backend, seal
from kvpact.cache.storage.memory import MemoryBackend
from kvpact.consensus.core.errors import BadInput, Misuse
from tests.storage_conformance import check_calls, check_conformance
from tests.storage_pages import IDENTITY, key_of, page_of, sealed


@pytest.mark.parametrize("capacity_bytes", [1 << 20, 2000, 601])
def test_conformance(capacity_bytes: int) -> None:
    check_conformance(
        lambda: MemoryBackend(capacity_bytes), roomy=capacity_bytes == 1 << 20, reopens=False
    )


def test_calls() -> None:
    check_calls(MemoryBackend(1 << 20))


def test_the_least_recently_used_go_first() -> None:
    backend = MemoryBackend(3 * 600)
    assert backend.put([sealed(1), sealed(2), sealed(3)]) == [True] * 3
    backend.get([key_of(1)])
    backend.exists([key_of(2)])  # not a use
    assert backend.put([sealed(4)]) == [True]
    assert backend.exists([key_of(n) for n in (1, 2, 3, 4)]) == [True, False, True, True]
    assert backend.put([sealed(3), sealed(5)]) == [True, True]  # 3 is there, and used by it
    assert backend.exists([key_of(n) for n in (1, 3, 4, 5)]) == [False, True, True, True]
    assert backend.counters["evicted"] == 2
    backend.check_integrity()


def test_of_a_batch_too_large_the_leading_pages_stay() -> None:
    backend = MemoryBackend(3 * 600)
    assert backend.put([sealed(n) for n in range(5)]) == [True, True, True, False, False]
    assert backend.get([key_of(0), key_of(2), key_of(3)]) == [page_of(0), page_of(2), None]
    assert backend.put([sealed(7, page_bytes=1900), sealed(8)]) == [False, False]
    assert backend.counters["refused"] == 4


def test_what_is_kept_is_a_copy() -> None:
    backend = MemoryBackend(1 << 20)
    memory = bytearray(page_of(1))
    assert backend.put([seal(key_of(1), memory)]) == [True]
    memory[:] = bytes(len(memory))
    assert backend.get([key_of(1)]) == [page_of(1)]


def test_it_is_opened_by_name_and_wrong_names_say_so() -> None:
    backend = open_backend("memory", IDENTITY, capacity_bytes=1000)
    assert isinstance(backend, MemoryBackend)
    assert backend.capacity_bytes == 1000
    with pytest.raises(BadInput, match=r"no storage 'redis': choose one of memory, file"):
        open_backend("redis", IDENTITY)
    with pytest.raises(BadInput, match="storage file needs path"):
        open_backend("file", IDENTITY)
    with pytest.raises(BadInput, match="storage memory needs neither"):
        open_backend("memory", IDENTITY, path="here")
    with pytest.raises(BadInput, match="at least 1"):
        open_backend("memory", IDENTITY, capacity_bytes=0)


class Broken(MemoryBackend):
    """Every hook raises."""

    def _load(self, keys: Sequence[bytes]) -> list[SealedPage | None]:
        raise OSError("the cable is out")

    def _exists(self, keys: Sequence[bytes]) -> list[bool]:
        raise OSError("the cable is out")

    def _store(self, pages: Sequence[SealedPage]) -> list[bool]:
        raise OSError("the cable is out")

    def _clear(self) -> bool:
        raise OSError("the cable is out")

    _remove = _exists


def test_a_hook_that_raises_costs_hits_only(caplog: pytest.LogCaptureFixture) -> None:
    backend = Broken(1000)
    assert backend.get([key_of(1)]) == [None]
    assert backend.exists([key_of(1)]) == [False]
    assert backend.put([sealed(1)]) == [False]
    assert backend.remove([key_of(1)]) == [False]
    assert not backend.clear()
    assert backend.counters["errors"] == 5
    assert caplog.text.count("the cable is out") == 5
    assert backend.close()
    with pytest.raises(Misuse, match="closed"):
        backend.get([key_of(1)])

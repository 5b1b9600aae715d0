"""Two ranks write the seal at the same moment: the first one stands, for both."""

from __future__ import annotations

from collections.abc import Sequence

from kvpact.consensus.epoch.closing import Closer
from kvpact.consensus.epoch.report import LastSeen, Report, Seal
from kvpact.harness.rank.store import MemoryStore


class Nobody:
    """Nothing is known of any rank but that it is gone."""

    def is_gone(self, rank: int) -> bool:
        return True

    def is_paused(self, rank: int) -> bool:
        return False

    def last_seen(self, ranks: Sequence[int], *, asks: bool = True) -> dict[int, LastSeen | None]:
        return dict.fromkeys(ranks)


class Racing(MemoryStore):
    """Just before the seal is written here, another rank polls and writes its own."""

    other: Closer | None = None
    sealed: Seal | None = None

    def compare_set(self, key: str, expected: bytes | None, value: bytes) -> bytes:
        self._other_first(key)
        return super().compare_set(key, expected, value)

    def set(self, key: str, value: bytes) -> None:
        self._other_first(key)
        super().set(key, value)

    def _other_first(self, key: str) -> None:
        other, self.other = self.other, None if key.endswith("seal") else self.other
        if key.endswith("seal") and other is not None:
            self.file(other, 1)
            self.sealed = other.poll(100.0)

    def file(self, closer: Closer, step: int) -> None:
        report = Report(closer.rank, "waited", step, step, step, {}, [], {})
        closer.file(report, 0.0, 1.0)


def test_the_first_writer_of_the_seal_wins() -> None:
    store = Racing()
    closers = [
        Closer(store=store, rank=rank, ranks=(0, 1, 2), epoch=0, locator=Nobody())
        for rank in (0, 1)
    ]
    store.file(closers[0], 4)
    store.other = closers[1]
    mine = closers[0].poll(100.0)
    assert store.sealed is not None
    assert mine == store.sealed
    assert [closer.poll(101.0) for closer in closers] == [mine, mine]

"""Files: real ones, in a real directory; full disks, damage, restarts and processes killed."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvpact.cache.storage import Identity, open_backend, segments
from kvpact.cache.storage.segment_file import ALIGN_BYTES, name_of, sequence_of
from kvpact.cache.storage.segments import SegmentBackend
from kvpact.consensus.core.errors import BadInput
from tests.storage_conformance import check_calls, check_conformance
from tests.storage_pages import IDENTITY, key_of, page_of, sealed

KILB = 1024
ONE = 2 * ALIGN_BYTES
"""A segment with one small page: its table, and the page."""


def open_here(
    path: Path, capacity_bytes: int = 1 << 24, identity: Identity = IDENTITY, durable: bool = False
) -> SegmentBackend:
    return SegmentBackend(path, identity, capacity_bytes=capacity_bytes, durable=durable)


def segments_in(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if sequence_of(file.name) is not None)


def on_disk(path: Path) -> int:
    return sum(-(-file.stat().st_size // ALIGN_BYTES) * ALIGN_BYTES for file in segments_in(path))


@pytest.mark.parametrize("capacity_bytes", [1 << 24, 12 * ALIGN_BYTES, 3 * ALIGN_BYTES])
def test_conformance(capacity_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "storage"
    check_conformance(
        lambda: open_here(path, capacity_bytes),
        roomy=capacity_bytes == 1 << 24,
        reopens=True,
        wipe=lambda: shutil.rmtree(path, ignore_errors=True),
        max_examples=30,
    )


def test_calls(tmp_path: Path) -> None:
    check_calls(open_here(tmp_path))


@pytest.mark.parametrize("durable", [False, True])
def test_a_restart_finds_what_is_there(tmp_path: Path, durable: bool) -> None:
    backend = open_here(tmp_path, durable=durable)
    sizes = [1, 599, ALIGN_BYTES - 1, ALIGN_BYTES, ALIGN_BYTES + 1, 300 * KILB]
    for number, size in enumerate(sizes):
        assert backend.put([sealed(number, 0, size), sealed(100 + number, 0, size)]) == [True] * 2
    assert backend.used_bytes == on_disk(tmp_path)
    assert backend.close()
    again = open_here(tmp_path)
    assert again.used_bytes == on_disk(tmp_path)
    numbers = [*range(6), *range(100, 106)]
    assert again.get([key_of(n) for n in numbers]) == [
        page_of(n, 0, sizes[n % 100]) for n in numbers
    ]
    again.check_integrity()
    assert again.close()


def test_a_batch_of_a_thousand_pages_is_one_file(tmp_path: Path) -> None:
    backend = open_here(tmp_path)
    pages = [sealed(number) for number in range(1000)]
    assert all(backend.put(pages))
    assert len(segments_in(tmp_path)) == 1
    assert backend.put(pages) == [True] * 1000  # known, and not written again
    assert len(segments_in(tmp_path)) == 1
    assert backend.counters["stored"] == 1000
    order = random.Random(1).sample(range(1000), 1000)
    assert backend.get([key_of(n) for n in order]) == [page_of(n) for n in order]
    assert backend.close()


def test_a_page_is_replaced_where_its_bytes_differ(tmp_path: Path) -> None:
    backend = open_here(tmp_path)
    assert backend.put([sealed(1, 0)]) == [True]
    assert backend.put([sealed(1, 1)]) == [True]
    assert backend.close()
    again = open_here(tmp_path)
    assert again.get([key_of(1)]) == [page_of(1, 1)]
    assert again.close()


def test_what_was_removed_stays_removed_after_a_restart(tmp_path: Path) -> None:
    backend = open_here(tmp_path)
    backend.put([sealed(1), sealed(2)])
    backend.put([sealed(3)])
    assert backend.remove([key_of(1), key_of(3), key_of(9)]) == [True, True, False]
    assert backend.close()
    again = open_here(tmp_path)
    assert again.exists([key_of(n) for n in (1, 2, 3)]) == [False, True, False]
    assert again.put([sealed(1)]) == [True]
    assert again.close()
    assert open_here(tmp_path).get([key_of(1)]) == [page_of(1)]


# -- room ----------------------------------------------------------------------------------------


def test_oldest_segments_go_and_hot_pages_of_theirs_stay(tmp_path: Path) -> None:
    batch_bytes = 9 * ALIGN_BYTES  # a table and eight pages
    backend = open_here(tmp_path, capacity_bytes=4 * batch_bytes)
    for first in range(0, 32, 8):
        backend.put([sealed(number) for number in range(first, first + 8)])
    hot = [key_of(n) for n in (1, 6)]
    for round_number in range(10):
        backend.get(hot)  # one hot page or two in a segment that is otherwise cold
        first = 100 + 8 * round_number
        assert all(backend.put([sealed(number) for number in range(first, first + 8)]))
        assert backend.used_bytes == on_disk(tmp_path) <= 4 * batch_bytes
        backend.check_integrity()
    assert backend.get(hot) == [page_of(1), page_of(6)]
    assert backend.exists([key_of(n) for n in (0, 2, 8, 31, 100)]) == [False] * 5
    assert backend.exists([key_of(n) for n in range(172, 180)]) == [True] * 8
    assert backend.counters["stored"] == 32 + 80, "pages that moved are not stored anew"
    for first in (200, 208, 216, 224, 232):  # no longer used, they go like the others
        backend.put([sealed(number) for number in range(first, first + 8)])
    assert backend.exists(hot) == [False, False]
    assert backend.close()


def test_all_pages_hot_still_makes_room(tmp_path: Path) -> None:
    backend = open_here(tmp_path, capacity_bytes=5 * ALIGN_BYTES * 4)
    for number in range(0, 80, 4):
        backend.get([key_of(n) for n in range(80)])
        assert all(backend.put([sealed(n) for n in range(number, number + 4)]))
        backend.check_integrity()
    assert backend.close()


def test_of_a_batch_too_large_the_leading_pages_stay(tmp_path: Path) -> None:
    backend = open_here(tmp_path, capacity_bytes=4 * ALIGN_BYTES)
    assert backend.put([sealed(n) for n in range(5)]) == [True, True, True, False, False]
    assert backend.put([sealed(9, 0, 4 * ALIGN_BYTES)]) == [False]
    assert backend.get([key_of(0)]) == [page_of(0)]
    assert backend.close()


def test_a_smaller_capacity_at_restart_evicts_the_oldest(tmp_path: Path) -> None:
    backend = open_here(tmp_path)
    for number in range(6):
        backend.put([sealed(number)])
    assert backend.close()
    again = open_here(tmp_path, capacity_bytes=2 * ONE)
    assert again.exists([key_of(n) for n in range(6)]) == [False] * 4 + [True] * 2
    assert on_disk(tmp_path) == 2 * ONE
    assert again.close()


def test_a_get_beside_an_eviction_is_a_page_or_a_miss(tmp_path: Path) -> None:
    backend = open_here(tmp_path, capacity_bytes=20 * ALIGN_BYTES)
    stop = threading.Event()
    wrong: list[int] = []

    def read() -> None:
        while not stop.is_set():
            pages = backend.get([key_of(n) for n in range(40)])
            wrong.extend(n for n, page in enumerate(pages) if page not in (None, page_of(n)))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for round_number in range(60):
        first = 4 * (round_number % 10)
        assert all(backend.put([sealed(n) for n in range(first, first + 4)]))
    stop.set()
    for thread in threads:
        thread.join(20)
    assert not wrong
    assert backend.counters["wrong"] == backend.counters["errors"] == 0
    backend.check_integrity()
    assert backend.close()


# -- a disk that is full ---------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tiny"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_evicts_and_then_keeps_what_fits(tiny_disk: Path) -> None:
    backend = open_here(tiny_disk, capacity_bytes=1 << 30)
    big = 20 * KILB
    for number in range(40):  # 800 KiB through 256: the disk is the capacity
        assert backend.put([sealed(number, 0, big)]) == [True]
        backend.check_integrity()
    assert backend.counters["errors"] > 0
    assert backend.get([key_of(39)]) == [page_of(39, 0, big)]
    # A batch that the disk cannot hold at all: leading pages are kept, and told exactly.
    kept = backend.put([sealed(number, 0, big) for number in range(100, 120)])
    number = kept.index(False)
    assert 8 <= number <= 12
    assert not any(kept[number:])
    assert backend.get([key_of(n) for n in range(100, 120)]) == [
        page_of(n, 0, big) if n < 100 + number else None for n in range(100, 120)
    ]
    assert not list(tiny_disk.glob("*.tmp"))
    assert backend.close()
    again = open_here(tiny_disk, capacity_bytes=1 << 30)
    assert again.get([key_of(100)]) == [page_of(100, 0, big)]
    assert again.counters["skipped"] == 0
    assert again.close()


def test_a_disk_that_others_filled(tiny_disk: Path) -> None:
    backend = open_here(tiny_disk, capacity_bytes=1 << 30)
    assert backend.put([sealed(1)]) == [True]
    with contextlib.suppress(OSError), (tiny_disk / "theirs").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(ALIGN_BYTES))
    assert backend.put([sealed(n, 0, 9 * KILB) for n in (2, 3)]) == [False, False]
    backend.check_integrity()
    (tiny_disk / "theirs").unlink()
    assert backend.put([sealed(2), sealed(3)]) == [True, True]
    assert backend.close()


def test_a_full_disk_at_start_is_bad_input(tiny_disk: Path) -> None:
    with contextlib.suppress(OSError), (tiny_disk / "theirs").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
    with pytest.raises(BadInput, match="No space left"):
        open_here(tiny_disk)


def test_a_file_that_may_not_be_so_large(tmp_path: Path) -> None:
    """RLIMIT_FSIZE: the batch is written in smaller segments."""
    backend = open_here(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * ALIGN_BYTES, limits[1]))
    try:
        assert backend.put([sealed(n) for n in range(16)]) == [True] * 16
        assert backend.put([sealed(50), sealed(51, 0, 7 * ALIGN_BYTES)]) == [True, False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert backend.get([key_of(n) for n in range(16)]) == [page_of(n) for n in range(16)]
    assert not list(tmp_path.glob("*.tmp"))
    backend.check_integrity()
    assert backend.close()


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, told",
    [
        ({"model": "other"}, "model is 'tiny' there, 'other' here"),
        ({"layout": "other"}, "layout is 'test' there, 'other' here"),
        ({"page_size": 8}, "page_size is 4 there, 8 here"),
        ({"rank": 1, "tp": 2}, "rank is 0 there, 1 here; tp is 1 there, 2 here"),
    ],
)
def test_a_directory_of_another_kind_is_named(
    tmp_path: Path, change: dict[str, object], told: str
) -> None:
    backend = open_here(tmp_path)
    backend.put([sealed(1)])
    assert backend.close()
    before = sorted(file.name for file in tmp_path.iterdir())
    with pytest.raises(BadInput, match=told):
        open_here(tmp_path, identity=msgspec.structs.replace(IDENTITY, **change))
    assert sorted(file.name for file in tmp_path.iterdir()) == before
    again = open_here(tmp_path)
    assert again.get([key_of(1)]) == [page_of(1)]
    assert again.close()


def test_a_directory_in_use_is_named(tmp_path: Path) -> None:
    backend = open_here(tmp_path)
    with pytest.raises(BadInput, match=f"in use by process {os.getpid()}"):
        open_here(tmp_path)
    assert backend.close()
    assert open_here(tmp_path).close()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BadInput, match=r"cannot be used: (File exists|Not a directory)"):
            open_here(path)


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    """Root may write where modes forbid it, so the directory is mounted read-only."""
    backend = open_here(tmp_path)
    assert backend.close()
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(BadInput, match="Permission denied"):
            open_here(tmp_path)
        tmp_path.chmod(0o700)
        return
    bind = ["mount", "--bind", str(tmp_path), str(tmp_path)]
    if subprocess.run(bind, check=False, capture_output=True).returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(tmp_path)], check=True)
        with pytest.raises(BadInput, match="Read-only file system"):
            open_here(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert open_here(tmp_path).close()


def test_no_room_at_all_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="at least 8192"):
        open_here(tmp_path, capacity_bytes=ALIGN_BYTES)


def test_ranks_share_a_place_by_name(tmp_path: Path) -> None:
    ranks = [Identity(model="m", layout="l", page_size=4, rank=rank, tp=2) for rank in (0, 1)]
    backends = [open_backend("file", one, path=tmp_path) for one in ranks]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tp2-pp1-rank0", "tp2-pp1-rank1"]
    backends[0].put([sealed(1)])
    assert backends[1].exists([key_of(1)]) == [False]
    assert all(backend.close() for backend in backends)


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Segment 0 holds pages 0 to 3, segment 1 page 4."""
    backend = open_here(tmp_path)
    backend.put([sealed(number) for number in range(4)])
    backend.put([sealed(4)])
    assert backend.close()
    return tmp_path


@pytest.mark.parametrize("at", [0, 7, 8, 12, 40, 44, 52, 60, 70, 95, 100, 105, 250])
def test_a_damaged_table_is_skipped_counted_and_logged(
    written: Path, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    flip(written / name_of(0), at)
    again = open_here(written)
    assert again.counters["skipped"] == 1
    assert f"{name_of(0)} is skipped" in caplog.text
    assert again.get([key_of(n) for n in range(5)]) == [None] * 4 + [page_of(4)]
    assert again.put([sealed(0)]) == [True]
    again.check_integrity()
    assert again.close()


@pytest.mark.parametrize("length", [0, 10, 60, ALIGN_BYTES, 4 * ALIGN_BYTES])
def test_a_segment_that_was_cut_is_skipped(written: Path, length: int) -> None:
    os.truncate(written / name_of(0), length)
    again = open_here(written)
    assert again.counters["skipped"] == 1
    assert again.get([key_of(n) for n in range(5)]) == [None] * 4 + [page_of(4)]
    assert again.close()


def test_a_segment_cut_while_it_is_open_gives_misses(written: Path) -> None:
    again = open_here(written)
    os.truncate(written / name_of(0), 2 * ALIGN_BYTES + 100)
    assert again.get([key_of(n) for n in range(5)]) == [page_of(0), None, None, None, page_of(4)]
    assert again.counters["wrong"] == 3
    assert again.close()


def test_a_damaged_page_is_a_miss_until_it_is_stored_again(
    written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(written / name_of(0), 2 * ALIGN_BYTES + 5)
    again = open_here(written)
    assert again.get([key_of(n) for n in range(3)]) == [page_of(0), None, page_of(2)]
    assert again.counters["wrong"] == 1
    assert f"page {key_of(1).hex()} has wrong bytes" in caplog.text
    assert again.exists([key_of(1)]) == [False]
    assert again.put([sealed(1)]) == [True]
    assert again.get([key_of(1)]) == [page_of(1)]
    assert again.close()


def test_two_pages_of_equal_length_that_changed_places_are_misses(written: Path) -> None:
    data = bytearray((written / name_of(0)).read_bytes())
    one, two = (slice(n * ALIGN_BYTES, n * ALIGN_BYTES + 600) for n in (1, 2))
    data[one], data[two] = data[two], data[one]
    (written / name_of(0)).write_bytes(data)
    again = open_here(written)
    assert again.get([key_of(n) for n in range(3)]) == [None, None, page_of(2)]
    assert again.counters["wrong"] == 2
    assert again.close()


def test_a_segment_from_elsewhere_is_skipped(written: Path) -> None:
    (written / name_of(0)).rename(written / name_of(77))  # not the name it was written under
    again = open_here(written)
    assert again.counters["skipped"] == 1
    assert again.put([sealed(9)]) == [True]
    assert segments_in(written)[-1].name == name_of(78)
    assert again.close()
    other = open_here(
        written.parent / "other", identity=msgspec.structs.replace(IDENTITY, model="o")
    )
    other.put([sealed(1)])
    assert other.close()
    shutil.copy(written.parent / "other" / name_of(0), written / name_of(0))
    again = open_here(written)
    assert not again.exists([key_of(0)])[0]
    assert again.counters["skipped"] == 2
    assert again.close()


def test_a_damaged_identity_is_written_anew(
    written: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (written / "IDENTITY").write_bytes(b"{torn")
    again = open_here(written)
    assert "IDENTITY is damaged" in caplog.text
    assert again.get([key_of(4)]) == [page_of(4)]
    assert again.close()
    with pytest.raises(BadInput, match="model"):
        open_here(written, identity=msgspec.structs.replace(IDENTITY, model="other"))


def test_leftovers_go_and_other_files_stay(written: Path) -> None:
    (written / "0000000000000009.tmp").write_bytes(b"half")
    (written / "notes.txt").write_text("mine")
    (written / "zz.seg").write_text("mine too")
    again = open_here(written)
    assert again.counters["skipped"] == 0
    assert not (written / "0000000000000009.tmp").exists()
    assert again.clear()
    assert again.close()
    assert {file.name for file in written.iterdir()} == {"LOCK", "IDENTITY", "notes.txt", "zz.seg"}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


# -- killed at any moment --------------------------------------------------------------------------

WRITER = """
import sys
from cache.storage.segments import SegmentBackend
from tests.storage_pages import IDENTITY, key_of, sealed
from pathlib import Path
path, capacity_bytes, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
backend = SegmentBackend(path, IDENTITY, capacity_bytes=capacity_bytes)
BATCH = 8
print("ready", flush=True)
number = first
while True:
    batch = list(range(number, number + BATCH))
    kept = backend.put([sealed(n, 0, 6000) for n in batch])
    backend.get([key_of(n) for n in batch[::3]])
    sys.stdout.write("".join(f"{n}\\n" for n, is_kept in zip(batch, kept) if is_kept))
    sys.stdout.flush()
    number += BATCH
"""
NUM_LIVES = 10


@pytest.mark.ranks
@pytest.mark.parametrize("capacity_bytes", [1 << 34, 1 << 20])
def test_killed_at_any_moment(tmp_path: Path, capacity_bytes: int) -> None:
    seed = 20
    moments = random.Random(seed)
    acknowledged: set[int] = set()
    for life in range(NUM_LIVES):
        acknowledged |= live_and_die(tmp_path, capacity_bytes, life, moments.uniform(0.0, 0.06))
        again = open_here(tmp_path, capacity_bytes)
        again.check_integrity()
        assert again.counters["skipped"] == 0, f"seed {seed}, life {life}"
        numbers = sorted(acknowledged)
        for at in range(0, len(numbers), 1000):
            some = numbers[at : at + 1000]
            for number, page in zip(some, again.get([key_of(n) for n in some]), strict=True):
                assert page in (None, page_of(number, 0, 6000)), f"seed {seed}, life {life}"
                missing = page is None and capacity_bytes > 1 << 30
                assert not missing, f"seed {seed}, life {life}: lost {number}, acknowledged"
        assert again.counters["wrong"] == 0, f"seed {seed}, life {life}"
        assert again.used_bytes == on_disk(tmp_path) <= capacity_bytes
        assert again.close()
    assert len(acknowledged) > 100


def live_and_die(path: Path, capacity_bytes: int, life: int, seconds: float) -> set[int]:
    """Start a writer, kill it after ``seconds`` of writing; returns what it acknowledged."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", WRITER, str(path), str(capacity_bytes), str(life * 1_000_000)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, text=True) as writer:
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline() == "ready\n"
            killer = threading.Timer(seconds, writer.kill)
            killer.start()
            lines = writer.stdout.read().split("\n")
            killer.join(20)
        finally:
            writer.kill()
            writer.wait(20)
    # The last line may be cut: its number was not acknowledged whole.
    return {int(line) for line in lines[:-1]}


# -- what others put into the directory ----------------------------------------------------------


@pytest.mark.parametrize("name", ["LOCK", "IDENTITY.tmp", "probe.tmp", "0000000000000000.tmp"])
def test_a_link_in_the_directory_is_not_followed(name: str, tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "storage"
    victim.write_bytes(b"precious")
    path.mkdir()
    (path / name).symlink_to(victim)
    if name == "LOCK":
        with pytest.raises(BadInput, match=r"cannot be used"):
            open_here(path)
    else:
        backend = open_here(path)
        if not (path / name).exists():  # leftovers go at start: put it back for the first put
            (path / name).symlink_to(victim)
        assert backend.put([sealed(1)]) == [True]
        assert backend.close()
    assert victim.read_bytes() == b"precious"


def test_a_link_that_dangles_makes_no_file_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "storage"
    path.mkdir()
    for name in ("probe.tmp", "IDENTITY.tmp", "IDENTITY"):
        (path / name).symlink_to(tmp_path / f"made by {name}")
    with contextlib.suppress(BadInput):
        open_here(path).close()
    assert [file.name for file in tmp_path.iterdir()] == ["storage"]


@pytest.mark.parametrize("name", ["LOCK", "IDENTITY"])
def test_a_pipe_does_not_hang(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(BadInput, match="is not a regular file"):
        open_here(tmp_path)


def test_a_segment_that_is_a_link_is_not_read(written: Path) -> None:
    first = segments_in(written)[0]
    elsewhere = written.parent / "elsewhere"
    first.rename(elsewhere)
    first.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    backend = open_here(written)
    backend.check_integrity()
    assert backend.put([sealed(900)]) == [True]
    assert backend.close()
    assert elsewhere.read_bytes() == before


@pytest.mark.parametrize("number", [(1 << 64) - 1, (1 << 62) - 1, 1 << 40])
def test_a_stray_name_does_not_stop_puts(number: int, written: Path) -> None:
    stray = written / name_of(number)
    stray.write_bytes(b"x" * 5000)
    backend = open_here(written)
    assert backend.put([sealed(900)]) == [True]
    backend.check_integrity()
    assert backend.close()
    again = open_here(written)
    assert again.get([key_of(900)]) == [page_of(900)]
    assert stray.read_bytes() == b"x" * 5000
    assert again.close()


def test_removed_is_only_what_stays_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that no longer takes or gives up files: the answer is no."""
    backend = open_here(tmp_path)
    assert backend.put([sealed(1), sealed(2)]) == [True, True]

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as broken:
        broken.setattr(segments, "write_segment", refuse)
        broken.setattr(Path, "unlink", refuse)
        assert backend.remove([key_of(1)]) == [False]
        assert backend.clear() is False
    assert backend.close()
    again = open_here(tmp_path)
    assert again.get([key_of(1)]) == [page_of(1)], "it was said that it may come back"
    assert again.remove([key_of(1)]) == [True]
    assert again.close()
    last = open_here(tmp_path)
    assert last.get([key_of(1)]) == [None]
    assert last.close()


def test_where_durable_deletions_reach_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_here(tmp_path, durable=True)
    assert backend.put([sealed(1)]) == [True]
    synced: list[Path] = []
    monkeypatch.setattr(segments, "sync_directory", synced.append)
    assert backend.clear()
    assert synced == [tmp_path]
    assert backend.close()

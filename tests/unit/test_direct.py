"""A file written from an arena: its bytes, its checksums, its pace, its errors."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import struct
import threading
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptengine.format.checksum import crc32, segments
from ckptengine.persist import direct
from ckptengine.types import PAGE, PART, Chunk, FileLayout


def image_of(nbytes: int, seed: int = 0) -> memoryview:
    """Aligned memory, as an arena's, with something in it."""
    memory = mmap.mmap(-1, max(nbytes + -nbytes % PAGE, PAGE))
    memory[:nbytes] = random.Random(seed).randbytes(nbytes)
    return memoryview(memory)


def write(
    path: Path,
    image: memoryview,
    layout: FileLayout,
    await_captured: Callable[[int], None] = lambda nbytes: None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> bytes:
    sums = direct.Sums(image, layout, list(segments(layout.chunks, layout.nbytes)))
    direct.write_file(str(path), image, layout, sums.take(await_captured), progress)
    return sums.table


def layout_of(sizes: list[tuple[int, int]], start: int = 0) -> FileLayout:
    """Chunks of so many bytes, each after a gap and before the two places of its CRC."""
    at, chunks = 0, []
    for gap, size in sizes:
        chunks.append(Chunk(at + gap, size, (at + gap + size, at + gap + size + 4)))
        at += gap + size + 8
    return FileLayout("file", start, at + 5, tuple(chunks))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 90_000)), min_size=1, max_size=6),
    st.sampled_from([4096, 16384, 32 << 10]),
    st.integers(0, 2),
)
def test_bytes_and_checksums(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[tuple[int, int]],
    block: int,
    pages_before: int,
) -> None:
    layout = layout_of(sizes, pages_before * PAGE)
    image = image_of(layout.arena_offset + layout.nbytes)
    path = tmp_path_factory.mktemp("direct") / "file"
    told: list[int] = []
    captured: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "PART", block)
        table = write(path, image, layout, captured.append, told.append)
    start = layout.arena_offset
    data = path.read_bytes()
    assert data == image[start : start + layout.nbytes]
    for chunk in layout.chunks:
        payload = data[chunk.offset : chunk.offset + chunk.nbytes]
        for place in chunk.crc_at:
            assert struct.unpack_from("<I", data, place)[0] == crc32(payload)
    crcs = array("I", table)
    for segment, crc in zip(segments(layout.chunks, layout.nbytes), crcs, strict=True):
        assert crc == crc32(data[segment.offset : segment.offset + segment.nbytes])
    assert sum(told) == layout.nbytes + -layout.nbytes % PAGE
    assert captured == sorted(captured)
    assert captured[-1] == start + layout.nbytes


def test_a_payload_of_several_parts(tmp_path: Path) -> None:
    layout = layout_of([(100, 2 * PART + 12_345)])
    image = image_of(layout.nbytes)
    table = array("I", write(tmp_path / "file", image, layout))
    assert len(table) == 5
    data = (tmp_path / "file").read_bytes()
    assert data == image[: layout.nbytes]
    (chunk,) = layout.chunks
    payload = data[chunk.offset : chunk.offset + chunk.nbytes]
    assert struct.unpack_from("<I", data, chunk.crc_at[0])[0] == crc32(payload)


def test_an_empty_file(tmp_path: Path) -> None:
    assert write(tmp_path / "file", image_of(1), FileLayout("file", 0, 0, ())) == b""
    assert (tmp_path / "file").read_bytes() == b""


def test_it_follows_the_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are captured are on their way while the rest is not there yet."""
    monkeypatch.setattr(direct, "PART", 64 << 10)
    layout = layout_of([(100, 100_000), (100, 200_000), (100, 100_000)])
    image = image_of(layout.nbytes)
    wanted = bytes(image[: layout.nbytes])
    captured = threading.Semaphore(0)
    waits: list[int] = []
    written = threading.Event()

    def await_captured(nbytes: int) -> None:
        waits.append(nbytes)
        if len(waits) == 3:  # the first chunk is there, the second one is asked for
            assert written.wait(60), "nothing was written before all was captured"
        captured.release()

    write(tmp_path / "file", image, layout, await_captured, lambda nbytes: written.set())
    assert waits == sorted(waits) and waits[-1] == layout.nbytes
    assert len(waits) == 4
    assert len(wanted) == (tmp_path / "file").stat().st_size


def test_a_capture_that_ends_early_leaves_no_thread(tmp_path: Path) -> None:
    layout = layout_of([(100, 100_000)])
    threads = threading.active_count()

    def give_up(nbytes: int) -> None:
        raise RuntimeError("abandoned")

    with pytest.raises(RuntimeError, match="abandoned"):
        write(tmp_path / "file", image_of(layout.nbytes), layout, give_up)
    assert threading.active_count() == threads
    assert not [fd for fd in os.listdir("/proc/self/fd") if points_to(fd, tmp_path)]


def points_to(fd: str, folder: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder))
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("failing", [1, 2, 5, 8])
def test_a_block_that_fails_fails_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """In a helper thread, whichever: never a file that lacks a block."""
    monkeypatch.setattr(direct, "PART", 16 << 10)
    layout = layout_of([(100, 130_000)])
    real, lock, calls = os.pwrite, threading.Lock(), [0]

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        assert threading.current_thread() is not threading.main_thread()
        with lock:
            calls[0] += 1
            mine = calls[0]
        if mine == failing:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="Input/output") as caught:
        write(tmp_path / "file", image_of(layout.nbytes), layout)
    assert caught.value.errno == errno.EIO
    assert not [fd for fd in os.listdir("/proc/self/fd") if points_to(fd, tmp_path)]


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "file", image_of(100), layout_of([(8, 50)]))
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_large_writes_are_direct_where_the_file_system_has_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY)
    agrees = direct.local.set_direct(probe, True)
    os.close(probe)
    flags: list[bool] = []
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        flags.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        assert offset % PAGE == 0 and len(data) % PAGE == 0
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    write(tmp_path / "file", image_of(100_000), layout_of([(100, 99_000)]))
    assert flags == [agrees]

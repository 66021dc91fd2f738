"""What the machine itself can do with the same bytes: the lines that no contender can cross.

One arena (a memfd of ordinary pages, touched beforehand) serves as the copy's destination, the
source of the writes and the destination of the reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from . import cache
from .harness import Entry, Turn
from .trainer import State, tensors

BLOCK = 16 << 20
_PIECE = 8 << 20
_ALIGN = 4096


class Arena:
    """Page-aligned shared memory for a state's bytes, every page touched."""

    def __init__(self, state: State) -> None:
        self._tensors = [tensor for _, tensor in tensors(state)]
        offsets, end = [], 0
        for tensor in self._tensors:
            offsets.append(end)
            end += -(-tensor.nbytes // 64) * 64
        self.nbytes = -(-end // _ALIGN) * _ALIGN
        fd = os.memfd_create("benchmark-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, self.nbytes)
        self._memory = mmap.mmap(fd, self.nbytes)
        os.close(fd)
        everything = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.view = memoryview(self._memory)
        self._places = [
            everything[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for at, tensor in zip(offsets, self._tensors, strict=True)
        ]
        self.fill()

    def fill(self) -> None:
        """Copy the state in, with torch's threads."""
        for place, tensor in zip(self._places, self._tensors, strict=True):
            place.copy_(tensor)

    def move(self, pool: ThreadPoolExecutor) -> None:
        """Copy the state in with the C library's memmove, 8 MiB a call."""
        pieces = [
            (place.data_ptr() + at, tensor.data_ptr() + at, min(_PIECE, tensor.nbytes - at))
            for place, tensor in zip(self._places, self._tensors, strict=True)
            for at in range(0, tensor.nbytes, _PIECE)
        ]
        list(pool.map(lambda piece: ctypes.memmove(*piece), pieces))


class Scaled:
    """A limit measured over fewer bytes than the state has, and stated for all of them."""

    def __init__(self, limit: Entry, factor: float) -> None:
        self.name = limit.name
        self.description = f"{limit.description}; measured over 1/{factor:.3g} of them"
        self._limit = limit
        self._factor = factor

    def turn(self) -> Turn:
        turn = self._limit.turn()
        return Turn(
            {k: seconds * self._factor for k, seconds in turn.figures.items()}, turn.details
        )

    def close(self) -> None:
        self._limit.close()


class CopyLimit:
    """Memory copy of the state into the warm arena."""

    name = "copy"
    description = "memory copy of the state's tensors into touched shared memory"

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._pool = ThreadPoolExecutor(torch.get_num_threads())

    def turn(self) -> Turn:
        cache.settle()
        move = partial(self._arena.move, self._pool)
        return Turn(
            {
                "copy torch": statistics.median(timed(self._arena.fill) for _ in range(3)),
                "copy memmove": statistics.median(timed(move) for _ in range(3)),
            }
        )

    def close(self) -> None:
        self._pool.shutdown()


class WriteLimit:
    """Raw writes of the same bytes to one new file, fsync included."""

    name = "write"
    description = "raw write of the same bytes in 16 MiB blocks to a new file, fsync included"

    def __init__(self, arena: Arena, directory: Path) -> None:
        self._arena = arena
        self._directory = directory
        # Not part of the limit: O_DIRECT from huge pages does less work per byte, and an engine
        # has them only where someone reserved them.
        self._huge = huge_blocks(2)

    def turn(self) -> Turn:
        figures: dict[str, float] = {}
        for threads in (1, 2):
            with self._file() as path:
                figures[f"write direct x{threads}"] = timed(
                    partial(write, path, self._arena.view, threads, direct=True)
                )
        if self._huge:
            with self._file() as path:
                figures["write huge pages x2"] = timed(
                    partial(write, path, self._arena.view, 2, direct=True, blocks=self._huge)
                )
        with self._file() as path:
            figures["write buffered"] = timed(
                partial(write, path, self._arena.view, 1, direct=False)
            )
        return Turn({name: seconds for name, seconds in figures.items() if seconds})

    def close(self) -> None:
        pass

    @contextlib.contextmanager
    def _file(self) -> Iterator[Path]:
        folder = self._directory / "limits"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        cache.settle()
        try:
            yield folder / "raw"
        finally:
            shutil.rmtree(folder)


class ReadLimit:
    """Raw reads of the same bytes from one file, cold and warm, into the arena."""

    name = "read"
    description = "raw read of the same bytes in 16 MiB blocks into touched memory"

    def __init__(self, arena: Arena, directory: Path) -> None:
        self._arena = arena
        self._directory = directory

    def turn(self) -> Turn:
        folder = self._directory / "limits"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path = folder / "raw"
        try:
            write(path, self._arena.view, 1, direct=True) or write(path, self._arena.view, 1, False)
            figures: dict[str, float] = {}
            left: dict[str, float] = {}
            for name, threads, direct in (
                ("read cold direct x1", 1, True),
                ("read cold direct x2", 2, True),
                ("read cold direct x4", 4, True),
                ("read cold buffered", 1, False),
            ):
                cache.settle()
                cache.drop([path])
                left[name] = cache.resident([path])
                figures[name] = timed(partial(read, path, self._arena.view, threads, direct))
            cache.warm([path])
            cache.settle()
            left["read warm"] = cache.resident([path])
            for threads in (1, 2):
                figures[f"read warm x{threads}"] = timed(
                    partial(read, path, self._arena.view, threads, False)
                )
        finally:
            shutil.rmtree(folder)
        done = {name: seconds for name, seconds in figures.items() if seconds}
        return Turn(done, {"resident": left})

    def close(self) -> None:
        pass


def write(
    path: Path,
    source: memoryview,
    threads: int,
    direct: bool,
    blocks: list[memoryview] | None = None,
) -> bool:
    """Write `source` to a new file durably. False where the file system refuses O_DIRECT.

    With `blocks` as many bytes are written, but from these (one per thread) over and over.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if direct and not _set_direct(fd):
            path.unlink()
            return False
        # Within the file's length O_DIRECT writes need not wait for each other.
        with contextlib.suppress(OSError):
            os.posix_fallocate(fd, 0, len(source))

        def part(first: int) -> None:
            for at in range(first * BLOCK, len(source), threads * BLOCK):
                size = min(BLOCK, len(source) - at)
                block = blocks[first][:size] if blocks else source[at : at + size]
                while block:
                    count = os.pwrite(fd, block, at)
                    block, at = block[count:], at + count

        _in_threads(part, threads)
        os.fsync(fd)
    finally:
        os.close(fd)
    return True


def read(path: Path, target: memoryview, threads: int, direct: bool) -> bool:
    """Read the whole file into `target`. False where the file system refuses O_DIRECT."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if direct and not _set_direct(fd):
            return False
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

        def part(first: int) -> None:
            for at in range(first * BLOCK, len(target), threads * BLOCK):
                block = target[at : at + BLOCK]
                while block:
                    count = os.preadv(fd, [block], at)
                    if not count:
                        raise EOFError(f"{path} is shorter than what was written to it")
                    block, at = block[count:], at + count

        _in_threads(part, threads)
    finally:
        os.close(fd)
    return True


def huge_blocks(count: int) -> list[memoryview] | None:
    """Blocks of touched memory backed by transparent huge pages, or None without them."""
    madvise = getattr(mmap, "MADV_HUGEPAGE", None)
    if madvise is None:
        return None
    # Twice the size, since only whole aligned 2 MiB inside a mapping can be huge.
    memory = mmap.mmap(-1, 2 * count * BLOCK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(madvise)
    except OSError:
        return None
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    everything.random_()
    start = -everything.data_ptr() % BLOCK
    view = memoryview(memory)
    return [view[start + i * BLOCK : start + (i + 1) * BLOCK] for i in range(count)]


def timed(call: Callable[[], object]) -> float:
    """Seconds that `call` took; 0 when it returned False."""
    start = time.perf_counter()
    done = call()
    return 0.0 if done is False else time.perf_counter() - start


def _set_direct(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def _in_threads(part: Callable[[int], None], threads: int) -> None:
    if threads == 1:
        part(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, range(threads)))

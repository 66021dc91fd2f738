"""The page cache: put files in, take them out, and look whether that came true.

Only this machine's cache is seen. A virtual disk may be cached by its host as well, and no guest
can tell: a cold figure is cold for the kernel that runs the benchmark.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_CACHESTAT = 451  # the same number on every architecture that Linux 6.5 and later support
_BLOCK = 16 << 20
_QUIET = 4 << 20  # bytes of dirty pages that an idle machine always has
_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def files(directory: Path) -> list[Path]:
    """All regular files below `directory`."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def drop(paths: Iterable[Path]) -> None:
    """Take the files out of the page cache. Dirty pages stay there, hence the fsync."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def warm(paths: Iterable[Path]) -> None:
    """Read the files through the page cache."""
    buffer = mmap.mmap(-1, _BLOCK)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            offset = 0
            while count := os.preadv(fd, [buffer], offset):
                offset += count
        finally:
            os.close(fd)
    buffer.close()


def resident(paths: Iterable[Path]) -> float:
    """Which share of the files' pages the page cache holds, from 0 to 1."""
    held = total = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            if size:
                pages = -(-size // mmap.PAGESIZE)
                total += pages
                held += min(pages, _cached_pages(fd, size))
        finally:
            os.close(fd)
    return held / total if total else 0.0


def settle(timeout: float = 30.0) -> None:
    """Write everybody's dirty pages, so that one run's leftovers do not burden the next."""
    os.sync()
    deadline = time.monotonic() + timeout
    while _unwritten() > _QUIET and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.1)


def _unwritten() -> int:
    total = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, value = line.split(":")
        if key in ("Dirty", "Writeback"):
            total += int(value.split()[0]) << 10
    return total


def _cached_pages(fd: int, size: int) -> int:
    found = _Stat()
    area = _Range(0, size)
    if _libc.syscall(_CACHESTAT, fd, ctypes.byref(area), ctypes.byref(found), 0) == 0:
        return int(found.cached)
    return _mincore(fd, size)


def _mincore(fd: int, size: int) -> int:
    pages = -(-size // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * pages)()
    with mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        address = view.ctypes.data
        del view  # an exported buffer would keep the mapping from closing
        if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), states):
            raise OSError(ctypes.get_errno(), "mincore")
    return int((np.asarray(states, np.uint8) & 1).sum())

"""Writes a captured image to a file at the disk's speed, checksumming on the way.

One thread follows the capture and checksums; others keep `_DEPTH` direct writes in flight. Nothing
is copied: the kernel takes the bytes from the arena itself.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from xxhash import xxh3_128

from ..format.checksum import Segment, crc32, crc32_combine
from ..store import local
from ..types import PAGE, PART, FileLayout

_DEPTH = 2
"""Writes in flight: the next is queued at the device while one ends."""


_pack_crc = struct.Struct("<I").pack_into


class Sums:
    """The checksums of one file of an arena's `image`, taken in one pass that follows the capture.

    `hashed`: whether to take 128-bit hashes too, which tell that bytes are the same.
    """

    def __init__(
        self, image: memoryview, layout: FileLayout, tiling: list[Segment], hashed: bool = False
    ) -> None:
        self.table = b""  # the file's CRC table
        self.digest = b""  # of the whole file
        self.digests: dict[int, bytes] = {}  # of each chunk, by its number
        self._image = image
        self._layout = layout
        self._tiling = tiling
        self._hashed = hashed

    def take(self, await_captured: Callable[[int], None]) -> Iterator[int]:
        """Yields, as it comes there, the offset in the file before which all bytes are final.

        `await_captured(nbytes)` returns once so many bytes of the image hold the snapshot, or raises.
        Patches each chunk's CRC into its frame, in the image.
        """
        image, layout, start = self._image, self._layout, self._layout.arena_offset
        table = array("I")
        whole, one = xxh3_128(), xxh3_128()
        captured = told = chunk_crc = 0
        ahead = PART // 16
        for offset, nbytes, number in self._tiling:
            end = offset + nbytes
            if start + end > captured:
                # Of small segments many at a time: asking for each would cost more than they do.
                captured = start + min(end + ahead, layout.nbytes)
                await_captured(captured)
            data = image[start + offset : start + end]
            crc = crc32(data)
            table.append(crc)
            if number < 0:
                if self._hashed:
                    whole.update(data)
            else:
                chunk = layout.chunks[number]
                first, last = offset == chunk.offset, end == chunk.offset + chunk.nbytes
                chunk_crc = crc if first else crc32_combine(chunk_crc, crc, nbytes)
                if self._hashed:
                    if first:
                        one.reset()
                    one.update(data)
                if last:
                    descriptor, entry = chunk.crc_at
                    _pack_crc(image, start + descriptor, chunk_crc)
                    _pack_crc(image, start + entry, chunk_crc)
                    if self._hashed:
                        self.digests[chunk.number] = digest = one.digest()
                        whole.update(digest)
            if end - told >= ahead:
                told = end
                yield end
        self.table = table.tobytes()
        self.digest = whole.digest()
        yield layout.nbytes


def write_file(
    path: str,
    image: memoryview,
    layout: FileLayout,
    final: Iterable[int],
    progress: Callable[[int], None],
) -> None:
    """Writes one file of the arena's `image` and syncs it.

    `final`: offsets in the file, ascending to its end; the bytes before each are final once it comes
    (see `Sums.take`). Raises OSError, and what `final` raises.
    """
    start = layout.arena_offset
    padded = layout.nbytes + -layout.nbytes % PAGE
    fd = local.create(path)
    try:
        local.preallocate(fd, padded)
        writer = _Writer(fd, image[start : start + padded], progress)
        try:
            submitted = 0
            for end in final:
                while end - submitted >= PART:
                    writer.submit(submitted, PART)
                    submitted += PART
            if submitted < padded:
                writer.submit(submitted, padded - submitted)
        except BaseException:
            writer.cancel()
            raise
        writer.finish()
        os.ftruncate(fd, layout.nbytes)
        os.fsync(fd)
    finally:
        os.close(fd)


class _Writer:
    """A few threads that write blocks of one file, directly where the file system lets them."""

    def __init__(self, fd: int, data: memoryview, progress: Callable[[int], None]) -> None:
        self._fd = fd
        self._data = data
        self._progress = progress
        self._direct = local.set_direct(fd, True)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_DEPTH)
        self._blocks: list[Future[None]] = []

    def submit(self, offset: int, nbytes: int) -> None:
        for block in self._blocks:
            if block.done() and block.exception():
                block.result()
        self._blocks = [block for block in self._blocks if not block.done()]
        self._blocks.append(self._pool.submit(self._write, offset, nbytes))

    def finish(self) -> None:
        wait(self._blocks, return_when=FIRST_EXCEPTION)
        try:
            for block in self._blocks:
                block.result()
        finally:
            self.cancel()

    def cancel(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _write(self, offset: int, nbytes: int) -> None:
        block = self._data[offset : offset + nbytes]
        while block:
            direct = self._direct
            try:
                count = os.pwrite(self._fd, block, offset)
            except OSError as error:
                # Some file systems agree to the switch and refuse the first write.
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._stop_direct()
                continue
            if direct and count % PAGE and count < len(block):
                # A short write left the alignment; the rest of the file goes through the cache.
                self._stop_direct()
            block, offset = block[count:], offset + count
            with self._lock:
                self._progress(count)

    def _stop_direct(self) -> None:
        local.set_direct(self._fd, False)
        self._direct = False  # only now: a thread that sees it false takes EINVAL for an error

"""CRC-32 (the zip polynomial) of chunks and of the frames around them.

A file is tiled by *segments*: payloads cut into parts of at most `PART` bytes, and the gaps between
payloads (zip headers, padding). Each segment has one CRC. The table of a file's CRCs, hashed, is the
file's digest in the manifest, so that no second pass over the bytes is ever needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zlib_ng import zlib_ng

from ..types import PART, Chunk

crc32 = zlib_ng.crc32
"""``crc32(data, value=0) -> int``; releases the GIL on large buffers (11 GB/s a core measured)."""

crc32_combine = zlib_ng.crc32_combine
"""``crc32_combine(crc1, crc2, len2)``: the CRC of two joined pieces from the CRCs of each."""


class Segment(NamedTuple):
    """A run of bytes under one CRC. `chunk` is the payload it belongs to, or -1 for a gap."""

    offset: int
    nbytes: int
    chunk: int


def segments(chunks: Sequence[Chunk], nbytes: int) -> Iterator[Segment]:
    """Tiles a file of `nbytes` whose payloads are `chunks` (ascending), in file order."""
    at = 0
    for index, chunk in enumerate(chunks):
        if chunk.offset > at:
            yield Segment(at, chunk.offset - at, -1)
        at, end = chunk.offset, chunk.offset + chunk.nbytes
        while at < end:
            size = min(PART, end - at)
            yield Segment(at, size, index)
            at += size
    if at < nbytes:
        yield Segment(at, nbytes - at, -1)


def table_digest(table: bytes) -> str:
    """The digest of a chunk file: over its CRC table (little-endian uint32 a segment)."""
    return "crc32s:" + hashlib.sha256(table).hexdigest()


def bytes_digest(data: bytes) -> str:
    """The digest of a small file, over its bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()

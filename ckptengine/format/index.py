"""The per-rank index: what our reader uses instead of DCP's pickle.

``index-R.zst`` is two zstd frames, each one line of JSON. The first depends on the plan alone and is
compressed once: the tree, the place of each tensor and value. The second is of one save: the values
and the CRC table of each file.
"""

from __future__ import annotations

import base64
import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import zstandard

from ..errors import CorruptError
from ..types import PART, Chunk
from .checksum import segments
from .dtypes import DTYPES

DCP_METADATA = ".metadata"
"""The file that stock readers use in the index's stead."""

_LEVEL = 3
_MAX_RATIO = 1024  # JSON of like items shrinks 30-fold; a reader takes more for somebody's bomb
_SMALL_WINDOW = zstandard.ZstdCompressionParameters(
    window_log=10, write_checksum=True
)  # in blocks of 1 KiB, so that nothing shrinks more than 256-fold


class TensorEntry(NamedTuple):
    """One stored tensor. Its payload is dense: `stride` is a permutation of contiguous strides."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    file: int
    offset: int  # bytes from the file's start to the payload
    nbytes: int


class ValueEntry(NamedTuple):
    """Where the pickle of one value lies, for stock readers; ours takes the index's JSON."""

    file: int
    offset: int
    nbytes: int


class FileSize(NamedTuple):
    """One chunk file of this rank."""

    name: str
    nbytes: int


class Part(NamedTuple):
    """A run of bytes of one file under one CRC."""

    offset: int
    nbytes: int
    crc: int


def name(rank: int) -> str:
    """The index file of `rank`."""
    return f"index-{rank}.zst"


def static_frame(
    rank: int,
    tree: Any,
    files: Sequence[FileSize],
    tensors: Sequence[TensorEntry],
    values: Sequence[ValueEntry],
) -> bytes:
    """The frame that depends on the plan alone."""
    return _frame(
        {"rank": rank, "tree": tree, "files": files, "tensors": tensors, "values": values}
    )


def dynamic_frame(values: bytes, tables: dict[str, bytes]) -> bytes:
    """The frame of one save. `values`: a JSON list; `tables`: file name to its CRC table."""
    crcs = json.dumps({file: base64.b64encode(table).decode() for file, table in tables.items()})
    return _compress(b'{"values":' + values + b',"crcs":' + crcs.encode() + b"}\n")


def _frame(value: Any) -> bytes:
    return _compress(json.dumps(value, separators=(",", ":")).encode() + b"\n")


def _compress(data: bytes) -> bytes:
    packed = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)
    if _is_sane(len(data), len(packed)):
        return packed
    return zstandard.ZstdCompressor(compression_params=_SMALL_WINDOW).compress(data)


def _is_sane(nbytes: int, packed_nbytes: int) -> bool:
    return nbytes <= (packed_nbytes + 1024) * _MAX_RATIO


@dataclass(frozen=True)
class Index:
    """A parsed index. Offsets and sizes have been checked against each other."""

    rank: int
    tree: Any
    files: tuple[FileSize, ...]
    tensors: tuple[TensorEntry, ...]
    value_entries: tuple[ValueEntry, ...]
    values: tuple[Any, ...]  # tagged JSON
    tables: tuple[bytes, ...]  # the CRC table of each file

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Index:
        """Parses an index read from `where`. Raises CorruptError."""
        try:
            static, dynamic = map(json.loads, _decompress(data).splitlines())
            files = tuple(FileSize(str(name), _count(size)) for name, size in static["files"])
            tensors = tuple(
                TensorEntry(dtype, tuple(shape), tuple(stride), file, offset, nbytes)
                for dtype, shape, stride, file, offset, nbytes in static["tensors"]
            )
            entries = tuple(ValueEntry(*map(_count, entry)) for entry in static["values"])
            for entry in tensors:
                _check_tensor(entry, files)
            for value in entries:
                if value.offset + value.nbytes > files[value.file].nbytes:
                    raise ValueError("a value lies outside its file")
            values = tuple(dynamic["values"])
            if len(values) != len(entries):
                raise ValueError("values and their places differ in number")
            return cls(
                rank=_count(static["rank"]),
                tree=static["tree"],
                files=files,
                tensors=tensors,
                value_entries=entries,
                values=values,
                tables=tuple(
                    base64.b64decode(dynamic["crcs"][file.name], validate=True) for file in files
                ),
            )
        except (
            KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError,
            zstandard.ZstdError,
        ) as error:  # fmt: skip
            raise CorruptError(f"{where}: not an index: {error!r}") from error

    def tensor_parts(self, number: int) -> list[Part]:
        """The checksummed parts of one tensor's payload, in order."""
        entry = self.tensors[number]
        if not entry.nbytes:
            return []
        first, end = self._first_parts[entry.file][entry.offset], entry.offset + entry.nbytes
        table = self._crcs[entry.file]
        if entry.nbytes <= PART:
            return [Part(entry.offset, entry.nbytes, table[first])]
        return [
            Part(offset, min(PART, end - offset), table[first + nth])
            for nth, offset in enumerate(range(entry.offset, end, PART))
        ]

    def parts(self, file: int) -> list[Part]:
        """The checksummed parts of a whole file, gaps included, tiling it in order."""
        assert len(self._first_parts) > file  # checks the table
        chunks = [Chunk(offset, nbytes, (0, 0)) for offset, nbytes in self._places[file]]
        tiling = segments(chunks, self.files[file].nbytes)
        return [
            Part(segment.offset, segment.nbytes, crc)
            for segment, crc in zip(tiling, self._crcs[file], strict=True)
        ]

    @cached_property
    def _crcs(self) -> list[array[int]]:
        return [array("I", table) for table in self.tables]

    @cached_property
    def _places(self) -> list[list[tuple[int, int]]]:
        """Offset and size of every payload of each file, ascending."""
        found: list[set[tuple[int, int]]] = [set() for _ in self.files]
        for entry in self.tensors:
            if entry.nbytes:
                found[entry.file].add((entry.offset, entry.nbytes))
        for value in self.value_entries:
            if value.nbytes:
                found[value.file].add((value.offset, value.nbytes))
        places = [sorted(one) for one in found]
        for file, ascending in zip(self.files, places, strict=True):
            for (offset, nbytes), (following, _) in pairwise(ascending):
                if offset + nbytes > following:
                    raise CorruptError(f"{file.name}: its payloads overlap in the index")
        return places

    @cached_property
    def _first_parts(self) -> list[dict[int, int]]:
        """Of each file: a payload's offset to the number of its first part in the CRC table, which
        has been held against the number of parts that it should cover."""
        found: list[dict[int, int]] = []
        for file, places, table in zip(self.files, self._places, self._crcs, strict=True):
            first: dict[int, int] = {}
            number = end = 0
            for offset, nbytes in places:
                number += offset > end  # the gap before it
                first[offset] = number
                number += -(-nbytes // PART)
                end = offset + nbytes
            number += file.nbytes > end
            if len(table) != number:
                raise CorruptError(f"{file.name}: {len(table)} checksums for {number} parts")
            found.append(first)
        return found


def _check_tensor(entry: TensorEntry, files: Sequence[FileSize]) -> None:
    # Before the cache: it takes (2, 3.0) for the (2, 3) that it has seen.
    if any(type(number) is not int for number in (*entry.shape, *entry.stride)):
        raise ValueError("a shape or stride is not of whole numbers")
    if _count(entry.nbytes) != _dense_nbytes(entry.dtype, entry.shape, entry.stride):
        raise ValueError("a tensor's size is not that of its shape")
    if _count(entry.offset) + entry.nbytes > files[_count(entry.file)].nbytes:
        raise ValueError("a tensor lies outside its file")


@lru_cache(maxsize=65536)
def _dense_nbytes(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Bytes of a dense tensor of that form. Cached: the tensors of a model have few forms."""
    numel = math.prod(map(_count, shape))
    if len(stride) != len(shape):
        raise ValueError("shape and stride differ in length")
    if numel and not is_dense(shape, stride):
        raise ValueError("a tensor's strides leave its payload")
    return numel * DTYPES[dtype].itemsize


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements fill a run of memory exactly once. Sizes of 1 may have any stride."""
    expected = 1
    for step, size in sorted((st, sz) for sz, st in zip(shape, stride, strict=True) if sz != 1):
        if step != expected:
            return False
        expected *= size
    return True


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _decompress(data: bytes) -> bytes:
    """All frames of `data`. A truncated stream reads short without an error, so size is checked."""
    out = bytearray()
    while data:
        size = zstandard.frame_content_size(data)
        if size < 0 or not _is_sane(size, len(data)):
            raise ValueError("a compressed frame does not say a sane size")
        unpacker = zstandard.ZstdDecompressor().decompressobj()
        piece = unpacker.decompress(data)
        if not unpacker.eof or len(piece) != size:
            raise ValueError("a compressed frame is cut short")
        out += piece
        data = unpacker.unused_data
    return bytes(out)

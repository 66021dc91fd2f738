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
from functools import cached_property
from typing import Any, NamedTuple

import zstandard

from ..errors import CorruptError
from ..types import Chunk
from .checksum import segments
from .dtypes import DTYPES

DCP_METADATA = ".metadata"
"""The file that stock readers use in the index's stead."""

_LEVEL = 3
_MAX_RATIO = 1024  # JSON of like items shrinks 30-fold; more is somebody's bomb


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
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)


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

    @cached_property
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """The checksummed parts of each file, gaps included, tiling it in order."""
        return tuple(
            tuple(part for _, part in self._tiling(file)) for file in range(len(self.files))
        )

    @cached_property
    def tensor_parts(self) -> tuple[tuple[Part, ...], ...]:
        """The checksummed parts of each tensor's payload, in order."""
        found: dict[tuple[int, int], list[Part]] = {}
        for file in range(len(self.files)):
            for start, part in self._tiling(file):
                if start >= 0:
                    found.setdefault((file, start), []).append(part)
        return tuple(
            tuple(found[entry.file, entry.offset]) if entry.nbytes else () for entry in self.tensors
        )

    def _tiling(self, file: int) -> list[tuple[int, Part]]:
        """Each part of `file`, with the offset of the payload that it belongs to, or -1."""
        entries: list[TensorEntry | ValueEntry] = [*self.tensors, *self.value_entries]
        places = sorted({(e.offset, e.nbytes) for e in entries if e.file == file and e.nbytes})
        end = 0
        for offset, nbytes in places:
            if offset < end:
                raise CorruptError(f"{self.files[file].name}: its payloads overlap in the index")
            end = offset + nbytes
        chunks = [Chunk(offset, nbytes, (0, 0)) for offset, nbytes in places]
        tiling = list(segments(chunks, self.files[file].nbytes))
        crcs = array("I", self.tables[file])
        if len(crcs) != len(tiling):
            raise CorruptError(
                f"{self.files[file].name}: {len(crcs)} checksums for {len(tiling)} parts"
            )
        return [
            (chunks[s.chunk].offset if s.chunk >= 0 else -1, Part(s.offset, s.nbytes, crc))
            for s, crc in zip(tiling, crcs, strict=True)
        ]


def _check_tensor(entry: TensorEntry, files: Sequence[FileSize]) -> None:
    numel = math.prod(map(_count, entry.shape))
    if len(entry.stride) != len(entry.shape):
        raise ValueError("shape and stride differ in length")
    if _count(entry.nbytes) != numel * DTYPES[entry.dtype].itemsize:
        raise ValueError("a tensor's size is not that of its shape")
    if _count(entry.offset) + entry.nbytes > files[_count(entry.file)].nbytes:
        raise ValueError("a tensor lies outside its file")
    if numel and not is_dense(entry.shape, entry.stride):
        raise ValueError("a tensor's strides leave its payload")


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
        if size < 0 or size > (len(data) + 1024) * _MAX_RATIO:
            raise ValueError("a compressed frame does not say a sane size")
        unpacker = zstandard.ZstdDecompressor().decompressobj()
        piece = unpacker.decompress(data)
        if not unpacker.eof or len(piece) != size:
            raise ValueError("a compressed frame is cut short")
        out += piece
        data = unpacker.unused_data
    return bytes(out)

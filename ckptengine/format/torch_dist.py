"""DCP's own `.metadata`, written for stock readers and never read by ours.

The only module that knows DCP's classes. Source of the form: ``torch/distributed/checkpoint``,
`metadata.py`, `filesystem.py` (`_StorageInfo`), `_nested_dict.py` (keys), `planner_helpers.py`.
"""

from __future__ import annotations

import itertools
import pickle
import pickletools
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from .codec import Path
from .frame import int_op, text_op
from .tree import Position


class Item(NamedTuple):
    """One thing that DCP can ask for: a frame (file, offset, bytes), under each of its paths."""

    paths: tuple[Path, ...]
    file: str
    offset: int
    nbytes: int
    dtype: str | None = None  # of a tensor; None for a value
    shape: tuple[int, ...] = ()


def chunk_file(rank: int, number: int) -> str:
    """The name that DCP gives to the chunk files of `rank`."""
    return f"__{rank}_{number}.distcp"


def metadata(items: Iterable[Item]) -> bytes:
    """The pickle that `torch.distributed.checkpoint.FileSystemReader` looks for.

    Joined from the pickles of one object of each kind: making and pickling the objects of 100,000
    tensors would take a trainer's first save seconds.
    """
    # What is shared must stand in the pickle before it is referred to. Keys and forms are written
    # out in the first dictionary; what the last one has of its own, in the last.
    numbers = itertools.count(_FIRST)
    memo, own = _Memo(numbers), _Memo(numbers)
    described, paths, stored = list[bytes](), list[bytes](), list[bytes]()
    taken: dict[str, tuple[str | int, ...]] = {}
    for item in items:
        for path in item.paths:
            key, parts = _unique(path, taken)
            # Integer keys of a dictionary must be text here: dcp_to_torch_save takes an integer for
            # a place in a list and crashes on a mixture.
            taken[key] = parts
            described += memo.text(key), memo.shared(_form(item.dtype, item.shape))
            paths += memo.text(key), _opcodes(parts)
            before, after = own.cut(_index(len(item.shape) if item.dtype else None))
            stored += before, memo.text(key), after
            before, between, then, after = own.cut(_storage())
            stored += before, own.text(item.file), between, int_op(item.offset)
            stored += then, int_op(item.nbytes), after
    head, *tails = map(b"".join, _metadata())
    dicts = (b"}(" + b"".join(body) + b"u" for body in (described, paths, stored))
    return b"\x80\x02" + head + b"".join(map(b"".join, zip(dicts, tails, strict=True))) + b"."


class _Memo:
    """What occurs often in a pickle is written out once, and then taken from the unpickler's memo."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._gets: dict[bytes, bytes] = {}
        self._cuts: dict[_Cut, tuple[bytes, ...]] = {}

    def text(self, text: str) -> bytes:
        return self.shared(text_op(text))

    def shared(self, opcodes: bytes) -> bytes:
        """`opcodes`, which make one object, or what gets it from the memo."""
        if opcodes in self._gets:
            return self._gets[opcodes]
        number = struct.pack("<I", next(self._numbers))
        self._gets[opcodes] = b"j" + number  # LONG_BINGET
        return opcodes + b"r" + number  # LONG_BINPUT

    def cut(self, cut: _Cut) -> tuple[bytes, ...]:
        """The pieces of a pickle between the holes that were cut into it."""
        if cut in self._cuts:
            return self._cuts[cut]
        pieces = [tuple(self._share(op) for op in piece) for piece in cut]
        self._cuts[cut] = tuple(b"".join(get for _, get in piece) for piece in pieces)
        return tuple(b"".join(first for first, _ in piece) for piece in pieces)

    def _share(self, op: bytes) -> tuple[bytes, bytes]:
        """An opcode as it is written now, and as it will be from now on."""
        if op[:1] not in (b"c", b"X"):  # GLOBAL, BINUNICODE
            return op, op
        return self.shared(op), self.shared(op)


_FIRST = 1000
"""Pickles of single objects use the memo's first places, each over again."""

_Cut = tuple[tuple[bytes, ...], ...]
"""A pickle without frame and memo: opcodes, in pieces between its holes."""


def _cut(value: object, *holes: str | int) -> _Cut:
    """The pickle of `value`, cut where `holes`, parts of it, stand in it in this order."""
    raw = pickle.dumps(value, 2)
    pieces: list[list[bytes]] = [[]]
    wanted = list(holes)
    for (op, argument, start), (_, _, end) in pairwise(pickletools.genops(raw)):
        assert op.name not in ("BINGET", "LONG_BINGET"), "it refers to itself"
        if wanted and type(argument) is type(wanted[0]) and argument == wanted[0]:
            pieces.append([])
            wanted.pop(0)
        elif op.name not in ("PROTO", "BINPUT"):
            pieces[-1].append(raw[start:end])
    assert not wanted, value
    return tuple(map(tuple, pieces))


@lru_cache(maxsize=1)
def _metadata() -> _Cut:
    from torch.distributed.checkpoint.metadata import Metadata

    state, paths, stored = holes = ("<state>", "<paths>", "<stored>")
    return _cut(Metadata(state, paths, stored), *holes)  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _index(ndim: int | None) -> _Cut:
    """Around the key of an item: a tensor's chunk starts at zeros, a value has no place."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return _cut(MetadataIndex("<key>", None if ndim is None else torch.Size([0] * ndim)), "<key>")


@lru_cache(maxsize=1)
def _storage() -> _Cut:
    """Around a file's name, an offset and a length."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _cut(_StorageInfo("<file>", 1 << 20, 1 << 21), "<file>", 1 << 20, 1 << 21)


@lru_cache(maxsize=65536)
def _form(dtype: str | None, shape: tuple[int, ...]) -> bytes:
    from torch.distributed.checkpoint import metadata as dcp

    if dtype is None:
        return _opcodes(dcp.BytesStorageMetadata())
    zeros, size = torch.Size([0] * len(shape)), torch.Size(shape)
    return _opcodes(
        dcp.TensorStorageMetadata(
            properties=dcp.TensorProperties(dtype=getattr(torch, dtype)),
            size=size,
            chunks=[dcp.ChunkStorageMetadata(offsets=zeros, sizes=size)],
        )
    )


def _opcodes(value: object) -> bytes:
    """What makes `value`, to stand among other opcodes."""
    return pickle.dumps(value, 2)[2:-1]


def _unique(
    path: Path, taken: dict[str, tuple[str | int, ...]]
) -> tuple[str, tuple[str | int, ...]]:
    """DCP's key of `path`. Two paths may flatten to one key (``{"a.b"}``, ``{"a": {"b"}}``): the
    second gets a mark, since the reader refuses duplicates."""
    parts = tuple(int(part) if isinstance(part, Position) else str(part) for part in path)
    key, mark = ".".join(map(str, parts)), 0
    while key in taken:
        mark += 1
        key = ".".join(map(str, parts)) + f"#{mark}"
    return key, parts if not mark else (key,)

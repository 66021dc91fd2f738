"""Where every byte of a save goes. Pure: from a state's description to offsets and frames.

A plan is made once for a structure and used by every later save of it: headers, `.metadata` and the
static half of the index are rendered here, so that a steady save only fills payloads and checksums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..format import codec, frame, index, torch_dist, tree
from ..format.dtypes import DTYPES
from ..types import PAGE, ArenaLayout, Chunk, FileLayout, Spec, TensorPlace, ValuePlace


@dataclass(frozen=True, eq=False)
class Plan:
    """One rank's part of every save of one structure."""

    signature: list[Any]
    specs: list[Spec]
    apart: Sequence[Sequence[int]]  # numbers of the tensors in each file but the first
    layout: ArenaLayout
    pieces: tuple[tuple[int, bytes], ...]  # constant bytes by arena offset
    tensors: tuple[TensorPlace, ...]  # by number
    values: tuple[ValuePlace, ...]
    metadata: bytes
    index_frame: bytes

    def fits(self, signature: list[Any], specs: list[Spec], pickles: Sequence[bytes]) -> bool:
        """Whether a state of this description can be saved by this plan.

        Compares the description itself, never a hash or an identity: a stale plan would write a
        checkpoint that lacks what came later.
        """
        return (
            signature == self.signature
            and specs == self.specs
            and all(
                len(raw) <= place.capacity for raw, place in zip(pickles, self.values, strict=True)
            )
        )


def make_plan(
    node: Any,
    signature: list[Any],
    specs: list[Spec],
    pickles: Sequence[bytes],
    *,
    apart: Sequence[Sequence[int]] = (),
    rank: int = 0,
) -> Plan:
    """Plans a state of this description: its tree, what tells the tree from others (see
    `state.collect`), each tensor's spec, each value's pickle.

    `apart`: numbers of tensors that lie together in a file of their own. The first file takes all
    the others, and the values.
    """
    elsewhere = {number for group in apart for number in group}
    first = [number for number in range(len(specs)) if number not in elsewhere]
    tensors: dict[int, tuple[int, TensorPlace]] = {}  # number to its file and place
    values: list[ValuePlace] = []
    items: dict[int, torch_dist.Item] = {}
    pieces: list[tuple[int, bytes]] = []
    files: list[FileLayout] = []
    paths: dict[tuple[str, int], list[codec.Path]] = {}
    for leaf in tree.leaves(node, rank):
        paths.setdefault((leaf.kind, leaf.number), []).append(leaf.path)
    start = 0
    for number, group in enumerate([first, *apart]):
        file = _File(torch_dist.chunk_file(rank, number), start)
        for tensor in group:
            dtype, shape, stride = specs[tensor]
            nbytes = payload_nbytes(specs[tensor])
            dense = dense_stride(shape, stride)
            phase = file.nbytes % frame.alignment(nbytes)
            rendered = frame.tensor_frame(dtype, shape, dense, nbytes, phase)
            offset = file.add(rendered, tensor, paths["t", tensor], dtype, shape)
            tensors[tensor] = number, TensorPlace(start + offset, nbytes, dtype, shape, dense)
        for value, raw in enumerate(pickles if number == 0 else ()):
            capacity = max(64, 1 << (len(raw) - 1).bit_length())
            rendered = frame.value_frame(capacity, file.nbytes % frame.ALIGN_SMALL)
            offset = file.add(rendered, len(specs) + value, paths["v", value])
            values.append(ValuePlace(offset, capacity))
        pieces += file.pieces
        items |= file.items
        files.append(FileLayout(file.name, start, file.nbytes, tuple(file.chunks)))
        start += _pages(file.nbytes)

    numbers = range(len(specs))
    return Plan(
        signature=signature,
        specs=specs,
        apart=apart,
        layout=ArenaLayout(tuple(files), start + _pages(len(specs)), len(specs), start),
        pieces=tuple(pieces),
        tensors=tuple(tensors[number][1] for number in numbers),
        values=tuple(values),
        metadata=torch_dist.metadata(items[number] for number in sorted(items)),
        index_frame=index.static_frame(
            rank,
            node,
            [index.FileSize(file.name, file.nbytes) for file in files],
            [
                index.TensorEntry(
                    place.dtype,
                    place.shape,
                    place.stride,
                    file,
                    place.offset - files[file].arena_offset,
                    place.nbytes,
                )
                for file, place in map(tensors.__getitem__, numbers)
            ],
            [index.ValueEntry(0, v.offset, v.capacity) for v in values],
        ),
    )


class _File:
    """A chunk file being laid out, frame behind frame."""

    def __init__(self, name: str, start: int) -> None:
        self.name = name
        self.pieces: list[tuple[int, bytes]] = []  # by arena offset
        self.chunks: list[Chunk] = []
        self.items: dict[int, torch_dist.Item] = {}  # by number, as chunks have them
        self.nbytes = 0
        self._start = start  # its own arena offset

    def add(
        self,
        rendered: frame.Frame,
        number: int,
        paths: Sequence[codec.Path],
        dtype: str | None = None,
        shape: tuple[int, ...] = (),
    ) -> int:
        """Puts a frame at the file's end and returns its payload's offset in the file."""
        at, pad = self.nbytes, -rendered.nbytes % frame.ALIGN_SMALL
        self.pieces += [(self._start + at + offset, raw) for offset, raw in rendered.pieces]
        # Of an arena that was laid out otherwise before, something would be left there.
        self.pieces.append((self._start + at + rendered.nbytes, bytes(pad)))
        (payload,) = rendered.payloads
        if payload.nbytes:
            crc_at = (at + payload.crc_at[0], at + payload.crc_at[1])
            self.chunks.append(Chunk(at + payload.offset, payload.nbytes, crc_at, number))
        self.items[number] = torch_dist.Item(
            tuple(paths), self.name, at, rendered.nbytes, dtype, shape
        )
        self.nbytes += rendered.nbytes + pad
        return at + payload.offset


def payload_nbytes(spec: Spec) -> int:
    """Bytes that a tensor's elements take."""
    dtype, shape, _ = spec
    return math.prod(shape) * DTYPES[dtype].itemsize


def _pages(nbytes: int) -> int:
    return nbytes + -nbytes % PAGE


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides under which a tensor's logical bytes are stored.

    Its own where it is dense (channels-last and transposed layouts come back); else dense ones in
    the same order of dimensions; contiguous where elements repeat (expanded).
    """
    if 0 in shape or index.is_dense(shape, stride):
        return tuple(stride)
    order = sorted(range(len(shape)), key=lambda d: stride[d], reverse=True)
    if any(step == 0 and size > 1 for step, size in zip(stride, shape, strict=True)):
        order = list(range(len(shape)))
    out = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        out[dim] = step
        step *= shape[dim]
    return tuple(out)

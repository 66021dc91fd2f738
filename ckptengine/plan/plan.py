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
    layout: ArenaLayout
    pieces: tuple[tuple[int, bytes], ...]  # constant bytes by arena offset
    tensors: tuple[TensorPlace, ...]  # ascending by offset
    values: tuple[ValuePlace, ...]  # after all tensors
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
    rank: int = 0,
) -> Plan:
    """Plans a state of this description: its tree, what tells the tree from others (see
    `state.collect`), each tensor's spec, each value's pickle."""
    file_name = torch_dist.chunk_file(rank, 0)
    paths: dict[tuple[str, int], list[codec.Path]] = {}
    for leaf in tree.leaves(node, rank):
        paths.setdefault((leaf.kind, leaf.number), []).append(leaf.path)

    at = 0
    pieces: list[tuple[int, bytes]] = []
    chunks: list[Chunk] = []
    items: list[torch_dist.Item] = []

    def place(rendered: frame.Frame, key: tuple[str, int], spec: Spec | None) -> int:
        """Puts a frame at the file's end and returns its payload's offset."""
        nonlocal at
        pieces.extend((at + offset, raw) for offset, raw in rendered.pieces)
        (payload,) = rendered.payloads
        crc_at = (at + payload.crc_at[0], at + payload.crc_at[1])
        if payload.nbytes:
            chunks.append(Chunk(at + payload.offset, payload.nbytes, crc_at))
        dtype, shape = (spec[0], spec[1]) if spec else (None, ())
        items.append(
            torch_dist.Item(tuple(paths[key]), file_name, at, rendered.nbytes, dtype, shape)
        )
        start = at + payload.offset
        at += rendered.nbytes + -rendered.nbytes % frame.ALIGN_SMALL
        return start

    tensors = []
    for number, spec in enumerate(specs):
        dtype, shape, stride = spec
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        dense = dense_stride(shape, stride)
        rendered = frame.tensor_frame(dtype, shape, dense, nbytes, at % PAGE)
        tensors.append(
            TensorPlace(place(rendered, ("t", number), spec), nbytes, dtype, shape, dense)
        )
    values = []
    for number, raw in enumerate(pickles):
        capacity = max(64, 1 << (len(raw) - 1).bit_length())
        rendered = frame.value_frame(capacity, at % PAGE)
        values.append(ValuePlace(place(rendered, ("v", number), None), capacity))

    nbytes = at
    files = (FileLayout(file_name, 0, nbytes, tuple(chunks)),)
    return Plan(
        signature=signature,
        specs=specs,
        layout=ArenaLayout(files, nbytes + -nbytes % PAGE),
        pieces=tuple(pieces),
        tensors=tuple(tensors),
        values=tuple(values),
        metadata=torch_dist.metadata(items),
        index_frame=index.static_frame(
            rank,
            node,
            [index.FileSize(file_name, nbytes)],
            [index.TensorEntry(t.dtype, t.shape, t.stride, 0, t.offset, t.nbytes) for t in tensors],
            [index.ValueEntry(0, v.offset, v.capacity) for v in values],
        ),
    )


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

"""Copies a state into an arena on the caller's thread, and says how far it is.

The persister follows the count, so that a save takes not copy plus write but the longer of the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..types import TensorPlace
from .arena import Arena, Batch, copyable
from .copier import Copier, Move


def capture(
    arena: Arena,
    copier: Copier,
    tensors: Sequence[torch.Tensor],
    pickles: Sequence[bytes],
    image_nbytes: int,
) -> None:
    """Takes the snapshot: `tensors` and `pickles` as they are now, in the order of the plan that is
    installed in `arena`.

    On return the whole image (`image_nbytes`) is announced as captured, and the caller may change
    whatever it likes.
    """
    for raw, place in zip(pickles, arena.values, strict=True):
        arena.image[place.offset : place.offset + place.capacity] = raw.ljust(place.capacity, b"\0")

    def announce(address: int) -> None:
        arena.control.captured = address - arena.address

    with torch.no_grad():
        for batch in arena.batches:
            moves = _moves(arena, batch, tensors) if batch.large else None
            if moves is not None:
                copier.copy(moves, announce)
            else:
                _copy_by_torch(arena, batch, tensors)
            last = arena.places[batch.last - 1]
            arena.control.captured = last.offset + last.nbytes
    arena.control.captured = image_nbytes


def _moves(arena: Arena, batch: Batch, tensors: Sequence[torch.Tensor]) -> list[Move] | None:
    """The batch as plain moves of memory; None where a tensor is not just that."""
    moves = []
    for number in range(batch.first, batch.last):
        tensor, place = tensors[number], arena.places[number]
        if not _plain_memory(tensor, place):
            return None
        moves.append(Move(arena.address + place.offset, tensor.data_ptr(), place.nbytes))
    return moves


def _plain_memory(tensor: torch.Tensor, place: TensorPlace) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.stride() == place.stride
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _copy_by_torch(arena: Arena, batch: Batch, tensors: Sequence[torch.Tensor]) -> None:
    """One call for many tensors: of small ones, the calls cost more than the bytes."""
    sources = list(tensors[batch.first : batch.last])
    if batch.raw:
        places = arena.places[batch.first : batch.last]
        sources = [copyable(t, p.dtype) for t, p in zip(sources, places, strict=True)]
    torch._foreach_copy_(arena.views[batch.first : batch.last], sources)

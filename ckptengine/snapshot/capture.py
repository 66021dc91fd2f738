"""Copies a state into an arena on the caller's thread, and says how far it is.

The persister follows the count, so that a save takes not copy plus write but the longer of the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..types import TensorPlace
from .arena import Arena, copyable

_GROUP = 64 << 20
"""Bytes copied between two announcements."""


def capture(
    arena: Arena,
    tensors: Sequence[torch.Tensor],
    places: Sequence[TensorPlace],
    pickles: Sequence[bytes],
    image_nbytes: int,
) -> None:
    """Takes the snapshot: `tensors` and `pickles` as they are now, in the order of the plan.

    On return the whole image (`image_nbytes`) is announced as captured, and the caller may change
    whatever it likes.
    """
    for raw, slot in zip(pickles, arena.values, strict=True):
        arena.image[slot.offset : slot.offset + slot.capacity] = raw.ljust(slot.capacity, b"\0")
    sources: list[torch.Tensor] = []
    views: list[torch.Tensor] = []
    pending = 0
    with torch.no_grad():
        for tensor, place, view in zip(tensors, places, arena.views, strict=True):
            if not place.nbytes:
                continue
            source = copyable(tensor, place.dtype)
            if place.nbytes > 2 * _GROUP and source.stride() == place.stride:
                _flush(views, sources)
                pending = 0
                _copy_by_groups(arena, source, view, place)
                continue
            sources.append(source)
            views.append(view)
            pending += place.nbytes
            if pending >= _GROUP:
                _flush(views, sources)
                pending = 0
                arena.control.captured = place.offset + place.nbytes
        _flush(views, sources)
    arena.control.captured = image_nbytes


def _flush(views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """One call for many tensors: of small ones, the calls cost more than the bytes."""
    if views:
        torch._foreach_copy_(views, sources)
        views.clear()
        sources.clear()


def _copy_by_groups(
    arena: Arena, source: torch.Tensor, view: torch.Tensor, place: TensorPlace
) -> None:
    """Copies one large dense tensor so that the persister need not wait for the whole of it."""
    count = source.numel()
    group = _GROUP // source.element_size()
    flat_source = source.as_strided((count,), (1,))
    flat_view = view.as_strided((count,), (1,))
    for start in range(0, count, group):
        flat_view[start : start + group].copy_(flat_source[start : start + group])
        done = min(start + group, count) * source.element_size()
        arena.control.captured = place.offset + done

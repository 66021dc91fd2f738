"""Which tensors are copied by one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..types import TensorPlace

_LARGE = 256 << 10
"""Bytes from which a tensor is worth a call of its own."""

_GROUP = 64 << 20
"""Bytes of small tensors copied between two announcements."""


class Batch(NamedTuple):
    """Tensors by number, ascending. Large ones are copied by memmove, where their layout allows."""

    numbers: tuple[int, ...]
    large: bool


def batches(places: Sequence[TensorPlace], numbers: Iterable[int]) -> list[Batch]:
    """Cuts `numbers` into runs of small tensors of up to `_GROUP` bytes, and runs of large ones."""
    out: list[Batch] = []
    run: list[int] = []
    size, large = 0, False
    for number in numbers:
        nbytes = places[number].nbytes
        if not nbytes:
            continue
        if run and ((nbytes >= _LARGE) != large or (not large and size >= _GROUP)):
            out.append(Batch(tuple(run), large))
            run, size = [], 0
        large = nbytes >= _LARGE
        run.append(number)
        size += nbytes
    if run:
        out.append(Batch(tuple(run), large))
    return out

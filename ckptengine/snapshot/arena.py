"""Reused host memory that holds a snapshot, laid out as its files will be.

An arena is one memfd: a control page, then the image. It is not limited by the size of `/dev/shm`,
needs no name that could be left behind, and lives as long as the trainer or the persister has it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch

from ..types import PAGE, Control, TensorPlace, ValuePlace

_UNSAFE_TO_COPY = {"complex32": torch.int32} | {
    # Kernels of older releases lack some of these; bytes are bytes.
    "float8_e4m3fn": torch.uint8,
    "float8_e4m3fnuz": torch.uint8,
    "float8_e5m2": torch.uint8,
    "float8_e5m2fnuz": torch.uint8,
    "float8_e8m0fnu": torch.uint8,
    "float4_e2m1fn_x2": torch.uint8,
    "uint16": torch.int16,
    "uint32": torch.int32,
    "uint64": torch.int64,
}


class Arena:
    """One slot: busy from the capture to the end of its persistence."""

    def __init__(self, key: int, image_nbytes: int) -> None:
        self.id = key
        self.nbytes = PAGE + image_nbytes
        self.fd = os.memfd_create("ckptengine-arena")
        os.ftruncate(self.fd, self.nbytes)
        self._memory = mmap.mmap(self.fd, self.nbytes)
        view = memoryview(self._memory)
        self.control = Control(view[:PAGE])
        self.image = view[PAGE:]
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[PAGE:]
        self._installed: object = None
        self.views: list[torch.Tensor] = []
        self.values: Sequence[ValuePlace] = ()
        self.busy = False

    def install(
        self,
        key: object,
        pieces: Sequence[tuple[int, bytes]],
        tensors: Sequence[TensorPlace],
        values: Sequence[ValuePlace],
    ) -> None:
        """Renders the constant bytes of the plan `key` into the image, unless they are there."""
        if self._installed is key:
            return
        self._installed = None
        for offset, raw in pieces:
            self.image[offset : offset + len(raw)] = raw
        self.views = [self._view(place) for place in tensors]
        self.values = values
        self._installed = key

    def _view(self, place: TensorPlace) -> torch.Tensor:
        dtype = _UNSAFE_TO_COPY.get(place.dtype) or getattr(torch, place.dtype)
        if not place.nbytes:
            return torch.empty_strided(place.shape, place.stride, dtype=dtype)
        flat = self._bytes[place.offset : place.offset + place.nbytes].view(dtype)
        return flat.as_strided(place.shape, place.stride)

    def close(self) -> None:
        """Gives the memory back, once the persister has unmapped it too."""
        self.views = []
        self._bytes = torch.empty(0)
        self.control.release()
        self.image.release()
        os.close(self.fd)


def copyable(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """`tensor` as something that can be copied bit by bit into its view of an arena."""
    raw = _UNSAFE_TO_COPY.get(dtype)
    if raw is None:
        return tensor
    return (
        tensor.detach().resolve_conj().view(raw)
        if dtype == "complex32"
        else tensor.detach().view(raw)
    )

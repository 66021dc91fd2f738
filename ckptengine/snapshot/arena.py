"""Reused host memory that holds a snapshot, laid out as its files will be.

An arena is one memfd: a control page, then the image. It is not limited by the size of `/dev/shm`,
needs no name that could be left behind, and lives as long as the trainer or the persister has it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence

import torch

from ..types import PAGE, Control, TensorPlace, ValuePlace
from . import device
from .batches import Batch, batches

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
        self.fd, self._memory = _huge_memory(PAGE + image_nbytes) or _memory(PAGE + image_nbytes)
        self.nbytes = len(self._memory)
        view = memoryview(self._memory)
        self.control = Control(view[:PAGE])
        self.image = view[PAGE:]
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[PAGE:]
        self._installed: object = None
        self.warm = False  # whether it has held a snapshot: first touch of memory is slow
        self.address = self._bytes.data_ptr()  # of the image
        self._pinned = device.pin(self.address, len(self.image))
        self.views: list[torch.Tensor] = []
        self.places: Sequence[TensorPlace] = ()
        self.values: Sequence[ValuePlace] = ()
        self._cut: dict[frozenset[int], list[Batch]] = {}

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
        self.places = tensors
        self.values = values
        self._cut = {}
        self._installed = key

    def batches(self, without: frozenset[int] = frozenset()) -> list[Batch]:
        """The tensors of the plan, but for those numbers, as they are copied. Cut once a plan."""
        if without not in self._cut:
            # By place: the persister follows the bytes before which all are captured.
            in_order = sorted(range(len(self.places)), key=lambda n: self.places[n].offset)
            numbers = (n for n in in_order if n not in without)
            self._cut[without] = batches(self.places, numbers)
        return self._cut[without]

    def _view(self, place: TensorPlace) -> torch.Tensor:
        dtype = _UNSAFE_TO_COPY.get(place.dtype) or getattr(torch, place.dtype)
        if not place.nbytes:
            return torch.empty_strided(place.shape, place.stride, dtype=dtype)
        flat = self._bytes[place.offset : place.offset + place.nbytes].view(dtype)
        return flat.as_strided(place.shape, place.stride)

    def close(self) -> None:
        """Gives the memory back, once the persister has unmapped it too."""
        if self._pinned:
            device.unpin(self.address)
        self.views = []
        self._bytes = torch.empty(0)
        self.control.release()
        self.image.release()
        os.close(self.fd)


def _memory(nbytes: int, flags: int = 0) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("ckptengine-arena", os.MFD_CLOEXEC | flags)
    try:
        os.ftruncate(fd, nbytes)
        return fd, mmap.mmap(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise


def _huge_memory(nbytes: int) -> tuple[int, mmap.mmap] | None:
    """Memory in huge pages, where the machine has enough of them reserved and free: the disk takes
    them faster, and the persister spends half the time."""
    size, free = _huge_pages()
    rounded = nbytes + -nbytes % size if size else 0
    if not size or free * size < rounded:
        return None
    try:
        return _memory(rounded, os.MFD_HUGETLB)
    except OSError:  # somebody else took them, or a limit forbids it
        return None


def _huge_pages() -> tuple[int, int]:
    """Of the default huge pages: bytes of one, and how many are free and not promised."""
    found = {}
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name.startswith("Huge"):
                found[name] = int(rest.split()[0])
    free = found.get("HugePages_Free", 0) - found.get("HugePages_Rsvd", 0)
    return found.get("Hugepagesize", 0) * 1024, free


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

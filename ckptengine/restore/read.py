"""Reads stored tensors straight into their memory, checksumming while it lands."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from ..errors import CorruptError, IncompleteError, NotFoundError
from ..format.checksum import crc32
from ..format.index import Index, Part, TensorEntry
from ..format.manifest import Manifest
from ..store import local

_THREADS = 2
"""More do not help: one stream of readahead serves a cold file best, two cores a warm one."""


_BLOCK = 512 << 10
"""Bytes of one read: they are checksummed while they are still in the core's cache, which makes a
quarter of the speed of a warm file."""


_RUN = 1 << 20
"""Bytes within which small pieces are read by one call."""

_GAP = 64 << 10
"""Bytes between two pieces that are read along rather than skipped."""


class _Piece(NamedTuple):
    fd: int
    file: str
    part: Part
    address: int


def read_tensors(
    directory: str,
    manifest: Manifest,
    index: Index,
    fills: Iterable[tuple[int, torch.Tensor]],
    *,
    verify: bool = True,
) -> int:
    """Fills each tensor with the stored tensor of that number, and returns the bytes read.

    Tensors that have another layout, dtype or device than what is stored go through memory of their
    own. Raises IncompleteError where a file is missing or short, before anything is filled, and
    CorruptError, with every bad chunk named, where checksums differ.
    """
    fills = list(fills)
    files = open_files(directory, manifest, index)
    try:
        pieces: list[_Piece] = []
        bounced: list[tuple[torch.Tensor, torch.Tensor]] = []
        keep: list[torch.Tensor] = []
        for number, target in fills:
            entry = index.tensors[number]
            memory = target
            if not _lands_in(entry, target):
                memory = torch.empty_strided(
                    entry.shape, entry.stride, dtype=getattr(torch, entry.dtype)
                )
                bounced.append((target, memory))
            keep.append(memory)
            file = index.files[entry.file]
            base = memory.data_ptr() - entry.offset
            pieces.extend(
                _Piece(files[entry.file], file.name, part, base + part.offset)
                for part in index.tensor_parts(number)
            )
        bad = _in_parallel(pieces, verify)
        if bad:
            lines = [
                f"{os.path.join(directory, piece.file)}: {why} in the {piece.part.nbytes} bytes "
                f"from {piece.part.offset}"
                for piece, why in bad
            ]
            raise CorruptError(f"{lines[0]} (and {len(lines) - 1} more places)", lines)
        with torch.no_grad():
            for target, memory in bounced:
                _copy(memory, target)
        return sum(piece.part.nbytes for piece in pieces)
    finally:
        for fd in files:
            os.close(fd)


_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _copy(memory: torch.Tensor, target: torch.Tensor) -> None:
    """Bit by bit where the dtypes agree: torch cannot copy the newest ones into every layout."""
    raw = _RAW.get(memory.element_size())
    if raw is None or target.dtype != memory.dtype or target.is_conj() or target.is_neg():
        target.copy_(memory)
    else:
        target.view(raw).copy_(memory.view(raw))


def open_files(directory: str, manifest: Manifest, index: Index) -> list[int]:
    """Descriptors of the index's files, whose sizes have been held against both records."""
    fds: list[int] = []
    try:
        for file in index.files:
            path = os.path.join(directory, file.name)
            entry = manifest.files.get(file.name)
            if entry is None or entry.nbytes != file.nbytes:
                raise CorruptError(f"{path}: the index and the commit record disagree on its size")
            fds.append(_open(path, file.nbytes))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _open(path: str, nbytes: int) -> int:
    try:
        fd = local.open_for_reading(path)
    except NotFoundError:
        raise IncompleteError(f"{path}: the file is missing") from None
    size = os.fstat(fd).st_size
    if size != nbytes:
        os.close(fd)
        raise IncompleteError(f"{path}: the file has {size} bytes instead of {nbytes}")
    return fd


def _lands_in(entry: TensorEntry, target: torch.Tensor) -> bool:
    """Whether stored bytes can be read straight into `target`'s memory."""
    return (
        target.device.type == "cpu"
        and str(target.dtype) == f"torch.{entry.dtype}"
        and target.stride() == entry.stride
        and not target.is_conj()
        and not target.is_neg()
    )


def _in_parallel(pieces: list[_Piece], verify: bool) -> list[tuple[_Piece, str]]:
    """Reads all pieces; returns the bad ones with the reason."""
    runs = _runs(pieces)
    buffers = threading.local()

    def read(run: list[_Piece]) -> list[tuple[_Piece, str]]:
        if len(run) > 1:
            if not hasattr(buffers, "one"):
                buffers.one = bytearray(2 * _RUN)
            return _read_run(run, verify, buffers.one)
        why = _read(run[0], verify)
        return [(run[0], why)] if why else []

    threads = min(_THREADS, len(runs))
    if threads <= 1:
        return [bad for run in runs for bad in read(run)]
    with ThreadPoolExecutor(threads) as pool:
        return [bad for found in pool.map(read, runs) for bad in found]


def _runs(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Small pieces that lie close together, to be read by one call; large ones alone. By place."""
    runs: list[list[_Piece]] = []
    fd = start = end = -1
    for piece in sorted(pieces, key=lambda p: (p.fd, p.part.offset)):
        at, nbytes = piece.part.offset, piece.part.nbytes
        if nbytes < _BLOCK and piece.fd == fd and at - end < _GAP and at - start < _RUN:
            runs[-1].append(piece)
            end = at + nbytes
        else:
            runs.append([piece])
            # Nothing is joined to a large one.
            fd, start, end = (piece.fd, at, at + nbytes) if nbytes < _BLOCK else (-1, -1, -1)
    return runs


def _read_run(run: list[_Piece], verify: bool, buffer: bytearray) -> list[tuple[_Piece, str]]:
    """Reads a run into `buffer` and from there, while the core still has it in its cache, into the
    pieces' memory: for small tensors, calls cost more than bytes."""
    start = run[0].part.offset
    nbytes = run[-1].part.offset + run[-1].part.nbytes - start
    view = memoryview(buffer)[:nbytes]
    got = _fill(view, run[0], start)
    base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    bad = []
    for piece in run:
        offset, size, crc = piece.part
        at = offset - start
        if at + size > got:
            bad.append((piece, "the file ends"))
        elif verify and crc32(view[at : at + size]) != crc:
            bad.append((piece, "a wrong checksum"))
        else:
            ctypes.memmove(piece.address, base + at, size)
    return bad


def _read(piece: _Piece, verify: bool) -> str | None:
    """Reads a piece straight into its memory. Returns what is wrong with it."""
    view = memoryview((ctypes.c_char * piece.part.nbytes).from_address(piece.address)).cast("B")
    crc = 0
    for start in range(0, piece.part.nbytes, _BLOCK):
        block = view[start : start + _BLOCK]
        if _fill(block, piece, piece.part.offset + start) < len(block):
            return "the file ends"
        if verify:
            crc = crc32(block, crc)
    return "a wrong checksum" if verify and crc != piece.part.crc else None


def _fill(view: memoryview, piece: _Piece, offset: int) -> int:
    """Reads into all of `view` from the piece's file; returns the bytes read, fewer at its end."""
    got = 0
    while got < len(view):
        with local.store_errors("reading", piece.file):
            count = os.preadv(piece.fd, [view[got:]], offset + got)
        if not count:
            break
        got += count
    return got

"""Copies large pieces of memory with several threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

_PIECE = 8 << 20
"""Bytes of one call: large enough that threads hardly meet, small enough that all end together."""

_MOST = 8
"""Threads; by then the memory is the limit."""


class Move(NamedTuple):
    """Bytes to copy from one address to another."""

    target: int
    source: int
    nbytes: int


class Copier:
    """Copies by the C library's memmove in as many threads as torch uses.

    Not by torch's own threads: memmove bypasses the cache for large pieces, which spares a third of
    the memory traffic, and its threads do not wait for each other at a barrier, where one that the
    machine has put aside holds up all (measured on two busy cores: twice as fast).
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def copy(self, moves: Iterable[Move], announce: Callable[[int], None]) -> None:
        """Copies all of `moves`; tells `announce` the address up to which targets are done."""
        pieces = [piece for move in moves for piece in _pieces(move)]
        if self._pool is None:
            threads = min(_MOST, torch.get_num_threads())
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ckptengine-copy")
        # In order: a piece that ends early is announced with those before it.
        for piece, _ in zip(pieces, self._pool.map(_copy, pieces), strict=True):
            announce(piece.target + piece.nbytes)

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _pieces(move: Move) -> Iterable[Move]:
    for start in range(0, move.nbytes, _PIECE):
        size = min(_PIECE, move.nbytes - start)
        yield Move(move.target + start, move.source + start, size)


def _copy(piece: Move) -> None:
    ctypes.memmove(piece.target, piece.source, piece.nbytes)

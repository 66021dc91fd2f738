"""Copies large pieces of memory with several threads."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue
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

    Not by an executor: Ctrl-C in one of its lines can leave it hanging at the next use, which is
    the save that a trainer makes because of that Ctrl-C. A queue made in C has no such lines.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[_Batch | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def copy(self, moves: Iterable[Move], announce: Callable[[int], None]) -> None:
        """Copies all of `moves`; tells `announce` the address up to which targets are done."""
        if not self._threads:
            for _ in range(min(_MOST, torch.get_num_threads())):
                thread = threading.Thread(target=self._serve, name="ckptengine-copy", daemon=True)
                self._threads.append(thread)
                thread.start()
        batch = _Batch([piece for move in moves for piece in _pieces(move)])
        try:
            for _ in self._threads:
                self._work.put(batch)
            # In order: a piece that ends early is announced with those before it.
            for number, piece in enumerate(batch.pieces):
                while not batch.ended[number]:
                    batch.news.get()
                announce(piece.target + piece.nbytes)
        finally:
            # Interrupted, no thread may go on: the tensors may be freed, the arena be used anew.
            batch.stop()

    def close(self) -> None:
        """Ends the threads."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _serve(self) -> None:
        while (batch := self._work.get()) is not None:
            batch.copy()


class _Batch:
    """Pieces that several threads copy, each the next one that nobody has begun."""

    def __init__(self, pieces: list[Move]) -> None:
        self.pieces = pieces
        self.begun = bytearray(len(pieces))
        self.ended = bytearray(len(pieces))
        self.news: SimpleQueue[None] = SimpleQueue()  # one for each that has ended
        self._next = itertools.count()
        self._stopped = False

    def copy(self) -> None:
        while (number := next(self._next)) < len(self.pieces):
            self.begun[number] = 1
            if not self._stopped:  # asked after it was begun, as `stop` tells before it looks
                piece = self.pieces[number]
                ctypes.memmove(piece.target, piece.source, piece.nbytes)
            self.ended[number] = 1
            self.news.put(None)

    def stop(self) -> None:
        """Returns once nobody copies, and nobody will."""
        self._stopped = True
        while self.begun != self.ended:
            time.sleep(0.001)


def _pieces(move: Move) -> Iterable[Move]:
    for start in range(0, move.nbytes, _PIECE):
        size = min(_PIECE, move.nbytes - start)
        yield Move(move.target + start, move.source + start, size)

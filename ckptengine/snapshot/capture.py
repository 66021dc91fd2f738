"""Copies a state into an arena, and says how far it is.

The persister follows the count, so that a save takes not copy plus write but the longer of the two.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ..errors import StateError
from ..types import TensorPlace
from .arena import Arena, copyable
from .batches import Batch
from .copier import Copier, Move
from .device import SideStreams


class Capture:
    """One snapshot: `tensors` and `pickles` as they are at construction, in the order of the plan
    that is installed in `arena`.

    `later`: numbers of tensors that may be copied while the trainer goes on, until `fence`. Without
    any, all is copied when the constructor returns, and the caller may change whatever it likes.
    `announce`: whether the persister is told how far the copy is while the caller waits for it, or
    only of its end.
    """

    def __init__(
        self,
        arena: Arena,
        copier: Copier,
        tensors: Sequence[torch.Tensor],
        pickles: Sequence[bytes],
        later: frozenset[int] = frozenset(),
        announce: bool = True,
    ) -> None:
        self._arena = arena
        self._copier = copier
        self._tensors = tensors
        self._streams = SideStreams(tensors)
        self._error: BaseException | None = None
        self._changed: list[int] = []
        self._thread: threading.Thread | None = None
        for raw, place in zip(pickles, arena.values, strict=True):
            raw = raw.ljust(place.capacity, b"\0")
            arena.image[place.offset : place.offset + place.capacity] = raw
        if not later:
            self._copy(arena.batches(), announce)
            self._finish()
            return
        self._copy(arena.batches(later), announce=False)
        self._later = sorted(later)
        self._versions = [tensors[number]._version for number in self._later]
        self._thread = threading.Thread(target=self._copy_later, name="ckptengine-capture")
        self._thread.start()

    def fence(self) -> list[int]:
        """Waits until everything is copied. The caller may then change whatever it likes.

        Returns the numbers of tensors that were changed before, by somebody who did not wait: the
        snapshot would be a mixture, and has been given up. (Changes that leave no trace, through
        `.data` for one, are not seen.) Raises StateError for what made the copy fail.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return []
        thread.join()
        if self._error is not None:
            raise StateError(f"the capture failed: {self._error!r}") from self._error
        return self._changed

    def _copy_later(self) -> None:
        try:
            others = frozenset(range(len(self._tensors))) - frozenset(self._later)
            self._copy(self._arena.batches(others), announce=True)
            self._changed = [
                number
                for number, version in zip(self._later, self._versions, strict=True)
                if self._tensors[number]._version != version
            ]
        except BaseException as error:
            self._error = error
        if self._error or self._changed:
            self._arena.control.abandon()
        else:
            self._finish()

    def _finish(self) -> None:
        self._arena.control.captured = len(self._arena.image)
        self._tensors = ()  # so that they live no longer than the trainer wants

    def _copy(self, batches: Sequence[Batch], announce: bool) -> None:
        control, base = self._arena.control, self._arena.address

        def tell(address: int) -> None:
            if announce:
                control.captured = address - base

        with torch.no_grad(), self._streams.current():
            for batch in batches:
                moves = self._moves(batch) if batch.large else None
                if moves is not None:
                    self._copier.copy(moves, tell)
                else:
                    self._copy_by_torch(batch)
                last = self._arena.places[batch.numbers[-1]]
                tell(base + last.offset + last.nbytes)

    def _moves(self, batch: Batch) -> list[Move] | None:
        """The batch as plain moves of memory; None where a tensor is not just that."""
        moves = []
        for number in batch.numbers:
            tensor, place = self._tensors[number], self._arena.places[number]
            if not plain_memory(tensor, place):
                return None
            moves.append(Move(self._arena.address + place.offset, tensor.data_ptr(), place.nbytes))
        return moves

    def _copy_by_torch(self, batch: Batch) -> None:
        """One call for many tensors: of small ones, the calls cost more than the bytes."""
        arena, tensors = self._arena, self._tensors
        torch._foreach_copy_(
            [arena.views[number] for number in batch.numbers],
            [copyable(tensors[number], arena.places[number].dtype) for number in batch.numbers],
            non_blocking=True,  # for devices; what is announced next has to be there
        )
        self._streams.synchronize()


def plain_memory(tensor: torch.Tensor, place: TensorPlace) -> bool:
    """Whether the tensor's memory is, byte by byte, what is stored of it."""
    return (
        tensor.device.type == "cpu"
        and tensor.stride() == place.stride
        and not tensor.is_conj()
        and not tensor.is_neg()
    )

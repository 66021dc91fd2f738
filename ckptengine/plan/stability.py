"""Learns which tensors stay as they are from save to save, so that they get files of their own.

A file is shared with the checkpoint before only as a whole: one tensor in it that changes makes all
of it be written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

_LEAST = 64 << 20
_SHARE = 16
"""Files of stable tensors have about `_LEAST` bytes, or a `_SHARE`-th of the state where that is more:
so much is written in vain when one of them changes."""

_MOST = 64
"""Files; beyond these all are laid out anew."""

_WASTE = 0.01
"""Of the bytes that change: what may be written in vain before a new layout is worth its plan."""

_DOUBT = 4
"""A tensor that was taken for stable and changed must stay the same for so many times as many saves
before it is again: what changes now and then shall not move about."""


class Stability:
    """The tensors of one structure, of `nbytes` each, and the files of those taken for stable.

    `stable`: numbers of the tensors that are expected not to change, before anything is known.
    """

    def __init__(self, nbytes: Sequence[int], stable: Iterable[int] = ()) -> None:
        self._nbytes = np.array(nbytes, dtype=np.int64)
        self._file = np.full(len(nbytes), -1)  # of each tensor; -1: with those that change
        self._calm = np.zeros(len(nbytes), dtype=np.int64)  # saves in a row without a change
        self._patience = np.ones(len(nbytes), dtype=np.int64)  # such saves until it is stable
        self._place(np.array(sorted(stable), dtype=np.int64))

    def files(self) -> list[list[int]]:
        """The numbers of the stable tensors, ascending in each file."""
        found: dict[int, list[int]] = {}
        for number in np.flatnonzero(self._file >= 0).tolist():
            found.setdefault(int(self._file[number]), []).append(number)
        return [numbers for _, numbers in sorted(found.items())]

    def adopt(self, files: Iterable[Sequence[int]]) -> None:
        """Takes over the files of an earlier run: only files of the same layout can be shared."""
        self._file[:] = -1
        for key, numbers in enumerate(files):
            self._file[list(numbers)] = key

    def observe(self, unchanged: bytes) -> bool:
        """Takes note of one save; `unchanged` has a 1 for each tensor that was as in the save before.

        Returns whether the files were changed, since too much was written in vain.
        """
        same = np.frombuffer(unchanged, dtype=np.uint8) > 0
        self._calm = np.where(same, self._calm + 1, 0)
        leaving = (self._file >= 0) & ~same
        joining = (self._file < 0) & (self._calm >= self._patience)
        spoilt = np.isin(self._file, self._file[leaving]) & same
        vain = self._nbytes[joining | spoilt].sum()
        if vain <= _WASTE * self._nbytes[~same].sum():
            return False
        self._file[leaving] = -1
        self._patience[leaving] *= _DOUBT
        self._place(np.flatnonzero(joining))
        if len(np.unique(self._file)) > _MOST:
            stable = np.flatnonzero(self._file >= 0)
            self._file[:] = -1
            self._place(stable)
        return True

    def _place(self, numbers: npt.NDArray[np.int64]) -> None:
        """Puts tensors into new files, in their order."""
        numbers = numbers[self._nbytes[numbers] > 0]
        size = max(_LEAST, int(self._nbytes.sum()) // _SHARE)
        nth = (np.cumsum(self._nbytes[numbers]) - 1) // size
        self._file[numbers] = self._file.max(initial=-1) + 1 + nth

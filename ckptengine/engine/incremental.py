"""The trainer's side of incremental saves: which tensors lie in files of their own."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from ..errors import CheckpointError
from ..persist.pool import new_id
from ..plan.plan import payload_nbytes
from ..plan.stability import Stability
from ..repository import Repository
from ..state.collect import Collected
from ..types import CheckpointId
from .fences import owned


class Incremental:
    """What has been learned of the tensors of one structure.

    `structure`: a number that persisters know it by. `apart`: the tensors that lie in files of their
    own, by files; another object whenever that has changed.
    """

    def __init__(self) -> None:
        self.structure = 0
        self.apart: Sequence[Sequence[int]] = ()
        self._stability = Stability([])
        self._news: collections.deque[tuple[int, bytes]] = collections.deque()

    def begin(
        self, collected: Collected, repository: Repository, restored: CheckpointId | None
    ) -> None:
        """A new structure. Until more is known, what no optimizer owns is taken for stable, or what
        was so when the checkpoint was written that this run was `restored` from."""
        tensors = collected.tensors
        changing = owned(tensors, collected.optimizers) if collected.optimizers else ()
        stable = set(range(len(tensors))) - set(changing) if changing else ()
        stability = Stability([payload_nbytes(spec) for spec in collected.specs], stable)
        if restored is not None:
            files = _files_of(repository, restored, collected)
            if files:
                stability.adopt(files)
        self._stability = stability
        self.structure, self.apart = new_id(), stability.files()

    def note(self, structure: int, unchanged: bytes) -> None:
        """What a committed save has shown (see `Stability.observe`). From any thread."""
        self._news.append((structure, unchanged))

    def learn(self) -> None:
        """Takes in what was noted."""
        while self._news:
            structure, unchanged = self._news.popleft()
            if structure == self.structure and self._stability.observe(unchanged):
                self.apart = self._stability.files()


def _files_of(
    repository: Repository, checkpoint: CheckpointId, collected: Collected
) -> list[list[int]]:
    """The tensors of each file but the first, if the checkpoint is of the same structure."""
    try:
        index = repository.index(checkpoint, repository.manifest(checkpoint), 0)
    except CheckpointError:  # deleted meanwhile: nothing can be shared with it
        return []
    here = [(dtype, shape) for dtype, shape, _ in collected.specs]
    if [(entry.dtype, entry.shape) for entry in index.tensors] != here:
        return []
    files: list[list[int]] = [[] for _ in index.files]
    for number, entry in enumerate(index.tensors):
        files[entry.file].append(number)
    return [numbers for numbers in files[1:] if numbers]

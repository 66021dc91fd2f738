"""A state of which most bytes never change: a frozen base, and a twentieth that is trained.

The figures, in seconds unless stated; between any two saves the trained part makes one step:

- new bytes     bytes of the files that the save added (not links to files of the save before), as
                a multiple of the bytes that changed
- disk writes   bytes that this process and its children sent to disks, as the same multiple
- stall         until the call of a save returns, trainer idle
- durable       until the save is durable, trainer idle
- cpu           CPU of background threads and processes
- restore warm  to fill existing tensors, files in the page cache
"""

from __future__ import annotations

from pathlib import Path

from .. import limits, machine
from ..contenders import ALL, CkptEngine, Contender
from ..harness import Turn
from ..racer import Racer
from ..trainer import State, Trainer, blank_like, weights
from ..workload import (
    CPU,
    DURABLE,
    RESTORE_WARM,
    STALL,
    Figure,
    Race,
    Settings,
    Workload,
)

_TRAINED = 0.05  # share of the bytes
_LEARNING = 3  # saves before the first one counts: what does not change shows only over several

CONTENDERS = {
    "ckptengine incremental": lambda: CkptEngine("incremental", incremental=True, keep=2),
    "ckptengine": lambda: CkptEngine(keep=2),
    **{name: make for name, make in ALL.items() if name not in ("none", "ckptengine")},
}


class Frozen(Racer):
    """One contender's turn: a step, a save, and a restore of it. The two newest saves stay."""

    def __init__(
        self,
        contender: Contender,
        trainer: Trainer,
        state: State,
        target: State,
        directory: Path,
    ) -> None:
        super().__init__(contender, state, target, directory)
        self._trainer = trainer
        self._kept: list[Path] = []

    def measure(self) -> Turn:
        if not self._kept:
            for _ in range(_LEARNING):
                self._trainer.step()
                self._keep(directory := self.next())
                self.contender.save(self.state, directory)
        earlier = {path.stat().st_ino for kept in self._kept for path in self.files(kept)}
        self._trainer.step()
        directory = self.next()
        before = machine.written()
        figures = self.save_idle(directory)
        sent = machine.written() - before
        self._keep(directory)
        timings = self.contender.timings()
        paths = self.files(directory)
        stats = [path.stat() for path in paths]
        added = sum(stat.st_size for stat in stats if stat.st_ino not in earlier)
        figures["new bytes"] = added / self._trainer.nbytes
        figures["disk writes"] = sent / self._trainer.nbytes
        found, details = self.restore(directory, paths, ("warm",))
        return Turn(figures | found, {**details, "added": added, "sent": sent, "timings": timings})

    def _keep(self, directory: Path) -> None:
        self._kept.append(directory)
        for old in self._kept[:-2]:
            self.remove(old)
        del self._kept[:-2]


def _prepare(settings: Settings) -> Race:
    trainer = Trainer(int(settings.nbytes * _TRAINED))
    base = weights(settings.nbytes - trainer.nbytes)
    state = {"base": base, **trainer.state}
    target = blank_like(state)
    arena = limits.Arena(state)
    return Race(
        state={
            **trainer.facts(),
            "bytes": trainer.nbytes + sum(tensor.nbytes for tensor in base.values()),
            "items": trainer.items + len(base),
            "changed": trainer.nbytes,
        },
        limits=[
            limits.CopyLimit(arena),
            limits.WriteLimit(arena, settings.directory),
            limits.ReadLimit(arena, settings.directory),
        ],
        contenders=[
            Frozen(CONTENDERS[name](), trainer, state, target, settings.directory)
            for name in settings.contenders
        ],
    )


_DEFAULT = (
    "ckptengine incremental",
    "ckptengine",
    "torch.save",
    "dcp.save",
    "dcp.async thread",
)

WORKLOAD = Workload(
    name="frozen",
    figures=(
        Figure("new bytes", "bytes of new files", unit="x the bytes changed"),
        Figure("disk writes", "bytes sent to the disk", unit="x the bytes changed"),
        STALL,
        DURABLE,
        CPU,
        RESTORE_WARM,
    ),
    contenders=_DEFAULT,
    optional=tuple(name for name in CONTENDERS if name not in _DEFAULT),
    prepare=_prepare,
    disk=18.0,
    first=(),
    notes=(
        "Of the bytes 5 % change between saves; three saves went before the first round. "
        "`new bytes` and `disk writes` are multiples of the bytes that changed. `stall` is a "
        "multiple of the memory copy of the whole state; the limits of the others write or read "
        "the whole state, so that a save which writes less may pass them."
    ),
)

"""A small state, saved at every step of a loop with short steps.

The figures, in milliseconds a step; the loop runs without saves before and after:

- cost     by how much a step with a save takes longer than one without
- waited   of that, how long the loop waited for an earlier save to be written
- call     of that, the call of the save, waiting included
- behind   milliseconds in all, not a step: from the end of the loop until all is durable
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from .. import cache
from ..contenders import ALL, CkptEngine, Contender
from ..harness import Turn
from ..racer import Racer
from ..trainer import State, Trainer, blank_like
from ..workload import Figure, Race, Settings, Workload

_STEP = 0.004  # seconds that a step takes at least

CONTENDERS = {
    **ALL,
    "ckptengine": lambda: CkptEngine(keep=2, on_busy="wait"),
}


class Tiny(Racer):
    """One contender's turn: a loop without saves, with one at each step, without."""

    def __init__(
        self, contender: Contender, trainer: Trainer, target: State, settings: Settings
    ) -> None:
        super().__init__(contender, trainer.state, target, settings.directory)
        self._trainer = trainer
        self._count = settings.count

    def measure(self) -> Turn:
        before = self._plain_steps(self._count // 2)
        directories = [self.next() for _ in range(self._count)]
        waited, calls = 0.0, []
        start = time.perf_counter()
        for directory in directories:
            self._trainer.step()
            called = time.perf_counter()
            waited += self._save(directory)
            calls.append(time.perf_counter() - called)
        ended = time.perf_counter()
        self.contender.wait()
        durable = time.perf_counter()
        found, _ = self.restore(directories[-1], self.files(directories[-1]), ("warm",))
        for directory in directories:
            self.remove(directory)
        after = self._plain_steps(self._count - self._count // 2)
        without = (before + after) / self._count
        figures = {
            "cost": (ended - start) / self._count - without,
            "waited": waited / self._count,
            "call": statistics.fmean(calls),
            "behind": durable - ended,
        }
        details = {"without": without, "calls": calls, **found}
        return Turn({name: 1000 * seconds for name, seconds in figures.items()}, details)

    def _save(self, directory: Path) -> float:
        """Save without letting saves pile up; seconds waited for earlier ones."""
        start = time.perf_counter()
        if not self.contender.queues:
            self.contender.wait()
        waited = time.perf_counter() - start
        self.contender.save_async(self.state, directory)
        return waited + self.contender.timings().get("busy", 0.0)

    def _plain_steps(self, count: int) -> float:
        cache.settle()
        for _ in range(count // 10):
            self._trainer.step()  # uncounted: caches and threads are cold after the pause
        start = time.perf_counter()
        for _ in range(count):
            self._trainer.step()
        return time.perf_counter() - start


def _prepare(settings: Settings) -> Race:
    trainer = Trainer(settings.nbytes, layers=2, width=256, least=_STEP)
    target = blank_like(trainer.state)
    return Race(
        state=trainer.facts(),
        limits=[],
        contenders=[
            Tiny(CONTENDERS[name](), trainer, target, settings) for name in settings.contenders
        ],
    )


_DEFAULT = (
    "ckptengine",
    "torch.save",
    "dcp.save",
    "dcp.async thread",
    "torch_checkpointing",
    "torchsnapshot",
)

WORKLOAD = Workload(
    name="tiny",
    figures=(
        Figure("cost", "cost of a save to a step", unit="ms"),
        Figure("call", "the call of the save, waiting included", unit="ms"),
        Figure("waited", "waiting for an earlier save", unit="ms"),
        Figure("behind", "end of the loop to all durable", unit="ms"),
    ),
    contenders=_DEFAULT,
    optional=tuple(name for name in CONTENDERS if name not in ("none", *_DEFAULT)),
    prepare=_prepare,
    gib=2**-10,
    count=200,
    first=("cost",),
    notes=(
        'A save at every step; none is skipped: ckptengine runs with on_busy="wait" and keep=2, '
        "and so deletes old checkpoints meanwhile; for asynchronous peers the loop waits for the "
        "save before, and their old checkpoints are deleted afterwards. Means over the steps of a "
        "loop, medians of these over the rounds."
    ),
)

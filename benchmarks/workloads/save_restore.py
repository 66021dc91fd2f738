"""What a save costs a training loop, how long it takes to be durable, and how fast it comes back.

The figures, in seconds, smaller is better:

- stall         until the call of a save returns, trainer idle
- durable       until the save is durable, trainer idle
- cost          by how much a busy loop with one save in it takes longer than without: the stall,
                and all that the background writer takes away from the loop
- durable busy  until the save is durable while the loop keeps all cores busy
- restore warm  to fill existing tensors, files in the page cache
- restore cold  the same, files not in the page cache
- cpu per GB    CPU of background threads and processes per 10^9 bytes, trainer idle
"""

from __future__ import annotations

import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from .. import cache, limits
from ..contenders import ALL, Contender, Nothing
from ..harness import Turn
from ..racer import Racer
from ..trainer import State, Trainer, blank_like, differing, overwrite
from ..workload import (
    COPY,
    DURABLE,
    RESTORE_COLD,
    RESTORE_WARM,
    STALL,
    WRITE,
    Figure,
    Race,
    Settings,
    Workload,
)

_TAIL = 2  # steps after the save is durable that still count as affected
_POLL = 0.01
_PATIENCE = 900  # seconds without an end after which a save is taken for hung


class SaveRestore(Racer):
    """One contender's turn: a save with the trainer idle, restores of it, a save in the loop."""

    def __init__(
        self, contender: Contender, trainer: Trainer, target: State, settings: Settings
    ) -> None:
        super().__init__(contender, trainer.state, target, settings.directory)
        self._trainer = trainer
        self._parts = settings.parts
        self._steps = settings.steps

    def measure(self) -> Turn:
        figures: dict[str, float] = {}
        details: dict[str, Any] = {}
        if not isinstance(self.contender, Nothing) and {"durable", "restore"} & set(self._parts):
            self.warm_up()
            directory = self.next()
            try:
                figures |= self.save_idle(directory)
                if "cpu" in figures:
                    figures["cpu per GB"] = figures.pop("cpu") / (self.nbytes / 1e9)
                if "restore" in self._parts:
                    found, details = self.restore(directory, self.files(directory))
                    figures |= found
            finally:
                self.remove(directory)
        if "loop" in self._parts:
            directory = self.next()
            try:
                found, details["loop"] = self._loop(directory)
                figures |= found
            finally:
                self.remove(directory)
        return Turn(figures, details)

    def _loop(self, directory: Path) -> tuple[dict[str, float], dict[str, Any]]:
        """Steps without a save, steps with one, steps without: drift cancels out in the mean."""
        cache.settle()
        self._trainer.step()  # uncounted: caches and threads are cold after the pause
        before = self._plain_steps(self._steps // 2)
        overwrite(self.target, self._trainer.state)
        with _Watch(self.contender) as watch:
            start = time.perf_counter()
            self.contender.save_async(self._trainer.state, directory)
            times = [time.perf_counter()]
            watch.start(start)
            extra = _TAIL
            while extra or len(times) <= self._steps:
                extra = max(0, extra - 1) if watch.ended else _TAIL
                if times[-1] - start > _PATIENCE:
                    raise TimeoutError(f"not durable after {_PATIENCE} s of steps")
                self._trainer.step()
                times.append(time.perf_counter())
        self.contender.wait()
        after = self._plain_steps(self._steps - self._steps // 2)
        if not isinstance(self.contender, Nothing):
            self._check_isolation(directory)
        baseline = statistics.fmean(before + after)
        count = len(times) - 1
        figures = {"cost": times[-1] - start - count * baseline}
        if watch.ended and not isinstance(self.contender, Nothing):
            figures["durable busy"] = watch.ended - start
        steps = [later - earlier for earlier, later in pairwise(times)]
        details = {
            "without": before + after,
            "stall": times[0] - start,
            "with": steps,
            "products_per_step": self._trainer.products,
        }
        return figures, details

    def _check_isolation(self, directory: Path) -> None:
        """What was saved while the loop went on must be the state as it was at the call."""
        self.contender.restore_into(self._trainer.state, directory)
        if wrong := differing(self.target, self._trainer.state):
            raise RuntimeError(f"{wrong} was saved with other values than it had at the call")

    def _plain_steps(self, count: int) -> list[float]:
        taken = []
        with _Watch(None):  # the same thread beside the loop as when a save is watched
            for _ in range(count):
                start = time.perf_counter()
                self._trainer.step()
                taken.append(time.perf_counter() - start)
        return taken


class _Watch:
    """Notes when a save became durable, beside the loop, to a hundredth of a second."""

    def __init__(self, contender: Contender | None) -> None:
        self._contender = contender
        self._started = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self.ended = 0.0

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def start(self, began: float) -> None:
        """The call has returned; from now on the contender may be asked."""
        if self._contender is not None and self._contender.done():
            self.ended = time.perf_counter()
        self._started.set()

    def _poll(self) -> None:
        while not self._stop.wait(_POLL):
            if (
                not self.ended
                and self._started.is_set()
                and self._contender is not None
                and self._contender.done()
            ):
                self.ended = time.perf_counter()


def _prepare(settings: Settings) -> Race:
    trainer = Trainer(settings.nbytes)
    target = blank_like(trainer.state)
    arena = limits.Arena(trainer.state)
    parts = set(settings.parts)
    return Race(
        state=trainer.facts(),
        limits=[
            limits.CopyLimit(arena),
            *(
                [limits.WriteLimit(arena, settings.directory)]
                if {"durable", "loop"} & parts
                else []
            ),
            *([limits.ReadLimit(arena, settings.directory)] if "restore" in parts else []),
        ],
        contenders=[
            SaveRestore(ALL[name](), trainer, target, settings) for name in settings.contenders
        ],
    )


WORKLOAD = Workload(
    name="save_restore",
    figures=(
        STALL,
        Figure("cost", "cost of a save to a busy loop", COPY, cost=True),
        DURABLE,
        Figure("durable busy", "time to durable, all cores busy", WRITE),
        RESTORE_WARM,
        RESTORE_COLD,
        Figure("cpu per GB", "CPU of background work", unit="s per GB"),
    ),
    contenders=tuple(ALL),
    prepare=_prepare,
    notes=(
        "`stall` and `cost` are shown as multiples of the memory copy, the others as shares of "
        "the raw speed of the same bytes in the same run. `first` is the very first save, nothing "
        "warm; it is in no median. `cost` of `none` is the noise of the method."
    ),
)

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

import shutil
import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import cache, machine
from .contenders import Contender, Nothing
from .harness import Turn
from .trainer import State, Trainer, differing, overwrite, scramble

PARTS = ("durable", "loop", "restore")
_TAIL = 2  # steps after the save is durable that still count as affected
_POLL = 0.01
_PATIENCE = 900  # seconds without an end after which a save is taken for hung


class SaveRestore:
    """One contender's turn: a save with the trainer idle, restores of it, a save in the loop."""

    def __init__(
        self,
        contender: Contender,
        trainer: Trainer,
        target: State,
        directory: Path,
        parts: tuple[str, ...],
        steps: int,
    ) -> None:
        self.name = contender.name
        self.description = contender.description
        self._contender = contender
        self._trainer = trainer
        self._target = target
        self._root = directory / contender.name.replace(" ", "-")
        self._parts = parts
        self._steps = steps
        self._saves = 0
        self._opened = False

    def turn(self) -> Turn:
        if not self._opened:
            self._root.mkdir(parents=True)
            self._contender.open(self._root)
            self._opened = True
        figures: dict[str, float] = {}
        details: dict[str, Any] = {}
        if not isinstance(self._contender, Nothing) and {"durable", "restore"} & set(self._parts):
            directory = self._next()
            try:
                figures |= self._idle(directory)
                if "restore" in self._parts:
                    found, details["resident"] = self._restore(directory)
                    figures |= found
            finally:
                self._remove(directory)
        if "loop" in self._parts:
            directory = self._next()
            try:
                found, details["loop"] = self._loop(directory)
                figures |= found
            finally:
                self._remove(directory)
        return Turn(figures, details)

    def close(self) -> None:
        if self._opened:
            self._contender.close()
        shutil.rmtree(self._root, ignore_errors=True)

    def _next(self) -> Path:
        self._saves += 1
        return self._root / str(self._saves)

    def _remove(self, directory: Path) -> None:
        for path in (self._contender.location(directory), directory):
            shutil.rmtree(path, ignore_errors=True)

    def _idle(self, directory: Path) -> dict[str, float]:
        cache.settle()
        children = machine.children_cpu()
        start = time.perf_counter()
        self._contender.save_async(self._trainer.state, directory)
        returned, own = time.perf_counter(), time.process_time()
        ended = self._contender.done()
        self._contender.wait()
        end = time.perf_counter()
        figures = {"stall": returned - start, "durable": end - start}
        if not ended:
            # Waiting takes none, so what this process used since is that of background threads.
            background = time.process_time() - own + machine.children_cpu() - children
            figures["cpu per GB"] = background / (self._trainer.nbytes / 1e9)
        return figures

    def _restore(self, directory: Path) -> tuple[dict[str, float], dict[str, float]]:
        figures, resident = {}, {}
        paths = cache.files(self._contender.location(directory))
        for kind, prepare in (("warm", cache.warm), ("cold", cache.drop)):
            scramble(self._target)
            cache.settle()
            prepare(paths)
            resident[kind] = cache.resident(paths)
            start = time.perf_counter()
            self._contender.restore_into(self._target, directory)
            figures[f"restore {kind}"] = time.perf_counter() - start
            if wrong := differing(self._trainer.state, self._target):
                raise RuntimeError(f"{wrong} came back with other bits ({kind})")
        return figures, resident

    def _loop(self, directory: Path) -> tuple[dict[str, float], dict[str, Any]]:
        """Steps without a save, steps with one, steps without: drift cancels out in the mean."""
        cache.settle()
        self._trainer.step()  # uncounted: caches and threads are cold after the pause
        before = self._plain_steps(self._steps // 2)
        overwrite(self._target, self._trainer.state)
        with _Watch(self._contender) as watch:
            start = time.perf_counter()
            self._contender.save_async(self._trainer.state, directory)
            times = [time.perf_counter()]
            watch.start(start)
            extra = _TAIL
            while extra or len(times) <= self._steps:
                extra = max(0, extra - 1) if watch.ended else _TAIL
                if times[-1] - start > _PATIENCE:
                    raise TimeoutError(f"not durable after {_PATIENCE} s of steps")
                self._trainer.step()
                times.append(time.perf_counter())
        self._contender.wait()
        after = self._plain_steps(self._steps - self._steps // 2)
        if not isinstance(self._contender, Nothing):
            self._check_isolation(directory)
        baseline = statistics.fmean(before + after)
        count = len(times) - 1
        figures = {"cost": times[-1] - start - count * baseline}
        if watch.ended and not isinstance(self._contender, Nothing):
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
        self._contender.restore_into(self._trainer.state, directory)
        if wrong := differing(self._target, self._trainer.state):
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

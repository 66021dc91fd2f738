"""One contender in its own directory: what most workloads do with it in a turn."""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import cache, machine
from .contenders import Contender
from .harness import Turn
from .trainer import State, differing, scramble, tensors


class Racer(ABC):
    """Takes turns; a workload says in `measure` what they consist of.

    `state` is what is saved, `target` what is restored into.
    """

    def __init__(self, contender: Contender, state: State, target: State, directory: Path) -> None:
        self.name = contender.name
        self.description = contender.description
        self.contender = contender
        self.state = state
        self.target = target
        self.nbytes = sum(tensor.nbytes for _, tensor in tensors(state))
        self.root = directory / contender.name.replace(" ", "-")
        self._saves = 0
        self._opened = False

    @abstractmethod
    def measure(self) -> Turn:
        """One turn; the contender is open."""

    def turn(self) -> Turn:
        if not self._opened:
            self.root.mkdir(parents=True)
            self.contender.open(self.root)
            self._opened = True
        return self.measure()

    def close(self) -> None:
        if self._opened:
            self.contender.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def next(self) -> Path:
        """A directory for one save."""
        self._saves += 1
        return self.root / str(self._saves)

    def remove(self, directory: Path) -> None:
        for path in (self.contender.location(directory), directory):
            shutil.rmtree(path, ignore_errors=True)

    def files(self, directory: Path) -> list[Path]:
        """The files of the save to `directory`."""
        return cache.files(self.contender.location(directory))

    def warm_up(self) -> None:
        """A save that does not count, but in the first turn, whose figures are kept apart: memory
        that was not used for minutes, while others had their turns, is slow on a virtual machine."""
        if self._saves:
            directory = self.next()
            self.contender.save(self.state, directory)
            self.remove(directory)

    def save_idle(self, directory: Path) -> dict[str, float]:
        """Save with nothing else to do: `stall`, `durable`, and `cpu` of what ran behind it."""
        cache.settle()
        children = machine.children_cpu()
        start = time.perf_counter()
        self.contender.save_async(self.state, directory)
        returned, own = time.perf_counter(), time.process_time()
        ended = self.contender.done()
        self.contender.wait()
        end = time.perf_counter()
        figures = {"stall": returned - start, "durable": end - start}
        if not ended:
            # Waiting takes none, so what this process used since is that of background threads.
            figures["cpu"] = time.process_time() - own + machine.children_cpu() - children
        return figures

    def restore(
        self, directory: Path, paths: Sequence[Path], kinds: Sequence[str] = ("warm", "cold")
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Seconds to fill the target, and the share of the files that was in the page cache."""
        prepare = {"warm": cache.warm, "cold": cache.drop}
        figures, resident = {}, {}
        for kind in kinds:
            scramble(self.target)
            cache.settle()
            prepare[kind](paths)
            resident[kind] = cache.resident(paths)
            start = time.perf_counter()
            self.contender.restore_into(self.target, directory)
            figures[f"restore {kind}"] = time.perf_counter() - start
            if wrong := self.wrong():
                raise RuntimeError(f"{wrong} came back with other bits ({kind})")
        return figures, {"resident": resident}

    def wrong(self) -> str | None:
        """The name of a tensor that was restored with other bits than it was saved with."""
        return differing(self.state, self.target)

"""Host memory over many saves in a row, each contender in a fresh process.

What counts is the memory of that process and all its descendants, pages shared among them once (the
sum of PSS), less the state itself:

- before  MB before the first save: the interpreter, torch, the contender
- tenth   after a tenth of the saves, in sizes of the state
- last    after the last save, in sizes of the state
- peak    the most seen at any time, in sizes of the state
- beyond  MB of the peak that are more than the snapshots the engine may hold (only ours)
"""

from __future__ import annotations

import multiprocessing
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from .. import machine
from ..contenders import ALL, CkptEngine, Contender
from ..harness import Turn
from ..trainer import weights
from ..workload import Figure, Race, Settings, Workload

_POLL = 0.02
_LIMIT = 1.1  # of the state's size, for the engine with little memory

# How many snapshots an engine may hold.
SLOTS = {"ckptengine": 2, "ckptengine limited": 1}

CONTENDERS: dict[str, Callable[[int], Contender]] = {
    "ckptengine": lambda nbytes: CkptEngine(keep=2),
    "ckptengine limited": lambda nbytes: CkptEngine(
        "limited", keep=2, host_memory_limit=int(_LIMIT * nbytes)
    ),
    **{
        name: lambda nbytes, make=make: make()
        for name, make in ALL.items()
        if name not in ("none", "ckptengine")
    },
}


class Memory:
    """One contender's turn: a fresh process that saves and watches itself."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.description = CONTENDERS[name](settings.nbytes).description
        self._settings = settings

    def turn(self) -> Turn:
        root = self._settings.directory / self.name.replace(" ", "-")
        root.mkdir()
        try:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, context) as pool:
                seen = pool.submit(
                    _watch_saves, self.name, self._settings.nbytes, self._settings.count, root
                ).result()
        finally:
            shutil.rmtree(root, ignore_errors=True)
        size = seen.pop("state")
        more = {name: held - size for name, held in seen.items()}
        figures = {name: more[name] / size for name in ("tenth", "last", "peak")}
        figures["before"] = more["before"] / 1e6
        if self.name in SLOTS:
            figures["beyond"] = (more["peak"] - SLOTS[self.name] * size) / 1e6
        return Turn(figures, {"bytes": {"state": size, **seen}})

    def close(self) -> None:
        pass


def _watch_saves(name: str, nbytes: int, saves: int, root: Path) -> dict[str, int]:
    """Bytes held at each point, in a process of its own."""
    state = {"model": weights(nbytes)}
    contender = CONTENDERS[name](nbytes)
    contender.open(root)
    held = {
        "state": sum(tensor.nbytes for tensor in state["model"].values()),
        "before": machine.resident(),
    }
    kept: list[Path] = []
    with _Peak() as peak:
        for number in range(1, saves + 1):
            kept.append(root / str(number))
            contender.save_async(state, kept[-1])
            if number == max(1, saves // 10):
                held["tenth"] = machine.resident()
            if number == saves:
                held["last"] = machine.resident()
            if not contender.queues:
                contender.wait()
                for old in kept[:-2]:
                    shutil.rmtree(old)
                del kept[:-2]
        contender.wait()
    contender.close()
    held["peak"] = max(peak.most, *held.values())
    return held


class _Peak:
    """Looks at the memory of the process and its descendants all the time."""

    def __init__(self) -> None:
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(_POLL):
            self.most = max(self.most, machine.resident())


def _prepare(settings: Settings) -> Race:
    state = weights(settings.nbytes)
    return Race(
        state={"bytes": sum(tensor.nbytes for tensor in state.values()), "items": len(state)},
        limits=[],
        contenders=[Memory(name, settings) for name in settings.contenders],
    )


_DEFAULT = (
    "ckptengine",
    "ckptengine limited",
    "torch.save",
    "dcp.save",
    "dcp.async thread",
    "dcp.async thread cached",
)

WORKLOAD = Workload(
    name="memory",
    figures=(
        Figure("before", "memory beside the state before the first save", unit="MB"),
        Figure("tenth", "memory after a tenth of the saves", unit="sizes of the state"),
        Figure("last", "memory after the last save", unit="sizes of the state"),
        Figure("peak", "most memory", unit="sizes of the state"),
        Figure("beyond", "most memory beyond the snapshots allowed for", unit="MB"),
    ),
    contenders=_DEFAULT,
    optional=tuple(name for name in CONTENDERS if name not in _DEFAULT),
    prepare=_prepare,
    count=100,
    first=(),
    notes=(
        "Memory of the process and all its descendants (the sum of PSS) less the state itself; "
        "each contender in a process of its own, saves in a row. `before` is the interpreter with "
        "torch, and part of all that follow. `beyond` is the peak less two snapshots, with "
        "`limited` (host_memory_limit=1.1 sizes of the state) less one; its target is 300 MB."
    ),
)

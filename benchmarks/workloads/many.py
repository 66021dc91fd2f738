"""A state of very many small tensors: what each costs beyond its bytes.

The figures, in seconds unless stated; trainer idle, steady state:

- stall             until the call of a save returns
- stall per tensor  microseconds of that for each tensor, one memory copy of all bytes taken off
- durable           until the save is durable
- cpu               CPU of background threads and processes
- restore warm      to fill existing tensors, files in the page cache
"""

from __future__ import annotations

import statistics

import torch

from .. import limits
from ..contenders import ALL
from ..harness import Turn
from ..racer import Racer
from ..trainer import State, blank_like, tensors
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

_LEAST, _MOST = 16, 1024  # elements of a tensor
_PARTS = ("attention.query", "attention.key", "attention.value", "attention.out", "norm")


class Many(Racer):
    """One contender's turn: a save, and a restore of it."""

    def measure(self) -> Turn:
        self.warm_up()
        directory = self.next()
        try:
            copy = self._copy()
            figures = self.save_idle(directory)
            count = sum(1 for _ in tensors(self.state))
            figures["stall per tensor"] = (figures["stall"] - copy) / count * 1e6
            timings = self.contender.timings()
            found, details = self.restore(directory, self.files(directory), ("warm",))
            return Turn(figures | found, {**details, "copy": copy, "timings": timings})
        finally:
            self.remove(directory)

    def _copy(self) -> float:
        """Seconds of a memory copy of as many bytes in one piece."""
        source = torch.zeros(self.nbytes, dtype=torch.uint8)
        target = torch.ones_like(source)
        return statistics.median(limits.timed(lambda: target.copy_(source)) for _ in range(3))


def many_tensors(count: int) -> State:
    """Named like the layers of a model, of 16 to 1024 elements each."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.randint(_LEAST, _MOST + 1, (count,), generator=random).tolist()
    layers = len(_PARTS)
    return {
        "model": {
            f"layers.{i // layers}.{_PARTS[i % layers]}.weight": torch.randn(size, generator=random)
            for i, size in enumerate(sizes)
        }
    }


def _prepare(settings: Settings) -> Race:
    state = many_tensors(settings.count)
    target = blank_like(state)
    arena = limits.Arena(state)
    return Race(
        state={"bytes": sum(t.nbytes for _, t in tensors(state)), "items": settings.count},
        limits=[
            limits.CopyLimit(arena),
            limits.WriteLimit(arena, settings.directory),
            limits.ReadLimit(arena, settings.directory),
        ],
        contenders=[
            Many(ALL[name](), state, target, settings.directory) for name in settings.contenders
        ],
    )


_PEERS = (
    "torch.save",
    "safetensors",
    "dcp.save",
    "dcp.async thread",
    "torch_checkpointing",
    "torchsnapshot",
)

WORKLOAD = Workload(
    name="many",
    figures=(
        STALL,
        Figure("stall per tensor", "stall of the call beyond its bytes", unit="µs per tensor"),
        DURABLE,
        CPU,
        RESTORE_WARM,
    ),
    contenders=("ckptengine", *_PEERS),
    optional=tuple(name for name in ALL if name not in _PEERS),
    prepare=_prepare,
    gib=None,
    count=100_000,
    notes=(
        "`stall` is shown as a multiple of the memory copy, tensor by tensor; `stall per tensor` "
        "has one memory copy of the same bytes in one piece taken off. `first` is the very first "
        "save; it is in no median."
    ),
)

"""A state of one tensor that takes a good part of the machine's memory.

The figures, in seconds; trainer idle:

- first stall, first durable  of the first save of an engine, whose memory is touched first then
- stall, durable              of its second save
- restore warm, restore cold  to fill the existing tensor, files in the page cache and not

The contender is closed and opened again before it restores, for its memory is needed: the tensor is
there once, and filled in place.
"""

from __future__ import annotations

import torch

from .. import limits
from ..contenders import ALL, Contender
from ..harness import Turn
from ..racer import Racer
from ..trainer import State
from ..workload import (
    COPY,
    RESTORE_COLD,
    RESTORE_WARM,
    WRITE,
    Figure,
    Race,
    Settings,
    Workload,
)

_BLOCK = (
    16 << 20
)  # elements of the pattern, from which each block of the tensor differs by its number
_ARENA = 2 << 30  # bytes of the limits' arena, beside which the rest must fit


class Large(Racer):
    """One contender's turn: two saves, and restores of the second."""

    def __init__(
        self, contender: Contender, state: State, pattern: torch.Tensor, settings: Settings
    ) -> None:
        super().__init__(contender, state, state, settings.directory)
        self._pattern = pattern

    def measure(self) -> Turn:
        directory = self.next()
        try:
            found = self.save_idle(directory)
        finally:
            self.remove(directory)
        figures = {f"first {name}": found[name] for name in ("stall", "durable")}
        directory = self.next()
        try:
            figures |= self.save_idle(directory)
            paths = self.files(directory)
            self.contender.close()
            self.contender.open(self.root)
            found, details = self.restore(directory, paths)
            return Turn(figures | found, details)
        finally:
            self.remove(directory)

    def wrong(self) -> str | None:
        for number, block in enumerate(_blocks(self.state)):
            if not torch.equal(block, self._pattern[: len(block)] + number):
                return f"block {number}"
        return None


def _blocks(state: State) -> tuple[torch.Tensor, ...]:
    return state["weight"].view(torch.int32).split(_BLOCK)


def _prepare(settings: Settings) -> Race:
    torch.manual_seed(0)
    state = {"weight": torch.empty(settings.nbytes // 4)}
    pattern = torch.randint(-(2**31), 2**31, (_BLOCK,), dtype=torch.int32)
    for number, block in enumerate(_blocks(state)):
        torch.add(pattern[: len(block)], number, out=block)
    nbytes = state["weight"].nbytes
    arena = limits.Arena({"part": state["weight"][: _ARENA // 4]})
    return Race(
        state={"bytes": nbytes, "items": 1},
        limits=[
            limits.Scaled(limit, nbytes / arena.nbytes)
            for limit in (
                limits.CopyLimit(arena),
                limits.WriteLimit(arena, settings.directory),
                limits.ReadLimit(arena, settings.directory),
            )
        ],
        contenders=[Large(ALL[name](), state, pattern, settings) for name in settings.contenders],
    )


_FITTING = ("ckptengine", "torch.save", "dcp.save")

WORKLOAD = Workload(
    name="large",
    figures=(
        Figure("first stall", "stall of the first save", COPY, cost=True),
        Figure("stall", "stall of the second save", COPY, cost=True),
        Figure("first durable", "time to durable, first save", WRITE),
        Figure("durable", "time to durable, second save", WRITE),
        RESTORE_WARM,
        RESTORE_COLD,
    ),
    contenders=_FITTING,
    optional=tuple(name for name in ALL if name not in _FITTING),
    prepare=_prepare,
    gib=6.0,
    first=(),
    notes=(
        "One tensor, trainer idle. `first` is the first save of a newly opened contender, measured "
        "in each round. The limits were measured over at most 2 GiB, which is what fits beside the "
        "state and a snapshot of it, and are stated for the bytes of the state; GB/s are as "
        "measured. Restores fill the tensor that was saved, by a contender that was opened anew."
    ),
)

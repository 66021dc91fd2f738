"""What a workload is to the command line, the tables and the plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .harness import Entry

COPY = ("copy torch", "copy memmove")
WRITE = ("write direct x1", "write direct x2")
WARM = ("read warm x1", "read warm x2")
COLD = ("read cold direct x1", "read cold direct x2", "read cold direct x4", "read cold buffered")


@dataclass(frozen=True)
class Figure:
    """How a figure is shown. Of every figure, smaller is better."""

    name: str
    title: str
    limits: tuple[str, ...] = ()  # the fastest of these is the limit
    unit: str = "s"
    cost: bool = False  # a multiple of the limit, where others are a share of its speed


# What several workloads show alike.
STALL = Figure("stall", "stall of the call, trainer idle", COPY, cost=True)
DURABLE = Figure("durable", "time to durable, trainer idle", WRITE)
RESTORE_WARM = Figure("restore warm", "restore, page cache warm", WARM)
RESTORE_COLD = Figure("restore cold", "restore, page cache cold", COLD)
CPU = Figure("cpu", "CPU of background work")


@dataclass(frozen=True)
class Settings:
    """What the command line chose."""

    directory: Path
    contenders: Sequence[str]
    nbytes: int
    count: int
    steps: int
    parts: Sequence[str]  # of save_restore


@dataclass(frozen=True)
class Race:
    """All that takes turns in one run, and the facts of the state that the results name."""

    state: dict[str, Any]
    limits: Sequence[Entry]
    contenders: Sequence[Entry]


@dataclass(frozen=True)
class Workload:
    """One group of figures that are measured together and go into one JSON file."""

    name: str
    figures: tuple[Figure, ...]
    contenders: Sequence[str]
    prepare: Callable[[Settings], Race]
    notes: str
    optional: Sequence[str] = ()  # contenders that run only where they are asked for
    gib: float | None = 2.0  # default size of the state; None: the count decides
    count: int | None = None  # default number of tensors, saves or steps
    disk: float = 3.0  # room needed, in sizes of the state
    first: tuple[str, ...] = ("stall", "durable")  # figures whose very first value is shown

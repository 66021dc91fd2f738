"""Interleaved rounds: in each one every contender and every limit runs once, in another order.

What drifts on a machine (clock, neighbours, disk) then meets all of them alike. The first rounds
warm up: their figures are kept apart, since first touch of memory costs more than anything else.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from . import machine


class Unavailable(Exception):
    """A contender cannot run here; the message is the reason that the table shows."""


@dataclass(frozen=True)
class Turn:
    """What one entry measured in one round: figures by name, and the raw details behind them."""

    figures: dict[str, float]
    details: dict[str, Any] = field(default_factory=dict)


class Entry(Protocol):
    """Anything that takes a turn in each round."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    def turn(self) -> Turn: ...
    def close(self) -> None: ...


@dataclass
class Record:
    """All that is known of one entry, as it goes into the JSON file."""

    description: str
    figures: dict[str, list[float]] = field(default_factory=dict)  # one value per counted round
    first: dict[str, float] = field(default_factory=dict)  # the first turn of all, nothing warm
    details: list[dict[str, Any]] = field(default_factory=list)
    unavailable: str | None = None


@dataclass(frozen=True)
class Spread:
    """The distribution of a figure over the rounds."""

    median: float
    low: float
    high: float
    quartiles: tuple[float, float]
    count: int


def spread(samples: Sequence[float]) -> Spread:
    """Summarise at least one sample."""
    ordered = sorted(samples)
    if len(ordered) > 1:
        first, _, third = statistics.quantiles(ordered, n=4, method="inclusive")
    else:
        first = third = ordered[0]
    middle = statistics.median(ordered)
    return Spread(middle, ordered[0], ordered[-1], (first, third), len(ordered))


def order(names: Sequence[str], number: int) -> list[str]:
    """The names rotated by the round's number, in odd rounds backwards (other neighbours)."""
    shift = number % max(1, len(names))
    turned = [*names[shift:], *names[:shift]]
    return turned[::-1] if number % 2 else turned


def run(entries: Sequence[Entry], rounds: int, warmup: int) -> dict[str, Any]:
    """Run all entries; an entry that fails is out of the race, with its reason, not the run."""
    by_name = {entry.name: entry for entry in entries}
    records = {name: Record(entry.description) for name, entry in by_name.items()}
    log: list[dict[str, Any]] = []
    for number in range(-warmup, rounds):
        names = order([n for n in by_name if records[n].unavailable is None], number % 1000)
        before = machine.noise()
        for name in names:
            _take_turn(by_name[name], records[name], number)
        after = machine.noise()
        log.append(
            {
                "round": number,
                "order": names,
                "load": after["load"],
                "steal_seconds": after["steal"] - before["steal"],
            }
        )
    for entry in entries:
        _close(entry)
    return {"rounds": log, "entries": {name: asdict(r) for name, r in records.items()}}


def say(text: str) -> None:
    """Progress, for whoever waits; results go to standard output."""
    print(text, file=sys.stderr, flush=True)


def _close(entry: Entry) -> None:
    try:
        entry.close()
    except Exception as error:  # the figures are there already
        say(f"{entry.name}: closing failed: {error}")


def _take_turn(entry: Entry, record: Record, number: int) -> None:
    gc.collect()
    start = time.perf_counter()
    try:
        turn = entry.turn()
    except Unavailable as reason:
        record.unavailable = str(reason)
        turn = Turn({})
    except Exception as error:
        record.unavailable = f"failed in round {number}: {type(error).__name__}: {error}"
        say(traceback.format_exc())
        turn = Turn({})
    if number < 0:
        record.first = record.first or turn.figures
    else:
        for name, value in turn.figures.items():
            record.figures.setdefault(name, []).append(value)
        record.details.append({"round": number, **turn.details})
    found = " ".join(f"{name}={value:.3f}" for name, value in turn.figures.items())
    label = "warm-up" if number < 0 else f"round {number}"
    took = time.perf_counter() - start
    say(f"{label} {entry.name} ({took:.0f} s): {record.unavailable or found}")

"""Writing beside the copy or after it: measured, explained, and never a matter of the bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptengine as ce
from ckptengine.engine.pace import Pace
from ckptengine.snapshot.copier import Copier

Identical = Callable[[Any, Any], bool]
NBYTES = 1 << 30


def played(pace: Pace, alone: float, beside: float, saves: int) -> list[bool]:
    """The choices of so many saves on a machine where copies take so long."""
    chosen = []
    for _ in range(saves):
        chosen.append(pace.beside(NBYTES))
        pace.note(chosen[-1], NBYTES, beside if chosen[-1] else alone)
    return chosen


@pytest.mark.parametrize(("beside", "choice"), [(0.10, True), (0.11, True), (0.2, False)])
def test_both_ways_are_tried_and_the_better_one_is_kept(beside: float, choice: bool) -> None:
    pace = Pace(measure=True)
    chosen = played(pace, 0.1, beside, 10)
    assert chosen == [False, True, False, True, *[choice] * 6]
    assert f"{beside / 0.1:.2f} times" in pace.explain(choice)


def test_without_measuring_the_copy_is_alone() -> None:
    pace = Pace(measure=False)
    assert played(pace, 1.0, 0.1, 6) == [False] * 6
    assert pace.explain(False) == "written once copied"


def test_small_states_are_not_measured() -> None:
    pace = Pace(measure=True)
    for _ in range(6):
        assert pace.beside(1000)
        pace.note(True, 1000, 1.0)
    assert not pace.beside(NBYTES)


class Slow(Copier):
    """Does not end a copy before something has been written, or is known not to be."""

    def __init__(self, written: Callable[[], int]) -> None:
        super().__init__()
        self.written = written
        self.seen: list[int] = []

    def copy(self, moves: Any, announce: Any) -> None:
        super().copy(moves, announce)
        waiting = threading.Event()
        for _ in range(40):
            if self.written():
                break
            waiting.wait(0.05)
        self.seen.append(self.written())


@pytest.mark.parametrize("capture", ["copy", "auto"])
def test_a_call_that_does_not_wait_is_not_held_up_by_the_writing(
    run: Path, identical: Identical, capture: str
) -> None:
    state = {"large": torch.randn(20 << 20), "small": torch.randn(1000), "n": 1}
    with ce.Engine(run, capture=capture) as engine:
        engine._copier.close()
        engine._copier = slow = Slow(lambda: max(h.written() for h in engine.pending()))
        handle = engine.save_async(state, step=1)
        assert slow.seen == [0]
        assert handle.capture == "written once copied"
        handle.wait()
        engine.save(state, step=2)
        assert slow.seen[1] > 0
    for step in (1, 2):
        ce.verify(run, step=step)
        assert identical(ce.load(run, step=step).to_dict(), state)

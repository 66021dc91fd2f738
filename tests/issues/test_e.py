"""Rows E of the failure modes: what goes, what stays, and what deleting may cost."""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptengine as ce
from ckptengine.repository import Repository
from ckptengine.testing.faults import Faults
from ckptengine.testing.inline import inline_engine
from ckptengine.types import CheckpointId

Until = Callable[..., Any]

STATE = {"w": torch.arange(90_000.0)}


def steps(run: Path) -> list[int]:
    return [c.step for c in Repository(str(run)).ids()]


@pytest.mark.parametrize(
    ("losses", "left"),
    [
        ([3.0, 2.0, 1.0], [2]),  # the best is the newest
        ([1.0, 2.0, 3.0], [0, 2]),
        ([None, None, None], [2]),
        ([math.nan, math.nan, math.nan], [2]),
        ([1.0, None, None], [0, 2]),
    ],
)
def test_e01_a_limit_of_one_leaves_one(run: Path, losses: list[Any], left: list[int]) -> None:
    with ce.Engine(run, keep=ce.Keep(last=1, best=1, metric="loss")) as engine:
        for step, loss in enumerate(losses):
            engine.save(STATE, step=step, metrics={} if loss is None else {"loss": loss})
            assert engine.latest() is not None
    assert steps(run) == left
    with ce.Engine(run, keep=1) as engine:
        engine.save(STATE, step=9, candidate=True)
    assert steps(run) == [2, 9]


def test_e02_the_order_is_that_of_steps_not_of_clocks(run: Path) -> None:
    with ce.Engine(run, keep=2) as engine:
        for step in (7, 8, 9, 10, 11):
            path = engine.save(STATE, step=step).path
            for file in (path, *(os.path.join(path, name) for name in os.listdir(path))):
                os.utime(file, (1e9 - step * 1000, 1e9 - step * 1000))  # the newest looks oldest
    assert steps(run) == [10, 11]


def test_e05_the_best_is_kept_beside_the_newest(run: Path) -> None:
    with ce.Engine(run, keep=ce.Keep(last=2, best=1, metric="acc", mode="max")) as engine:
        for step, accuracy in enumerate([0.99, 0.5, 0.6, 0.7, 0.8]):
            engine.save(STATE, step=step, metrics={"acc": accuracy})
    assert steps(run) == [0, 3, 4]


def test_e05_what_is_read_and_what_was_restored_stay(run: Path, until: Until) -> None:
    with ce.Engine(run) as engine:
        for step in (1, 2, 3):
            engine.save(STATE, step=step)
    with ce.Engine(run, keep=1) as engine:
        engine.restore({"w": torch.zeros(90_000)}, step=2)
        with Repository(str(run)).hold(CheckpointId(1)):
            engine.save(STATE, step=4)
            until(lambda: steps(run) == [1, 2, 4])
        engine.save(STATE, step=5)
    assert steps(run) == [2, 5]


def test_e06_a_purge_counts_and_removes_only_what_is_committed(
    run: Path, faults: Faults, until: Until
) -> None:
    with ce.Engine(run, keep=2) as engine:
        for step in (10, 11):
            engine.save(STATE, step=step)
        faults.set("delete", "wait")
        engine.save(STATE, step=12)
        late = engine.save_async(STATE, step=20)  # captured while the purge is at work
        faults.await_hit("delete")
        assert not late.done()
        faults.set("rename", "wait")
        faults.go("delete")
        faults.await_hit("rename")
        # 20 is written and not committed: it counts for nothing, and nobody touches it.
        assert steps(run) == [11, 12]
        faults.go()
        late.wait()
    assert steps(run) == [12, 20]


def test_e08_a_directory_that_does_not_go_away_at_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    """As over NFS, where a file that somebody has open comes back under a hidden name."""
    real, refused = os.rmdir, []

    def rmdir(path: Any, *, dir_fd: Any = None) -> None:
        if ".trash" in os.fsdecode(path) and len(refused) < 2:
            refused.append(path)
            raise OSError(39, "Directory not empty")
        real(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", rmdir)
    with inline_engine(run, keep=1) as engine:
        for step in range(1, 4):
            engine.save(STATE, step=step)
        until(lambda: steps(run) == [3])
        engine.save(STATE, step=4)
        engine.save(STATE, step=5)
    assert len(refused) == 2
    assert sorted(os.listdir(run)) == [".owner", "step-00000005"]


def test_e09_slow_deletion_holds_up_neither_the_loop_nor_a_report(
    run: Path, faults: Faults
) -> None:
    with ce.Engine(run, keep=1, on_busy="error") as engine:
        engine.save(STATE, step=1)
        faults.set("remove", "wait")
        assert engine.save(STATE, step=2).step == 2  # reported before the deletion is done
        faults.await_hit("remove")
        begun = time.monotonic()
        handles = [engine.save_async(STATE, step=step) for step in (3, 4)]
        assert time.monotonic() - begun < 20
        assert steps(run) == [2]
        faults.go()
        for handle in handles:
            handle.wait()
    assert steps(run) == [4]


def test_e10_no_name_is_used_twice(run: Path, faults: Faults) -> None:
    """Saved again and again at one step, while older attempts are being deleted."""
    paths = []
    with ce.Engine(run, keep=1) as engine:
        for number in range(12):
            if number == 5:
                faults.set("delete", "wait")
                threading.Timer(0.2, faults.go).start()
            handle = engine.save_async(STATE, step=7)
            paths.append(handle.path)
    assert len(set(paths)) == 12
    assert [c.name for c in Repository(str(run)).ids()] == ["step-00000007.11"]


def test_e11_a_directory_that_is_removed_is_not_made_again(run: Path, faults: Faults) -> None:
    with ce.Engine(run) as engine:
        faults.set("write-2", "wait")
        handle = engine.save_async(STATE, step=1)
        faults.await_hit("write-2")
        shutil.rmtree(run)
        faults.go()
        with pytest.raises(ce.StoreError, match="ENOENT"):
            handle.wait()
        with pytest.raises(ce.StoreError, match="removed during the run"):
            engine.save(STATE, step=2)
    assert not run.exists()

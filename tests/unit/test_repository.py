"""What is visible, in which order, what is held, and how it goes."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptengine as ce
from ckptengine.format.manifest import Manifest
from ckptengine.repository import Hold, Repository, Taken
from ckptengine.store import local
from ckptengine.types import CheckpointId

STATE = {"w": torch.arange(100.0)}


def commit(root: Path, step: int, attempt: int = 0, **more: Any) -> Path:
    """A checkpoint without data."""
    root.mkdir(exist_ok=True)
    stage = Repository(str(root)).stage(CheckpointId(step, attempt))
    files = {"data": stage.put("data", b"x" * step)}
    return Path(stage.commit(Manifest(step, attempt, 0.0, 1, files, **more)))


def test_what_is_visible_and_in_which_order(run: Path) -> None:
    for step, attempt in [(100_000_000, 0), (99_999_999, 0), (5, 10), (5, 9), (5, 0), (0, 0)]:
        commit(run, step, attempt)
    for name in ("step-5", "step-00000007.0", "step-00000008.01", "step-00000009x", "step--0000001",
                 "step-000000010", ".tmp-step-00000050-x", ".trash-step-00000050-x", "STEP-00000003",
                 "step-" + "\u0660" * 8):  # fmt: skip
        (run / name).mkdir()
        shutil.copy(run / "step-00000000" / "manifest.json", run / name)
    (run / "step-00000006").mkdir()  # no record
    (run / "step-00000004").touch()  # no directory
    repository = Repository(str(run))
    assert [c.name for c in repository.ids()] == [
        "step-00000000",
        "step-00000005",
        "step-00000005.9",
        "step-00000005.10",
        "step-99999999",
        "step-100000000",
    ]
    assert CheckpointId(6) in repository.named()
    assert sorted(repository.leftovers()) == [".tmp-step-00000050-x", ".trash-step-00000050-x"]
    with pytest.raises(ce.IncompleteError, match=r"step-00000006.*manifest\.json"):
        repository.manifest(CheckpointId(6))
    with pytest.raises(ce.NotFoundError, match="step-00000004"):
        repository.manifest(CheckpointId(4))


def test_an_absent_directory_is_empty_and_an_unreadable_one_an_error(tmp_path: Path) -> None:
    assert Repository(str(tmp_path / "none")).ids() == []
    (tmp_path / "file").touch()
    with pytest.raises(ce.StoreError, match="ENOTDIR"):
        Repository(str(tmp_path / "file")).ids()


def test_nothing_is_visible_before_the_commit(run: Path) -> None:
    run.mkdir()
    repository = Repository(str(run))
    stage = repository.stage(CheckpointId(1))
    entry = stage.put("data", b"123")
    assert repository.named() == []
    assert repository.leftovers() == [os.path.basename(stage.path)]
    path = stage.commit(Manifest(1, 0, 0.0, 1, {"data": entry}))
    assert repository.ids() == [CheckpointId(1)]
    assert repository.leftovers() == []
    assert sorted(os.listdir(path)) == ["data", "manifest.json"]
    stage.discard()  # nothing of it is left to be discarded
    assert repository.intact(CheckpointId(1))


@pytest.mark.parametrize("there", ["a checkpoint", "an empty directory", "a file"])
def test_nothing_is_ever_overwritten(run: Path, there: str) -> None:
    run.mkdir()
    if there == "a checkpoint":
        commit(run, 1)
    elif there == "an empty directory":
        (run / "step-00000001").mkdir()
    else:
        (run / "step-00000001").write_text("mine")
    before = sorted(p.relative_to(run) for p in run.rglob("*"))
    stage = Repository(str(run)).stage(CheckpointId(1))
    with pytest.raises(ce.ConflictError, match="exists already"):
        stage.commit(Manifest(1, 0, 0.0, 1, {"data": stage.put("data", b"new")}))
    stage.discard()
    assert sorted(p.relative_to(run) for p in run.rglob("*")) == before


def test_without_the_kernels_help_a_checkpoint_is_still_not_overwritten(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        def renameat2(self, *args: Any) -> int:
            import ctypes

            ctypes.set_errno(22)
            return -1

    monkeypatch.setattr(local, "_libc", Libc())
    commit(run, 1)
    with pytest.raises(ce.ConflictError):
        commit(run, 1)


def test_intact_looks_at_every_size(run: Path) -> None:
    path = commit(run, 7)
    repository = Repository(str(run))
    assert repository.intact(CheckpointId(7))
    os.truncate(path / "data", 6)
    assert not repository.intact(CheckpointId(7))
    (path / "data").unlink()
    assert not repository.intact(CheckpointId(7))
    assert not repository.intact(CheckpointId(8))
    (commit(run, 9) / "manifest.json").write_text("{}")
    assert not repository.intact(CheckpointId(9))


def test_delete(run: Path) -> None:
    commit(run, 1)
    commit(run, 2)
    repository = Repository(str(run))
    assert repository.delete(CheckpointId(1))
    assert os.listdir(run) == ["step-00000002"]
    assert not repository.delete(CheckpointId(1))


def test_what_is_read_stays(run: Path) -> None:
    commit(run, 1)
    repository = Repository(str(run))
    with repository.hold(CheckpointId(1)), repository.hold(CheckpointId(1)):
        assert not repository.delete(CheckpointId(1))
    assert repository.ids() == [CheckpointId(1)]
    assert repository.delete(CheckpointId(1))
    with pytest.raises(ce.NotFoundError, match="step-00000001"):
        repository.hold(CheckpointId(1))


def test_what_another_process_reads_stays(run: Path) -> None:
    commit(run, 1)
    text = (
        f"import sys; from ckptengine.repository import *; from ckptengine.types import *\n"
        f"with Repository({str(run)!r}).hold(CheckpointId(1)): print('held', flush=True); input()"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert reader.stdout is not None and reader.stdout.readline() == "held\n"
        assert not Repository(str(run)).delete(CheckpointId(1))
    finally:
        reader.kill()
        reader.communicate()
    assert Repository(str(run)).delete(CheckpointId(1))


def test_a_deletion_between_opening_and_locking_is_seen(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(run, 1)
    repository = Repository(str(run))
    real = fcntl.flock

    def flock(fd: int, kind: int) -> None:
        monkeypatch.undo()
        assert repository.delete(CheckpointId(1))
        real(fd, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ce.NotFoundError, match="deleted"):
        repository.hold(CheckpointId(1))
    assert len(os.listdir("/proc/self/fd")) == before


def test_being_deleted_it_cannot_be_held(run: Path) -> None:
    path = commit(run, 1)
    with (path / "manifest.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ce.NotFoundError):
            Hold(str(path / "manifest.json"))


def test_a_loaded_mapping_keeps_its_checkpoint(run: Path, until: Callable[..., Any]) -> None:
    with ce.Engine(run, keep=1) as engine:
        engine.save(STATE, step=1)
        loaded = ce.load(run, step=1)
        engine.save(STATE, step=2)
        engine.save(STATE, step=3)
        until(lambda: engine.steps() == [1, 3], "2 has not gone, or 1 has")
        assert torch.equal(loaded["w"], STATE["w"])
        del loaded
        engine.save(STATE, step=4)
    assert [c.step for c in Repository(str(run)).ids()] == [4]


def test_the_permissions_are_those_of_the_umask(run: Path) -> None:
    before = os.umask(0o027)
    try:
        with ce.Engine(run) as engine:
            engine.save(STATE, step=1)
    finally:
        os.umask(before)
    assert {oct(p.stat().st_mode & 0o777) for p in run.rglob("*") if p.is_file()} == {"0o640"}
    assert {oct(p.stat().st_mode & 0o777) for p in run.rglob("*") if p.is_dir()} == {"0o750"}


def test_no_name_is_given_twice() -> None:
    assert Taken([]).next(None) == CheckpointId(0)
    taken = Taken([CheckpointId(1, 3), CheckpointId(1)])
    taken.add(CheckpointId(2))
    assert taken.next(1) == CheckpointId(1, 4)
    assert taken.next(2) == CheckpointId(2, 1)
    assert taken.next(None) == CheckpointId(3)
    assert taken.next(0) == CheckpointId(0)


def race(root: str, number: int, barrier: threading.Barrier) -> None:
    repository = Repository(root)
    for step in range(30):
        stage = repository.stage(CheckpointId(step))
        entry = stage.put("data", bytes([number]) * (number + 1) * 1000)
        barrier.wait(60)
        try:
            stage.commit(Manifest(step, 0, 0.0, 1, {"data": entry}, user=number))
        except ce.ConflictError:
            stage.discard()


def test_of_two_who_commit_one_name_one_wins_whole(run: Path, until: Callable[..., Any]) -> None:
    run.mkdir()
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as racers:
        for racer in [racers.submit(race, str(run), n, barrier) for n in (0, 1)]:
            racer.result(120)
    repository = Repository(str(run))
    assert [c.step for c in repository.ids()] == list(range(30))
    assert repository.leftovers() == []
    for checkpoint in repository.ids():
        found = repository.manifest(checkpoint)
        data = Path(repository.path(checkpoint), "data").read_bytes()
        assert data == bytes([found.user]) * (found.user + 1) * 1000

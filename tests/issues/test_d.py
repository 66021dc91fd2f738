"""Rows D of the failure modes: commit, what counts as the newest, crashes and paths."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptengine as ce
from ckptengine.format.manifest import Manifest
from ckptengine.repository import Repository
from ckptengine.testing.crash import Create, Rename, Sync, Write, record
from ckptengine.testing.faults import Faults
from ckptengine.testing.inline import inline_engine
from ckptengine.types import CheckpointId

Identical = Callable[[Any, Any], bool]
Launch = Callable[..., Any]
Until = Callable[..., Any]


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((90_000,), float(step)), "n": step}


def make(run: Path, *steps: int) -> None:
    with ce.Engine(run) as engine:
        for step in steps:
            engine.save(state(step), step=step)


def restored(run: Path, identical: Identical) -> ce.CheckpointInfo | None:
    """What a new run starts from, checked to the bit."""
    found = state(0)
    with ce.Engine(run) as engine:
        info = engine.restore(found)
    assert identical(found, state(info.step if info else 0))
    return info


def test_d01_neither_pointer_nor_retention_before_the_commit(
    run: Path, launch: Launch, identical: Identical
) -> None:
    faults = Faults(run.parent / "faults")
    program = launch(
        f"""
        import os, signal, torch, ckptengine as ce
        from ckptengine.testing.faults import Faults
        faults = Faults({str(faults.directory)!r})
        faults.install()
        engine = ce.Engine({str(run)!r}, keep=1)
        engine.save({{"w": torch.full((90_000,), 1.0), "n": 1}}, step=1)
        faults.set("write-2", "wait")
        engine.save_async({{"w": torch.full((90_000,), 2.0), "n": 2}}, step=2)
        faults.await_hit("write-2")
        os.kill(engine._pool.pid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    program.ends(-signal.SIGKILL)
    info = restored(run, identical)
    assert info is not None and info.step == 1


def test_d02_the_highest_number_is_not_the_newest_whole_one(
    run: Path, identical: Identical, caplog: pytest.LogCaptureFixture
) -> None:
    make(run, 10, 15)
    (run / "step-00000020").mkdir()
    os.truncate(run / "step-00000015" / "__0_0.distcp", 1000)
    info = restored(run, identical)
    assert info is not None and info.step == 10
    assert [text[:13] for text in info.report.fallen_back_from] == [
        "step-00000020",
        "step-00000015",
    ]
    assert "Passed over step-00000020" in caplog.text


def test_d03_saving_again_destroys_nothing(run: Path, faults: Faults, identical: Identical) -> None:
    with ce.Engine(run) as engine:
        engine.save(state(5), step=5)
        before = {p: p.read_bytes() for p in (run / "step-00000005").iterdir()}
        faults.set("sync-2", "kill")
        with pytest.raises(ce.WorkerDiedError):
            engine.save(state(99), step=5)
    assert {p: p.read_bytes() for p in (run / "step-00000005").iterdir()} == before
    info = restored(run, identical)
    assert info is not None and info.attempt == 0


def test_d05_leftovers_of_a_killed_save_are_no_obstacle(
    run: Path, launch: Launch, identical: Identical
) -> None:
    make(run, 5)
    program = launch(
        f"""
        import os, signal, torch, ckptengine as ce
        from ckptengine.testing.faults import Faults
        faults = Faults({str(run.parent / "faults")!r})
        faults.install()
        faults.set("sync-3", "kill")
        engine = ce.Engine({str(run)!r})
        try:
            engine.save({{"w": torch.zeros(90_000), "n": 10}}, step=10)
        except ce.WorkerDiedError:
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    program.ends(-signal.SIGKILL)
    assert Repository(str(run)).leftovers()
    info = restored(run, identical)
    assert info is not None and info.step == 5
    make(run, 10)
    assert Repository(str(run)).leftovers() == []
    info = restored(run, identical)
    assert info is not None and (info.step, info.attempt) == (10, 0)


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT"])
def test_d06_the_payload_fits_and_the_commit_record_does_not(
    run: Path, faults: Faults, identical: Identical, code: str
) -> None:
    make(run, 1)
    with ce.Engine(run) as engine:
        faults.set("sync-4", code)
        with pytest.raises(ce.StoreError, match=rf"{code} while writing .*manifest\.json"):
            engine.save(state(2), step=2)
        info = restored(run, identical)
        assert info is not None and info.step == 1
        engine.save(state(2), step=2)  # replayed, it collides with nothing
    info = restored(run, identical)
    assert info is not None and info.step == 2


def test_d07_only_unfinished_checkpoints_are_no_fresh_run(run: Path) -> None:
    make(run, 3)
    (run / "step-00000003" / "manifest.json").unlink()
    for _ in range(2):
        with ce.Engine(run) as engine, pytest.raises(ce.CorruptError) as caught:
            engine.restore(state(0))
        assert "does not start fresh by itself" in str(caught.value)
        assert "manifest.json" in caught.value.problems[0]


def test_d08_temporary_names_are_never_tried_and_are_swept(run: Path, identical: Identical) -> None:
    make(run, 10)
    for name in (".tmp-step-00000020-0123", ".trash-step-00000030-4567"):
        shutil.copytree(run / "step-00000010", run / name)
    (run / "step-00000020.tmp").mkdir()
    info = restored(run, identical)
    assert info is not None and info.step == 10
    assert info.report.fallen_back_from == ()
    make(run, 11)
    assert sorted(os.listdir(run)) == [
        ".owner", "step-00000010", "step-00000011", "step-00000020.tmp",
    ]  # fmt: skip


def recorded(run: Path) -> list[Any]:
    run.mkdir()
    with record(run) as recording, inline_engine(run) as engine:
        engine.save(state(1), step=1)
    return recording.ops


def test_d11_files_directory_rename_parent_are_synced_in_that_order(run: Path) -> None:
    ops = recorded(run)
    rename = next(i for i, op in enumerate(ops) if isinstance(op, Rename))
    stage = ops[rename].path
    synced = [op.path for op in ops[:rename] if isinstance(op, Sync)]
    names = ["__0_0.distcp", ".metadata", "index-0.zst", "manifest.json"]
    assert synced == [*(f"{stage}/{name}" for name in names), stage]
    assert [op.path for op in ops[rename + 1 :] if isinstance(op, Sync)] == [""]
    assert ops[rename].destination == "step-00000001"
    # The record comes last of all files.
    made = [op.path for op in ops if isinstance(op, Create) and op.path.startswith(stage + "/")]
    assert made[-1] == f"{stage}/manifest.json"


def test_d12_all_is_in_the_kernel_before_it_is_synced(run: Path) -> None:
    ops = recorded(run)
    files = {op.path for op in ops if isinstance(op, Write) and "/" in op.path}
    assert len(files) == 4
    for file in files:
        own = [op.call for op in ops if op.path == file and not isinstance(op, Create)]
        assert own[-2:] == ["fsync", "close"]
        assert own.count("fsync") == 1  # nothing is written after it


def test_d14_writers_have_names_of_their_own(run: Path) -> None:
    """Two at once, each time at one name: one wins, nothing is mixed, all that is seen parses."""
    run.mkdir()
    repository = Repository(str(run))
    together = threading.Barrier(2)
    lost: list[int] = []

    def write(number: int) -> None:
        for step in range(60):
            stage = repository.stage(CheckpointId(step))
            entry = stage.put("data", bytes([number]) * (step * 100 * (number + 1)))
            together.wait(60)
            try:
                stage.commit(Manifest(step, 0, 0.0, 1, {"data": entry}, user=number))
            except ce.ConflictError:
                lost.append(number)
                stage.discard()
            for checkpoint in repository.ids():
                assert repository.intact(checkpoint)

    threads = [threading.Thread(target=write, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(lost) == 60
    assert len(repository.ids()) == 60
    for checkpoint in repository.ids():
        winner = repository.manifest(checkpoint).user
        data = Path(repository.path(checkpoint), "data").read_bytes()
        assert data == bytes([winner]) * (checkpoint.step * 100 * (winner + 1))


def test_d18_no_pointer_that_could_dangle(
    tmp_path: Path, identical: Identical, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").mkdir()
    monkeypatch.chdir(tmp_path / "old")
    make(Path("run"), 1, 2)
    assert not [p for p in (tmp_path / "old").rglob("*") if p.is_symlink()]
    (tmp_path / "old").rename(tmp_path / "new")
    monkeypatch.chdir("/")
    info = restored(tmp_path / "new" / "run", identical)
    assert info is not None and info.step == 2
    assert info.path == str(tmp_path / "new" / "run" / "step-00000002")
    (tmp_path / "link").symlink_to("new")
    info = restored(tmp_path / "link" / "run", identical)
    assert info is not None and info.step == 2


def test_d20_one_place_whatever_it_is_written_as(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spellings = [
        "run",
        "run/",
        "./run",
        Path("run"),
        str(tmp_path / "run"),
        f"file://{tmp_path}/run",
    ]
    for step, spelling in enumerate(spellings):
        with ce.Engine(spelling) as engine:
            engine.save(state(step), step=step)
    assert os.listdir(tmp_path) == ["run"]
    assert len(Repository(str(tmp_path / "run")).ids()) == len(spellings)
    for wrong in ("s3:/bucket/run", Path("s3://bucket/run"), "memory:/run"):
        with pytest.raises(ce.ConfigError, match="two slashes"):
            ce.Engine(wrong)
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("left", [0, 0.5, None])
@pytest.mark.parametrize("name", ["__0_0.distcp", "index-0.zst", "manifest.json"])
def test_d22_files_that_are_empty_short_or_gone_are_named(
    run: Path, identical: Identical, left: float | None, name: str
) -> None:
    make(run, 1, 2)
    path = run / "step-00000002" / name
    if left is None:
        path.unlink()
    else:
        os.truncate(path, int(path.stat().st_size * left))
    with pytest.raises((ce.IncompleteError, ce.CorruptError), match=name):
        ce.verify(path.parent)
    with pytest.raises((ce.IncompleteError, ce.CorruptError), match=name):
        ce.load(path.parent)["w"]
    info = restored(run, identical)
    assert info is not None and info.step == 1
    assert name in info.report.fallen_back_from[0]


def test_d25_a_block_that_a_helper_thread_could_not_write_fails_the_save(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if len(data) >= 90_000 * 4:
            assert threading.current_thread() is not threading.main_thread()
            raise OSError(5, "Input/output error")
        return real(fd, data, offset)

    with inline_engine(run) as engine, monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(ce.StoreError, match=r"EIO while writing .*__0_0\.distcp"):
            engine.save(state(1), step=1)
        assert engine.steps() == []
    assert os.listdir(run) == [".owner"]


def test_d26_a_flipped_bit_is_noticed(run: Path) -> None:
    make(run, 1)
    path = run / "step-00000001" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(state(1)["w"].numpy().tobytes()) + 4 * 500] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(ce.CorruptError, match=r"__0_0\.distcp: a wrong checksum"):
        ce.load(run)["w"]
    with pytest.raises(ce.CorruptError, match=r"__0_0\.distcp"):
        ce.verify(run)
    with ce.Engine(run) as engine, pytest.raises(ce.CorruptError):
        engine.restore(state(0))


@pytest.mark.parametrize("options", ["size=1m", "size=64m,nr_inodes=5"])
def test_d27_a_full_disk_is_called_a_full_disk(tmp_path: Path, options: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)])
    if done.returncode:
        pytest.skip("NOT TESTED: this machine refuses to mount")
    try:
        with ce.Engine(disk / "run") as engine:
            with pytest.raises(ce.StoreError) as caught:
                engine.save({"w": torch.zeros(2_000_000)}, step=1)
            message = str(caught.value)
            assert "ENOSPC" in message and str(disk) in message and "are free" in message
            assert os.listdir(disk / "run") == [".owner"]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_d29_scheduled_is_not_saved(
    run: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckptengine")
    with ce.Engine(run) as engine:
        faults.set("rename", "wait")
        handle = engine.save_async(state(1), step=1)
        faults.await_hit("rename")  # written, and not committed
        assert caplog.messages == [f"Scheduling async checkpoint save at step 1 to {handle.path}"]
        assert not handle.done()
        assert engine.steps() == [] and engine.latest() is None
        assert not os.path.exists(handle.path)
        faults.go()
        handle.wait()
        assert caplog.messages[1].startswith(f"Committed checkpoint at step 1 to {handle.path}")
        assert engine.steps() == [1]


def test_d30_every_member_counts(run: Path, identical: Identical) -> None:
    make(run, 1, 2)
    whole = run / "step-00000002"
    names = sorted(os.listdir(whole))
    assert names == [".metadata", "__0_0.distcp", "index-0.zst", "manifest.json"]
    for name in names:
        (whole / name).rename(run / "away")
        with pytest.raises(ce.CheckpointError, match=name):
            ce.verify(whole)
        assert not Repository(str(run)).intact(CheckpointId(2))
        if name != ".metadata":  # which only others read
            info = restored(run, identical)
            assert info is not None and info.step == 1
        (run / "away").rename(whole / name)
    assert ce.verify(whole).step == 2

"""One trainer a directory, told from the dead by locks that die with their process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptengine as ce
from ckptengine.cli.main import main
from ckptengine.store.ownership import NAME, Ownership, await_orphan, check_unchanged

HOLD = "import sys; from ckptengine.store.ownership import *; o = Ownership({root!r}, 1.0); "


def holder(root: Path) -> subprocess.Popen[str]:
    """Another process that owns `root`."""
    text = HOLD.format(root=str(root)) + "print('held', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_another_process_is_named(run: Path) -> None:
    other = holder(run)
    try:
        with pytest.raises(ce.ConflictError, match=f"process {other.pid} on") as caught:
            Ownership(str(run), 1.0)
        assert str(run) in str(caught.value)
        (run / NAME).write_text("torn by a crash")
        with pytest.raises(ce.ConflictError, match=f"process {other.pid}"):
            Ownership(str(run), 1.0)
    finally:
        other.kill()
        other.communicate()
    Ownership(str(run), 1.0).release()


def test_two_in_one_process(run: Path) -> None:
    first = Ownership(str(run), 1.0)
    with pytest.raises(ce.ConflictError, match="another engine of this process"):
        Ownership(str(run), 1.0)
    link = run.with_name("link")
    link.symlink_to(run)
    with pytest.raises(ce.ConflictError, match="another engine of this process"):
        Ownership(str(link), 1.0)
    other = subprocess.run(
        [sys.executable, "-c", HOLD.format(root=str(run))], capture_output=True, text=True
    )
    assert "ConflictError" in other.stderr  # the second try did not drop the lock of the first
    first.release()
    first.release()
    Ownership(str(run), 1.0).release()


def test_a_forked_child_does_not_inherit_it_and_may_own_later(run: Path) -> None:
    first = Ownership(str(run), 1.0)
    ready_read, ready = os.pipe()
    go, go_write = os.pipe()
    child = os.fork()
    if not child:
        said = b"no conflict"
        try:
            Ownership(str(run), 1.0)
        except ce.ConflictError as error:
            said = str(error).encode()
        os.write(ready, said)
        os.read(go, 1)
        Ownership(str(run), 1.0)
        os._exit(0)
    assert f"process {os.getpid()} on" in os.read(ready_read, 4096).decode()
    first.release()
    os.write(go_write, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for fd in (ready_read, ready, go, go_write):
        os.close(fd)


def test_the_note_is_whole_whatever_was_there(run: Path) -> None:
    run.mkdir()
    (run / NAME).write_text("x" * 10_000)
    owner = Ownership(str(run), 1.0)
    assert json.loads((run / NAME).read_text())["pid"] == os.getpid()
    owner.release()


def test_missing_parents_are_made_and_other_failures_told(tmp_path: Path) -> None:
    Ownership(str(tmp_path / "a" / "b" / "c"), 1.0).release()
    (tmp_path / "file").touch()
    with pytest.raises(ce.StoreError, match="ENOTDIR"):
        Ownership(str(tmp_path / "file" / "run"), 1.0)


def test_await_orphan_returns_where_nobody_is(run: Path) -> None:
    await_orphan(str(run), 1.0)
    owner = Ownership(str(run), 1.0)
    await_orphan(str(run), 1.0)
    other = subprocess.run(
        [sys.executable, "-c", HOLD.format(root=str(run))], capture_output=True, text=True
    )
    assert "ConflictError" in other.stderr  # looking did not drop the lock
    owner.release()
    await_orphan(str(run), 1.0)


def test_a_reader_does_not_wait_for_a_run_that_lives(run: Path) -> None:
    other = holder(run)
    try:
        await_orphan(str(run), 600.0)
    finally:
        other.kill()
        other.communicate()


def test_check_unchanged(run: Path) -> None:
    owner = Ownership(str(run), 1.0)
    check_unchanged(str(run), owner.key)
    (run / NAME).rename(run / "other")
    with pytest.raises(FileNotFoundError):
        check_unchanged(str(run), owner.key)
    (run / NAME).touch()
    with pytest.raises(ce.ConflictError, match="replaced"):
        check_unchanged(str(run), owner.key)
    owner.release()


def test_two_engines_in_one_process(run: Path) -> None:
    state = {"w": torch.zeros(3)}
    with ce.Engine(run) as first, ce.Engine(run) as second:
        first.save(state, step=1)
        with pytest.raises(ce.ConflictError, match="another engine of this process"):
            second.save_async(state, step=2)
        # Looking and restoring are no conflict.
        assert second.steps() == [1]
        assert second.restore({"w": torch.ones(3)}) is not None
        first.save(state, step=2)
        first.close()
        assert second.save(state, step=3).step == 3


def test_two_engines_in_two_processes(run: Path, launch: Callable[..., Any]) -> None:
    program = launch(
        f"""
        import signal, torch, ckptengine as ce
        engine = ce.Engine({str(run)!r})
        engine.save({{"w": torch.zeros(3)}}, step=1)
        print("saved", flush=True)
        signal.pause()
        """
    )
    program.says("saved")
    with ce.Engine(run) as engine:
        with pytest.raises(ce.ConflictError, match=f"process {program.pid} on"):
            engine.save_async({"w": torch.zeros(3)}, step=2)
        assert engine.steps() == [1]
        os.kill(program.pid, signal.SIGKILL)
        program.ends(-signal.SIGKILL)
        assert engine.save({"w": torch.zeros(3)}, step=2).step == 2


def test_room_can_be_made_on_a_disk_without_a_free_byte(tmp_path: Path) -> None:
    where = tmp_path / "disk"
    where.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(where)])
    if done.returncode:
        pytest.skip("NOT TESTED: this machine refuses to mount")
    try:
        with ce.Engine(where / "run") as engine:
            for step in (1, 2, 3):
                engine.save({"w": torch.zeros(1000)}, step=step)
        with (where / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        os.truncate(where / "run" / NAME, 0)
        with (where / "filler2").open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        assert main(["gc", str(where / "run"), "--keep", "1"]) == 0
        with ce.Engine(where / "run") as engine:
            assert engine.steps() == [3]
            engine.save({"w": torch.zeros(1000)}, step=4)
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)

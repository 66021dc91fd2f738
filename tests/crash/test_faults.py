"""Stores that refuse: full, read-only, removed, limited, failing. The error names the cause, nothing
of the failed save stays, and the next one works once it can."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptengine as ce
from ckptengine.persist import direct
from ckptengine.repository import Repository
from ckptengine.store import local
from ckptengine.testing.faults import Faults
from ckptengine.testing.inline import inline_engine

Identical = Callable[[Any, Any], bool]
Until = Callable[..., Any]
Mount = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("family")


def state(nbytes: int = 400_000, step: int = 1) -> dict[str, Any]:
    return {"w": torch.arange(nbytes // 4, dtype=torch.float32) + step, "step": step}


def check_restored(root: Path, wanted: dict[str, Any], identical: Identical) -> None:
    found = {"w": torch.zeros_like(wanted["w"]), "step": -1}
    with ce.Engine(root) as engine:
        info = engine.restore(found)
    assert info is not None
    assert info.report.fallen_back_from == ()
    assert identical(found, wanted)
    assert ce.verify(root).step == info.step


def clean(root: Path) -> bool:
    """Whether there is nothing but whole checkpoints and the claim."""
    return all(
        name == ".owner" or (root / name / "manifest.json").exists() for name in os.listdir(root)
    )


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a tmpfs with options."""
    mounted: list[Path] = []

    def mount(options: str, *, at: Path | None = None, bind: Path | None = None) -> Path:
        where = at or tmp_path / f"mount{len(mounted)}"
        where.mkdir(exist_ok=True)
        how = ["--bind", str(bind)] if bind else ["-t", "tmpfs", "-o", options, "tmpfs"]
        done = subprocess.run(["mount", *how, str(where)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"NOT TESTED: this machine refuses to mount: {done.stderr}")
        mounted.append(where)
        if bind:
            subprocess.run(["mount", "-o", f"remount,bind,{options}", str(where)], check=True)
        return where

    if os.getuid() != 0:
        pytest.skip("NOT TESTED: only root can mount a full disk")
    yield mount
    for where in reversed(mounted):
        while os.path.ismount(where):
            subprocess.run(["umount", "--lazy", str(where)], check=True)


# -- full ------------------------------------------------------------------------------------------


def test_a_full_disk(mount: Mount, identical: Identical) -> None:
    root = mount("size=1m") / "run"
    with ce.Engine(root) as engine:
        small = state(100_000)
        engine.save(small, step=1)
        with pytest.raises(ce.StoreError, match="ENOSPC") as caught:
            engine.save(state(8_000_000), step=2)
        assert caught.value.errno == errno.ENOSPC
        message = str(caught.value)
        assert str(root) in message and "__0_0.distcp" in message
        wanted = re.search(r"writing (\d+) bytes", message)
        free = re.search(r"\((\d+) bytes and (\d+) files are free\)", message)
        assert wanted is not None and int(wanted[1]) > 8_000_000
        assert free is not None and 0 < int(free[1]) < 1 << 20
        assert clean(root)
        assert engine.steps() == [1]
        subprocess.run(["mount", "-o", "remount,size=16m", str(root.parent)], check=True)
        engine.save(state(8_000_000), step=2)
    check_restored(root, state(8_000_000), identical)


def test_no_inodes_left(mount: Mount, identical: Identical) -> None:
    root = mount("size=16m,nr_inodes=6") / "run"  # itself, run, .owner, the save's, two files
    with ce.Engine(root) as engine:
        with pytest.raises(ce.StoreError, match=r"ENOSPC .* 0 files are free"):
            engine.save(state(), step=1)
        assert clean(root)
        subprocess.run(["mount", "-o", "remount,nr_inodes=100", str(root.parent)], check=True)
        engine.save(state(), step=1)
    check_restored(root, state(), identical)


def test_every_size_of_a_disk_that_is_too_small(mount: Mount, identical: Identical) -> None:
    """One page more each time, so that each of the files is the one that does not fit."""
    disk = mount("size=8k")
    root = disk / "run"
    refused = set()
    with ce.Engine(root) as engine:
        for pages in range(2, 60):
            subprocess.run(["mount", "-o", f"remount,size={pages * 4}k", str(disk)], check=True)
            try:
                engine.save(state(30_000), step=1)
                break
            except ce.StoreError as error:
                assert error.errno == errno.ENOSPC
                file = re.search(r"bytes to \S*/([\w.-]+):", str(error))
                refused.add(file[1] if file else str(error))
            assert clean(root)
            assert engine.steps() == []
    assert {"__0_0.distcp", ".metadata", "index-0.zst", "manifest.json"} <= refused
    check_restored(root, state(30_000), identical)


def test_leftovers_of_a_dead_run_make_room_for_the_first_save(
    mount: Mount, identical: Identical
) -> None:
    root = mount("size=4m") / "run"
    left = root / ".tmp-step-00000007-0123456789ab"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").write_bytes(bytes(3_000_000))
    with ce.Engine(root) as engine:
        engine.save(state(2_000_000), step=1)
    check_restored(root, state(2_000_000), identical)


@pytest.mark.parametrize("point", ["stage", "write-1", "write-3", "sync-1", "sync-3", "rename"])
@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO", "EROFS", "ESTALE"])
def test_any_refusal_anywhere(
    run: Path, faults: Faults, identical: Identical, point: str, code: str
) -> None:
    with ce.Engine(run) as engine:
        engine.save(state(step=1), step=1)
        faults.set(point, code)
        handle = engine.save_async(state(step=2), step=2)
        with pytest.raises(ce.StoreError, match=code) as caught:
            handle.wait()
        assert caught.value.errno == getattr(errno, code)
        assert caught.value.retryable == (code == "ESTALE")
        assert str(run) in str(caught.value)
        assert clean(run)
        assert engine.steps() == [1]
        engine.save(state(step=3), step=3)
        assert engine.steps() == [1, 3]
    check_restored(run, state(step=3), identical)


def test_a_sync_that_fails_after_the_rename_is_an_error_and_no_loss(
    run: Path, faults: Faults, identical: Identical
) -> None:
    with ce.Engine(run) as engine:
        faults.set("sync-6", "EIO")
        with pytest.raises(ce.StoreError, match="EIO while committing"):
            engine.save(state(step=1), step=1)
        info = engine.save(state(step=2), step=1)
        assert info.attempt == 1
    check_restored(run, state(step=2), identical)


# -- read-only, removed, replaced ------------------------------------------------------------------


def test_a_read_only_file_system_can_be_restored_from_and_not_saved_to(
    mount: Mount, identical: Identical
) -> None:
    root = mount("size=4m") / "run"
    with ce.Engine(root) as engine:
        engine.save(state(), step=1)
    subprocess.run(["mount", "-o", "remount,ro", str(root.parent)], check=True)
    check_restored(root, state(), identical)
    with ce.Engine(root) as engine:
        with pytest.raises(ce.StoreError, match="EROFS") as caught:
            engine.save_async(state(), step=2)
        assert "read-only" in str(caught.value)
        assert engine.latest() is not None


def test_a_file_system_that_turns_read_only_during_the_run(
    mount: Mount, identical: Identical
) -> None:
    disk = mount("size=4m")
    root = disk / "run"
    with ce.Engine(root) as engine:
        engine.save(state(step=1), step=1)
        mount("ro", at=disk, bind=disk)
        with pytest.raises(ce.StoreError, match="EROFS"):
            engine.save(state(step=2), step=2)
        subprocess.run(["umount", str(disk)], check=True)
        engine.save(state(step=3), step=3)
    check_restored(root, state(step=3), identical)


@pytest.mark.parametrize("point", ["stage", "write-2", "sync-1", "commit", "rename"])
def test_the_directory_is_removed_in_a_save(run: Path, faults: Faults, point: str) -> None:
    with ce.Engine(run) as engine:
        engine.save(state(), step=1)
        faults.set(point, "wait")
        handle = engine.save_async(state(), step=2)
        faults.await_hit(point)
        shutil.rmtree(run)
        faults.go()
        with pytest.raises(ce.StoreError, match="ENOENT") as caught:
            handle.wait()
        assert "removed during the run" in str(caught.value)
        with pytest.raises(ce.StoreError, match="ENOENT"):
            engine.save(state(), step=3)
    assert not run.exists()


def test_the_directory_is_removed_before_the_first_write(run: Path, faults: Faults) -> None:
    with ce.Engine(run) as engine:
        engine._claim()
        shutil.rmtree(run)
        with pytest.raises(ce.StoreError, match="ENOENT"):
            engine.save(state(), step=1)
    assert not run.exists()


def test_the_directory_is_replaced_by_that_of_another_run(run: Path, identical: Identical) -> None:
    with ce.Engine(run) as old:
        old.save(state(step=1), step=1)
        run.rename(run.with_name("moved"))
        with ce.Engine(run) as new:
            new.save(state(step=2), step=2)
            with pytest.raises(ce.ConflictError, match="replaced"):
                old.save(state(step=9), step=9)
            new.save(state(step=3), step=3)
            assert new.steps() == [2, 3]
    check_restored(run, state(step=3), identical)


def test_a_directory_without_permission(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("NOT TESTED: needs a user to switch to")
    root = tmp_path / "run"
    with ce.Engine(root) as engine:
        engine.save(state(), step=1)
    with ce.Engine(root) as engine:
        os.seteuid(65534)
        try:
            # An unreadable store is not an empty one: no fresh run.
            for call in (
                engine.steps,
                lambda: engine.restore(state()),
                lambda: engine.save(state()),
            ):
                with pytest.raises(ce.StoreError, match="EACCES"):
                    call()
        finally:
            os.seteuid(0)


# -- limits of the process -------------------------------------------------------------------------


@contextlib.contextmanager
def limited(pid: int, kind: int, soft: int) -> Iterator[None]:
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, before)


def test_a_file_size_limit(run: Path, identical: Identical) -> None:
    with ce.Engine(run) as engine:
        engine.save(state(step=1), step=1)
        persister = engine._pool.pid()
        assert persister is not None
        with limited(persister, resource.RLIMIT_FSIZE, 300_000):
            with pytest.raises(ce.StoreError, match="EFBIG") as caught:
                engine.save(state(step=2), step=2)
            assert "ulimit -f" in str(caught.value)
        assert clean(run)
        engine.save(state(step=3), step=3)
        assert engine._pool.pid() == persister
    check_restored(run, state(step=3), identical)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


def test_each_number_of_open_files_that_is_too_small(run: Path, identical: Identical) -> None:
    """The trainer has room for 0, 1, 2, ... more descriptors. Whatever is the one too many, the
    error says so, nothing leaks, and the engine works afterwards."""
    refused = 0
    for more in range(40):
        root = run.with_name(f"run{more}")
        with ce.Engine(root) as engine:
            begun = open_files()
            taken = {int(fd) for fd in os.listdir("/proc/self/fd")}
            numbers = (n for n in range(1 << 20) if n not in taken)
            limit = next(n for i, n in enumerate(numbers) if i == more)
            try:
                with limited(0, resource.RLIMIT_NOFILE, limit):
                    engine.save(state(), step=1)
                if more > refused:
                    break
            except (ce.StoreError, ce.WorkerDiedError) as error:
                assert "EMFILE" in str(error) or "Too many open files" in str(error)
                refused += 1
                assert engine.pending() == []
                engine.save(state(), step=2)
            check_restored(root, state(), identical)
        assert open_files() <= begun  # the engine's own are gone too
    assert 8 < refused < 40


# -- what system calls may do ----------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "PART", 32 << 10)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("most", [1 << 13, 5000, 4096 + 17, 512])
def test_short_writes(
    run: Path, monkeypatch: pytest.MonkeyPatch, identical: Identical, most: int
) -> None:
    real = os.pwrite
    buffered = []

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if flags & os.O_DIRECT and most % 512:
            # The kernel may stop in the middle of a block, as on a full file system.
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            try:
                return real(fd, data[:most], offset)
            finally:
                fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        buffered.append(not flags & os.O_DIRECT)
        return real(fd, data[:most], offset)

    with inline_engine(run) as engine, monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        engine.save(state(), step=1)
    assert buffered
    if most % 4096:
        assert any(buffered)
    check_restored(run, state(), identical)


@pytest.mark.usefixtures("small_blocks")
def test_direct_writes_refused_at_the_switch(
    run: Path, monkeypatch: pytest.MonkeyPatch, identical: Identical
) -> None:
    real = fcntl.fcntl
    asked = []

    def refuse(fd: int, command: int, value: Any = 0) -> Any:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            asked.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with inline_engine(run) as engine:
        engine.save(state(), step=1)
    assert asked
    check_restored(run, state(), identical)


@pytest.mark.usefixtures("small_blocks")
def test_direct_writes_refused_at_the_first_write_of_all_threads_at_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, identical: Identical
) -> None:
    real = os.pwrite
    together = threading.Barrier(direct._DEPTH)
    switched = threading.Event()
    first = threading.local()

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if len(data) < direct.PART:
            return real(fd, data, offset)
        if not hasattr(first, "seen"):
            first.seen = True
            # All of them have a direct write on its way; one is refused, and only when that has
            # been dealt with the others are.
            refuses = OSError(errno.EINVAL, "Invalid argument")
            if together.wait(30) > 0:
                switched.wait(30)
            raise refuses
        return real(fd, data, offset)

    def stop_direct(writer: direct._Writer) -> None:
        real_stop(writer)
        switched.set()

    real_stop = direct._Writer._stop_direct
    with inline_engine(run) as engine, monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        patch.setattr(direct._Writer, "_stop_direct", stop_direct)
        engine.save(state(), step=1)
    assert switched.is_set()
    check_restored(run, state(), identical)


@pytest.mark.usefixtures("small_blocks")
def test_a_write_that_is_invalid_for_another_reason_is_an_error(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with inline_engine(run) as engine:
        monkeypatch.setattr(os, "pwrite", pwrite)
        with pytest.raises(ce.StoreError, match="EINVAL while writing"):
            engine.save(state(), step=1)
    assert clean(run)


def test_file_systems_without_these_calls(
    run: Path, monkeypatch: pytest.MonkeyPatch, identical: Identical
) -> None:
    """No fallocate, no renameat2, no fsync of directories, no locks."""
    real_sync, real_lock = os.fsync, fcntl.flock

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        real_sync(fd)

    def flock(fd: int, kind: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    class Libc:
        def __getattr__(self, name: str) -> Any:
            def missing(*args: Any) -> int:
                import ctypes

                ctypes.set_errno(errno.ENOSYS)
                return -1

            return missing

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(local, "_libc", Libc())
    with inline_engine(run, keep=1) as engine:
        engine.save(state(step=1), step=1)
        engine.save(state(step=2), step=2)
    assert [c.step for c in Repository(str(run)).named()] == [2]
    monkeypatch.setattr(fcntl, "flock", real_lock)
    check_restored(run, state(step=2), identical)


def test_reserving_space_is_tried_again_when_a_signal_breaks_it_off(
    run: Path, monkeypatch: pytest.MonkeyPatch, identical: Identical
) -> None:
    import ctypes

    real, left = local._libc, [errno.EINTR, errno.EINTR]

    class Libc:
        def __getattr__(self, name: str) -> Any:
            return self.fallocate if name == "fallocate" else getattr(real, name)

        def fallocate(self, *args: Any) -> int:
            if left:
                ctypes.set_errno(left.pop())
                return -1
            return int(real.fallocate(*args))

    monkeypatch.setattr(local, "_libc", Libc())
    with inline_engine(run) as engine:
        engine.save(state(), step=1)
    assert not left
    check_restored(run, state(), identical)


def test_a_persister_that_is_stopped_and_continued_all_the_time(
    mount: Mount, identical: Identical, until: Until
) -> None:
    root = mount("size=64m") / "run"
    with ce.Engine(root) as engine:
        engine.save(state(step=0), step=0)
        persister = engine._pool.pid() or 0
        handle = engine.save_async(state(20_000_000, step=1), step=1)
        while not handle.done():
            os.kill(persister, signal.SIGSTOP)
            os.kill(persister, signal.SIGCONT)
        handle.wait()
    check_restored(root, state(20_000_000, step=1), identical)


# -- a file system in user space -------------------------------------------------------------------

FUSE = """
import errno, os, sys
from fuse import FUSE, FuseOSError, Operations

class Faulty(Operations):
    "A directory, but for ENOSPC after a budget of bytes and EIO on a sync while 'bad' exists."

    def __init__(self, root, budget):
        self.root, self.left = root, budget

    def path(self, name):
        return os.path.join(self.root, name.lstrip("/"))

    def __call__(self, op, path, *args):
        try:
            return getattr(self, op)(path, *args)
        except FuseOSError:
            raise
        except OSError as error:
            raise FuseOSError(error.errno) from None

    def getattr(self, path, fh=None):
        found = os.lstat(self.path(path))
        return {key: getattr(found, key) for key in dir(found) if key.startswith("st_")}

    def statfs(self, path):
        found = os.statvfs(self.root)
        return {key: getattr(found, key) for key in dir(found) if key.startswith("f_")
                and key != "f_fsid"}

    def readdir(self, path, fh):
        return [".", "..", *os.listdir(self.path(path))]

    def mkdir(self, path, mode):
        os.mkdir(self.path(path), mode)

    def rmdir(self, path):
        os.rmdir(self.path(path))

    def create(self, path, mode, fi=None):
        return os.open(self.path(path), os.O_RDWR | os.O_CREAT, mode)

    def open(self, path, flags):
        return os.open(self.path(path), flags & ~os.O_DIRECT)

    def read(self, path, size, offset, fh):
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        if len(data) > self.left:
            raise FuseOSError(errno.ENOSPC)
        self.left -= len(data)
        return os.pwrite(fh, data, offset)

    def fsync(self, path, datasync, fh):
        if os.path.exists(self.path("bad")):
            raise FuseOSError(errno.EIO)
        os.fsync(fh)

    def release(self, path, fh):
        os.close(fh)

    def unlink(self, path):
        os.unlink(self.path(path))

    def truncate(self, path, length, fh=None):
        os.truncate(self.path(path), length)

    def rename(self, old, new):
        os.rename(self.path(old), self.path(new))

FUSE(Faulty(sys.argv[1], int(sys.argv[3])), sys.argv[2], foreground=True, big_writes=True)
"""


@pytest.fixture
def fuse(tmp_path: Path, until: Until) -> Iterator[Callable[[int], tuple[Path, Path]]]:
    """Mounts a file system with a budget of bytes; returns it and the directory behind it."""
    probe = subprocess.run([sys.executable, "-c", "import fuse"], capture_output=True)
    if probe.returncode or not os.path.exists("/dev/fuse"):
        pytest.skip(
            "NOT TESTED: needs fusepy and libfuse2 (pip install fusepy, apt install libfuse2)"
        )
    started: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(budget: int) -> tuple[Path, Path]:
        behind, front = tmp_path / "behind", tmp_path / "front"
        behind.mkdir()
        front.mkdir()
        program = tmp_path / "faulty.py"
        program.write_text(FUSE)
        process = subprocess.Popen(
            [sys.executable, str(program), str(behind), str(front), str(budget)]
        )
        started.append((process, front))
        until(lambda: os.path.ismount(front))
        return front, behind

    yield start
    for process, front in started:
        subprocess.run(["umount", "--lazy", str(front)], check=True)
        process.wait(30)


def test_a_fuse_file_system_that_runs_full_and_fails_to_sync(
    fuse: Callable[[int], tuple[Path, Path]], identical: Identical
) -> None:
    front, behind = fuse(1_000_000)
    root = front / "run"
    with ce.Engine(root) as engine:
        engine.save(state(step=1), step=1)
        (behind / "bad").touch()
        with pytest.raises(ce.StoreError, match="EIO"):
            engine.save(state(step=2), step=2)
        (behind / "bad").unlink()
        with pytest.raises(ce.StoreError, match="ENOSPC"):
            engine.save(state(step=3), step=3)
        assert clean(root)
        assert engine.steps() == [1]
    check_restored(root, state(step=1), identical)

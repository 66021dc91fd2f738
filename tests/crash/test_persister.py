"""Whoever dies, and whenever: the other one notices, says why, and the run goes on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ckptengine as ce
from ckptengine.repository import Repository
from ckptengine.testing.faults import POINTS, Faults

Identical = Callable[[Any, Any], bool]
Until = Callable[..., Any]
Family = Callable[[], list[int]]

pytestmark = pytest.mark.usefixtures("family")

BEFORE_THE_COMMIT = ["stage", "write-1", "write-2", "sync-1", "sync-4", "commit", "rename"]
AFTER_THE_COMMIT = ["committed"]
DURING_RETENTION = ["delete", "remove"]
SOON = 30.0  # seconds; what is meant is a few, on a machine that may be busy


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((90_000,), float(step)), "step": step}


def restored(run: Path) -> tuple[ce.CheckpointInfo | None, dict[str, Any]]:
    found: dict[str, Any] = {"w": torch.zeros(90_000), "step": -1}
    with ce.Engine(run) as engine:
        return engine.restore(found), found


def names(run: Path) -> list[str]:
    return sorted(os.listdir(run))


@pytest.mark.parametrize("point", [*BEFORE_THE_COMMIT, *AFTER_THE_COMMIT])
@pytest.mark.parametrize(
    ("action", "named"), [("kill", r"signal 9 \(SIGKILL\)"), ("exit", "exited with status 3")]
)
def test_its_death_reaches_the_handle_and_the_next_save_works(
    run: Path, faults: Faults, identical: Identical, point: str, action: str, named: str
) -> None:
    with ce.Engine(run) as engine:
        engine.save(state(1), step=1)
        faults.set(point, action)
        begun = time.monotonic()
        handle = engine.save_async(state(2), step=2)
        with pytest.raises(ce.WorkerDiedError, match=named):
            handle.wait()
        assert time.monotonic() - begun < SOON
        assert handle.done()
        assert isinstance(handle.exception(), ce.WorkerDiedError)
        committed = point in AFTER_THE_COMMIT
        assert engine.steps() == ([1, 2] if committed else [1])
        info = engine.save(state(3), step=3)
        assert engine.steps() == ([1, 2, 3] if committed else [1, 3])
        assert Repository(str(run)).leftovers() == []
    assert ce.verify(info.path).step == 3
    found, values = restored(run)
    assert found is not None and found.step == 3
    assert identical(values, state(3))


@pytest.mark.parametrize("call", ["save_async", "restore", "wait", "close"])
def test_a_death_that_nobody_asked_for_is_raised_by_the_next_call(
    run: Path, faults: Faults, until: Until, call: str
) -> None:
    faults.set("commit", "kill")
    engine = ce.Engine(run)
    handle = engine.save_async(state(1), step=1)
    until(handle.done)
    calls: dict[str, Callable[[], Any]] = {
        "save_async": lambda: engine.save_async(state(2), step=2),
        "restore": lambda: engine.restore({}),
        "wait": engine.wait,
        "close": engine.close,
    }
    with pytest.raises(ce.WorkerDiedError, match="signal 9"):
        calls[call]()
    engine.close()  # it has been told once


@pytest.mark.parametrize("point", DURING_RETENTION)
@pytest.mark.parametrize("action", ["kill", "exit", "crash", "EIO"])
def test_a_fault_in_retention_does_not_fail_the_save(
    run: Path, faults: Faults, until: Until, point: str, action: str
) -> None:
    with ce.Engine(run, keep=1) as engine:
        engine.save(state(1), step=1)
        faults.set(point, action)
        assert engine.save(state(2), step=2).step == 2
        faults.await_hit(point)
        if action in ("kill", "exit"):
            until(lambda: engine._pool.pid() is None)
        assert engine.save(state(3), step=3).step == 3
    assert names(run) == [".owner", "step-00000003"]
    assert ce.verify(run).step == 3


@pytest.mark.parametrize("point", ["stage", "write-2", "commit"])
def test_one_that_stops_is_ended_after_the_timeout(run: Path, faults: Faults, point: str) -> None:
    faults.set(point, "stop")
    with ce.Engine(run, timeout=1.0) as engine:
        handle = engine.save_async(state(1), step=1)
        with pytest.raises(ce.StoreError, match="no progress for 1 s") as caught:
            handle.wait()
        assert caught.value.retryable
        assert engine.save(state(2), step=2).step == 2
        assert engine.steps() == [2]
    assert names(run) == [".owner", "step-00000002"]


def test_waiting_for_a_save_counts_the_progress_of_those_before_it(
    run: Path, faults: Faults, until: Until
) -> None:
    """The first one is slow, but moves; the second has nothing to show until it is its turn."""
    with ce.Engine(run, timeout=1.5) as engine:
        faults.set("write-2", "wait")
        first = engine.save_async(state(1), step=1)
        second = engine.save_async(state(2), step=2)
        progress = engine.progress

        def moving() -> object:
            return progress(), time.monotonic()  # as if blocks of the first were written

        engine.progress = moving  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            second.wait(timeout=3.0)
        faults.go()
        assert second.wait().step == 2
        assert first.wait().step == 1


def test_a_trainer_that_was_suspended_blames_nobody(
    run: Path, launch: Callable[..., Any], until: Until
) -> None:
    """The whole job is stopped for longer than the timeout, as a scheduler does, and goes on."""
    program = launch(
        f"""
        import torch, ckptengine as ce
        from ckptengine.testing.faults import POINTS, Faults
        faults = Faults({str(run.parent / "faults")!r})
        faults.install()
        with ce.Engine({str(run)!r}, timeout=1.0) as engine:
            faults.set("write-2", "stop")
            handle = engine.save_async({{"w": torch.ones(90_000)}}, step=1)
            faults.await_hit("write-2")
            print(engine._pool.pid(), flush=True)
            print("waiting", flush=True)
            print("committed", handle.wait().step)
        """
    )
    persister = int(program.says("waiting").split()[0])
    os.kill(program.pid, signal.SIGSTOP)
    until(lambda: psutil.Process(program.pid).status() == psutil.STATUS_STOPPED)
    stopped_for = time.monotonic() + 2.0
    until(lambda: time.monotonic() > stopped_for)
    os.kill(persister, signal.SIGCONT)
    os.kill(program.pid, signal.SIGCONT)
    assert "committed 1" in program.ends()


def test_a_death_between_two_saves_is_nobodys_loss(run: Path, until: Until) -> None:
    with ce.Engine(run) as engine:
        engine.save(state(1), step=1)
        pid = engine._pool.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: engine._pool.pid() is None)
        assert engine.save(state(2), step=2).step == 2
        assert engine._pool.pid() != pid
        os.kill(engine._pool.pid() or 0, signal.SIGKILL)
    assert ce.verify(run).step == 2


def test_results_sent_before_it_died_count(run: Path, faults: Faults, until: Until) -> None:
    faults.set("delete", "kill")
    with ce.Engine(run, keep=1) as engine:
        engine.save(state(1), step=1)
        handles = [engine.save_async(state(step), step=step) for step in (2, 3)]
        outcomes = [handle.join() and handle.exception() for handle in handles]
        # The first was committed before it died; the second had been handed over, unread.
        assert outcomes[0] is None
        assert isinstance(outcomes[1], ce.WorkerDiedError)


def test_a_trainer_that_dies_with_results_unread_has_its_other_save_done(
    run: Path, launch: Callable[..., Any], until: Until, family: Family
) -> None:
    program = launch(
        f"""
        import signal, torch, ckptengine as ce
        from ckptengine.testing.faults import POINTS, Faults
        faults = Faults({str(run.parent / "faults")!r})
        faults.install()
        engine = ce.Engine({str(run)!r}, keep=1)
        engine.save({{"w": torch.ones(9)}}, step=1)
        faults.set("write-1", "wait")
        engine.save_async({{"w": torch.ones(9)}}, step=2)
        faults.await_hit("write-1")
        engine.save_async({{"w": torch.ones(9)}}, step=3)
        engine._pool._lock.acquire()  # so that its watcher takes no more results
        faults.set("delete", "wait")
        faults.go("write-1")
        faults.await_hit("delete")
        print("ready", flush=True)
        signal.pause()
        """
    )
    program.says("ready")
    program.process.kill()
    program.ends(-signal.SIGKILL)
    Faults(run.parent / "faults").go()
    until(lambda: not family(), "the persister has not left")
    assert names(run) == [".owner", "step-00000003"]


def test_its_death_is_seen_when_the_next_job_is_handed_over(
    run: Path, faults: Faults, until: Until
) -> None:
    """The trainer hands a job to a process whose death its watcher has not yet seen: the job in
    between is lost and said to be, the new one is not."""
    with ce.Engine(run) as engine:
        faults.set("write-2", "wait")
        first = engine.save_async(state(1), step=1)
        faults.await_hit("write-2")
        pool = engine._pool
        with pool._lock:  # the watcher cannot note it
            os.kill(pool.pid() or 0, signal.SIGKILL)
            until(lambda: not psutil.pid_exists(pool.pid() or 0))
            second = engine.save_async(state(2), step=2)
        assert second.wait().step == 2
        with pytest.raises(ce.WorkerDiedError, match="signal 9"):
            first.wait()
    assert Repository(str(run)).leftovers() == []


def faults_at_random(run: Path, faults: Faults, identical: Identical, until: Until, n: int) -> None:
    """Saves with a fault of any kind at any point, one after the other. What an engine says is
    there, is; what it says failed has left nothing; and it always goes on."""
    rng = random.Random(n)
    counts: dict[str, int] = {}
    committed: set[int] = set()
    with ce.Engine(run, timeout=0.5, keep=ce.Keep(last=3, every=10)) as engine:
        for step in range(n):
            for file in faults.directory.iterdir():  # that of the last round may not have struck
                file.unlink(missing_ok=True)
            point, action = (
                rng.choice(POINTS),
                rng.choice(["kill", "exit", "stop", "crash", "EIO", ""]),
            )
            if action:
                faults.set(point, action)
            saves = [engine.save_async(state(step), step=step)]
            if rng.random() < 0.3:
                with contextlib.suppress(ce.CheckpointError):  # of the first, if it failed already
                    saves.append(engine.save_async(state(step), step=step))
            for save in saves:
                save.join()
                error = save.exception()
                assert error is None or isinstance(error, ce.CheckpointError)
                if error is None:
                    committed.add(step)
                    assert ce.verify(save.path).step == step
                counts[type(error).__name__] = counts.get(type(error).__name__, 0) + 1
            newest = engine.latest()
            # A persister that dies, or fails to sync, once the name is there may have been too late.
            assert newest is None or newest.step in committed | {step}
            assert max(committed, default=-1) <= (newest.step if newest else -1)
            committed |= {newest.step} if newest else set()
        for file in faults.directory.iterdir():
            file.unlink(missing_ok=True)
        engine.abort()
        engine.save(state(n), step=n)
    assert len(counts) >= 3 and counts["NoneType"] > n // 4, counts
    found, values = restored(run)
    assert found is not None and found.step == n
    assert identical(values, state(n))
    steps = {c.step for c in Repository(str(run)).ids()}
    assert {step for step in committed if step % 10 == 0} <= steps
    assert Repository(str(run)).leftovers() == []


def test_faults_at_random(run: Path, faults: Faults, identical: Identical, until: Until) -> None:
    faults_at_random(run, faults, identical, until, 20)


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
def test_many_faults_at_random(
    run: Path, faults: Faults, identical: Identical, until: Until, seed: int
) -> None:
    faults_at_random(run, faults, identical, until, 150 + seed)


def forkserver(engine: ce.Engine) -> int:
    server = engine._pool._server
    assert server is not None
    return server._process.pid


def test_the_fork_server_is_killed_between_saves(run: Path, until: Until) -> None:
    with ce.Engine(run) as engine:
        engine.save(state(1), step=1)
        os.kill(forkserver(engine), signal.SIGKILL)
        assert engine.save(state(2), step=2).step == 2  # its child lives on
        os.kill(engine._pool.pid() or 0, signal.SIGKILL)
        until(lambda: engine._pool.pid() is None)
        assert engine.save(state(3), step=3).step == 3
    assert ce.verify(run).step == 3


def test_the_fork_server_and_its_child_are_killed_in_a_save(run: Path, faults: Faults) -> None:
    faults.set("write-2", "wait")
    with ce.Engine(run) as engine:
        handle = engine.save_async(state(1), step=1)
        faults.await_hit("write-2")
        persister = engine._pool.pid() or 0
        os.kill(forkserver(engine), signal.SIGKILL)
        os.kill(persister, signal.SIGKILL)
        with pytest.raises(ce.WorkerDiedError, match=str(persister)):
            handle.wait()
        assert engine.save(state(2), step=2).step == 2


def test_no_fork_server_can_be_started(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ce.Engine(run) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(
                "ckptengine.persist.forkserver._BOOT", "import sys; sys.exit('no such day')"
            )
            with pytest.raises(ce.WorkerDiedError, match="no such day"):
                engine.save_async(state(1), step=1)
        assert engine.pending() == []
        assert engine.save(state(1), step=1).step == 1


# -- the trainer dies ------------------------------------------------------------------------------

TRAINER = """
import os, signal, sys, torch, ckptengine as ce
from ckptengine.testing.faults import POINTS, Faults
run, directory = {run!r}, {faults!r}
faults = Faults(directory)
faults.install()
{before}
engine = ce.Engine(run)
engine.save({{"w": torch.full((90_000,), 1.0), "step": 1}}, step=1)
{fault}
handle = engine.save_async({{"w": torch.full((90_000,), 2.0), "step": 2}}, step=2)
print(engine._pool.pid(), flush=True)
print("captured", flush=True)
signal.pause()
"""


def trainer(run: Path, fault: str = "", before: str = "") -> str:
    return TRAINER.format(
        run=str(run), faults=str(run.parent / "faults"), fault=fault, before=before
    )


def test_killed_right_after_the_call(
    run: Path, launch: Callable[..., Any], family: Family, until: Until, identical: Identical
) -> None:
    before = set(os.listdir("/dev/shm"))
    program = launch(trainer(run))
    program.says("captured")
    program.process.kill()
    program.ends(-signal.SIGKILL)
    until(lambda: not family(), "the persister has not left")
    found, values = restored(run)
    assert found is not None and found.step == 2
    assert identical(values, state(2))
    assert names(run) == [".owner", "step-00000001", "step-00000002"]
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "ckptengine" in name]


@pytest.mark.parametrize("point", ["write-1", "commit", "committed"])
def test_its_whole_process_group_is_killed_and_a_successor_waits(
    run: Path,
    launch: Callable[..., Any],
    until: Until,
    identical: Identical,
    point: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = Faults(run.parent / "faults")
    program = launch(trainer(run, f"faults.set({point!r}, 'wait')"), start_new_session=True)
    program.says("captured")
    faults.await_hit(point)
    os.killpg(program.pid, signal.SIGKILL)
    program.ends(-signal.SIGKILL)
    persister = int(program.output().split()[0])
    assert psutil.Process(persister).status() != psutil.STATUS_ZOMBIE

    def go_once_it_waits() -> None:
        until(lambda: "waiting for the persister" in caplog.text)
        faults.go()

    with in_thread(go_once_it_waits):
        found, values = restored(run)
    assert found is not None and found.step == 2
    assert identical(values, state(2))
    until(lambda: not psutil.pid_exists(persister))


@contextlib.contextmanager
def in_thread(call: Callable[[], None]) -> Iterator[None]:
    import concurrent.futures

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(call)
        yield
        running.result(60)


def test_a_successor_fences_an_orphan_that_is_stuck(
    run: Path, launch: Callable[..., Any], until: Until
) -> None:
    faults = Faults(run.parent / "faults")
    program = launch(trainer(run, "faults.set('write-2', 'stop')"))
    program.says("captured")
    faults.await_hit("write-2")
    program.process.kill()
    program.ends(-signal.SIGKILL)
    with ce.Engine(run, timeout=1.0) as engine:
        found: dict[str, Any] = {"w": torch.zeros(90_000), "step": -1}
        info = engine.restore(found)
        assert info is not None and info.step == 1
        engine.save(state(3), step=3)
        assert engine.steps() == [1, 3]
        until(lambda: not psutil.pid_exists(int(program.output().split()[0])))
    assert Repository(str(run)).leftovers() == []


def test_killed_in_the_middle_of_the_capture(
    run: Path, launch: Callable[..., Any], family: Family, until: Until
) -> None:
    before = """
import ckptengine.snapshot.capture as capture
real = capture.Capture._copy_by_torch
def dies(self, batch):
    if "second" in globals():
        faults.await_hit("stage")
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, batch)
capture.Capture._copy_by_torch = dies
real_moves = capture.Capture._moves
capture.Capture._moves = lambda self, batch: None
"""
    program = launch(
        trainer(
            run,
            "second = True; faults.set('stage', 'ENOENT'); "
            "os.rename(faults.directory / 'stage', faults.directory / 'stage.hit')",
            before,
        )
    )
    program.ends(-signal.SIGKILL)
    until(lambda: not family(), "the persister has not left")
    assert names(run) == [".owner", "step-00000001"]
    found, _ = restored(run)
    assert found is not None and found.step == 1


FORKED = {
    "a forked child that sleeps": """
child = os.fork()
if not child:
    signal.pause()
print(child, flush=True)
""",
    "a child that runs no hooks": """
import ckptengine.persist.pool
ckptengine.persist.pool._pools.clear()  # as when it is forked by a C library, or frozen at once
child = os.fork()
if not child:
    signal.pause()
print(child, flush=True)
""",
    "loader workers": """
class Forever(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        return torch.zeros(3)
loader = torch.utils.data.DataLoader(Forever(), num_workers=2, persistent_workers=True)
batches = iter(loader)
next(batches)
print(*(worker.pid for worker in batches._workers), flush=True)
""",
}


@pytest.mark.parametrize("kind", FORKED)
@pytest.mark.parametrize("pending", [True, False], ids=["in a save", "idle"])
def test_its_death_is_seen_although_children_hold_all_it_had_open(
    run: Path,
    launch: Callable[..., Any],
    until: Until,
    kind: str,
    pending: bool,
) -> None:
    faults = Faults(run.parent / "faults")
    text = trainer(run, "faults.set('write-2', 'wait')" if pending else "")
    text = text.replace('print("captured"', FORKED[kind] + '\nprint("captured"')
    program = launch(text)
    persister, *children = map(int, program.says("captured").split()[:-1])
    if pending:
        faults.await_hit("write-2")
    holders = [psutil.Process(child) for child in children]
    for holder in holders:  # loader workers would leave once they see their parent's death
        holder.suspend()
    program.process.kill()
    program.ends(-signal.SIGKILL)
    try:
        faults.go()
        until(lambda: not psutil.pid_exists(persister), "it did not see its trainer's death")
        assert all(holder.is_running() for holder in holders)
        found, _ = restored(run)
        assert found is not None and found.step == 2
        with ce.Engine(run) as engine:  # the dead run's claim is gone
            engine.save(state(3), step=3)
    finally:
        for holder in holders:
            holder.kill()

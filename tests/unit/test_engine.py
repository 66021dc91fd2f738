"""The life of an engine: who is told what, when, on which thread, and what stays usable."""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ckptengine as ce
from ckptengine import events
from ckptengine.engine.blob import PlanMemory
from ckptengine.repository import Repository
from ckptengine.snapshot.capture import Capture
from ckptengine.testing.faults import Faults

Identical = Callable[[Any, Any], bool]
Until = Callable[..., Any]
Launch = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("family")


def state(step: int = 1) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step)), "n": step}


def stored(run: Path, **which: Any) -> dict[str, Any]:
    return ce.load(run, **which).to_dict()


# -- steps and attempts ----------------------------------------------------------------------------


def test_a_step_is_counted_on_where_none_is_given(run: Path) -> None:
    with ce.Engine(run) as engine:
        assert engine.save(state()).step == 0
        assert engine.save(state()).step == 1
        assert engine.save(state(), step=40).step == 40
        assert engine.save(state(), candidate=True).step == 41
        assert engine.save(state()).step == 42
    with ce.Engine(run) as engine:
        assert engine.save(state()).step == 43


def test_a_step_saved_again_is_its_next_attempt(run: Path, identical: Identical) -> None:
    with ce.Engine(run) as engine:
        infos = [engine.save(state(n), step=5) for n in (1, 2)]
        third = engine.save_async(state(3), step=5)
        fourth = engine.save_async(state(4), step=5)
        engine.wait()
        assert [i.attempt for i in infos] + [third.id.attempt, fourth.id.attempt] == [0, 1, 2, 3]
        assert engine.steps() == [5]
    assert sorted(os.listdir(run)) == [
        ".owner",
        "step-00000005",
        *(f"step-00000005.{n}" for n in "123"),
    ]
    with ce.Engine(run) as engine:
        found = state(0)
        info = engine.restore(found)
        assert info is not None and (info.step, info.attempt) == (5, 3)
        assert identical(found, state(4))
        assert engine.save(state(5), step=5).attempt == 4
        older = engine.save(state(6), step=4)
        assert older.attempt == 0
        assert engine.steps() == [4, 5]


def test_a_step_that_failed_gives_its_attempt_up_for_good(run: Path, faults: Faults) -> None:
    with ce.Engine(run) as engine:
        faults.set("sync-4", "EIO")
        with pytest.raises(ce.StoreError):
            engine.save(state(), step=5)
        assert engine.save(state(), step=5).attempt == 1


def test_steps_of_nine_digits_and_faked_times(run: Path, identical: Identical) -> None:
    steps = [99_999_999, 100_000_000, 100_000_001, 1_234_567_890_123]
    with ce.Engine(run) as engine:
        for number, step in enumerate(reversed(steps)):
            path = engine.save(state(step % 97), step=step).path
            os.utime(path, (number * 1e6, number * 1e6))
        assert engine.steps() == steps
    with ce.Engine(run, keep=2) as engine:
        found = state(0)
        info = engine.restore(found)
        assert info is not None and info.step == steps[-1]
        assert identical(found, state(steps[-1] % 97))
        engine.save(state(), step=steps[-1] + 1)
    assert [c.step for c in Repository(str(run)).ids()] == [steps[-1], steps[-1] + 1]


# -- candidates ------------------------------------------------------------------------------------


def test_a_candidate_is_there_only_for_who_asks(run: Path, identical: Identical) -> None:
    with ce.Engine(run, keep=1) as engine:
        engine.save(state(1), step=1)
        info = engine.save(state(2), step=2, candidate=True)
        assert info.candidate
        assert engine.steps() == [1]
        latest = engine.latest()
        assert latest is not None and latest.step == 1
        found = state(0)
        restored = engine.restore(found)
        assert restored is not None and restored.step == 1 and not restored.candidate
        assert identical(found, state(1))
        asked = engine.restore(found, step=2)
        assert asked is not None and asked.candidate
        assert identical(found, state(2))


def test_only_candidates_are_a_fresh_run(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ce.Engine(run) as engine:
        engine.save(state(), step=1, candidate=True)
        assert engine.restore(state()) is None
        assert "Only candidates" in caplog.text
        assert engine.latest() is None
        assert engine.steps() == []
        with pytest.raises(ce.NotFoundError, match="step 7"):
            engine.restore(state(), step=7)


def test_best_is_kept_and_a_metric_that_is_none_is_worst(run: Path) -> None:
    with ce.Engine(run, keep=ce.Keep(best=1, metric="loss")) as engine:
        for step, loss in enumerate([0.5, 0.2, math.nan, 0.9, math.inf]):
            engine.save(state(), step=step, metrics={"loss": loss})
        engine.save(state(), step=5)
    assert [c.step for c in Repository(str(run)).ids()] == [1, 5]
    info = ce.verify(run, step=1)
    assert info.metrics == {"loss": 0.2}


# -- finalizations and listeners -------------------------------------------------------------------


def test_a_finalization_is_called_once_by_the_next_call_on_its_thread(
    run: Path, until: Until
) -> None:
    calls: list[tuple[int, threading.Thread]] = []

    def on_commit(info: ce.CheckpointInfo) -> None:
        assert os.path.exists(os.path.join(info.path, "manifest.json"))
        calls.append((info.step, threading.current_thread()))

    with ce.Engine(run) as engine:
        first = engine.save_async(state(), step=1, on_commit=on_commit)
        until(first.done)
        assert calls == []
        engine.save_async(state(), step=2, on_commit=on_commit)
        assert [step for step, _ in calls] == [1]
        engine.wait()
        engine.wait()
        engine.save(state(), step=3, on_commit=on_commit)
        assert [step for step, _ in calls] == [1, 2, 3]
        engine.save_async(state(), step=4, on_commit=on_commit)
    assert [step for step, _ in calls] == [1, 2, 3, 4]
    assert {thread for _, thread in calls} == {threading.current_thread()}


def test_a_finalization_is_not_called_for_what_failed(run: Path, faults: Faults) -> None:
    calls: list[Any] = []
    with ce.Engine(run) as engine:
        faults.set("sync-4", "EIO")
        handle = engine.save_async(state(), step=1, on_commit=calls.append)
        assert isinstance((handle.join(), handle.exception())[1], ce.StoreError)
        engine.wait()
    assert calls == []


def test_a_finalization_may_use_the_engine(run: Path) -> None:
    steps: list[int] = []
    with ce.Engine(run) as engine:

        def on_commit(info: ce.CheckpointInfo) -> None:
            steps.append(info.step)
            if info.step < 3:
                engine.save(state(), step=info.step + 1, on_commit=on_commit)
                engine.wait()

        engine.save(state(), step=1, on_commit=on_commit)
        assert steps == [1, 2, 3]
        assert engine.steps() == [1, 2, 3]


def test_a_finalization_that_raises_reaches_the_caller_and_the_others_are_called(
    run: Path, until: Until
) -> None:
    steps: list[int] = []

    def raises(info: ce.CheckpointInfo) -> None:
        raise ZeroDivisionError("of the user")

    with ce.Engine(run) as engine:
        handles = [
            engine.save_async(state(), step=1, on_commit=raises),
            engine.save_async(state(), step=2, on_commit=lambda info: steps.append(info.step)),
        ]
        for handle in handles:
            handle.join()
        with pytest.raises(ZeroDivisionError):
            engine.wait()
        engine.wait()
        assert steps == [2]


def test_finalizations_do_not_change_a_state_that_is_half_taken(
    run: Path, faults: Faults, identical: Identical
) -> None:
    """Both arenas are busy, so the save waits inside; finalizations that fall due meanwhile could
    change tensors after the plain values have been taken."""
    live = {"w": torch.zeros(1000), "n": 0}

    def on_commit(info: ce.CheckpointInfo) -> None:
        live["w"] += 100  # type: ignore[operator]
        live["n"] = -1

    with ce.Engine(run) as engine:
        faults.set("write-1", "wait")
        engine.save_async(live, step=1, on_commit=on_commit)
        engine.save_async(live, step=2)
        threading.Timer(0.2, faults.go).start()
        handle = engine.save_async(live, step=3)
        assert live["n"] == 0
        handle.wait()
        assert live["n"] == -1
    assert identical(stored(run, step=3), {"w": torch.zeros(1000), "n": 0})


def test_listeners_hear_of_everything_and_one_that_raises_costs_nothing(
    run: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[events.Event] = []

    def raises(event: events.Event) -> None:
        raise ZeroDivisionError("of the user")

    with ce.Engine(run) as engine:
        engine.add_listener(raises)
        engine.add_listener(heard.append)
        engine.save(state(), step=1)
        engine.restore(state())
        faults.set("sync-4", "EIO")
        with pytest.raises(ce.StoreError):
            engine.save(state(), step=2)
    assert [type(event).__name__ for event in heard if type(event) is not events.SaveScheduled] == [
        "SaveCommitted",
        "Restored",
        "SaveFailed",
    ]
    assert [e.step for e in heard if isinstance(e, events.SaveScheduled)] == [1, 2]
    committed = next(e for e in heard if isinstance(e, events.SaveCommitted))
    assert committed.info.step == 1
    assert committed.durable > 0
    assert caplog.text.count("a listener failed") == len(heard)


def test_the_log_tells_scheduled_from_committed(
    run: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckptengine")
    with ce.Engine(run) as engine:
        faults.set("write-1", "wait")
        handle = engine.save_async(state(), step=1)
        path = run / "step-00000001"
        assert f"Scheduling async checkpoint save at step 1 to {path}" in caplog.text
        assert "Committed" not in caplog.text
        assert not handle.done() and "on its way" in repr(handle)
        assert engine.pending() == [handle]
        assert handle.wait(ce.Durability.CAPTURED).path == str(path)
        faults.go()
        info = handle.wait()
        assert f"Committed checkpoint at step 1 to {path}: {info.nbytes} bytes" in caplog.text
        assert "committed" in repr(handle)
        assert engine.pending() == []
        timings = handle.timings
        assert timings["nbytes"] > 4000
        parts = sum(timings[name] for name in ("collect", "plan", "busy", "capture"))
        assert parts <= timings["stall"] + 1e-6
        assert timings["write"] + timings["commit"] <= timings["durable"]
        assert timings["persister_cpu"] > 0
        estimate = engine.estimate()
        assert estimate[ce.Durability.CAPTURED] <= estimate[ce.Durability.PERSISTED]


# -- waiting, failing, leaving ---------------------------------------------------------------------


def test_waiting_has_a_timeout_that_leaves_the_save_alone(run: Path, faults: Faults) -> None:
    with ce.Engine(run) as engine:
        faults.set("write-1", "wait")
        handle = engine.save_async(state(), step=1)
        for wait in (lambda: handle.wait(timeout=0.05), lambda: engine.wait(timeout=0.05)):
            with pytest.raises(TimeoutError, match="step 1"):
                wait()
        with pytest.raises(TimeoutError):
            handle.wait(timeout=0)
        faults.go()
        assert handle.wait(timeout=60).step == 1
        with pytest.raises(ce.ConfigError, match="REPLICATED"):
            handle.wait(ce.Durability.REPLICATED)


def test_a_handle_may_be_dropped(run: Path, faults: Faults) -> None:
    with ce.Engine(run) as engine:
        engine.save_async(state(1), step=1)
        gc.collect()
        faults.set("sync-4", "EIO")
        engine.save_async(state(2), step=2)
        gc.collect()
        with pytest.raises(ce.StoreError, match="EIO"):
            engine.wait()
        engine.wait()
        assert engine.steps() == [1]


def test_an_error_is_told_once(run: Path, faults: Faults) -> None:
    with ce.Engine(run) as engine:
        faults.set("sync-4", "EIO")
        handle = engine.save_async(state(), step=1)
        with pytest.raises(ce.StoreError):
            handle.wait()
        with pytest.raises(ce.StoreError):
            handle.wait()  # the handle goes on saying so
        engine.save(state(), step=2)  # the engine does not


def test_each_of_several_failures_is_told(run: Path, faults: Faults, until: Until) -> None:
    with ce.Engine(run) as engine:
        handles = []
        for step in (1, 2):
            faults.set("sync-4", "EIO")
            handles.append(engine.save_async(state(), step=step))
            until(handles[-1].done)
            if step == 1:
                assert handles[0].exception() is not None
        with pytest.raises(ce.StoreError, match="step-00000002"):
            engine.wait()
        engine.wait()


def test_an_error_in_the_block_is_not_masked(run: Path, faults: Faults) -> None:
    with pytest.raises(ZeroDivisionError) as caught, ce.Engine(run) as engine:
        faults.set("sync-4", "EIO")
        engine.save_async(state(), step=1)
        raise ZeroDivisionError("of the training")
    assert not isinstance(caught.value.__context__, ce.CheckpointError)


def test_an_error_in_the_block_is_not_masked_by_a_finalization(run: Path) -> None:
    def raises(info: ce.CheckpointInfo) -> None:
        raise KeyError("of the user")

    with pytest.raises(ZeroDivisionError), ce.Engine(run) as engine:
        engine.save_async(state(), step=1, on_commit=raises)
        raise ZeroDivisionError("of the training")
    assert ce.verify(run).step == 1  # what was pending has been waited for


def test_the_last_failure_is_raised_by_the_block(run: Path, faults: Faults) -> None:
    with pytest.raises(ce.StoreError, match="EIO"), ce.Engine(run) as engine:
        faults.set("sync-4", "EIO")
        engine.save_async(state(), step=1)


def test_after_close(run: Path) -> None:
    engine = ce.Engine(run)
    handle = engine.save_async(state(), step=1)
    engine.close()
    engine.close()
    assert handle.wait().step == 1
    for call in (
        lambda: engine.save(state(), step=2),
        lambda: engine.save_async(state()),
        lambda: engine.restore(state()),
    ):
        with pytest.raises(ce.ConfigError, match="closed"):
            call()
    assert engine.steps() == [1]
    engine.abort()


def test_an_engine_that_did_nothing_leaves_nothing(run: Path) -> None:
    with ce.Engine(run) as engine:
        assert engine.restore(state()) is None
        assert engine.steps() == []
        assert engine.latest() is None
        assert engine.pending() == []
        assert engine.estimate() == {}
        engine.wait()
        engine.abort()
    assert not run.exists()


@pytest.mark.parametrize("point", ["stage", "write-2", "rename"])
def test_abort_drops_what_is_in_flight_and_goes_on(
    run: Path, faults: Faults, point: str, identical: Identical
) -> None:
    wide = {"w": torch.zeros(90_000)}
    with ce.Engine(run) as engine:
        engine.save(wide, step=1)
        faults.set(point, "wait")
        handles = [engine.save_async(wide, step=step) for step in (2, 3)]
        faults.await_hit(point)
        engine.abort()
        assert engine.pending() == []
        for handle in handles:
            assert handle.done()
            assert "aborted" in str(handle.exception())
        engine.wait()  # nobody needs to be told again
        assert engine.steps() == [1]
        engine.save(state(4), step=4)
        assert engine.steps() == [1, 4]
        engine.abort()
    assert Repository(str(run)).leftovers() == []
    assert identical(stored(run), state(4))


def test_a_change_of_the_working_directory_does_not_move_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with ce.Engine("runs/demo") as engine:
        monkeypatch.chdir("elsewhere")
        engine.save(state(1), step=1)
        monkeypatch.chdir("/")
        assert engine.save(state(2), step=2).path == str(tmp_path / "runs/demo/step-00000002")
        assert engine.restore(state(0)) is not None
    assert os.listdir(tmp_path / "elsewhere") == []


def test_what_is_not_needed_any_more_can_be_collected(run: Path) -> None:
    import weakref

    with ce.Engine(run) as engine:
        tensor = torch.zeros(1000)
        reference = weakref.ref(tensor)
        engine.save({"w": tensor}, step=1)
        del tensor
        gc.collect()
        assert reference() is None


# -- forked children -------------------------------------------------------------------------------


def in_a_child(call: Callable[[], Any]) -> str:
    """What `call` raises in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        said = "nothing"
        try:
            call()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return said


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused_and_harms_nothing(run: Path, faults: Faults) -> None:
    with ce.Engine(run) as engine:
        faults.set("write-1", "wait")
        handle = engine.save_async(state(), step=1)
        for call in (
            lambda: engine.save_async(state(), step=2),
            lambda: engine.restore(state()),
            engine.wait,
            engine.abort,
            engine.steps,
            engine.latest,
            handle.wait,
            handle.join,
        ):
            assert "ConfigError: this engine belongs to the process that made it" in in_a_child(
                call
            )
        assert in_a_child(engine.close) == "nothing"
        faults.go()
        assert handle.wait().step == 1
        engine.save(state(), step=2)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_may_have_an_engine_of_its_own(run: Path, until: Until) -> None:
    other = run.with_name("other")

    def work() -> None:
        torch.set_num_threads(1)
        with ce.Engine(other) as engine:
            engine.save(state(7), step=7)

    with ce.Engine(run) as engine:
        engine.save(state(), step=1)
        assert in_a_child(work) == "nothing"
        assert in_a_child(lambda: ce.Engine(run).save(state(), step=9)).startswith(
            f"ConflictError: {run}: another run writes there (process {os.getpid()}"
        )
        engine.save(state(), step=2)
    assert ce.verify(other).step == 7


# -- interruptions ---------------------------------------------------------------------------------


class Interrupt(BaseException):
    """As Ctrl-C, but for pytest."""


def test_an_interrupted_capture_is_given_up(
    run: Path, monkeypatch: pytest.MonkeyPatch, identical: Identical, until: Until
) -> None:
    with ce.Engine(run) as engine:
        engine.save(state(1), step=1)
        with monkeypatch.context() as patch:

            def interrupted(*args: Any, **more: Any) -> None:
                raise Interrupt

            patch.setattr(Capture, "_copy", interrupted)
            with pytest.raises(Interrupt):
                engine.save_async(state(2), step=2)
        engine.save(state(3), step=3)
        assert engine.steps() == [1, 3]
        engine.wait()
    assert identical(stored(run), state(3))


def test_an_interruption_of_the_hand_over_mixes_no_two_saves(
    run: Path, monkeypatch: pytest.MonkeyPatch, identical: Identical
) -> None:
    """The job is on its way and the caller does not know: it must not take the next capture."""
    with ce.Engine(run) as engine:
        engine.save(state(1), step=1)
        with monkeypatch.context() as patch:
            submit = engine._pool.submit

            def interrupted(*args: Any) -> Any:
                submit(*args)
                raise Interrupt

            patch.setattr(engine._pool, "submit", interrupted)
            with pytest.raises(Interrupt):
                engine.save_async(state(2), step=2)
        assert engine.pending() == []
        engine.save(state(3), step=3)
        engine.save(state(4), step=4)
        assert engine.steps() == [1, 3, 4]
    assert identical(stored(run, step=3), state(3))


def test_a_plan_that_could_not_be_shared_is_made_again(
    run: Path, monkeypatch: pytest.MonkeyPatch, identical: Identical
) -> None:
    with ce.Engine(run) as engine:
        engine.save(state(1), step=1)
        other = {"a": torch.ones(5), "b": torch.zeros(3), "c": [1, 2, 3]}
        with monkeypatch.context() as patch:

            def refuse(self: PlanMemory, data: bytes) -> None:
                raise OSError(24, "Too many open files")

            patch.setattr(PlanMemory, "__init__", refuse)
            with pytest.raises(ce.StoreError, match="EMFILE"):
                engine.save_async(other, step=2)
        engine.save(other, step=3)
        engine.save(state(4), step=4)
    assert identical(stored(run, step=3), other)
    assert identical(stored(run, step=4), state(4))


def test_close_interrupted_leaves_the_persister_to_finish(
    run: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    engine = ce.Engine(run)
    faults.set("write-1", "wait")
    handle = engine.save_async(state(), step=1)

    def interrupted(timeout: float | None = None) -> None:
        faults.go()
        raise Interrupt

    monkeypatch.setattr(engine, "wait", interrupted)
    with pytest.raises(Interrupt):
        engine.close()
    assert handle.done()
    until(lambda: Repository(str(run)).ids())
    assert ce.verify(run).step == 1
    with ce.Engine(run) as again:
        assert again.save(state(), step=2).step == 2


# -- programs --------------------------------------------------------------------------------------

NO_GUARD = """
import os, sys, torch, ckptengine as ce
print("main runs", flush=True)
engine = ce.Engine({run!r})
engine.save_async({{"w": torch.arange(3.0)}}, step=1)
"""


def python(arguments: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore::FutureWarning", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(ce.__file__).parent.parent)},
        **how,
    )


@pytest.mark.parametrize("how", ["file", "stdin", "-c", "interactive"])
def test_a_program_without_a_main_guard(run: Path, tmp_path: Path, how: str) -> None:
    text = NO_GUARD.format(run=str(run))
    if how == "file":
        (tmp_path / "train.py").write_text(text)
        done = python([str(tmp_path / "train.py")])
    elif how == "stdin":
        done = python(["-"], input=text)
    elif how == "interactive":
        done = python(["-i", "-q"], input=text)
    else:
        done = python(["-c", text])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("main runs") == 1  # the persister did not run it again
    assert ce.verify(run).step == 1  # exit waits


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 1), ("sys.exit(0)", 1), ("sys.exit(3)", 1), ("raise KeyError('mine')", 1)],
)
def test_a_last_save_that_fails_makes_the_program_fail(run: Path, end: str, code: int) -> None:
    directory = run.parent / "faults"
    text = f"""
import sys, torch, ckptengine as ce
from ckptengine.testing.faults import Faults
faults = Faults({str(directory)!r})
faults.install()
faults.set("sync-4", "ENOSPC")
engine = ce.Engine({str(run)!r})
engine.save_async({{"w": torch.arange(3.0)}}, step=1)
print("all done")
{end}
"""
    done = python(["-c", text])
    assert done.returncode == code
    assert "ENOSPC" in done.stderr
    assert done.stdout == "all done\n"
    if "KeyError" in end:
        assert "KeyError: 'mine'" in done.stderr


def test_a_pipe_to_cat_is_not_held_open(run: Path, tmp_path: Path, until: Until) -> None:
    """`train | cat` ends with the trainer, though its persister goes on."""
    directory = run.parent / "faults"
    (tmp_path / "train.py").write_text(
        f"""
import os, signal, sys, torch, ckptengine as ce
from ckptengine.testing.faults import Faults
faults = Faults({str(directory)!r})
faults.install()
faults.set("write-1", "wait")
engine = ce.Engine({str(run)!r})
engine.save_async({{"w": torch.arange(3.0)}}, step=1)
faults.await_hit("write-1")
print(engine._pool.pid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    command = f"{sys.executable} -W ignore::FutureWarning {tmp_path / 'train.py'} 2>&1 | cat"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    persister = int(done.stdout.split()[0])
    assert psutil.pid_exists(persister)
    Faults(directory).go()
    until(lambda: not psutil.pid_exists(persister))
    assert ce.verify(run).step == 1


def test_modules_of_the_user_beside_the_program(run: Path, tmp_path: Path) -> None:
    for name in ("socket", "json", "select", "struct", "traceback", "fcntl", "uuid", "retention"):
        (tmp_path / f"{name}.py").write_text("print('a module of the user was imported')\n")
    # A script's directory comes first on the path; these were imported before it was put there.
    text = NO_GUARD.format(run=str(run)).replace(
        "print(", f"sys.path.insert(0, {str(tmp_path)!r}); os.chdir({str(tmp_path)!r})\nprint(", 1
    )
    done = python(["-c", text])
    assert done.returncode == 0, done.stderr
    assert "a module of the user" not in done.stdout + done.stderr
    assert ce.verify(run).step == 1


def test_ctrl_c_in_a_save(run: Path, launch: Launch) -> None:
    """It reaches the trainer, in whichever line, and no persister: the run saves and ends well."""
    program = launch(
        f"""
        import os, signal, torch, ckptengine as ce
        from ckptengine.testing.faults import Faults
        faults = Faults({str(run.parent / "faults")!r})
        faults.install()
        state = {{"w": torch.zeros(90_000)}}
        engine = ce.Engine({str(run)!r})
        engine.save(state, step=0)
        faults.set("write-2", "wait")
        handle = engine.save_async(state, step=1)
        faults.await_hit("write-2")
        print("saving", flush=True)
        try:
            handle.wait()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        faults.go()
        assert handle.wait().step == 1
        engine.save(state, step=2)
        engine.close()
        """,
        start_new_session=True,
    )
    program.says("saving")
    os.killpg(program.pid, signal.SIGINT)
    program.says("interrupted")
    program.ends()
    with ce.Engine(run) as engine:
        assert engine.steps() == [0, 1, 2]


def interrupt_many_saves(run: Path, launch: Launch, until: Until, times: int) -> None:
    """What was captured is committed; what is committed verifies and is the state of its step; and
    whichever line was interrupted, the engine goes on."""
    program = launch(
        f"""
        import os, signal, torch, ckptengine as ce
        weight = torch.zeros(200_000)
        engine = ce.Engine({str(run)!r}, timeout=20)
        engine.save({{"w": weight, "n": 0}}, step=0)  # imports of torch stand no interruption
        step = caught = 0
        inside = False

        def interrupt(*_):
            global caught, inside
            caught += 1
            os.write(1, f"caught {{caught}}\\n".encode())
            if inside:
                inside = False
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupt)
        print("saving", flush=True)
        while caught < {times}:
            try:
                step += 1
                weight.fill_(step)
                inside = True
                engine.save_async({{"w": weight, "n": step}}, step=step)
                inside = False
            except KeyboardInterrupt:
                pass
        engine.wait()
        engine.save({{"w": weight.fill_(0), "n": 0}}, step=step + 1)
        engine.close()
        print("left", step + 1, flush=True)
        """
    )
    program.says("saving")
    for number in range(1, times + 1):
        os.kill(program.pid, signal.SIGINT)
        until(
            lambda number=number: (
                f"caught {number}\n" in program.output() or program.process.poll() is not None
            )
        )
    last = int(program.ends().split()[-1])
    repository = Repository(str(run))
    assert repository.leftovers() == []
    ids = repository.ids()
    assert ids[-1].step == last
    for checkpoint in ids[:: max(1, len(ids) // 40)]:
        found = ce.load(repository.path(checkpoint)).to_dict()
        assert found["n"] == (checkpoint.step if checkpoint.step < last else 0)
        assert torch.equal(found["w"], torch.full((200_000,), float(found["n"])))


def test_ctrl_c_at_any_moment_of_many_saves(run: Path, launch: Launch, until: Until) -> None:
    interrupt_many_saves(run, launch, until, 25)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(12))
def test_ctrl_c_at_very_many_moments(run: Path, launch: Launch, until: Until, seed: int) -> None:
    interrupt_many_saves(run, launch, until, 60)

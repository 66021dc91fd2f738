"""Save after save: nothing grows, and each checkpoint holds the state of its own call."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptengine as ce
from ckptengine.testing.faults import Faults

Identical = Callable[[Any, Any], bool]
Until = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("family")

MIB = 1 << 20


def proportional(pid: int) -> int:
    """Bytes of memory of a process, of what it shares its share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss")


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memfds(pid: int) -> list[str]:
    """What memory files a process has open or mapped."""
    folder = f"/proc/{pid}/fd"
    names = []
    for fd in os.listdir(folder):
        try:
            names.append(os.readlink(f"{folder}/{fd}"))
        except FileNotFoundError:
            continue  # that of the listing itself
    names += Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [name for name in names if "memfd:ckptengine" in name]


def pid(engine: ce.Engine) -> int:
    found = engine._pool.pid()
    assert found is not None
    return found


def test_fifty_saves_cost_what_three_cost(run: Path) -> None:
    state = {"w": torch.zeros(8 * MIB // 4), "more": [torch.zeros(1000) for _ in range(20)], "n": 0}
    before = descriptors(os.getpid())
    with ce.Engine(run, keep=2) as engine:

        def save(step: int) -> None:
            state["w"] += 1
            state["n"] = step
            # Two at a time, so that both arenas are in use.
            engine.save_async(state, step=2 * step)
            engine.save_async(state, step=2 * step + 1)
            engine.wait()

        def measured() -> dict[str, Any]:
            gc.collect()
            return {
                name: call(who)
                for who in (os.getpid(), pid(engine))
                for name, call in {
                    f"PSS {who}": proportional,
                    f"RSS {who}": resident,
                    f"descriptors {who}": descriptors,
                    f"memfds {who}": lambda who: len(memfds(who)),
                }.items()
            }

        for step in range(5):
            save(step)
        first = measured()
        for step in range(5, 30):
            save(step)
        last = measured()
        assert engine.steps() == [58, 59]
    for name, value in first.items():
        room = 2 * MIB if "SS" in name else 0
        assert last[name] <= value + room, f"{name}: {value}, then {last[name]}"
    assert descriptors(os.getpid()) <= before


def test_structures_that_come_and_go_free_what_they_took(run: Path) -> None:
    sizes = [1, 24, 1, 16, 2, 32, 1] * 3
    with ce.Engine(run, keep=1) as engine:
        held = []
        for step, size in enumerate(sizes):
            state = {f"key{step}": torch.ones(size * MIB // 4), "n": step}
            engine.save(state, step=step)
            held.append(
                (engine._slots.nbytes(), proportional(pid(engine)), len(memfds(pid(engine))))
            )
        # An arena is at most a few times what was saved last, whatever was saved before.
        assert all(held[i][0] <= 5 * MIB + 4 * sizes[i] * MIB for i in range(len(sizes)))
        assert held[-1][1] < 30 * MIB + 10 * MIB
        assert held[-1][2] <= held[0][2]
        assert len([name for name in memfds(os.getpid()) if "arena" in name]) <= 4
        found = ce.load(run)
        assert list(found) == [f"key{len(sizes) - 1}", "n"]


def test_a_limit_on_host_memory_is_kept(run: Path, faults: Faults, until: Until) -> None:
    state = {"w": torch.zeros(4 * MIB // 4)}
    limit = 7 * MIB
    with ce.Engine(run, host_memory_limit=limit, on_busy="skip") as engine:
        faults.set("write-1", "wait")
        engine.save_async(state, step=1)
        second = engine.save_async(state, step=2)
        assert second.skipped is not None
        assert engine._slots.nbytes() <= limit
        faults.go()
        engine.wait()
        with pytest.raises(ce.ConfigError, match=f"host_memory_limit={limit}"):
            engine.save_async({"w": torch.zeros(8 * MIB // 4)}, step=3)
        engine.save(state, step=4)
        assert engine.steps() == [1, 4]


# -- busy ------------------------------------------------------------------------------------------


def fill(engine: ce.Engine, faults: Faults, state: dict[str, Any]) -> list[ce.SaveHandle]:
    """Takes all memory for snapshots: the persister stops in the first save."""
    faults.set("write-1", "stop")
    handles = [engine.save_async(state, step=step) for step in (1, 2)]
    faults.await_hit("write-1")
    return handles


def test_busy_skip(run: Path, faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.zeros(100)}
    seen: list[Any] = []
    with ce.Engine(run, on_busy="skip") as engine:
        engine.add_listener(seen.append)
        fill(engine, faults, state)
        third = engine.save_async(state, step=3)
        assert third.skipped == "all memory for snapshots is still being written"
        assert third.done() and third.exception() is None
        with pytest.raises(ce.ConfigError, match="skipped"):
            third.wait()
        assert "Skipped the checkpoint of step 3" in caplog.text
        assert [event.step for event in seen if "Skipped" in type(event).__name__] == [3]
        assert [handle.step for handle in engine.pending()] == [1, 2]
        os.kill(pid(engine), signal.SIGCONT)
        engine.wait()
        assert engine.steps() == [1, 2]
        assert engine.save(state, step=3).attempt == 0


def test_busy_error(run: Path, faults: Faults) -> None:
    state = {"w": torch.zeros(100)}
    with ce.Engine(run, on_busy="error") as engine:
        fill(engine, faults, state)
        with pytest.raises(ce.StoreError, match="still being written") as caught:
            engine.save_async(state, step=3)
        assert caught.value.retryable
        os.kill(pid(engine), signal.SIGCONT)
        engine.wait()
        assert engine.save(state, step=3).step == 3
        assert engine.steps() == [1, 2, 3]


def test_busy_wait(run: Path, faults: Faults) -> None:
    state = {"w": torch.zeros(100)}
    with ce.Engine(run, on_busy="wait", timeout=1.0) as engine:
        handles = fill(engine, faults, state)
        # Stuck for good: the wait ends with the persister, and says why.
        with pytest.raises(ce.StoreError, match="no progress for 1 s"):
            engine.save_async(state, step=3)
        assert [type(handle.exception()) for handle in handles] == [ce.StoreError] * 2
        engine.save(state, step=4)
        assert engine.steps() == [4]


# -- each its own ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [4, 4096, 100_000, 3 * MIB, 20 * MIB])
@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
def test_what_happens_after_the_call_is_not_stored(
    run: Path, faults: Faults, identical: Identical, nbytes: int, slow: bool
) -> None:
    numel = nbytes // 4
    state: dict[str, Any] = {
        "w": torch.arange(numel, dtype=torch.float32),
        "p": torch.nn.Parameter(torch.arange(numel, dtype=torch.float32) + 1),
        "view": torch.arange(2 * numel, dtype=torch.float32)[::2],
        "scalar": torch.tensor(7.0),
        "list": [1, [2, {"deep": torch.ones(3)}]],
        "dict": {"a": 1},
    }
    wanted = {
        "w": state["w"].clone(),
        "p": state["p"].detach().clone(),
        "view": state["view"].clone(),
        "scalar": state["scalar"].clone(),
        "list": [1, [2, {"deep": torch.ones(3)}]],
        "dict": {"a": 1},
    }
    with ce.Engine(run) as engine:
        if slow:
            faults.set("write-1", "wait")
        handle = engine.save_async(state, step=1, user=(user := {"tags": ["x"]}))
        with torch.no_grad():
            state["w"].add_(7)
            state["view"].mul_(-1)
            state["scalar"].zero_()
            state["p"].data = torch.zeros(numel)
            state["p"].data.add_(3)
            state["list"][1][1]["deep"].fill_(9)
        state["list"][1][0] = "changed"
        state["list"].append("more")
        state["dict"]["b"] = 2
        state["w"].untyped_storage().resize_(0)
        user["tags"].append("y")
        del state["p"]
        faults.go()
        assert handle.wait().user == {"tags": ["x"]}
    assert identical(ce.load(run).to_dict(), wanted)
    assert ce.load(run).info.user == {"tags": ["x"]}


def test_storages_that_are_replaced_between_saves(run: Path, identical: Identical) -> None:
    """Same names and shapes, other memory: what a cache of handles would store again."""
    parameter = torch.nn.Parameter(torch.zeros(50_000))
    state = {"p": parameter, "b": torch.zeros(10)}
    with ce.Engine(run) as engine:
        for step in range(6):
            parameter.data = torch.full((50_000,), float(step))
            state["b"] = torch.full((10,), float(-step))
            engine.save_async(state, step=step)
    for step in range(6):
        found = ce.load(run, step=step).to_dict()
        assert identical(found["p"], torch.full((50_000,), float(step)))
        assert identical(found["b"], torch.full((10,), float(-step)))


def test_many_saves_in_a_row_each_hold_their_own(run: Path, identical: Identical) -> None:
    weight = torch.zeros(300_000)
    values: dict[str, Any] = {"w": weight, "n": 0}
    with ce.Engine(run) as engine:
        for step in range(20):
            weight.fill_(step)
            values["n"] = step
            engine.save_async(values, step=step)
        engine.wait()
        assert engine.steps() == list(range(20))
    for step in range(20):
        assert identical(
            ce.load(run, step=step).to_dict(), {"w": torch.full((300_000,), float(step)), "n": step}
        )

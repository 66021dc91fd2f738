"""Rows C of the failure modes: a checkpoint holds the state of the call, whatever comes after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptengine as ce
from ckptengine.testing.faults import Faults

Identical = Callable[[Any, Any], bool]


@pytest.fixture
def slow(faults: Faults) -> Faults:
    """The persister writes nothing until `go`."""
    faults.set("stage", "wait")
    return faults


def test_c01_cpu_tensors_are_copied_before_the_call_returns(run: Path, slow: Faults) -> None:
    model = nn.Linear(64, 64)
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with ce.Engine(run) as engine, torch.no_grad():
        engine.save_async({"model": model}, step=1)
        for parameter in model.parameters():
            parameter.add_(7)
        slow.go()
    stored = ce.load(run)["model"]
    assert all(torch.equal(stored[name], tensor) for name, tensor in wanted.items())


def test_c02_scalars_do_not_alias_either(run: Path, slow: Faults) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with ce.Engine(run) as engine:
        for step in (1, 2):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            engine.save_async({"optimizer": optimizer, "weight": model.weight}, step=step)
        slow.await_hit("stage")
        with torch.no_grad():
            for entry in optimizer.state.values():
                entry["step"].fill_(99)
        slow.go()
    for step in (1, 2):
        stored = ce.load(run, step=step)["optimizer"].to_dict()
        assert [float(entry["step"]) for entry in stored["state"].values()] == [step, step]


def test_c03_containers_are_part_of_the_snapshot(
    run: Path, slow: Faults, identical: Identical
) -> None:
    live: dict[str, Any] = {
        "list": [torch.zeros(100), [1, {"a": torch.zeros(100)}]],
        "dict": {"x": {"y": 1}},
        "set": {1, 2},
    }
    wanted = {
        "list": [torch.zeros(100), [1, {"a": torch.zeros(100)}]],
        "dict": {"x": {"y": 1}},
        "set": {1, 2},
    }
    with ce.Engine(run) as engine:
        engine.save_async(live, step=1)
        slow.await_hit("stage")
        live["list"][0] += 1
        live["list"][1][1]["a"] += 1
        live["list"][1][1]["b"] = 2
        live["list"].clear()
        live["dict"]["x"]["y"] = 2
        live["set"].add(3)
        slow.go()
    assert identical(ce.load(run).to_dict(), wanted)


def test_c05_a_storage_that_was_replaced_is_saved_and_not_the_old_one(
    run: Path, identical: Identical
) -> None:
    parameter = nn.Parameter(torch.zeros(1000))
    buffer = {"b": torch.zeros(10)}
    with ce.Engine(run) as engine:
        for step in range(4):
            parameter.data = parameter.data.clone() + 1  # same structure, other storage
            buffer["b"] = buffer["b"].clone() - 1
            engine.save_async({"p": parameter, "buffer": buffer}, step=step)
    digests = set()
    for step in range(4):
        found = ce.load(run, step=step)
        assert torch.equal(found["p"], torch.full((1000,), step + 1.0))
        assert torch.equal(found["buffer"]["b"], torch.full((10,), -step - 1.0))
        digests.add((run / f"step-0000000{step}" / "__0_0.distcp").read_bytes())
    assert len(digests) == 4


def test_c07_a_key_that_appears_later_is_in_the_next_checkpoint(
    run: Path, identical: Identical
) -> None:
    state: dict[str, Any] = {"w": torch.ones(10), "n": 1}
    seen = []
    with ce.Engine(run) as engine:
        for step, change in enumerate(
            [
                lambda: None,
                lambda: state.update(fault=torch.arange(3)),
                lambda: state.update(note="text"),
                lambda: state.update(w=torch.ones(11)),
                lambda: state.update(w=torch.ones(11, dtype=torch.float64)),
                lambda: state.pop("fault"),
                lambda: state.update(n="x" * 10_000),
                lambda: state.update(n=[1, torch.ones(1)]),
            ]
        ):
            change()
            engine.save(state, step=step)
            seen.append(dict(state))
    for step, wanted in enumerate(seen):
        assert identical(ce.load(run, step=step).to_dict(), wanted)


def test_c09_a_load_during_a_save_sees_the_last_committed_one(
    run: Path, slow: Faults, identical: Identical
) -> None:
    with ce.Engine(run) as engine:
        slow.go()
        engine.save({"w": torch.full((90_000,), 1.0)}, step=1)
        for point in ("write-2", "commit", "rename"):
            slow.set(point, "wait")
            handle = engine.save_async({"w": torch.full((90_000,), 2.0)}, step=2)
            slow.await_hit(point)
            assert float(ce.load(run)["w"][0]) == 1.0
            assert ce.verify(run).step == 1
            with ce.Engine(run) as reader:  # of another part of the program
                found = {"w": torch.zeros(90_000)}
                info = reader.restore(found)
                assert info is not None and info.step == 1
                assert float(found["w"][-1]) == 1.0
            engine.abort()
            assert handle.done()
        slow.set("write-2", "wait")
        engine.save_async({"w": torch.full((90_000,), 3.0)}, step=3)
        slow.go("write-2")
        found = {"w": torch.zeros(90_000)}
        info = engine.restore(found)  # its own save is waited for
        assert info is not None and info.step == 3


def test_c10_overlapping_saves_to_three_directories_hold_their_own(
    tmp_path: Path, faults: Faults, identical: Identical
) -> None:
    weight = torch.zeros(90_000)
    engines = [ce.Engine(tmp_path / name) for name in "abc"]
    order: list[str] = []
    try:
        for number, engine in enumerate(engines):
            faults.set("write-2", "wait")
            weight.fill_(number)
            engine.save_async(
                {"w": weight, "n": number}, step=number, on_commit=lambda i: order.append(i.path)
            )
            faults.await_hit("write-2")  # all three are on their way together
        assert [len(engine.pending()) for engine in engines] == [1, 1, 1]
        faults.go()
        for engine in reversed(engines):
            engine.wait()
    finally:
        for engine in engines:
            engine.close()
    for number, name in enumerate("abc"):
        wanted = {"w": torch.full((90_000,), float(number)), "n": number}
        assert identical(ce.load(tmp_path / name).to_dict(), wanted)
        assert str(tmp_path / name / f"step-0000000{number}") in order
    assert len(order) == 3

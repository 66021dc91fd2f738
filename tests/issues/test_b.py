"""Rows B of the failure modes: the tree of a state, its keys, and Python objects in it."""

from __future__ import annotations

import argparse
import collections
import copy
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptengine as ce
from ckptengine.demo.data import Loader
from ckptengine.errors import CorruptError, StateError
from ckptengine.format import canonical
from ckptengine.format.checksum import bytes_digest

Identical = Callable[[Any, Any], bool]


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": 1}, "a.b": 2, "a/b": 3},
        {"a": [{"b": 1}], "a.0.b": 2, "a/[0]/b": 3},
        {"a": [{"b": torch.ones(1)}], "a.0.b": torch.zeros(1), "a/[0]/b": torch.ones(2)},
    ],
)
def test_b01_nested_and_dotted_keys_both_survive(
    engine: ce.Engine, run: Path, identical: Identical, state: dict[str, Any]
) -> None:
    engine.save(state)
    assert identical(ce.load(run).to_dict(), state)
    template = copy.deepcopy(state)
    engine.restore(template)
    assert identical(template, state)


@pytest.mark.parametrize(
    "state",
    [
        {0: 1},
        {0: 1, "0": 2, (0,): 3, 0.5: 4, None: 5, "None": 6},
        {(1, 2): torch.ones(1), "(1, 2)": torch.zeros(1), ((1, 2),): 3},
        {True: 1, "True": 2},
        {"state": {0: {"x": torch.ones(1)}, "0": {"x": torch.zeros(1)}}},
    ],
    ids=repr,
)
def test_b02_keys_keep_their_type(
    engine: ce.Engine, run: Path, identical: Identical, state: dict[Any, Any]
) -> None:
    engine.save(state)
    assert identical(ce.load(run).to_dict(), state)


def test_b02_a_key_that_changes_its_type_between_saves_is_seen(
    engine: ce.Engine, run: Path
) -> None:
    for step, key in enumerate([1, True, 1.0, "1"]):
        engine.save({key: torch.ones(1)}, step=step)
        (found,) = ce.load(run, step=step)
        assert type(found) is type(key)


def test_b04_what_the_template_lacks_is_given_or_named(engine: ce.Engine) -> None:
    engine.save({"k": {"x": 1, "w": torch.ones(2)}})
    state: dict[str, Any] = {"k": {}}
    engine.restore(state)
    assert state["k"]["x"] == 1 and state["k"]["w"].tolist() == [1, 1]
    with pytest.raises(StateError) as caught:
        engine.restore({"k": {"w": torch.zeros(2)}})
    assert caught.value.keys == ("k/x",)


def test_b05_empty_containers_survive(engine: ce.Engine, run: Path, identical: Identical) -> None:
    empty = {"e": {}, "l": [], "t": (), "n": None, "o": collections.OrderedDict(), "s": set()}
    state = {**empty, "deep": {"deeper": {**empty}, "list": [{}, [], ()]}, "w": [torch.ones(1), {}]}
    engine.save(state)
    assert identical(ce.load(run).to_dict(), state)


def test_b06_plain_values_are_put_into_the_state(engine: ce.Engine) -> None:
    engine.save({"epoch": 20, "best": {"loss": 0.5}, "history": [1, 2]})
    state: dict[str, Any] = {"epoch": 0, "best": {"loss": 9.0}, "history": []}
    best, history = state["best"], state["history"]
    engine.restore(state)
    assert state["epoch"] == 20
    assert best["loss"] == 0.5 and history == [1, 2]


def test_b07_a_save_after_a_resume_holds_what_came_after_it(
    engine: ce.Engine, run: Path, identical: Identical
) -> None:
    def fresh() -> tuple[Any, Any, dict[str, Any]]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer, "step": 0, "ema": torch.zeros(2, 2)}
        return model, optimizer, state

    def advance(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2) * (state["step"] + 1)).square().sum().backward()
        optimizer.step()
        state["ema"].lerp_(model.weight.detach(), 0.5)
        state["step"] += 1

    model, optimizer, whole = fresh()
    advance(model, optimizer, whole)
    engine.save(whole, step=1)
    advance(model, optimizer, whole)
    advance(model, optimizer, whole)
    for step in (1, 2):
        other, other_optimizer, resumed = fresh()
        engine.restore(resumed, step=step)
        advance(other, other_optimizer, resumed)
        engine.save(resumed, step=step + 1)
    found = ce.load(run, step=3).to_dict()
    assert found["step"] == 3
    assert identical(found["ema"], whole["ema"])
    assert identical(dict(found["model"]), dict(model.state_dict()))
    assert identical(found["optimizer"], optimizer.state_dict())


def test_b09_keys_that_the_state_has_not_are_reported(engine: ce.Engine) -> None:
    engine.save({"a": torch.ones(1), "b": torch.ones(1), "c": {"d": 1, "e": torch.ones(1)}})
    with pytest.raises(StateError, match="in the checkpoint, not in the state") as caught:
        engine.restore({"a": torch.zeros(1)})
    assert caught.value.keys == ("b", "c")
    info = engine.restore({"a": torch.zeros(1)}, strict=False)
    assert info is not None and info.report.unexpected == ("b", "c")


def test_b10_strict_lists_what_a_full_dictionary_lacks(engine: ce.Engine) -> None:
    model = nn.Linear(2, 2)
    saved = dict(model.state_dict())
    del saved["bias"]
    engine.save({"model": saved})
    with pytest.raises(StateError, match="model/bias: not in the checkpoint") as caught:
        engine.restore({"model": nn.Linear(2, 2)})
    assert caught.value.keys == ("model/bias",)
    info = engine.restore({"model": nn.Linear(2, 2)}, strict=False)
    assert info is not None and info.report.missing == ("model/bias",)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "AppState"])
def test_b12_optimizer_state_may_be_absent_as_a_whole_and_not_in_part(
    engine: ce.Engine, wrapped: bool
) -> None:
    def fresh() -> tuple[nn.Module, Any, dict[str, Any]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, {"o": ce.AppState(model, optimizer) if wrapped else optimizer}

    model, optimizer, state = fresh()
    model[0].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    engine.save(state, step=1)
    other, resumed, template = fresh()
    info = engine.restore(template)
    assert info is not None and len(info.report.unfilled) == 2
    assert list(map(id, resumed.state)) == list(map(id, other[1].parameters()))

    del optimizer.state[model[1].weight]["exp_avg"]
    engine.save(state, step=2)
    before = copy.deepcopy(resumed.state_dict())
    with pytest.raises(StateError, match="exp_avg: not in the checkpoint"):
        engine.restore(template)
    assert repr(resumed.state_dict()) == repr(before)


def test_b13_an_empty_parameter_group_is_restored(engine: ce.Engine) -> None:
    def fresh() -> tuple[nn.Module, Any]:
        model = nn.Linear(2, 2)
        groups = [{"params": []}, {"params": list(model.parameters())}]
        return model, torch.optim.AdamW(groups, lr=0.1, betas=(0.5, 0.6))

    def step(model: nn.Module, optimizer: Any) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    model, optimizer = fresh()
    optimizer.param_groups[0]["lr"] = 0.3
    step(model, optimizer)
    engine.save({"plain": optimizer, "app": ce.AppState(model, optimizer)})
    for kind in ("plain", "app"):
        other, resumed = fresh()
        for group in resumed.param_groups:
            group.update(lr=9.0, betas=(0.1, 0.1))
        state = {"plain": resumed} if kind == "plain" else {"app": ce.AppState(other, resumed)}
        engine.restore(state, strict=False)
        assert [group["lr"] for group in resumed.param_groups] == [0.3, 0.1]
        assert all(group["betas"] == (0.5, 0.6) for group in resumed.param_groups)
        step(other, resumed)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "AppState"])
def test_b15_initial_lr_of_schedulers_survives(engine: ce.Engine, wrapped: bool) -> None:
    def fresh() -> tuple[Any, dict[str, Any]]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        return optimizer, {"o": ce.AppState(model, optimizer) if wrapped else optimizer}

    optimizer, state = fresh()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    optimizer.param_groups[0]["note"] = "kept"
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    engine.save(state)
    resumed, template = fresh()
    engine.restore(template)
    group = resumed.param_groups[0]
    assert group["initial_lr"] == 0.4 and group["note"] == "kept"
    assert group["lr"] == optimizer.param_groups[0]["lr"]
    again = torch.optim.lr_scheduler.StepLR(resumed, 2, last_epoch=4)
    assert again.base_lrs == [0.4]


def test_b17_numpy_scalars_load_under_weights_only(
    engine: ce.Engine, run: Path, identical: Identical
) -> None:
    state = {"best": np.float64(0.5), "deep": [{"n": np.int32(3)}, np.bool_(True)], np.int64(1): 2}
    path = engine.save(state).path
    assert identical(ce.load(run).to_dict(), state)
    metadata = pickle.loads((Path(path) / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        raw = (Path(path) / place.relative_path).read_bytes()[place.offset :][: place.length]
        target = run.parent / "item"
        target.write_bytes(raw)
        assert torch.load(target, weights_only=True) in (0.5, 3, True, 2)


def test_b18_a_corrupt_random_state_is_loud(engine: ce.Engine) -> None:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        saved = ce.RngState().state_dict()
        engine.save({"rng": ce.PerRank(saved)}, step=1)
        expected = random.random(), np.random.random(), torch.rand(1).item()
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        engine.restore({"rng": ce.RngState()})
        assert (random.random(), np.random.random(), torch.rand(1).item()) == expected
        saved["numpy"]["key"] = saved["numpy"]["key"][:5]
        engine.save({"rng": ce.PerRank(saved)}, step=2)
        with pytest.raises(StateError, match="saved numpy generator cannot be set"):
            engine.restore({"rng": ce.RngState()})
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


def test_b20_configuration_objects_are_plain_data(engine: ce.Engine, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import dataclasses, enum\n"
        "@dataclasses.dataclass\nclass Config:\n    lr: float\n"
        "class Mode(enum.Enum):\n    FAST = 'fast'\n"
    )
    script = """
import sys, argparse, ckptengine as ce
if sys.argv[2] == "save":
    import mine, torch
    state = {"args": argparse.Namespace(lr=0.1), "config": mine.Config(0.5), "mode": mine.Mode.FAST}
    with ce.Engine(sys.argv[1]) as engine:
        engine.save(state | {"w": torch.arange(3)})
else:
    found = ce.load(sys.argv[1])
    assert found["w"].tolist() == [0, 1, 2]
    assert found["args"].lr == 0.1 and found["config"].lr == 0.5 and found["mode"] == "fast"
    assert "mine" not in sys.modules
"""
    for action in ("save", "load"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "run"), action],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (tmp_path / "mine.py").unlink(missing_ok=True)
    engine.save({"args": argparse.Namespace(lr=0.1)})
    state = {"args": argparse.Namespace(lr=0.2)}
    engine.restore(state)
    assert state["args"] == argparse.Namespace(lr=0.1)


def test_b21_a_local_function_is_refused_before_anything_is_written(
    engine: ce.Engine, run: Path
) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    engine.save({"scheduler": scheduler}, step=0)  # torch leaves functions out itself
    before = sorted(run.rglob("*"))
    with pytest.raises(StateError) as caught:
        engine.save({"scheduler": {"dict": dict(scheduler.__dict__)}}, step=1)
    assert "scheduler/dict/lr_lambdas/[0]" in caught.value.keys
    assert sorted(run.rglob("*")) == before


def test_b23_keys_are_never_file_names(engine: ce.Engine, run: Path, identical: Identical) -> None:
    keys = ["k" * 300, "k" * 5000, "a/b", "..", "", "😀", "Foo", "foo", "/etc/passwd", "a\0b", "."]
    state = {key: torch.tensor([number]) for number, key in enumerate(keys)}
    info = engine.save(state)
    assert identical(ce.load(run).to_dict(), state)
    assert sorted(os.listdir(info.path)) == [
        ".metadata",
        "__0_0.distcp",
        "index-0.zst",
        "manifest.json",
    ]


def test_b24_old_versions_load_and_newer_ones_are_refused(
    engine: ce.Engine, tmp_path: Path
) -> None:
    golden = Path(__file__).parents[1] / "compat" / "golden"
    for version in golden.iterdir():  # more of this in tests/compat/test_golden.py
        shutil.copytree(version, tmp_path / version.name)
        assert ce.load(tmp_path / version.name)["step"] == 7
        assert ce.verify(tmp_path / version.name).step == 7
    path = Path(engine.save({"x": 1}, step=1).path) / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["digest"], body["metrics"], body["user"], body["candidate"]
    for version, fine in (("1.5", True), ("2.0", False)):
        body["format_version"] = version
        digest = bytes_digest(canonical.dumps(body))
        path.write_bytes(canonical.dumps(body | {"digest": digest}))
        if fine:
            assert ce.load(path.parent)["x"] == 1
        else:
            with pytest.raises(CorruptError, match="newer ckptengine"):
                ce.load(path.parent)


class Hostile:
    def __reduce__(self) -> Any:
        return exec, ("import os; os.environ['CKPTENGINE_B25'] = 'ran'",)


def test_b25_no_code_runs_from_the_metadata(
    engine: ce.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTENGINE_B25", "no")
    path = engine.save({"x": torch.ones(1)}, step=1).path
    (Path(path) / ".metadata").write_bytes(pickle.dumps(Hostile()))
    state = {"x": torch.zeros(1)}
    engine.restore(state)
    assert ce.load(path)["x"].item() == state["x"].item() == 1
    with pytest.raises(CorruptError, match=r"\.metadata"):
        ce.verify(path)
    assert os.environ["CKPTENGINE_B25"] == "no"


def test_b26_loading_the_weights_alone_is_said_or_fails(engine: ce.Engine) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.save({"model": model, "optimizer": optimizer})
    other = nn.Linear(2, 2)
    before = other.weight.clone()
    with pytest.raises(StateError) as caught:
        engine.restore({"model": other})
    assert caught.value.keys == ("optimizer",) and torch.equal(other.weight, before)
    info = engine.restore({"model": other}, strict=False)
    assert info is not None and info.report.unexpected == ("optimizer",)
    assert torch.equal(other.weight, model.weight)


def test_b27_a_resumed_run_is_equal_to_the_bit(run: Path, tmp_path: Path) -> None:
    def train(directory: Path, first: int, steps: int) -> list[float]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = {"app": ce.AppState(model, optimizer), "rng": ce.RngState()}
        losses = []
        with ce.Engine(directory) as engine:
            info = engine.restore(state)
            assert (info.step + 1 if info else 0) == first
            for _ in range(steps):
                loss = model(torch.randn(8, 4)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            engine.save(state, step=first + steps - 1)
        return losses

    whole = train(tmp_path / "whole", 0, 20)
    assert train(run, 0, 10) + train(run, 10, 10) == whole
    one, two = ce.load(tmp_path / "whole").to_dict(), ce.load(run).to_dict()
    for key in ("model", "optimizer"):
        assert repr(one["app"][key]) == repr(two["app"][key])


def test_b29_a_loader_resumes_exactly_twice_in_a_row(run: Path) -> None:
    text = random.Random(3).randbytes(2000)

    def batches(loader: Loader, count: int) -> list[Any]:
        return [next(loader).tolist() for _ in range(count)]

    expected = batches(Loader(text, context=8, batch=4, seed=5), 100)
    found: list[Any] = []
    for count in (37, 1, 1, 61):
        loader = Loader(text, context=8, batch=4, seed=0)
        state = {"loader": ce.PerRank(loader)}
        with ce.Engine(run) as engine:
            if engine.restore(state) is None:
                loader = state["loader"].obj = Loader(text, context=8, batch=4, seed=5)
            found += batches(loader, count)
            engine.save(state)
    assert found == expected

"""`ckptengine.load`: a checkpoint without a template."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptengine as ce
from ckptengine.errors import CorruptError, NotFoundError

Identical = Callable[[Any, Any], bool]

STATE: dict[str, Any] = {
    "model": {"layer.0.weight": torch.arange(12.0).reshape(3, 4), "layer.0.bias": torch.ones(3)},
    "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]},
    "loader": ce.PerRank({"at": 3, "order": torch.arange(4)}),
    "array": np.arange(3),
    "list": [torch.ones(1), {"x": torch.zeros(2), "y": 1}, 5],
    "step": 7,
}


@pytest.fixture
def path(engine: ce.Engine) -> str:
    return engine.save(STATE, step=7, user="note").path


def test_it_is_a_mapping_of_what_was_saved(path: str, identical: Identical) -> None:
    loaded = ce.load(path)
    assert list(loaded) == list(STATE) and len(loaded) == len(STATE)
    assert "model" in loaded and "other" not in loaded
    assert identical(loaded["list"], STATE["list"])
    assert dict(loaded["loader"]).keys() == {"at", "order"}
    assert isinstance(loaded["array"], np.ndarray)
    assert loaded["optimizer"]["state"][0]["step"] == 1
    assert (loaded.info.step, loaded.info.user) == (7, "note")
    assert "step=7" in repr(loaded)
    with pytest.raises(KeyError):
        loaded["other"]


def test_paths_of_all_kinds_name_it(path: str, run: Path, engine: ce.Engine) -> None:
    engine.save({"newer": 1}, step=9)
    assert ce.load(path)["step"] == 7
    assert ce.load(Path(path))["step"] == 7
    assert ce.load(f"{path}/")["step"] == 7
    assert ce.load(run)["newer"] == 1
    assert ce.load(run, step=7)["step"] == 7
    for missing in (run / "step-00000008", run.parent / "nowhere"):
        with pytest.raises(NotFoundError):
            ce.load(missing)
    with pytest.raises(NotFoundError, match=r"step 8.*\[7, 9\]"):
        ce.load(run, step=8)


@pytest.mark.parametrize("mmap", [True, False])
def test_a_tensor_is_taken_once_and_is_the_callers_own(path: str, mmap: bool) -> None:
    files = {name: (Path(path) / name).read_bytes() for name in os.listdir(path)}
    loaded = ce.load(path, mmap=mmap)
    weight = loaded["model"]["layer.0.weight"]
    assert loaded["model"]["layer.0.weight"] is weight
    weight.zero_()
    loaded["array"][:] = 0
    assert {name: (Path(path) / name).read_bytes() for name in os.listdir(path)} == files
    assert torch.equal(
        ce.load(path, mmap=mmap)["model"]["layer.0.weight"], STATE["model"]["layer.0.weight"]
    )
    assert ce.verify(path).step == 7


@pytest.mark.parametrize("mmap", [True, False])
def test_a_tensor_outlives_the_mapping_and_the_checkpoint(
    run: Path, path: str, engine: ce.Engine, mmap: bool
) -> None:
    weight = ce.load(path, mmap=mmap)["model"]["layer.0.weight"]
    gc.collect()
    for name in os.listdir(path):
        os.unlink(os.path.join(path, name))
    assert torch.equal(weight, STATE["model"]["layer.0.weight"])
    torch.nn.functional.relu_(weight.sub_(5))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["step"], {"step": 7}),
        (["model/layer.0.bias"], {"model": {"layer.0.bias": torch.ones(3)}}),
        (["optimizer/state/[0]"], {"optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}}),
        (["loader/0/at", "step"], {"loader": {"at": 3}, "step": 7}),
        (["loader"], {"loader": {"at": 3, "order": torch.arange(4)}}),
        (["list/[1]/x"], {"list": {1: {"x": torch.zeros(2)}}}),
        (["list/[0]", "list/[1]"], {"list": {0: torch.ones(1), 1: STATE["list"][1]}}),
        (["array"], {"array": np.arange(3)}),
        ([], {}),
    ],
    ids=str,
)
def test_keys_narrow_it(path: str, identical: Identical, keys: list[str], expected: Any) -> None:
    assert identical(ce.load(path, keys=keys).to_dict(), expected)


def test_every_key_that_inspect_prints_can_be_asked_for(path: str) -> None:
    from ckptengine.restore.contents import contents
    from ckptengine.restore.locate import locate

    found = contents(locate(path))
    assert len(found.tensors) == 7
    for key in [*found.tensors, *found.values]:
        assert len(ce.load(path, keys=[key]).to_dict()) == 1


def test_keys_that_are_not_there_are_named(path: str) -> None:
    with pytest.raises(NotFoundError, match=r"\['model/layer.1', 'x'\]"):
        ce.load(path, keys=["x", "step", "model/layer.1"])


@pytest.mark.parametrize("mmap", [True, False])
def test_only_what_is_taken_is_verified_and_a_bad_tensor_is_never_given(
    path: str, mmap: bool
) -> None:
    chunk = Path(path) / "__0_0.distcp"
    data = bytearray(chunk.read_bytes())
    at = data.index(STATE["model"]["layer.0.weight"].numpy().tobytes())
    data[at + 5] ^= 0x10
    chunk.write_bytes(data)
    loaded = ce.load(path, mmap=mmap)
    assert loaded["model"]["layer.0.bias"].tolist() == [1, 1, 1]
    for _ in range(2):
        with pytest.raises(CorruptError, match=r"__0_0\.distcp: a wrong checksum in the 48 bytes"):
            loaded["model"]["layer.0.weight"]
    with pytest.raises(CorruptError):
        loaded.to_dict()


def test_a_mapping_holds_the_checkpoint_against_retention(run: Path) -> None:
    with ce.Engine(run, keep=1) as engine:
        first = engine.save({"x": torch.arange(3)}, step=1).path
        loaded = ce.load(first)
        engine.save({"x": torch.zeros(3)}, step=2)
        engine.save({"x": torch.zeros(3)}, step=3)
        assert os.path.exists(first)
        assert loaded["x"].tolist() == [0, 1, 2]
        del loaded
        gc.collect()
        engine.save({"x": torch.zeros(3)}, step=4)
        engine.wait()
    assert not os.path.exists(first)


def test_large_tensors_are_checked_in_parts(engine: ce.Engine, run: Path) -> None:
    from ckptengine.types import PART

    value = torch.arange(PART // 4 + 1000, dtype=torch.int32)
    engine.save({"x": value})
    for mmap in (True, False):
        assert torch.equal(ce.load(run, mmap=mmap)["x"], value)
    info = ce.load(run).info
    chunk = Path(info.path) / "__0_0.distcp"
    with chunk.open("r+b") as file:
        file.seek(PART + 4096 + 16)
        file.write(b"\xff")
    for mmap in (True, False):
        with pytest.raises(CorruptError, match="wrong checksum in the 4000 bytes"):
            ce.load(run, mmap=mmap)["x"]

"""Stock `torch.distributed.checkpoint` and `torch.load` read what we write.

Where DCP cannot say what a state holds, the tests named `..._as_dcp_sees_them` state what its users
get instead.
"""

from __future__ import annotations

import collections
import enum
import io
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptengine as ce
from ckptengine.format import torch_dist
from ckptengine.format.dtypes import DTYPES
from ckptengine.format.torch_dist import Item
from ckptengine.format.tree import Position

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

Identical = Callable[[Any, Any], bool]


def emptied(value: Any) -> Any:
    """A template of the same form with other content."""
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: emptied(inner) for key, inner in value.items()}
    if isinstance(value, list) and any(isinstance(i, (torch.Tensor, dict, list)) for i in value):
        return [emptied(inner) for inner in value]
    return None


def by_dcp(path: str, template: dict[str, Any]) -> dict[str, Any]:
    dcp.load(template, checkpoint_id=path)
    return template


def by_conversion(path: str, tmp_path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    target = tmp_path / "whole.pt"
    dcp_to_torch_save(path, target)
    loaded = torch.load(target, weights_only=weights_only)
    assert isinstance(loaded, dict)
    return loaded


def items(path: str) -> dict[str, bytes]:
    """The byte range of each item that `.metadata` lists, by key."""
    metadata = pickle.loads((Path(path) / ".metadata").read_bytes())
    found = {}
    for index, place in metadata.storage_data.items():
        with open(os.path.join(path, place.relative_path), "rb") as file:
            file.seek(place.offset)
            found[index.fqn] = file.read(place.length)
    assert set(found) == set(metadata.state_dict_metadata) == set(metadata.planner_data)
    return found


def check_items(path: str) -> dict[str, Any]:
    """Each item as `torch.load` alone reads it; every range is a sound archive of its own."""
    loaded = {}
    for key, raw in items(path).items():
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            assert archive.testzip() is None
        loaded[key] = torch.load(io.BytesIO(raw), weights_only=True)
    return loaded


def trained() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(
        [{"params": model[:2].parameters()}, {"params": model[3:].parameters(), "lr": 0.5}]
    )
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        ],
        [2],
    )
    for _ in range(3):
        model(torch.randn(2, 3, 4, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": torch.amp.GradScaler("cpu"),
    }


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).squeeze(-1)


def dtypes() -> dict[str, Any]:
    return {
        name: random_tensor(getattr(torch, name), 3, 4) for name in DTYPES if hasattr(torch, name)
    }


def layouts() -> dict[str, Any]:
    base = torch.randn(100, 100)
    return {
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "transposed": torch.randn(3, 4).t(),
        "channels last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "view": base[3:5, ::7],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "large": torch.randn(300, 300),
        "large transposed": torch.randn(300, 200).t(),
    }


def ties() -> dict[str, Any]:
    weight = torch.randn(5, 2)
    return {"embedding": weight, "head": {"weight": weight}, "list": [weight, torch.ones(1)]}


def values() -> dict[str, Any]:
    return {
        "none": None,
        "bool": True,
        "int": -(2**70),
        "float": 0.1,
        "text": "é\ud800",
        "bytes": b"\x00\xff",
        "no bytes": b"",
        "complex": 1 - 2j,
        "tuple": (1, ("a", None), []),
        "list": [1, "a", [2.5]],
        "set": {1, 2},
        "empty list": [],
        "empty tuple": (),
        "nested": {"a": {"b": {"c": (1, 2)}}, "list": [{"x": 1}, {"y": torch.ones(2)}, 3]},
    }


def keys() -> dict[str, Any]:
    return {
        "a.b": torch.ones(1),
        "a": {"c": torch.ones(1) * 2},
        "": torch.ones(1) * 3,
        "x/y": {"..": 4, "😀": torch.ones(1) * 5},
        "$t": 6,
        "k" * 5000: torch.ones(1) * 7,
        "0": {"1": 8},
    }


STATES = {f.__name__: f for f in (trained, dtypes, layouts, ties, values, keys)}


@pytest.mark.parametrize("kind", STATES)
def test_stock_dcp_loads_it(
    engine: ce.Engine, tmp_path: Path, identical: Identical, kind: str
) -> None:
    state = STATES[kind]()
    path = engine.save(state).path
    plain = {
        key: dict(value.state_dict()) if hasattr(value, "state_dict") else value
        for key, value in state.items()
    }
    check_items(path)
    if kind == "trained":
        milestones = plain["scheduler"]["_schedulers"][1]["milestones"]
        plain["scheduler"]["_schedulers"][1]["milestones"] = dict(milestones)
    loaded = by_dcp(path, emptied(plain))
    if kind == "trained":
        # DCP fills tensors in place, but puts a value under an integer key beside it, as text.
        plain["scheduler"]["_schedulers"][1].pop("milestones")
        found = loaded["scheduler"]["_schedulers"][1].pop("milestones")
        assert found == {3: None, 5: None, "3": 1, "5": 1}
    assert identical(loaded, plain)


@pytest.mark.parametrize("kind", STATES)
def test_stock_conversion_to_one_file(
    engine: ce.Engine, tmp_path: Path, identical: Identical, kind: str
) -> None:
    state = STATES[kind]()
    path = engine.save(state).path
    loaded = by_conversion(path, tmp_path, weights_only=kind != "values")  # not for b""
    plain = {
        key: dict(value.state_dict()) if hasattr(value, "state_dict") else value
        for key, value in state.items()
    }

    def as_dcp_says_it(value: Any) -> Any:
        """Keys are text, empty mappings are not there, and order is nothing."""
        if isinstance(value, dict):
            return {
                str(k): as_dcp_says_it(value[k]) for k in sorted(value, key=str) if value[k] != {}
            }
        if isinstance(value, list):
            return [as_dcp_says_it(item) for item in value]
        return value.clone() if isinstance(value, torch.Tensor) else value

    assert identical(as_dcp_says_it(loaded), as_dcp_says_it(plain))


def test_a_model_and_optimizer_resume_through_stock_dcp_alone(
    engine: ce.Engine, identical: Identical
) -> None:
    torch.manual_seed(0)

    def fresh() -> tuple[nn.Module, Any]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = fresh()
    path = engine.save({"model": model, "optimizer": optimizer}).path
    other, resumed = fresh()
    state = {"model": other.state_dict(), "optimizer": resumed.state_dict()}
    dcp.load(state, checkpoint_id=path)
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    assert identical(dict(other.state_dict()), dict(model.state_dict()))
    assert identical(resumed.state_dict(), optimizer.state_dict())


def test_dcps_own_state_dict_helpers_read_an_app_state(engine: ce.Engine) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def fresh() -> tuple[nn.Module, Any]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = fresh()
    path = engine.save({"app": ce.AppState(model, optimizer)}).path
    other, resumed = fresh()
    model_state, optimizer_state = get_state_dict(other, resumed)
    state = {"app": {"model": model_state, "optimizer": optimizer_state}}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        other,
        resumed,
        model_state_dict=state["app"]["model"],
        optim_state_dict=state["app"]["optimizer"],
    )
    assert torch.equal(other.weight, model.weight)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], resumed.state[two]["exp_avg"])


def test_dcps_own_loading_of_a_part(engine: ce.Engine) -> None:
    path = engine.save({"model": {"w": torch.ones(2), "b": torch.zeros(2)}, "step": 3}).path
    assert by_dcp(path, {"model": {"w": torch.zeros(2)}})["model"]["w"].tolist() == [1, 1]
    assert by_dcp(path, {"step": 0}) == {"step": 3}


def test_integer_keys_as_dcp_sees_them(engine: ce.Engine, tmp_path: Path) -> None:
    state = {"state": {0: {"x": torch.ones(1)}, 1: {"x": torch.ones(1) * 2}}, (1, 2): 3}
    path = engine.save(state).path
    assert by_conversion(path, tmp_path) == {
        "state": {"0": {"x": torch.ones(1)}, "1": {"x": torch.ones(1) * 2}},
        "(1, 2)": 3,
    }
    found = by_dcp(path, {"state": {0: {"x": torch.zeros(1)}}})
    assert found["state"][0]["x"].item() == 1


def test_keys_that_collide_as_dcp_sees_them(engine: ce.Engine) -> None:
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1) * 2, 0: 3, "0": 4, "a.b#1": 5}
    found = check_items(engine.save(state).path)
    assert found == {"a.b": 1, "a.b#1": 2, "0": 3, "0#1": 4, "a.b#1#1": 5}


def test_tuples_with_tensors_as_dcp_sees_them(engine: ce.Engine, tmp_path: Path) -> None:
    """DCP keeps a tuple as one pickled leaf; we store the tensors in it as tensors. So a template
    says a list where the state has a tuple; asking for the tuple itself is DCP's own KeyError."""
    pair = collections.namedtuple("pair", "x y")
    state = {
        "tuple": (torch.ones(2), 5),
        "list": [(torch.ones(1), torch.zeros(1))],
        "pair": pair(torch.ones(3), "text"),
    }
    path = engine.save(state).path
    found = check_items(path)
    assert set(found) == {"tuple.0", "tuple.1", "list.0.0", "list.0.1", "pair.x", "pair.y"}
    loaded = by_dcp(
        path,
        {
            "tuple": [torch.zeros(2), None],
            "list": [[torch.zeros(1), torch.ones(1)]],
            "pair": {"x": torch.zeros(3), "y": None},
        },
    )
    assert loaded["tuple"][0].tolist() == [1, 1] and loaded["tuple"][1] == 5
    assert [t.item() for t in loaded["list"][0]] == [1, 0]
    assert loaded["pair"]["x"].tolist() == [1, 1, 1] and loaded["pair"]["y"] == "text"
    whole = by_conversion(path, tmp_path)
    assert whole["tuple"][1] == 5 and whole["pair"]["y"] == "text"
    with pytest.raises(
        dcp.CheckpointException, match="Missing key in checkpoint state_dict: tuple"
    ):
        by_dcp(path, {"tuple": (torch.zeros(2), 0)})


class Colour(enum.Enum):
    RED = "r"


def test_richer_values_as_dcp_sees_them(engine: ce.Engine, tmp_path: Path) -> None:
    state = {
        "enum": Colour.RED,
        "scalar": np.float64(0.5),
        "array": np.arange(3),
        "texts": np.array(["a", "b"]),
        "path": Path("a/b"),
        "deque": collections.deque([1]),
        "frozen": frozenset({1}),
        "dtype": torch.bfloat16,
        "long": 10**1000,
        "slice": slice(1, 2),
    }
    expected = {
        "enum": "r",
        "scalar": 0.5,
        "texts": ["a", "b"],
        "path": "a/b",
        "deque": [1],
        "frozen": {1},
        "dtype": "torch.bfloat16",
        "long": hex(10**1000),
        "slice": "slice(1, 2, None)",
    }
    path = engine.save(state).path
    found = check_items(path)
    assert found.pop("array").tolist() == [0, 1, 2]
    assert found == expected
    loaded = by_dcp(path, {**dict.fromkeys(expected), "array": torch.zeros(3, dtype=torch.int64)})
    assert loaded.pop("array").tolist() == [0, 1, 2]
    assert loaded == expected
    whole = by_conversion(path, tmp_path)
    assert whole.pop("array").tolist() == [0, 1, 2]
    assert whole == expected


def test_empty_mappings_as_dcp_sees_them(engine: ce.Engine, tmp_path: Path) -> None:
    path = engine.save({"a": {}, "b": {"c": {}, "d": 1}, "e": collections.OrderedDict()}).path
    assert by_conversion(path, tmp_path) == {"b": {"d": 1}}
    assert ce.load(path).to_dict()["a"] == {}


def test_state_of_one_rank_as_dcp_sees_it(engine: ce.Engine) -> None:
    path = engine.save({"loader": ce.PerRank({"at": 3}), "rng": ce.RngState()}).path
    found = check_items(path)
    assert found["loader.0.at"] == 3
    assert torch.equal(found["rng.0.torch"], torch.get_rng_state())


def test_values_that_change_their_length_in_place_are_read_anew(
    engine: ce.Engine, identical: Identical
) -> None:
    for step, text in enumerate(["", "x" * 60, "short", "é" * 500, "y"]):
        path = engine.save({"text": text, "w": torch.ones(3)}, step=step).path
        assert by_dcp(path, {"text": None}) == {"text": text}
        assert check_items(path)["text"] == text
        assert ce.load(path)["text"] == text


@pytest.mark.skipif(not shutil.which("unzip"), reason="no unzip here")
def test_unzip_agrees_with_every_item(engine: ce.Engine, tmp_path: Path) -> None:
    path = engine.save({"small": torch.ones(3), "large": torch.ones(200, 200), "v": {"a": 1}}).path
    for number, raw in enumerate(items(path).values()):
        file = tmp_path / f"{number}.zip"
        file.write_bytes(raw)
        done = subprocess.run(["unzip", "-tqq", file], capture_output=True, check=False)
        assert done.returncode == 0, done


def test_stock_dcp_needs_no_part_of_ours(engine: ce.Engine, tmp_path: Path) -> None:
    path = engine.save(
        {"w": torch.arange(3), "v": {1, "a"}, "n": np.float64(0.5), "e": Colour.RED}
    ).path
    script = """
import sys, warnings
warnings.simplefilter("ignore")
sys.modules["ckptengine"] = None
import torch, torch.distributed.checkpoint as dcp
state = {"w": torch.zeros(3, dtype=torch.int64), "v": None, "n": None, "e": None}
dcp.load(state, checkpoint_id=sys.argv[1])
assert state["w"].tolist() == [0, 1, 2] and state["v"] == {1, "a"}
assert state["n"] == 0.5 and state["e"] == "r"
"""
    done = subprocess.run(
        [sys.executable, "-c", script, path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class Hostile:
    """A pickle that leaves a mark in the environment when it is loaded."""

    def __reduce__(self) -> Any:
        return exec, (f"import os; os.environ[{MARK!r}] = 'ran'",)


MARK = "CKPTENGINE_TEST_HOSTILE_PICKLE"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    monkeypatch.setenv(MARK, "no")
    return lambda: os.environ[MARK] == "ran"


def test_a_hostile_pickle_in_dcps_metadata_is_never_run(
    engine: ce.Engine, ran: Callable[[], bool]
) -> None:
    good = engine.save({"w": torch.ones(2), "v": {"a": 1}}, step=1)
    bad = engine.save({"w": torch.ones(2) * 2, "v": {"a": 2}}, step=2)
    poison = pickle.dumps(Hostile())
    (Path(bad.path) / ".metadata").write_bytes(poison)
    with pytest.raises(ce.CorruptError, match=r"\.metadata"):
        ce.verify(bad.path)
    loaded = ce.load(bad.path).to_dict()
    state = {"w": torch.zeros(2), "v": {"a": 0}}
    info = engine.restore(state, step=2)
    assert info is not None and info.step == 2
    assert state["w"].tolist() == loaded["w"].tolist() == [2, 2]
    assert ce.verify(good.path).step == 1
    assert not ran()
    with pytest.raises(dcp.CheckpointException):  # stock DCP runs it: that is the danger
        dcp.load({"w": torch.zeros(2)}, checkpoint_id=bad.path)
    assert ran()


def test_a_hostile_pickle_among_the_values_is_never_run(
    engine: ce.Engine, ran: Callable[[], bool]
) -> None:
    path = engine.save({"w": torch.ones(2), "v": "x" * 200}).path
    chunk = Path(path) / "__0_0.distcp"
    data = chunk.read_bytes()
    at = data.index(b"x" * 200) - 10
    poison = pickle.dumps(Hostile(), 2)
    chunk.write_bytes(data[:at] + poison + data[at + len(poison) :])
    assert ce.load(path)["v"] == "x" * 200
    state = {"w": torch.zeros(2), "v": ""}
    engine.restore(state)
    assert state["v"] == "x" * 200
    with pytest.raises(ce.CorruptError):
        ce.verify(path)
    assert not ran()


def test_keys_may_be_the_names_that_the_metadata_itself_uses(run: Path) -> None:
    """What occurs often is there once in the pickle, and must be there before it is referred to."""
    names = [
        "first", "fqn", "index", "offset", "relative_path", "length", "transform_descriptors",
        "__0_0.distcp", "state_dict_metadata", "planner_data", "storage_data", "storage_meta",
        "properties", "size", "chunks", "offsets", "sizes", "torch.strided", "version",
    ]  # fmt: skip
    state = {name: torch.full((3,), float(number)) for number, name in enumerate(names)}
    with ce.Engine(run) as engine:
        path = engine.save(state).path
    found = by_dcp(path, emptied(state))
    assert all(torch.equal(found[name], state[name]) for name in names)


def test_metadata_is_what_dcp_itself_would_pickle() -> None:
    from torch.distributed.checkpoint import metadata as dcp_metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    items = [
        Item((("a", Position(0)), ("tied", "größe")), "__0_0.distcp", 0, 100, "float32", (2, 3)),
        Item((("a", Position(1)),), "__0_1.distcp", 5 << 30, 3 << 30, "bfloat16", ()),
        Item((("a", "1"),), "__0_0.distcp", 128, 1 << 31, "float32", (2, 3)),
        Item((("value",),), "__0_0.distcp", (1 << 31) - 1, 77),
        Item((("empty",),), "__0_0.distcp", 4096, 64, "complex64", (0, 7, 1)),
    ]
    wanted = dcp_metadata.Metadata({}, {}, {})
    assert wanted.planner_data is not None and wanted.storage_data is not None
    keys = {("a", 0): "a.0", ("a", 1): "a.1", ("a", "1"): "a.1#1"}
    for item in items:
        for path in item.paths:
            key = keys.get(path, ".".join(map(str, path)))
            wanted.planner_data[key] = (key,) if "#" in key else path
            zeros, size = torch.Size([0] * len(item.shape)), torch.Size(item.shape)
            if item.dtype is None:
                wanted.state_dict_metadata[key] = dcp_metadata.BytesStorageMetadata()
                place = dcp_metadata.MetadataIndex(key)
            else:
                properties = dcp_metadata.TensorProperties(dtype=getattr(torch, item.dtype))
                chunk = dcp_metadata.ChunkStorageMetadata(zeros, size)
                wanted.state_dict_metadata[key] = dcp_metadata.TensorStorageMetadata(
                    properties, size, [chunk]
                )
                place = dcp_metadata.MetadataIndex(key, zeros)
            wanted.storage_data[place] = _StorageInfo(item.file, item.offset, item.nbytes)
    found = pickle.loads(torch_dist.metadata(items))
    assert found == wanted
    assert list(found.state_dict_metadata) == list(wanted.state_dict_metadata)
    assert [type(part) for part in found.planner_data["a.0"]] == [str, int]
    assert pickle.loads(torch_dist.metadata([])) == dcp_metadata.Metadata({}, {}, {})

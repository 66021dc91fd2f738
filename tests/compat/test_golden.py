"""Checkpoints of every format version, kept as they were written. All of them must open for ever.

To add one when the format changes: `python tests/compat/test_golden.py VERSION`, once, and never
again for that version.
"""

from __future__ import annotations

import argparse
import collections
import http
import json
import math
import pathlib
import shutil
import sys
import types
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptengine as ce
from ckptengine.errors import CorruptError, IncompleteError
from ckptengine.format import canonical
from ckptengine.format.checksum import bytes_digest
from ckptengine.format.dtypes import DTYPES
from ckptengine.format.manifest import FORMAT_VERSION

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning"),
]

Identical = Callable[[Any, Any], bool]

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir()) if GOLDEN.exists() else []


def pattern(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    raw = torch.arange(math.prod(shape) * dtype.itemsize) * 37 % 251
    raw = raw % 2 if dtype == torch.bool else raw
    return raw.to(torch.uint8).view(dtype).view(shape)


def module() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 10 * number)
    return model


def state() -> dict[str, Any]:
    """What the checkpoints hold."""
    tied = pattern(torch.float32, 4, 3)
    model = module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
    return {
        "model": model,
        "optimizer": optimizer,
        "dtypes": {n: pattern(getattr(torch, n), 4) for n in DTYPES if hasattr(torch, n)},
        "tied": {"one": tied, "other": tied},
        "layouts": {
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 3),
            "transposed": pattern(torch.int16, 3, 5).t(),
            "channels last": pattern(torch.int8, 2, 3, 4, 5).contiguous(
                memory_format=torch.channels_last
            ),
        },
        "arrays": {
            "plain": np.arange(6, dtype=np.uint16).reshape(2, 3),
            "big endian": np.arange(3, dtype=">f8"),
            "text": np.array(["a", "é"]),
            "dates": np.array(["2024-02-29", "NaT"], dtype="M8[s]"),
        },
        "values": {
            "plain": [None, True, 1, -(2**70), 0.1, -0.0, math.inf, "é", "\ud800", b"\x00\xff", 2j],
            "containers": [(), [], {}, {1}, frozenset({2}), collections.deque([1], 3)],
            "kinds": [
                *(http.HTTPStatus.OK, pathlib.PurePosixPath("a/b"), slice(1, None)),
                *(argparse.Namespace(a=1), types.SimpleNamespace(b=[2])),
                *(np.float64(0.1), np.str_("x"), torch.bfloat16, torch.Size([2])),
            ],
            "url": urllib.parse.urlsplit("http://a/b?c"),
            "ordered": collections.OrderedDict(z=1, a=2),
            "counter": collections.Counter({10: 2}),
            "keys": {0: 1, "0": 2, (1, "a"): 3, None: 4, 1.5: 5, "$t": 6, "a/b": 7, "": 8},
        },
        "namedtuple": urllib.parse.SplitResult("http", tied, "", "", ""),
        "rank": ce.PerRank({"position": 3, "order": torch.arange(3)}),
        "step": 7,
    }


def saved() -> Any:
    """`state`, as `load` gives it."""
    whole = {
        key: value.state_dict() if hasattr(value, "state_dict") else value
        for key, value in state().items()
    }
    return whole | {"rank": whole["rank"].obj}


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of one of them."""
    shutil.copytree(GOLDEN / request.param, tmp_path / "golden")
    return tmp_path / "golden"


def change_manifest(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites the commit record, its digest right again."""
    (path,) = run.glob("step-*/manifest.json")
    body = json.loads(path.read_bytes())
    del body["digest"]
    change(body)
    path.write_bytes(canonical.dumps(body | {"digest": bytes_digest(canonical.dumps(body))}))


def test_there_is_one_of_this_version() -> None:
    assert FORMAT_VERSION in VERSIONS


def test_it_is_loaded_to_the_bit(golden: Path, identical: Identical) -> None:
    for mmap in (True, False):
        loaded = ce.load(golden, mmap=mmap)
        assert identical(loaded.to_dict(), saved())
        assert loaded["tied"]["one"] is loaded["tied"]["other"]
        for key, value in state()["layouts"].items():
            assert loaded["layouts"][key].stride() == value.stride(), key
    assert loaded.info.step == 7 and loaded.info.attempt == 1
    assert loaded.info.user == {"note": "golden"}
    assert dict(loaded.info.metrics) == {"loss": 0.25, "worst": math.inf}


def test_it_verifies(golden: Path) -> None:
    assert ce.verify(golden).step == 7


def test_it_is_restored_to_the_bit(golden: Path, identical: Identical) -> None:
    def emptied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_like(value)
        if isinstance(value, np.ndarray):
            return np.zeros_like(value)
        if isinstance(value, urllib.parse.SplitResult):
            return type(value)(*map(emptied, value))
        if isinstance(value, dict):
            return {key: emptied(inner) for key, inner in value.items()}
        return None

    template = {key: emptied(value) for key, value in state().items()}
    fresh = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    template |= {
        "model": fresh,
        "optimizer": torch.optim.SGD(fresh.parameters(), lr=1.0),
        "rank": ce.PerRank({"position": 0, "order": torch.zeros(3, dtype=torch.int64)}),
    }
    with ce.Engine(golden) as engine:
        info = engine.restore(template)
    assert info is not None and info.step == 7
    assert identical(dict(fresh.state_dict()), dict(module().state_dict()))
    assert template["optimizer"].state_dict()["param_groups"][0]["momentum"] == 0.9
    assert template["rank"].obj["order"].tolist() == [0, 1, 2]
    assert identical(template["dtypes"], state()["dtypes"])
    assert identical(template["values"], state()["values"])
    assert identical(template["arrays"], state()["arrays"])
    assert identical(template["namedtuple"], state()["namedtuple"])


def test_stock_dcp_loads_it(golden: Path, identical: Identical) -> None:
    (path,) = golden.glob("step-*")
    template = {
        "dtypes": {name: torch.empty_like(t) for name, t in state()["dtypes"].items()},
        "model": {name: torch.empty_like(t) for name, t in module().state_dict().items()},
        "step": 0,
    }
    dcp.load(template, checkpoint_id=path)
    assert template["step"] == 7
    assert identical(template["dtypes"], state()["dtypes"])
    assert identical(template["model"], dict(module().state_dict()))


def test_it_is_loaded_without_its_optional_fields(golden: Path) -> None:
    def strip(body: dict[str, Any]) -> None:
        for name in ("user", "metrics", "candidate"):
            del body[name]

    change_manifest(golden, strip)
    assert ce.verify(golden).step == 7
    loaded = ce.load(golden)
    assert loaded["step"] == 7
    assert (loaded.info.user, dict(loaded.info.metrics), loaded.info.candidate) == (None, {}, False)


def test_fields_of_a_later_minor_version_are_ignored(golden: Path) -> None:
    def extend(body: dict[str, Any]) -> None:
        body["format_version"] = "1.7"
        body["compressor"] = {"name": "new"}

    change_manifest(golden, extend)
    assert ce.load(golden)["step"] == 7


def test_a_later_major_version_is_refused_by_name(golden: Path) -> None:
    change_manifest(golden, lambda body: body.update(format_version="2.0"))
    (path,) = golden.glob("step-*")
    state = {"step": 0}
    for read in (lambda: ce.load(path), lambda: ce.verify(golden), lambda: ce.load(golden)):
        with pytest.raises(
            CorruptError, match=r"written in format 2\.0.*Install a newer ckptengine"
        ):
            read()
    with ce.Engine(golden) as engine, pytest.raises(CorruptError) as caught:
        engine.restore(state)
    assert "format 2.0" in " ".join(caught.value.problems)
    assert state == {"step": 0}


def test_a_missing_file_is_named(golden: Path) -> None:
    (path,) = golden.glob("step-*")
    (path / "__0_0.distcp").unlink()
    with pytest.raises((IncompleteError, CorruptError), match=r"__0_0\.distcp"):
        ce.load(golden)
    with pytest.raises(CorruptError, match=r"__0_0\.distcp"):
        ce.verify(golden)


if __name__ == "__main__":
    (version,) = sys.argv[1:]
    assert version == FORMAT_VERSION and version not in VERSIONS
    with ce.Engine(GOLDEN / version) as engine:
        engine.save({"first": "attempt"}, step=7)
        engine.save(
            state(), step=7, user={"note": "golden"}, metrics={"loss": 0.25, "worst": math.inf}
        )
    shutil.rmtree(GOLDEN / version / "step-00000007")
    for leftover in GOLDEN.glob(f"{version}/.*"):
        leftover.unlink()

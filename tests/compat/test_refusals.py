"""What cannot be stored is refused at the call, by key, with nothing written."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import ckptengine as ce
from ckptengine.errors import StateError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2)


def no_parts() -> torch.Tensor:
    class Opaque(torch.Tensor):
        @staticmethod
        def __new__(cls) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (2,))

        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise NotImplementedError

    return Opaque()


def contains_itself() -> Any:
    items: list[Any] = [1, {"a": 2}]
    items.append(items)
    return items


def closure() -> Callable[[], int]:
    value = 3
    return lambda: value


def nested(**options: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], **options)


THINGS: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse COO": (lambda: torch.eye(2).to_sparse(), "indices"),
    "sparse CSR": (lambda: torch.eye(2).to_sparse_csr(), "indices"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
        "int_repr",
    ),
    "nested": (nested, "unbind"),
    "jagged": (lambda: nested(layout=torch.jagged), "unbind"),
    "meta": (lambda: torch.ones(2, device="meta"), "materialize"),
    "meta parameter": (lambda: nn.Parameter(torch.ones(2, device="meta")), "materialize"),
    "fake": (fake, "no storage"),
    "mkldnn": (lambda: torch.ones(2).to_mkldnn(), "layout"),
    "subclass without parts": (no_parts, "no storage"),
    "lambda": (lambda: lambda: 0, "state_dict"),
    "closure": (closure, "state_dict"),
    "open file": (lambda: io.BytesIO(b"x"), "state_dict"),
    "object": (object, "state_dict"),
    "class": (lambda: nn.Linear, "state_dict"),
    "module of Python": (lambda: sys, "state_dict"),
    "generator": (lambda: (n for n in range(3)), "state_dict"),
    "range": (lambda: range(3), "plain data"),
    "objects in an array": (lambda: np.array([object()]), "dtype object"),
    "structured array": (lambda: np.zeros(2, dtype="i4,f4"), "arrays of numbers"),
    "masked array": (lambda: np.ma.masked_array([1.0], mask=[True]), "`mask`"),
    "tensor in a set": (lambda: {1, torch.ones(1)}, "dictionaries, lists and tuples"),
    "contains itself": (contains_itself, "contains itself"),
}


@pytest.mark.parametrize("what", THINGS)
def test_it_is_refused_by_key_and_nothing_is_written(
    engine: ce.Engine, run: Path, what: str
) -> None:
    make, hint = THINGS[what]
    state = {"good": torch.ones(3), "section": {"bad": make()}}
    with pytest.raises(StateError) as caught:
        engine.save_async(state)
    (key,) = caught.value.keys
    if what == "contains itself":
        assert key == "section"
    else:
        assert key.split("/")[:2] == ["section", "bad"]
    assert key in str(caught.value) and hint in str(caught.value)
    assert not run.exists()
    assert not engine.pending()


def test_uninitialised_parameters_are_refused_by_name(engine: ce.Engine, run: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(StateError, match="run the model once") as caught:
        engine.save({"model": model})
    assert set(caught.value.keys) >= {"model/0.weight", "model/0.bias", "model/1.running_mean"}
    assert not run.exists()


def test_a_lambda_inside_a_schedulers_state_is_named(engine: ce.Engine) -> None:
    class Schedule:
        def state_dict(self) -> dict[str, Any]:
            return {"epoch": 3, "lambdas": [lambda epoch: epoch]}

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(StateError) as caught:
        engine.save({"scheduler": Schedule()})
    assert caught.value.keys == ("scheduler/lambdas/[0]",)


def test_a_run_goes_on_after_a_refusal_and_its_directory_is_as_it_was(
    engine: ce.Engine, run: Path
) -> None:
    engine.save({"x": torch.ones(2)}, step=1)
    before = sorted(run.rglob("*"))
    with pytest.raises(StateError):
        engine.save({"x": torch.ones(2), "bad": object()}, step=2)
    assert sorted(run.rglob("*")) == before
    assert engine.save({"x": torch.ones(2)}, step=2).attempt == 0
    assert engine.steps() == [1, 2]

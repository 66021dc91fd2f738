"""Restoring: everything is compared first, and then everything is filled, or nothing is."""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import ckptengine as ce
from ckptengine.errors import StateError

Identical = Callable[[Any, Any], bool]


def state_of(value: float) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return {
        "model": model,
        "optimizer": optimizer,
        "tensor": torch.full((3,), value),
        "array": np.full(3, value),
        "nested": {"list": [torch.full((1,), value), value], "epoch": value},
        "step": value,
    }


def contents(state: Any) -> Any:
    """Everything in a state, copied."""
    if isinstance(state, torch.Generator):
        return state.get_state()
    if isinstance(state, ce.PerRank):
        return contents(state.obj)
    if isinstance(state, Mapping):
        return {key: contents(value) for key, value in state.items()}
    return copy.deepcopy(state.state_dict() if hasattr(state, "state_dict") else state)


@pytest.fixture
def saved(engine: ce.Engine) -> dict[str, Any]:
    state = state_of(1.0)
    engine.save(state, step=5, user={"note": "x"}, metrics={"loss": 0.5})
    return state


def test_everything_is_filled_in_place(
    engine: ce.Engine, saved: dict[str, Any], identical: Identical
) -> None:
    state = state_of(2.0)
    held = [state["tensor"], state["array"], state["nested"], state["nested"]["list"]]
    moments = [s["momentum_buffer"] for s in state["optimizer"].state.values()]
    info = engine.restore(state)
    assert identical(contents(state), contents(saved))
    assert all(
        a is b
        for a, b in zip(
            held,
            [state["tensor"], state["array"], state["nested"], state["nested"]["list"]],
            strict=True,
        )
    )
    after = [s["momentum_buffer"] for s in state["optimizer"].state.values()]
    assert all(a is b for a, b in zip(moments, after, strict=True))
    assert info is not None
    assert (info.step, info.attempt, info.user, info.metrics) == (
        5,
        0,
        {"note": "x"},
        {"loss": 0.5},
    )
    assert info.report == type(info.report)()
    assert info.sources == {"local": info.sources["local"]} and info.sources["local"] == 88


def test_a_fresh_run_is_none(engine: ce.Engine, run: Path) -> None:
    state = {"x": 1}
    assert engine.restore(state) is None
    assert state == {"x": 1} and not run.exists()


def other_shape(state: dict[str, Any]) -> str:
    state["tensor"] = torch.zeros(4)
    return "tensor"


def other_dtype(state: dict[str, Any]) -> str:
    state["tensor"] = torch.zeros(3, dtype=torch.float64)
    return "tensor"


def array_of_other_dtype(state: dict[str, Any]) -> str:
    state["array"] = np.zeros(3, dtype=np.float32)
    return "array"


def other_model(state: dict[str, Any]) -> str:
    state["model"] = nn.Linear(2, 3)
    return "model/weight"


def missing(state: dict[str, Any]) -> str:
    state["new"] = torch.zeros(2)
    return "new"


def missing_value(state: dict[str, Any]) -> str:
    state["nested"]["extra"] = 3
    return "nested/extra"


def unexpected(state: dict[str, Any]) -> str:
    del state["tensor"]
    return "tensor"


def unexpected_below(state: dict[str, Any]) -> str:
    state["nested"] = {"list": state["nested"]["list"]}
    return "nested/epoch"


def no_bias(state: dict[str, Any]) -> str:
    state["model"] = nn.Linear(2, 2, bias=False)
    return "model/bias"


def longer_list(state: dict[str, Any]) -> str:
    state["nested"]["list"].append(1)
    return "nested/list"


def value_for_mapping(state: dict[str, Any]) -> str:
    state["step"] = {"a": torch.zeros(1)}
    return "step"


def tensor_for_value(state: dict[str, Any]) -> str:
    state["step"] = torch.zeros(1)
    return "step"


def module_for_value(state: dict[str, Any]) -> str:
    state["step"] = nn.Linear(1, 1)
    return "step"


def optimizer_for_value(state: dict[str, Any]) -> str:
    state["step"] = torch.optim.SGD(nn.Linear(1, 1).parameters())
    return "step"


def rank_for_value(state: dict[str, Any]) -> str:
    state["step"] = ce.PerRank(torch.zeros(1))
    return "step"


def rng_for_value(state: dict[str, Any]) -> str:
    state["step"] = ce.RngState()
    return "step"


def generator_for_value(state: dict[str, Any]) -> str:
    state["step"] = torch.Generator()
    return "step"


def app_for_model(state: dict[str, Any]) -> str:
    state["model"] = ce.AppState(state["model"], state["optimizer"])
    return "model/optimizer"


def other_groups(state: dict[str, Any]) -> str:
    weight, bias = state["model"].parameters()
    groups = [{"params": [weight]}, {"params": [bias]}]
    state["optimizer"] = torch.optim.SGD(groups, lr=0.1)
    return "optimizer/param_groups"


def meta(state: dict[str, Any]) -> str:
    state["tensor"] = torch.zeros(3, device="meta")
    return "tensor"


def meta_model(state: dict[str, Any]) -> str:
    state["model"] = nn.Linear(2, 2, device="meta")
    return "model/weight"


def expanded(state: dict[str, Any]) -> str:
    state["tensor"] = torch.zeros(1).expand(3)
    return "tensor"


def windows(state: dict[str, Any]) -> str:
    state["tensor"] = torch.zeros(3).as_strided((3,), (0,))
    return "tensor"


def read_only(state: dict[str, Any]) -> str:
    state["nested"] = types.MappingProxyType(state["nested"])
    return "nested"


def uninitialised(state: dict[str, Any]) -> str:
    state["tensor"] = nn.parameter.UninitializedBuffer()
    return "tensor"


@pytest.mark.parametrize(
    "change",
    [
        *(other_shape, other_dtype, array_of_other_dtype, other_model, missing, missing_value),
        *(unexpected, unexpected_below, no_bias, longer_list, value_for_mapping),
        *(
            generator_for_value,
            tensor_for_value,
            module_for_value,
            optimizer_for_value,
            rank_for_value,
            rng_for_value,
        ),
        *(app_for_model, other_groups, meta, meta_model, expanded, windows, read_only),
        uninitialised,
    ],
    ids=lambda change: change.__name__,
)
def test_what_does_not_fit_is_named_and_nothing_is_touched(
    engine: ce.Engine,
    saved: dict[str, Any],
    identical: Identical,
    change: Callable[[dict[str, Any]], str],
) -> None:
    state = state_of(2.0)
    key = change(state)
    watched = {
        name: value
        for name, value in state.items()
        if change not in (meta, meta_model, uninitialised) or name not in ("tensor", "model")
    }
    before = contents(watched)
    with pytest.raises(StateError, match="nothing was filled") as caught:
        engine.restore(state)
    assert key in caught.value.keys
    assert f"\n  {key}: " in str(caught.value)
    assert identical(contents(watched), before)


def test_many_problems_are_counted_and_all_keys_listed(engine: ce.Engine) -> None:
    engine.save({"x": 1})
    with pytest.raises(StateError, match="and 31 more") as caught:
        engine.restore({f"k{n}": torch.zeros(1) for n in range(50)})
    assert len(caught.value.keys) == 51


def test_without_strict_what_has_no_counterpart_is_left_and_reported(
    engine: ce.Engine, saved: dict[str, Any]
) -> None:
    state = state_of(2.0)
    del state["array"], state["nested"]["epoch"]
    state["new"] = torch.full((2,), 7.0)
    state["nested"]["extra"] = 3
    state["model"] = nn.Linear(2, 2, bias=False)
    info = engine.restore(state, strict=False)
    assert info is not None
    assert set(info.report.missing) == {"new", "nested/extra"}
    assert set(info.report.unfilled) == {"new", "nested/extra"}
    assert set(info.report.unexpected) == {"array", "nested/epoch", "model/bias"}
    assert state["new"].tolist() == [7, 7] and state["nested"]["extra"] == 3
    assert state["tensor"].tolist() == [1, 1, 1]
    assert torch.equal(state["model"].weight, saved["model"].weight)


def test_without_strict_what_cannot_fit_is_still_refused(
    engine: ce.Engine, saved: dict[str, Any]
) -> None:
    state = state_of(2.0)
    state["tensor"] = torch.zeros(4)
    with pytest.raises(StateError, match=r"shape \(4,\) in the state, \(3,\) in the checkpoint"):
        engine.restore(state, strict=False)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float8_e4m3fn),
        (torch.int64, torch.int8),
        (torch.bool, torch.float32),
        (torch.float32, torch.complex64),
        (torch.uint16, torch.int32),
    ],
)
def test_a_dtype_is_converted_only_on_request(
    engine: ce.Engine, source: torch.dtype, target: torch.dtype
) -> None:
    stored = torch.tensor([0, 1, 1, 0]).to(source)
    engine.save({"x": stored, "same": torch.ones(1)})
    state = {"x": torch.empty(4, dtype=target), "same": torch.zeros(1)}
    with pytest.raises(StateError, match="pass cast=True") as caught:
        engine.restore(state)
    assert caught.value.keys == ("x",)
    info = engine.restore(state, cast=True)
    assert info is not None and info.report.cast == ("x",)
    assert state["x"].dtype == target
    assert torch.equal(state["x"].to(torch.complex64), stored.to(torch.complex64))


@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.complex64, torch.float32), (torch.float32, torch.float4_e2m1fn_x2)],
)
def test_a_conversion_that_would_lose_or_fail_is_refused_before_anything_is_read(
    engine: ce.Engine, source: torch.dtype, target: torch.dtype
) -> None:
    engine.save({"x": torch.ones(4, dtype=source), "y": torch.ones(2)})
    state = {"y": torch.zeros(2), "x": torch.empty(4, dtype=target)}
    with pytest.raises(StateError, match="torch cannot convert that"):
        engine.restore(state, cast=True)
    assert state["y"].tolist() == [0, 0]


def test_a_model_is_converted_on_request(engine: ce.Engine) -> None:
    model = nn.Linear(3, 3)
    engine.save({"model": model})
    small = nn.Linear(3, 3, dtype=torch.bfloat16)
    info = engine.restore({"model": small}, cast=True)
    assert info is not None and info.report.cast == ("model/weight", "model/bias")
    assert torch.equal(small.weight, model.weight.bfloat16())


class Point(NamedTuple):
    x: Any
    y: Any


def test_containers_keep_their_identity_and_kind(engine: ce.Engine) -> None:
    def make(value: Any) -> dict[str, Any]:
        tensor = torch.full((2,), float(value))
        return {
            "config": {"a": value, "inner": {"b": [value]}},
            "history": [value] * value,
            "tuple": (tensor, value),
            "point": Point(tensor, {"deep": tensor.clone(), "v": value}),
            "lists": [[value], {"v": value}, [tensor.clone()]],
            "default": collections.defaultdict(list, a=[value]),
            "ordered": collections.OrderedDict(a=value),
            "counter": collections.Counter(a=value),
            "set": {value},
            "rank": ce.PerRank({"at": value}),
            "plain rank": ce.PerRank(value),
        }

    engine.save(make(3))
    state = make(1)
    held = {name: state[name] for name in state}
    inner = [state["tuple"][0], state["point"].x, state["point"].y, state["lists"][0]]
    engine.restore(state)
    for name in ("config", "history", "lists", "default", "ordered", "counter", "rank"):
        assert state[name] is held[name], name
    assert state["tuple"][0] is inner[0] and state["point"].x is inner[1]
    assert state["point"].y is inner[2] and state["lists"][0] is inner[3]
    assert state["config"] == {"a": 3, "inner": {"b": [3]}} and state["history"] == [3, 3, 3]
    assert state["tuple"][1] == 3 and state["tuple"][0].tolist() == [3, 3]
    assert type(state["point"]) is Point and state["point"].y["v"] == 3
    assert state["point"].y["deep"].tolist() == [3, 3]
    assert state["lists"][1] == {"v": 3} and state["lists"][2][0].tolist() == [3, 3]
    assert state["default"]["new"] == [] and state["default"]["a"] == [3]
    assert state["counter"] == collections.Counter(a=3) and state["set"] == {3}
    assert state["rank"].obj == {"at": 3} and state["plain rank"].obj == 3


def test_a_placeholder_takes_whatever_was_saved(engine: ce.Engine) -> None:
    saved = {"a": torch.ones(2), "b": {"c": torch.ones(1), "d": 1}, "e": [torch.ones(1)], "f": 3}
    engine.save(saved)
    state: dict[str, Any] = {"a": None, "b": {}, "e": [], "f": "text"}
    held = state["b"]
    engine.restore(state)
    assert state["a"].tolist() == [1, 1] and state["f"] == 3
    assert state["b"] is held and held["c"].tolist() == [1] and held["d"] == 1
    assert state["e"][0].tolist() == [1]


class Loader:
    """A stateful object whose state is a mixture."""

    def __init__(self) -> None:
        self.position, self.order, self.given = 0, torch.arange(5), None

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order, "workers": [{"at": (1, 2)}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.order, self.given = state["position"], state["order"], state


@pytest.mark.parametrize("wrap", [lambda loader: loader, ce.PerRank], ids=["plain", "PerRank"])
def test_a_stateful_object_gets_its_own_dictionary(
    engine: ce.Engine, identical: Identical, wrap: Callable[[Any], Any]
) -> None:
    loader = Loader()
    loader.position, loader.order = 3, torch.randperm(5)
    engine.save({"loader": wrap(loader)})
    other = Loader()
    engine.restore({"loader": wrap(other)})
    assert identical(other.given, loader.state_dict())


def test_an_object_that_refuses_its_state_is_named(engine: ce.Engine) -> None:
    class Picky(Loader):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("epoch")

    engine.save({"deep": {"loader": Loader()}})
    with pytest.raises(StateError, match=r"Picky.load_state_dict refused.*epoch") as caught:
        engine.restore({"deep": {"loader": Picky()}})
    assert caught.value.keys == ("deep/loader",)


def test_what_an_object_was_given_is_its_own(engine: ce.Engine) -> None:
    engine.save({"loader": Loader()})
    one, two = Loader(), Loader()
    engine.restore({"loader": one})
    engine.restore({"loader": two})
    one.order.zero_()
    assert two.order.tolist() == [0, 1, 2, 3, 4]


def test_the_second_generation_is_equal_to_the_bit(
    run: Path, identical: Identical, tmp_path: Path
) -> None:
    def job(directory: Path, steps: range) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        state = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "rng": ce.RngState(),
            "losses": [],
        }
        with ce.Engine(directory) as engine:
            engine.restore(state)
            for step in steps:
                loss = model(torch.randn(16, 4)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                state["losses"].append(loss.item())
                engine.save_async(state, step=step)
        return contents({k: v for k, v in state.items() if k != "rng"})

    whole = job(tmp_path / "whole", range(9))
    for part in (range(3), range(3, 5), range(5, 9)):
        interrupted = job(run, part)
    assert identical(interrupted, whole)


def test_filling_again_and_again_changes_nothing_more(
    engine: ce.Engine, saved: dict[str, Any], identical: Identical
) -> None:
    state = state_of(2.0)
    for _ in range(3):
        engine.restore(state)
        assert identical(contents(state), contents(saved))
    engine.save(state, step=6)
    assert identical(ce.load(engine.root, step=6).to_dict(), ce.load(engine.root, step=5).to_dict())


def test_a_dictionary_of_a_module_can_be_the_template(engine: ce.Engine) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    engine.save({"model": model.state_dict()})
    engine.restore({"model": other})
    assert torch.equal(other.weight, model.weight)
    engine.save({"model": model})
    third = nn.Linear(2, 2)
    engine.restore({"model": third.state_dict()})
    assert torch.equal(third.weight, model.weight)

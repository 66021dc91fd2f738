"""Matching a stored tree with a live state: any state fills any other of its form."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptengine as ce
from ckptengine.errors import StateError
from ckptengine.format.index import TensorEntry
from ckptengine.plan.plan import dense_stride
from ckptengine.state.assign import Assignment
from ckptengine.state.collect import collect

Identical = Callable[[Any, Any], bool]


class Pair(NamedTuple):
    one: Any
    two: Any


def assigned(saved: Mapping[str, Any], state: dict[str, Any], **options: Any) -> Assignment:
    """Restores `saved` into `state` without any file."""
    found = collect(saved)
    tensors = [tensor.detach().clone() for tensor in found.tensors]
    entries = [
        TensorEntry(dtype, shape, dense_stride(shape, stride), 0, 0, 0)
        for dtype, shape, stride in found.specs
    ]
    assignment = Assignment(state, found.tree, entries, found.values, **options)
    assignment.allocate()
    for number, target in assignment.fills:
        target.copy_(tensors[number])
    assignment.finish()
    return assignment


def other_than(value: Any) -> Any:
    """A value of the same form, with other content."""
    if isinstance(value, torch.Tensor):
        return value.clone() + 1
    if isinstance(value, np.ndarray):
        return value + 1 if value.dtype.kind in "iuf" else value[:0]
    if isinstance(value, Mapping):
        return type(value)((key, other_than(inner)) for key, inner in value.items())
    if isinstance(value, Pair):
        return Pair(*map(other_than, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(other_than, value))
    return "other"


LEAVES = st.one_of(
    st.integers(0, 5).map(lambda n: torch.arange(n, dtype=torch.float32)),
    st.integers(0, 5).map(lambda n: np.arange(n, dtype=np.int16)),
    st.sampled_from([None, 1, "text", (), [], [1, (2,)], {}, {"a": {"b": 1}}, np.float32(1)]),
    st.just(np.array(["a", "b"])),
)
KEYS = st.sampled_from(["a", "b", "a.b", "", 0, "0", (1,), None])
STATES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.builds(Pair, inner, inner),
            st.dictionaries(KEYS, inner, max_size=3),
            st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict),
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@given(STATES)
def test_any_state_fills_another_of_its_form(identical: Identical, saved: dict[str, Any]) -> None:
    state = other_than(saved)
    report = assigned(saved, state).report
    assert identical(state, saved)
    assert report == type(report)()


@given(STATES)
def test_any_state_fills_placeholders(identical: Identical, saved: dict[str, Any]) -> None:
    state = dict.fromkeys(saved)
    assigned(saved, state)
    assert identical(state, saved)


@given(STATES, STATES)
def test_states_of_two_forms_fill_or_name_what_does_not_fit_and_stay(
    identical: Identical, saved: dict[str, Any], state: dict[str, Any]
) -> None:
    before = copy.deepcopy(state)
    try:
        assigned(saved, state)
    except StateError as error:
        assert error.keys
        assert identical(state, before)
    else:
        assert set(state) == set(saved)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))


def adam(module: torch.nn.Module, *, absent: tuple[int, ...] = (), without: str = "") -> Any:
    """An optimizer with state, but for the parameters `absent` and one entry of parameter 2."""
    optimizer = torch.optim.AdamW(module.parameters())
    for number, parameter in enumerate(module.parameters()):
        if number not in absent:
            optimizer.state[parameter] = {
                name: torch.full_like(parameter, number) for name in ("exp_avg", "exp_avg_sq")
            } | {"step": torch.tensor(float(number))}
    optimizer.state[list(module.parameters())[2]].pop(without, None)
    return optimizer


@pytest.mark.parametrize("wrapped", [False, True])
def test_state_of_a_parameter_may_be_absent_as_a_whole(wrapped: bool) -> None:
    def state(optimizer: Any, module: torch.nn.Module) -> dict[str, Any]:
        return {"o": ce.AppState(module, optimizer) if wrapped else optimizer}

    one, two = model(), model()
    saved, live = adam(one, absent=(0, 1)), adam(two)
    report = assigned(state(saved, one), state(live, two)).report
    prefix = "o/optimizer/state" if wrapped else "o/state"
    keys = ("0.weight", "0.bias") if wrapped else ("[0]", "[1]")
    assert report.unfilled == tuple(f"{prefix}/{key}" for key in keys)
    assert not report.missing
    assert len(live.state) == 2
    assert all(live.state[parameter]["step"] >= 2 for parameter in live.state)


@pytest.mark.parametrize("name", ["exp_avg", "step"])
@pytest.mark.parametrize("fresh", [False, True])
def test_state_of_a_parameter_may_not_be_absent_in_part(name: str, fresh: bool) -> None:
    saved = {"o": adam(model(), without=name)}
    absent = (0, 1, 2, 3) if fresh else ()
    live = adam(model(), absent=absent)
    before = copy.deepcopy(live.state_dict())
    with pytest.raises(StateError) as caught:
        assigned(saved, {"o": live})
    assert f"o/state/[2]/{name}" in caught.value.keys
    assert repr(live.state_dict()) == repr(before)


def test_without_strict_a_part_may_be_absent_and_is_reported() -> None:
    saved = {"o": adam(model(), without="exp_avg")}
    report = assigned(saved, {"o": adam(model())}, strict=False).report
    assert report.missing == ("o/state/[2]/exp_avg",)


def test_memory_shared_by_the_live_optimizer_is_not_filled_twice() -> None:
    source = model()
    saved = adam(source)
    live = adam(model())
    shared = torch.zeros(())
    for entry in live.state.values():
        entry["step"] = shared
    assigned({"o": saved}, {"o": live})
    assert [entry["step"].item() for entry in live.state.values()] == [0, 1, 2, 3]


def test_state_that_is_no_mapping_where_one_is_expected_is_named() -> None:
    with pytest.raises(StateError) as caught:
        assigned({"a": 1, "b": [1]}, {"a": {"t": torch.zeros(1)}, "b": [torch.zeros(1), 2]})
    assert caught.value.keys == ("a", "b")


def test_fields_of_a_named_tuple_are_named() -> None:
    saved = {"p": Pair(torch.ones(1), 2)}
    with pytest.raises(StateError) as caught:
        assigned(saved, {"p": Pair(torch.ones(2), 2)})
    assert caught.value.keys == ("p/one",)

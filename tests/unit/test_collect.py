"""Taking a state apart: what is one tensor, what is a value, and what is refused."""

from __future__ import annotations

import ctypes
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import ckptengine as ce
from ckptengine.errors import StateError
from ckptengine.state.collect import collect


def numbers(state: dict[str, Any]) -> list[int]:
    """The tensor number under each of the state's keys."""
    return [node["$t"] for node in collect(state).tree.values()]


BASE = torch.arange(12.0).reshape(3, 4)
COMPLEX = torch.randn(4, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (BASE, BASE),
        (BASE, BASE.view(3, 4)),
        (BASE, BASE.detach()),
        (BASE[1], BASE[1]),
        (torch.nn.Parameter(BASE), BASE),
        (BASE, torch.from_numpy(BASE.numpy())),
        (COMPLEX.conj(), COMPLEX.conj()),
        (COMPLEX, COMPLEX.conj().conj()),
    ],
)
def test_the_same_memory_in_the_same_form_is_one_tensor(
    one: torch.Tensor, other: torch.Tensor
) -> None:
    assert numbers({"a": one, "b": other}) == [0, 0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (BASE, BASE.clone()),
        (BASE, BASE.t()),
        (BASE, BASE.view(4, 3)),
        (BASE, BASE[:2]),
        (BASE, BASE.view(torch.int32)),
        (BASE[:, 0], BASE[:, 1]),
        (COMPLEX, COMPLEX.conj()),
        (COMPLEX.imag, COMPLEX.conj().imag),
        (torch.empty(0), torch.empty(0)),
        (torch.empty(0, 2), torch.empty(2, 0)),
    ],
)
def test_anything_else_is_two(one: torch.Tensor, other: torch.Tensor) -> None:
    assert numbers({"a": one, "b": other}) == [0, 1]


def test_memory_freed_and_used_again_during_the_walk_is_not_taken_for_a_tie() -> None:
    class Fleeting:
        """Each state is a new tensor that nobody else holds."""

        def __init__(self, value: float) -> None:
            self.value = value

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"w": torch.full((1000,), self.value)}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...

    found = collect({f"k{n}": Fleeting(float(n)) for n in range(50)})
    assert [t[0].item() for t in found.tensors] == list(range(50))


def test_values_are_those_of_the_moment() -> None:
    config = {"lr": 0.1, "names": ["a"], "inner": [1, (2, {3})]}
    found = collect({"config": config})
    config["names"].append("b")  # type: ignore[attr-defined]
    assert found.values[1] == ["a"]


def test_arrays_share_their_memory_with_what_is_stored() -> None:
    array = np.arange(6, dtype=np.int16)
    (tensor,) = collect({"a": array}).tensors
    array[0] = 9
    assert tensor.tolist()[0] == 9


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6)[::-1],
        np.frombuffer(bytes(range(8)), dtype=np.uint16),
        np.zeros(3, dtype=[("a", "i1"), ("b", "f4")])["b"],
        np.broadcast_to(np.float32(3), (2, 2)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(5, dtype=np.uint64),
    ],
)
def test_arrays_of_any_layout_are_taken(array: np.ndarray) -> None:
    found = collect({"a": array})
    assert found.tree == {"a": {"$array": {"$t": 0}}}
    assert np.array_equal(found.tensors[0].numpy(), array)


class Stateful(dict):  # type: ignore[type-arg]
    def state_dict(self) -> Any:
        return self

    def load_state_dict(self, state: Any) -> None: ...


def test_a_state_dict_goes_before_what_the_object_is_otherwise() -> None:
    class Counting(dict):  # type: ignore[type-arg]
        def state_dict(self) -> Any:
            return {"count": 3}

        def load_state_dict(self, state: Any) -> None: ...

    assert collect({"x": Counting(other=1)}).tree == {"x": {"count": {"$v": 0}}}
    assert collect({"x": Stateful(own=1)}).tree == {"x": {"own": {"$v": 0}}}


def test_state_of_a_rank_is_marked_and_named_by_it() -> None:
    found = collect({"loader": ce.PerRank({"at": 1}), "rng": ce.RngState()}, rank=3)
    assert found.tree["loader"] == {"$rank": {"at": {"$v": 0}}}
    assert set(found.tree["rng"]) == {"$rank"}
    with pytest.raises(StateError) as caught:
        collect({"loader": ce.PerRank({"at": object()})}, rank=3)
    assert caught.value.keys == ("loader/3/at",)


def test_all_that_cannot_be_stored_is_named_at_once() -> None:
    state = {
        "good": 1,
        "a": object(),
        "b": [torch.empty(2, device="meta"), {"c": torch.ones(2).to_sparse()}],
        "d": {"e": [1, {2: {3}}, {"f": lambda: 0}]},
    }
    with pytest.raises(StateError) as caught:
        collect(state)
    assert caught.value.keys == ("a", "b/[0]", "b/[1]/c", "d/e/[2]/f")
    assert all(key in str(caught.value) for key in caught.value.keys)


def test_a_key_that_cannot_be_stored_is_named() -> None:
    with pytest.raises(StateError) as caught:
        collect({"a": {object: torch.ones(1)}})
    assert "a/" in caught.value.keys[0]


@pytest.mark.parametrize("kind", ["dict", "list", "tuple in list", "twice"])
def test_what_contains_itself_is_refused_soon(kind: str) -> None:
    inner: Any = {"dict": {}, "list": [], "tuple in list": [], "twice": {}}[kind]
    if kind == "list":
        inner.append(inner)
    elif kind == "tuple in list":
        inner.append((torch.ones(1), inner))
    else:
        inner.update(one=inner, other=inner)
    with pytest.raises(StateError, match="contains itself") as caught:
        collect({"here": inner})
    assert caught.value.keys == ("here",)


def test_a_state_is_a_mapping_of_any_kind() -> None:
    assert collect(MappingProxyType({"a": 1})).tree == {"a": {"$v": 0}}
    with pytest.raises(StateError, match="not a list"):
        collect([1])  # type: ignore[arg-type]


def test_a_tensor_at_a_reused_address_is_told_by_its_own_bytes() -> None:
    # One block of memory, seen as two states that never live at once.
    block = (ctypes.c_float * 4)()
    first = collect({"a": torch.frombuffer(block, dtype=torch.float32)})
    second = collect({"b": torch.frombuffer(block, dtype=torch.float32)[1:]})
    assert (len(first.tensors), len(second.tensors)) == (1, 1)
    assert second.specs[0][1] == (3,)

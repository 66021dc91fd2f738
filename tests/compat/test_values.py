"""Plain values, containers and keys of every kind, through a real checkpoint."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import math
import pathlib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptengine as ce

Identical = Callable[[Any, Any], bool]


class Phase(enum.Enum):
    WARMUP = "warmup"


class Flags(enum.Flag):
    A = enum.auto()
    B = enum.auto()


class Batch(NamedTuple):
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Config:
    depth: int
    rate: float = 0.1


VALUES: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": (0, -1, 2**63 - 1, 2**63, -(10**400)),
    "floats": [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324],
    "complex": complex(-0.0, math.nan),
    "text": ["", "naïve", "😀", "\ud800", "\ud83d\ude00", "\0", "a" * 5000, "\n\r\t\x85\u2028"],
    "bytes": (b"", b"\x00\xff", bytearray(b"x")),
    "nested": {"a": [(), [], {}, ({},), [[]], {"b": {"c": None}}]},
    "sets": ({1, "1"}, frozenset({(1, 2)}), set()),
    "enum": (Phase.WARMUP, Flags.A | Flags.B),
    "path": pathlib.Path("a/b"),
    "deque": collections.deque([1, [2]], maxlen=5),
    "counter": collections.Counter("aab"),
    "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
    "namedtuple": Batch([1], {2}),
    "dataclass": Config(3),
    "namespace": argparse.Namespace(lr=0.1, sub=argparse.Namespace(a=[1])),
    "simple namespace": types.SimpleNamespace(a=1),
    "torch": [torch.bfloat16, torch.device("cpu"), torch.Size([1, 2]), slice(1, 2)],
    "numpy scalars": [
        np.float64(0.1),
        np.int8(-1),
        np.bool_(True),
        np.str_("x"),
        np.float16("nan"),
    ],
    "numpy dates": [np.datetime64("2024-01-01"), np.timedelta64(3, "ms"), np.datetime64("NaT")],
}
ARRAYS: dict[str, np.ndarray] = {
    **{
        name: np.arange(6).reshape(2, 3).astype(name)
        for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g")
    },
    **{name: np.ones((2, 2), name) * (1 + 2j) for name in ("c8", "c16")},
    **{f"big {name}": np.arange(4).astype(f">{name}") for name in ("i2", "f4", "f8", "c8")},
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "reversed": np.arange(5)[::-1],
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "dates": np.array(["2024-01-01", "NaT"], dtype="M8[ns]"),
    "no text": np.array([], dtype="U4"),
    "scalar": np.array(3.5),
    "empty": np.zeros((0, 3), dtype="f4"),
}
KEYS: list[Any] = [
    *("", "/", "a/b", "..", ".", "a.b", "a", "😀", "é", "\ud800", "\ud83d\ude00", "k" * 5000),
    *("$t", "$dict", "[0]", "~", "~0", "__proto__", " ", "\n", "Foo", "foo", "#1", "a.b#1"),
    *(0, "0", -1, 1.5, True, None, "None", (1, "a"), (1, ("a", None)), b"k", Phase.WARMUP),
    *(frozenset({1}), np.int64(77), 2**100, math.inf),
]


def test_every_kind_of_value_comes_back(engine: ce.Engine, run: Path, identical: Identical) -> None:
    engine.save(VALUES)
    assert identical(ce.load(run).to_dict(), VALUES)
    template = dict.fromkeys(VALUES)
    engine.restore(template)
    assert identical(template, VALUES)


@pytest.mark.parametrize("template", ["filled", "read-only", "absent"])
def test_every_kind_of_array_comes_back(
    engine: ce.Engine, run: Path, identical: Identical, template: str
) -> None:
    engine.save(ARRAYS)
    assert identical(ce.load(run).to_dict(), ARRAYS)
    state: dict[str, Any] = {name: np.zeros_like(array) for name, array in ARRAYS.items()}
    state["reversed"] = np.zeros(5, dtype=ARRAYS["reversed"].dtype)[::-1]
    for array in state.values():
        array.flags.writeable = template == "filled"
    if template == "absent":
        state = dict.fromkeys(ARRAYS)
    held = dict(state)
    engine.restore(state)
    assert identical(state, ARRAYS)
    if template == "filled":
        in_place = {name for name in ARRAYS if state[name] is held[name]}
        assert in_place >= {"f4", "fortran", "reversed", "u8", "c16", "scalar", "empty"}


def test_keys_of_any_kind_come_back_and_stay_apart(
    engine: ce.Engine, run: Path, identical: Identical
) -> None:
    state = {key: {"t": torch.tensor([number]), "v": number} for number, key in enumerate(KEYS)}
    engine.save(state)
    assert identical(ce.load(run).to_dict(), state)
    template = {key: {"t": torch.tensor([-1]), "v": -1} for key in KEYS}
    engine.restore(template)
    assert identical(template, state)


@pytest.mark.parametrize("value", ["x" * 5_000_000, [0] * 1_000_000, bytes(3_000_000)], ids=type)
def test_long_dull_values_come_back(engine: ce.Engine, run: Path, value: Any) -> None:
    engine.save({"history": value, "w": torch.ones(2)})
    assert ce.load(run)["history"] == value
    state = {"history": None, "w": torch.zeros(2)}
    engine.restore(state)
    assert state["history"] == value
    assert ce.verify(run).step == 0


def test_dotted_and_nested_keys_do_not_meet(engine: ce.Engine, run: Path) -> None:
    one = torch.ones(1)
    state = {"a": {"b": one, "[0]": one * 2}, "a.b": one * 3, "a/b": one * 4, "l": [one * 5],
             "l.0": one * 6, "l/[0]": one * 7}  # fmt: skip
    engine.save(state)
    loaded = ce.load(run)
    assert loaded["a"]["b"] == 1 and loaded["a"]["[0]"] == 2
    assert (loaded["a.b"], loaded["a/b"], loaded["l"][0]) == (3, 4, 5)
    assert (loaded["l.0"], loaded["l/[0]"]) == (6, 7)


@given(st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_state_comes_back(
    engine: ce.Engine, run: Path, identical: Identical, data: st.DataObject
) -> None:
    keys = st.sampled_from(KEYS) | st.text(max_size=3)
    leaves = (
        st.sampled_from([*VALUES.values(), *ARRAYS.values()])
        | st.integers(0, 5).map(torch.arange)
        | st.text()
    )
    state = data.draw(
        st.dictionaries(
            keys,
            st.recursive(
                leaves,
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.lists(inner, max_size=3).map(tuple)
                    | st.dictionaries(keys, inner, max_size=3)
                ),
                max_leaves=6,
            ),
            max_size=4,
        )
    )
    info = engine.save(state)
    assert identical(ce.load(info.path).to_dict(), state)
    assert ce.verify(info.path).step == info.step

"""Tagged JSON: whatever goes in comes out as it was, and nothing that comes in is run."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import io
import json
import pathlib
import pickle
import sys
import types
import typing
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.errors import CorruptError, StateError
from ckptengine.format import codec

Identical = Callable[[Any, Any], bool]


class Colour(enum.Enum):
    RED = "r"
    BLUE = ("b", 2)


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass
class Options:
    depth: int
    names: list[str]
    late: int = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: float = 0.5


class Point(typing.NamedTuple):
    x: int
    y: Any


class Version(str):
    pass


def through_json(value: Any) -> Any:
    text = json.dumps(codec.encode(value), allow_nan=False)
    assert text.isascii()
    return codec.decode(json.loads(text))


def read_by_torch(value: Any) -> Any:
    """What `torch.load(weights_only=True)` makes of the form that stock readers get."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(codec.plain(value), 2))
        file.writestr("archive/version", "3\n")
    archive.seek(0)
    return torch.load(archive, weights_only=True)


TEXTS = st.text(st.characters(exclude_categories=()))  # surrogates included
NUMBERS = st.integers() | st.floats() | st.complex_numbers() | st.integers(-(2**9000), 2**9000)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS | st.binary()
KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=2),
    max_leaves=3,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(collections.Counter),
        st.builds(collections.deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 5)),
        st.sets(KEYS, max_size=3),
        st.frozensets(KEYS, max_size=3),
    ),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back_as_they_were(identical: Identical, value: Any) -> None:
    assert identical(through_json(value), value)


@given(VALUES)
def test_stock_torch_reads_the_plain_form_of_any_value(identical: Identical, value: Any) -> None:
    expected = pickle.loads(pickle.dumps(codec.plain(value), 2))
    assert identical(read_by_torch(value), expected)


KINDS = pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        Colour.BLUE,
        Level.LOW,
        Bits.A,
        Bits.A | Bits.B,
        Bits(0),
        pathlib.Path("a/b"),
        pathlib.PurePosixPath("/x"),
        pathlib.PureWindowsPath("c:\\x"),
        slice(1, None, 2),
        argparse.Namespace(lr=0.1, names=["a"]),
        types.SimpleNamespace(a=(1,)),
        Point(1, [Frozen()]),
        Frozen(float("inf")),
        bytearray(b"abc"),
        2**63,
        -(2**63),
        float("nan"),
        -0.0,
        complex(-0.0, float("inf")),
        "\ud83d\ude00",
        "\udc80",
        "$t",
        {"$t": 1, "a": 2},
        {"": {"$": {}}},
        {True: 1, "True": 2, 2: 3, "2": 4, 2.5: 5, None: 6, "None": 7, (1, "a"): 8, b"x": 9},
        {Colour.RED: 1, frozenset({1}): 2, Frozen(): 3},
        torch.float8_e4m3fn,
        torch.device("cuda", 1),
        torch.Size([2, 3]),
        np.float64(0.1),
        np.float16("nan"),
        np.longdouble(1) / 3,
        np.array([1, "inf"], dtype=np.clongdouble),
        np.finfo(np.longdouble).max,
        np.void(b"abc"),
        np.bool_(True),
        np.uint64(2**64 - 1),
        np.complex64(1 - 2j),
        np.str_("né"),
        np.str_(""),
        np.bytes_(b""),
        np.datetime64("2024-05-01T10:00", "ns"),
        np.datetime64("NaT"),
        np.timedelta64(5, "D"),
        np.array(["a", "bcd"]),
        np.array([], dtype="U3"),
        np.zeros((0, 3), dtype=">f4"),
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.array("0-dim"),
        np.array(["2020-01-01"], dtype="M8[s]"),
    ],
    ids=lambda value: f"{type(value).__name__}-{value!r}"[:50],
)


@KINDS
def test_kinds_come_back_as_they_were(identical: Identical, value: Any) -> None:
    assert identical(through_json(value), value)


@KINDS
def test_stock_torch_reads_the_plain_form_of_any_kind(identical: Identical, value: Any) -> None:
    for case in (value, [value], {"k": (value,)}):
        expected = pickle.loads(pickle.dumps(codec.plain(case), 2))
        assert identical(read_by_torch(case), expected)


def test_subclasses_of_plain_types_become_the_plain_data_they_hold(identical: Identical) -> None:
    assert identical(through_json(Version("2.1")), "2.1")
    assert identical(through_json([Version("2.1")]), ["2.1"])


def test_a_field_that_was_never_set_stays_so() -> None:
    found = through_json(Options(3, ["a"]))
    assert isinstance(found, Options)
    assert vars(found) == {"depth": 3, "names": ["a"]}


def test_a_default_dict_comes_back_without_its_factory() -> None:
    found = through_json(collections.defaultdict(list, a=[1]))
    assert type(found) is collections.defaultdict
    assert found == {"a": [1]} and found.default_factory is None


def test_where_a_class_is_gone_its_data_is_there() -> None:
    class Gone(enum.Enum):
        ONE = 1

    @dataclasses.dataclass
    class Config:
        lr: float

    Pair = collections.namedtuple("Pair", "a b")
    assert through_json(Gone.ONE) == 1
    assert through_json(Config(0.5)) == types.SimpleNamespace(lr=0.5)
    found = through_json(Pair(1, 2))
    assert found == (1, 2) and found.b == 2 and type(found).__name__ == "Pair"


def test_a_dataclass_that_is_something_else_as_well_comes_back_as_data() -> None:
    found = codec.decode({"$dataclass": [f"{__name__}:Output", {"a": 1}]})
    assert found == types.SimpleNamespace(a=1)


@dataclasses.dataclass
class Output(dict):  # type: ignore[type-arg]
    a: int = 0


def test_no_class_is_imported_or_constructed_and_no_attribute_hook_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    lazy = types.ModuleType("lazy_module")
    lazy.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    for name in ("lazy_module:Thing", "os:system", "xml.dom.pulldom:SAX2DOM"):
        assert codec.decode({"$enum": [name, "run", 1]}) == 1
        assert codec.decode({"$dataclass": [name, {"a": 1}]}).a == 1
        assert codec.decode({"$namedtuple": [name, {"a": 1}]}).a == 1
    assert not asked
    assert "xml.dom.pulldom" not in sys.modules


@pytest.mark.parametrize(
    "node",
    [
        {"$nothing": 1},
        {"$tuple": 1},
        {"$tuple": [], "$set": []},
        {"$int": "pickle"},
        {"$float": "00"},
        {"$dict": [[1]]},
        {"$dict": [[{"a": 1}, 2]]},
        {"$set": [[]]},
        {"$bytes": 3},
        {"$numpy": ["O", "AAAAAAAAAAA="]},
        {"$ndarray": ["O", [1], "AAAAAAAAAAA="]},
        {"$ndarray": ["<f4", [5], "AAAA"]},
        {"$dtype": "load"},
        {"$dtype": "nowhere"},
        {"$device": "nowhere"},
        {"$size": ["a"]},
        {"$enum": [1]},
        {"$namedtuple": ["a:b", {"not a name": 1}]},
        {"$purepath": ["ntfs", "x"]},
        {"$deque": [-1, []]},
    ],
    ids=repr,
)
def test_forms_that_no_writer_makes_are_corrupt(node: Any) -> None:
    with pytest.raises(CorruptError):
        codec.decode(node)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"a": [1, {2: object()}]}, "a/[1]/[2]"),
        ([lambda: 0], "[0]"),
        ({"f": io.BytesIO(b"x")}, "f"),
        ({"r": range(3)}, "r"),
        ({"cls": Colour}, "cls"),
        ({"m": np.ma.masked_array([1, 2], mask=[0, 1])}, "m"),
        ({"s": np.zeros(2, dtype="i4,f4")}, "s"),
        ({"s": np.zeros(2, dtype="i4,f4")[0]}, "s"),
        ({"o": np.array([object()])}, "o"),
        ({"t": np.array(["a"], dtype=np.dtypes.StringDType())}, "t"),
        ({"x": collections.deque([torch.ones(1)])}, "x/[0]"),
        ({"n": Point(1, Frozen(open))}, "n/y/x"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_has_no_form_is_refused_by_key(value: Any, key: str) -> None:
    with pytest.raises(StateError) as caught:
        codec.encode(value)
    assert caught.value.keys == (key,)
    assert key in str(caught.value)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: [x],
        lambda x: (x,),
        lambda x: {1: x},
        lambda x: collections.OrderedDict(k=x),
        lambda x: collections.deque([x]),
        lambda x: frozenset([x]),
        Frozen,
    ],
)
def test_what_can_be_taken_apart_can_be_rebuilt(wrap: Callable[[Any], Any]) -> None:
    def nested(levels: int) -> Any:
        value: Any = 1
        for _ in range(levels):
            value = wrap(value)
        return value

    assert through_json(nested(codec.MAX_DEPTH)) == nested(codec.MAX_DEPTH)
    with pytest.raises(StateError, match="nested more than"):
        codec.encode(nested(codec.MAX_DEPTH + 2))


def test_a_value_that_contains_itself_is_refused() -> None:
    items: list[Any] = [1]
    items.append(items)
    with pytest.raises(StateError, match="contains itself") as caught:
        codec.encode({"deep": {"list": items}}, ())
    assert caught.value.keys == ("deep",)


PARTS = KEYS | st.sampled_from(["[0]", "~2", "~", "/", "", "[", "~20]", 0, "0"])
PATHS = st.lists(PARTS, max_size=3).map(tuple)


@given(PATHS, PATHS)
def test_two_paths_never_share_a_key(
    identical: Identical, one: tuple[Any, ...], other: tuple[Any, ...]
) -> None:
    texts = codec.key_text(one), codec.key_text(other)
    assert texts[0] != texts[1] or identical(one, other)
    for text in texts:
        text.encode()  # can be printed


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("model", "layer.0.weight"), "model/layer.0.weight"),
        (("a/b", "~"), "a~1b/~0"),
        (("", "[x]"), "~3/~2x]"),
        ((0, "0", (1, 2), None), '[0]/0/[{"$tuple":[1,2]}]/[null]'),
        (("é",), "é"),
    ],
)
def test_keys_read_well(path: tuple[Any, ...], text: str) -> None:
    assert codec.key_text(path) == text

"""The index: round trips, and refusal of whatever does not add up."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.errors import CorruptError
from ckptengine.format import index
from ckptengine.format.checksum import segments
from ckptengine.format.dtypes import DTYPES
from ckptengine.format.index import FileSize, Index, TensorEntry, ValueEntry
from ckptengine.types import PART, Chunk


def rendered(
    tensors: list[TensorEntry],
    values: list[Any],
    places: list[ValueEntry],
    files: list[FileSize],
    tables: dict[str, bytes] | None = None,
    tree: Any = None,
) -> bytes:
    if tables is None:
        tables = {
            file.name: table_for(number, file, tensors, places) for number, file in enumerate(files)
        }
    static = index.static_frame(0, tree or {}, files, tensors, places)
    return static + index.dynamic_frame(json.dumps(values).encode(), tables)


def table_for(
    number: int, file: FileSize, tensors: list[TensorEntry], places: list[ValueEntry]
) -> bytes:
    """A CRC table of the right length, with every number different."""
    found = sorted(
        {(e.offset, e.nbytes) for e in [*tensors, *places] if e.file == number and e.nbytes}
    )
    chunks = [Chunk(offset, nbytes, (0, 0)) for offset, nbytes in found]
    count = len(list(segments(chunks, file.nbytes)))
    return b"".join(number.to_bytes(4, "little") for number in range(count))


@st.composite
def contents(draw: st.DrawFn) -> tuple[list[TensorEntry], list[Any], list[ValueEntry], FileSize]:
    at = 0
    tensors = []
    for _ in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        order = draw(st.permutations(range(len(shape))))
        stride = [0] * len(shape)
        step = 1
        for dim in order:
            stride[dim] = step
            step *= shape[dim]
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        at += draw(st.integers(0, 100))
        tensors.append(TensorEntry(dtype, shape, tuple(stride), 0, at, nbytes))
        at += nbytes
    values = draw(st.lists(st.text() | st.integers(-5, 5), max_size=3))
    places = []
    for _ in values:
        at += draw(st.integers(0, 9))
        places.append(ValueEntry(0, at, 64))
        at += 64
    return tensors, values, places, FileSize("__0_0.distcp", at + draw(st.integers(0, 50)))


@given(contents())
def test_it_comes_back_as_it_was(
    made: tuple[list[TensorEntry], list[Any], list[ValueEntry], FileSize],
) -> None:
    tensors, values, places, file = made
    tree = {"t": [{"$t": number} for number in range(len(tensors))]}
    found = Index.from_bytes(rendered(tensors, values, places, [file], tree=tree), "here")
    assert found.tree == tree
    assert list(found.tensors) == tensors
    assert list(found.value_entries) == places
    assert list(found.values) == values
    assert found.files == (file,)
    parts = found.parts(0)
    ends = [0, *(part.offset + part.nbytes for part in parts)]
    assert [part.offset for part in parts] == ends[:-1] and ends[-1] == file.nbytes
    for number, entry in enumerate(tensors):
        own = found.tensor_parts(number)
        assert sum(part.nbytes for part in own) == entry.nbytes
        assert not own or own[0].offset == entry.offset


def test_large_payloads_are_checksummed_in_parts() -> None:
    entry = TensorEntry("uint8", (2 * PART + 5,), (1,), 0, 4096, 2 * PART + 5)
    found = Index.from_bytes(
        rendered([entry], [], [], [FileSize("f", 4096 + entry.nbytes)]), "here"
    )
    assert [part.nbytes for part in found.tensor_parts(0)] == [PART, PART, 5]
    assert [part.crc for part in found.tensor_parts(0)] == [1, 2, 3]  # 0 is the gap's


GOOD = TensorEntry("float32", (2, 3), (3, 1), 0, 64, 24)
FILE = FileSize("f", 200)
PLACE = ValueEntry(0, 100, 64)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float99"},
        {"shape": (2, -3)},
        {"shape": (2, 2)},
        {"shape": (2, 3.0)},
        {"shape": (2**62, 2**62)},
        {"stride": (1,)},
        {"stride": (4, 1)},
        {"stride": (0, 0)},
        {"stride": (-3, 1)},
        {"file": 1},
        {"file": -1},
        {"offset": -1},
        {"offset": 190},
        {"nbytes": 25},
        {"nbytes": "24"},
    ],
    ids=repr,
)
def test_a_tensor_that_does_not_add_up_is_refused(changes: dict[str, Any]) -> None:
    bad = GOOD._replace(**changes)
    data = rendered([bad], [], [], [FILE], {"f": bytes(12)})
    with pytest.raises(CorruptError, match="here"):
        Index.from_bytes(data, "here")


@pytest.mark.parametrize(
    ("values", "places", "files", "tables"),
    [
        ([1], [], [FILE], {"f": b""}),  # a value without a place
        ([1], [ValueEntry(0, 180, 64)], [FILE], {"f": b""}),  # outside its file
        ([1], [ValueEntry(3, 0, 64)], [FILE], {"f": b""}),  # of no file
        ([], [], [FileSize("f", -1)], {"f": b""}),
        ([], [], [FILE], {}),  # no checksums
    ],
)
def test_what_does_not_add_up_is_refused(
    values: list[Any], places: list[ValueEntry], files: list[FileSize], tables: dict[str, bytes]
) -> None:
    with pytest.raises(CorruptError, match="here"):
        Index.from_bytes(rendered([], values, places, files, tables), "here")


@pytest.mark.parametrize(
    ("tensors", "table"),
    [
        ([GOOD], bytes(4)),  # too few checksums
        ([GOOD], bytes(400)),
        ([GOOD, GOOD._replace(offset=70)], bytes(12)),  # payloads overlap
    ],
)
def test_checksums_that_do_not_tile_the_file_are_refused(
    tensors: list[TensorEntry], table: bytes
) -> None:
    found = Index.from_bytes(rendered(tensors, [], [], [FILE], {"f": table}), "here")
    with pytest.raises(CorruptError):
        found.tensor_parts(0)
    with pytest.raises(CorruptError):
        found.parts(0)


def test_damage_is_noticed_or_harmless() -> None:
    data = rendered([GOOD], ["x" * 40, {"a": 1}], [PLACE, ValueEntry(0, 164, 16)], [FILE])
    before = Index.from_bytes(data, "here")
    rng = random.Random(0)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << rng.randrange(8)
        try:
            assert Index.from_bytes(bytes(damaged), "here") == before
        except CorruptError as error:
            assert "here" in str(error)


def test_each_cut_is_noticed() -> None:
    data = rendered([GOOD], ["x" * 40], [PLACE], [FILE])
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            Index.from_bytes(data[:length], "here")


@pytest.mark.parametrize("value", ["x" * 10_000_000, [0] * 2_000_000, "\0" * 3_000_000])
def test_a_value_that_shrinks_to_nothing_can_still_be_read(value: Any) -> None:
    data = rendered([], [value], [PLACE], [FILE])
    assert len(data) < 400_000
    assert Index.from_bytes(data, "here").values == (value,)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    assert len(bomb) < 100_000
    with pytest.raises(CorruptError, match="sane size"):
        Index.from_bytes(bomb, "here")


@pytest.mark.parametrize(
    ("shape", "stride", "dense"),
    [
        ((), (), True),
        ((3,), (1,), True),
        ((3,), (2,), False),
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (0, 1), False),
        ((1, 3), (99, 1), True),  # the step of a single element is never taken
        ((2, 3, 4, 5), (60, 1, 15, 3), True),  # channels last
        ((2, 2), (1, 1), False),
    ],
)
def test_dense_means_each_element_once(
    shape: tuple[int, ...], stride: tuple[int, ...], dense: bool
) -> None:
    assert index.is_dense(shape, stride) is dense

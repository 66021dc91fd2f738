"""Plans: every byte has one place, and no plan outlives the structure that it was made for."""

from __future__ import annotations

import io
import itertools
import math
import random
import struct
import zipfile
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.format.checksum import crc32
from ckptengine.format.index import is_dense
from ckptengine.plan.plan import Plan, dense_stride, make_plan
from ckptengine.state.collect import collect
from ckptengine.types import PAGE


def planned(state: dict[Any, Any]) -> Plan:
    found = collect(state)
    return make_plan(found.tree, found.signature, found.specs, found.pickles)


def fits(plan: Plan, state: dict[Any, Any]) -> bool:
    found = collect(state)
    return plan.fits(found.signature, found.specs, found.pickles)


ONE, TWO = torch.ones(2), torch.ones(2)


class Versioned(torch.nn.Linear):
    _version = 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": ONE}, {"a": ONE, "b": 1}),
        ({"a": ONE}, {"b": ONE}),
        ({"a": ONE}, {"a": torch.ones(3)}),
        ({"a": ONE}, {"a": ONE.to(torch.float64)}),
        ({"a": ONE}, {"a": ONE.numpy()}),
        ({"a": ONE}, {"a": 1}),
        ({"a": torch.ones(2, 2)}, {"a": torch.ones(2, 2).t()}),
        ({"a": ONE, "b": TWO}, {"a": ONE, "b": ONE}),
        ({"a": ONE, "b": ONE}, {"a": ONE, "b": TWO}),
        ({"a": ONE, "b": 1}, {"b": 1, "a": ONE}),
        ({1: ONE}, {True: ONE}),
        ({1: ONE}, {1.0: ONE}),
        ({1: ONE}, {"1": ONE}),
        ({0.0: ONE}, {-0.0: ONE}),
        ({(1, 2): ONE}, {(True, 2): ONE}),
        ({"a": [ONE]}, {"a": (ONE,)}),
        ({"a": [ONE]}, {"a": [[ONE]]}),
        ({"a": [ONE, []]}, {"a": [ONE, {}]}),
        ({"a": [[ONE], TWO]}, {"a": [[ONE, TWO]]}),
        ({"a": {}}, {"a": []}),
        ({"a": {"b": ONE}}, {"a": OrderedDict(b=ONE)}),
        ({"a": "x"}, {"a": "x" * 100}),
        ({"c": torch.ones(2, dtype=torch.complex64)}, {"c": torch.ones(3, dtype=torch.complex64)}),
    ],
    ids=str,
)
def test_another_structure_needs_another_plan(
    before: dict[Any, Any], after: dict[Any, Any]
) -> None:
    plan = planned(before)
    assert fits(plan, before)
    assert not fits(plan, after)


def test_a_module_of_another_version_needs_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Versioned(2, 2)
    plan = planned({"model": model})
    assert fits(plan, {"model": model})
    monkeypatch.setattr(Versioned, "_version", 2)
    assert not fits(plan, {"model": model})


def test_other_values_in_the_same_structure_use_the_same_plan() -> None:
    plan = planned({"a": ONE, "n": 3, "name": "short", "list": [1, 2]})
    assert fits(plan, {"a": torch.zeros(2), "n": 99, "name": "other", "list": [7, 8, 9]})


@given(st.lists(st.integers(0, 4), max_size=4).map(tuple), st.randoms())
def test_a_stored_layout_is_dense_and_that_of_the_tensor_where_it_can_be(
    shape: tuple[int, ...], rng: random.Random
) -> None:
    order = rng.sample(range(len(shape)), len(shape))
    stride, step = [0] * len(shape), 1
    for dim in order:
        stride[dim] = step
        step *= shape[dim] or 1
    expected = tuple(stride)
    assert 0 in shape or dense_stride(shape, expected) == expected
    gaps = tuple(s * 3 for s in stride)
    dense = dense_stride(shape, gaps)
    if 0 not in shape:
        assert is_dense(shape, dense)
        # Torch's own rule, for sizes of which the order of dimensions is unmistakable.
        if 1 not in shape and shape:
            source = torch.empty(math.prod(shape) * 3).as_strided(shape, gaps)
            assert dense == torch.empty_like(source).stride()


@pytest.mark.parametrize(
    ("stride", "expected"),
    [((0, 1), (3, 1)), ((1, 0), (3, 1)), ((0, 0), (3, 1)), ((1, 1), (3, 1))],
)
def test_elements_that_repeat_are_stored_contiguously(
    stride: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert is_dense((2, 3), dense_stride((2, 3), stride))
    if 0 in stride:
        assert dense_stride((2, 3), stride) == expected


def test_every_byte_of_the_file_has_one_place() -> None:
    state = {
        "small": torch.ones(3, dtype=torch.int8),
        "large": torch.ones(300, 300),
        "none": torch.ones(0, 4),
        "scalar": torch.tensor(1.5),
        "values": {"a": None, "b": "x" * 1000},
    }
    plan = planned(state)
    (file,) = plan.layout.files
    taken = [(at, len(raw)) for at, raw in plan.pieces]
    taken += [(place.offset, place.nbytes) for place in plan.tensors if place.nbytes]
    taken += [(value.offset, value.capacity) for value in plan.values]
    taken.sort()
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(taken))
    assert taken[-1][0] + taken[-1][1] <= file.nbytes <= plan.layout.nbytes
    assert plan.layout.nbytes % PAGE == 0
    assert [c.offset for c in file.chunks] == sorted(c.offset for c in file.chunks)
    for place in plan.tensors:
        assert place.offset % (PAGE if place.nbytes >= 64 << 10 else 64) == 0


def test_each_item_of_the_image_is_an_archive_of_its_own() -> None:
    tensors = {"a": torch.arange(5), "b": torch.ones(200, 200), "c": torch.empty(0)}
    plan = planned({**tensors, "v": "text"})
    (file,) = plan.layout.files
    image = bytearray(plan.layout.nbytes)
    for at, raw in plan.pieces:
        image[at : at + len(raw)] = raw
    for place, tensor in zip(plan.tensors, tensors.values(), strict=True):
        image[place.offset : place.offset + place.nbytes] = tensor.numpy().tobytes()
    raw = collect({"v": "text"}).pickles[0]
    image[plan.values[0].offset : plan.values[0].offset + len(raw)] = raw
    for chunk in file.chunks:
        for at in chunk.crc_at:
            struct.pack_into(
                "<I", image, at, crc32(image[chunk.offset : chunk.offset + chunk.nbytes])
            )
    starts = [at for at in range(0, file.nbytes, 64) if image[at : at + 4] == b"PK\x03\x04"
              and image[at + 30 : at + 46] == b"archive/data.pkl"]  # fmt: skip
    assert len(starts) == 4
    for start, end in zip(starts, [*starts[1:], file.nbytes], strict=True):
        whole = bytes(image[start:end])
        cut = whole[: whole.rindex(b"PK\x05\x06") + 22]
        with zipfile.ZipFile(io.BytesIO(cut)) as archive:
            assert archive.testzip() is None
        loaded = torch.load(io.BytesIO(cut), weights_only=True)
        assert loaded == "text" or any(
            loaded.dtype == t.dtype and torch.equal(loaded, t) for t in tensors.values()
        )

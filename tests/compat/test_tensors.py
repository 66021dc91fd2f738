"""Every tensor that torch can hold densely: its bits, its layout, and no bytes beyond its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptengine as ce
from ckptengine.errors import StateError
from ckptengine.format.dtypes import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

Bits = Callable[[torch.Tensor], bytes]
DTYPES_HERE = [getattr(torch, name) for name in sorted(DTYPES) if hasattr(torch, name)]
OTHERS = [
    dtype
    for name, dtype in sorted(vars(torch).items())
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}" and name not in DTYPES
]


def random_bytes(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of every bit pattern that chance gives, NaN payloads included."""
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).squeeze(-1)


def contiguous(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype)


def reversed_order(like: torch.Tensor) -> torch.Tensor:
    made = torch.empty(like.shape[::-1], dtype=like.dtype)
    return made.permute(list(range(like.dim()))[::-1])


def strided(like: torch.Tensor) -> torch.Tensor:
    every_second = tuple(slice(None, None, 2) for _ in like.shape)
    return torch.empty([2 * n for n in like.shape], dtype=like.dtype)[every_second]


def conjugated(like: torch.Tensor) -> torch.Tensor:
    return contiguous(like).conj()


@pytest.mark.parametrize("dtype", DTYPES_HERE, ids=str)
def test_every_dtype_comes_back_to_the_bit(
    engine: ce.Engine, run: Path, bits: Bits, dtype: torch.dtype
) -> None:
    state = {
        "flat": random_bytes(dtype, 7, 5),
        "large": random_bytes(dtype, 300, 300),
        "transposed": random_bytes(dtype, 6, 4).t(),
        "large transposed": random_bytes(dtype, 600, 300).t(),
        "strided": random_bytes(dtype, 8, 9)[::2, 1::3],
        "scalar": random_bytes(dtype, 1)[0],
        "empty": random_bytes(dtype, 0, 3),
        "expanded": random_bytes(dtype, 1).expand(3, 4),
    }
    saved = {key: bits(value) for key, value in state.items()}
    engine.save(state)

    for mmap in (True, False):
        loaded = ce.load(run, mmap=mmap)
        for key, value in state.items():
            assert loaded[key].dtype == dtype and loaded[key].shape == value.shape
            assert bits(loaded[key]) == saved[key], key

    for layout in (contiguous, reversed_order, strided):
        template = {key: layout(value) for key, value in state.items()}
        held = dict(template)
        engine.restore(template)
        for key in state:
            assert template[key] is held[key]
            assert bits(template[key]) == saved[key], (key, layout)


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
def test_every_other_dtype_is_refused_by_key(
    engine: ce.Engine, run: Path, dtype: torch.dtype
) -> None:
    try:
        tensor = torch.empty(4, dtype=dtype)
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch makes no such tensor here")
    with pytest.raises(StateError) as caught:
        engine.save({"good": 1, "bad": {"it": tensor}})
    assert caught.value.keys == ("bad/it",)
    assert not run.exists()


def channels_last(*shape: int) -> torch.Tensor:
    kind = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.randn(*shape).contiguous(memory_format=kind)


DENSE = {
    "contiguous": torch.randn(3, 4),
    "transposed": torch.randn(3, 4).t(),
    "permuted": torch.randn(2, 3, 4, 5).permute(2, 0, 3, 1),
    "channels last": channels_last(2, 3, 4, 5),
    "channels last 3d": channels_last(2, 3, 4, 5, 6),
    "channels last weight": channels_last(8, 3, 1, 1),
    "large transposed": torch.randn(500, 300).t(),
    "large channels last": channels_last(4, 16, 64, 64),
    "scalar": torch.randn(()),
    "one element": torch.randn(1, 1, 1),
    "none": torch.randn(0, 5),
}
LOOSE = {
    "rows": torch.randn(6, 4)[::2],
    "columns": torch.randn(6, 4)[:, 1::2],
    "corner": torch.randn(60, 40)[5:9, 7:11],
    "transposed rows": torch.randn(6, 4)[::2].t(),
    "diagonal": torch.randn(5, 5).diagonal(),
    "expanded": torch.randn(3, 1).expand(3, 4),
    "expanded scalar": torch.randn(()).expand(2, 2),
    "windows": torch.randn(9).unfold(0, 3, 1),
    "channels last part": channels_last(2, 6, 4, 4)[:, :3],
    "flipped": torch.randn(4, 3).flip(0),
}
COMPLEX = torch.randn(5, 3, dtype=torch.complex64)
LARGE_COMPLEX = torch.randn(400, 300, dtype=torch.complex64)
VIEWS = {
    "complex": COMPLEX,
    "conjugated": COMPLEX.conj(),
    "conjugated transposed": COMPLEX.mH,
    "negated": COMPLEX.conj().imag,
    "imaginary": COMPLEX.imag,
    "real": torch.view_as_real(COMPLEX),
    "large complex": LARGE_COMPLEX,
    "large conjugated": LARGE_COMPLEX.conj(),
    "large conjugated transposed": LARGE_COMPLEX.mH,
    "large negated": LARGE_COMPLEX.conj().imag,
}


@pytest.mark.parametrize("mmap", [True, False])
def test_dense_layouts_come_back(engine: ce.Engine, run: Path, bits: Bits, mmap: bool) -> None:
    engine.save(DENSE)
    loaded = ce.load(run, mmap=mmap)
    for key, value in DENSE.items():
        assert bits(loaded[key]) == bits(value), key
        assert loaded[key].stride() == value.stride(), key
    weight = loaded["channels last weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", ["dense", "loose", "views"])
def test_values_are_right_whatever_the_layout_of_either_side(
    engine: ce.Engine, run: Path, bits: Bits, kind: str
) -> None:
    state = {"dense": DENSE, "loose": LOOSE, "views": VIEWS}[kind]
    saved = {key: bits(value) for key, value in state.items()}
    engine.save(state)
    loaded = ce.load(run)
    for key in state:
        assert bits(loaded[key]) == saved[key], key

    for layout in (contiguous, reversed_order, strided, conjugated):
        template = {key: layout(value) for key, value in state.items()}
        engine.restore(template)
        for key in state:
            assert bits(template[key]) == saved[key], (key, layout)


def test_only_logical_bytes_are_stored(engine: ce.Engine) -> None:
    base = torch.randn(1_000_000)
    state = {
        "slice": base[:10],
        "stepped": base[::1000],
        "column": base.view(1000, 1000)[:, 3],
        "window": base.view(1000, 1000)[10:20, 10:20],
    }
    nbytes = sum(4 * value.numel() for value in state.values())
    info = engine.save(state)
    on_disk = sum(entry.stat().st_size for entry in os.scandir(info.path))
    assert nbytes < on_disk < nbytes + 16_000


def test_special_numbers_keep_their_bits(engine: ce.Engine, run: Path, bits: Bits) -> None:
    patterns = [0x8000_0000, 0x7F80_0001, 0x7FC0_1234, 0xFFFF_FFFF, 0x0000_0001, 0xFF80_0000]
    value = torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)
    template = {"x": torch.zeros(6), "y": torch.zeros(6, 2)[:, 0]}
    engine.save({"x": value, "y": value[::1]})
    engine.restore(template)
    for found in (ce.load(run)["x"], template["x"], template["y"]):
        assert found.contiguous().view(torch.int32).tolist() == value.view(torch.int32).tolist()


def test_tensors_of_autograd_are_filled_as_they_are(engine: ce.Engine) -> None:
    leaf = torch.randn(3, requires_grad=True)
    engine.save({"leaf": leaf, "result": leaf * 2, "parameter": torch.nn.Parameter(torch.ones(2))})
    template = {
        "leaf": torch.zeros(3, requires_grad=True),
        "result": torch.zeros(3),
        "parameter": torch.nn.Parameter(torch.zeros(2), requires_grad=False),
    }
    engine.restore(template)
    assert template["leaf"].requires_grad and template["leaf"].is_leaf
    assert torch.equal(template["leaf"], leaf) and torch.equal(template["result"], leaf * 2)
    assert template["parameter"].tolist() == [1, 1]
    template["leaf"].sum().backward()


@torch.inference_mode()
def inference_tensor(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def test_tensors_of_inference_mode_are_saved_and_filled(engine: ce.Engine) -> None:
    engine.save({"x": inference_tensor(3, 4), "y": inference_tensor(3, 4).t()})
    template = {"x": inference_tensor(3, 4), "y": inference_tensor(4, 3)}
    for value in template.values():
        value.untyped_storage().fill_(0)
    engine.restore(template)
    assert torch.equal(template["x"], inference_tensor(3, 4))
    assert torch.equal(template["y"], inference_tensor(3, 4).t())


def test_a_subclass_that_has_storage_is_stored_by_its_values(engine: ce.Engine, run: Path) -> None:
    class Tagged(torch.Tensor):
        pass

    engine.save({"x": torch.arange(4.0).as_subclass(Tagged)})
    template = {"x": torch.zeros(4).as_subclass(Tagged)}
    engine.restore(template)
    assert type(template["x"]) is Tagged and template["x"].tolist() == [0, 1, 2, 3]
    assert type(ce.load(run)["x"]) is torch.Tensor


def test_a_state_without_any_bytes_is_a_checkpoint_too(engine: ce.Engine, run: Path) -> None:
    info = engine.save({}, step=3)
    assert dict(ce.load(run)) == {} and ce.load(run).to_dict() == {}
    assert ce.verify(info.path).step == 3
    engine.save({"none": torch.empty(0, 7)}, step=4)
    template = {"none": torch.empty(0, 7)}
    found = engine.restore(template)
    assert found is not None and found.step == 4
    assert ce.load(run)["none"].shape == (0, 7)
    assert ce.verify(run).step == 4


def test_many_dimensions_and_many_tensors(engine: ce.Engine, run: Path) -> None:
    state = {"deep": torch.arange(2.0**12).reshape([2] * 12).permute(*range(11, -1, -1))}
    state |= {f"t{n}": torch.full((n % 7,), float(n)) for n in range(3000)}
    engine.save(state)
    loaded = ce.load(run)
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    assert loaded["deep"].stride() == state["deep"].stride()

"""Rows A of the failure modes: what a tensor holds, how it lies, and of which dtype it is."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptengine as ce
from ckptengine.errors import StateError
from ckptengine.format.checksum import segments
from ckptengine.format.dtypes import DTYPES
from ckptengine.persist import direct
from ckptengine.types import Chunk, FileLayout

Bits = Callable[[torch.Tensor], bytes]


def bytes_on_disk(path: str) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(path))


def test_a01_slice_stores_only_its_bytes(engine: ce.Engine, run: Path) -> None:
    base = torch.randn(1_000_000)
    info = engine.save({"x": base[:10], "y": base.view(1000, 1000)[:, 0]})
    assert bytes_on_disk(info.path) < 4 * 1010 + 8000
    handle = engine.save_async({"x": base[:10]})
    assert handle.timings["nbytes"] < 5000
    assert torch.equal(ce.load(handle.wait().path)["x"], base[:10])


def test_a02_tied_weights_are_stored_once_and_tied_again(engine: ce.Engine, run: Path) -> None:
    weight = torch.randn(1000)
    info = engine.save({"embedding": weight, "head": weight})
    assert bytes_on_disk(info.path) < 2 * 4000
    loaded = ce.load(run)
    assert loaded["embedding"].data_ptr() == loaded["head"].data_ptr()
    assert torch.equal(loaded["embedding"], weight)
    separate = {"embedding": torch.zeros(1000), "head": torch.zeros(1000)}
    engine.restore(separate)
    assert torch.equal(separate["embedding"], weight) and torch.equal(separate["head"], weight)
    shared = torch.zeros(1000)
    engine.restore({"embedding": shared, "head": shared})
    assert torch.equal(shared, weight)


def test_a03_reused_memory_is_not_taken_for_a_tie(engine: ce.Engine, run: Path) -> None:
    class Staged:
        """Gives a new copy of its weight each time, as offloading wrappers do."""

        def __init__(self, number: int) -> None:
            self.number = number

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"w": torch.full((64,), float(self.number))}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...

    state = {f"layer{number}": Staged(number) for number in range(40)}
    for step in range(3):
        engine.save(state, step=step)
        gc.collect()
        loaded = ce.load(run, step=step)
        assert [loaded[key]["w"][0].item() for key in state] == list(range(40))


def test_a04_layouts_come_back_with_the_right_values(engine: ce.Engine, run: Path) -> None:
    state = {
        "transposed": torch.randn(4, 6).t(),
        "stepped": torch.randn(9, 2)[::2],
        "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    }
    engine.save(state)
    loaded = ce.load(run)
    template = {key: torch.zeros(value.shape) for key, value in state.items()}
    engine.restore(template)
    for key, value in state.items():
        assert torch.equal(loaded[key], value) and torch.equal(template[key], value)
        if key != "stepped":
            assert loaded[key].stride() == value.stride()


def test_a05_a_model_in_channels_last_is_saved(engine: ce.Engine) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv3d(1, 2, 3))
    model[0].to(memory_format=torch.channels_last)
    model[1].to(memory_format=torch.channels_last_3d)
    other = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv3d(1, 2, 3))
    engine.save({"model": model})
    engine.restore({"model": other})
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a07_short_writes_and_reads_are_gone_on_with(
    engine: ce.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    counts: list[int] = []

    def short_write(fd: int, data: Any, offset: int) -> int:
        cut = max(1, len(data) // 3) if len(counts) % 2 else min(len(data), 4096)
        counts.append(cut)
        return write(fd, data[:cut], offset)

    nbytes = 50_000
    image = memoryview(bytearray(os.urandom(53_248)))
    layout = FileLayout("f", 0, nbytes, (Chunk(64, 30_000, (49_000, 49_010)),))
    sums = direct.Sums(image, layout, list(segments(layout.chunks, nbytes)))
    monkeypatch.setattr(os, "pwrite", short_write)
    direct.write_file(
        str(tmp_path / "f"), image, layout, sums.take(lambda nbytes: None), lambda nbytes: None
    )
    monkeypatch.undo()
    assert len(counts) > 2
    assert (tmp_path / "f").read_bytes() == bytes(image[:nbytes])

    read = os.preadv

    def short_read(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        (buffer,) = buffers
        return read(fd, [memoryview(buffer)[: max(1, len(buffer) // 3)]], offset, *flags)

    engine.save({"x": torch.arange(50_000)})
    state = {"x": torch.zeros(50_000, dtype=torch.int64)}
    monkeypatch.setattr(os, "preadv", short_read)
    engine.restore(state)
    assert torch.equal(state["x"], torch.arange(50_000))


def test_a08_tensors_of_no_elements_come_back(engine: ce.Engine, run: Path) -> None:
    state = {
        "a": torch.zeros(0),
        "b": torch.zeros(0, 3),
        "c": torch.zeros(2, 0),
        "d": torch.ones(1),
    }
    engine.save(state)
    loaded = ce.load(run)
    assert {key: value.shape for key, value in loaded.items()} == {
        key: value.shape for key, value in state.items()
    }
    info = engine.restore({key: torch.zeros(value.shape) for key, value in state.items()})
    assert info is not None and not info.report.missing


class Opaque(torch.Tensor):
    """A wrapper without storage of its own, which does not say of what it is made."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)
        made.data_, made.scale = data, scale
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(function)


class TwoTensor(Opaque):
    """One that does."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, *_: Any) -> Any:
        return TwoTensor(parts["data_"], parts["scale"])


def test_a10_a_wrapper_is_stored_by_its_parts_or_refused(engine: ce.Engine, run: Path) -> None:
    wrapper = TwoTensor(torch.randn(4), torch.randn(1))
    engine.save_async({"w": wrapper}).wait()
    state = {"w": TwoTensor(torch.zeros(4), torch.zeros(1))}
    engine.restore(state)
    assert torch.equal(state["w"].data_, wrapper.data_)
    assert torch.equal(state["w"].scale, wrapper.scale)
    with pytest.raises(StateError) as caught:
        engine.save({"w": Opaque(torch.randn(4), torch.randn(1))})
    assert caught.value.keys == ("w",)


def test_a11_a_wrappers_parts_load_where_its_class_is_unknown(engine: ce.Engine, run: Path) -> None:
    engine.save({"w": TwoTensor(torch.arange(3.0), torch.ones(1))})
    script = """
import sys, ckptengine as ce
parts = ce.load(sys.argv[1])["w"]
assert parts["data_"].tolist() == [0, 1, 2] and parts["scale"].tolist() == [1]
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(run)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with pytest.raises(
        StateError, match="w: the state has a tensor, the checkpoint a tensor subclass"
    ):
        engine.restore({"w": torch.zeros(3)})


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_a12_every_dtype_is_stored_to_the_bit(engine: ce.Engine, run: Path, bits: Bits) -> None:
    dtypes = [getattr(torch, name) for name in DTYPES if hasattr(torch, name)]
    state = {
        str(dtype): torch.randint(0, 2 if dtype == torch.bool else 256, (6, dtype.itemsize))
        .to(torch.uint8)
        .view(dtype)
        for dtype in dtypes
    }
    engine.save(state)
    template = {key: torch.empty_like(value) for key, value in state.items()}
    engine.restore(template)
    loaded = ce.load(run)
    for key, value in state.items():
        assert bits(template[key]) == bits(loaded[key]) == bits(value), key


def test_a14_a_meta_tensor_is_refused_by_key_before_anything_is_written(
    engine: ce.Engine, run: Path
) -> None:
    with pytest.raises(StateError, match="meta tensor") as caught:
        engine.save({"good": torch.ones(1), "deep": [{"bad": torch.empty(3, device="meta")}]})
    assert caught.value.keys == ("deep/[0]/bad",)
    assert not run.exists()
    engine.save({"x": torch.ones(3)})
    with pytest.raises(StateError, match="to_empty"):
        engine.restore({"x": torch.empty(3, device="meta")})


def test_a15_values_are_not_rounded_without_a_word(engine: ce.Engine) -> None:
    engine.save({"x": torch.tensor([1 + 2**-20])})
    state = {"x": torch.zeros(1, dtype=torch.bfloat16)}
    with pytest.raises(
        StateError, match="bfloat16 in the state, float32 in the checkpoint"
    ) as caught:
        engine.restore(state)
    assert caught.value.keys == ("x",) and state["x"].item() == 0
    info = engine.restore(state, cast=True)
    assert info is not None and info.report.cast == ("x",)
    assert state["x"].item() == 1

"""Hand-framed zip records, read by other people's readers."""

from __future__ import annotations

import io
import math
import pickle
import random
import shutil
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.format import frame
from ckptengine.format.checksum import crc32
from ckptengine.format.dtypes import DTYPES
from ckptengine.types import PAGE

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

NAMES = sorted(name for name in DTYPES if hasattr(torch, name))


def filled(rendered: frame.Frame, payload: bytes) -> bytes:
    """The frame with its payload and checksum in place, as the persister would leave it."""
    image = bytearray(b"\xee" * rendered.nbytes)
    covered = 0
    for offset, raw in rendered.pieces:
        image[offset : offset + len(raw)] = raw
        covered += len(raw)
    (hole,) = rendered.payloads
    assert hole.nbytes == len(payload)
    assert covered + hole.nbytes == rendered.nbytes
    image[hole.offset : hole.offset + hole.nbytes] = payload
    for at in hole.crc_at:
        struct.pack_into("<I", image, at, crc32(payload))
    return bytes(image)


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple) | st.integers(8190, 8200).map(
    lambda n: (n, 3)
)


@given(st.sampled_from(NAMES), SHAPES, st.integers(0, 2 * PAGE // 64), st.randoms())
def test_torch_and_zipfile_read_a_frame_wherever_it_lies(
    name: str, shape: tuple[int, ...], phase: int, rng: random.Random
) -> None:
    at = phase * 64
    nbytes = math.prod(shape) * DTYPES[name].itemsize
    order = rng.sample(range(len(shape)), len(shape))
    dense = contiguous(tuple(shape[dim] for dim in order))
    stride = tuple(dense[order.index(dim)] for dim in range(len(shape)))
    payload = rng.randbytes(nbytes)
    if name == "bool":
        payload = bytes(byte & 1 for byte in payload)
    rendered = frame.tensor_frame(name, shape, stride, nbytes, at % PAGE)
    raw = filled(rendered, payload)

    (hole,) = rendered.payloads
    assert (at + hole.offset) % (PAGE if nbytes >= frame.LARGE else frame.ALIGN_SMALL) == 0
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == payload
    tensor = torch.load(io.BytesIO(raw), weights_only=True)
    assert tensor.dtype == getattr(torch, name)
    assert (tensor.shape, tensor.stride()) == (shape, stride)
    raw_storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    assert raw_storage.numpy().tobytes() == payload


@given(st.binary(max_size=200), st.integers(0, PAGE // 64 - 1))
def test_a_value_is_read_whatever_room_was_left_for_it(content: bytes, phase: int) -> None:
    raw = pickle.dumps({"content": content or None}, 2)
    capacity = 1 << len(raw).bit_length()
    rendered = frame.value_frame(capacity, phase * 64)
    archive = filled(rendered, raw.ljust(capacity, b"\0"))
    assert torch.load(io.BytesIO(archive), weights_only=True) == {"content": content or None}
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        assert opened.testzip() is None


@pytest.mark.skipif(not shutil.which("unzip"), reason="no unzip here")
@pytest.mark.parametrize("numel", [0, 5, 2**15])
def test_unzip_agrees(tmp_path: Path, numel: int) -> None:
    payload = random.Random(numel).randbytes(4 * numel)
    rendered = frame.tensor_frame("float32", (numel,), (1,), 4 * numel, 64)
    path = tmp_path / "frame.zip"
    path.write_bytes(filled(rendered, payload))
    done = subprocess.run(["unzip", "-tqq", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    damaged = bytearray(path.read_bytes())
    (hole,) = rendered.payloads
    damaged[hole.offset if numel else rendered.pieces[0][0] + 40] ^= 1
    path.write_bytes(damaged)
    assert subprocess.run(["unzip", "-tqq", path], capture_output=True, check=False).returncode


def test_a_frame_of_more_than_four_gibibytes_is_read(tmp_path: Path) -> None:
    numel = 2**32 + 3
    rendered = frame.tensor_frame("uint8", (numel,), (1,), numel, 192)
    path = tmp_path / "large"
    with path.open("wb") as file:  # sparse: only the ends take room
        for offset, raw in rendered.pieces:
            file.seek(offset)
            file.write(raw)
        (hole,) = rendered.payloads
        file.seek(hole.offset + numel - 1)
        file.write(b"\x07")
    tensor = torch.load(path, weights_only=True, mmap=True)
    assert tensor.shape == (numel,)
    assert tensor[-3:].tolist() == [0, 0, 7]
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("archive/data/0")
        assert (info.file_size, info.compress_size) == (numel, numel)
        with archive.open("archive/version") as version:
            assert version.read() == b"3\n"


def test_the_pickle_needs_nothing_that_torch_does_not_allow() -> None:
    for name in NAMES:
        raw = frame.tensor_pickle(name, (2**33, 1), (1, 2**33), 2**33 * DTYPES[name].itemsize)
        assert raw.startswith(b"\x80\x02") and raw.endswith(b".")

"""Hand-framed, stored zip records that `torch.load(weights_only=True)` accepts.

A frame is one zip archive lying at some offset of a chunk file. Everything in it but the payload
bytes and their CRC-32 is known when the save is planned, so frames are rendered once and then only
filled. Layout of the zip structures: PKWARE APPNOTE 6.3; of the records inside: torch's
``caffe2/serialize/inline_container.cc``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..types import PAGE
from .checksum import crc32
from .dtypes import DTYPES

ALIGN_SMALL = 64
"""Bytes: the start of every frame, and of payloads below `LARGE`."""

LARGE = 64 << 10
"""Bytes from which a payload starts on a `PAGE` of the file, so that it can be read directly."""

_U32 = 0xFFFFFFFF
_DOS_DATE = 0x21  # 1980-01-01, the earliest date that the format can say
_STREAMED = 0x0008  # bit 3: CRC and sizes follow the payload
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")


class Record(NamedTuple):
    """One member of the archive: constant bytes, or a payload of that many bytes."""

    name: str
    content: bytes | int
    align: int = 1


class Payload(NamedTuple):
    """Where a payload lies in its frame (bytes from the frame's start), and where its CRC goes."""

    offset: int
    nbytes: int
    crc_at: tuple[int, int]


class Frame(NamedTuple):
    """A rendered frame: constant pieces by offset, and the holes between them."""

    pieces: tuple[tuple[int, bytes], ...]
    payloads: tuple[Payload, ...]
    nbytes: int


_CONSTANTS = (
    Record("byteorder", b"little"),
    Record(".format_version", b"1"),
    Record(".storage_alignment", b"64"),
    Record("version", b"3\n"),
)


def alignment(nbytes: int) -> int:
    """Bytes to which a payload of `nbytes` is aligned in its file."""
    return PAGE if nbytes >= LARGE else ALIGN_SMALL


@lru_cache(maxsize=65536)
def tensor_frame(
    dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], nbytes: int, phase: int
) -> Frame:
    """A frame of one dense tensor. `phase`: the frame's offset in its file, modulo the `alignment` of
    its payload.

    Cached, since the tensors of a model have few shapes.
    """
    records = (
        Record("data.pkl", tensor_pickle(dtype, shape, stride, nbytes)),
        *_CONSTANTS,
        Record("data/0", nbytes, alignment(nbytes)),
    )
    return render(records, phase)


@lru_cache(maxsize=4096)
def value_frame(capacity: int, phase: int) -> Frame:
    """A frame of one Python value, pickled into at most `capacity` bytes and padded by zeros.

    Unpicklers stop at the pickle's own end, so that a value may change its length in place.
    """
    return render((Record("data.pkl", capacity, ALIGN_SMALL), *_CONSTANTS), phase)


def render(records: Sequence[Record], phase: int) -> Frame:
    """Lays out `records` as one archive that starts at `phase` modulo their largest alignment."""
    pieces: list[tuple[int, bytes]] = []
    payloads: list[Payload] = []
    run = bytearray()  # constant bytes not yet closed into a piece
    run_at = 0
    central = bytearray()
    holes: list[tuple[int, int, int]] = []  # payload offset, its size, its CRC's place in `central`
    descriptors: list[int] = []

    for name, content, align in records:
        path = f"archive/{name}".encode()
        at = run_at + len(run)
        constant = isinstance(content, bytes)
        nbytes = len(content) if isinstance(content, bytes) else content
        crc = crc32(content) if isinstance(content, bytes) else 0
        big = nbytes >= _U32
        extra = struct.pack("<HHQQ", 1, 16, 0, 0) if big else b""
        head = _LOCAL.size + len(path) + len(extra)
        pad = -(phase + at + head) % align
        if 0 < pad < 4:
            pad += align
        if pad:
            extra += b"FB" + struct.pack("<H", pad - 4) + bytes(pad - 4)
        run += _LOCAL.pack(
            b"PK\x03\x04",
            45 if big else 0,
            0 if constant else _STREAMED,
            0,
            0,
            _DOS_DATE,
            crc,
            nbytes if constant else 0,
            nbytes if constant else 0,
            len(path),
            len(extra),
        )
        run += path + extra
        far = at >= _U32
        wide = (struct.pack("<QQ", nbytes, nbytes) if big else b"") + (
            struct.pack("<Q", at) if far else b""
        )
        central_extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
        entry_at = len(central)
        central += _CENTRAL.pack(
            b"PK\x01\x02",
            45 if wide else 0,
            45 if wide else 0,
            0 if constant else _STREAMED,
            0,
            0,
            _DOS_DATE,
            crc,
            _U32 if big else nbytes,
            _U32 if big else nbytes,
            len(path),
            len(central_extra),
            0,
            0,
            0,
            0,
            _U32 if far else at,
        )
        central += path + central_extra
        if isinstance(content, bytes):
            run += content
            continue
        pieces.append((run_at, bytes(run)))
        payload_at = run_at + len(run)
        run_at, run = payload_at + nbytes, bytearray()
        descriptors.append(run_at + 4)
        run += struct.pack("<4sIQQ" if big else "<4sIII", b"PK\x07\x08", 0, nbytes, nbytes)
        holes.append((payload_at, nbytes, entry_at + 16))

    central_at = run_at + len(run)
    run += central
    entries = len(records)
    if central_at >= _U32:
        end64_at = run_at + len(run)
        run += struct.pack(
            "<4sQHHIIQQQQ",
            b"PK\x06\x06",
            44,
            45,
            45,
            0,
            0,
            entries,
            entries,
            len(central),
            central_at,
        )
        run += struct.pack("<4sIQI", b"PK\x06\x07", 0, end64_at, 1)
    run += struct.pack(
        "<4sHHHHIIH",
        b"PK\x05\x06",
        0,
        0,
        entries,
        entries,
        len(central),
        min(central_at, _U32),
        0,
    )
    pieces.append((run_at, bytes(run)))
    for (at, nbytes, entry), descriptor in zip(holes, descriptors, strict=True):
        payloads.append(Payload(at, nbytes, (descriptor, central_at + entry)))
    return Frame(tuple(pieces), tuple(payloads), run_at + len(run))


def tensor_pickle(
    dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], nbytes: int
) -> bytes:
    """The pickle (protocol 2) of a CPU tensor whose storage is record ``data/0``.

    Written opcode by opcode: pickling a real tensor would need torch, and its bytes change between
    releases of torch. Source of the two forms: ``torch/_utils.py``, `_rebuild_tensor_v2` and `_v3`.
    """
    itemsize, legacy = DTYPES[dtype]
    storage = _glob("torch", legacy) if legacy else _glob("torch.storage", "UntypedStorage")
    count = nbytes // itemsize if legacy else nbytes
    persistent_id = (
        b"(" + text_op("storage") + storage + text_op("0") + text_op("cpu") + int_op(count) + b"t"
    )
    arguments = (
        persistent_id
        + b"Q"
        + int_op(0)
        + _ints(shape)
        + _ints(stride)
        + b"\x89"  # requires_grad=False
        + _glob("collections", "OrderedDict")
        + b")R"
        + (b"" if legacy else _glob("torch", dtype))
    )
    rebuild = "_rebuild_tensor_v2" if legacy else "_rebuild_tensor_v3"
    return b"\x80\x02" + _glob("torch._utils", rebuild) + b"(" + arguments + b"tR."


def _glob(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text_op(text: str) -> bytes:
    """The pickle opcode that makes a string."""
    raw = text.encode("utf-8", "surrogatepass")  # as pickle itself does
    return b"X" + struct.pack("<I", len(raw)) + raw


def int_op(value: int) -> bytes:
    """The pickle opcode that makes an integer of at most 64 bits."""
    if value <= 0x7FFFFFFF:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


def _ints(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(int_op, values)) + b"t"

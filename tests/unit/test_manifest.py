"""The commit record: what it says, and what it refuses to say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.errors import CorruptError
from ckptengine.format import canonical
from ckptengine.format.checksum import bytes_digest
from ckptengine.format.manifest import FileEntry, Manifest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def record(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "step": 7,
        "attempt": 1,
        "created": 1.5,
        "world_size": 1,
        "files": {"__0_0.distcp": FileEntry(10, "crc32s:00")},
    }
    return Manifest(**(fields | changes))


def resealed(data: bytes, **changes: Any) -> bytes:
    """The record with other fields (None: without them), its digest right again."""
    body = json.loads(data)
    body.pop("digest")
    body.update(changes)
    body = {name: value for name, value in body.items() if value is not None}
    return canonical.dumps(body | {"digest": bytes_digest(canonical.dumps(body))})


@given(
    st.integers(0, 10**12),
    JSON,
    st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=3),
    st.booleans(),
)
def test_it_comes_back_as_it_was(
    step: int, user: Any, metrics: dict[str, float], candidate: bool
) -> None:
    before = record(step=step, user=user, metrics=metrics, candidate=candidate)
    assert Manifest.from_bytes(before.to_bytes(), "here") == before


def test_metrics_that_are_not_finite_come_back() -> None:
    metrics = {"a": float("nan"), "b": float("inf"), "c": float("-inf")}
    found = Manifest.from_bytes(record(metrics=metrics).to_bytes(), "here").metrics
    assert repr(dict(found)) == repr(metrics)


def test_each_flipped_bit_is_noticed() -> None:
    data = record(user={"a": [1, "x"]}, metrics={"loss": 0.5}).to_bytes()
    for position in range(len(data) - 1):  # the last byte is a newline
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptError, match="here"):
                Manifest.from_bytes(bytes(damaged), "here")


def test_each_cut_is_noticed() -> None:
    data = record().to_bytes()
    for length in range(len(data) - 1):
        with pytest.raises(CorruptError):
            Manifest.from_bytes(data[:length], "here")


def test_a_newer_major_version_is_refused_by_name_even_if_all_else_is_strange() -> None:
    data = json.dumps({"format_version": "2.0", "surprise": []}).encode()
    with pytest.raises(CorruptError, match=r"here: written in format 2\.0.*newer ckptengine"):
        Manifest.from_bytes(data, "here")


def test_a_newer_minor_version_and_what_it_adds_are_read() -> None:
    data = resealed(record().to_bytes(), format_version="1.9", surprise=[1])
    assert Manifest.from_bytes(data, "here") == record()


def test_optional_fields_may_be_absent() -> None:
    data = resealed(record(user=1).to_bytes(), user=None, metrics=None, candidate=None)
    assert Manifest.from_bytes(data, "here") == record()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "a\\b", "", ".", "..", "a\0b"])
def test_a_file_name_cannot_leave_the_directory(name: str) -> None:
    data = resealed(record().to_bytes(), files={name: {"nbytes": 1, "digest": ""}})
    with pytest.raises(CorruptError, match="is not a file name"):
        Manifest.from_bytes(data, "here")


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": 1.5},
        {"step": True},
        {"attempt": "0"},
        {"world_size": []},
        {"files": []},
        {"files": {"a": {"nbytes": -1, "digest": ""}}},
        {"metrics": {"a": []}},
        {"created": "now"},
        {"format_version": "new"},
    ],
    ids=repr,
)
def test_fields_of_a_wrong_kind_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match="here: not a commit record"):
        Manifest.from_bytes(resealed(record().to_bytes(), **changes), "here")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b"\xff", b"[" * 100_000])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match="here"):
        Manifest.from_bytes(data, "here")

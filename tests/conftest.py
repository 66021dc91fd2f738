"""What many tests share: an engine on a fresh directory, and equality to the bit."""

from __future__ import annotations

import dataclasses
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptengine as ce


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory, which is not there yet."""
    return tmp_path / "run"


@pytest.fixture
def engine(run: Path) -> Iterator[ce.Engine]:
    with ce.Engine(run) as engine:
        yield engine


@pytest.fixture(scope="session")
def bits() -> Callable[[torch.Tensor], bytes]:
    return _bits


@pytest.fixture(scope="session")
def identical() -> Callable[[Any, Any], bool]:
    """Whether two values agree in type, order of keys, and every bit of every number."""
    return _identical


def _bits(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in logical order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _identical(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and _bits(one) == _bits(other)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, complex):
        return _identical(one.real, other.real) and _identical(one.imag, other.imag)
    if isinstance(one, Mapping):
        return _identical(list(one), list(other)) and all(
            _identical(one[key], value) for key, value in zip(one, other.values(), strict=True)
        )
    if isinstance(one, deque):
        return one.maxlen == other.maxlen and _identical(list(one), list(other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_identical, one, other))
    if isinstance(one, (set, frozenset)):
        return one == other and Counter(map(type, one)) == Counter(map(type, other))
    if isinstance(one, (np.ndarray, np.generic)):
        return (
            one.dtype.str == other.dtype.str
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if dataclasses.is_dataclass(one):
        return _identical(vars(one), vars(other))
    return bool(one == other)

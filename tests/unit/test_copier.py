"""Copying in threads: an interruption ends it whole, and leaves the copier fit for the next copy."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckptengine.snapshot import copier as module
from ckptengine.snapshot.copier import Copier, Move


class Interrupt(BaseException):
    """As Ctrl-C, but for pytest."""


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copier]:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(module, "_PIECE", 1000)
    copier = Copier()
    yield copier
    copier.close()


def moves(source: torch.Tensor, target: torch.Tensor) -> list[Move]:
    return [Move(target.data_ptr(), source.data_ptr(), source.nbytes)]


@pytest.mark.parametrize("nbytes", [0, 1, 999, 1000, 1001, 123_456])
def test_any_size(copier: Copier, nbytes: int) -> None:
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    told: list[int] = []
    copier.copy(moves(source, target), told.append)
    assert torch.equal(source, target)
    assert told == sorted(told)
    assert len(told) == -(-nbytes // 1000)
    copier.copy([], told.append)


def test_when_it_is_interrupted_no_thread_goes_on(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = torch.ones(100_000, dtype=torch.uint8), torch.zeros(100_000, dtype=torch.uint8)
    lock, at_work, most, calls = threading.Lock(), 0, 0, 0
    real = ctypes.memmove
    slow = threading.Event()

    def memmove(*args: Any) -> None:
        nonlocal at_work, most, calls
        with lock:
            at_work, calls = at_work + 1, calls + 1
            most = max(most, at_work)
        slow.wait(0.02)
        real(*args)
        with lock:
            at_work -= 1

    def announce(address: int) -> None:
        raise Interrupt

    monkeypatch.setattr(ctypes, "memmove", memmove)
    for _ in range(5):
        with pytest.raises(Interrupt):
            copier.copy(moves(source, target), announce)
        assert at_work == 0
    assert most > 1
    assert calls < 100  # the rest was not begun
    slow.set()
    target.zero_()
    copier.copy(moves(source, target), lambda address: None)
    assert torch.equal(source, target)


def test_close_is_for_good_and_for_now(copier: Copier) -> None:
    source, target = torch.ones(5000), torch.zeros(5000)
    copier.close()
    copier.copy(moves(source, target), lambda address: None)
    copier.close()
    copier.close()
    assert torch.equal(source, target)
    assert not [t for t in threading.enumerate() if t.name == "ckptengine-copy"]

"""What many tests share: an engine on a fresh directory, and equality to the bit."""

from __future__ import annotations

import dataclasses
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import ckptengine as ce
from ckptengine.testing.faults import Faults

# Tests share their machine with others: time says nothing about a single example.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


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


_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """Waits until a condition holds, and returns what it said."""
    return _until


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """Lists the processes that this test has started, through others too. Whatever is left at the
    end is killed and fails the test."""
    mark = f"CKPTENGINE_TEST={os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv(*mark.split("="))

    def pids() -> list[int]:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if ours(pid)]

    def ours(pid: int) -> bool:
        try:
            return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    yield pids
    try:
        _until(lambda: not pids(), "what this test has started still runs", 20)
    finally:
        for pid in pids():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def faults(tmp_path: Path, family: object) -> Iterator[Faults]:
    """Engines made in this test have a persister that fails on request."""
    faults = Faults(tmp_path / "faults")
    faults.install()
    yield faults
    faults.go()
    faults.remove()


class Program:
    """A Python program in a process of its own. `pid`, `process`; its output goes to a file."""

    def __init__(self, text: str, folder: Path, number: int, **options: Any) -> None:
        self.file = folder / f"program{number}.py"
        self.file.write_text(textwrap.dedent(text))
        self.log = folder / f"program{number}.log"
        path = [str(Path(ce.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore::FutureWarning", str(self.file)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
                **options,
            )
        self.pid = self.process.pid

    def output(self) -> str:
        return self.log.read_text()

    def says(self, text: str) -> str:
        """Waits for a line of its output."""
        _until(
            lambda: text in self.output().splitlines() or self.process.poll() is not None,
            f"{text!r} was not said",
            120,
        )
        assert text in self.output().splitlines(), self.output()
        return self.output()

    def ends(self, code: int = 0) -> str:
        """Waits for its end, and returns what it said."""
        try:
            found = self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert found == code, f"{found}\n{self.output()}"
        return self.output()


@pytest.fixture
def launch(tmp_path: Path, family: object) -> Iterator[Callable[..., Program]]:
    """Starts Python on the text of a program."""
    started: list[Program] = []

    def start(text: str, **options: Any) -> Program:
        started.append(Program(text, tmp_path, len(started), **options))
        return started[-1]

    yield start
    for program in started:
        program.process.kill()
        program.process.wait()


def _until(
    condition: Callable[[], Any], what: str = "it did not happen", seconds: float = 60
) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
    return found


def _bits(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in logical order."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    raw = _RAW.get(plain.element_size())  # some dtypes are unknown to NumPy, or cannot be copied
    return (plain if raw is None else plain.view(raw)).numpy().tobytes()


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

"""Memory for snapshots: what it is made of, and what is left in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptengine as ce
from ckptengine.snapshot.arena import Arena

Identical = Callable[[Any, Any], bool]
RESERVED = Path("/proc/sys/vm/nr_hugepages")


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """Sixteen huge pages are reserved; more are not free."""
    before = RESERVED.read_text()
    try:
        RESERVED.write_text("16")
    except OSError as error:
        pytest.skip(f"huge pages cannot be reserved here: {error}")
    try:
        if int(RESERVED.read_text()) != 16:
            pytest.skip("the machine's memory is too fragmented for sixteen huge pages")
        yield
    finally:
        RESERVED.write_text(before)


def page_kib(arena: Arena) -> int:
    """KiB of a page of the arena, as the kernel tells it."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split()[0]
        if not name.endswith(":"):
            start, end = (int(bound, 16) for bound in name.split("-"))
            inside = start <= arena.address < end
        elif inside and name == "KernelPageSize:":
            return int(line.split()[1])
    raise AssertionError("the arena is not mapped")


def test_reserved_huge_pages_are_used_as_far_as_they_go(
    huge_pages: None, run: Path, identical: Identical
) -> None:
    small, large = ({"w": torch.randn(size << 18), "n": size} for size in (9, 40))
    with ce.Engine(run) as engine:
        engine.save(small, step=1)
        (arena,) = engine._slots._arenas
        assert page_kib(arena) >= 2048
        engine.save(large, step=2)
        assert [page_kib(arena) for arena in engine._slots._arenas] == [4]
        engine.save(small, step=3)
    for step, state in ((1, small), (2, large), (3, small)):
        ce.verify(run, step=step)
        assert identical(ce.load(run, step=step).to_dict(), state)


def test_nothing_of_an_earlier_layout_is_left_between_the_frames(run: Path) -> None:
    def padding(path: str) -> bytes:
        return b"".join(file.read_bytes() for file in sorted(Path(path).glob("*.distcp")))

    state = {f"w{n}": torch.zeros(n + 1) for n in range(40)}
    with ce.Engine(run) as engine:
        fresh = padding(engine.save(state, step=1).path)
        engine.save({"noise": torch.full((20_000,), -1, dtype=torch.int32)}, step=2)
        (arena,) = engine._slots._arenas
        assert padding(engine.save(state, step=3).path) == fresh
        assert engine._slots._arenas == [arena]

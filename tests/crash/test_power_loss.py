"""A crash at any operation of a save leaves the previous checkpoint or the new one, whole.

Real saves, recorded in this process, are cut after each of their operations: by the death of the
process, by loss of power, and by loss of power that tears what was not synced.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptengine as ce
from ckptengine.persist import direct
from ckptengine.repository import Repository
from ckptengine.testing.crash import KILL, CrashPoint, Recording, crash_states, record
from ckptengine.testing.inline import inline_engine

Identical = Callable[[Any, Any], bool]


def state(step: int) -> dict[str, Any]:
    """A state that differs in every leaf from that of any other step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "weight": torch.randn(90, 200, generator=generator),
            "bias": torch.ones(7) * step,
        },
        "progress": [step, {"text": f"step {step}"}],
    }


def blank() -> dict[str, Any]:
    return {
        "model": {"weight": torch.zeros(90, 200), "bias": torch.zeros(7)},
        "progress": [0, {"text": ""}],
    }


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several writes to a file, as a large state has."""
    monkeypatch.setattr(direct, "PART", 16 << 10)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with the checkpoints 1 and 2, both committed."""
    root = tmp_path / "root"
    with inline_engine(root) as engine:
        engine.save(state(1), step=1)
        engine.save(state(2), step=2)
    return root


def save(root: Path, step: int, recording: Recording, **settings: Any) -> None:
    with inline_engine(root, **settings) as engine:
        engine.save(state(step), step=step)
        recording.mark("committed")


class Broken(AssertionError):
    """A crash left something that it must not leave."""


def check(root: Path, point: CrashPoint, old: int | None, new: int, identical: Identical) -> None:
    """Raises Broken unless the old or the new checkpoint is restored, and all that is visible
    verifies."""
    allowed = {new} if "committed" in point.marks else {old, new}
    found = blank()
    try:
        with ce.Engine(root) as engine:
            info = engine.restore(found)
        for checkpoint in Repository(str(root)).named():
            ce.verify(root / checkpoint.name)
    except ce.CheckpointError as error:
        raise Broken(f"{point}: {error!r}") from error
    step = info.step if info else None
    if step not in allowed:
        raise Broken(f"{point}: restored step {step} instead of one of {allowed}")
    if info is not None and info.report != type(info.report)():
        raise Broken(f"{point}: {info.report}")
    if not identical(found, state(step) if step is not None else blank()):
        raise Broken(f"{point}: the state is not that of step {step}")


def check_all(
    recording: Recording,
    folder: Path,
    old: int | None,
    new: int,
    identical: Identical,
    inside: str = "",
    seeds: int = 16,
) -> int:
    """Checks every state that a crash can leave; returns their number."""
    number = 0
    for number, (point, build) in enumerate(crash_states(recording, range(seeds)), 1):
        target = folder / f"state{number}"
        build(target)
        check(target / inside, point, old, new, identical)
        if point.crash == KILL:
            again(target / inside, new, identical)
    return number


def again(root: Path, new: int, identical: Identical) -> None:
    """The run goes on from there, and clears up."""
    with inline_engine(root) as engine:
        engine.save(state(new), step=new)
        found = blank()
        info = engine.restore(found)
    assert info is not None
    assert info.step == new
    assert identical(found, state(new))
    assert Repository(str(root)).leftovers() == []


def test_a_save(root: Path, tmp_path: Path, identical: Identical) -> None:
    with record(root) as recording:
        save(root, 3, recording)
    assert check_all(recording, tmp_path, 2, 3, identical) > 50


def test_the_first_save_makes_its_directory_durable_too(
    tmp_path: Path, identical: Identical
) -> None:
    above = tmp_path / "above"
    above.mkdir()
    with record(above) as recording:
        save(above / "runs" / "demo", 1, recording)
    count = check_all(recording, tmp_path, None, 1, identical, inside="runs/demo")
    assert count > 50


def test_retention_after_a_save(root: Path, tmp_path: Path, identical: Identical) -> None:
    with record(root) as recording:
        save(root, 3, recording, keep=1)
    assert [c.step for c in Repository(str(root)).ids()] == [3]
    assert check_all(recording, tmp_path, 2, 3, identical) > 60


def test_leftovers_of_dead_runs(root: Path, tmp_path: Path, identical: Identical) -> None:
    for name in (".tmp-step-00000003-abc", ".trash-step-00000001-def"):
        (root / name).mkdir()
        (root / name / "__0_0.distcp").write_bytes(b"left" * 2000)
        (root / name / "manifest.json").write_bytes(
            (root / "step-00000002/manifest.json").read_bytes()
        )
    with record(root) as recording:
        save(root, 3, recording)
    assert check_all(recording, tmp_path, 2, 3, identical) > 50


def test_a_second_attempt_at_the_same_step(
    root: Path, tmp_path: Path, identical: Identical
) -> None:
    with record(root) as recording:
        save(root, 2, recording)
    assert (root / "step-00000002.1").is_dir()
    assert check_all(recording, tmp_path, 2, 2, identical) > 50


def test_a_save_that_fails_in_the_middle(
    root: Path, tmp_path: Path, identical: Identical, monkeypatch: pytest.MonkeyPatch
) -> None:
    with record(root) as recording, inline_engine(root) as engine:
        real, calls = os.pwrite, itertools.count(1)

        def pwrite(fd: int, data: bytes, offset: int) -> int:
            if next(calls) == 4:
                raise OSError(28, "No space left on device")
            return real(fd, data, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            with pytest.raises(ce.StoreError, match="ENOSPC"):
                engine.save(state(3), step=3)
    assert check_all(recording, tmp_path, 2, 3, identical) > 15
    assert sorted(os.listdir(root)) == [".owner", "step-00000001", "step-00000002"]


# -- the harness itself can fail -------------------------------------------------------------------


def recorded_without_sync(
    root: Path, number: int, monkeypatch: pytest.MonkeyPatch, inside: str = "", **settings: Any
) -> Recording | None:
    """A save whose sync of that number is left out; None when it makes fewer."""
    with record(root) as recording, monkeypatch.context() as patch:
        real, calls = os.fsync, itertools.count()
        skipped = []

        def fsync(fd: int) -> None:
            if next(calls) == number:
                skipped.append(os.readlink(f"/proc/self/fd/{fd}"))
            else:
                real(fd)

        patch.setattr(os, "fsync", fsync)
        save(root / inside, 3, recording, **settings)
    return recording if skipped else None


def break_each_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identical: Identical, fresh: bool
) -> Iterator[int]:
    for number in itertools.count():
        root = tmp_path / f"run{number}"
        root.mkdir()
        if not fresh:
            with inline_engine(root) as engine:
                engine.save(state(2), step=2)
        inside = "runs/demo" if fresh else ""
        recording = recorded_without_sync(root, number, monkeypatch, inside, keep=1)
        if recording is None:
            return
        with pytest.raises(Broken):
            check_all(
                recording, tmp_path / f"of{number}", None if fresh else 2, 3, identical, inside
            )
        yield number


def test_every_sync_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identical: Identical
) -> None:
    # The data, .metadata, the index, the manifest, their directory, the root, a deletion.
    assert len(list(break_each_sync(tmp_path, monkeypatch, identical, fresh=False))) == 7


def test_every_sync_of_a_fresh_directory_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identical: Identical
) -> None:
    # The names of "runs" and "demo", and all but the deletion.
    assert len(list(break_each_sync(tmp_path, monkeypatch, identical, fresh=True))) == 8


def test_a_commit_before_the_data_is_caught(
    root: Path, tmp_path: Path, identical: Identical, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data is written once the checkpoint is visible: what invariant 1 forbids."""
    late: list[tuple[str, bytes]] = []

    def write_file(path: str, image: memoryview, layout: Any, *rest: Any) -> None:
        real(path, image, layout, *rest)
        data = Path(path).read_bytes()
        os.truncate(path, 0)
        late.append((os.path.join(str(root), "step-00000003", os.path.basename(path)), data))

    real = direct.write_file
    with record(root) as recording, inline_engine(root) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(direct, "write_file", write_file)
            engine.save(state(3), step=3)
        for path, data in late:
            fd = os.open(path, os.O_WRONLY)
            os.pwrite(fd, data, 0)
            os.fsync(fd)
            os.close(fd)
        recording.mark("committed")
    with pytest.raises(Broken):
        check_all(recording, tmp_path, 2, 3, identical)

"""Damage of every kind: right values or an error that names the file come back, and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptengine as ce

Identical = Callable[[Any, Any], bool]


def state(step: int) -> dict[str, Any]:
    return {
        "w": torch.arange(40, dtype=torch.float32) * step,
        "flag": torch.tensor(True),
        "n": step,
        "more": [b"bytes", {"x": 0.5, 2: None}],
    }


def blank() -> dict[str, Any]:
    return {
        "w": torch.zeros(40),
        "flag": torch.tensor(False),
        "n": 0,
        "more": [b"", {"x": 0.0, 2: 1}],
    }


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("flips") / "run"
    with ce.Engine(root) as engine:
        for step in (1, 2, 3):
            engine.save(state(step), step=step, user={"by": "test"}, metrics={"loss": step})
    (root / ".owner").unlink()
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


def newest(root: Path) -> Path:
    return root / "step-00000003"


def files(root: Path) -> list[Path]:
    return sorted(newest(root).iterdir())


def loaded(path: Path, **how: Any) -> dict[str, Any] | str:
    """What `load` gives, or the error's text."""
    try:
        return ce.load(path, **how).to_dict()
    except ce.CheckpointError as error:
        return str(error)


def problems(path: Path) -> str:
    with pytest.raises(ce.CheckpointError) as caught:
        ce.verify(path)
    return "\n".join(getattr(caught.value, "problems", ()) or [str(caught.value)])


def flipped(path: Path) -> Iterator[None]:
    """Flips one bit of each byte in turn, another one each time."""
    good = path.read_bytes()
    fd = os.open(path, os.O_WRONLY)
    try:
        for at, byte in enumerate(good):
            os.pwrite(fd, bytes([byte ^ 1 << at % 8]), at)
            yield
            os.pwrite(fd, good[at : at + 1], at)
    finally:
        os.close(fd)
    assert path.read_bytes() == good


NAMES = [".metadata", "__0_0.distcp", "index-0.zst", "manifest.json"]


def test_these_are_all_files_and_small(root: Path) -> None:
    assert [path.name for path in files(root)] == NAMES
    assert sum(path.stat().st_size for path in files(root)) < 20_000


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_flipped(root: Path, identical: Identical, name: str) -> None:
    path = newest(root) / name
    harmless = 0
    for _ in flipped(path):
        assert name in problems(newest(root))
        for found in (loaded(newest(root)), loaded(newest(root), mmap=False)):
            if isinstance(found, str):
                assert name in found
            else:
                assert identical(found, state(3))
                harmless += 1
    # Readers of ours look at neither the pickle for others nor at zip headers and padding.
    size = path.stat().st_size
    assert harmless == {".metadata": 2 * size, "__0_0.distcp": harmless}.get(name, 0)
    payloads = 2 * (40 * 4 + 1)
    assert name != "__0_0.distcp" or harmless == 2 * size - payloads


@pytest.mark.parametrize("name", NAMES)
def test_flipped_bytes_of_the_newest_lead_to_the_one_before(
    root: Path, identical: Identical, name: str
) -> None:
    shutil.rmtree(root / "step-00000001")
    fallen = 0
    for number, _ in enumerate(flipped(newest(root) / name)):
        if number % 7:
            continue
        found = blank()
        with ce.Engine(root) as engine:
            info = engine.restore(found)
        assert info is not None
        assert identical(found, state(info.step))
        if info.step == 2:
            assert name in info.report.fallen_back_from[0]
            fallen += 1
        else:
            assert info.step == 3
            assert info.report.fallen_back_from == ()
    assert (fallen > 0) == (name != ".metadata")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("left", [0, 0.5, -1, 1, "missing"])
def test_truncated_and_missing_files(
    root: Path, identical: Identical, name: str, left: Any
) -> None:
    path = newest(root) / name
    size = path.stat().st_size
    if left == "missing":
        path.unlink()
    else:
        length = {0: 0, 0.5: size // 2, -1: size - 1, 1: size + 1}[left]
        os.truncate(path, length)
    if (name, left) == ("manifest.json", -1):
        assert path.read_bytes().endswith(b"}")  # only its line end is gone: no harm, no alarm
        assert ce.verify(newest(root)).step == 3
        return
    assert name in problems(newest(root))
    for found in (loaded(newest(root)), loaded(newest(root), mmap=False)):
        if name == ".metadata":
            assert not isinstance(found, str) and identical(found, state(3))
        else:
            assert isinstance(found, str) and name in found
    values = blank()
    with ce.Engine(root) as engine:
        info = engine.restore(values)
    assert info is not None
    assert info.step == (3 if name == ".metadata" else 2)
    assert identical(values, state(info.step))


def test_files_that_belong_to_others_are_ignored(root: Path, identical: Identical) -> None:
    for name in ("__9_9.distcp", "index-7.zst", "notes.txt", ".nfs0000123"):
        (newest(root) / name).write_bytes(b"not ours")
    (newest(root) / "folder").mkdir()
    (root / "step-9").mkdir()
    (root / "step-00000009.tmp").mkdir()
    (root / "checkpoint.pt").write_bytes(b"")
    assert ce.verify(root).step == 3
    values = blank()
    with ce.Engine(root) as engine:
        info = engine.restore(values)
        assert engine.steps() == [1, 2, 3]
    assert info is not None and info.step == 3
    assert info.report.fallen_back_from == ()
    assert identical(values, state(3))


def damage(path: Path) -> None:
    os.truncate(path / "__0_0.distcp", 0)


def test_two_of_three_damaged(
    root: Path, identical: Identical, caplog: pytest.LogCaptureFixture
) -> None:
    damage(root / "step-00000003")
    (root / "step-00000002" / "manifest.json").unlink()
    values = blank()
    with ce.Engine(root) as engine:
        info = engine.restore(values)
        assert info is not None and info.step == 1
        assert [text.split(":")[0] for text in info.report.fallen_back_from] == [
            "step-00000003",
            "step-00000002",
        ]
        assert "__0_0.distcp" in info.report.fallen_back_from[0]
        assert "manifest.json" in info.report.fallen_back_from[1]
        assert caplog.text.count("Passed over") == 2
        assert identical(values, state(1))
        # Going on from there: the damaged ones are neither overwritten nor taken for good.
        saved = engine.save(state(2), step=2)
        assert saved.attempt == 1
    with ce.Engine(root) as engine:
        info = engine.restore(values)
    assert info is not None and (info.step, info.attempt) == (2, 1)


def test_the_only_one_damaged_is_an_error_and_no_fresh_run(root: Path) -> None:
    for step in (1, 2, 3):
        damage(root / f"step-0000000{step}")
    values = blank()
    with ce.Engine(root) as engine:
        with pytest.raises(ce.CorruptError, match="does not start fresh") as caught:
            engine.restore(values)
        assert len(caught.value.problems) == 3
        with pytest.raises(ce.IncompleteError, match="step-00000002"):
            engine.restore(values, step=2)


def test_a_checkpoint_that_takes_the_name_of_another(root: Path) -> None:
    shutil.copytree(newest(root), root / "step-00000008")
    assert "step-00000003" in problems(root / "step-00000008")
    with ce.Engine(root) as engine:
        info = engine.restore(blank())
    assert info is not None and info.step == 3


def test_damage_goes_unnoticed_only_where_asked_for(root: Path) -> None:
    data = (newest(root) / "__0_0.distcp").read_bytes()
    at = data.index(state(3)["w"].numpy().tobytes())
    with (newest(root) / "__0_0.distcp").open("r+b") as file:
        file.seek(at)
        file.write(b"\\x01")
    values = blank()
    with ce.Engine(root, verify=False) as engine:
        info = engine.restore(values)
    assert info is not None and info.step == 3

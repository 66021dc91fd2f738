"""`Engine(incremental=True)`: what did not change is not written again, and nothing else differs."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptengine as ce
from ckptengine.format.checksum import crc32
from ckptengine.plan import stability
from ckptengine.repository import Repository
from ckptengine.testing.crash import crash_states, record
from ckptengine.testing.inline import inline_engine

Identical = Callable[[Any, Any], bool]
COUNT, SIZE = 20, 4096  # frozen tensors, and elements of each
KIB = 1024


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stability, "_LEAST", 128 << 10)


def state() -> dict[str, Any]:
    """Frozen tensors, one after each that is trained."""
    torch.manual_seed(7)
    return {
        "layers": [
            {"base": torch.randn(SIZE), "adapter": torch.randn(SIZE // 64)} for _ in range(COUNT)
        ],
        "step": 0,
    }


def train(found: dict[str, Any]) -> None:
    found["step"] += 1
    for layer in found["layers"]:
        layer["adapter"].add_(1)


def blank() -> dict[str, Any]:
    found = state()
    for layer in found["layers"]:
        for tensor in layer.values():
            tensor.zero_()
    return found


def written(run: Path, step: int) -> int:
    """Bytes of the chunk files of one checkpoint that no other checkpoint has."""
    folder = run / f"step-{step:08d}"
    others = {
        path.stat().st_ino for path in run.glob("step-*/*.distcp") if path.parent.name < folder.name
    }
    found = [path.stat() for path in folder.glob("*.distcp")]
    return sum(one.st_size for one in found if one.st_ino not in others)


def saved(engine: ce.Engine, found: dict[str, Any], count: int, first: int = 1) -> None:
    for step in range(first, first + count):
        train(found)
        engine.save(found, step=step)


CHANGED = COUNT * SIZE // 64 * 4
FRAMES = COUNT * 2 * KIB + 4 * KIB  # most of the bytes, where tensors are small


def test_only_what_changed_is_written_and_each_checkpoint_is_whole(
    run: Path, identical: Identical
) -> None:
    found = state()
    with ce.Engine(run, incremental=True) as engine:
        saved(engine, found, 6)
        handle = engine.save_async(found, step=7)
        handle.wait()
        assert handle.timings["nbytes_shared"] >= COUNT * SIZE * 4
    assert written(run, 1) > COUNT * SIZE * 4
    for step in (4, 5, 6, 7):
        assert written(run, step) <= CHANGED + FRAMES
    for step in range(1, 8):
        ce.verify(run, step=step)
        again = blank()
        with ce.Engine(run) as engine:
            engine.restore(again, step=step)
        expected = state()
        for _ in range(min(step, 6)):
            train(expected)
        assert identical(again, expected)


def test_retention_and_removal_leave_the_bytes_that_others_use(
    run: Path, identical: Identical
) -> None:
    found = state()
    with ce.Engine(run, incremental=True, keep=1) as engine:
        saved(engine, found, 8)
    assert [checkpoint.step for checkpoint in Repository(str(run)).ids()] == [8]
    ce.verify(run)
    assert written(run, 8) > COUNT * SIZE * 4  # the only one left has all of them
    with ce.Engine(run, incremental=True, keep=3) as engine:
        saved(engine, found, 3, first=9)
    for step in (9, 10):
        shutil.rmtree(run / f"step-{step:08d}")
    again = blank()
    with ce.Engine(run) as engine:
        engine.restore(again)
    assert identical(again, found)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning")
def test_stock_dcp_reads_it(run: Path, identical: Identical) -> None:
    import torch.distributed.checkpoint as dcp

    found = state()
    with ce.Engine(run, incremental=True) as engine:
        saved(engine, found, 5)
    again = blank()
    dcp.load(again, checkpoint_id=str(run / "step-00000005"), no_dist=True)
    assert identical(again, found)


def test_what_no_optimizer_owns_is_shared_from_the_second_save_on(run: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 8))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    with ce.Engine(run, incremental=True) as engine:
        for step in (1, 2):
            model(torch.randn(4, 300)).sum().backward()
            optimizer.step()
            engine.save({"model": model, "optimizer": optimizer}, step=step)
    assert written(run, 1) > 300 * 300 * 4
    assert written(run, 2) < 300 * 8 * 4 * 3 + 30_000
    ce.verify(run)


def test_a_new_process_shares_with_the_checkpoint_that_it_restored(
    run: Path, identical: Identical
) -> None:
    found = state()
    with ce.Engine(run, incremental=True) as engine:
        saved(engine, found, 4)
    again = blank()
    with ce.Engine(run, incremental=True) as engine:
        engine.restore(again)
        saved(engine, again, 2, first=5)
    assert written(run, 5) <= CHANGED + FRAMES
    assert written(run, 6) <= CHANGED + FRAMES
    ce.verify(run)


def test_a_new_persister_shares_with_what_the_dead_one_committed(run: Path) -> None:
    found = state()
    with ce.Engine(run, incremental=True) as engine:
        saved(engine, found, 4)
        engine.abort()  # ends the persister, though nothing is on its way
        saved(engine, found, 1, first=5)
    assert written(run, 5) <= CHANGED + FRAMES
    ce.verify(run, step=5)


@pytest.mark.parametrize("which", [0, 7, COUNT - 1])
def test_a_frozen_tensor_that_changes_after_all_is_written(
    run: Path, identical: Identical, which: int
) -> None:
    found = state()
    with ce.Engine(run, incremental=True) as engine:
        saved(engine, found, 4)
        # The least that can change, in a way that torch does not see.
        found["layers"][which]["base"].data[SIZE // 2] += 1
        saved(engine, found, 1, first=5)
        expected = copy.deepcopy(found)
        saved(engine, found, 3, first=6)
    again = blank()
    with ce.Engine(run) as engine:
        engine.restore(again, step=5)
    assert identical(again, expected)
    assert written(run, 8) <= CHANGED + FRAMES + SIZE * 4
    for step in range(1, 9):
        ce.verify(run, step=step)


def test_a_changed_tensor_of_the_same_crc_is_not_taken_for_unchanged(
    run: Path, identical: Identical
) -> None:
    """Bytes that differ by a multiple of the CRC's polynomial have one CRC."""
    found = state()
    with ce.Engine(run, incremental=True) as engine:
        saved(engine, found, 4)
        raw = found["layers"][3]["base"].view(torch.uint8)
        before = crc32(raw.numpy())
        for place, byte in enumerate(((0xEDB88320 << 1) | 1).to_bytes(5, "little")):
            raw[100 + place] ^= byte
        assert crc32(raw.numpy()) == before
        saved(engine, found, 1, first=5)
    again = blank()
    with ce.Engine(run) as engine:
        engine.restore(again)
    assert identical(again, found)


def base_file(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}" / "__0_1.distcp"


def flip(path: Path, keep_time: bool) -> None:
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    if keep_time:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
def test_a_file_that_was_changed_in_place_is_not_shared_on(run: Path, how: str) -> None:
    found = state()
    with ce.Engine(run, incremental=True) as engine:
        saved(engine, found, 4)
        if how == "flip":
            flip(base_file(run, 4), keep_time=False)
        elif how == "truncate":
            os.truncate(base_file(run, 4), 10)
        else:
            base_file(run, 4).unlink()
        saved(engine, found, 2, first=5)
    ce.verify(run, step=5)
    ce.verify(run, step=6)
    assert base_file(run, 6).stat().st_ino == base_file(run, 5).stat().st_ino
    with pytest.raises((ce.CorruptError, ce.IncompleteError)):
        ce.verify(run, step=4)


def test_a_new_process_reads_a_file_before_it_shares_it(run: Path) -> None:
    """Damage by the disk leaves no trace in the time of the last change."""
    found = state()
    with ce.Engine(run, incremental=True) as engine:
        saved(engine, found, 4)
    flip(base_file(run, 4), keep_time=True)
    with ce.Engine(run, incremental=True) as engine:
        engine._restored = Repository(str(run)).ids()[-1]  # as if it had been whole then
        saved(engine, found, 1, first=5)
    ce.verify(run, step=5)
    assert base_file(run, 5).stat().st_ino != base_file(run, 4).stat().st_ino


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system whose files can share their blocks."""
    image, folder = tmp_path / "image", tmp_path / "xfs"
    with image.open("wb") as file:
        file.truncate(400 << 20)
    folder.mkdir()
    try:
        for command in (["mkfs.xfs", "-q", image], ["mount", "-o", "loop", image, folder]):
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no XFS can be made and mounted here: {error}")
    yield folder
    # Lazily: nothing stays mounted, even where a test failed with a file open.
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_where_files_can_share_blocks_a_change_in_place_hits_one_checkpoint(xfs: Path) -> None:
    run = xfs / "run"
    found = state()
    with ce.Engine(run, incremental=True) as engine:
        saved(engine, found, 4)
        used = shutil.disk_usage(xfs).used
        for step in range(5, 15):
            train(found)
            handle = engine.save_async(found, step=step)
            handle.wait()
            assert handle.timings["nbytes_shared"] >= COUNT * SIZE * 4
        assert shutil.disk_usage(xfs).used - used < 10 * (CHANGED + FRAMES + 64 * KIB)
    assert base_file(run, 14).stat().st_nlink == 1
    flip(base_file(run, 13), keep_time=True)
    for step in (12, 14):
        ce.verify(run, step=step)
    with pytest.raises(ce.CorruptError):
        ce.verify(run, step=13)


def test_without_hard_links_all_is_written(
    run: Path, identical: Identical, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def link(source: str, target: str) -> None:
        tried.append(target)
        raise PermissionError(errno.EPERM, "not permitted", target)

    monkeypatch.setattr(os, "link", link)
    found = state()
    with inline_engine(run, incremental=True) as engine:
        saved(engine, found, 5)
    assert tried
    assert written(run, 5) > COUNT * SIZE * 4
    ce.verify(run)


def test_another_structure_is_another_matter(run: Path, identical: Identical) -> None:
    found = state()
    with ce.Engine(run, incremental=True) as engine:
        saved(engine, found, 4)
        found["layers"].append({"base": torch.randn(SIZE), "adapter": torch.randn(64)})
        found = {"first": torch.ones(5), **found}
        saved(engine, found, 3, first=5)
    for step in (5, 7):
        ce.verify(run, step=step)
    again = copy.deepcopy(found)
    for layer in again["layers"]:
        layer["base"].zero_()
    with ce.Engine(run) as engine:
        engine.restore(again)
    assert identical(again, found)


def test_a_save_that_fails_does_not_spoil_the_next(
    run: Path, identical: Identical, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = state()
    with inline_engine(run, incremental=True) as engine:
        saved(engine, found, 4)
        with monkeypatch.context() as patch:

            def pwrite(*_: Any) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(os, "pwrite", pwrite)
            found["layers"][3]["base"].add_(1)
            with pytest.raises(ce.StoreError, match="ENOSPC"):
                saved(engine, found, 1, first=5)
        saved(engine, found, 2, first=6)
    ce.verify(run, step=6)
    again = blank()
    with ce.Engine(run) as engine:
        engine.restore(again)
    assert identical(again, found)


def test_overlapped_captures_and_saves_in_flight(run: Path, identical: Identical) -> None:
    found = state()
    expected = []
    with ce.Engine(run, incremental=True, capture="overlap") as engine:
        for step in range(8):
            train(found)
            if step == 5:
                found["layers"][2]["base"].add_(1)
            expected.append(copy.deepcopy(found))
            engine.save_async(found, step=step)
    for step, wanted in enumerate(expected):
        ce.verify(run, step=step)
        again = blank()
        with ce.Engine(run) as engine:
            engine.restore(again, step=step)
        assert identical(again, wanted)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.sets(st.integers(0, 11), max_size=4),  # tensors that change
            st.sampled_from(["", "", "", "restart", "prune"]),
        ),
        min_size=3,
        max_size=12,
    )
)
def test_whatever_changes_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    identical: Identical,
    script: list[tuple[set[int], str]],
) -> None:
    run = tmp_path_factory.mktemp("runs") / "run"
    found = {"tensors": [torch.full((3000 * (n % 3) + 10,), float(n)) for n in range(12)], "n": 0}
    expected: dict[int, Any] = {}
    engine = inline_engine(run, incremental=True, keep=4)
    try:
        for step, (changing, event) in enumerate(script):
            for number in changing:
                found["tensors"][number].add_(1)
            found["n"] = step
            engine.save(found, step=step)
            expected[step] = copy.deepcopy(found)
            if event == "restart":
                engine.close()
                engine = inline_engine(run, incremental=True, keep=4)
                engine.restore(found)
            elif event == "prune":
                for other in engine.steps()[:-1]:
                    # Unless the engine is just deleting it.
                    shutil.rmtree(run / f"step-{other:08d}", ignore_errors=True)
    finally:
        engine.close()
    steps = [checkpoint.step for checkpoint in Repository(str(run)).ids()]
    assert steps[-1] == len(script) - 1
    for step in steps:
        ce.verify(run, step=step)
        assert identical(ce.load(run, step=step).to_dict(), expected[step])


def test_a_crash_at_any_operation_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, identical: Identical
) -> None:
    root = tmp_path / "root"
    found = state()
    with inline_engine(root, incremental=True, keep=2) as engine:
        saved(engine, found, 4)
    old = copy.deepcopy(found)
    with record(root) as recording, inline_engine(root, incremental=True, keep=2) as engine:
        engine.restore(found)
        saved(engine, found, 1, first=5)
        recording.mark("committed")
    assert any(op.call == "link" for op in recording.ops)
    for number, (point, build) in enumerate(crash_states(recording)):
        target = tmp_path / f"state{number}"
        build(target)
        again = blank()
        with ce.Engine(target, incremental=True) as engine:
            info = engine.restore(again)
            assert info is not None and not info.report.fallen_back_from, point
            assert info.step == 5 or ("committed" not in point.marks and info.step == 4), point
            assert identical(again, found if info.step == 5 else old), point
        for checkpoint in Repository(str(target)).named():
            ce.verify(target / checkpoint.name)
        shutil.rmtree(target)
    assert number > 30

"""The crash recorder: it finds every mistake of a writer that syncs wrongly, and no other."""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptengine.store import local
from ckptengine.testing.crash import (
    DROP,
    KILL,
    TORN,
    Crash,
    CrashPoint,
    Recording,
    crash_states,
    materialise,
    record,
)

OLD = b"old" * 700
NEW = b"new!" * 600

Writer = Callable[[Path], None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_bytes(OLD)
    return root


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(path, flags, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    with opened(path) as fd:
        os.fsync(fd)


def create(path: Path, data: bytes, *, synced: bool) -> None:
    with opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
        for start in range(0, len(data), 1000):
            os.write(fd, data[start : start + 1000])
        if synced:
            os.fsync(fd)


def recorded(root: Path) -> contextlib.AbstractContextManager[Recording]:
    return record(root, c_calls=())


def find(recording: Recording, target: Path, name: str) -> list[tuple[CrashPoint, bytes | None]]:
    """What each crash leaves under a name; None where it is not there."""
    found = []
    for number, (point, build) in enumerate(crash_states(recording)):
        build(target / str(number))
        path = target / str(number) / name
        found.append((point, path.read_bytes() if path.exists() else None))
    return found


def content(tree: Path) -> dict[str, tuple[object, ...]]:
    """What is in a directory, by a way of its own."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(tree.rglob("*")):
        status = path.lstat()
        what: object = None
        if path.is_symlink():
            what = os.readlink(path)
        elif path.is_file():
            what = path.read_bytes()
        links = None if stat.S_ISDIR(status.st_mode) else status.st_nlink
        found[str(path.relative_to(tree))] = (stat.filemode(status.st_mode), links, what)
    return found


# --- Writers, one right and the others wrong ------------------------------------------------------


def right(root: Path) -> None:
    create(root / "temp", NEW, synced=True)
    os.rename(root / "temp", root / "file")
    sync(root)


def without_file_sync(root: Path) -> None:
    create(root / "temp", NEW, synced=False)
    os.rename(root / "temp", root / "file")
    sync(root)


def without_directory_sync(root: Path) -> None:
    create(root / "temp", NEW, synced=True)
    os.rename(root / "temp", root / "file")


def renamed_before_sync(root: Path) -> None:
    create(root / "temp", NEW, synced=False)
    os.rename(root / "temp", root / "file")
    sync(root / "file")
    sync(root)


def in_place(root: Path) -> None:
    with opened(root / "file", os.O_WRONLY | os.O_TRUNC) as fd:
        os.write(fd, NEW)
        os.fsync(fd)


def synced_before_write(root: Path) -> None:
    with opened(root / "temp", os.O_CREAT | os.O_WRONLY) as fd:
        os.fsync(fd)
        os.write(fd, NEW)
    os.rename(root / "temp", root / "file")
    sync(root)


def judged(root: Path, writer: Writer) -> set[str]:
    """What goes wrong in some crash of an update of `file`."""
    with recorded(root) as recording:
        writer(root)
        recording.mark("committed")
    assert (root / "file").read_bytes() == NEW
    wrong = set()
    for point, data in find(recording, root.parent / "states", "file"):
        if data not in (OLD, NEW):
            wrong.add("lost" if data is None else "mixed")
        elif data == OLD and "committed" in point.marks:
            wrong.add("stale")
    return wrong


def test_right_writer_passes(root: Path) -> None:
    assert judged(root, right) == set()


@pytest.mark.parametrize(
    ("writer", "wrong"),
    [
        (without_file_sync, {"mixed"}),
        (without_directory_sync, {"stale"}),
        (renamed_before_sync, {"mixed"}),
        (in_place, {"mixed"}),
        (synced_before_write, {"mixed"}),
    ],
)
def test_wrong_writer_is_caught(root: Path, writer: Writer, wrong: set[str]) -> None:
    assert judged(root, writer) == wrong


@pytest.mark.parametrize("synced", [True, False])
def test_directory_needs_its_parents_sync(root: Path, synced: bool) -> None:
    with recorded(root) as recording:
        os.makedirs(root / "run" / "step")
        create(root / "run" / "step" / "data", NEW, synced=True)
        sync(root / "run" / "step")
        sync(root / "run")
        if synced:
            sync(root)
        recording.mark("committed")
    found = find(recording, root.parent / "states", "run/step/data")
    after = {data for point, data in found if "committed" in point.marks}
    assert after == ({NEW} if synced else {NEW, None})


@pytest.mark.parametrize("staged", [True, False])
def test_staged_directory_of_several_files(root: Path, staged: bool) -> None:
    """As a checkpoint is committed: a synced temporary directory gets its name last."""
    with recorded(root) as recording:
        os.mkdir(root / ".tmp")
        for name in ("a", "b", "manifest"):
            create(root / ".tmp" / name, NEW, synced=True)
        if staged:
            sync(root / ".tmp")
        os.rename(root / ".tmp", root / "step")
        sync(root)
        recording.mark("committed")
    whole = set()
    for number, (point, build) in enumerate(crash_states(recording, seeds=range(20))):
        build(root.parent / str(number))
        step = root.parent / str(number) / "step"
        names = sorted(os.listdir(step)) if step.exists() else None
        assert names is not None or "committed" not in point.marks, str(point)
        if names is not None:
            whole.add(names == ["a", "b", "manifest"])
    assert whole == ({True} if staged else {True, False})


# --- The model ------------------------------------------------------------------------------------


def only(recording: Recording, tmp_path: Path, crash: Crash = DROP) -> dict[str, object]:
    target = Path(tempfile.mkdtemp(dir=tmp_path))
    materialise(recording, len(recording.ops), crash, target)
    return {path: what for path, (_, _, what) in content(target).items()}


def test_drop_keeps_what_was_synced_and_nothing_else(root: Path, tmp_path: Path) -> None:
    with recorded(root) as recording:
        create(root / "nameless", NEW, synced=True)
        assert only(recording, tmp_path) == {"file": OLD}
        create(root / "named", NEW, synced=False)
        sync(root)
        assert only(recording, tmp_path) == {"file": OLD, "nameless": NEW, "named": b""}
        with opened(root / "named", os.O_WRONLY) as fd:
            os.pwrite(fd, b"x", 10)
            os.fdatasync(fd)
            os.ftruncate(fd, 0)
        assert only(recording, tmp_path)["named"] == NEW[:10] + b"x" + NEW[11:]
        os.unlink(root / "named")
        assert "named" in only(recording, tmp_path)
        sync(root)
        assert "named" not in only(recording, tmp_path)


def test_rename_between_directories_lasts_by_its_destination(root: Path, tmp_path: Path) -> None:
    for name in ("from", "to"):
        (root / name).mkdir()
    (root / "from" / "x").write_bytes(OLD)
    with recorded(root) as recording:
        os.rename(root / "from" / "x", root / "to" / "y")
        sync(root / "from")
        assert only(recording, tmp_path) == {"file": OLD, "from": None, "from/x": OLD, "to": None}
        # A new file of the old name cannot be durable before the old one has moved away.
        create(root / "from" / "x", NEW, synced=True)
        sync(root / "from")
        moved = {"from/x": NEW, "to/y": OLD}
        assert only(recording, tmp_path) == {"file": OLD, "from": None, "to": None, **moved}


def test_directory_moves_with_its_open_files(root: Path, tmp_path: Path) -> None:
    with recorded(root) as recording:
        os.mkdir(root / "a")
        with opened(root / "a" / "x", os.O_CREAT | os.O_RDWR) as fd:
            os.rename(root / "a", root / "b")
            os.write(fd, NEW)
            os.fsync(fd)
        sync(root / "b")
        assert only(recording, tmp_path) == {"file": OLD}
        sync(root)
    assert only(recording, tmp_path) == {"file": OLD, "b": None, "b/x": NEW}
    assert [repr(op) for op in recording.ops] == [
        "mkdir(a)",
        "open(a/x)",
        "rename(a, b)",
        f"write(b/x, 0, {len(NEW)})",
        "fsync(b/x)",
        "close(b/x)",
        "fsync(b)",
        "fsync(.)",
    ]


def test_torn_tears_at_sectors_and_apart_from_the_length(root: Path, tmp_path: Path) -> None:
    data = b"\xff" * 4096
    with recorded(root) as recording, opened(root / "file", os.O_WRONLY) as fd:
        os.pwrite(fd, data, 512)
    whole = OLD[:512] + data
    kinds = set()
    for seed in range(60):
        found = only(recording, tmp_path, TORN(seed))["file"]
        assert isinstance(found, bytes)
        assert len(found) in (len(OLD), len(whole))
        for start in range(0, len(found), 512):
            sector = found[start : start + 512]
            old, new = OLD[start : start + 512], whole[start : start + 512]
            assert sector in (old.ljust(len(sector), b"\0"), new[: len(sector)], new[: len(old)])
        shown = {start for start in range(512, len(OLD), 512) if found[start] == 0xFF}
        kinds.add((len(found) == len(whole), len(shown) in (0, 4)))
        assert found == only(recording, tmp_path, TORN(seed))["file"]
    assert kinds == {(long, clean) for long in (True, False) for clean in (True, False)}


def test_torn_leaves_synced_data_alone(root: Path, tmp_path: Path) -> None:
    with recorded(root) as recording, opened(root / "file", os.O_WRONLY) as fd:
        os.ftruncate(fd, 10)
        os.pwrite(fd, OLD, 0)
        os.pwrite(fd, NEW, 0)
        os.fdatasync(fd)
    for seed in range(20):
        assert only(recording, tmp_path, TORN(seed))["file"] == NEW


def test_mode_waits_for_fsync(root: Path, tmp_path: Path) -> None:
    def modes(crash: Crash) -> object:
        target = Path(tempfile.mkdtemp(dir=tmp_path))
        materialise(recording, len(recording.ops), crash, target)
        return content(target)["file"][0]

    os.chmod(root / "file", 0o640)
    with recorded(root) as recording:
        os.chmod(root / "file", 0o600)
        with opened(root / "file", os.O_RDWR) as fd:
            os.fdatasync(fd)
            assert modes(DROP) == "-rw-r-----"
            assert {modes(TORN(seed)) for seed in range(20)} == {"-rw-r-----", "-rw-------"}
            os.fsync(fd)
        assert {modes(DROP), modes(TORN(1))} == {"-rw-------"}


def test_torn_keeps_the_order_of_each_name(root: Path, tmp_path: Path) -> None:
    with recorded(root) as recording:
        for number in range(6):
            create(root / "temp", bytes([number]), synced=True)
            os.rename(root / "temp", root / "file")
            create(root / f"other-{number}", b"", synced=False)
    seen = set()
    for seed in range(80):
        found = only(recording, tmp_path, TORN(seed))
        assert found["file"] == OLD or found["file"] in [bytes([n]) for n in range(6)]
        if "temp" in found:  # the last created, whose rename was dropped
            last = -1 if found["file"] == OLD else found["file"][0]
            assert found["temp"] == bytes([last + 1])
        seen.add(tuple(sorted(name for name in found if name.startswith("other"))))
    assert len(seen) > 10  # the names of different files do not wait for each other


def test_equal_states_are_given_once_for_each_mark(root: Path) -> None:
    with recorded(root) as recording:
        recording.mark("begun")
        sync(root)
        sync(root)
        recording.mark("done")
    points = [point for point, _ in crash_states(recording)]
    assert [point.marks for point in points] == [(), ("begun",), ("begun", "done")]
    assert str(points[0]) == "kill after 0: nothing"
    assert str(points[1]) == "kill after 1: mark(begun)"


def test_target_must_be_fresh(root: Path, tmp_path: Path) -> None:
    with recorded(root) as recording:
        pass
    with pytest.raises(FileExistsError, match="not empty"):
        materialise(recording, 0, KILL, root)


# --- Seeing everything ----------------------------------------------------------------------------


def test_each_way_to_write_is_seen(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(NEW)
    with recorded(root) as recording, opened(outside) as source:
        with opened(root / "x", os.O_CREAT | os.O_RDWR) as fd:
            os.write(fd, b"abc")
            os.writev(fd, [b"de", memoryview(b"f")])
            os.pwrite(fd, bytearray(b"X"), 1)
            os.pwritev(fd, [b"Y", b"Z"], 3)
            os.pwrite(fd, b"", 5000)  # changes nothing, the length neither
            assert os.sendfile(fd, source, 0, 100) == 100
            assert os.copy_file_range(source, fd, 50, offset_src=7, offset_dst=200) == 50
            assert os.copy_file_range(source, fd, 50) == 50
            read_end, write_end = os.pipe()
            os.write(write_end, b"piped")
            assert os.splice(read_end, fd, 5, offset_dst=300) == 5
            os.close(read_end)
            os.close(write_end)
            os.posix_fallocate(fd, 0, 1000)
            os.posix_fallocate(fd, 0, 10)
            os.fchmod(fd, 0o600)
        with opened(root / "x", os.O_WRONLY | os.O_APPEND) as fd:
            os.write(fd, b"more")
            os.pwrite(fd, b"at the end", 0)
        os.truncate(root / "x", 1005)
        os.chmod(root / "x", 0o640)
        with recording.lock:
            assert only(recording, tmp_path, KILL)["x"] == (root / "x").read_bytes()
    calls = {op.call for op in recording.ops}
    assert calls >= {"write", "writev", "pwrite", "pwritev", "sendfile", "copy_file_range"}
    assert calls >= {"splice", "posix_fallocate", "fchmod", "truncate", "chmod", "close", "open"}


def test_direct_write_from_mapped_memory(root: Path, tmp_path: Path) -> None:
    memory = mmap.mmap(-1, 8192)
    memory[:] = bytes(range(256)) * 32
    with recorded(root) as recording:
        try:
            fd = os.open(root / "direct", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            assert error.errno == errno.EINVAL
            pytest.skip("no O_DIRECT here")
        assert os.pwrite(fd, memoryview(memory)[4096:], 4096) == 4096
        os.ftruncate(fd, 5000)
        os.fsync(fd)
        os.close(fd)
        sync(root)
    assert only(recording, tmp_path)["direct"] == bytes(4096) + memory[4096:5000]
    memory.close()


def test_paths_of_every_form(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    monkeypatch.chdir(root)
    with recorded(link) as recording:
        os.mkdir("a/")
        os.mkdir(os.fsencode(root / "a" / "b"))
        (link / "a" / "c").mkdir()
        with opened(Path("a")) as fd:
            os.mkdir("d", dir_fd=fd)
            os.rename("d", "e", src_dir_fd=fd, dst_dir_fd=fd)
            os.symlink("../file", "to-file", dir_fd=fd)
            os.fsync(fd)
        with opened(root / "a" / "to-file", os.O_WRONLY) as fd:
            os.write(fd, b"through the link")
        os.link("file", "hard")
        os.replace("hard", "file")  # two names of one file: POSIX does nothing
        os.mkdir(tmp_path / "elsewhere")
        shutil.rmtree(root / "a")
        (root / "hard").unlink()
    assert [repr(op) for op in recording.ops[:8]] == [
        "mkdir(a)",
        "mkdir(a/b)",
        "mkdir(a/c)",
        "mkdir(a/d)",
        "rename(a/d, a/e)",
        "symlink(a/to-file)",
        "fsync(a)",
        "write(file, 0, 16)",
    ]
    assert not any("elsewhere" in op.path for op in recording.ops)


def test_threads_are_recorded_in_one_order(root: Path) -> None:
    def work(name: str) -> None:
        for number in range(10):
            create(root / f"{name}-{number}.tmp", name.encode() * 50, synced=True)
            os.rename(root / f"{name}-{number}.tmp", root / f"{name}-{number}")
            sync(root)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    with recorded(root) as recording:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(recording.ops) == 4 * 10 * 6
    last = root.parent / "last"
    materialise(recording, len(recording.ops), DROP, last)
    assert content(last) == content(root)


@pytest.mark.parametrize("mode", ["w", "wb", "ab", "x", "r+b"])
def test_open_for_writing_raises(root: Path, mode: str) -> None:
    name = "new" if mode == "x" else "file"
    before = content(root)
    with recorded(root):
        assert (root / "file").read_bytes() == OLD
        (root.parent / "elsewhere").write_bytes(NEW)
    fd = os.open(root / "file", os.O_RDWR)
    calls: list[Callable[[], object]] = [
        lambda: open(root / name, mode),  # noqa: SIM115
        lambda: io.open(root / name, mode),  # noqa: SIM115, UP020
        lambda: os.fdopen(fd, mode.replace("x", "w"), closefd=False),
        lambda: (root / name).open(mode),
    ]
    for call in calls:
        with pytest.raises(AssertionError, match="open"), recorded(root):
            call()
        # Also where the writer swallows the error.
        swallowed = contextlib.suppress(AssertionError)
        with pytest.raises(AssertionError, match="open"), recorded(root), swallowed:
            call()
    os.close(fd)
    assert content(root) == before


def test_change_behind_the_recorder_raises(root: Path) -> None:
    with opened(root / "file", os.O_RDWR) as fd:
        memory = mmap.mmap(fd, 0)
        with pytest.raises(AssertionError, match="not recorded: file"), recorded(root):
            memory[0] = 1
        memory.close()
        with pytest.raises(AssertionError, match="not recorded: other"), recorded(root):
            subprocess.run([sys.executable, "-c", "open('other', 'w')"], cwd=root, check=True)
        with pytest.raises(AssertionError, match="changed its size"), recorded(root):
            io.FileIO(fd, "w", closefd=False).truncate(5)
            os.write(fd, b"x")


def test_error_of_the_writer_comes_through(root: Path) -> None:
    mkdir = os.mkdir
    with pytest.raises(ZeroDivisionError), recorded(root):
        raise ZeroDivisionError
    with recorded(root) as recording:
        for call in (os.chmod, os.truncate):
            with pytest.raises(FileNotFoundError):
                call(root / "missing", 0)
        with pytest.raises(FileExistsError):
            os.mkdir(root / "file")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fsync(10**6)
    assert recording.ops == []
    assert os.mkdir is mkdir


@pytest.mark.parametrize(
    "call",
    [
        lambda root: os.rename(root / "file", root.parent / "file"),
        lambda root: os.rmdir(root),
        lambda root: os.mkfifo(root / "fifo"),
        lambda root: os.open(root, os.O_TMPFILE | os.O_RDWR),
    ],
)
def test_what_is_not_modelled_is_refused(root: Path, call: Callable[[Path], object]) -> None:
    with pytest.raises(AssertionError, match=r"not modelled|border"), recorded(root):
        call(root)
    assert os.listdir(root) == ["file"]


def test_functions_that_call_c_are_seen(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, allocate = os.rename, os.posix_fallocate

    def fall_back(source: str, target: str) -> None:
        os.link(source, target)
        os.unlink(source)

    module = types.ModuleType("calls_c")
    module.move = lambda source, target: rename(source, target)  # type: ignore[attr-defined]
    module.fall_back = fall_back  # type: ignore[attr-defined]
    module.reserve = lambda fd, nbytes: allocate(fd, 0, nbytes)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "calls_c", module)
    calls = [("calls_c", "move", "rename"), ("calls_c", "fall_back", "rename")]
    with record(root, c_calls=[*calls, ("calls_c", "reserve", "allocate")]) as recording:
        module.move(str(root / "file"), str(root / "a"))
        module.fall_back(str(root / "a"), str(root / "b"))
        with opened(root / "b", os.O_WRONLY) as fd:
            module.reserve(fd, 5000)
    assert [repr(op) for op in recording.ops] == [
        "move(file, a)",
        "link(a, b)",
        "unlink(a)",
        "reserve(b, 5000)",
        "close(b)",
    ]


def test_calls_of_the_local_store_are_seen(root: Path) -> None:
    (root / "taken").mkdir()
    with record(root) as recording:
        local.rename_noreplace(str(root / "file"), str(root / "a"))
        with opened(root / "a", os.O_WRONLY) as fd:
            local.preallocate(fd, 5000)
        with pytest.raises(FileExistsError):
            local.rename_noreplace(str(root / "a"), str(root / "taken"))
    assert [op.call for op in recording.ops] == ["rename_noreplace", "preallocate", "close"]


# --- Random operations against the real file system -----------------------------------------------


def step(rng: random.Random, root: Path, fds: list[int]) -> None:
    """One operation that is likely, but not sure, to be possible."""
    inside = sorted(root.rglob("*"))
    there = rng.choice(inside or [root / "a"])
    parent = rng.choice([root, *(path for path in inside if path.is_dir())])
    new = parent / rng.choice("abc")
    fd, number = rng.choice(fds), rng.randrange(1500)
    flags = os.O_CREAT | os.O_RDWR | rng.choice([0, 0, os.O_TRUNC, os.O_APPEND, os.O_EXCL])
    operations: dict[str, Callable[[], object]] = {
        "open": lambda: fds.append(os.open(new, flags)),
        "write": lambda: os.write(fd, rng.randbytes(number)),
        "pwrite": lambda: os.pwrite(fd, rng.randbytes(number % 99), number),
        "seek": lambda: os.lseek(fd, number, os.SEEK_SET),
        "truncate": lambda: os.truncate(there, number),
        "ftruncate": lambda: os.ftruncate(fd, number),
        "grow": lambda: os.posix_fallocate(fd, number, number + 1),
        "chmod": lambda: os.chmod(there, rng.choice([0o700, 0o755, 0o777])),
        "fsync": lambda: os.fsync(fd),
        "sync": lambda: sync(rng.choice([there, parent])),
        "mkdir": lambda: os.mkdir(new),
        "unlink": lambda: os.unlink(there),
        "rmdir": lambda: os.rmdir(there),
        "rename": lambda: os.rename(there, new),
        "link": lambda: os.link(there, new),
        "symlink": lambda: os.symlink(rng.choice("abc"), new),
        "rmtree": lambda: shutil.rmtree(there) if number < 300 else None,
    }
    # Such as a name that is taken, a directory moved into itself or a loop of links.
    with contextlib.suppress(OSError, shutil.Error):
        operations[rng.choice(list(operations))]()


@pytest.mark.parametrize("seed", range(30))
def test_killed_state_of_each_prefix_is_what_was_there(seed: int, tmp_path: Path) -> None:
    rng, root = random.Random(seed), tmp_path / "root"
    root.mkdir()
    fds = [os.open(root / "first", os.O_CREAT | os.O_RDWR)]
    try:
        for _ in range(rng.randrange(40)):
            step(rng, root, fds)
        with recorded(root) as recording:
            seen = {0: content(root)}
            for _ in range(50):
                step(rng, root, fds)
                seen[len(recording.ops)] = content(root)
        for prefix, expected in seen.items():
            target = tmp_path / str(prefix)
            materialise(recording, prefix, KILL, target)
            assert content(target) == expected, recording.ops[:prefix]
        # Whatever else a crash leaves can be written out, and nothing synced is lost.
        for number, (_, build) in enumerate(crash_states(recording, seeds=range(2))):
            build(tmp_path / f"state-{number}")
        with recorded(root) as recording:
            step(rng, root, fds)
            for path in [root, *root.rglob("*")]:
                if not path.is_symlink():
                    sync(path)
        last = len(recording.ops)
        for crash in (DROP, TORN(1)):
            materialise(recording, last, crash, tmp_path / str(crash))
            assert content(tmp_path / str(crash)) == content(root)
    finally:
        for fd in fds:
            os.close(fd)

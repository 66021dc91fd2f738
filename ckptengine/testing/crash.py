"""Record what a save does to a directory, and rebuild what a crash could leave of it.

    with record(root) as recording:
        save(root)
        recording.mark("committed")
    for point, build in crash_states(recording):
        build(target)                       # a fresh directory, as a reader would find it
        check(target, committed="committed" in point.marks)

Three ways to crash after each prefix of the recorded operations:

- ``KILL``: the process dies. All that was done so far is there.
- ``DROP``: power is lost and nothing unsynced survives. File data, length and mode last from the
  file's fsync on; a name lasts from the fsync of its directory on, and a file's own fsync does not
  make its name last. A rename lasts from the fsync of its *destination's* directory on; until then
  the old name stands. A directory whose name did not last takes everything below it along.
- ``TORN(seed)``: power is lost and a random part of the unsynced work survives. Each write is kept,
  dropped or kept in part, cut between 512-byte sectors; each change of a file's length is kept or
  not, apart from the data (zeros where the length was kept and the data was not). Each change of a
  name is kept or dropped; one that is kept brings along the earlier changes of the same names, and
  a rename is kept whole or not at all.

Files are inodes here, so renaming a directory moves all it holds, open files and later writes too.

What is seen: calls of the functions of ``os`` below the root, by all threads of this process, and
the functions in ``C_CALLS``. Writing there through ``open()`` raises, and so does the end of the
recording when the real directory differs from the recorded one: a write through mmap, C code,
another process or a ``from os import ...`` would otherwise make every verdict worthless. A sync
hidden in the same way only makes the verdict harsher.

What is not modelled: a device that lies about its flush; damage to synced data; a sector torn
within; old disk contents appearing in place of zeros; file systems that keep more order than POSIX
asks for (they lose less than this); ``O_SYNC``, ``RWF_DSYNC`` and ``os.sync``, which count for
nothing; owners, times and extended attributes. Operations run one at a time, under a lock, so one
order of concurrent threads is examined, not all of them. The root itself is taken to be durable.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import functools
import hashlib
import importlib
import io
import os
import pathlib
import random
import shutil  # noqa: F401  # looks at os.open when imported, which must not happen while patched
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, NoReturn, Union

SECTOR = 512

# Functions that call C directly, past ``os``: (module, function, what it does). A "rename" takes
# a source and a destination path, an "allocate" a descriptor and a length.
C_CALLS = (
    ("ckptengine.store.local", "rename_noreplace", "rename"),
    ("ckptengine.store.local", "preallocate", "allocate"),
)

AnyPath = Union[str, "os.PathLike[str]"]
Kind = Literal["file", "dir", "link"]


# --- The operations -------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Op:
    """One recorded operation. Paths are relative to the root and free of symbolic links."""

    call: str = field(repr=False)
    path: str

    def __repr__(self) -> str:
        shown = [getattr(self, field.name) for field in fields(self) if field.repr]
        texts = (str(len(value) if isinstance(value, bytes) else value) or "." for value in shown)
        return f"{self.call}({', '.join(texts)})"


class Note(Op):
    """A close or a mark: changes nothing."""


class Unlink(Op):
    pass


@dataclass(frozen=True, repr=False)
class Create(Op):
    kind: Kind = field(repr=False)
    mode: int = field(repr=False)
    target: bytes = field(repr=False, default=b"")


@dataclass(frozen=True, repr=False)
class Link(Op):
    destination: str


@dataclass(frozen=True, repr=False)
class Rename(Op):
    destination: str


@dataclass(frozen=True, repr=False)
class Sync(Op):
    inode: int = field(repr=False)


@dataclass(frozen=True, repr=False)
class Write(Op):
    inode: int = field(repr=False)
    offset: int
    data: bytes


@dataclass(frozen=True, repr=False)
class Resize(Op):
    inode: int = field(repr=False)
    length: int


@dataclass(frozen=True, repr=False)
class Chmod(Op):
    inode: int = field(repr=False)
    mode: int


# --- The disk -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crash:
    """How it went down."""

    kind: Literal["kill", "drop", "torn"]
    seed: int = 0

    def __str__(self) -> str:
        return f"torn({self.seed})" if self.kind == "torn" else self.kind


KILL = Crash("kill")
DROP = Crash("drop")
TORN = functools.partial(Crash, "torn")


class Node(NamedTuple):
    kind: Kind
    mode: int
    data: bytes
    first: str  # the first path of the same inode: its own, unless there are hard links


Tree = dict[str, Node]  # by path, parents first; "" is the root
Changes = dict[tuple[int, str], Union[int, None]]  # (directory, name) to an inode or to nothing


@dataclass
class _Inode:
    kind: Kind
    mode: int
    data: bytearray
    durable_mode: int
    durable_data: bytes
    names: dict[str, int] = field(default_factory=dict)
    durable_names: dict[str, int] = field(default_factory=dict)
    unsynced: list[Write | Resize | Chmod] = field(default_factory=list)

    def change(self, op: Write | Resize | Chmod) -> None:
        self.unsynced.append(op)
        if isinstance(op, Chmod):
            self.mode = op.mode
            return
        grow_to = op.offset if isinstance(op, Write) else op.length
        self.data.extend(bytes(max(0, grow_to - len(self.data))))
        if isinstance(op, Write):
            self.data[op.offset : op.offset + len(op.data)] = op.data
        else:
            del self.data[op.length :]

    def sync(self, data_only: bool) -> None:
        self.durable_data = bytes(self.data)
        self.unsynced = [op for op in self.unsynced if data_only and isinstance(op, Chmod)]
        if not data_only:
            self.durable_mode = self.mode

    def torn(self, rng: random.Random) -> tuple[int, bytes]:
        mode, data, length = self.durable_mode, bytearray(self.durable_data), len(self.durable_data)
        bias = rng.choice((0.1, 0.5, 0.9))
        for op in self.unsynced:
            kept = rng.random() < bias
            if isinstance(op, Chmod):
                mode = op.mode if kept else mode
            elif isinstance(op, Resize):
                if kept:
                    length = op.length
                    del data[length:]
            else:
                end = op.offset + len(op.data)
                data.extend(bytes(max(0, end - len(data))))
                share = rng.choice((0, 0.5, 1))
                # Coarse cuts too: a megabyte torn at every sector would take too long to make.
                step = SECTOR * rng.randint(1, 1 + len(op.data) // SECTOR // 16)
                for start in range(op.offset - op.offset % step, end, step):
                    low, high = max(start, op.offset), min(start + step, end)
                    if rng.random() < share:
                        data[low:high] = op.data[low - op.offset : high - op.offset]
                length = max(length, end) if kept else length
        return mode, bytes(data[:length]).ljust(length, b"\0")


@dataclass(frozen=True)
class _Waiting:
    changes: Changes
    home: int  # the directory whose fsync makes them durable


def _with_earlier(waiting: Sequence[_Waiting], chosen: Iterable[int]) -> list[int]:
    """The chosen changes and all earlier ones that touch a name of theirs, oldest first."""
    wanted, kept, touched = set(chosen), list[int](), set[tuple[int, str]]()
    for index in reversed(range(len(waiting))):
        if index in wanted or not touched.isdisjoint(waiting[index].changes):
            kept.append(index)
            touched.update(waiting[index].changes)
    return kept[::-1]


def _apply(changes: Changes, names: Callable[[int], dict[str, int]]) -> None:
    for (directory, name), number in changes.items():
        if number is None:
            names(directory).pop(name, None)
        else:
            names(directory)[name] = number


class _Disk:
    """Inodes, each as the process sees it and as it would be found after a loss of power."""

    def __init__(self, tree: Tree) -> None:
        self.inodes: list[_Inode] = []
        self.waiting: list[_Waiting] = []
        for path, node in tree.items():
            own = path == node.first
            number = self._add(node.kind, node.mode, node.data) if own else self.at(node.first)
            if path:
                parent, name = self._entry(path)
                self.inodes[parent].names[name] = number
                self.inodes[parent].durable_names[name] = number

    def _add(self, kind: Kind, mode: int, data: bytes) -> int:
        self.inodes.append(_Inode(kind, mode, bytearray(data), mode, data))
        return len(self.inodes) - 1

    def find(self, path: str) -> int | None:
        number: int | None = 0
        for name in path.split("/") if path else ():
            number = None if number is None else self.inodes[number].names.get(name)
        return number

    def at(self, path: str) -> int:
        number = self.find(path)
        if number is None:
            raise AssertionError(f"{path!r} was made in a way that was not recorded")
        return number

    def _entry(self, path: str) -> tuple[int, str]:
        parent, _, name = path.rpartition("/")
        return self.at(parent), name

    def _rename(self, home: int, changes: Changes) -> None:
        self.waiting.append(_Waiting(changes, home))
        _apply(changes, lambda directory: self.inodes[directory].names)

    def apply(self, op: Op) -> None:
        if isinstance(op, (Write, Resize, Chmod)):
            self.inodes[op.inode].change(op)
        elif isinstance(op, Sync):
            self.inodes[op.inode].sync(data_only=op.call == "fdatasync")
            homes = [i for i, change in enumerate(self.waiting) if change.home == op.inode]
            done = _with_earlier(self.waiting, homes)
            for index in done:
                _apply(self.waiting[index].changes, lambda i: self.inodes[i].durable_names)
            self.waiting = [c for i, c in enumerate(self.waiting) if i not in set(done)]
        elif isinstance(op, Create):
            entry = self._entry(op.path)
            self._rename(entry[0], {entry: self._add(op.kind, op.mode, op.target)})
        elif isinstance(op, Link):
            entry = self._entry(op.destination)
            self._rename(entry[0], {entry: self.at(op.path)})
        elif isinstance(op, Unlink):
            entry = self._entry(op.path)
            self._rename(entry[0], {entry: None})
        elif isinstance(op, Rename):
            moved, entry = self.at(op.path), self._entry(op.destination)
            if self.find(op.destination) != moved:  # POSIX: between two names of a file, nothing
                self._rename(entry[0], {self._entry(op.path): None, entry: moved})

    def tree(self, crash: Crash, moment: int) -> Tree:
        killed, torn = crash.kind == "kill", crash.kind == "torn"
        rng = random.Random(f"{crash.seed}/{moment}")
        names = [dict(node.names if killed else node.durable_names) for node in self.inodes]
        if torn:
            bias = rng.choice((0.1, 0.5, 0.9))
            chosen = [i for i in range(len(self.waiting)) if rng.random() < bias]
            for index in _with_earlier(self.waiting, chosen):
                _apply(self.waiting[index].changes, names.__getitem__)
        found: Tree = {}
        first: dict[int, str] = {}

        def walk(number: int, path: str) -> None:
            if number in first:
                found[path] = found[first[number]]
                return
            first[number] = path
            node = self.inodes[number]
            durable = node.torn(rng) if torn else (node.durable_mode, node.durable_data)
            mode, data = (node.mode, bytes(node.data)) if killed else durable
            found[path] = Node(node.kind, mode, data, path)
            for name in sorted(names[number]):
                walk(names[number][name], f"{path}/{name}" if path else name)

        walk(0, "")
        return found


# --- The recorder ---------------------------------------------------------------------------------


def _scan(root: str) -> tuple[Tree, dict[tuple[int, int], str]]:
    """What is really there, and the first path of each (device, inode number)."""
    found: Tree = {}
    first: dict[tuple[int, int], str] = {}

    def walk(full: str, path: str) -> None:
        status = os.lstat(full)
        key = status.st_dev, status.st_ino
        if key in first:
            found[path] = found[first[key]]
            return
        first[key] = path
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISDIR(status.st_mode):
            found[path] = Node("dir", mode, b"", path)
            for name in sorted(os.listdir(full)):
                walk(f"{full}/{name}", f"{path}/{name}" if path else name)
        elif stat.S_ISLNK(status.st_mode):
            found[path] = Node("link", mode, os.fsencode(os.readlink(full)), path)
        elif stat.S_ISREG(status.st_mode):
            found[path] = Node("file", mode, pathlib.Path(full).read_bytes(), path)
        else:
            raise AssertionError(f"{full} is neither file, directory nor link: not modelled")

    walk(root, "")
    return found, first


class Recording:
    """The operations, in one order. Prefix ``n`` stands for the moment after ``ops[:n]``."""

    def __init__(self, root: AnyPath) -> None:
        self.root = os.path.realpath(root)
        self.ops: list[Op] = []
        self.initial, self.inodes = _scan(self.root)
        # Reentrant: garbage collection may close a file in the middle of a recorded call.
        self.lock = threading.RLock()

    def mark(self, text: str) -> None:
        """Note a moment, for example that the writer has said "committed"."""
        with self.lock:
            self.ops.append(Note("mark", text))


@contextlib.contextmanager
def record(
    root: AnyPath, *, c_calls: Sequence[tuple[str, str, str]] = C_CALLS
) -> Iterator[Recording]:
    """Record all that this process does below ``root``, which must exist."""
    recorder = _Recorder(Recording(root))
    with contextlib.ExitStack() as stack:
        recorder.install(stack, c_calls)
        yield recorder.recording
    # Only reached without an error: one of the writer's own must not be hidden.
    recorder.check()


_OUTSIDE = object()  # what a handler returns when the call is none of the recording's business

# Where each call that writes has its descriptor and its offset.
_WRITES: dict[str, tuple[int, int | None]] = {
    "write": (0, None),
    "writev": (0, None),
    "pwrite": (0, 2),
    "pwritev": (0, 2),
    "sendfile": (0, None),
    "copy_file_range": (1, 4),
    "splice": (1, 4),
}


def _swap(stack: contextlib.ExitStack, holder: Any, name: str, new: Any) -> None:
    stack.callback(setattr, holder, name, getattr(holder, name))
    setattr(holder, name, new)


class _Recorder:
    """Stands in for the functions of ``os``: does the real thing, then records it."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.disk = _Disk(recording.initial)
        self.numbers = {key: self.disk.at(path) for key, path in recording.inodes.items()}
        self.active = True
        self.unseen: list[str] = []

    def install(self, stack: contextlib.ExitStack, c_calls: Sequence[tuple[str, str, str]]) -> None:
        modules = [importlib.import_module(module) for module, _, _ in c_calls]
        handlers: list[tuple[Callable[..., Any], Iterable[str]]] = [
            (self._open, ["open"]),
            (self._write, _WRITES),
            (self._resize, ["truncate", "ftruncate"]),
            (self._allocate, ["posix_fallocate"]),
            (self._chmod, ["chmod", "fchmod"]),
            (self._sync, ["fsync", "fdatasync"]),
            (self._close, ["close"]),
            (self._make, ["mkdir", "mkfifo", "mknod"]),
            (self._symlink, ["symlink"]),
            (self._unlink, ["unlink", "remove", "rmdir"]),
            (self._move, ["rename", "replace", "link"]),
        ]
        # Python 3.10: pathlib keeps the functions that it found at its own import.
        accessor = getattr(pathlib, "_normal_accessor", None)
        for handler, names in handlers:
            for name in names:
                real = getattr(os, name)
                hook = self._hook(handler, name, real)
                for holder in (os, accessor):
                    if getattr(holder, name, None) is real:
                        _swap(stack, holder, name, hook)
                for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
                    if real in able:
                        able.add(hook)
                        stack.callback(able.discard, hook)
        guard = self._guard(builtins.open)
        for holder in filter(None, (builtins, io, accessor)):
            _swap(stack, holder, "open", guard)
        for module, (_, name, what) in zip(modules, c_calls, strict=True):
            stand_in = self._move if what == "rename" else self._allocate
            _swap(stack, module, name, self._hook(stand_in, name, getattr(module, name)))
        stack.callback(setattr, self, "active", False)

    def _hook(self, handler: Callable[..., Any], name: str, real: Callable[..., Any]) -> Any:
        @functools.wraps(real)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            with self.recording.lock:
                outcome = handler(name, real, *args, **kwargs) if self.active else _OUTSIDE
            return real(*args, **kwargs) if outcome is _OUTSIDE else outcome

        return hooked

    def _guard(self, real: Callable[..., Any]) -> Any:
        @functools.wraps(real)
        def guarded(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if self.active and not set(mode).isdisjoint("wax+"):
                path = self._path(file, follow=True)
                if path is not None:
                    self._refuse(f"open({path!r}, {mode!r}): only os.write and the like are seen")
            return real(file, mode, *args, **kwargs)

        return guarded

    def _refuse(self, what: str) -> NoReturn:
        # Kept as well: the caller, or the thread it runs in, may swallow the error.
        self.unseen.append(what)
        raise AssertionError(what)

    def check(self) -> None:
        with self.recording.lock:
            recorded, real = self.disk.tree(KILL, 0), _scan(self.recording.root)[0]
        paths = {**recorded, **real}
        differ = [path or "." for path in paths if recorded.get(path) != real.get(path)]
        if differ:
            self.unseen.append(f"changed in a way that was not recorded: {', '.join(differ[:5])}")
        if self.unseen:
            raise AssertionError("; ".join(self.unseen))

    def _path(self, path: Any, dir_fd: int | None = None, follow: bool = False) -> str | None:
        """Relative to the root; None where it is not below it."""
        if isinstance(path, int):
            full = _path_of(path).removesuffix(" (deleted)")
        else:
            base = os.getcwd() if dir_fd is None else _path_of(dir_fd)
            full = os.path.join(base, os.fsdecode(path)).rstrip("/")
            parent, name = os.path.split(full)
            if follow or name in (".", ".."):
                full = os.path.realpath(full)
            else:
                full = os.path.join(os.path.realpath(parent), name)
        below = f"{full}/".startswith(f"{self.recording.root}/")
        return full[len(self.recording.root) + 1 :] if below else None

    def _found(self, file: Any, *at: Any) -> tuple[str, int] | None:
        """The path and the inode of an open file, or of a path, below the root."""
        if isinstance(file, (str, bytes, os.PathLike)):
            path = self._path(file, *at)
            number = None if path is None else self.disk.find(path)
            return None if path is None or number is None else (path, number)
        fd: int = file if isinstance(file, int) else file.fileno()
        path = self._path(fd)
        if path is None:
            return None
        status = os.fstat(fd)
        number = self.numbers.get((status.st_dev, status.st_ino))
        if number is None:
            if status.st_nlink == 0:
                return None
            self._refuse(f"{path!r} was made in a way that was not recorded")
        if stat.S_ISREG(status.st_mode) and status.st_size != len(self.disk.inodes[number].data):
            self._refuse(f"{path!r} changed its size in a way that was not recorded")
        return path, number

    def _record(self, op: Op) -> None:
        self.disk.apply(op)
        self.recording.ops.append(op)

    def _created(
        self, name: str, path: str, kind: Kind, status: os.stat_result, target: bytes = b""
    ) -> None:
        self._record(Create(name, path, kind, stat.S_IMODE(status.st_mode), target))
        self.numbers[status.st_dev, status.st_ino] = self.disk.at(path)

    def _open(
        self, name: str, real: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None
    ) -> Any:
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        where = self._path(path, dir_fd, follow=not (exclusive or flags & os.O_NOFOLLOW))
        if where is None:
            return _OUTSIDE
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            self._refuse(f"open({where!r}, O_TMPFILE) is not modelled")
        number = self.disk.find(where)
        fd = real(path, flags, mode, dir_fd=dir_fd)
        if number is None and flags & os.O_CREAT:
            self._created(name, where, "file", os.fstat(fd))
        elif number is not None and flags & os.O_TRUNC:
            self._record(Resize("open_trunc", where, number, 0))
        return fd

    def _write(self, name: str, real: Any, *args: Any, **kwargs: Any) -> Any:
        fd_at, offset_at = _WRITES[name]
        fd = args[fd_at] if len(args) > fd_at else kwargs["out_fd" if name == "sendfile" else "dst"]
        if (found := self._found(fd)) is None:
            return _OUTSIDE
        count = real(*args, **kwargs)
        if count == 0:  # then not even the length changes
            return count
        offset = kwargs.get("offset_dst")
        if offset_at is not None and len(args) > offset_at:
            offset = args[offset_at]
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND:  # then even pwrite goes to the end
            offset = os.fstat(fd).st_size - count
        elif offset is None:
            offset = os.lseek(fd, 0, os.SEEK_CUR) - count
        # Read back: the one way that serves buffers, vectors and copies between files.
        readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        try:
            written = os.pread(readable, count, offset)
        finally:
            os.close(readable)
        self._record(Write(name, *found, offset, written))
        return count

    def _resize(self, name: str, real: Any, path: Any, length: int) -> Any:
        if (found := self._found(path, None, True)) is None:
            return _OUTSIDE
        real(path, length)
        return self._record(Resize(name, *found, length))

    def _allocate(self, name: str, real: Any, fd: int, *args: Any) -> Any:
        if (found := self._found(fd)) is None:
            return _OUTSIDE
        outcome = real(fd, *args)
        self._record(Resize(name, *found, os.fstat(fd).st_size))
        return outcome

    def _chmod(self, name: str, real: Any, path: Any, mode: int, **how: Any) -> Any:
        found = self._found(path, how.get("dir_fd"), how.get("follow_symlinks", True))
        if found is None:
            return _OUTSIDE
        real(path, mode, **how)
        return self._record(Chmod(name, *found, mode))

    def _sync(self, name: str, real: Any, fd: Any) -> Any:
        if (found := self._found(fd)) is None:
            return _OUTSIDE
        real(fd)
        return self._record(Sync(name, *found))

    def _close(self, name: str, real: Any, fd: int) -> Any:
        path = self._path(fd)
        if path is None or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            return _OUTSIDE
        real(fd)
        return self._record(Note(name, path))

    def _make(self, name: str, real: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if (where := self._path(path, kwargs.get("dir_fd"))) is None:
            return _OUTSIDE
        if name != "mkdir":
            self._refuse(f"{name}({where!r}) is not modelled")
        real(path, *args, **kwargs)
        return self._created(name, where, "dir", os.lstat(f"{self.recording.root}/{where}"))

    def _symlink(self, name: str, real: Any, src: Any, dst: Any, *args: Any, **at: Any) -> Any:
        if (where := self._path(dst, at.get("dir_fd"))) is None:
            return _OUTSIDE
        real(src, dst, *args, **at)
        status = os.lstat(f"{self.recording.root}/{where}")
        return self._created(name, where, "link", status, os.fsencode(src))

    def _unlink(self, name: str, real: Any, path: Any, **at: Any) -> Any:
        if (where := self._path(path, at.get("dir_fd"))) is None:
            return _OUTSIDE
        if where == "":
            self._refuse(f"{name} of the root of the recording is not modelled")
        real(path, **at)
        return self._record(Unlink(name, where))

    def _move(self, name: str, real: Any, src: Any, dst: Any, **how: Any) -> Any:
        source = self._path(src, how.get("src_dir_fd"))
        destination = self._path(dst, how.get("dst_dir_fd"))
        if source is None and destination is None:
            return _OUTSIDE
        if not source or not destination:
            self._refuse(f"{name}({src!r}, {dst!r}) crosses the border of the recording")
        before = len(self.recording.ops)
        outcome = real(src, dst, **how)
        # A function of C_CALLS that falls back on link and unlink has recorded these already.
        if len(self.recording.ops) == before:
            op = Link if name == "link" else Rename
            self._record(op(name, source, destination))
        return outcome


def _path_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # not open: the real call will say so
        return ""


# --- The crashes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CrashPoint:
    """Where a crash struck: after ``prefix`` operations, the last of which is ``after``."""

    prefix: int
    crash: Crash
    after: Op | None
    marks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.crash} after {self.prefix}: {self.after or 'nothing'}"


def crash_states(
    recording: Recording, seeds: Iterable[int] = range(8)
) -> Iterator[tuple[CrashPoint, Callable[[AnyPath], None]]]:
    """Each different tree that a crash could leave, with the function that writes it out.

    Equal trees are given once for each set of marks passed: what may be found before a commit was
    reported may be a loss after it.
    """
    crashes = (KILL, DROP, *map(TORN, seeds))
    disk, marks, seen = _Disk(recording.initial), tuple[str, ...](), set[tuple[int, bytes]]()
    for prefix, after in enumerate((None, *recording.ops)):
        if after is not None:
            disk.apply(after)
            marks += (after.path,) if after.call == "mark" else ()
        for crash in crashes:
            tree = disk.tree(crash, prefix)
            key = len(marks), _digest(tree)
            if key not in seen:
                seen.add(key)
                yield CrashPoint(prefix, crash, after, marks), functools.partial(_build, tree)


def materialise(recording: Recording, prefix_length: int, mode: Crash, target_dir: AnyPath) -> None:
    """Write what a crash after ``ops[:prefix_length]`` leaves into a new or empty directory."""
    disk = _Disk(recording.initial)
    for op in recording.ops[:prefix_length]:
        disk.apply(op)
    _build(disk.tree(mode, prefix_length), target_dir)


def _digest(tree: Tree) -> bytes:
    digest = hashlib.blake2b()
    for path, node in tree.items():
        digest.update(repr((path, node.kind, node.mode, len(node.data), node.first)).encode())
        digest.update(node.data)
    return digest.digest()


def _build(tree: Tree, target_dir: AnyPath) -> None:
    target = pathlib.Path(target_dir)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty: a crash state is built in a fresh directory")
    for path, node in tree.items():
        full = target / path
        if node.first != path:
            os.link(target / node.first, full, follow_symlinks=False)
        elif node.kind == "link":
            os.symlink(node.data, os.fsencode(full))
        elif node.kind == "file":
            full.write_bytes(node.data)
            full.chmod(node.mode)
        elif path:
            full.mkdir()
    # Deepest first: a directory that may not be entered would hide what is below it.
    for path, node in reversed(tree.items()):
        if node.kind == "dir":
            (target / path).chmod(node.mode)

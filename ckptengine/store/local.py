"""A local or mounted directory as a store: the one durable put, and what it is made of.

All changes go through `os`, unbuffered, so that the crash recorder of the tests sees every one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator

from ..errors import ConflictError, IncompleteError, NotFoundError, StoreError

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_FICLONE = 0x40049409  # linux/fs.h
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_HINTS = {
    errno.ENOSPC: "The disk is full: free space, or keep fewer checkpoints",
    errno.EDQUOT: "The quota is used up: free space, or keep fewer checkpoints",
    errno.EROFS: "The file system is mounted read-only",
    errno.EACCES: "Grant write permission, or choose another directory",
    errno.ENOENT: "The directory was removed during the run; it is not made again",
    errno.EIO: "The device failed: check the system's log",
    errno.EFBIG: "The file is larger than the file system or `ulimit -f` allows",
    errno.EMFILE: "Too many files are open: raise `ulimit -n`",
}


@contextlib.contextmanager
def store_errors(doing: str, path: object) -> Iterator[None]:
    """Turns an OSError into a StoreError that names the operation, the path and what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        hint = _HINTS.get(error.errno or 0, "")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint += f" ({free_space(path)} are free)"
        raise StoreError.from_os_error(error, doing, where, hint) from error


def free_space(path: object) -> str:
    """What an unprivileged writer may still use at `path`, or at its nearest parent."""
    where = os.path.abspath(str(path))
    while where != "/" and not os.path.exists(where):
        where = os.path.dirname(where)
    found = os.statvfs(where)
    return f"{found.f_bavail * found.f_frsize} bytes and {found.f_favail} files"


def make_directories(path: str) -> None:
    """Makes a directory and whichever of its parents are missing, durably: what is synced below a
    name that power loss takes away is lost with it."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for name in reversed(missing):
        with contextlib.suppress(FileExistsError):  # somebody else was quicker
            os.mkdir(name)
        sync_directory(os.path.dirname(name))


def create(path: str) -> int:
    """A new file for writing; never an existing one."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)


def put_new(path: str, data: bytes) -> None:
    """Writes a new file and makes its bytes durable. Its name is durable once its directory is
    synced, which the committer does once for all of its files."""
    fd = create(path)
    try:
        write_all(fd, memoryview(data), 0)
        if os.fstat(fd).st_size != len(data):
            raise OSError(errno.EIO, "the file is shorter than what was written", path)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`: one call moves at most 2 GiB, and may always move less."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def sync_directory(path: str) -> None:
    """Makes the names in a directory durable, where the file system has a call for that."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(fd)


def preallocate(fd: int, nbytes: int) -> None:
    """Reserves disk space, so that a full disk shows before the first byte is written.

    The system call itself: where it is missing, the C library would write into every block.
    """
    while nbytes and _libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(nbytes)) != 0:
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return
        if code != errno.EINTR:  # tmpfs gives up when the process is stopped and continued
            raise OSError(code, os.strerror(code))


def share(source: str, target: str) -> bool:
    """Makes `target` of the bytes of `source` without writing them: a clone (durable) or a hard link
    (as durable as its source, once its directory is synced). False where neither can be made."""
    try:
        if not _clone(source, target):
            os.link(source, target)
    except OSError as error:
        # Deleted meanwhile, linked too often, not allowed, on another file system: written anew.
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        return False
    return True


def _clone(source: str, target: str) -> bool:
    source_fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fd = create(target)
        try:
            fcntl.ioctl(fd, _FICLONE, source_fd)
            os.fsync(fd)
            return True
        except OSError as error:
            os.unlink(target)
            if error.errno not in (*_UNSUPPORTED, errno.EXDEV, errno.ENOTTY):
                raise
            return False
        finally:
            os.close(fd)
    finally:
        os.close(source_fd)


def set_direct(fd: int, on: bool) -> bool:
    """Switches O_DIRECT. Returns whether the file system agrees to the switch."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def rename_noreplace(source: str, target: str) -> None:
    """Renames, or raises FileExistsError where `target` exists: plain rename replaces an empty
    directory without a word."""
    status = _libc.renameat2(
        _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE
    )
    if status == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        # Some network file systems lack the flag. A non-empty target still makes rename fail, and
        # no committed checkpoint is empty.
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
            raise
        return
    raise OSError(code, os.strerror(code), target)


def remove_tree(path: str) -> bool:
    """Removes as much as can be removed, without raising. Returns whether nothing is left.

    On NFS, files that are still open come back under hidden names; a later sweep takes them.
    """
    shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)


def open_for_reading(path: str) -> int:
    """A descriptor for reading; NotFoundError and StoreError instead of the system's errors."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file") from None
    except OSError as error:
        raise StoreError.from_os_error(error, "opening", path) from error


def names(path: str, fd: int) -> bool:
    """Whether `path` names the open file `fd`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def read_exactly(path: str, nbytes: int | None = None) -> bytes:
    """All of a file. Raises IncompleteError where it is missing or not `nbytes` long."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise IncompleteError(f"{path}: the file is missing") from None
    except OSError as error:
        raise StoreError.from_os_error(error, "opening", path) from error
    with store_errors("reading", path), os.fdopen(fd, "rb", buffering=0) as file:
        size = os.fstat(fd).st_size
        if nbytes is not None and size != nbytes:
            raise IncompleteError(f"{path}: the file has {size} bytes instead of {nbytes}")
        return file.readall()


def refuse_existing(path: str) -> ConflictError:
    """The error of a commit whose name is taken."""
    return ConflictError(
        f"{path} exists already: another process committed it. Give each run a directory of its own"
    )

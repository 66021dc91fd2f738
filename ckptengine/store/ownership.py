"""Who writes to a directory: at most one trainer, and the persister that it left behind.

`.owner` is a file whose bytes are locked, never its content: byte 0 by the trainer, byte 1 by its
persister for as long as that lives. POSIX record locks, because they belong to a process: they go
when it dies, whatever it had open, and forked loader workers do not inherit them. A successor that
finds only byte 1 taken knows that a dead trainer's last save is still being written, and waits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import select
import signal
import socket
import struct
import time

from ..errors import ConflictError
from . import local

NAME = ".owner"
_TRAINER, _PERSISTER = 0, 1
_FLOCK = struct.Struct("@hhqqi0q")
_log = logging.getLogger("ckptengine")

FileKey = tuple[int, int]
"""Device and inode."""

_held: set[FileKey] = set()
"""Files locked by this process. A process never conflicts with its own record locks, and closing
any descriptor of such a file drops them, so a second opening must be refused before it is made."""

os.register_at_fork(after_in_child=_held.clear)  # record locks stay with the parent


class Ownership:
    """The trainer's claim on `root`, from construction to `release`.

    Raises ConflictError while another trainer lives, after naming it, and StoreError where the
    directory cannot be written. Waits up to `timeout` seconds for a dead trainer's persister, then
    ends it.
    """

    def __init__(self, root: str, timeout: float) -> None:
        path = os.path.join(root, NAME)
        with local.store_errors("claiming", root):
            local.make_directories(root)
            if _key(path) in _held:
                raise ConflictError(f"{root}: another engine of this process writes there")
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                try:
                    fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _TRAINER)
                except OSError as error:
                    if error.errno not in (errno.EACCES, errno.EAGAIN):
                        raise
                    raise ConflictError(
                        f"{root}: another run writes there ({_describe(self._fd)}). "
                        "Stop it, or give this run a directory of its own"
                    ) from None
                await_orphan(root, timeout, fd=self._fd)
                _sign(self._fd)
                found = os.fstat(self._fd)
            except BaseException:
                os.close(self._fd)
                raise
        self.key = (found.st_dev, found.st_ino)
        _held.add(self.key)

    def release(self) -> None:
        """Gives the directory back. Safe to call twice."""
        if self._fd >= 0:
            _held.discard(self.key)
            os.close(self._fd)
            self._fd = -1


def claim_for_persister(root: str) -> int:
    """Locks the persister's byte until this process ends, and returns the descriptor that must
    stay open. Called once a process and directory."""
    fd = os.open(os.path.join(root, NAME), os.O_RDWR | os.O_CLOEXEC)
    fcntl.lockf(fd, fcntl.LOCK_EX, 1, _PERSISTER)
    return fd


def check_unchanged(root: str, key: FileKey) -> None:
    """Raises ConflictError when `root` is no longer the directory whose `Ownership` has `key`:
    whoever removed it and started anew would find this run's checkpoints among its own. Raises
    FileNotFoundError when it is gone."""
    found = os.stat(os.path.join(root, NAME))
    if (found.st_dev, found.st_ino) != key:
        raise ConflictError(
            f"{root}: the directory was replaced during the run, and belongs to another one now"
        )


def await_orphan(root: str, timeout: float, fd: int | None = None) -> None:
    """Waits while a dead trainer's persister still writes in `root`; ends it after `timeout`.

    Returns at once while its trainer lives, and where nobody has ever written.
    """
    own = fd is None
    if fd is None:
        try:
            path = os.path.join(root, NAME)
            if _key(path) in _held:
                return  # our own directory; opening it here would drop its locks
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
    try:
        if own and _holder(fd, _TRAINER) is not None:
            return
        deadline = time.monotonic() + timeout
        told = False
        while (pid := _holder(fd, _PERSISTER)) is not None:
            if not told:
                _log.warning("waiting for the persister of a run that died to finish in %s", root)
                told = True
            if time.monotonic() > deadline:
                _end(fd, pid, root, timeout)
                return
            time.sleep(0.01)
    finally:
        if own:
            os.close(fd)


def _key(path: str) -> FileKey | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _holder(fd: int, byte: int) -> int | None:
    """The process that holds a byte, as the kernel tells; None where it is free."""
    query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, query))
    return None if kind == fcntl.F_UNLCK else pid


def _end(fd: int, pid: int, root: str, timeout: float) -> None:
    """Fences a persister that makes no end: kills exactly the process that holds the lock."""
    refused = ConflictError(
        f"{root}: process {pid} of a run that died still writes there after {timeout:g} s and "
        "cannot be ended from here"
    )
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        raise refused from None  # it lives on another host
    try:
        if _holder(fd, _PERSISTER) != pid:
            return
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        gone = select.poll()
        gone.register(pidfd, select.POLLIN)
        if not gone.poll(5000):
            raise refused
        _log.warning("ended process %d of a run that died: it had not finished in time", pid)
    finally:
        os.close(pidfd)


def _sign(fd: int) -> None:
    """Says whose it is. Only a note: a full disk must not keep anybody from making room on it."""
    note = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
    with contextlib.suppress(OSError):
        os.ftruncate(fd, os.pwrite(fd, note, 0))


def _describe(fd: int) -> str:
    try:
        told = json.loads(os.pread(fd, 4096, 0))
        return f"process {told['pid']} on {told['host']}"
    except (ValueError, KeyError, TypeError):
        return f"process {_holder(fd, _TRAINER)}"

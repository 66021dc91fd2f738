"""The trainer's side of its persister: hands jobs over and is the only waiter on the process.

A thread watches the persister's socket and its pidfd together, so that a job ends with its result
or, within milliseconds, with the persister's death; nobody ever waits for a process that is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import select
import signal
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import errors
from ..errors import CheckpointError, StoreError, WorkerDiedError
from .forkserver import Child, ForkServer
from .worker import receive

_log = logging.getLogger("ckptengine")
_START_TIMEOUT = 60.0  # seconds; a loaded machine may take long to start an interpreter
_MAX_MESSAGE = 1 << 18  # beyond what a persister's socket would let it send
_ids = itertools.count(1)


def new_id() -> int:
    """An id for a piece of shared memory, unique in this process."""
    return next(_ids)


class SharedMemory(NamedTuple):
    """A memfd to hand over. Mapped once a persister and id, so its content must fit the id."""

    id: int
    fd: int
    nbytes: int


class Job:
    """One job on its way. Done once it has a result or an error."""

    def __init__(self, number: int, on_done: Callable[[Job], None]) -> None:
        self.number = number
        self.result: dict[str, Any] | None = None
        self.error: BaseException | None = None
        self._on_done: Callable[[Job], None] | None = on_done
        self._done = False
        # Not an Event: Ctrl-C inside its Python code can leave it locked for good, or unlocked.
        self._ending = threading.Lock()
        self._ending.acquire()

    def done(self) -> bool:
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        if not self._done and self._ending.acquire(timeout=-1 if timeout is None else timeout):
            self._ending.release()
        return self._done

    def _finish(self, result: dict[str, Any] | None, error: BaseException | None) -> None:
        # Let go of: it leads back to who holds this job, and so to memory that would stay for long.
        on_done, self._on_done = self._on_done, None
        if on_done is None:
            return
        self.result, self.error = result, error
        try:
            on_done(self)
        except Exception:
            _log.exception("the end of a save could not be handled")
        finally:
            self._done = True
            self._ending.release()


class _Persister(NamedTuple):
    channel: socket.socket
    child: Child


class Pool:
    """One persister at a time, forked when needed, replaced when it died.

    `module`: the dotted name of the persister's main module.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = threading.RLock()
        self._persister: _Persister | None = None
        self._dead: list[_Persister] = []  # the watcher alone closes what it may be polling
        self._server: ForkServer | None = None
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count(1)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._closed = False
        _pools.add(self)

    def submit(
        self,
        request: dict[str, Any],
        arena: SharedMemory,
        plan: SharedMemory,
        live: list[int],
        on_done: Callable[[Job], None],
    ) -> Job:
        """Hands a job over, starting a persister if there is none.

        `live`: ids of all shared memory still in use; the persister unmaps the rest. `on_done` runs
        on the watching thread. Raises WorkerDiedError when no persister can be started.
        """
        fd = os.memfd_create("ckptengine-request")
        try:
            body = memoryview(json.dumps(request).encode())
            while body:
                body = body[os.write(fd, body) :]
            message = {
                "live": live,
                "arena": arena.id,
                "arena_nbytes": arena.nbytes,
                "plan": plan.id,
                "plan_nbytes": plan.nbytes,
            }
            fds = [arena.fd, plan.fd, fd]
            with self._lock:
                job = Job(next(self._numbers), on_done)
                data = json.dumps({"job": job.number, **message}).encode()
                try:
                    self._send(job, data, fds)
                except ConnectionError:
                    # It died since the last job and the watcher has not seen it: try a new one.
                    if self._persister is not None:
                        self._mourn(self._persister)
                    self._send(job, data, fds)
                return job
        finally:
            os.close(fd)

    def _send(self, job: Job, data: bytes, fds: list[int]) -> None:
        persister = self._persister or self._start()
        self._jobs[job.number] = job
        try:
            socket.send_fds(persister.channel, [data], fds)
        except BaseException:
            del self._jobs[job.number]
            raise

    def pid(self) -> int | None:
        """The persister's process id, for tests and tools; never used to judge its life."""
        persister = self._persister
        return persister.child.pid if persister else None

    def kill(self, error: BaseException) -> None:
        """Ends the persister at once; its jobs end with `error`."""
        with self._lock:
            persister, jobs = self._persister, list(self._jobs.values())
            self._jobs.clear()
            if persister is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(persister.child.pidfd, signal.SIGKILL)
                _wait_for_exit(persister.child.pidfd, 5.0)
                self._retire(persister)
        for job in jobs:
            job._finish(None, error)

    def close(self) -> None:
        """Lets the persister leave, and the fork server after it. Jobs still on their way end with
        an error here, though the persister goes on with them."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._persister is not None:
                self._persister.channel.shutdown(socket.SHUT_RDWR)
                _wait_for_exit(self._persister.child.pidfd, 5.0)
                self._retire(self._persister)
            os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        self._bury()
        for job in self._jobs.values():
            job._finish(None, CheckpointError("the engine was closed before the save had ended"))
        self._jobs.clear()
        if self._server is not None:
            self._server.close()
            self._server = None
        os.close(self._wake)
        _pools.discard(self)

    def _start(self) -> _Persister:
        if self._closed:
            raise CheckpointError("the engine is closed")
        with contextlib.ExitStack() as passed, contextlib.ExitStack() as kept:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            kept.callback(ours.close)
            passed.callback(theirs.close)
            owner = os.pidfd_open(os.getpid())
            passed.callback(os.close, owner)
            child = self._spawn(theirs, owner)
            kept.pop_all()
        self._persister = _Persister(ours, child)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="ckptengine", daemon=True)
            self._thread.start()
        os.eventfd_write(self._wake, 1)
        return self._persister

    def _spawn(self, connection: socket.socket, owner: int) -> Child:
        for last_try in (False, True):
            if self._server is None:
                self._server = ForkServer([self._module])
            try:
                return self._server.spawn(connection, owner, _START_TIMEOUT)
            except (EOFError, TimeoutError) as error:
                self._server.close()
                self._server = None
                if last_try:
                    raise WorkerDiedError(f"no persister can be started: {error}") from error
        raise AssertionError("unreachable")

    def _retire(self, persister: _Persister) -> None:
        if self._persister is persister:
            self._persister = None
        if persister not in self._dead:
            self._dead.append(persister)
        os.eventfd_write(self._wake, 1)

    def _bury(self) -> None:
        with self._lock:
            dead, self._dead = self._dead, []
        for persister in dead:
            persister.channel.close()
            os.close(persister.child.pidfd)

    def _watch(self) -> None:
        while not self._closed:
            try:
                self._bury()
                self._look()
            except Exception as error:
                # Whoever waits must be told: nobody else looks at the process.
                _log.exception("the persister can no longer be watched")
                self.kill(CheckpointError(f"the persister could not be watched: {error!r}"))

    def _look(self) -> None:
        with self._lock:
            persister = self._persister
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if persister is not None:
            poller.register(persister.channel, select.POLLIN)
            poller.register(persister.child.pidfd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll()}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if persister is None or not ready - {self._wake}:
            return
        if persister.child.pidfd in ready:
            self._mourn(persister)
        else:
            self._take_results(persister)

    def _take_results(self, persister: _Persister) -> None:
        with self._lock:
            results = [(self._jobs.pop(m["job"], None), m) for m in _drain(persister.channel)]
        for job, message in results:
            if job is None:
                continue
            if "error" in message:
                job._finish(None, _rebuild(message["error"]))
            elif "abandoned" in message:
                job._finish(None, CheckpointError("the capture was given up"))
            else:
                job._finish(message, None)

    def _mourn(self, persister: _Persister) -> None:
        self._take_results(persister)  # those that it sent before it died still count
        with self._lock:
            if self._persister is not persister:
                return  # its jobs have been ended by whoever retired it
            ended = self._server.how_it_ended(persister.child.pid) if self._server else "ended"
            log = self._server.log() if self._server else ""
            jobs = list(self._jobs.values())
            self._jobs.clear()
            self._retire(persister)
        error = WorkerDiedError(
            f"the persister process {persister.child.pid} {ended} before it told of a commit; "
            "the next save starts a new one" + (f". Its last words: {log}" if log else "")
        )
        for job in jobs:
            job._finish(None, error)


def _drain(channel: socket.socket) -> list[dict[str, Any]]:
    messages = []
    with contextlib.suppress(BlockingIOError):
        while data := receive(lambda: channel.recv(_MAX_MESSAGE, socket.MSG_DONTWAIT)):
            messages.append(json.loads(data))
    return messages


def _wait_for_exit(pidfd: int, timeout: float) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll(timeout * 1000)


def _rebuild(described: dict[str, Any]) -> BaseException:
    """The persister's error as one of ours, its traceback in the notes' stead."""
    kind, message = described["type"], described["message"]
    if kind == "StoreError":
        return StoreError(message, retryable=described["retryable"], errno=described["errno"])
    cls: type[CheckpointError] | None = getattr(errors, kind, None)
    if cls and cls in (errors.ConflictError, errors.CorruptError, errors.IncompleteError):
        return cls(message)
    return CheckpointError(f"the persister failed: {kind}: {message}\n{described['traceback']}")


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child (a loader worker): let go of the parent's persisters, which would otherwise
    never see their trainer's end of the socket close."""
    for pool in list(_pools):
        if pool._persister is not None:
            pool._persister.channel.close()
        if pool._server is not None:
            pool._server.socket.close()


os.register_at_fork(after_in_child=_leave_to_parent)

"""A clean process to fork persisters from: no CUDA, no threads, no user code, little memory.

`multiprocessing`'s fork server imports the user's main module, which runs a script without a main
guard a second time. This one is started with ``-I -c``, so that neither the working directory nor
the script's own lies on its path, and imports only what the persister needs.

Both sides are watched through pidfds. The end of a socket proves little: forked loader workers of
the trainer hold its other end open.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from typing import NamedTuple, NoReturn

_BOOT = (
    "import sys, json; a = json.loads(sys.argv[1]); sys.path.extend(a['path']);"
    "from ckptengine.persist.forkserver import serve; serve(a['socket'], a['owner'], a['preload'])"
)


class Child(NamedTuple):
    """A forked process, as its owner sees it."""

    pid: int
    pidfd: int


class ForkServer:
    """The trainer's side. Not for use in a process forked from the one that made it."""

    def __init__(self, preload: list[str]) -> None:
        with contextlib.ExitStack() as passed, contextlib.ExitStack() as kept:
            self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            kept.callback(self.socket.close)
            passed.callback(theirs.close)
            owner = os.pidfd_open(os.getpid())
            passed.callback(os.close, owner)
            # An inherited stdout would keep `train | tee log` open as long as a persister lives.
            self._log = os.memfd_create("ckptengine-log")
            kept.callback(os.close, self._log)
            arguments = {
                "socket": theirs.fileno(),
                "owner": owner,
                "preload": preload,
                # Appended, not prepended: a user's `socket.py` must not shadow the library's.
                "path": [entry for entry in sys.path if entry] + [os.getcwd()] * ("" in sys.path),
            }
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-W", "ignore", "-c", _BOOT, json.dumps(arguments)],
                pass_fds=[theirs.fileno(), owner],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                cwd="/",
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
            kept.pop_all()
        self.exits: dict[int, str] = {}  # pid of a dead child: how it ended

    def spawn(self, connection: socket.socket, owner: int, timeout: float) -> Child:
        """Forks a persister that talks through `connection` and watches the pidfd `owner`.

        Raises TimeoutError or EOFError with the server's log when it does not answer.
        """
        self.socket.settimeout(timeout)
        try:
            socket.send_fds(self.socket, [b"fork"], [connection.fileno(), owner])
            while True:
                data, fds, _, _ = socket.recv_fds(self.socket, 4096, 1)
                if not data:
                    raise EOFError(f"the fork server ended: {self.log()}")
                message = json.loads(data)
                if "exit" in message:
                    self._note(message)
                elif not fds:  # the kernel drops what there is no room for
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                else:
                    return Child(message["pid"], fds[0])
        except TimeoutError:
            raise TimeoutError(f"the fork server does not answer: {self.log()}") from None
        except OSError as error:
            raise EOFError(f"the fork server is gone: {error}: {self.log()}") from error

    def how_it_ended(self, pid: int, timeout: float = 5.0) -> str:
        """How a child that is known to be dead ended, as far as the server can still tell."""
        self.socket.settimeout(timeout)
        try:
            while pid not in self.exits:
                data = self.socket.recv(4096)
                if not data:
                    break
                self._note(json.loads(data))
        except OSError:
            pass
        return self.exits.pop(pid, "ended, and its fork server with it")

    def log(self) -> str:
        """The last lines that the server and its children wrote."""
        size = os.fstat(self._log).st_size
        return os.pread(self._log, 4096, max(0, size - 4096)).decode(errors="replace").strip()

    def close(self) -> None:
        """Ends the server; it leaves once its children have."""
        self.socket.close()
        os.close(self._log)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _note(self, message: dict[str, int]) -> None:
        status = message["status"]
        self.exits[message["exit"]] = (
            f"was killed by signal {status} ({_signal_name(status)})"
            if message["signalled"]
            else f"exited with status {status}"
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


def serve(socket_fd: int, owner: int, preload: list[str]) -> NoReturn:
    """The server's main: forks on request and reports how each child ended."""
    for module in preload:
        importlib.import_module(module)
    requests = socket.socket(fileno=socket_fd)
    children: dict[int, int] = {}  # pidfd to pid
    open_for_requests = True
    poller = select.poll()
    poller.register(requests, select.POLLIN)
    poller.register(owner, select.POLLIN)
    while open_for_requests or children:
        for fd, _ in poller.poll():
            if fd in children:
                _report(requests, fd, children.pop(fd))
                poller.unregister(fd)
                os.close(fd)
            elif fd == owner or not (request := _receive(requests)):
                open_for_requests = False
                poller.unregister(owner)
                poller.unregister(requests)
                break
            else:
                pid = os.fork()
                if pid == 0:
                    for other in (*children, socket_fd, owner):
                        os.close(other)
                    _become_child(preload[0], *request)
                for passed in request:
                    os.close(passed)
                pidfd = os.pidfd_open(pid)
                children[pidfd] = pid
                poller.register(pidfd, select.POLLIN)
                socket.send_fds(requests, [json.dumps({"pid": pid}).encode()], [pidfd])
    os._exit(0)


def _receive(requests: socket.socket) -> list[int]:
    try:
        return socket.recv_fds(requests, 64, 2)[1]
    except OSError:
        return []


def _become_child(module: str, connection: int, owner: int) -> NoReturn:
    status = 1
    try:
        # Launchers kill a worker's process group; Ctrl-C reaches the terminal's.
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        importlib.import_module(module).main(connection, owner)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _report(requests: socket.socket, pidfd: int, pid: int) -> None:
    ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    if ended is None:
        return
    message = {
        "exit": pid,
        "status": ended.si_status,
        "signalled": ended.si_code != os.CLD_EXITED,
    }
    with contextlib.suppress(OSError):  # the owner may be gone
        requests.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)

"""The clean process that persisters are forked from, and the one of the trainer that asks it."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ckptengine.persist.forkserver import Child, ForkServer

Until = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("family")

CHILD = """
import json, os, signal, socket, sys, threading
def main(connection, owner):
    talk = socket.socket(fileno=connection)
    while command := talk.recv(4096):
        if command == b"exit":
            os._exit(7)
        if command == b"raise":
            raise RuntimeError("the reason of it")
        if command == b"state":
            talk.send(json.dumps({
                "session": os.getsid(0) == os.getpid(),
                "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
                "ignored": [n for n in range(1, 30) if n not in (9, 19)
                            and signal.getsignal(n) == signal.SIG_IGN],
                "threads": threading.active_count(),
                "torch": "torch" in sys.modules or "numpy" in sys.modules,
                "main": getattr(sys.modules["__main__"], "__file__", None),
                "fds": len(os.listdir("/proc/self/fd")) - 1,
                "cwd": os.getcwd(),
                "path": sys.path,
                "shadowed": [m.__file__ for n, m in list(sys.modules.items())
                             if "shadows" in str(getattr(m, "__file__", None))],
            }).encode())
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "talking_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(folder))
    return "talking_child"


@contextmanager
def serving(module: str) -> Iterator[ForkServer]:
    server = ForkServer([module])
    try:
        yield server
    finally:
        server.close()


@contextmanager
def spawned(server: ForkServer) -> Iterator[tuple[Child, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner = os.pidfd_open(os.getpid())
    with ours:
        try:
            child = server.spawn(theirs, owner, 30.0)
        finally:
            theirs.close()
            os.close(owner)
        yield child, ours
    died(child)
    os.close(child.pidfd)


def died(child: Child) -> None:
    poller = select.poll()
    poller.register(child.pidfd, select.POLLIN)
    assert poller.poll(30_000), "it has not ended"


def told(talk: socket.socket) -> dict[str, Any]:
    import json

    talk.send(b"state")
    found: dict[str, Any] = json.loads(talk.recv(1 << 16))
    return found


def test_a_child_is_clean(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        with serving(module) as server, spawned(server) as (_, talk):
            found = told(talk)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
        signal.signal(signal.SIGTERM, old)
    assert found["session"]
    assert found["blocked"] == []
    assert set(found["ignored"]) <= {signal.SIGPIPE, signal.SIGXFSZ}
    assert found["threads"] == 1
    assert not found["torch"]
    assert found["main"] is None
    assert found["fds"] <= 6  # three standard ones, the socket, the owner, and one to spare
    assert found["cwd"] == "/"


def test_children_do_not_hold_each_others_descriptors(module: str) -> None:
    with serving(module) as server, spawned(server) as (_, one), spawned(server) as (_, two):
        assert told(one)["fds"] == told(two)["fds"]


def test_modules_of_the_user_shadow_nothing(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadows = tmp_path / "shadows"
    shadows.mkdir()
    for name in ("socket", "json", "select", "signal", "struct", "os", "traceback", "subprocess"):
        (shadows / f"{name}.py").write_text("raise SystemExit('a module of the user was imported')")
    monkeypatch.syspath_prepend(str(shadows))
    monkeypatch.chdir(shadows)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with serving(module) as server, spawned(server) as (_, talk):
        found = told(talk)
        assert found["shadowed"] == []
        assert str(shadows) in found["path"]  # what is only there can still be found


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (b"exit", "exited with status 7"),
        (b"raise", "exited with status 1"),
        (signal.SIGKILL, "was killed by signal 9 (SIGKILL)"),
        (signal.SIGTERM, "was killed by signal 15 (SIGTERM)"),
        (signal.SIGRTMIN + 3, f"was killed by signal {signal.SIGRTMIN + 3} (a real-time signal)"),
    ],
)
def test_how_a_child_ended(module: str, how: Any, expected: str) -> None:
    with serving(module) as server:
        with spawned(server) as (child, talk):
            if isinstance(how, bytes):
                talk.send(how)
            else:
                os.kill(child.pid, how)
            died(child)
            assert server.how_it_ended(child.pid) == expected
        if how == b"raise":
            assert "RuntimeError: the reason of it" in server.log()


def test_ends_are_told_for_each_child_and_between_spawns(module: str) -> None:
    with serving(module) as server:
        ended = []
        for number in range(3):
            with spawned(server) as (child, talk):
                if number == 1:
                    os.kill(child.pid, signal.SIGKILL)
                else:
                    talk.send(b"exit")
                died(child)
                ended.append(child.pid)
        assert [server.how_it_ended(pid).split(" (")[0] for pid in reversed(ended)] == [
            "exited with status 7",
            "was killed by signal 9",
            "exited with status 7",
        ]


def test_a_server_that_is_gone(module: str) -> None:
    with serving(module) as server, spawned(server) as (child, talk):
        os.kill(server._process.pid, signal.SIGKILL)
        server._process.wait()
        assert told(talk)["session"]  # the child lives on
        with pytest.raises(EOFError, match="fork server"), spawned(server):
            pass
        os.kill(child.pid, signal.SIGKILL)
        assert "fork server" in server.how_it_ended(child.pid)


def test_a_server_that_does_not_answer(module: str) -> None:
    server = ForkServer([module])
    os.kill(server._process.pid, signal.SIGSTOP)
    ours, theirs = socket.socketpair()
    owner = os.pidfd_open(os.getpid())
    with ours, theirs, pytest.raises(TimeoutError, match="does not answer"):
        server.spawn(theirs, owner, 0.2)
    os.close(owner)
    os.kill(server._process.pid, signal.SIGCONT)
    server.close()


def test_a_module_that_cannot_be_imported_is_told() -> None:
    server = ForkServer(["no_such_module_of_anyone"])
    with pytest.raises(EOFError, match="no_such_module_of_anyone"), spawned(server):
        pass
    server.close()


def test_it_leaves_once_its_children_have(module: str, until: Until) -> None:
    server = ForkServer([module])
    with spawned(server) as (child, _):
        server.socket.close()
        assert psutil.pid_exists(child.pid)
        assert server._process.poll() is None
    server.close()
    until(lambda: not psutil.pid_exists(child.pid))


def test_nothing_leaks_where_it_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    before = sorted(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(OSError, match="memory"):
            ForkServer(["json"])
    assert sorted(os.listdir("/proc/self/fd")) == before

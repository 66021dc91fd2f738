"""The persister: takes jobs from its trainer, one after the other, until the trainer is gone.

It knows nothing of checkpoints. What a job does is the entry function's matter (see `save_job`);
here are the mapping of shared memory, the reports, and the rules of leaving: when the trainer dies,
the jobs that it had handed over are still done.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..types import PAGE, Control

T = TypeVar("T")

_NICENESS = 10
_MAX_MESSAGE = 64 << 10


class Abandoned(Exception):
    """The trainer gave the capture up, or died in it. Nothing is reported as an error."""


@dataclass
class Job:
    """One job, as the entry function gets it."""

    request: dict[str, Any]
    image: memoryview  # of the arena, without its control page
    control: Control
    plan_id: int
    plan: memoryview  # constant for a plan id
    owner_alive: Callable[[], bool]
    send: Callable[[dict[str, Any]], None]


def serve_jobs(connection: int, owner: int, entry: Callable[[Job], None]) -> None:
    """Runs `entry` for each job that comes through the socket `connection`.

    `owner`: the trainer's pidfd.
    """
    os.nice(_NICENESS)
    channel = socket.socket(fileno=connection)
    mapped: dict[int, mmap.mmap] = {}
    waiter = select.poll()
    waiter.register(channel, select.POLLIN)
    waiter.register(owner, select.POLLIN)

    def owner_alive() -> bool:
        dead = select.poll()
        dead.register(owner, select.POLLIN)
        return not dead.poll(0)

    def send(message: dict[str, Any]) -> None:
        # The trainer may be dead, or have left without waiting.
        with contextlib.suppress(ConnectionError):
            channel.send(json.dumps(message).encode())

    while True:
        # Asked, not tried: `recv_fds` drops its flags, and a dead trainer's socket may be held open
        # by a child that it has just forked.
        if channel.fileno() not in {fd for fd, _ in waiter.poll()}:
            return  # the trainer is dead, and all that it sent is done
        data, fds, _, _ = receive(lambda: socket.recv_fds(channel, _MAX_MESSAGE, 3))
        if not data:
            return
        message = json.loads(data)
        for key in [key for key in mapped if key not in message["live"]]:
            del mapped[key]
        arena = _map(mapped, message["arena"], fds[0], message["arena_nbytes"], mmap.PROT_WRITE)
        plan = _map(mapped, message["plan"], fds[1], message["plan_nbytes"], 0)
        with os.fdopen(fds[2], "rb") as file:
            file.seek(0)
            request = json.loads(file.read())
        for fd in fds[:2]:
            os.close(fd)
        number = message["job"]
        view = memoryview(arena)
        job = Job(
            request=request,
            image=view[PAGE:],
            control=Control(view[:PAGE]),
            plan_id=message["plan"],
            plan=memoryview(plan),
            owner_alive=owner_alive,
            send=lambda body, number=number: send({"job": number, **body}),  # type: ignore[misc]
        )
        try:
            entry(job)
        except Abandoned:
            job.send({"abandoned": True})
        except Exception as error:
            job.send({"error": describe(error)})
        finally:
            # Views keep a mapping alive: without this an arena that was replaced is never freed.
            job.control.release()
            job.image.release()
            job.plan.release()
            view.release()


def receive(call: Callable[[], T]) -> T:
    """What `call` receives. A peer that dies with messages unread makes the next call fail, once,
    though what it had sent before is still there."""
    try:
        return call()
    except ConnectionResetError:
        return call()


def describe(error: BaseException) -> dict[str, Any]:
    """An error as plain data, for the other side to make anew."""
    return {
        "type": type(error).__name__,
        "message": str(error)[:16384],
        "errno": getattr(error, "errno", None),
        "retryable": bool(getattr(error, "retryable", False)),
        "traceback": "".join(traceback.format_exception(error))[-8192:],
    }


def _map(mapped: dict[int, mmap.mmap], key: int, fd: int, nbytes: int, write: int) -> mmap.mmap:
    if key not in mapped:
        mapped[key] = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ | write)
    return mapped[key]

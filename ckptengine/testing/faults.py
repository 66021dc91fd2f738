"""A persister that fails on request, in a process of its own: to see what the trainer makes of it.

    faults = Faults(directory)
    faults.install()                    # engines made from now on have such a persister
    faults.set("write-2", "kill")       # before the second block of the next save
    ...
    faults.await_hit("write-2")

A fault strikes once, at one of `POINTS`; what it does is one of

- ``kill``, ``stop``: the signal, to itself; ``exit``: leaves with status 3;
- ``wait``: until `go` is called; ``crash``: an error that no code expects;
- the name of an errno: the call fails so.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import save_job
from ..persist import direct
from ..persist.pool import Pool
from ..repository import Repository, Stage
from ..store import local

POINTS = (
    "stage",  # before the directory for the save is made
    "write-1",  # before the first block of data, the second, ...; blocks are small here
    "write-2",
    "write-3",
    "sync-1",  # before the first fsync: of the data; then .metadata, index, manifest, ...
    "sync-2",
    "sync-3",
    "sync-4",
    "sync-5",
    "sync-6",
    "commit",  # before the commit record is written
    "rename",  # before the save becomes visible
    "committed",  # before the commit is reported
    "delete",  # before a checkpoint is made invisible
    "remove",  # before an invisible one is removed
)
_VARIABLE = "CKPTENGINE_FAULTS"
_BLOCK = 64 << 10
_PATIENCE = 150.0  # seconds


class Faults:
    """The trainer's side. `directory` holds a file for each fault that is to strike."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(exist_ok=True)

    def install(self) -> None:
        """Gives such a persister to every engine that this process makes from now on."""
        os.environ[_VARIABLE] = str(self.directory)
        _use(lambda module: Pool(__name__))

    def remove(self) -> None:
        """Undoes `install`."""
        os.environ.pop(_VARIABLE, None)
        _use(Pool)

    def set(self, point: str, action: str) -> None:
        """Lets `action` happen when a persister next comes to `point`."""
        assert point in POINTS, point
        (self.directory / f"{point}.hit").unlink(missing_ok=True)
        (self.directory / f"{point}.go").unlink(missing_ok=True)
        draft = self.directory / "draft"
        draft.write_text(action)
        draft.rename(self.directory / point)

    def hit(self, point: str) -> bool:
        """Whether the fault has struck."""
        return (self.directory / f"{point}.hit").exists()

    def await_hit(self, point: str, seconds: float = 60) -> None:
        """Waits until the fault has struck."""
        deadline = time.monotonic() + seconds
        while not self.hit(point):
            assert time.monotonic() < deadline, f"no persister came to {point!r}"
            time.sleep(0.002)

    def go(self, *points: str) -> None:
        """Ends the ``wait`` at these points, or at all."""
        for point in points or POINTS:
            (self.directory / f"{point}.go").touch()


def _use(pool: Callable[[str], Pool]) -> None:
    from ..engine import engine  # here, because the persister starts without torch

    setattr(engine, "Pool", pool)  # noqa: B010


def main(connection: int, owner: int) -> None:
    """The persister process."""
    directory = Path(os.environ[_VARIABLE])
    counts: dict[str, int] = {}

    def strike(point: str) -> None:
        try:
            # Read first: once it is seen to be hit, the next fault may be set in its place.
            action = (directory / point).read_text()
            (directory / point).rename(directory / f"{point}.hit")
        except FileNotFoundError:
            return
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "exit":
            os._exit(3)
        elif action == "crash":
            raise RuntimeError(f"crashed at {point}")
        elif action == "wait":
            deadline = time.monotonic() + _PATIENCE
            while not (directory / f"{point}.go").exists():
                if time.monotonic() > deadline:
                    os._exit(4)  # the test was killed: nobody is left to say go
                time.sleep(0.002)
        else:
            code = getattr(errno, action)
            raise OSError(code, os.strerror(code))

    def before(holder: Any, name: str, point: str, counted: bool = False) -> None:
        real: Callable[..., Any] = getattr(holder, name)

        @functools.wraps(real)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            counts[point] = counts.get(point, 0) + 1
            strike(f"{point}-{counts[point]}" if counted else point)
            return real(*args, **kwargs)

        setattr(holder, name, hooked)

    def stage(self: Repository, *args: Any) -> Stage:
        counts.clear()
        return real_stage(self, *args)

    def commit(self: Stage, *args: Any) -> str:
        strike("commit")
        path = real_commit(self, *args)
        strike("committed")
        return path

    def rename(source: str, target: str) -> None:
        if not os.path.basename(target).startswith(".trash-"):
            strike("rename")
        real_rename(source, target)

    def remove_tree(path: str) -> bool:
        if os.path.basename(path).startswith(".trash-"):
            strike("remove")
        return real_remove(path)

    real_stage, real_commit = Repository.stage, Stage.commit
    real_rename, real_remove = local.rename_noreplace, local.remove_tree
    before(os, "mkdir", "stage")
    before(direct._Writer, "_write", "write", counted=True)
    before(os, "fsync", "sync", counted=True)
    before(Repository, "delete", "delete")
    setattr(Repository, "stage", stage)  # noqa: B010
    setattr(Stage, "commit", commit)  # noqa: B010
    setattr(local, "rename_noreplace", rename)  # noqa: B010
    setattr(local, "remove_tree", remove_tree)  # noqa: B010
    setattr(direct, "PART", _BLOCK)  # noqa: B010
    save_job.main(connection, owner)

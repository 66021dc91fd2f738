"""Saves inside the calling process, so that the crash recorder sees all that a persister does.

with inline_engine(root) as engine:         # an engine like any other
    engine.save(state, step=1)
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from ..engine.engine import Engine
from ..persist import worker
from ..persist.pool import Job, Pool, SharedMemory
from ..save_job import Persister
from ..types import PAGE, Control


def inline_engine(*args: Any, **kwargs: Any) -> Engine:
    """An `Engine(*args, **kwargs)` whose persister is a thread of this process."""
    engine = Engine(*args, **kwargs)
    engine._pool.close()
    engine._pool = cast(Pool, InlinePool())
    return engine


class InlinePool:
    """Stands in for `Pool`: the same jobs, done by a thread. A thread cannot be killed, so `kill`
    only ends the jobs for those who wait."""

    def __init__(self) -> None:
        self._persister = Persister()
        self._thread = ThreadPoolExecutor(1)
        self._numbers = itertools.count(1)
        self._jobs: set[Job] = set()

    def submit(
        self,
        request: dict[str, Any],
        arena: SharedMemory,
        plan: SharedMemory,
        live: list[int],
        on_done: Callable[[Job], None],
    ) -> Job:
        job = Job(next(self._numbers), on_done)
        self._jobs.add(job)
        self._thread.submit(self._run, job, json.dumps(request), arena, plan)
        return job

    def pid(self) -> int:
        return os.getpid()

    def kill(self, error: BaseException) -> None:
        for job in list(self._jobs):
            job._finish(None, error)

    def close(self) -> None:
        self._thread.shutdown()
        for fd in self._persister.claims.values():
            os.close(fd)

    def _run(self, job: Job, request: str, arena: SharedMemory, plan: SharedMemory) -> None:
        with mmap.mmap(arena.fd, arena.nbytes) as memory, memoryview(memory) as view:
            image, control = view[PAGE:], Control(view[:PAGE])
            try:
                self._persister.run(
                    worker.Job(
                        request=json.loads(request),
                        image=image,
                        control=control,
                        plan_id=plan.id,
                        plan=memoryview(os.pread(plan.fd, plan.nbytes, 0)),
                        owner_alive=lambda: True,
                        send=lambda message: job._finish(message, None),
                    )
                )
            except BaseException as error:
                job._finish(None, error)
            finally:
                control.release()
                image.release()
                self._jobs.discard(job)

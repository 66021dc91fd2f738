"""One save on its way, as the caller holds it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import ConfigError, StoreError
from ..types import CheckpointId, CheckpointInfo, Durability

if TYPE_CHECKING:
    from ..persist.pool import Job
    from ..snapshot.arena import Arena
    from .engine import Engine

_TICK = 0.25  # seconds between two looks at the persister's progress


class SaveHandle:
    """What `Engine.save_async` returns. Safe to drop: failures then come with the next engine call.

    `timings`: seconds of each phase (`collect`, `plan`, `busy`, `capture`, their sum `stall`; later
    `write`, `commit`, `durable`, `persister_cpu`); bytes captured (`nbytes`) and, of these, shared with
    the checkpoint before instead of written (`nbytes_shared`). `capture`: how the state was copied, and
    why so. `path`: where the checkpoint is, or
    will be. `skipped`: why no save was made, or None.
    """

    def __init__(
        self,
        engine: Engine,
        checkpoint: CheckpointId,
        path: str,
        begun: float,
        on_commit: Callable[[CheckpointInfo], None] | None = None,
    ) -> None:
        self.id = checkpoint
        self.path = path
        self.skipped: str | None = None
        self.timings: dict[str, float] = {}
        self.capture = ""
        self._engine = engine
        self._on_commit = on_commit
        self._job: Job | None = None
        self._arena: Arena | None = None
        self._info: CheckpointInfo | None = None
        self._error: BaseException | None = None
        self._delivered = False  # whether the caller has seen the error
        self._begun = begun  # monotonic seconds of the call

    @property
    def step(self) -> int:
        """The step that is saved."""
        return self.id.step

    def __repr__(self) -> str:
        if self.skipped:
            state = f"skipped: {self.skipped}"
        elif not self.done():
            state = "on its way"
        else:
            state = f"failed: {self._error}" if self._error else "committed"
        return f"SaveHandle(step={self.step}, {state})"

    def done(self) -> bool:
        """Whether it has ended: committed, failed or skipped."""
        return self.skipped is not None or (self._job is not None and self._job.done())

    def exception(self) -> BaseException | None:
        """Why it failed, or None while it is on its way and once it is committed.

        The error counts as told: no engine call raises it again.
        """
        if self.done() and self._error is not None:
            self._delivered = True
            return self._error
        return None

    def wait(
        self, until: Durability = Durability.PERSISTED, timeout: float | None = None
    ) -> CheckpointInfo:
        """Waits until the save is as durable as `until`.

        `timeout` in seconds; TimeoutError leaves the save on its way. Raises what made the save
        fail, and ConfigError when it was skipped or `until` is beyond every tier.
        """
        if until > Durability.PERSISTED:
            raise ConfigError(f"until={until.name}: no tier of this engine gets that far")
        if self.skipped:
            raise ConfigError(f"the save of step {self.step} was skipped: {self.skipped}")
        if until == Durability.CAPTURED and not self.done():
            return self._expected
        if not self.join(timeout):
            raise TimeoutError(f"step {self.step} is not committed after {timeout:g} s")
        error = self.exception()
        if error is not None:
            raise error
        self._engine.deliver(raise_errors=False)
        assert self._info is not None
        return self._info

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the end, whichever it is. Returns whether it has come.

        A persister that makes no progress for the engine's `timeout` is ended.
        """
        job = self._job
        if job is None:
            return True
        self._engine.check_process()
        patience = self._engine.timeout
        until = None if timeout is None else time.monotonic() + timeout
        seen, idle = None, 0.0
        while not job.done():
            tick = _TICK if until is None else min(_TICK, until - time.monotonic())
            if tick <= 0:
                return False
            job.wait(tick)
            progress = self._engine.progress()
            # Looks are counted, not time: a job that was suspended for an hour is not to blame.
            idle = idle + tick if progress == seen else 0.0
            seen = progress
            if idle > patience:
                self._engine.end_persister(
                    StoreError(
                        f"{self.path}: the store made no progress for {patience:g} s; "
                        f"{self.written()} bytes were written",
                        retryable=True,
                    )
                )
        return True

    @property
    def _expected(self) -> CheckpointInfo:
        """What will be committed, as far as it is known now."""
        return CheckpointInfo(
            self.id.step, self.id.attempt, self.path, time.time(), 1, int(self.timings["nbytes"])
        )

    # -- for the engine ------------------------------------------------------------------------------

    @property
    def arena(self) -> Arena | None:
        """Where its snapshot lies, until it has ended: the arena is free for others then."""
        return self._arena

    def take(self, arena: Arena) -> None:
        self._arena = arena

    def begin(self, job: Job) -> None:
        self._job = job

    def begun(self) -> bool:
        """Whether its job is known to be on its way."""
        return self._job is not None

    def written(self) -> int:
        """Bytes written so far."""
        arena = self._arena
        return arena.control.written if arena else 0

    def settle(self, info: CheckpointInfo | None, error: BaseException | None) -> None:
        """Sets the outcome, before the job counts as done."""
        self._info, self._error, self._arena = info, error, None

    def settled(self) -> bool:
        """Whether nobody is left to be told of its end."""
        return self._error is None or self._delivered

    def undelivered(self) -> BaseException:
        """The error that nobody has seen yet; it counts as seen from now on."""
        assert self._error is not None
        self._delivered = True
        return self._error

    def notify(self) -> None:
        """Calls the user's finalization, once."""
        call, self._on_commit = self._on_commit, None
        if call is not None and self._info is not None:
            call(self._info)

    def told(self) -> None:
        """Marks the error as seen: the caller is being told in another way."""
        self._delivered = True

    def elapsed(self) -> float:
        """Seconds since the call."""
        return time.monotonic() - self._begun

"""The engine: the order in which the parts are called, and what is told to whom. No I/O of its own."""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from .. import config, events, save_job
from ..config import Keep
from ..errors import (
    CheckpointError,
    ConfigError,
    StateError,
    StoreError,
)
from ..format.manifest import Manifest
from ..pause import collector_paused
from ..persist.pool import Job, Pool, SharedMemory
from ..plan.plan import Plan, make_plan
from ..repository import Repository, Taken
from ..restore.locate import records
from ..restore.restorer import Restorer
from ..snapshot.arena import Arena
from ..snapshot.capture import Capture
from ..snapshot.copier import Copier
from ..state.collect import Collected, collect
from ..store import local
from ..store.ownership import Ownership, await_orphan
from ..types import CheckpointId, CheckpointInfo, Durability
from .blob import PlanMemory
from .fences import Fences, owned
from .handle import SaveHandle
from .incremental import Incremental
from .pace import Pace
from .slots import Slots

_log = logging.getLogger("ckptengine")
_MEASURED = 8  # saves that an estimate looks back on


class Engine:
    """Saves and restores the state of a training loop in the directory `root`.

    `capture`: "copy" copies the state during the call and writes it afterwards, so that the call is
    as short as it can be. "auto" does so too, unless the first saves show that writing beside the
    copy makes it no longer (as with many cores): then saves are durable sooner. "overlap" copies what
    an optimizer of the state owns while the loop goes on, until that optimizer's next step (or
    `fence`), and the rest during the call. `keep`: a number (that many of the newest), a `Keep`, or
    None for all. `verify`: whether a restore checks checksums. `incremental`: whether tensors that
    stay the same from one checkpoint to the next (frozen weights) are shared by both instead of being
    written again; each checkpoint is whole all the same. `on_busy`: what a save does while all memory
    for snapshots is still being written: "wait", "skip" (said on the handle) or "error" (StoreError).
    `timeout`: seconds without progress after which a wait gives up. `host_memory_limit`: bytes of
    host memory for snapshots; the default is up to twice the state.

    A context manager; `close` waits for what is pending. Not usable in a forked child. Raises
    ConfigError for wrong arguments; the directory is made, and claimed, by the first save.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        capture: str = "auto",
        keep: int | Keep | None = None,
        verify: bool = True,
        incremental: bool = False,
        on_busy: str = "wait",
        timeout: float = 300.0,
        host_memory_limit: int | None = None,
    ) -> None:
        self.root = config.local_root(root)
        self.timeout = float(config.positive("timeout", timeout))
        config.one_of("capture", capture, ("auto", "copy", "overlap"))
        self._overlap = capture == "overlap"
        self._pace = Pace(measure=capture == "auto")
        self._keep = config.keep_policy(keep)
        self._verify = verify
        self._incremental = Incremental() if incremental else None
        self._on_busy = config.one_of("on_busy", on_busy, ("wait", "skip", "error"))
        if host_memory_limit is not None:
            config.positive("host_memory_limit", host_memory_limit)
        self._repository = Repository(self.root)
        self._slots = Slots(host_memory_limit)
        self._copier = Copier()
        self._fences = Fences(self.fence)
        self._capturing: tuple[SaveHandle, Capture] | None = None
        self._pool = Pool(save_job.__name__)
        self._plan: Plan | None = None
        self._plan_memory: PlanMemory | None = None
        self._ownership: Ownership | None = None
        self._taken: Taken | None = None
        self._restored: CheckpointId | None = None
        self._pending: list[SaveHandle] = []
        self._committed: collections.deque[SaveHandle] = collections.deque()
        self._failed: collections.deque[SaveHandle] = collections.deque()
        self._listeners: list[Callable[[events.Event], None]] = []
        self._measured: collections.deque[dict[str, float]] = collections.deque(maxlen=_MEASURED)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        _open.add(self)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception:  # also what a finalization of the user's raises
            if kind is None:
                raise
            _log.exception("a pending save failed while another error was on its way")

    # -- saving --------------------------------------------------------------------------------------

    def save_async(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        user: Any = None,
        metrics: Mapping[str, float] | None = None,
        on_commit: Callable[[CheckpointInfo], None] | None = None,
        candidate: bool = False,
    ) -> SaveHandle:
        """Captures `state` as it is now and returns; it is written and committed in the background.

        `step=None` is one more than the newest step known here; a step that was saved before gets a
        new attempt. `user`: JSON to keep with it. `metrics`: numbers for `Keep(best=...)`.
        `on_commit(info)` is called once, on the caller's thread, in the first engine call after the
        commit. A `candidate` is committed but never restored unless asked for by step.

        Raises StateError (what cannot be stored, by key, before anything is written), ConflictError
        (another live run owns the directory), StoreError, ConfigError, and whatever made an earlier
        save fail if nobody has been told.
        """
        with collector_paused():
            return self._start(state, step, user, metrics, on_commit, candidate, waited_for=False)

    def _start(
        self,
        state: Mapping[str, Any],
        step: int | None,
        user: Any,
        metrics: Mapping[str, float] | None,
        on_commit: Callable[[CheckpointInfo], None] | None,
        candidate: bool,
        waited_for: bool,
    ) -> SaveHandle:
        """Starts a save, and lets go of all that it made before the garbage collector may run again.

        `waited_for`: whether the caller waits until it is durable.
        """
        begun = time.monotonic()
        with self._lock:
            self._enter()
            number = None if step is None else config.checked_step(step)
            kept_user, kept_metrics = config.checked_user(user), config.checked_metrics(metrics)
            collected = collect(state)
            collected_at = time.monotonic()
            with local.store_errors("planning a save in", self.root):
                plan = self._planned(collected)
            planned_at = time.monotonic()
            ownership, taken = self._claim()
            checkpoint = taken.next(number)
            handle = SaveHandle(
                self, checkpoint, self._repository.path(checkpoint), begun, on_commit
            )
            with local.store_errors("making memory for", handle.path):
                arena = self._arena(plan.layout.nbytes)
            if arena is None:
                handle.skipped = "all memory for snapshots is still being written"
                _log.warning("Skipped the checkpoint of step %d: %s", handle.step, handle.skipped)
                self._emit(events.SaveSkipped(handle.step, handle.skipped))
                return handle
            free_at = time.monotonic()
            taken.add(checkpoint)
            _log.info("Scheduling async checkpoint save at step %d to %s", handle.step, handle.path)
            request = save_job.save_request(
                root=self.root,
                owner=ownership.key,
                checkpoint=checkpoint,
                created=time.time(),
                values=collected.values,
                user=kept_user,
                metrics=kept_metrics,
                candidate=candidate,
                keep=self._keep,
                protect=[c for c in (self._restored,) if c is not None],
                structure=self._incremental.structure if self._incremental else None,
            )
            with local.store_errors("handing over", handle.path):
                self._capture(handle, arena, plan, collected, request, candidate, waited_for)
            now = time.monotonic()
            handle.timings.update(
                collect=collected_at - begun,
                plan=planned_at - collected_at,
                busy=free_at - planned_at,
                capture=now - free_at,
                stall=now - begun,
            )
            self._emit(events.SaveScheduled(handle.step, handle.path, now - begun))
            return handle

    def save(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        until: Durability = Durability.PERSISTED,
        user: Any = None,
        metrics: Mapping[str, float] | None = None,
        on_commit: Callable[[CheckpointInfo], None] | None = None,
        candidate: bool = False,
    ) -> CheckpointInfo:
        """`save_async`, then waits until the save is as durable as `until`."""
        waited_for = until > Durability.CAPTURED
        with collector_paused():
            handle = self._start(state, step, user, metrics, on_commit, candidate, waited_for)
        return handle.wait(until)

    # -- restoring -----------------------------------------------------------------------------------

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        step: int | None = None,
        strict: bool = True,
        cast: bool = False,
    ) -> CheckpointInfo | None:
        """Fills `state` from the newest good checkpoint, or from that of `step`.

        Modules, optimizers, tensors and whatever has `load_state_dict` are filled in place; plain
        values are put into the mapping. Returns None on a fresh run: a directory without
        checkpoints. `strict`: whether keys without a counterpart are an error. `cast`: whether a
        tensor of another dtype is converted instead of refused.

        A checkpoint that does not verify is passed over, loudly, for the next older one, unless
        `step` asks for it. Raises StateError (does not fit; nothing was touched), NotFoundError (no
        such step), CorruptError or IncompleteError (nothing there verifies: never a fresh run),
        StoreError (cannot be read). After a CorruptError the state may be partly filled.
        """
        begun = time.monotonic()
        with self._lock:
            self._enter()
            for handle in list(self._pending):
                handle.join()
            self._enter()
            if not isinstance(state, MutableMapping):
                raise StateError(
                    f"a state to fill is a mutable mapping, not {type(state).__qualname__}"
                )
            wanted = None if step is None else config.checked_step(step)
            await_orphan(self.root, self.timeout)
            found = records(self._repository)
            if not found and wanted is None:
                _log.info("No checkpoint in %s: a fresh run", self.root)
                return None
            restorer = Restorer(self._repository, state, strict, cast, self._verify)
            info = restorer.best(found, wanted)
            if info is not None:
                self._restored = CheckpointId(info.step, info.attempt)
                seconds = time.monotonic() - begun
                _log.info(
                    "Restored step %d from %s: %d bytes in %.2f s",
                    info.step,
                    info.path,
                    info.nbytes,
                    seconds,
                )
                self._emit(events.Restored(info, seconds))
            return info

    # -- looking -------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps of all committed good checkpoints, ascending."""
        return sorted({record.step for record in self._good()})

    def latest(self, *, at_least: Durability = Durability.PERSISTED) -> CheckpointInfo | None:
        """The newest committed good checkpoint, or None where no tier has one that durable."""
        if at_least > Durability.PERSISTED:
            return None
        newest = max(self._good(), key=lambda record: record.id, default=None)
        return newest.info(self._repository.path(newest.id)) if newest else None

    def pending(self) -> Sequence[SaveHandle]:
        """The saves on their way, oldest first."""
        return [handle for handle in list(self._pending) if not handle.done()]

    def estimate(self) -> dict[Durability, float]:
        """Seconds that a save is expected to take from the call to each durability, as the slowest
        of the last saves took them; empty before the first one is committed."""
        measured = list(self._measured)
        if not measured:
            return {}
        return {
            Durability.CAPTURED: max(timings["stall"] for timings in measured),
            Durability.PERSISTED: max(timings["durable"] for timings in measured),
        }

    def fence(self) -> None:
        """Waits until an overlapped capture is done: call it before changing what a save with
        `capture="overlap"` may still be copying, where no optimizer's step does it for you.

        Raises StateError, and gives the save up, if something was changed before.
        """
        capturing, self._capturing = self._capturing, None
        if capturing is None:
            return
        handle, capture = capturing
        begun = time.monotonic()
        try:
            changed = capture.fence()
        except StateError:
            handle.told()
            raise
        handle.timings["fence"] = time.monotonic() - begun
        if changed:
            handle.told()
            raise StateError(
                f"{len(changed)} tensors of the state were changed while the save of step "
                f"{handle.step} was copying them, so it was given up. Call engine.fence() before "
                'changing them, or use capture="copy"'
            )

    def add_listener(self, listener: Callable[[events.Event], None]) -> None:
        """Calls `listener(event)` for every event of `ckptengine.events`, on the thread where it
        happens."""
        self._listeners.append(listener)

    # -- waiting and leaving -------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Waits for all pending saves; raises the first failure that nobody has been told of.

        `timeout` in seconds; TimeoutError leaves them on their way.
        """
        self.check_process()
        self.fence()
        until = None if timeout is None else time.monotonic() + timeout
        for handle in list(self._pending):
            if not handle.join(None if until is None else max(0.0, until - time.monotonic())):
                raise TimeoutError(f"step {handle.step} is not committed after {timeout:g} s")
        self.deliver()

    def abort(self) -> None:
        """Drops what is in flight and ends its persister at once. The engine can go on saving."""
        self.check_process()
        with self._lock:
            for handle in list(self._pending):
                handle.told()
            if self._capturing is not None:
                capture, self._capturing = self._capturing[1], None
                capture.fence()
            self.end_persister(CheckpointError("the save was aborted"))

    def close(self) -> None:
        """Waits for what is pending, gives memory, processes and the directory back, and raises the
        first failure that nobody has been told of. Safe to call twice.

        Where the wait is interrupted, the persister goes on alone, as it does for a trainer that
        dies.
        """
        if self._closed or self._pid != os.getpid():
            return
        with self._lock:
            try:
                self.wait()
            finally:
                self._closed = True
                _open.discard(self)
                self._fences.remove()
                self._pool.close()
                self._slots.close()
                self._copier.close()
                if self._plan_memory is not None:
                    self._plan_memory.close()
                if self._ownership is not None:
                    self._ownership.release()

    # -- for handles ---------------------------------------------------------------------------------

    def deliver(self, raise_errors: bool = True) -> None:
        """Runs the finalizations that are due and raises the first error that nobody has seen."""
        while self._committed:
            self._committed.popleft().notify()
        if raise_errors:
            self._raise_failures()

    def end_persister(self, error: BaseException) -> None:
        """Ends the persister; its saves end with `error`."""
        self._pool.kill(error)

    def progress(self) -> object:
        """What changes while the persister gets on with anything."""
        return [(handle.id, handle.written()) for handle in list(self._pending)]

    def check_process(self) -> None:
        """Raises ConfigError in a forked child, which has nothing to do with our processes."""
        if self._pid != os.getpid():
            raise ConfigError(
                "this engine belongs to the process that made it; make one in each process"
            )

    # -- inside --------------------------------------------------------------------------------------

    def _raise_failures(self) -> None:
        while self._failed:
            handle = self._failed.popleft()
            if not handle.settled():
                raise handle.undelivered()

    def _enter(self) -> None:
        self.check_process()
        if self._closed:
            raise ConfigError("the engine is closed")
        self.fence()
        for handle in [h for h in self._pending if not h.begun()]:
            self._forget(handle)  # the call was interrupted twice
        self.deliver()

    def _good(self) -> list[Manifest]:
        self.check_process()
        found = records(self._repository).values()
        return [r for r in found if isinstance(r, Manifest) and not r.candidate]

    def _planned(self, collected: Collected) -> Plan:
        found = (collected.signature, collected.specs, collected.pickles)
        plan, learned = self._plan, self._incremental
        fits = plan is not None and plan.fits(*found)
        if learned is not None:
            if not fits:
                learned.begin(collected, self._repository, self._restored)
            learned.learn()
            fits = fits and plan is not None and plan.apart is learned.apart
        if plan is None or not fits:
            apart = learned.apart if learned is not None else ()
            plan, old = make_plan(collected.tree, *found, apart=apart), self._plan_memory
            memory = PlanMemory(save_job.pack_plan(plan.layout, plan.metadata, plan.index_frame))
            # Together: what fails or interrupts above must not leave one without the other.
            self._plan, self._plan_memory = plan, memory
            if old is not None:
                old.close()
        return plan

    def _claim(self) -> tuple[Ownership, Taken]:
        if self._ownership is None:
            self._ownership = Ownership(self.root, self.timeout)
        if self._taken is None:
            self._taken = Taken(self._repository.named())
        return self._ownership, self._taken

    def _arena(self, nbytes: int) -> Arena | None:
        """A free arena; waits for one as `on_busy` says. None: skip."""
        while (arena := self._slots.take(nbytes, self._busy())) is None:
            if self._on_busy == "skip":
                return None
            if self._on_busy == "error":
                raise StoreError(
                    "all memory for snapshots is still being written: save less often, or give "
                    "the engine more memory",
                    retryable=True,
                )
            oldest = next(iter(self._pending), None)
            if oldest is not None:
                oldest.join()
            # No finalizations: they could change the state, which is half taken.
            self._raise_failures()
        return arena

    def _busy(self) -> list[Arena]:
        return [handle.arena for handle in list(self._pending) if handle.arena is not None]

    def _capture(
        self,
        handle: SaveHandle,
        arena: Arena,
        plan: Plan,
        collected: Collected,
        request: dict[str, Any],
        candidate: bool,
        waited_for: bool,
    ) -> None:
        """Hands the job over first and captures then, so that writing can follow the capture."""
        assert self._plan_memory is not None
        handle.timings["nbytes"] = sum(file.nbytes for file in plan.layout.files)

        def on_done(job: Job) -> None:
            self._save_ended(handle, job, plan, request, candidate)

        later: frozenset[int] = frozenset()
        if self._overlap:
            later = owned(collected.tensors, collected.optimizers)
            self._fences.install(collected.optimizers)
        # Nobody waits for what is copied later; who waits for the end gains by writing at once.
        nbytes = int(handle.timings["nbytes"])
        beside = bool(later) or waited_for or self._pace.beside(nbytes)
        handle.take(arena)
        # Before the job can end: its end takes the handle off the list.
        self._pending.append(handle)
        # All in one: an interrupt between handing over and copying would leave a persister that
        # waits for a capture which never comes.
        try:
            arena.control.reset()
            arena.install(plan, plan.pieces, plan.tensors, plan.values)
            job = self._pool.submit(
                request,
                SharedMemory(arena.id, arena.fd, arena.nbytes),
                self._plan_memory.shared,
                [*self._slots.live(), self._plan_memory.shared.id],
                on_done,
            )
            handle.begin(job)
            begun = time.monotonic()
            capture = Capture(
                arena, self._copier, collected.tensors, collected.pickles, later, announce=beside
            )
            if later:
                self._capturing = (handle, capture)
        except BaseException:
            if handle.begun():
                handle.told()
                arena.control.abandon()
            else:
                self._forget(handle)
            raise
        if later:
            handle.capture = f"{len(later)} tensors copied while the loop goes on"
        else:
            if arena.warm:
                self._pace.note(beside, nbytes, time.monotonic() - begun)
            handle.capture = self._pace.explain(beside)
        arena.warm = True

    def _forget(self, handle: SaveHandle) -> None:
        """For a save that came to nothing in being handed over. Its job may be on its way all the
        same, where that was interrupted: it must not take the next capture for its own."""
        handle.told()
        if handle.arena is not None:
            handle.arena.control.abandon()
            self._slots.drop(handle.arena)
        with contextlib.suppress(ValueError):
            self._pending.remove(handle)

    def _save_ended(
        self, handle: SaveHandle, job: Job, plan: Plan, request: dict[str, Any], candidate: bool
    ) -> None:
        """On the watching thread: the outcome of a job becomes that of its handle."""
        result = job.result
        if result is None:
            error = job.error or CheckpointError("the save ended without a word")
            handle.settle(None, error)
            _log.error("The checkpoint of step %d failed: %s", handle.step, error)
            self._emit(events.SaveFailed(handle.step, error))
        else:
            durable = handle.elapsed()
            if result["marked"] and self._incremental and handle.arena:
                marks = plan.layout.marks
                unchanged = bytes(handle.arena.image[marks : marks + plan.layout.tensors])
                self._incremental.note(request["structure"], unchanged)
            handle.timings.update(result["seconds"], durable=durable)
            handle.timings["nbytes_shared"] = result["nbytes_shared"]
            handle.timings["persister_cpu"] = result["cpu_seconds"]
            info = CheckpointInfo(
                step=handle.id.step,
                attempt=handle.id.attempt,
                path=result["committed"],
                created=request["created"],
                world_size=1,
                nbytes=result["nbytes"],
                user=request["user"],
                metrics={name: float(value) for name, value in request["metrics"].items()},
                candidate=candidate,
            )
            handle.settle(info, None)
            # A save can be durable before the caller has noted what it cost.
            stall = handle.timings.get("stall", durable)
            self._measured.append({"stall": stall, "durable": durable})
            _log.info(
                "Committed checkpoint at step %d to %s: %d bytes in %.2f s, %.3f s of it in the loop",
                info.step,
                info.path,
                info.nbytes,
                durable,
                stall,
            )
            self._emit(events.SaveCommitted(info, stall, durable))
        (self._failed if result is None else self._committed).append(handle)
        with contextlib.suppress(ValueError):
            self._pending.remove(handle)

    def _emit(self, event: events.Event) -> None:
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:
                _log.exception("a listener failed on %s", event)


_open: set[Engine] = set()


def _close_at_exit() -> None:
    """What is pending is waited for. A failure that nobody has seen makes the process fail: at this
    point an exception would be printed and the exit status stay 0."""
    failed = False
    for engine in list(_open):
        try:
            engine.close()
        except BaseException as error:
            what = f"{type(error).__name__}: {error}"
            print(f"ckptengine: a save failed at exit: {what}", file=sys.stderr, flush=True)
            failed = True
    if failed:
        sys.stdout.flush()
        os._exit(1)


atexit.register(_close_at_exit)

"""What users' objects must offer to us, and what the engine offers to its consumers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from .types import CheckpointInfo, Durability


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state goes out and comes back as a dictionary."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class SaveHandle(Protocol):
    """One save on its way."""

    @property
    def step(self) -> int: ...

    def done(self) -> bool: ...

    def wait(
        self, until: Durability = Durability.PERSISTED, timeout: float | None = None
    ) -> CheckpointInfo: ...

    def exception(self) -> BaseException | None: ...


class Checkpointer(Protocol):
    """All that a consumer (schedule, preemption, rerun) may know of the engine."""

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        until: Durability = ...,
        candidate: bool = False,
    ) -> CheckpointInfo: ...

    def save_async(
        self, state: Mapping[str, Any], *, step: int, candidate: bool = False
    ) -> SaveHandle: ...

    def restore(self, state: Any, *, step: int | None = None) -> CheckpointInfo | None: ...

    def latest(self, *, at_least: Durability = ...) -> CheckpointInfo | None: ...

    def pending(self) -> Sequence[SaveHandle]: ...

    def estimate(self) -> Mapping[Durability, float]: ...

    def abort(self) -> None: ...

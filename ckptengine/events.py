"""Typed events that listeners receive: one class a moment, plain values only.

A listener is a callable that takes one event. It runs on the thread where the moment happened (the
engine's watcher for what happens in the background), so it must be quick; what it raises is logged
and dropped, because a broken listener must not cost a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from .types import CheckpointInfo


@dataclass(frozen=True)
class SaveScheduled:
    """The state was captured; the trainer goes on while it is written."""

    step: int
    path: str
    stall: float  # seconds the call took from the loop


@dataclass(frozen=True)
class SaveCommitted:
    """The checkpoint is durable and visible."""

    info: CheckpointInfo
    stall: float  # seconds taken from the loop
    durable: float  # seconds from the call to the commit


@dataclass(frozen=True)
class SaveFailed:
    """The checkpoint will not become visible. The handle and the next call raise `error`."""

    step: int
    error: BaseException


@dataclass(frozen=True)
class SaveSkipped:
    """No save was made for this step."""

    step: int
    reason: str


@dataclass(frozen=True)
class Restored:
    """The state was filled from a checkpoint."""

    info: CheckpointInfo
    seconds: float


Event = Union[SaveScheduled, SaveCommitted, SaveFailed, SaveSkipped, Restored]

"""Values that the floors hand to each other. Frozen, without behaviour beyond derivation."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

PAGE = 4096
"""Bytes: alignment of large payloads, in the file and so in the arena."""

PART = 16 << 20
"""Bytes that one checksum covers at most, and the size of one write."""

_NAME = re.compile(r"step-(\d{8,})(?:\.([1-9]\d*))?")


class Durability(IntEnum):
    """How safe a save is. Each level implies the ones before it."""

    CAPTURED = 1  # copied out of the trainer's tensors
    PERSISTED = 2  # committed on a local medium
    REPLICATED = 3  # verified copies lie in another failure domain
    SHARED = 4  # committed in the shared store


@dataclass(frozen=True, order=True)
class CheckpointId:
    """Step and attempt: the order of checkpoints is the order of these numbers."""

    step: int
    attempt: int = 0

    @property
    def name(self) -> str:
        """The directory's name: ``step-00001000``, or ``step-00001000.1`` for a second attempt."""
        return f"step-{self.step:08d}" + (f".{self.attempt}" if self.attempt else "")

    @classmethod
    def parse(cls, name: str) -> CheckpointId | None:
        """The id that `name` spells canonically, or None if it is not a checkpoint's name."""
        match = _NAME.fullmatch(name)
        if not match:
            return None
        found = cls(int(match[1]), int(match[2] or 0))
        return found if found.name == name else None


@dataclass(frozen=True)
class Report:
    """What a restore did beyond filling every leaf, by key."""

    missing: tuple[str, ...] = ()  # in the state, not in the checkpoint
    unexpected: tuple[str, ...] = ()  # in the checkpoint, not in the state
    unfilled: tuple[str, ...] = ()  # in the state, left as it was
    cast: tuple[str, ...] = ()  # dtype converted on request
    fallen_back_from: tuple[str, ...] = ()  # newer checkpoints passed over, each with the reason


@dataclass(frozen=True)
class CheckpointInfo:
    """One committed checkpoint, as its manifest tells it."""

    step: int
    attempt: int
    path: str
    created: float  # seconds since the epoch
    world_size: int
    nbytes: int  # bytes of all files, commit record excluded
    user: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    candidate: bool = False
    sources: Mapping[str, int] = field(default_factory=dict)  # bytes read from each tier
    report: Report = Report()


@dataclass(frozen=True)
class Chunk:
    """A payload's place: what one checksum covers. Offsets are bytes from the file's start."""

    offset: int
    nbytes: int
    crc_at: tuple[int, int]  # where its CRC-32 stands in the frame: data descriptor, central entry
    number: int = -1  # of the tensor, or behind all tensors of the value, whatever file it is in


@dataclass(frozen=True)
class FileLayout:
    """One chunk file, laid out in the arena as it will lie on disk."""

    name: str
    arena_offset: int  # bytes from the image's start; a multiple of PAGE
    nbytes: int
    chunks: tuple[Chunk, ...]  # ascending by offset, not overlapping


@dataclass(frozen=True)
class ArenaLayout:
    """The whole image of one rank's save. The arena's owner and the persister share only this."""

    files: tuple[FileLayout, ...]
    nbytes: int  # a multiple of PAGE
    tensors: int  # how many there are
    marks: int  # bytes from the image's start to a byte for each tensor: 1 where it did not change


Spec = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Of a tensor: dtype name, shape, stride (elements)."""


class TensorPlace(NamedTuple):
    """Where a tensor's dense payload lies in the arena's image."""

    offset: int  # bytes
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # dense


class ValuePlace(NamedTuple):
    """Where a value's pickle lies in the arena's image, zero-padded to `capacity` bytes."""

    offset: int
    capacity: int


class Control:
    """The first `PAGE` of an arena: counters that the trainer and the persister show each other.

    Each counter has one writer. Eight aligned bytes are written by one store; the lock is there for
    its barrier, which machines with weak memory ordering need so that the payload is seen before
    the counter that announces it.
    """

    _CAPTURED, _WRITTEN, _ABANDONED = 0, 1, 2

    def __init__(self, page: memoryview) -> None:
        self._words = page[: 3 * 8].cast("Q")
        self._barrier = threading.Lock()

    def reset(self) -> None:
        """Before a new capture, while nobody looks."""
        for word in (self._CAPTURED, self._WRITTEN, self._ABANDONED):
            self._words[word] = 0

    @property
    def captured(self) -> int:
        """Bytes of the image, from its start, that hold the snapshot."""
        with self._barrier:
            return self._words[self._CAPTURED]

    @captured.setter
    def captured(self, nbytes: int) -> None:
        with self._barrier:
            self._words[self._CAPTURED] = nbytes

    @property
    def written(self) -> int:
        """Bytes that the persister has written or found written already: its sign of life."""
        return self._words[self._WRITTEN]

    @written.setter
    def written(self, nbytes: int) -> None:
        self._words[self._WRITTEN] = nbytes

    @property
    def abandoned(self) -> bool:
        """Whether the trainer gave this capture up."""
        return self._words[self._ABANDONED] != 0

    def abandon(self) -> None:
        self._words[self._ABANDONED] = 1

    def release(self) -> None:
        """Lets go of the page, so that the arena can be unmapped."""
        self._words.release()

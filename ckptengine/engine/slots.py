"""The arenas of one engine: how much host memory a run gives to snapshots."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import ConfigError
from ..persist.pool import new_id
from ..snapshot.arena import Arena
from ..types import PAGE

_SLOTS = 2
"""One is captured into while the other is written."""

_TOO_LARGE = 4
"""An arena so many times larger than what is saved, and `_SPARE` bytes, is given back."""

_SPARE = 4 << 20
"""Bytes: more than the size of a huge page, to which small arenas may have been rounded."""


class Slots:
    """Up to two arenas, made when first needed. `limit`: bytes in all, or None.

    A second one is made only when a save comes while the first is written, and where the limit and
    the machine's free memory allow it; else the save waits for the first.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._arenas: list[Arena] = []

    def take(self, nbytes: int, busy: Collection[Arena]) -> Arena | None:
        """An arena for an image of `nbytes` that is not among the `busy`; None while all are.

        Raises ConfigError when there can never be one.
        """
        need = PAGE + nbytes
        for arena in [a for a in self._arenas if a not in busy]:
            if need <= arena.nbytes <= _TOO_LARGE * need + _SPARE:
                return arena
            self._arenas.remove(arena)
            arena.close()
        held = sum(arena.nbytes for arena in self._arenas)
        if self._limit is not None and held + need > self._limit:
            if not self._arenas:
                raise ConfigError(
                    f"host_memory_limit={self._limit} is too little: the state needs {need} bytes"
                )
            return None
        if len(self._arenas) >= _SLOTS:
            return None
        free = _available()
        if free is not None and need > free:
            if not self._arenas:
                raise ConfigError(
                    f"the state needs {need} bytes of host memory to be captured; {free} are free"
                )
            return None
        arena = Arena(new_id(), nbytes)
        self._arenas.append(arena)
        return arena

    def drop(self, arena: Arena) -> None:
        """Gives one back that nobody may use again."""
        if arena in self._arenas:
            self._arenas.remove(arena)
            arena.close()

    def live(self) -> list[int]:
        """Ids of all arenas that still exist."""
        return [arena.id for arena in self._arenas]

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(arena.nbytes for arena in self._arenas)

    def close(self) -> None:
        """Gives all of them back."""
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()


def _available() -> int | None:
    """Bytes of memory that the kernel thinks can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None

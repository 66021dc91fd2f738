"""State that belongs to one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class PerRank(Generic[T]):
    """Marks `obj` as this rank's own: a loader's position, a local random stream.

    Every rank stores and gets back its own copy. At another world size there is no copy for some
    ranks: then `merge(copies)` is called with the saved copies of all ranks in rank order and
    returns the one to load, and without `merge` the restore is refused, naming the key.

    `obj` may be anything that a state may hold; it stays reachable as `.obj`.
    """

    def __init__(self, obj: T, merge: Callable[[Sequence[Any]], Any] | None = None) -> None:
        self.obj = obj
        self.merge = merge

    def __repr__(self) -> str:
        return f"PerRank({self.obj!r})"

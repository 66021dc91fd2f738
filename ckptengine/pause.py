"""A pause of Python's cyclic garbage collector around code that makes very many objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Inside, no collection starts by itself.

    Every so many new objects Python looks for cycles through all that a program holds, a trainer's
    whole heap; with 100,000 tensors that doubled the time of a save. Plain data has no cycles, and
    what is freed by reference counts is freed all the same.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

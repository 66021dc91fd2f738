"""Real text that every machine has, and a loader that continues exactly where it was."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def standard_library(limit: int) -> bytes:
    """The sources of Python's standard library, in the order of their names, cut at `limit`."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise FileNotFoundError(f"no Python sources in {folder}: this Python comes without them")
    return bytes(text[:limit])


class Loader:
    """Endless shuffled batches of windows, reordered each epoch. Resumes at the exact batch.

    The order comes from a generator of its own, so that nothing else in the program which draws
    random numbers can change it.
    """

    def __init__(self, text: bytes, *, context: int, batch: int, seed: int) -> None:
        length = context + 1  # the last byte is only predicted
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(
            0, length, context
        )
        if len(self.windows) < batch:
            raise ValueError(f"{len(text)} bytes of text do not fill a batch of {batch} windows")
        self.batch = batch
        self._text = zlib.crc32(text)
        self._generator = torch.Generator().manual_seed(seed)
        self._epoch = -1
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._position = 0
        self._drawn_from = self._generator.get_state()
        self._order = torch.randperm(len(self.windows), generator=self._generator)

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        if self._position + self.batch > len(self._order):
            self._begin_epoch()
        chosen = self._order[self._position : self._position + self.batch]
        self._position += self.batch
        return self.windows[chosen].long()

    def state_dict(self) -> dict[str, Any]:
        return {
            "text": self._text,
            "epoch": self._epoch,
            "position": self._position,
            # As it was before the epoch's order was drawn: the order is drawn again from it.
            "generator": self._drawn_from,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["text"] != self._text:
            raise ValueError(
                "the text differs from the one this run began with (another Python, or another "
                "--size); start a new run in another directory"
            )
        self._generator.set_state(state_dict["generator"])
        self._epoch = state_dict["epoch"] - 1
        self._begin_epoch()
        self._position = state_dict["position"]

"""How commands print: a table for people, JSON for programs, progress for those who wait."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def print_json(value: Any) -> None:
    """One JSON value, for programs."""
    print(json.dumps(value, indent=2, default=str))


def print_table(titles: Sequence[str], rows: Sequence[Sequence[Any]], right: str = "") -> None:
    """Columns as wide as they need; those whose title is a word of `right` are set to the right."""
    cells = [list(titles), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    to_right = [title in right.split() for title in titles]
    for row in cells:
        line = [
            cell.rjust(width) if aligned else cell.ljust(width)
            for cell, width, aligned in zip(row, widths, to_right, strict=True)
        ]
        print("  ".join(line).rstrip())


def size(nbytes: int) -> str:
    """Bytes for people: 1.5 GiB."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{nbytes} B"


def moment(seconds: float) -> str:
    """Seconds since the epoch as local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


class Progress:
    """A line on the terminal while bytes are read; nothing where nobody watches."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, max(total, 1), 0
        self._shown = 0.0
        self._live = sys.stderr.isatty()

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if self._live and now - self._shown > 0.1:
            self._shown = now
            share = min(1.0, self._done / self._total)
            print(
                f"\r\x1b[K{self._what}: {share:.0%} of {size(self._total)}", end="", file=sys.stderr
            )

    def end(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

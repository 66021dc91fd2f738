"""Whether a state is written while it is still being copied, or once it is.

Beside the copy, a save is durable sooner. But where cores and memory are busy with the copy already,
the writing makes it longer, and the training loop waits for it.
"""

from __future__ import annotations

_TRIALS = 2
_HARM = 1.15
"""Times as long as alone: what a copy may take beside the writing. Less is within the noise."""

_SMALL = 64 << 20
"""Bytes below which a copy is too short to measure, and too short to matter."""


class Pace:
    """Measures copies alone and beside the writing, in the first saves whose memory is warm, and then
    takes what was better for the loop by the last measurements of each. Without `measure`, copies
    are alone."""

    def __init__(self, measure: bool) -> None:
        self._measure = measure
        self._measured: dict[bool, list[float]] = {False: [], True: []}  # beside? to seconds a byte

    def beside(self, nbytes: int) -> bool:
        """How the next copy, of so many bytes, is made."""
        if not self._measure:
            return False
        if nbytes < _SMALL:
            return True
        alone, beside = self._measured[False], self._measured[True]
        if len(beside) < _TRIALS:
            return len(beside) < len(alone)
        return min(beside) <= _HARM * min(alone)

    def note(self, beside: bool, nbytes: int, seconds: float) -> None:
        """Takes note of a copy into warm memory."""
        if nbytes >= _SMALL:
            self._measured[beside].append(seconds / nbytes)
            del self._measured[beside][:-_TRIALS]

    def explain(self, beside: bool) -> str:
        """Why a copy was made as it was."""
        how = "written beside the copy" if beside else "written once copied"
        alone, other = self._measured[False], self._measured[True]
        if not self._measure or len(other) < _TRIALS or len(alone) < _TRIALS:
            return how
        return (
            f"{how}: beside the writing, a copy takes {min(other) / min(alone):.2f} times as long"
        )

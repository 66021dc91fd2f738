"""Which checkpoint to restore. Pure: decided from what was found, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import NotFoundError
from ..format.manifest import Manifest
from ..types import CheckpointId


def in_order(
    found: Mapping[CheckpointId, Manifest | Exception], step: int | None
) -> Sequence[CheckpointId]:
    """The checkpoints to try, best first.

    `found`: each checkpoint's commit record, or why it cannot be read. Newest first; candidates only
    when asked for by `step`, and then only attempts at that step. Raises NotFoundError when there is
    none at `step`.
    """
    newest_first = sorted(found, reverse=True)
    if step is not None:
        chosen = [c for c in newest_first if c.step == step]
        if not chosen:
            raise NotFoundError(
                f"no checkpoint of step {step}; there are steps {sorted({c.step for c in found})}"
            )
        return chosen
    return [
        c
        for c in newest_first
        if not (isinstance(record := found[c], Manifest) and record.candidate)
    ]

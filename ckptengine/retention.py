"""Which checkpoints may go. Pure: decisions are returned, and somebody else performs them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from .config import Keep
from .format.manifest import Manifest
from .types import CheckpointId


def removable(
    manifests: Iterable[Manifest], keep: Keep, protect: Collection[CheckpointId] = ()
) -> list[CheckpointId]:
    """The checkpoints that `keep` does not keep, oldest first.

    `manifests`: the intact, committed checkpoints in any order; damaged ones are not in it, so they
    neither count nor go. The newest good one and those in `protect` always stay. Candidates do not
    count: they stay while they are newer than the oldest of the last good ones.
    """
    ordered = sorted(manifests, key=lambda m: m.id)
    good = [m for m in ordered if not m.candidate]
    last = good[-(keep.last or 1) :]
    stay = {m.id for m in last} | set(protect)
    if keep.every:
        stay |= {m.id for m in good if m.step % keep.every == 0}
    if keep.best and keep.metric:
        stay |= {m.id for m in _ranked(good, keep)[: keep.best]}
    horizon = last[0].id if last else None
    stay |= {m.id for m in ordered if m.candidate and (horizon is None or m.id > horizon)}
    return [m.id for m in ordered if m.id not in stay]


def _ranked(manifests: Iterable[Manifest], keep: Keep) -> list[Manifest]:
    """Best first. A missing or NaN metric is worst, and of equals the newer one is better."""

    def badness(manifest: Manifest) -> tuple[float, float, int, int]:
        value = manifest.metrics.get(keep.metric or "", math.nan)
        unknown = math.isnan(value)
        worse = 0.0 if unknown else value if keep.mode == "min" else -value
        return (unknown, worse, -manifest.step, -manifest.attempt)

    return sorted(manifests, key=badness)

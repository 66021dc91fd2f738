"""Fills a state from the best checkpoint of a repository that verifies."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError, CorruptError, IncompleteError, NotFoundError
from ..format.manifest import Manifest
from ..pause import collector_paused
from ..repository import Repository
from ..state.assign import Assignment
from ..types import CheckpointId, CheckpointInfo
from .choose import in_order
from .read import read_tensors

_log = logging.getLogger("ckptengine")


@dataclass(frozen=True)
class Restorer:
    """One restore of `state`. `strict`, `cast`: see `Engine.restore`; `verify`: check checksums."""

    repository: Repository
    state: MutableMapping[str, Any]
    strict: bool
    cast: bool
    verify: bool

    def best(
        self, found: Mapping[CheckpointId, Manifest | Exception], step: int | None
    ) -> CheckpointInfo | None:
        """Fills the state from the newest of `found` that verifies, or from that of `step`.

        Passes over what does not verify, loudly. None where there are only candidates. Raises
        CorruptError when nothing verifies, StateError when what does fits the state not.
        """
        root = self.repository.root
        passed_over: list[str] = []
        order = in_order(found, step)
        for checkpoint in order:
            try:
                info = self.one(checkpoint, found[checkpoint])
            except (CorruptError, IncompleteError, NotFoundError) as error:
                passed_over.append(f"{checkpoint.name}: {error}")
                if step is not None and checkpoint == order[-1]:
                    raise
                _log.error("Passed over %s, which cannot be restored: %s", checkpoint.name, error)
                continue
            return replace(info, report=replace(info.report, fallen_back_from=tuple(passed_over)))
        if not passed_over:
            _log.warning("Only candidates in %s: a fresh run. Name one by its step", root)
            return None
        raise CorruptError(
            f"{root}: no checkpoint there can be restored, and a run with checkpoints does not "
            "start fresh by itself: move them away, or give the run another directory",
            passed_over,
        )

    def one(self, checkpoint: CheckpointId, record: Manifest | Exception) -> CheckpointInfo:
        """Fills the state from this checkpoint, whose commit record is `record`."""
        if isinstance(record, Exception):
            raise record
        path = self.repository.path(checkpoint)
        if record.world_size != 1:
            raise ConfigError(
                f"{path}: written by {record.world_size} ranks; this release restores those of one"
            )
        with self.repository.hold(checkpoint):
            with collector_paused():
                index = self.repository.index(checkpoint, record, 0)
                assignment = Assignment(
                    self.state,
                    index.tree,
                    index.tensors,
                    index.values,
                    strict=self.strict,
                    cast=self.cast,
                )
                assignment.allocate()
                nbytes = read_tensors(path, record, index, assignment.fills, verify=self.verify)
            assignment.finish()
        return replace(record.info(path), sources={"local": nbytes}, report=assignment.report)

"""From what a user names (a run's directory, one checkpoint's) to a checkpoint."""

from __future__ import annotations

import os
from typing import NamedTuple

from ..config import local_root
from ..errors import CorruptError, IncompleteError, NotFoundError
from ..format.manifest import Manifest
from ..repository import Repository
from ..types import CheckpointId
from .choose import in_order


class Located(NamedTuple):
    """A checkpoint whose commit record has been verified."""

    repository: Repository
    id: CheckpointId
    manifest: Manifest

    @property
    def path(self) -> str:
        return self.repository.path(self.id)


def locate(path: object, step: int | None = None) -> Located:
    """The checkpoint at `path`, or the newest (or that of `step`) in the run's directory `path`.

    Raises NotFoundError, IncompleteError or CorruptError.
    """
    where = local_root(path)
    parent, name = os.path.split(where)
    single = CheckpointId.parse(name)
    if single is not None:
        repository = Repository(parent)
        return Located(repository, single, repository.manifest(single))
    repository = Repository(where)
    if not os.path.isdir(where):
        raise NotFoundError(f"{where}: no such directory")
    found = records(repository)
    if not found:
        raise NotFoundError(f"{where}: no checkpoint in this directory")
    for checkpoint in in_order(found, step):
        record = found[checkpoint]
        if isinstance(record, Exception):
            raise record
        return Located(repository, checkpoint, record)
    raise NotFoundError(f"{where}: only candidates there; name one by its step")


def records(repository: Repository) -> dict[CheckpointId, Manifest | Exception]:
    """Every checkpoint's commit record, or why it cannot be read. A StoreError is not an answer
    about a checkpoint and is raised."""
    found: dict[CheckpointId, Manifest | Exception] = {}
    for checkpoint in repository.named():
        try:
            found[checkpoint] = repository.manifest(checkpoint)
        except NotFoundError:
            continue  # deleted since it was listed
        except (CorruptError, IncompleteError) as error:
            found[checkpoint] = error
    return found

"""`ckptengine ls`: what is in a run's directory."""

from __future__ import annotations

import argparse
import os

from ..config import local_root
from ..errors import NotFoundError
from ..format.manifest import Manifest
from ..repository import Repository
from ..restore.locate import records
from ..types import CheckpointId
from .output import moment, print_json, print_table, size

HELP = (
    "Lists the checkpoints of a run's directory, oldest first. `damaged` means that the commit record "
    "or a file's size is wrong; `ckptengine verify` reads every byte."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="the run's directory")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def run(args: argparse.Namespace) -> int:
    root = local_root(args.directory)
    if not os.path.isdir(root):
        raise NotFoundError(f"{root}: no such directory")
    repository = Repository(root)
    found = sorted(records(repository).items())
    rows = [_row(repository, checkpoint, record) for checkpoint, record in found]
    if args.json:
        print_json(rows)
        return 0
    if not rows:
        print(f"no checkpoints in {root}")
        return 0
    print_table(
        ("STEP", "ATTEMPT", "STATE", "SIZE", "CREATED", "RANKS", "METRICS", "NAME"),
        [
            (
                row["step"],
                row["attempt"],
                row["state"],
                size(row["nbytes"]) if row["nbytes"] is not None else "-",
                moment(row["created"]) if row["created"] is not None else "-",
                row["world_size"] or "-",
                " ".join(f"{k}={v:g}" for k, v in row["metrics"].items()) or "-",
                row["name"],
            )
            for row in rows
        ],
        right="STEP ATTEMPT SIZE RANKS",
    )
    leftovers = repository.leftovers()
    if leftovers:
        print(f"{len(leftovers)} unfinished: `ckptengine gc` removes those that nobody writes")
    return 0


def _row(repository: Repository, checkpoint: CheckpointId, record: Manifest | Exception) -> dict:  # type: ignore[type-arg]
    good = isinstance(record, Manifest) and repository.intact(checkpoint)
    manifest = record if isinstance(record, Manifest) else None
    return {
        "step": checkpoint.step,
        "attempt": checkpoint.attempt,
        "name": checkpoint.name,
        "path": repository.path(checkpoint),
        "state": "damaged"
        if not good
        else "candidate"
        if manifest and manifest.candidate
        else "good",
        "nbytes": manifest.nbytes if manifest else None,
        "created": manifest.created if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "metrics": dict(manifest.metrics) if manifest else {},
        "user": manifest.user if manifest else None,
    }

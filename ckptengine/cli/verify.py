"""`ckptengine verify`: every byte against its checksum."""

from __future__ import annotations

import argparse
import os
import time

from ..config import local_root
from ..errors import CorruptError, IncompleteError, NotFoundError
from ..repository import Repository
from ..restore.locate import locate, records
from ..restore.verify import verify
from ..types import CheckpointId
from .output import Progress, print_json, print_table, size

HELP = (
    "Reads a checkpoint whole and compares every byte with its checksum. In a run's directory: the "
    "newest one, that of --step, or --all. Exit code 4 if anything is damaged."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint's directory, or a run's")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="the step to verify")
    which.add_argument("--all", action="store_true", help="verify all checkpoints of the run")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def run(args: argparse.Namespace) -> int:
    rows = [_verify(path) for path in _paths(args)]
    if args.json:
        print_json(rows)
    else:
        print_table(
            ("CHECKPOINT", "RESULT", "SIZE", "RATE"),
            [
                (
                    os.path.basename(row["path"]),
                    "damaged" if row["problems"] else "verified",
                    size(row["nbytes"]),
                    f"{size(int(row['nbytes'] / max(row['seconds'], 1e-9)))}/s",
                )
                for row in rows
            ],
            right="SIZE RATE",
        )
        for row in rows:
            for problem in row["problems"]:
                print(f"  {problem}")
    return 4 if any(row["problems"] for row in rows) else 0


def _paths(args: argparse.Namespace) -> list[str]:
    root = local_root(args.path)
    if args.all:
        repository = Repository(root)
        found = [repository.path(checkpoint) for checkpoint in sorted(records(repository))]
        if not found:
            raise NotFoundError(f"{root}: no checkpoint in this directory")
        return found
    if CheckpointId.parse(os.path.basename(root)):
        return [root]
    return [locate(root, args.step).path]


def _verify(path: str) -> dict:  # type: ignore[type-arg]
    begun = time.monotonic()
    problems: list[str] = []
    nbytes = 0
    progress = None
    try:
        nbytes = locate(path).manifest.nbytes
        progress = Progress(os.path.basename(path), nbytes)
        verify(path, progress=progress)
    except CorruptError as error:
        problems = list(error.problems)
    except IncompleteError as error:
        problems = [str(error)]
    finally:
        if progress:
            progress.end()
    seconds = time.monotonic() - begun
    return {"path": path, "problems": problems, "nbytes": nbytes, "seconds": seconds}

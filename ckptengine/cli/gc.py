"""`ckptengine gc`: makes room in a run's directory."""

from __future__ import annotations

import argparse
import os

from ..config import Keep, local_root
from ..errors import NotFoundError
from ..format.manifest import Manifest
from ..repository import Repository
from ..restore.locate import records
from ..retention import removable
from ..store.ownership import Ownership
from ..types import CheckpointId
from .output import print_json

HELP = (
    "Removes what saves and deletions of dead processes left behind, and the checkpoints that the "
    "given rules do not keep. Without rules no checkpoint goes. The newest good one always stays. "
    "Refused (exit code 5) while a run writes to the directory."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="the run's directory")
    parser.add_argument("--keep", type=int, metavar="N", help="keep the newest N")
    parser.add_argument("--keep-every", type=int, metavar="K", help="keep steps that K divides")
    parser.add_argument("--keep-best", type=int, metavar="N", help="keep the N best by --metric")
    parser.add_argument("--metric", help="the metric that --keep-best goes by")
    parser.add_argument("--mode", choices=("min", "max"), default="min", help="which is best")
    parser.add_argument("--damaged", action="store_true", help="remove damaged ones as well")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def run(args: argparse.Namespace) -> int:
    root = local_root(args.directory)
    if not os.path.isdir(root):
        raise NotFoundError(f"{root}: no such directory")
    keep = None
    if args.keep is not None or args.keep_every is not None or args.keep_best is not None:
        keep = Keep(args.keep, args.keep_every, args.keep_best, args.metric, args.mode)
    owner = Ownership(root, timeout=60.0)
    try:
        repository = Repository(root)
        chosen, leftovers = _choose(repository, keep, args.damaged), repository.leftovers()
        deleted = [] if args.dry_run else [c for c in chosen if repository.delete(c)]
        if not args.dry_run:
            repository.sweep(leftovers)
    finally:
        owner.release()
    _tell(args, chosen, deleted, leftovers)
    return 0


def _choose(repository: Repository, keep: Keep | None, damaged: bool) -> list[CheckpointId]:
    found = records(repository)
    intact = {c: r for c, r in found.items() if isinstance(r, Manifest) and repository.intact(c)}
    chosen = removable(intact.values(), keep) if keep else []
    # With nothing intact beside them, damaged ones may be all that a rescue has to go by.
    if damaged and intact:
        chosen += [c for c in found if c not in intact]
    return sorted(chosen)


def _tell(
    args: argparse.Namespace,
    chosen: list[CheckpointId],
    deleted: list[CheckpointId],
    leftovers: list[str],
) -> None:
    if args.json:
        print_json(
            {
                "dry_run": args.dry_run,
                "chosen": [c.name for c in chosen],
                "deleted": [c.name for c in deleted],
                "leftovers": leftovers,
            }
        )
        return
    verb = "would remove" if args.dry_run else "removed"
    for checkpoint in chosen:
        done = args.dry_run or checkpoint in deleted
        print(f"{verb if done else 'left, since it is being read:'} {checkpoint.name}")
    for name in leftovers:
        print(f"{verb} {name}")
    if not chosen and not leftovers:
        print("nothing to remove")

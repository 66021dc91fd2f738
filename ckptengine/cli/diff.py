"""`ckptengine diff`: what differs between two checkpoints."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ..restore.contents import difference
from ..restore.locate import locate
from .output import print_json, print_table

HELP = (
    "Compares two checkpoints key by key: which keys only one has, which differ in dtype or shape, "
    "which in their bytes. Exit code 0 whether they differ or not; --exit-code makes that 1."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", help="a checkpoint's directory, or a run's (its newest)")
    parser.add_argument("second", help="the one to compare it with")
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 if they differ")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def run(args: argparse.Namespace) -> int:
    first, second = locate(args.first), locate(args.second)
    found = difference(first, second)
    differs = bool(found.only_first or found.only_second or found.reshaped or found.changed)
    if args.json:
        print_json({"first": first.path, "second": second.path, **asdict(found)})
    else:
        rows = [
            *(("-", key, "only in the first") for key in found.only_first),
            *(("+", key, "only in the second") for key in found.only_second),
            *(("~", key, f"{a} -> {b}") for key, (a, b) in found.reshaped.items()),
            *(("*", key, "other content") for key in found.changed),
        ]
        if rows:
            print_table((" ", "KEY", "DIFFERENCE"), rows)
        print(f"{len(rows)} keys differ, {len(found.same)} are the same")
    return 1 if differs and args.exit_code else 0

"""Benchmarks of ckptengine against its peers and against the machine's own limits.

    pip install 'ckptengine[bench]'
    python -m benchmarks                              # save_restore: 2 GiB, 5 rounds
    python -m benchmarks loop --gib 1 --rounds 7      # only what a save costs a busy loop
    python -m benchmarks durable restore --contenders 'ckptengine,dcp.save'
    python -m benchmarks many --count 10000           # another workload, smaller
    python -m benchmarks --from results.json          # the table of an earlier run once more
    python -m benchmarks.plot results.json            # a PNG beside it

Workloads, one a run (each module in `benchmarks/workloads` says what its figures mean):

    save_restore  all of the next three, which may also be named alone or together
      durable       stall of the call and time to durable, trainer idle
      loop          whole cost of a save to a busy loop, and time to durable in it
      restore       page cache warm and cold
    load          without a template: to the first tensor, and to all
    many          a state of many small tensors
    large         a state of one tensor
    frozen        a state of which few bytes change between saves
    tiny          a small state, saved at every step
    memory        host memory over many saves

The table goes to standard output, progress to standard error, raw samples to --json. The directory
must be on the disk to be measured (not tmpfs), with room for a few times the state; memory for
about ten times the state is needed with all contenders of save_restore. Let nothing else run on the
machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .workload import Settings, Workload

# Nothing more is imported up here: a peer's worker process imports this file again and needs none
# of it.

_PARTS = ("durable", "loop", "restore")


def main() -> None:
    args = _arguments()
    from . import report

    if args.table_from:
        print(report.render(json.loads(args.table_from.read_text())))
        return
    results = _measure(args)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(report.render(results))
    print(f"raw results: {args.json}", file=sys.stderr)
    if args.png:
        from .plot import plot

        plot(results, args.png)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workload", nargs="*", help="default: save_restore")
    parser.add_argument("--gib", type=float, help="size of the state (default: the workload's)")
    parser.add_argument(
        "--count",
        type=int,
        help="tensors of many (default 100000), saves of memory (100), steps of tiny (200)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds not counted (default 1)")
    parser.add_argument(
        "--steps",
        type=int,
        default=8,
        help="loop: least steps with a save, and without (default 8)",
    )
    parser.add_argument("--dir", type=Path, help="scratch directory on the disk to be measured")
    parser.add_argument("--json", type=Path, default=Path("benchmark.json"), help="raw results")
    parser.add_argument("--png", type=Path, help="also draw a plot")
    parser.add_argument("--contenders", help="comma-separated names (default: the workload's)")
    parser.add_argument("--from", dest="table_from", type=Path, help="show an earlier run's JSON")
    args = parser.parse_args()
    if args.rounds < 1 or args.warmup < 1 or args.steps < 2:
        parser.error("at least one round, one of warm-up and two steps are needed")
    return args


def _chosen(args: argparse.Namespace) -> tuple[Workload, list[str]]:
    """The workload, and the parts of save_restore."""
    from . import workloads

    names = args.workload or ["save_restore"]
    if set(names) <= set(_PARTS):
        return workloads.get("save_restore"), names
    if len(names) > 1 or names[0] not in workloads.NAMES:
        sys.exit(f"one of {', '.join(workloads.NAMES)}, or some of {', '.join(_PARTS)}")
    return workloads.get(names[0]), list(_PARTS) if names[0] == "save_restore" else []


def _settings(args: argparse.Namespace, workload: Workload, parts: list[str]) -> Settings:
    from .workload import Settings

    if args.gib is not None and workload.gib is None:
        sys.exit(f"the size of {workload.name} follows from --count")
    if args.count is not None and workload.count is None:
        sys.exit(f"{workload.name} has no --count")
    names = args.contenders.split(",") if args.contenders else list(workload.contenders)
    known = [*workload.contenders, *workload.optional]
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no contender {unknown[0]!r} in {workload.name}; there are {', '.join(known)}")
    if args.dir:
        args.dir.mkdir(parents=True, exist_ok=True)
    return Settings(
        directory=Path(tempfile.mkdtemp(prefix="benchmark-", dir=args.dir or Path.cwd())),
        contenders=names,
        nbytes=int((args.gib or workload.gib or 0) * 2**30),
        count=args.count or workload.count or 0,
        steps=args.steps,
        parts=parts,
    )


def _measure(args: argparse.Namespace) -> dict[str, object]:
    import torch

    from . import harness, machine

    workload, parts = _chosen(args)
    settings = _settings(args, workload, parts)
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        free, needed = shutil.disk_usage(settings.directory).free, workload.disk * settings.nbytes
        if free < needed:
            sys.exit(f"{free / 1e9:.1f} GB are free for files, {needed / 1e9:.1f} are needed")
        harness.say(f"making the state of {workload.name}")
        race = workload.prepare(settings)
        facts = machine.facts(settings.directory)
        run = harness.run([*race.limits, *race.contenders], args.rounds, args.warmup)
    finally:
        shutil.rmtree(settings.directory, ignore_errors=True)
    entries = run.pop("entries")
    return {
        "format": 1,
        "workload": workload.name,
        "started": started,
        "machine": facts,
        "settings": {
            "parts": parts,
            "rounds": args.rounds,
            "warmup": args.warmup,
            "steps": args.steps,
            "count": settings.count,
            "torch_threads": torch.get_num_threads(),
        },
        "state": race.state,
        **run,
        "limits": {entry.name: entries[entry.name] for entry in race.limits},
        "contenders": {entry.name: entries[entry.name] for entry in race.contenders},
    }


if __name__ == "__main__":
    main()

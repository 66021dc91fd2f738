"""Benchmarks of ckptengine against its peers and against the machine's own limits.

    pip install 'ckptengine[bench]'
    python -m benchmarks                              # all of save_restore: 2 GiB, 5 rounds
    python -m benchmarks loop --gib 1 --rounds 7      # only what a save costs a busy loop
    python -m benchmarks durable restore --contenders 'ckptengine,dcp.save'
    python -m benchmarks --from results.json          # the table of an earlier run once more
    python -m benchmarks.plot results.json            # a PNG beside it

Workloads: save_restore (all of the following), durable (stall of the call and time to durable,
trainer idle), loop (whole cost of a save to a busy loop, and time to durable in it), restore (page
cache warm and cold). `benchmarks/save_restore.py` says what each figure means.

The table goes to standard output, progress to standard error, raw samples to --json. The directory
must be on the disk to be measured (not tmpfs), with room for three times the state; memory for
about eight times the state is needed with all contenders. Let nothing else run on the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

WORKLOADS: dict[str, tuple[str, ...]] = {
    "save_restore": ("durable", "loop", "restore"),
    "durable": ("durable",),
    "loop": ("loop",),
    "restore": ("restore",),
}


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
    known = ", ".join(WORKLOADS)
    parser.add_argument("workload", nargs="*", help=f"of {known}; default: the first")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds not counted (default 1)")
    parser.add_argument(
        "--steps", type=int, default=8, help="least steps with a save, and without (default 8)"
    )
    parser.add_argument("--dir", type=Path, help="scratch directory on the disk to be measured")
    parser.add_argument("--json", type=Path, default=Path("benchmark.json"), help="raw results")
    parser.add_argument("--png", type=Path, help="also draw a plot")
    parser.add_argument("--contenders", help="comma-separated names (default: all)")
    parser.add_argument("--from", dest="table_from", type=Path, help="show an earlier run's JSON")
    args = parser.parse_args()
    if unknown := set(args.workload) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {known}")
    if args.rounds < 1 or args.warmup < 1 or args.steps < 2:
        parser.error("at least one round, one of warm-up and two steps are needed")
    return args


def _measure(args: argparse.Namespace) -> dict[str, object]:
    # Imported here: a peer's worker process imports this file again and needs none of it.
    import torch

    from . import contenders, harness, limits, machine
    from .save_restore import SaveRestore
    from .trainer import Trainer, blank_like

    names = args.contenders.split(",") if args.contenders else list(contenders.ALL)
    if unknown := [name for name in names if name not in contenders.ALL]:
        sys.exit(f"no contender {unknown[0]!r}; there are {', '.join(contenders.ALL)}")
    chosen = args.workload or ["save_restore"]
    parts = tuple(sorted({part for name in chosen for part in WORKLOADS[name]}))
    nbytes = int(args.gib * 2**30)
    if args.dir:
        args.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="benchmark-", dir=args.dir or Path.cwd()))
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        free = shutil.disk_usage(directory).free
        if free < 3 * nbytes:
            sys.exit(f"{directory} has {free / 1e9:.1f} GB free, {3 * nbytes / 1e9:.1f} are needed")
        harness.say(f"making {args.gib:g} GiB of state")
        trainer = Trainer(nbytes)
        target = blank_like(trainer.state)
        arena = limits.Arena(trainer.state)
        limit_entries: list[harness.Entry] = [
            limits.CopyLimit(arena),
            *([limits.WriteLimit(arena, directory)] if {"durable", "loop"} & set(parts) else []),
            *([limits.ReadLimit(arena, directory)] if "restore" in parts else []),
        ]
        racers: list[harness.Entry] = [
            SaveRestore(contenders.ALL[name](), trainer, target, directory, parts, args.steps)
            for name in names
        ]
        facts = machine.facts(directory)
        run = harness.run([*limit_entries, *racers], args.rounds, args.warmup)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    entries = run.pop("entries")
    return {
        "format": 1,
        "started": started,
        "machine": facts,
        "settings": {
            "workloads": chosen,
            "rounds": args.rounds,
            "warmup": args.warmup,
            "steps": args.steps,
            "torch_threads": torch.get_num_threads(),
        },
        "state": {
            "bytes": trainer.nbytes,
            "items": trainer.items,
            "products_per_step": trainer.products,
        },
        **run,
        "limits": {entry.name: entries[entry.name] for entry in limit_entries},
        "contenders": {name: entries[name] for name in names},
    }


if __name__ == "__main__":
    main()

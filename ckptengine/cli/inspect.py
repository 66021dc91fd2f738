"""`ckptengine inspect`: what is in a checkpoint, without reading its tensors."""

from __future__ import annotations

import argparse
import json

from ..restore.contents import Contents, contents
from ..restore.locate import locate
from .output import moment, print_json, print_table, size

HELP = (
    "Shows a checkpoint's commit record and every key in it: tensors with dtype, shape and size, "
    "plain values as they are. The keys are those that `ckptengine.load(keys=...)` takes."
)

_WIDTH = 60  # characters of a value in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help="a checkpoint's directory, or a run's (its newest)")
    parser.add_argument("--step", type=int, help="the step, in a run's directory")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def run(args: argparse.Namespace) -> int:
    located = locate(args.path, args.step)
    manifest = located.manifest
    found = contents(located)
    if args.json:
        print_json(
            {
                "path": located.path,
                "step": manifest.step,
                "attempt": manifest.attempt,
                "created": manifest.created,
                "world_size": manifest.world_size,
                "candidate": manifest.candidate,
                "nbytes": manifest.nbytes,
                "user": manifest.user,
                "metrics": dict(manifest.metrics),
                "files": {name: entry._asdict() for name, entry in manifest.files.items()},
                "tensors": {
                    key: {
                        "dtype": t.dtype,
                        "shape": t.shape,
                        "stride": t.stride,
                        "nbytes": t.nbytes,
                    }
                    for key, t in found.tensors.items()
                },
                "values": found.values,
            }
        )
        return 0
    print(f"{located.path}{'  (candidate)' if manifest.candidate else ''}")
    print(
        f"step {manifest.step}, attempt {manifest.attempt}, made {moment(manifest.created)} by "
        f"{manifest.world_size} rank(s); {len(manifest.files)} files, {size(manifest.nbytes)}"
    )
    for name, value in (("user", manifest.user), ("metrics", dict(manifest.metrics))):
        if value:
            print(f"{name}: {json.dumps(value)}")
    print()
    print_table(("KEY", "KIND", "SHAPE", "SIZE"), _rows(found), right="SIZE")
    return 0


def _rows(found: Contents) -> list[tuple[str, str, str, str]]:
    tensors = [
        (key, t.dtype, "x".join(map(str, t.shape)) or "scalar", size(t.nbytes))
        for key, t in found.tensors.items()
    ]
    values = [(key, "value", _shortened(json.dumps(v)), "-") for key, v in found.values.items()]
    return tensors + values


def _shortened(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."

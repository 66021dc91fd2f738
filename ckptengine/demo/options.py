"""What the demo can be told. Imports no torch, so that `--help` and mistakes answer at once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError


@dataclass(frozen=True)
class Size:
    """A model, its batches and the machine's share that it uses."""

    layers: int
    heads: int
    width: int
    context: int  # tokens that the model sees
    batch: int  # sequences a step
    text: int  # bytes of text to train on, at most
    threads: int  # fixed, because sums are grouped by thread: another count, other last bits


SIZES = {
    "tiny": Size(layers=2, heads=2, width=32, context=32, batch=4, text=200_000, threads=1),
    "small": Size(layers=4, heads=4, width=256, context=64, batch=8, text=4_000_000, threads=2),
    "medium": Size(layers=12, heads=12, width=768, context=512, batch=8, text=4_000_000, threads=8),
}


@dataclass(frozen=True)
class Options:
    """One run of the demo."""

    dir: Path = Path("runs/demo")
    steps: int = 200  # optimizer steps in all
    every: int = 25  # steps between two saves
    keep: int | None = 3  # newest checkpoints to keep; None keeps all
    kill_at: int | None = None  # step whose save is cut by SIGKILL, once per directory
    size: str = "small"
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("steps", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, not {getattr(self, name)}")
        if self.kill_at is not None and not self.saves_at(self.kill_at):
            raise ConfigError(
                f"--kill-at {self.kill_at}: no save happens at that step. Give a multiple of "
                f"--every ({self.every}) up to --steps ({self.steps})"
            )

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is saved after that step."""
        return 0 < step <= self.steps and (step % self.every == 0 or step == self.steps)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir",
        type=Path,
        default=Options.dir,
        help="where the run keeps its checkpoints (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=Options.steps, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--every",
        type=int,
        default=Options.every,
        help="steps between two saves (default: %(default)s)",
    )
    parser.add_argument(
        "--keep",
        type=int,
        default=Options.keep,
        help="newest checkpoints to keep, 0 for all (default: %(default)s)",
    )
    parser.add_argument(
        "--kill-at",
        type=int,
        metavar="STEP",
        help="die by SIGKILL in the middle of the save at this step, once per directory",
    )
    parser.add_argument(
        "--size",
        choices=SIZES,
        default=Options.size,
        help="tiny is for tests, medium for a GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=Options.seed, help="of weights, order and dropout"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default=Options.device,
        help="auto takes a GPU where there is one (default: %(default)s)",
    )


def from_args(args: argparse.Namespace) -> Options:
    return Options(
        dir=args.dir,
        steps=args.steps,
        every=args.every,
        keep=args.keep or None,
        kill_at=args.kill_at,
        size=args.size,
        seed=args.seed,
        device=args.device,
    )

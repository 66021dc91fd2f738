"""``ckptengine demo``: the main job of the library on real input, in one command."""

from __future__ import annotations

import argparse
import warnings

from ..demo.options import add_arguments, from_args

__all__ = ["HELP", "add_arguments", "run"]

HELP = """\
Trains a small GPT on the sources of Python's standard library and saves as it goes. Shows what
each checkpoint cost the loop and how long it took to be durable. The same command again resumes.
With --kill-at N the run kills itself (SIGKILL) in the middle of the save at step N, once: resumed,
it ends with the same weights, bit by bit, as a run that was never interrupted."""


def run(args: argparse.Namespace) -> int:
    options = from_args(args)
    # torch warns of a package that one of our dependencies brings; nothing a user could act on.
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
    from ..demo.run import train

    return train(options)

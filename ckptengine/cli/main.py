"""The command line: one sub-command a file, loaded only when chosen.

Exit codes, for scripts:

    0    done, and nothing is wrong
    1    failed: a store, a process or another rank, as the message says
    2    wrong usage: an argument or a combination of arguments
    3    not found: no such directory, checkpoint, step or key
    4    corrupt or incomplete: bytes do not verify, or parts are missing
    5    conflict: another live owner has the directory
    130  interrupted

Nothing heavy is imported here: `ckptengine ls` must start in under 0.3 s, without torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from .. import __version__
from ..errors import (
    CheckpointError,
    ConfigError,
    ConflictError,
    CorruptError,
    IncompleteError,
    NotFoundError,
)

COMMANDS = {
    "demo": "train a small GPT and watch its checkpoints, or kill it and see it resume",
    "ls": "list the checkpoints of a directory",
    "verify": "read checkpoints and compare every byte with its checksum",
    "inspect": "show what is in a checkpoint",
    "diff": "compare two checkpoints",
    "gc": "delete what is not kept, and what dead processes left behind",
}

EXIT_CODES = """\
exit codes: 0 done; 1 failed; 2 wrong usage; 3 not found; 4 corrupt or incomplete;
5 another live owner has the directory; 130 interrupted"""


class Command(Protocol):
    """What each module of this package offers."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; the codes stand in the module's docstring."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="ckptengine",
        description="Checkpoint engine for any PyTorch training loop.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ckptengine {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # No option before the command takes a value, so the first plain word is the command.
    chosen = next((word for word in words if not word.startswith("-")), None)
    command: Command | None = None
    for name, summary in COMMANDS.items():
        subparser = choices.add_parser(
            name,
            help=summary,
            epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == chosen:
            command = cast(Command, importlib.import_module(f".{name}", __package__))
            subparser.description = command.HELP
            command.add_arguments(subparser)
    args = parser.parse_args(words)
    assert command is not None, "argparse accepts only the names of COMMANDS"

    try:
        code = command.run(args)
        sys.stdout.flush()  # here, so that a closed pipe shows while it can be handled
        return code
    except CheckpointError as error:
        print(f"ckptengine: error: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as the shell reports a death by SIGPIPE


def exit_code(error: CheckpointError) -> int:
    """The exit code that tells a script what kind of error it was."""
    if isinstance(error, ConfigError):
        return 2
    if isinstance(error, NotFoundError):
        return 3
    if isinstance(error, (CorruptError, IncompleteError)):
        return 4
    if isinstance(error, ConflictError):
        return 5
    return 1

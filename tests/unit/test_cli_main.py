"""The dispatcher: lazy, and with exit codes that a script can act on."""

from __future__ import annotations

import argparse
import subprocess
import sys
from types import ModuleType

import pytest

from ckptengine import errors
from ckptengine.cli import main as dispatcher


class Fake(ModuleType):
    HELP = "A command of this test."

    def __init__(self, outcome: BaseException | int) -> None:
        super().__init__("ckptengine.cli.ls")
        self.outcome = outcome

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("path")

    def run(self, args: argparse.Namespace) -> int:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        print(f"ran on {args.path}")
        return self.outcome


def outcome_of(
    monkeypatch: pytest.MonkeyPatch, outcome: BaseException | int, *arguments: str
) -> int:
    monkeypatch.setitem(sys.modules, "ckptengine.cli.ls", Fake(outcome))
    return dispatcher.main(["ls", *arguments])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("why"), 2),
        (errors.NotFoundError("why"), 3),
        (errors.CorruptError("why"), 4),
        (errors.IncompleteError("why"), 4),
        (errors.ConflictError("why"), 5),
        (errors.StoreError("why"), 1),
        (errors.WorkerDiedError("why"), 1),
        (errors.RankFailedError("why", rank=3), 1),
        (errors.StateError("why"), 1),
    ],
)
def test_each_kind_of_error_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: errors.CheckpointError,
    code: int,
) -> None:
    assert outcome_of(monkeypatch, error, "somewhere") == code
    shown = capsys.readouterr()
    assert shown.err == "ckptengine: error: why\n"
    assert shown.out == ""


def test_a_command_gets_its_arguments_and_gives_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome_of(monkeypatch, 4, "somewhere") == 4
    assert capsys.readouterr().out == "ran on somewhere\n"


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome_of(monkeypatch, KeyboardInterrupt(), "somewhere") == 130


def test_errors_that_are_not_ours_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        outcome_of(monkeypatch, ZeroDivisionError(), "somewhere")


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["--nonsense", "demo"]])
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        dispatcher.main(arguments)
    assert stopped.value.code == 2
    assert "usage: ckptengine" in capsys.readouterr().err


def test_help_lists_all_commands_and_the_exit_codes_and_imports_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        dispatcher.main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in dispatcher.COMMANDS)
    assert "exit codes: 0 done" in shown


def test_the_dispatcher_and_the_demos_help_need_neither_torch_nor_numpy() -> None:
    program = (
        "import sys\n"
        "from ckptengine.cli.main import main\n"
        "try: main(['demo', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'fsspec'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_a_closed_pipe_is_silent() -> None:
    program = (
        "import sys, argparse, types\n"
        "fake = types.ModuleType('ckptengine.cli.ls')\n"
        "fake.HELP = ''\n"
        "fake.add_arguments = lambda parser: None\n"
        "fake.run = lambda args: print('x' * 1_000_000) or 0\n"
        "sys.modules[fake.__name__] = fake\n"
        "from ckptengine.cli.main import main\n"
        "sys.exit(main(['ls']))"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert run.stdout and run.stderr
    run.stdout.close()
    assert run.stderr.read() == b""
    run.stderr.close()
    assert run.wait() == 141

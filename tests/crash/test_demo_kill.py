"""The main job survives kill -9: resumed, it ends bit-equal to a run that was never interrupted."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("demo_campaign.py")
TINY = ["--size", "tiny", "--device", "cpu", "--steps", "120", "--every", "6"]


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "ckptengine", "demo", "--dir", str(folder), *TINY, *more]


def finished(folder: Path, *more: str, code: int = 0) -> str:
    """What the demo printed, once it has ended with `code`."""
    done = subprocess.run(command(folder, *more), capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def digest(output: str) -> str:
    found = re.findall(r"^weights sha256 ([0-9a-f]{64})$", output, re.M)
    assert len(found) == 1, output
    return str(found[0])


def resumed_from(output: str) -> int:
    found = re.search(r"^resumed from step (\d+) ", output, re.M)
    return int(found[1]) if found else 0


def newest_durable(output: str) -> int:
    return max((int(s) for s in re.findall(r"checkpoint (\d+): durable", output)), default=0)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest that every other run must arrive at."""
    return digest(finished(tmp_path_factory.mktemp("uninterrupted") / "run"))


@pytest.mark.parametrize("step", [6, 24])  # the first save, and one with others before it
def test_killed_in_the_middle_of_a_save_it_resumes_bit_equal(
    tmp_path: Path, uninterrupted: str, step: int
) -> None:
    kill = ["--kill-at", str(step)]
    finished(tmp_path / "run", *kill, code=-signal.SIGKILL)
    second = finished(tmp_path / "run", *kill)
    # The call had returned, so the state was captured, and the persister outlives the trainer.
    assert resumed_from(second) == step
    assert digest(second) == uninterrupted


def test_a_finished_run_is_left_as_it_is(tmp_path: Path, uninterrupted: str) -> None:
    finished(tmp_path / "run")
    again = finished(tmp_path / "run")
    assert resumed_from(again) == 120
    assert "nothing is left to train" in again
    assert digest(again) == uninterrupted


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_a_random_moment_it_resumes_bit_equal(
    tmp_path: Path, uninterrupted: str, seed: int
) -> None:
    log = tmp_path / "log"
    with log.open("w") as out:
        run = subprocess.Popen(command(tmp_path / "run"), stdout=out, stderr=out)
        try:
            # From its first checkpoint on: start-up takes far longer than the training.
            deadline = time.monotonic() + 60
            while run.poll() is None and "  checkpoint " not in log.read_text():
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.005)
            time.sleep(random.Random(seed).uniform(0, 0.2))
        finally:
            run.kill()
            code = run.wait()
    assert code == -signal.SIGKILL, f"it ended by itself, with {code}:\n{log.read_text()}"
    last = finished(tmp_path / "run")
    assert resumed_from(last) >= newest_durable(log.read_text())
    assert digest(last) == uninterrupted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kill-at", "7"], "no save happens at that step"),
        (["--every", "0"], "--every must be at least 1"),
    ],
)
def test_wrong_options_are_a_usage_error(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = subprocess.run(
        command(tmp_path / "run", *arguments), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("ckptengine: error: ")
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_two_hundred_kills(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(tmp_path), "200"],
        capture_output=True,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    assert report["kills"] >= 200
    assert report["finished runs"] >= 3
    assert min(report["by target"].values()) >= 20

"""Kills the demo again and again and checks each resume: ``demo_campaign.py FOLDER KILLS``.

A process of its own that imports torch once and forks each trainer, so that a kill costs the
training and not the import. It must start no threads before it forks: run it with
OPENBLAS_NUM_THREADS=1. Prints one line of JSON, or dies with the output of the run that failed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import sys
import time
import uuid
import warnings
from collections import Counter
from pathlib import Path

warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)

import torch  # noqa: E402

import ckptengine  # noqa: E402
from ckptengine.demo.options import Options  # noqa: E402
from ckptengine.demo.run import train  # noqa: E402

STEPS, EVERY = 60, 6
MARK = "CKPTENGINE_CAMPAIGN"
TARGETS = (
    "trainer",  # as the kernel does when memory runs out
    "group",  # as launchers do: the trainer's whole process group
    "everything",  # as a node does when it stops: the persister dies with the trainer
)


def start(folder: Path, log: Path) -> int:
    """Forks a trainer that leads a process group of its own; returns its pid."""
    log.write_text("")  # not left to the child, which may be killed before it gets there
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = train(Options(dir=folder, steps=STEPS, every=EVERY, size="tiny", device="cpu"))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int, within: float) -> int | None:
    """The wait status once the process has ended, or None if it has not `within` seconds."""
    deadline = time.monotonic() + within
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(0.005, left))


def descendants() -> list[int]:
    """Processes that the trainers have started: those whose program began with our mark.

    The campaign and its trainers are not among them, since they set it after their own start.
    """
    wanted = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended meanwhile
    return found


def kill(pid: int, target: str) -> None:
    os.kill(pid, signal.SIGKILL)
    if target == "group":
        with contextlib.suppress(ProcessLookupError):  # too young to have a group
            os.killpg(pid, signal.SIGKILL)
    elif target == "everything":
        for other in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)


def check(condition: bool, what: str, log: Path) -> None:
    if not condition:
        sys.exit(f"{what}\n--- {log}\n{log.read_text()}")


def resumed_from(output: str) -> int:
    found = re.search(r"^resumed from step (\d+) ", output, re.M)
    return int(found[1]) if found else 0


def newest_durable(output: str) -> int:
    return max((int(s) for s in re.findall(r"checkpoint (\d+): durable", output)), default=0)


def digest(output: str) -> str:
    found = re.search(r"^weights sha256 ([0-9a-f]{64})$", output, re.M)
    return found[1] if found else ""


def main(folder: Path, kills: int) -> None:
    os.environ[MARK] = uuid.uuid4().hex
    # All imports happen here, none in the children; an optimizer's first use imports a lot.
    ckptengine.Engine  # noqa: B018
    torch.optim.AdamW([torch.zeros(1)])
    tasks = len(os.listdir("/proc/self/task"))
    if tasks != 1:
        sys.exit(f"{tasks} threads run before the first fork; set OPENBLAS_NUM_THREADS=1")

    log = folder / "log"
    began = time.monotonic()
    pid = start(folder / "uninterrupted", log)
    status = ended(pid, 120)
    check(status == 0, f"the uninterrupted run ended with {status}", log)
    length = time.monotonic() - began
    expected = digest(log.read_text())
    check(bool(expected), "the uninterrupted run printed no digest", log)

    chance = random.Random(0)
    targets = itertools.cycle(TARGETS)
    killed: Counter[str] = Counter()
    resumes = 0
    runs = 0
    for number in itertools.count():
        if sum(killed.values()) >= kills:
            break
        run = folder / f"run{number}"
        durable = 0
        for target in targets:
            pid = start(run, log)
            status = ended(pid, chance.uniform(0, length))
            alive = status is None
            if alive:
                kill(pid, target)
                status = ended(pid, 30)
            output = log.read_text()
            check(
                "training" not in output or resumed_from(output) >= durable,
                f"resumed from {resumed_from(output)}, but {durable} was durable",
                log,
            )
            durable = max(durable, newest_durable(output))
            resumes += resumed_from(output) > 0
            if status == 0:  # it may have ended just before the kill
                check(digest(output) == expected, f"{run}: other weights than {expected}", log)
                check(not list(run.glob(".tmp-*")), f"{run}: temporary directories left", log)
                runs += 1
                break
            check(alive, f"{run}: ended with {status} by itself", log)
            killed[target] += 1

    deadline = time.monotonic() + 60
    while descendants() and time.monotonic() < deadline:
        time.sleep(0.1)
    report = {
        "kills": sum(killed.values()),
        "by target": killed,
        "resumes": resumes,
        "finished runs": runs,
        "seconds": round(time.monotonic() - began, 1),
        "uninterrupted seconds": round(length, 2),
        "processes left": len(descendants()),
    }
    print(json.dumps(report))
    if report["processes left"]:
        sys.exit("processes are left a minute after the last kill")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

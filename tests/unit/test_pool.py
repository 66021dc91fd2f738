"""Jobs handed to a process: every one of them ends, with its result or with the reason why not."""

from __future__ import annotations

import json
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptengine as ce
from ckptengine.errors import CheckpointError, StoreError, WorkerDiedError
from ckptengine.persist.pool import Job, Pool, SharedMemory, new_id
from ckptengine.types import PAGE

Until = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("family")

WORKER = """
import os, signal, time
from ckptengine import errors
from ckptengine.persist import worker

def run(job):
    request = job.request
    do = request["do"]
    if do == "echo":
        job.send({"image": bytes(job.image[:4]).decode(), "plan": bytes(job.plan).decode(),
                  "plan_id": job.plan_id, "length": len(request.get("text", "")), "pid": os.getpid()})
    elif do == "write":
        job.image[:4] = b"back"
        job.send({})
    elif do == "raise":
        raise getattr(errors, request["type"], RuntimeError)(request["text"])
    elif do == "store":
        raise errors.StoreError(request["text"], retryable=True, errno=28)
    elif do == "abandoned":
        raise worker.Abandoned
    elif do == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "answer and die":
        job.send({"answered": True})
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "block":
        while not os.path.exists(request["until"]):
            time.sleep(0.002)
        job.send({"alive": job.owner_alive()})
    elif do == "mapped":
        job.send({"mapped": sum("memfd:test" in line for line in open("/proc/self/maps")),
                  "fds": len(os.listdir("/proc/self/fd"))})

def main(connection, owner):
    worker.serve_jobs(connection, owner, run)
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "obliging_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(str(folder))
    pool = Pool("obliging_worker")
    yield pool
    pool.close()


class Memory:
    """Shared memory as an arena's or a plan's."""

    def __init__(self, content: bytes, page: int = PAGE) -> None:
        self.fd = os.memfd_create("test")
        os.ftruncate(self.fd, page + len(content))
        os.pwrite(self.fd, content, page)
        self.shared = SharedMemory(new_id(), self.fd, page + len(content))

    def read(self) -> bytes:
        with mmap.mmap(self.fd, self.shared.nbytes) as memory:
            return bytes(memory[PAGE:])

    def close(self) -> None:
        os.close(self.fd)


@pytest.fixture
def memory() -> Iterator[Callable[..., Memory]]:
    made: list[Memory] = []

    def make(content: bytes = b"data", page: int = PAGE) -> Memory:
        made.append(Memory(content, page))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def submit(pool: Pool, memory: Callable[..., Memory]) -> Callable[..., Job]:
    arena, plan = memory(b"data"), memory(b"plan", page=0)

    def submit(do: str, *, on_done: Callable[[Job], None] = lambda job: None, **more: Any) -> Job:
        live = [arena.shared.id, plan.shared.id]
        return pool.submit({"do": do, **more}, arena.shared, plan.shared, live, on_done)

    return submit


def ended(job: Job) -> Job:
    assert job.wait(60), "it has not ended"
    return job


def test_a_job_gets_all_it_needs_and_its_result_comes_back(submit: Callable[..., Job]) -> None:
    told: list[Job] = []
    job = ended(submit("echo", on_done=told.append, text="\N{SNOWMAN}" * 1_000_000))
    assert told == [job]
    assert job.error is None
    assert job.result is not None
    assert (job.result["image"], job.result["plan"]) == ("data", "plan")
    assert job.result["length"] == 1_000_000  # longer than a message may be


def test_jobs_are_done_in_order_by_one_process(submit: Callable[..., Job], pool: Pool) -> None:
    order: list[int] = []
    jobs = [submit("echo", on_done=lambda job: order.append(job.number)) for _ in range(20)]
    pids = {ended(job).result["pid"] for job in jobs}  # type: ignore[index]
    assert order == [job.number for job in jobs]
    assert pids == {pool.pid()}


def test_the_arena_is_written_by_both(pool: Pool, memory: Callable[..., Memory]) -> None:
    arena, plan = memory(b"data"), memory(b"", page=1)
    ended(
        pool.submit(
            {"do": "write"}, arena.shared, plan.shared, [arena.shared.id, plan.shared.id], print
        )
    )
    assert arena.read() == b"back"


def test_memory_that_is_gone_is_unmapped_there(pool: Pool, memory: Callable[..., Memory]) -> None:
    plan = memory(b"plan", page=0)
    found = []
    for size in (1, 100, 10_000, 1_000_000):
        arena = memory(bytes(size))
        live = [arena.shared.id, plan.shared.id]
        job = ended(
            pool.submit({"do": "mapped"}, arena.shared, plan.shared, live, lambda job: None)
        )
        found.append(job.result)
    assert [(r["mapped"], r["fds"]) for r in found if r] == [(2, found[0]["fds"])] * 4  # type: ignore[index]


@pytest.mark.parametrize("kind", ["ConflictError", "CorruptError", "IncompleteError"])
def test_our_own_errors_come_back_as_they_were(submit: Callable[..., Job], kind: str) -> None:
    error = ended(submit("raise", type=kind, text="what and where")).error
    assert type(error) is getattr(ce, kind)
    assert str(error) == "what and where"


def test_a_store_error_keeps_its_particulars(submit: Callable[..., Job]) -> None:
    error = ended(submit("store", text="ENOSPC while writing")).error
    assert isinstance(error, StoreError)
    assert (str(error), error.retryable, error.errno) == ("ENOSPC while writing", True, 28)


def test_an_error_that_nobody_expected_brings_its_traceback(submit: Callable[..., Job]) -> None:
    error = ended(submit("raise", type="?", text="unheard of")).error
    assert type(error) is CheckpointError
    assert "RuntimeError: unheard of" in str(error)
    assert "obliging_worker.py" in str(error)


@pytest.mark.parametrize("text", ["x" * 1_000_000, "\N{SNOWMAN}" * 1_000_000, "\0" * 1_000_000])
def test_an_error_of_any_length_comes_back(submit: Callable[..., Job], text: str) -> None:
    error = ended(submit("store", text=text)).error
    assert isinstance(error, StoreError)
    assert str(error)[:100] == text[:100]


def test_a_capture_that_was_given_up(submit: Callable[..., Job]) -> None:
    assert "given up" in str(ended(submit("abandoned")).error)


def test_a_death_ends_its_jobs_and_the_next_is_done_by_another(
    submit: Callable[..., Job], tmp_path: Path
) -> None:
    before = submit("block", until=str(tmp_path / "go"))
    jobs = [submit("die"), submit("echo"), submit("echo")]
    (tmp_path / "go").touch()
    assert ended(before).result is not None
    for job in jobs:
        assert isinstance(ended(job).error, WorkerDiedError)
        assert "signal 9 (SIGKILL)" in str(job.error)
    assert ended(submit("echo")).result is not None


def test_an_answer_before_death_counts(submit: Callable[..., Job], tmp_path: Path) -> None:
    for number in range(10):
        go = tmp_path / f"go{number}"
        submit("block", until=str(go))
        job, behind = submit("answer and die"), submit("echo")
        go.touch()
        assert ended(job).result == {"job": job.number, "answered": True}
        assert isinstance(ended(behind).error, WorkerDiedError)


def test_kill(submit: Callable[..., Job], pool: Pool, tmp_path: Path) -> None:
    jobs = [submit("block", until=str(tmp_path / "never")), submit("echo")]
    error = StoreError("no progress")
    pool.kill(error)
    assert [job.error for job in jobs] == [error, error]
    assert pool.pid() is None
    pool.kill(error)  # nobody is there
    assert ended(submit("echo")).result is not None


def test_close_lets_it_leave_and_ends_what_is_on_its_way(
    submit: Callable[..., Job], pool: Pool, tmp_path: Path, until: Until
) -> None:
    job = submit("block", until=str(tmp_path / "go"))
    threading.Timer(0.3, (tmp_path / "go").touch).start()
    pool.close()
    assert ended(job).result is not None or "closed" in str(job.error)
    pool.close()
    with pytest.raises(CheckpointError, match="closed"):
        submit("echo")


def test_what_a_listener_raises_ends_nothing(submit: Callable[..., Job]) -> None:
    def raises(job: Job) -> None:
        raise RuntimeError("of the user")

    assert ended(submit("echo", on_done=raises)).result is not None
    assert ended(submit("echo")).result is not None


def test_a_watcher_that_fails_tells_those_who_wait(
    submit: Callable[..., Job], pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(submit("echo"))

    def fails(persister: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("cannot read")

    monkeypatch.setattr(pool, "_take_results", fails)
    error = ended(submit("echo")).error
    assert "cannot read" in str(error)
    assert ended(submit("echo")).result is not None


def test_a_job_that_could_not_be_sent_is_forgotten(
    submit: Callable[..., Job], pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    ended(submit("echo"))

    def refuse(*args: Any) -> None:
        raise OSError(109, "Too many references")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "send_fds", refuse)
        with pytest.raises(OSError, match="references"):
            submit("echo")
    assert pool._jobs == {}
    assert ended(submit("echo")).result is not None


def test_an_idle_one_that_died_is_no_obstacle_to_leaving(
    submit: Callable[..., Job], pool: Pool
) -> None:
    ended(submit("echo"))
    os.kill(pool.pid() or 0, signal.SIGKILL)
    pool.close()


def test_many_pools_at_once(pool: Pool, memory: Callable[..., Memory], tmp_path: Path) -> None:
    pools = [Pool("obliging_worker") for _ in range(4)]
    arena, plan = memory(), memory(b"plan", page=0)
    try:
        jobs = [
            one.submit({"do": "echo"}, arena.shared, plan.shared, [], lambda job: None)
            for one in (*pools, pool)
        ]
        pids = {ended(job).result["pid"] for job in jobs}  # type: ignore[index]
        assert len(pids) == 5
    finally:
        for one in pools:
            one.close()


def test_a_request_is_plain_data(submit: Callable[..., Job]) -> None:
    with pytest.raises(TypeError):
        submit("echo", text=object())
    assert ended(submit("echo", text=json.loads('{"a": [1, null]}'))).result is not None

"""The persister's main: turns a captured arena into a committed checkpoint.

Runs in a process without torch. Everything constant came with the plan; what is left to do is to
write the image, fill in checksums, write the index and the commit record, and make room.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from dataclasses import asdict
from typing import Any, NamedTuple

from . import retention
from .config import Keep
from .errors import CheckpointError
from .format import index
from .format.checksum import Segment, segments, table_digest
from .format.manifest import FileEntry, Manifest
from .persist import direct
from .persist.worker import Abandoned, Job, serve_jobs
from .repository import Repository, Stage
from .store import local
from .store.ownership import FileKey, check_unchanged, claim_for_persister
from .types import ArenaLayout, CheckpointId, Chunk, FileLayout

_POLL = 0.0005
"""Seconds between two looks at the capture's counter, while the write waits for it."""


class PlanBlob(NamedTuple):
    """The part of a plan that the persister needs."""

    layout: ArenaLayout
    tilings: tuple[list[Segment], ...]  # of each file
    metadata: bytes
    index_frame: bytes


_HEAD = struct.Struct("<QQQ")
_CHUNK = struct.Struct("<QQQQ")


def pack_plan(layout: ArenaLayout, metadata: bytes, index_frame: bytes) -> bytes:
    """The bytes in which the trainer hands a plan over."""
    files = json.dumps(
        [[f.name, f.arena_offset, f.nbytes, len(f.chunks)] for f in layout.files] + [layout.nbytes]
    ).encode()
    chunks = b"".join(
        _CHUNK.pack(c.offset, c.nbytes, *c.crc_at) for f in layout.files for c in f.chunks
    )
    head = _HEAD.pack(len(files), len(metadata), len(index_frame))
    return b"".join([head, files, metadata, index_frame, chunks])


def unpack_plan(blob: memoryview) -> PlanBlob:
    """The plan in `blob`."""
    files_len, metadata_len, frame_len = _HEAD.unpack_from(blob, 0)
    at = _HEAD.size
    *files, nbytes = json.loads(bytes(blob[at : at + files_len]))
    at += files_len
    metadata = bytes(blob[at : at + metadata_len])
    at += metadata_len
    frame = bytes(blob[at : at + frame_len])
    at += frame_len
    layouts = []
    for name, arena_offset, file_nbytes, count in files:
        raw = blob[at : at + count * _CHUNK.size]
        at += count * _CHUNK.size
        chunks = tuple(
            Chunk(offset, size, (one, other))
            for offset, size, one, other in _CHUNK.iter_unpack(raw)
        )
        layouts.append(FileLayout(name, arena_offset, file_nbytes, chunks))
    layout = ArenaLayout(tuple(layouts), nbytes)
    tilings = tuple(list(segments(f.chunks, f.nbytes)) for f in layouts)
    return PlanBlob(layout, tilings, metadata, frame)


def save_request(
    *,
    root: str,
    owner: FileKey,
    checkpoint: CheckpointId,
    created: float,
    values: list[Any],
    user: Any,
    metrics: dict[str, float],
    candidate: bool,
    keep: Keep | None,
    protect: list[CheckpointId],
) -> dict[str, Any]:
    """What the trainer asks for, as plain data. `values`: tagged JSON of the plain values."""
    return {
        "root": root,
        "owner": owner,
        "step": checkpoint.step,
        "attempt": checkpoint.attempt,
        "created": created,
        "values": json.dumps(values, separators=(",", ":")),
        "user": user,
        "metrics": {name: repr(value) for name, value in metrics.items()},
        "candidate": candidate,
        "keep": asdict(keep) if keep else None,
        "protect": [[c.step, c.attempt] for c in protect],
    }


class Persister:
    """What one persister process keeps between jobs."""

    def __init__(self) -> None:
        self._plan: tuple[int, PlanBlob] | None = None
        self.claims: dict[str, int] = {}  # directory to the descriptor that holds its lock

    def run(self, job: Job) -> None:
        """Writes and commits one save, then makes room for the next."""
        root = job.request["root"]
        with local.store_errors("claiming", root):
            check_unchanged(root, tuple(job.request["owner"]))
            if root not in self.claims:
                self.claims[root] = claim_for_persister(root)
        if self._plan is None or self._plan[0] != job.plan_id:
            self._plan = (job.plan_id, unpack_plan(job.plan))
        _save(job, self._plan[1])


def _save(job: Job, plan: PlanBlob) -> None:
    request = job.request
    repository = Repository(request["root"])
    begun = time.monotonic()
    cpu = time.process_time()
    # Garbage, since nobody else may write here: of dead runs and persisters, or not yet removable
    # when last tried. It may hold the very space that this save needs.
    repository.sweep(repository.leftovers())
    stage = repository.stage(CheckpointId(request["step"], request["attempt"]))
    try:
        files, tables = _write_chunks(job, stage, plan)
        written = time.monotonic()
        files[index.DCP_METADATA] = stage.put(index.DCP_METADATA, plan.metadata)
        frames = plan.index_frame + index.dynamic_frame(request["values"].encode(), tables)
        files[index.name(0)] = stage.put(index.name(0), frames)
        manifest = Manifest(
            step=request["step"],
            attempt=request["attempt"],
            created=request["created"],
            world_size=1,
            files=files,
            user=request["user"],
            metrics={name: float(value) for name, value in request["metrics"].items()},
            candidate=request["candidate"],
        )
        path = stage.commit(manifest)
    except BaseException:
        stage.discard()
        raise
    committed = time.monotonic()
    job.send(
        {
            "committed": path,
            "nbytes": manifest.nbytes,
            "seconds": {"write": written - begun, "commit": committed - written},
            "cpu_seconds": time.process_time() - cpu,
        }
    )
    _make_room(repository, request, manifest.id)


def _write_chunks(
    job: Job, stage: Stage, plan: PlanBlob
) -> tuple[dict[str, FileEntry], dict[str, bytes]]:
    files: dict[str, FileEntry] = {}
    tables: dict[str, bytes] = {}

    def await_captured(nbytes: int) -> None:
        while job.control.captured < nbytes:
            if job.control.abandoned or not job.owner_alive():
                raise Abandoned
            time.sleep(_POLL)

    def progress(nbytes: int) -> None:
        job.control.written += nbytes

    for layout, tiling in zip(plan.layout.files, plan.tilings, strict=True):
        path = stage.file(layout.name)
        with local.store_errors(f"writing {layout.nbytes} bytes to", path):
            table = direct.write_file(path, job.image, layout, tiling, await_captured, progress)
        files[layout.name] = FileEntry(layout.nbytes, table_digest(table))
        tables[layout.name] = table
    await_captured(plan.layout.nbytes)
    return files, tables


def _make_room(repository: Repository, request: dict[str, Any], written: CheckpointId) -> None:
    """Deletes what may go. Failing to delete is reported in the log and never fails the save."""
    if request["keep"] is None:
        return
    try:
        protect = {written, *(CheckpointId(*pair) for pair in request["protect"])}
        manifests = [repository.manifest(c) for c in repository.ids() if repository.intact(c)]
        for checkpoint in retention.removable(manifests, Keep(**request["keep"]), protect):
            repository.delete(checkpoint)
    except CheckpointError as error:
        print(f"could not make room: {error}", file=sys.stderr, flush=True)


def main(connection: int, owner: int) -> None:
    """The persister process."""
    serve_jobs(connection, owner, Persister().run)

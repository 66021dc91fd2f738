"""The persister's main: turns a captured arena into a committed checkpoint.

Runs in a process without torch. Everything constant came with the plan; what is left to do is to
write the image, fill in checksums, write the index and the commit record, and make room.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

from . import retention
from .config import Keep
from .errors import CheckpointError
from .format import index
from .format.checksum import Segment, segments, table_digest
from .format.manifest import FileEntry, Manifest
from .persist import direct
from .persist.direct import Sums
from .persist.worker import Abandoned, Job, serve_jobs
from .repository import Repository, Stage
from .reuse import Reuse
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
_CHUNK = struct.Struct("<QQQQQ")


def pack_plan(layout: ArenaLayout, metadata: bytes, index_frame: bytes) -> bytes:
    """The bytes in which the trainer hands a plan over."""
    files = json.dumps(
        [[f.name, f.arena_offset, f.nbytes, len(f.chunks)] for f in layout.files]
        + [layout.nbytes, layout.tensors, layout.marks]
    ).encode()
    chunks = b"".join(
        _CHUNK.pack(c.offset, c.nbytes, *c.crc_at, c.number) for f in layout.files for c in f.chunks
    )
    head = _HEAD.pack(len(files), len(metadata), len(index_frame))
    return b"".join([head, files, metadata, index_frame, chunks])


def unpack_plan(blob: memoryview) -> PlanBlob:
    """The plan in `blob`."""
    files_len, metadata_len, frame_len = _HEAD.unpack_from(blob, 0)
    at = _HEAD.size
    *files, nbytes, tensors, marks = json.loads(bytes(blob[at : at + files_len]))
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
            Chunk(offset, size, (one, other), number)
            for offset, size, one, other, number in _CHUNK.iter_unpack(raw)
        )
        layouts.append(FileLayout(name, arena_offset, file_nbytes, chunks))
    layout = ArenaLayout(tuple(layouts), nbytes, tensors, marks)
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
    structure: int | None,
) -> dict[str, Any]:
    """What the trainer asks for, as plain data.

    `values`: tagged JSON of the plain values. `structure`: for an incremental save, a number that
    stays the same while tensors have the same numbers; None for others.
    """
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
        "structure": structure,
    }


class Persister:
    """What one persister process keeps between jobs."""

    def __init__(self) -> None:
        self._plan: tuple[int, PlanBlob] | None = None
        self._reuse: dict[str, Reuse] = {}  # by directory
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
        reuse = None
        if job.request["structure"] is not None:
            if root not in self._reuse:
                self._reuse[root] = Reuse(Repository(root))
            reuse = self._reuse[root]
        _save(job, self._plan[1], reuse)


def _save(job: Job, plan: PlanBlob, reuse: Reuse | None) -> None:
    request = job.request
    repository = Repository(request["root"])
    begun = time.monotonic()
    cpu = time.process_time()
    # Garbage, since nobody else may write here: of dead runs and persisters, or not yet removable
    # when last tried. It may hold the very space that this save needs.
    repository.sweep(repository.leftovers())
    stage = repository.stage(CheckpointId(request["step"], request["attempt"]))
    try:
        chunks = _ChunkFiles(job, stage, plan, reuse)
        chunks.write()
        written = time.monotonic()
        files = chunks.entries
        files[index.DCP_METADATA] = stage.put(index.DCP_METADATA, plan.metadata)
        frames = plan.index_frame + index.dynamic_frame(request["values"].encode(), chunks.tables)
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
    marked = chunks.mark(path)
    job.send(
        {
            "committed": path,
            "nbytes": manifest.nbytes,
            "nbytes_shared": chunks.nbytes_shared,
            "seconds": {"write": written - begun, "commit": committed - written},
            "cpu_seconds": time.process_time() - cpu,
            "marked": marked,
        }
    )
    _make_room(repository, request, manifest.id)


class _ChunkFiles:
    """The chunk files of one save: written, or shared with the checkpoint before."""

    def __init__(self, job: Job, stage: Stage, plan: PlanBlob, reuse: Reuse | None) -> None:
        self.entries: dict[str, FileEntry] = {}
        self.tables: dict[str, bytes] = {}
        self.nbytes_shared = 0
        self._job = job
        self._stage = stage
        self._plan = plan
        self._reuse = reuse
        self._sums: list[Sums] = []

    def write(self) -> None:
        """Follows the capture to its end."""
        layouts = self._plan.layout.files
        for number, (layout, tiling) in enumerate(zip(layouts, self._plan.tilings, strict=True)):
            sums = Sums(self._job.image, layout, tiling, hashed=self._reuse is not None)
            # The first file is of what is expected to change: it need not wait for its hash.
            if number:
                seen = 0
                for end in sums.take(self._await_captured):
                    self._progress(end - seen)
                    seen = end
                if not self._share(layout, sums):
                    self._write(layout, [layout.nbytes])
            else:
                self._write(layout, sums.take(self._await_captured))
            self.entries[layout.name] = FileEntry(layout.nbytes, table_digest(sums.table))
            self.tables[layout.name] = sums.table
            self._sums.append(sums)
        self._await_captured(self._plan.layout.nbytes)

    def mark(self, path: str) -> bool:
        """After the commit at `path`: notes what may be shared with the next checkpoint, and tells
        the trainer, in the image, which tensors did not change. False where that is not known."""
        reuse = self._reuse
        if reuse is None:
            return False
        layout, structure = self._plan.layout, self._job.request["structure"]
        digests = {n: digest for sums in self._sums for n, digest in sums.digests.items()}
        marks = reuse.unchanged(structure, digests, layout.tensors)
        if marks is not None:
            self._job.image[layout.marks : layout.marks + len(marks)] = marks
        pairs = list(zip(layout.files, self._sums, strict=True))[1:]
        reuse.committed(structure, digests, path, [(f.name, f.nbytes, sums) for f, sums in pairs])
        return marks is not None

    def _write(self, layout: FileLayout, final: Iterable[int]) -> None:
        path = self._stage.file(layout.name)
        with local.store_errors(f"writing {layout.nbytes} bytes to", path):
            direct.write_file(path, self._job.image, layout, final, self._progress)

    def _share(self, layout: FileLayout, sums: Sums) -> bool:
        if self._reuse is None:
            return False
        source = self._reuse.find(sums, self._job.image, layout, self._progress)
        if source is None or not self._stage.share(layout.name, source):
            return False
        self.nbytes_shared += layout.nbytes
        return True

    def _await_captured(self, nbytes: int) -> None:
        job = self._job
        while job.control.captured < nbytes:
            if job.control.abandoned or not job.owner_alive():
                raise Abandoned
            time.sleep(_POLL)

    def _progress(self, nbytes: int) -> None:
        self._job.control.written += nbytes


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

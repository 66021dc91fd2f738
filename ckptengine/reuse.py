"""Incremental saves: which files of a save lie unchanged in the checkpoint before it.

Bytes are the same where 128-bit hashes agree, or where the file itself was read and compared; a
CRC only says where comparing may be worth it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

from xxhash import xxh3_128_digest

from .errors import CheckpointError
from .persist.direct import Sums
from .repository import Repository
from .store import local
from .types import PART, FileLayout


class _File(NamedTuple):
    """A file of the last committed checkpoint."""

    path: str
    digest: bytes  # b"": written by another process, so nothing is known of its bytes
    inode: int
    modified: int  # ns


class Reuse:
    """What a persister knows of the last committed checkpoint in one directory.

    A file that this persister did not write is read once before it is shared: the checkpoint may
    have been damaged since, and sharing it would pass the damage on.
    """

    def __init__(self, repository: Repository) -> None:
        self._files = _written_before(repository)  # by size and CRC table
        self._structure = 0
        self._digests: dict[int, bytes] = {}  # of each tensor of the last committed save

    def find(
        self,
        sums: Sums,
        image: memoryview,
        layout: FileLayout,
        progress: Callable[[int], None],
    ) -> str | None:
        """The path of a committed file with the bytes that the image has for this one."""
        found = self._files.get((layout.nbytes, sums.table))
        if found is None:
            return None
        try:
            status = os.stat(found.path)
            # Changed in place by somebody, as by a stock `dcp.save` into the checkpoint: the file
            # that was shared so far is theirs now.
            if status.st_size != layout.nbytes or (found.inode, found.modified) != _stamp(status):
                return None
            if found.digest:
                return found.path if found.digest == sums.digest else None
            start = layout.arena_offset
            data = image[start : start + layout.nbytes]
            return found.path if _same(found.path, data, progress) else None
        except OSError:  # deleted, or unreadable: then it is written anew
            return None

    def unchanged(self, structure: int, digests: dict[int, bytes], count: int) -> bytes | None:
        """One byte for each of `count` tensors, 1 where it is as in the last committed save; None
        where that was a save of another structure."""
        if structure != self._structure:
            return None
        before = self._digests
        return bytes(
            number not in digests or before.get(number) == digests[number]
            for number in range(count)
        )

    def committed(
        self,
        structure: int,
        digests: dict[int, bytes],
        path: str,
        files: Iterable[tuple[str, int, Sums]],
    ) -> None:
        """From now on the checkpoint at `path` is the last one. `files`: those that may be shared,
        with their sizes."""
        self._structure, self._digests = structure, digests
        self._files = {}
        for name, nbytes, sums in files:
            where = os.path.join(path, name)
            try:
                stamp = _stamp(os.stat(where))
            except OSError:  # deleted already
                continue
            self._files[nbytes, sums.table] = _File(where, sums.digest, *stamp)


def _written_before(repository: Repository) -> dict[tuple[int, bytes], _File]:
    """The files of the newest whole checkpoint."""
    for checkpoint in reversed(repository.ids()):
        if not repository.intact(checkpoint):
            continue
        try:
            index = repository.index(checkpoint, repository.manifest(checkpoint), 0)
            paths = [os.path.join(repository.path(checkpoint), file.name) for file in index.files]
            return {
                (file.nbytes, table): _File(path, b"", *_stamp(os.stat(path)))
                for file, table, path in zip(index.files, index.tables, paths, strict=True)
            }
        except (CheckpointError, OSError):
            continue
    return {}


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def _same(path: str, data: memoryview, progress: Callable[[int], None]) -> bool:
    fd = local.open_for_reading(path)
    try:
        for start in range(0, len(data), PART):
            block = data[start : start + PART]
            found = os.pread(fd, len(block), start)
            if len(found) != len(block) or xxh3_128_digest(found) != xxh3_128_digest(block):
                return False
            progress(len(block))
        return True
    finally:
        os.close(fd)

"""Reads every byte of a checkpoint and holds it against its checksums. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..errors import CheckpointError, CorruptError
from ..format import index as index_format
from ..format.checksum import bytes_digest, crc32, table_digest
from ..format.index import Index
from ..store import local
from ..types import CheckpointInfo
from .locate import Located, locate


def verify(
    path: object, *, step: int | None = None, progress: Callable[[int], None] | None = None
) -> CheckpointInfo:
    """Verifies the checkpoint at `path`, or the newest (or that of `step`) in a run's directory.

    Every byte of every file is covered, headers that our own reader never looks at included.
    `progress(nbytes)` is told of each piece read. Raises NotFoundError, or CorruptError whose
    `problems` name everything that is damaged or missing.
    """
    located = locate(path, step)
    problems: list[str] = []
    indexes: list[Index] = []
    for rank in range(located.manifest.world_size):
        try:
            indexes.append(located.repository.index(located.id, located.manifest, rank))
        except CheckpointError as error:
            problems.append(str(error))
    covered = {index_format.name(rank) for rank in range(located.manifest.world_size)}
    for index in indexes:
        for number, file in enumerate(index.files):
            covered.add(file.name)
            problems += _verify_file(located, index, number, progress)
    for name in sorted(set(located.manifest.files) - covered):
        if not (problems and name.endswith(".distcp")):
            problems += _verify_small(located, name)
    if problems:
        raise CorruptError(
            f"{located.path}: damaged in {len(problems)} places; the first: {problems[0]}", problems
        )
    return located.manifest.info(located.path)


def _verify_file(
    located: Located, index: Index, number: int, progress: Callable[[int], None] | None
) -> list[str]:
    file = index.files[number]
    path = os.path.join(located.path, file.name)
    entry = located.manifest.files.get(file.name)
    if entry is None:
        return [f"{path}: not in the commit record"]
    problems: list[str] = []
    try:
        parts = index.parts(number)
        if table_digest(index.tables[number]) != entry.digest:
            problems.append(f"{path}: its checksums do not match the commit record")
        fd = local.open_for_reading(path)
        try:
            size = os.fstat(fd).st_size
            if size != entry.nbytes:
                return [*problems, f"{path}: has {size} bytes instead of {entry.nbytes}"]
            for part in parts:
                with local.store_errors("reading", path):
                    data = os.pread(fd, part.nbytes, part.offset)
                if len(data) != part.nbytes or crc32(data) != part.crc:
                    problems.append(
                        f"{path}: wrong checksum in the {part.nbytes} bytes from {part.offset}"
                    )
                if progress:
                    progress(part.nbytes)
        finally:
            os.close(fd)
    except CheckpointError as error:
        problems.append(str(error))
    return problems


def _verify_small(located: Located, name: str) -> list[str]:
    path = os.path.join(located.path, name)
    entry = located.manifest.files[name]
    try:
        data = local.read_exactly(path, entry.nbytes)
    except CheckpointError as error:
        return [str(error)]
    return [] if bytes_digest(data) == entry.digest else [f"{path}: does not match its digest"]

"""DCP's own `.metadata`, written for stock readers and never read by ours.

The only module that knows DCP's classes. Source of the form: ``torch/distributed/checkpoint``,
`metadata.py`, `filesystem.py` (`_StorageInfo`), `_nested_dict.py` (keys), `planner_helpers.py`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import NamedTuple

import torch

from .codec import Path
from .tree import Position


class Item(NamedTuple):
    """One thing that DCP can ask for: a frame (file, offset, bytes), under each of its paths."""

    paths: tuple[Path, ...]
    file: str
    offset: int
    nbytes: int
    dtype: str | None = None  # of a tensor; None for a value
    shape: tuple[int, ...] = ()


def chunk_file(rank: int, number: int) -> str:
    """The name that DCP gives to the chunk files of `rank`."""
    return f"__{rank}_{number}.distcp"


def metadata(items: Iterable[Item]) -> bytes:
    """The pickle that `torch.distributed.checkpoint.FileSystemReader` looks for."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    described: dict[str, dcp.STORAGE_TYPES] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    stored: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for item in items:
        info = _StorageInfo(item.file, item.offset, item.nbytes)
        for path in item.paths:
            key, parts = _unique(path, paths)
            # Integer keys of a dictionary must be text here: dcp_to_torch_save takes an integer for
            # a place in a list and crashes on a mixture.
            paths[key] = parts
            if item.dtype is None:
                described[key] = dcp.BytesStorageMetadata()
                stored[dcp.MetadataIndex(key)] = info
                continue
            zeros = torch.Size([0] * len(item.shape))
            size = torch.Size(item.shape)
            described[key] = dcp.TensorStorageMetadata(
                properties=dcp.TensorProperties(dtype=getattr(torch, item.dtype)),
                size=size,
                chunks=[dcp.ChunkStorageMetadata(offsets=zeros, sizes=size)],
            )
            stored[dcp.MetadataIndex(key, zeros)] = info
    return pickle.dumps(dcp.Metadata(described, paths, stored))


def _unique(
    path: Path, taken: dict[str, tuple[str | int, ...]]
) -> tuple[str, tuple[str | int, ...]]:
    """DCP's key of `path`. Two paths may flatten to one key (``{"a.b"}``, ``{"a": {"b"}}``): the
    second gets a mark, since the reader refuses duplicates."""
    parts = tuple(int(part) if isinstance(part, Position) else str(part) for part in path)
    key, mark = ".".join(map(str, parts)), 0
    while key in taken:
        mark += 1
        key = ".".join(map(str, parts)) + f"#{mark}"
    return key, parts if not mark else (key,)

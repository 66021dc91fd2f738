"""A checkpoint without a template: a mapping that reads and verifies what is taken from it."""

from __future__ import annotations

import mmap as mmap_module
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from ..errors import CorruptError, NotFoundError
from ..format import codec, tree
from ..format.checksum import crc32
from ..format.index import Index
from ..repository import Hold
from ..state.rebuild import empty, resolve, torch_dtype
from ..types import CheckpointInfo
from .locate import locate
from .read import open_files, read_tensors


def load(
    path: object,
    keys: Sequence[str] | None = None,
    mmap: bool = True,
    *,
    step: int | None = None,
) -> LoadedState:
    """The checkpoint at `path`, or the newest (or that of `step`) in a run's directory.

    Returns a mapping of the saved structure. Nothing is read until it is taken; a tensor's bytes are
    verified when it is first taken, and the same object comes back after that (tied tensors too).
    With `mmap` a tensor's memory is the file's, copied page by page where it is written to; the file
    is never changed. `keys` narrows the mapping to those keys and what lies below them, as
    `ckptengine inspect` prints them (``model/layer.0.weight``); of a list it leaves a mapping of
    positions.

    Raises NotFoundError (also for a key that is not there), IncompleteError, CorruptError.
    """
    located = locate(path, step)
    hold = located.repository.hold(located.id)
    try:
        index = located.repository.index(located.id, located.manifest, 0)
        source = _Source(located.path, located.manifest, index, mmap, hold)
    except BaseException:
        hold.release()
        raise
    node = index.tree if keys is None else _narrow(index.tree, index.rank, list(keys))
    return LoadedState(source, node, located.manifest.info(located.path))


class _Source:
    """The open files of one checkpoint, and the tensors already taken from them."""

    def __init__(self, path: str, manifest: Any, index: Index, mapped: bool, hold: Hold) -> None:
        self.path = path
        self.manifest = manifest
        self.index = index
        weakref.finalize(self, hold.release)
        self._taken: dict[int, torch.Tensor] = {}
        self._maps: list[torch.Tensor] | None = None
        if mapped:
            fds = open_files(path, manifest, index)
            try:
                self._maps = [
                    _map(fd, file.nbytes) for fd, file in zip(fds, index.files, strict=True)
                ]
            finally:
                for fd in fds:
                    os.close(fd)

    def __call__(self, tag: str, body: Any) -> Any:
        if tag == "$t":
            return self.tensor(body)
        return resolve(tag, body, self.index.values, self)

    def tensor(self, number: int) -> torch.Tensor:
        if number not in self._taken:
            self._taken[number] = self._take(number)
        return self._taken[number]

    def _take(self, number: int) -> torch.Tensor:
        entry = self.index.tensors[number]
        if self._maps is None or not entry.nbytes:
            tensor = empty(entry)
            read_tensors(self.path, self.manifest, self.index, [(number, tensor)])
            return tensor
        mapped = self._maps[entry.file]
        for part in self.index.tensor_parts(number):
            data = mapped[part.offset : part.offset + part.nbytes]
            if crc32(data.numpy()) != part.crc:
                where = os.path.join(self.path, self.index.files[entry.file].name)
                raise CorruptError(
                    f"{where}: a wrong checksum in the {part.nbytes} bytes from {part.offset}"
                )
        flat = mapped[entry.offset : entry.offset + entry.nbytes].view(torch_dtype(entry))
        return flat.as_strided(entry.shape, entry.stride)


def _map(fd: int, nbytes: int) -> torch.Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    mapped = mmap_module.mmap(fd, nbytes, access=mmap_module.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8)


class LoadedState(Mapping[Any, Any]):
    """A mapping of a checkpoint, or of a part of it. Mappings inside are of this kind too.

    `info` tells of the checkpoint.
    """

    def __init__(self, source: _Source, node: codec.Json, info: CheckpointInfo) -> None:
        self.info = info
        self._source = source
        self._node = node
        self._children = tree.children(node) or {}
        # Where `Module.load_state_dict` looks for the version that wrote each submodule's state.
        self._metadata = tree.versions(node)

    def __getitem__(self, key: Any) -> Any:
        node = self._children[key]
        while isinstance(node, dict) and "$rank" in node:
            node = node["$rank"]
        if tree.children(node) is not None:
            return LoadedState(self._source, node, self.info)
        return codec.decode(node, self._source)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._children)

    def __len__(self) -> int:
        return len(self._children)

    def __repr__(self) -> str:
        return f"LoadedState(step={self.info.step}, keys={list(self._children)})"

    def to_dict(self) -> dict[Any, Any]:
        """Everything in it, taken and verified, in dictionaries of the kinds that were saved."""
        return cast(dict[Any, Any], codec.decode(self._node, self._source))


def _narrow(node: codec.Json, rank: int, keys: list[str]) -> codec.Json:
    """The tree with only `keys` and what lies below them."""
    found: set[str] = set()

    def walk(node: codec.Json, path: codec.Path) -> codec.Json | None:
        text = codec.key_text(path)
        if path and text in keys:
            found.add(text)
            return node
        if isinstance(node, dict) and "$rank" in node:
            inner = walk(node["$rank"], (*path, str(rank)))
            return None if inner is None else {"$rank": inner}
        if isinstance(node, dict) and "$module" in node:
            versions, module = node["$module"]
            inner = walk(module, path)
            return None if inner is None else {"$module": [versions, inner]}
        # What is left of a sequence is a mapping of positions: the others must not move up.
        kept = {key: walk(child, (*path, key)) for key, child in tree.parts(node).items()}
        pairs = [(codec.encode(key), child) for key, child in kept.items() if child is not None]
        return codec.pack_mapping({}, pairs) if pairs else None

    narrowed = walk(node, ())
    absent = sorted(set(keys) - found)
    if absent:
        raise NotFoundError(
            f"no such keys in the checkpoint: {absent}. `ckptengine inspect` lists them"
        )
    return narrowed if narrowed is not None else {}

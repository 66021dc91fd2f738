"""The keys of a checkpoint and what stands under each, from its indexes alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..format import codec, tree
from ..format.index import Index, TensorEntry
from ..store import local
from .locate import Located


@dataclass
class Contents:
    """Entries by key, in the order in which they were saved."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # tagged JSON
    homes: dict[str, tuple[Index, int]] = field(default_factory=dict)  # of tensors


def contents(located: Located) -> Contents:
    """What `located` holds. Raises CorruptError or IncompleteError; reads no tensor."""
    out = Contents()
    for rank in range(located.manifest.world_size):
        index = located.repository.index(located.id, located.manifest, rank)
        for leaf in tree.leaves(index.tree, rank):
            key = codec.key_text(leaf.path)
            if leaf.kind == "t":
                out.tensors[key] = index.tensors[leaf.number]
                out.homes[key] = (index, leaf.number)
            else:
                out.values[key] = index.values[leaf.number]
    return out


@dataclass(frozen=True)
class Difference:
    """Two checkpoints, key by key."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    reshaped: Mapping[str, tuple[str, str]]  # dtype, shape or layout differ
    changed: tuple[str, ...]  # same form, other bytes or value
    same: tuple[str, ...]


def difference(first: Located, second: Located) -> Difference:
    """Compares forms, values and, where the forms agree, the bytes themselves."""
    one, two = contents(first), contents(second)
    keys_one, keys_two = _keys(one), _keys(two)
    reshaped: dict[str, tuple[str, str]] = {}
    changed: list[str] = []
    same: list[str] = []
    for key in keys_one:
        if key not in keys_two:
            continue
        forms = _form(one, key), _form(two, key)
        if forms[0] != forms[1]:
            reshaped[key] = forms
        elif key in one.tensors:
            equal = all(
                a == b
                for a, b in zip(_blocks(first, one, key), _blocks(second, two, key), strict=True)
            )
            (same if equal else changed).append(key)
        else:
            (same if one.values[key] == two.values[key] else changed).append(key)
    return Difference(
        only_first=tuple(key for key in keys_one if key not in keys_two),
        only_second=tuple(key for key in keys_two if key not in keys_one),
        reshaped=reshaped,
        changed=tuple(changed),
        same=tuple(same),
    )


def _keys(found: Contents) -> dict[str, None]:
    return dict.fromkeys([*found.tensors, *found.values])


def _form(found: Contents, key: str) -> str:
    entry = found.tensors.get(key)
    if entry is None:
        return "value"
    return f"{entry.dtype} {list(entry.shape)} stride {list(entry.stride)}"


def _blocks(located: Located, found: Contents, key: str) -> Iterator[bytes]:
    """The stored bytes of a tensor. Not verified: comparing is not restoring."""
    index, number = found.homes[key]
    entry = index.tensors[number]
    path = os.path.join(located.path, index.files[entry.file].name)
    fd = local.open_for_reading(path)
    try:
        for part in index.tensor_parts(number):
            with local.store_errors("reading", path):
                yield os.pread(fd, part.nbytes, part.offset)
    finally:
        os.close(fd)

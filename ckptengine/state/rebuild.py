"""From nodes of a stored tree to objects, and what a node is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from ..errors import StateError
from ..format import codec, tree
from ..format.index import TensorEntry

MARKS = {"$rank": "state of one rank", "$wrapper": "a tensor subclass"}


def resolve(tag: str, body: Any, values: Sequence[codec.Json], leaf: codec.Resolve) -> Any:
    """The tree's own marks, given `leaf("$t", i)` for tensors."""
    if tag == "$v":
        return codec.decode(values[body])
    if tag == "$array":
        return codec.decode(body, leaf).numpy()
    if tag == "$rank":
        return codec.decode(body, leaf)
    if tag == "$module":
        made = codec.decode(body[1], leaf)
        made._metadata = tree.versions({tag: body})
        return made
    if tag == "$wrapper":
        # The class may not be importable here; its parts are what was stored.
        return {name: codec.decode(part, leaf) for name, part in body[1].items()}
    raise StateError(f"the checkpoint has the unknown mark {tag}: install a newer ckptengine")


def torch_dtype(entry: TensorEntry) -> torch.dtype:
    """The dtype of a stored tensor. Raises StateError where torch is too old to have it."""
    dtype = getattr(torch, entry.dtype, None)
    if dtype is None:
        raise StateError(f"this release of torch has no {entry.dtype}: upgrade torch to restore it")
    return cast(torch.dtype, dtype)


def empty(entry: TensorEntry) -> torch.Tensor:
    """Memory for a stored tensor, in the layout in which it is stored."""
    return torch.empty_strided(entry.shape, entry.stride, dtype=torch_dtype(entry))


def tensor_number(node: codec.Json) -> int | None:
    """Of a node that is a tensor, or an array stored as one, its number in the index."""
    if isinstance(node, dict):
        if "$array" in node:
            return tensor_number(node["$array"])
        number = node.get("$t")
        return number if type(number) is int else None
    return None


def kind_of(node: codec.Json) -> str:
    """What `node` is, for messages."""
    if tensor_number(node) is not None:
        return "a tensor"
    if tree.children(node) is not None:
        return "a mapping"
    if tree.items(node) is not None:
        return "a sequence"
    for mark, what in MARKS.items():
        if isinstance(node, dict) and mark in node:
            return what
    return "a plain value"

"""The tree of a state: containers as the codec writes them, with these leaves and marks of its own:

{"$t": i}  tensor i of the index      {"$array": {"$t": i}}  the same, of a NumPy array
{"$v": i}  value i of the index       {"$wrapper": [class, {name: node}]}  parts of a subclass
{"$rank": node}  state of one rank
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import CorruptError
from . import codec

_SEQUENCES = ("$tuple",)
_MAPPINGS = ("$dict", "$odict", "$defaultdict", "$counter")


class Position(int):
    """A part of a path that is a place in a list or tuple, not a key."""


class Leaf(NamedTuple):
    """One leaf: its path, and whether it is tensor (`t`) or value (`v`) `number`."""

    path: codec.Path
    kind: str
    number: int


def leaves(node: codec.Json, rank: int, path: codec.Path = ()) -> Iterator[Leaf]:
    """All leaves below `node` in the order in which they were collected."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from leaves(item, rank, (*path, Position(index)))
        return
    if not isinstance(node, dict):
        raise CorruptError(f"{codec.key_text(path)}: the stored tree holds a bare value")
    tag = next(iter(node), "")
    if not tag.startswith("$"):
        for key, item in node.items():
            yield from leaves(item, rank, (*path, key))
        return
    body: Any = node[tag]
    if tag in ("$t", "$v"):
        yield Leaf(path, tag[1], body)
    elif tag == "$array":
        yield from leaves(body, rank, path)
    elif tag == "$rank":
        yield from leaves(body, rank, (*path, str(rank)))
    elif tag == "$wrapper":
        yield from leaves(body[1], rank, path)
    elif tag in _SEQUENCES:
        yield from leaves(body, rank, path)
    elif tag in _MAPPINGS:
        for key, item in body:
            yield from leaves(item, rank, (*path, codec.decode(key)))
    else:
        raise CorruptError(f"{codec.key_text(path)}: the stored tree has the unknown mark {tag}")


def children(node: codec.Json) -> dict[Any, codec.Json] | None:
    """Key to child of a mapping node, or None where `node` is something else."""
    if not isinstance(node, dict):
        return None
    tag = next(iter(node), "")
    if not tag.startswith("$"):
        return node
    if tag in _MAPPINGS:
        return {codec.decode(key): item for key, item in node[tag]}
    return None


def items(node: codec.Json) -> list[codec.Json] | None:
    """The children of a list or tuple node, or None where `node` is something else."""
    if isinstance(node, list):
        return node
    if isinstance(node, dict):
        body = node.get("$tuple")
        return body if isinstance(body, list) else None
    return None

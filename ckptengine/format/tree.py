"""The tree of a state: containers as the codec writes them, with these leaves and marks of its own:

{"$t": i}  tensor i of the index      {"$array": {"$t": i}}  the same, of a NumPy array
{"$v": i}  value i of the index       {"$rank": node}  state of one rank
{"$wrapper": [class, {name: node}, node]}  parts of a tensor subclass, and its constants if any
{"$module": [{name: version}, node]}  a module's mapping, and which version of each submodule wrote it
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import CorruptError
from . import codec

_SEQUENCES = ("$tuple",)
_MAPPINGS = ("$dict", "$odict", "$defaultdict", "$counter")
_INNER = ("$module", "$namedtuple")  # the second of two is a node


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
        for part in body[1:]:
            yield from leaves(part, rank, path)
    elif tag in _INNER:
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
    if tag == "$module":
        return children(node[tag][1])
    if tag in _MAPPINGS:
        return {codec.decode(key): item for key, item in node[tag]}
    return None


def parts(node: codec.Json) -> dict[Any, codec.Json]:
    """The children of whatever `node` is, by the next part of their paths; none of a leaf."""
    for tag in ("$wrapper", "$namedtuple"):
        if isinstance(node, dict) and tag in node:
            named: dict[Any, codec.Json] = node[tag][1]
            return named
    found = children(node)
    return found if found is not None else dict(enumerate(items(node) or ()))


def versions(node: codec.Json) -> dict[str, dict[str, Any]] | None:
    """What `Module.state_dict` attaches to its mapping as `_metadata`: each submodule's version."""
    if not isinstance(node, dict) or "$module" not in node:
        return None
    return {
        name: codec.decode(version) if isinstance(version, dict) else {"version": version}
        for name, version in node["$module"][0].items()
    }


def items(node: codec.Json) -> list[codec.Json] | None:
    """The children of a list or tuple node, or None where `node` is something else."""
    if isinstance(node, dict):
        if "$namedtuple" in node:
            return list(node["$namedtuple"][1].values())
        node = node.get("$tuple")
    return node if isinstance(node, list) else None

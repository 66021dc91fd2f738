"""Trees of states: what is taken apart is put together again, and every leaf has its own key."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.errors import CorruptError
from ckptengine.format import codec, tree
from ckptengine.state.collect import Collected, collect
from ckptengine.state.rebuild import resolve

Identical = Callable[[Any, Any], bool]


class Pair(NamedTuple):
    one: Any
    two: Any


def rebuilt(found: Collected) -> Any:
    """The state again, from the tree as a file would hold it."""
    node = json.loads(json.dumps(found.tree))
    values = json.loads(json.dumps(found.values))

    def leaf(tag: str, body: Any) -> Any:
        return found.tensors[body] if tag == "$t" else resolve(tag, body, values, leaf)

    return codec.decode(node, leaf)


KEYS = st.text(st.characters(exclude_categories=()), max_size=4) | st.sampled_from(
    [
        "a.b",
        "a",
        "b",
        "$t",
        "$v",
        "",
        "[0]",
        "~",
        "a/b",
        0,
        "0",
        1.5,
        True,
        None,
        (1, ("x", 2)),
        b"k",
    ]
)
LEAVES = st.one_of(
    st.integers(0, 9).map(lambda n: torch.arange(n, dtype=torch.float32)),
    st.integers(0, 9).map(lambda n: np.arange(n, dtype=np.int16)),
    st.sampled_from([None, True, 1, -0.0, "text", b"raw", 2j, np.float64(0.1), (), [], [1, (2,)]]),
    st.just(np.array(["no", "tensor"])),
)
STATES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.builds(Pair, inner, inner),
            st.dictionaries(KEYS, inner, max_size=3),
            st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict),
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@given(STATES)
def test_a_state_is_put_together_as_it_was(identical: Identical, state: dict[Any, Any]) -> None:
    assert identical(rebuilt(collect(state)), state)


@given(STATES)
def test_leaves_come_in_the_order_of_collection_each_under_its_own_key(
    state: dict[Any, Any],
) -> None:
    found = collect(state)
    leaves = list(tree.leaves(found.tree, 0))
    for kind, count in (("t", len(found.tensors)), ("v", len(found.values))):
        numbers = [leaf.number for leaf in leaves if leaf.kind == kind]
        assert list(dict.fromkeys(numbers)) == list(range(count))
    keys = [codec.key_text(leaf.path) for leaf in leaves]
    assert len(set(keys)) == len(keys)


@given(STATES)
def test_each_leaf_is_found_by_walking_its_path(state: dict[Any, Any]) -> None:
    node = collect(state).tree
    for leaf in tree.leaves(node, 0):
        at = node
        for part in leaf.path:
            at = tree.parts(at)[part]
        while "$array" in at:
            at = at["$array"]
        assert at == {f"${leaf.kind}": leaf.number}


def test_containers_of_other_kinds_keep_their_kind(identical: Identical) -> None:
    one = torch.ones(2)
    state = {
        "counter": collections.Counter({10: 2, 5: 1}),
        "ordered": collections.OrderedDict(z=one, a=one),
        "empty": {"d": {}, "l": [], "t": (), "o": collections.OrderedDict(), "n": None},
        "pair": Pair(one, {"deep": Pair([], one)}),
    }
    assert identical(rebuilt(collect(state)), state)
    factory = rebuilt(collect({"d": collections.defaultdict(list, a=one)}))["d"]
    assert type(factory) is collections.defaultdict and factory["a"] is one


def test_what_versions_wrote_a_module_is_kept() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    found = rebuilt(collect({"model": model}))["model"]
    assert found._metadata == model.state_dict()._metadata
    assert tree.versions(collect({"model": model}).tree["model"]) == found._metadata
    assert tree.versions({"a": {"$t": 0}}) is None


def test_what_a_module_adds_to_its_versions_is_kept() -> None:
    saved: Any = collections.OrderedDict(w=torch.ones(1))
    saved._metadata = {"": {"version": 1, "norm.version": (1, 2)}}
    assert rebuilt(collect({"m": saved}))["m"]._metadata == saved._metadata


@pytest.mark.parametrize("node", [{"$new": []}, 3, "text", {"a": None}])
def test_an_unknown_mark_is_refused(node: Any) -> None:
    with pytest.raises(CorruptError):
        list(tree.leaves(node, 0))


def test_children_and_items_tell_the_kinds_of_nodes_apart() -> None:
    assert tree.children({"$dict": [[1, {"$t": 0}], [{"$tuple": [2]}, {"$v": 0}]]}) == {
        1: {"$t": 0},
        (2,): {"$v": 0},
    }
    assert tree.children({"$t": 0}) is None
    assert tree.children([]) is None
    assert tree.items({"$tuple": [1]}) == [1]
    assert tree.items({"a": 1}) is None
    assert tree.parts({"$v": 0}) == {}

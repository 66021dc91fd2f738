"""Takes a user's state apart: a tree of containers, the tensors in it, and the plain values.

Runs on the caller's thread at every save, so its cost for each tensor matters. What it returns
refers to the live tensors; plain values are encoded here and now, which is their snapshot.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import StateError
from ..format import codec
from ..format.dtypes import DTYPES
from ..types import Spec
from .per_rank import PerRank
from .rng import RngState

_DTYPE_NAMES = {
    getattr(torch, name): name for name in DTYPES if hasattr(torch, name)
}  # older releases of torch lack the newest dtypes
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SCALARS = (int, float, str, bool, type(None), bytes, complex)


@dataclass
class Collected:
    """A state taken apart. Lists run in the order of traversal."""

    tree: codec.Json = None  # containers; ``{"$t": i}`` a tensor, ``{"$v": i}`` a value
    tensors: list[torch.Tensor] = field(default_factory=list)  # live, each tied one once
    specs: list[Spec] = field(default_factory=list)  # of `tensors`
    values: list[codec.Json] = field(default_factory=list)  # tagged JSON
    pickles: list[bytes] = field(default_factory=list)  # of `values`, for stock readers


def collect(state: Mapping[str, Any], rank: int = 0) -> Collected:
    """Takes `state` apart. Raises StateError, naming every leaf that cannot be stored.

    Nothing of the state is changed, copied (but for plain values) or moved.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"a state is a mapping, not a {type(state).__qualname__}")
    walk = _Walk(rank)
    try:
        walk.out.tree = walk.node(state, ())
    except RecursionError:
        raise StateError("the state is nested too deeply, or contains itself") from None
    if walk.refused:
        keys = [codec.key_text(path) for path, _ in walk.refused]
        lines = "\n  ".join(f"{k}: {why}" for k, (_, why) in zip(keys, walk.refused, strict=True))
        raise StateError(f"the state cannot be saved; nothing was written:\n  {lines}", keys)
    return walk.out


class _Walk:
    def __init__(self, rank: int) -> None:
        self.out = Collected()
        self.rank = rank
        self.refused: list[tuple[codec.Path, str]] = []
        self._seen: dict[tuple[int, Spec], int] = {}

    def node(self, obj: Any, path: codec.Path) -> codec.Json:
        if isinstance(obj, torch.Tensor):
            return self.tensor(obj, path)
        if isinstance(obj, _SCALARS):
            return self.value(obj, path)
        if isinstance(obj, Mapping):
            return codec.pack_mapping(
                obj, [(self.key(k, path), self.node(v, (*path, k))) for k, v in obj.items()]
            )
        if isinstance(obj, (list, tuple)):
            if not _traversed(obj):
                return self.value(obj, path)
            items = [self.node(item, (*path, index)) for index, item in enumerate(obj)]
            return items if isinstance(obj, list) else {"$tuple": items}
        if isinstance(obj, PerRank):
            return {"$rank": self.node(obj.obj, (*path, str(self.rank)))}
        if isinstance(obj, RngState):
            return {"$rank": self.node(obj.state_dict(), (*path, str(self.rank)))}
        if is_stateful(obj):
            return self.node(obj.state_dict(), path)
        if isinstance(obj, torch.Generator):
            return self.tensor(obj.get_state(), path)
        if isinstance(obj, np.ndarray) and array_fits(obj):
            return {"$array": self.tensor(torch.from_numpy(readable(obj)), path)}
        return self.value(obj, path)

    def key(self, key: Any, path: codec.Path) -> codec.Json:
        return key if type(key) is str else codec.encode(key, (*path, str(key)))

    def tensor(self, tensor: torch.Tensor, path: codec.Path) -> codec.Json:
        if type(tensor) not in _PLAIN_TENSORS:
            if is_traceable_wrapper_subclass(tensor):
                return self.wrapper(tensor, path)
            if _without_storage(tensor):
                return self.refuse(path, f"a {type(tensor).__qualname__} has no storage to copy")
        try:
            name = _DTYPE_NAMES[tensor.dtype]
            spec = (name, tuple(tensor.shape), tensor.stride())
            pointer = tensor.data_ptr()
        except (KeyError, RuntimeError, NotImplementedError, ValueError):
            return self.refuse(path, _why_not(tensor))
        if tensor.is_meta or tensor.layout is not torch.strided:
            return self.refuse(path, _why_not(tensor))
        identity = (pointer, spec)
        index = self._seen.get(identity) if pointer else None
        if index is None:
            index = len(self.out.tensors)
            self.out.tensors.append(tensor)
            self.out.specs.append(spec)
            # All tensors stay referenced by `out`, so no address can be reused meanwhile.
            self._seen[identity] = index
        return {"$t": index}

    def wrapper(self, tensor: Any, path: codec.Path) -> codec.Json:
        if type(tensor).__name__ == "DTensor":
            return self.refuse(path, "a DTensor: sharded saves are not part of this release")
        names, _ = tensor.__tensor_flatten__()
        inner = {name: self.node(getattr(tensor, name), (*path, name)) for name in names}
        return {"$wrapper": [f"{type(tensor).__module__}:{type(tensor).__qualname__}", inner]}

    def value(self, value: Any, path: codec.Path) -> codec.Json:
        try:
            encoded = codec.encode(value, path)
        except StateError as error:
            return self.refuse(path, str(error).partition(": ")[2] or str(error))
        index = len(self.out.values)
        self.out.values.append(encoded)
        self.out.pickles.append(pickle.dumps(codec.plain(value), 2))
        return {"$v": index}

    def refuse(self, path: codec.Path, why: str) -> None:
        self.refused.append((path, why))


def is_stateful(obj: Any) -> bool:
    """Whether `obj` is saved through `state_dict` and restored through `load_state_dict`."""
    return (
        callable(getattr(obj, "state_dict", None))
        and callable(getattr(obj, "load_state_dict", None))
        and not isinstance(obj, type)
    )


def array_fits(array: np.ndarray) -> bool:
    """Whether an array is stored as a tensor (others are stored as plain values)."""
    return (
        array.dtype.isnative
        and array.dtype.kind in "biufc"
        and array.dtype.itemsize <= 16
        and (array.dtype.kind != "f" or array.dtype.itemsize <= 8)
    )


def readable(array: np.ndarray) -> np.ndarray:
    """`array`, or a copy where torch cannot look at its memory (read-only, negative strides)."""
    if array.flags.writeable and all(stride >= 0 for stride in array.strides):
        return array
    return array.copy()


def _traversed(items: Any) -> bool:
    """Whether a list or tuple holds anything that is stored as an item of its own.

    The same rule as DCP's traversal for lists of tensors and mappings, so that its keys are ours.
    """
    for item in items:
        if isinstance(item, _SCALARS):
            continue
        if isinstance(
            item, (torch.Tensor, Mapping, PerRank, RngState, torch.Generator, np.ndarray)
        ):
            return True
        if isinstance(item, (list, tuple)):
            if _traversed(item):
                return True
        elif is_stateful(item):
            return True
    return False


def _without_storage(tensor: torch.Tensor) -> bool:
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() == 0
    except (RuntimeError, NotImplementedError):
        return True


def _why_not(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "an uninitialized parameter: run the model once before it is saved"
    if tensor.is_meta:
        return "a meta tensor has no values: materialize it first"
    if tensor.is_nested:
        return "a nested tensor: store its parts (`unbind()`) as a list"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}: store its parts (indices, values) as tensors"
    if tensor.is_quantized:
        return "a quantized tensor: store `int_repr()` and its scales"
    return f"a tensor of dtype {tensor.dtype} cannot be stored: view it as uint8"

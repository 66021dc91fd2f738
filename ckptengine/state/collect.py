"""Takes a user's state apart: a tree of containers, the tensors in it, and the plain values.

Runs on the caller's thread at every save, so its cost for each tensor matters. What it returns
refers to the live tensors; plain values are encoded here and now, which is their snapshot.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
from .app_state import AppState
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
    signature: list[Any] = field(default_factory=list)  # determines the tree, and compares fast
    tensors: list[torch.Tensor] = field(default_factory=list)  # live, each tied one once
    specs: list[Spec] = field(default_factory=list)  # of `tensors`
    values: list[codec.Json] = field(default_factory=list)  # tagged JSON
    pickles: list[bytes] = field(default_factory=list)  # of `values`, for stock readers
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)


def collect(state: Mapping[str, Any], rank: int = 0) -> Collected:
    """Takes `state` apart. Raises StateError, naming every leaf that cannot be stored.

    Nothing of the state is changed, copied (but for plain values) or moved.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"a state is a mapping, not a {type(state).__qualname__}")
    walk = _Walk(rank)
    walk.out.tree = walk.node(state, ())
    if walk.refused:
        lines = "\n  ".join(f"{key}: {why}" for key, why in walk.refused)
        raise StateError(
            f"the state cannot be saved; nothing was written:\n  {lines}",
            [key for key, _ in walk.refused],
        )
    return walk.out


class _Walk:
    def __init__(self, rank: int) -> None:
        self.out = Collected()
        self.rank = rank
        self.refused: list[tuple[str, str]] = []  # key, why
        self._first: dict[int, int] = {}  # address to the first tensor that starts there
        self._others: dict[int, list[int]] = {}  # and to those that do so too

    def node(self, obj: Any, path: codec.Path) -> codec.Json:
        if isinstance(obj, torch.Tensor):
            return self.tensor(obj, path)
        if isinstance(obj, _SCALARS):
            return self.value(obj, path)
        if len(path) > codec.MAX_DEPTH:
            # At once: what contains itself twice would have no end of paths.
            raise codec.too_deep(path)
        if isinstance(obj, (PerRank, RngState)):
            self.out.signature.append("$rank")
            inner = obj.obj if isinstance(obj, PerRank) else obj.state_dict()
            return {"$rank": self.node(inner, (*path, str(self.rank)))}
        if is_stateful(obj):
            if isinstance(obj, AppState):
                self.out.optimizers.append(obj.optimizer)
            elif isinstance(obj, torch.optim.Optimizer):
                self.out.optimizers.append(obj)
            saved = obj.state_dict()  # of a stateful dictionary, often itself
            return (
                self.mapping(saved, path) if isinstance(saved, Mapping) else self.node(saved, path)
            )
        if isinstance(obj, Mapping):
            return self.mapping(obj, path)
        if isinstance(obj, (list, tuple)):
            return self.sequence(obj, path) if _traversed(obj) else self.value(obj, path)
        if isinstance(obj, torch.Generator):
            return self.tensor(obj.get_state(), path)
        if isinstance(obj, np.ndarray) and array_fits(obj):
            self.out.signature.append("$array")
            return {"$array": self.tensor(torch.from_numpy(readable(obj)), path)}
        return self.value(obj, path)

    def mapping(self, obj: Mapping[Any, Any], path: codec.Path) -> codec.Json:
        self.out.signature.append((type(obj), *obj))
        if any(type(key) is not str for key in obj):  # 1, 1.0 and True are equal, and not the same
            self.out.signature.append([repr(key) for key in obj])
        pairs = [
            (
                k if type(k) is str and k.isascii() else codec.encode(k, (*path, str(k))),
                # Told apart here: of 100,000 small tensors, each call would cost a tenth of the save.
                self.tensor(v, path, k) if type(v) in _PLAIN_TENSORS else self.node(v, (*path, k)),
            )
            for k, v in obj.items()
        ]
        node = codec.pack_mapping(obj, pairs)
        # What `Module.state_dict` returns tells the version of each submodule by an attribute.
        versions = getattr(obj, "_metadata", None) if type(obj) is OrderedDict else None
        if versions is None:
            return node
        self.out.signature.append({name: dict(version) for name, version in versions.items()})
        return {"$module": [{k: self.version(v, (*path, k)) for k, v in versions.items()}, node]}

    def version(self, version: Any, path: codec.Path) -> codec.Json:
        """The bare number where there is nothing else, as in nearly all modules."""
        number = version.get("version")
        return number if type(number) is int and len(version) == 1 else codec.encode(version, path)

    def sequence(self, obj: Sequence[Any], path: codec.Path) -> codec.Json:
        names = getattr(obj, "_fields", None)
        self.out.signature.append((type(obj), len(obj), names))
        if names is not None:
            fields = {k: self.node(v, (*path, k)) for k, v in zip(names, obj, strict=True)}
            return {"$namedtuple": [codec.class_name(type(obj)), fields]}
        items = [self.node(item, (*path, index)) for index, item in enumerate(obj)]
        return items if isinstance(obj, list) else {"$tuple": items}

    def tensor(self, tensor: torch.Tensor, path: codec.Path, *key: Any) -> codec.Json:
        """`key`: the last part of the path, if `path` lacks it."""
        if type(tensor) not in _PLAIN_TENSORS:
            if is_traceable_wrapper_subclass(tensor):
                return self.wrapper(tensor, path)
            if _without_storage(tensor):
                return self.refuse(path, f"a {type(tensor).__qualname__} has no storage to copy")
        try:
            spec = (_DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.stride())
            pointer = tensor.data_ptr()
        except (KeyError, RuntimeError, NotImplementedError, ValueError):
            return self.refuse((*path, *key), _why_not(tensor))
        if tensor.layout is not torch.strided or (not pointer and tensor.is_meta):
            return self.refuse((*path, *key), _why_not(tensor))
        # All tensors stay referenced by `out`, so no address can be reused meanwhile. Few share one,
        # so what makes two of them the same is looked at only then.
        index = len(self.out.tensors)
        if pointer and self._first.setdefault(pointer, index) != index:
            others = self._others.setdefault(pointer, [])
            for other in (self._first[pointer], *others):
                if self.out.specs[other] == spec and _same_view(tensor, self.out.tensors[other]):
                    self.out.signature.append(other)
                    return {"$t": other}
            others.append(index)
        self.out.tensors.append(tensor)
        self.out.specs.append(spec)
        self.out.signature.append(index)
        return {"$t": index}

    def wrapper(self, tensor: Any, path: codec.Path) -> codec.Json:
        if type(tensor).__name__ == "DTensor":
            return self.refuse(path, "a DTensor: sharded saves are not part of this release")
        if tensor.is_nested:
            return self.refuse(path, _why_not(tensor))
        names, constants = tensor.__tensor_flatten__()
        self.out.signature.append((type(tensor), *names))
        inner = {name: self.node(getattr(tensor, name), (*path, name)) for name in names}
        body = [codec.class_name(type(tensor)), inner]
        return {"$wrapper": body if constants is None else [*body, self.value(constants, path)]}

    def value(self, value: Any, path: codec.Path) -> codec.Json:
        try:
            encoded = codec.encode(value, path)
        except StateError as error:
            (key,) = error.keys
            self.refused.append((key, str(error).removeprefix(f"{key}: ")))
            return None
        index = len(self.out.values)
        self.out.signature.append("$v")
        self.out.values.append(encoded)
        self.out.pickles.append(pickle.dumps(codec.plain(value), 2))
        return {"$v": index}

    def refuse(self, path: codec.Path, why: str) -> None:
        self.refused.append((codec.key_text(path), why))


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
        not isinstance(array, np.ma.MaskedArray)
        and array.dtype.isnative
        and array.dtype.kind in "biufc"
        and array.dtype.itemsize <= 16
        and (array.dtype.kind != "f" or array.dtype.itemsize <= 8)
    )


def readable(array: np.ndarray) -> np.ndarray:
    """`array`, or a copy where torch cannot look at its memory (read-only, or strides that are
    negative or no multiples of an element)."""
    if array.flags.writeable and all(
        stride >= 0 and stride % array.itemsize == 0 for stride in array.strides
    ):
        return array
    return array.copy()


def _traversed(items: Any, depth: int = 0) -> bool:
    """Whether a list or tuple holds anything that is stored as an item of its own.

    The same rule as DCP's traversal for lists of tensors and mappings, so that its keys are ours.
    """
    if depth > codec.MAX_DEPTH:
        return True
    for item in items:
        if isinstance(item, _SCALARS):
            continue
        if isinstance(
            item, (torch.Tensor, Mapping, PerRank, RngState, torch.Generator, np.ndarray)
        ):
            return True
        if isinstance(item, (list, tuple)):
            if _traversed(item, depth + 1):
                return True
        elif is_stateful(item):
            return True
    return False


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one address and form have the same values: a conjugated view has not."""
    return one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg()


def _without_storage(tensor: torch.Tensor) -> bool:
    try:
        storage = tensor.untyped_storage()
        # A fake tensor claims a real device; asking for its address would warn.
        return storage.device.type == "meta" or (tensor.numel() > 0 and storage.data_ptr() == 0)
    except (RuntimeError, NotImplementedError, ValueError):
        return not is_lazy(tensor)


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

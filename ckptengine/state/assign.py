"""Matches a stored tree with a live state: which tensor is read into which memory.

In three steps, so that a state is never half filled for a reason that could be known before: `match`
compares everything and touches nothing; `allocate` makes memory for what has none; `finish`, after
all bytes have been read, hands values and dictionaries to the user's objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import StateError
from ..format import codec, tree
from ..format.index import TensorEntry
from ..types import Report
from .app_state import AppState, unwrapped
from .collect import array_fits, is_stateful
from .per_rank import PerRank
from .rng import RngState

_NAMED_AT_MOST = 20  # keys in one error message

Setter = Callable[[Any], None]


class Assignment:
    """The plan of one restore. `match` has succeeded when the constructor returns.

    `tensors`, `values`: the index's entries, which the tree's numbers refer to. Raises StateError,
    naming every key that does not fit, with the state untouched.
    """

    def __init__(
        self,
        state: MutableMapping[str, Any],
        node: codec.Json,
        tensors: Sequence[TensorEntry],
        values: Sequence[codec.Json],
        *,
        strict: bool = True,
        cast: bool = False,
    ) -> None:
        self.fills: list[tuple[int, torch.Tensor]] = []  # tensor number, where it goes
        self._tensors = tensors
        self._values = values
        self._cast = cast
        self._deferred: list[_Deferred] = []
        self._finish: list[Callable[[], None]] = []
        self._finish_last: list[Callable[[], None]] = []
        self._fresh: dict[int, torch.Tensor] = {}
        self._missing: list[codec.Path] = []
        self._unexpected: list[codec.Path] = []
        self._casts: list[codec.Path] = []
        self._problems: list[tuple[codec.Path, str]] = []
        self._mapping(state, node, ())
        self._refuse(strict)

    @property
    def report(self) -> Report:
        """What was not a plain match."""
        missing = tuple(map(codec.key_text, self._missing))
        return Report(
            missing=missing,
            unexpected=tuple(map(codec.key_text, self._unexpected)),
            unfilled=missing,
            cast=tuple(map(codec.key_text, self._casts)),
        )

    def allocate(self) -> None:
        """Makes memory for what will be handed over; adds it to `fills`."""
        for deferred in self._deferred:
            deferred.value = codec.decode(deferred.node, self._resolve)

    def finish(self) -> None:
        """Hands over what was read. Random generators come last: others may draw from them."""
        for step in itertools.chain(self._finish, self._finish_last):
            step()

    # -- matching: each method looks at one kind of object -----------------------------------------

    def _match(self, obj: Any, node: codec.Json, path: codec.Path, put: Setter) -> None:
        """Matches `obj` with `node`. `put(value)` replaces `obj` in its container."""
        if isinstance(obj, torch.Tensor):
            self._tensor(obj, node, path)
        elif isinstance(obj, PerRank):
            inner = self._inner(node, "$rank", path)
            if inner is not None:
                self._match(obj.obj, inner, path, lambda value: setattr(obj, "obj", value))
        elif isinstance(obj, RngState):
            inner = self._inner(node, "$rank", path)
            if inner is not None:
                deferred = self._defer(inner)
                self._finish_last.append(lambda: obj.load_state_dict(deferred.value))
        elif isinstance(obj, AppState):
            self._app_state(obj, node, path)
        elif isinstance(obj, torch.nn.Module) and _plain_module(obj):
            self._module(obj, node, path)
        elif isinstance(obj, torch.optim.Optimizer) and _plain_optimizer(obj):
            self._optimizer(obj, node, path)
        elif is_stateful(obj):
            deferred = self._defer(node)
            self._finish.append(lambda: _load(obj, deferred.value, path))
        elif isinstance(obj, torch.Generator):
            deferred = self._defer(node)
            self._finish_last.append(lambda: _set_generator(obj, deferred.value))
        elif isinstance(obj, np.ndarray) and array_fits(obj) and obj.flags.writeable:
            self._array(obj, node, path)
        elif _is_plain(obj):
            self._plain(obj, node, put)
        elif isinstance(obj, Mapping):
            self._mapping(obj, node, path)
        else:
            self._sequence(obj, node, path, put)

    def _mapping(self, obj: Any, node: codec.Json, path: codec.Path) -> None:
        children = tree.children(node)
        if children is None:
            self._problems.append((path, f"the state has a mapping, the checkpoint {_kind(node)}"))
            return
        self._compare_keys(obj, children, path)
        for key, value in obj.items():
            if key in children:
                put = self._setter(obj, key)
                self._match(value, children[key], (*path, key), put)

    def _sequence(self, obj: Any, node: codec.Json, path: codec.Path, put: Setter) -> None:
        items = tree.items(node)
        if items is None or len(items) != len(obj):
            held = _kind(node) if items is None else f"{len(items)} items"
            self._problems.append((path, f"the state has {len(obj)} items, the checkpoint {held}"))
            return
        target = obj if isinstance(obj, list) else list(obj)
        for index, (value, item) in enumerate(zip(obj, items, strict=True)):
            self._match(value, item, (*path, index), self._setter(target, index))
        if target is not obj:
            self._finish.append(lambda: put(type(obj)(target)))

    def _plain(self, obj: Any, node: codec.Json, put: Setter) -> None:
        """Plain values are replaced whole; a dictionary or list keeps its identity, since the loop
        may hold it by another name."""
        deferred = self._defer(node)

        def replace() -> None:
            value = deferred.value
            if isinstance(obj, dict) and isinstance(value, dict):
                obj.clear()
                obj.update(value)
            elif isinstance(obj, list) and isinstance(value, list):
                obj[:] = value
            else:
                put(value)

        self._finish.append(replace)

    def _tensor(self, tensor: torch.Tensor, node: codec.Json, path: codec.Path) -> None:
        if is_traceable_wrapper_subclass(tensor):
            body = self._inner(node, "$wrapper", path)
            if body is not None:
                names, _ = tensor.__tensor_flatten__()
                self._compare_keys(dict.fromkeys(names), body[1], path)
                for name in names:
                    if name in body[1]:
                        inner = getattr(tensor, name)
                        self._match(inner, body[1][name], (*path, name), lambda _: None)
            return
        index = _tensor_number(node)
        if index is None:
            self._problems.append((path, f"the state has a tensor, the checkpoint {_kind(node)}"))
        elif self._fits(tensor, index, path):
            self.fills.append((index, tensor.detach()))

    def _array(self, array: np.ndarray, node: codec.Json, path: codec.Path) -> None:
        if any(stride < 0 for stride in array.strides):
            self._problems.append(
                (path, "an array with negative strides cannot be filled in place")
            )
            return
        self._tensor(torch.from_numpy(array), node, path)

    def _fits(self, tensor: torch.Tensor, index: int, path: codec.Path) -> bool:
        entry = self._tensors[index]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_meta:
            why = "a meta tensor has no memory: call `to_empty` first"
        elif tuple(tensor.shape) != entry.shape:
            why = f"shape {tuple(tensor.shape)} in the state, {entry.shape} in the checkpoint"
        elif _overlaps_itself(tensor):
            why = "an expanded tensor cannot be filled in place: `clone` it first"
        elif dtype != entry.dtype and not self._cast:
            why = (
                f"{dtype} in the state, {entry.dtype} in the checkpoint: pass cast=True to convert"
            )
        else:
            if dtype != entry.dtype:
                self._casts.append(path)
            return True
        self._problems.append((path, why))
        return False

    def _module(self, module: torch.nn.Module, node: codec.Json, path: codec.Path) -> None:
        children = tree.children(node)
        if children is None:
            self._problems.append((path, f"the state has a module, the checkpoint {_kind(node)}"))
            return
        live = module.state_dict()
        self._compare_keys(live, children, path)
        # In place is only right where the dictionary's tensors are the module's own memory and
        # nothing else wants to hear of a load.
        own = {t.data_ptr() for t in itertools.chain(module.parameters(), module.buffers())}
        in_place = not _hooked(module) and all(
            isinstance(t, torch.Tensor) and (t.data_ptr() in own or not t.numel())
            for t in live.values()
        )
        given: dict[str, Any] = {}
        for key, value in live.items():
            if key not in children:
                continue
            if isinstance(value, torch.Tensor):
                index = _tensor_number(children[key])
                plain = index is not None and not is_traceable_wrapper_subclass(value)
                if plain and not in_place and self._fits(value, index or 0, (*path, key)):
                    given[key] = self._defer(children[key])
                elif not plain or in_place:
                    self._tensor(value, children[key], (*path, key))
            else:
                given[key] = self._defer(children[key])
        if given:
            self._finish.append(
                lambda: _load(module, {k: d.value for k, d in given.items()}, path, strict=False)
            )

    def _optimizer(self, optimizer: Any, node: codec.Json, path: codec.Path) -> None:
        deferred = self._optimizer_state(optimizer, node, path, lambda number: number)

        def finish() -> None:
            saved = {name: entry.value for name, entry in deferred.items()}
            _load(optimizer, saved, path)
            _keep_dtypes(optimizer, saved["state"])

        groups = optimizer.state_dict()["param_groups"]
        saved_groups = tree.items((tree.children(node) or {}).get("param_groups"))
        sizes = [len(group["params"]) for group in groups]
        saved_sizes = [
            len(self._peek(tree.children(group) or {}, "params") or ())
            for group in saved_groups or []
        ]
        if sizes != saved_sizes:
            self._problems.append(
                (
                    (*path, "param_groups"),
                    f"groups of {sizes} parameters in the state, of {saved_sizes} in the checkpoint",
                )
            )
        self._finish.append(finish)

    def _app_state(self, app: AppState, node: codec.Json, path: codec.Path) -> None:
        children = tree.children(node) or {}
        self._compare_keys(dict.fromkeys(("model", "optimizer")), children, path)
        if "model" not in children or "optimizer" not in children:
            return
        self._module(unwrapped(app.model), children["model"], (*path, "model"))
        names = app.names()
        saved_groups = tree.items((tree.children(children["optimizer"]) or {}).get("param_groups"))
        saved_names = {
            name
            for group in saved_groups or []
            for name in self._peek(tree.children(group) or {}, "params") or ()
        }
        for name in set(names.values()) ^ saved_names:
            where = "state" if name in names.values() else "checkpoint"
            self._problems.append((path, f"only the {where}'s optimizer has the parameter {name}"))
        deferred = self._optimizer_state(
            app.optimizer, children["optimizer"], (*path, "optimizer"), names.__getitem__
        )

        def finish() -> None:
            saved = {name: entry.value for name, entry in deferred.items()}
            app.load_optimizer(saved)
            by_number = {
                n: saved["state"][name] for n, name in names.items() if name in saved["state"]
            }
            _keep_dtypes(app.optimizer, by_number)

        self._finish.append(finish)

    def _optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        node: codec.Json,
        path: codec.Path,
        saved_key: Callable[[int], Any],
    ) -> dict[str, _Deferred]:
        """The optimizer's dictionary to come, filled into its live tensors where they fit.

        State of a parameter may be absent as a whole (it never had a gradient), not in part.
        """
        children = tree.children(node) or {}
        if "state" not in children or "param_groups" not in children:
            self._problems.append(
                (path, f"the state has an optimizer, the checkpoint {_kind(node)}")
            )
            return {}
        saved = tree.children(children["state"]) or {}
        reuse: dict[int, torch.Tensor] = {}
        for number, live in optimizer.state_dict()["state"].items():
            key = saved_key(number)
            entries = tree.children(saved[key]) if key in saved else None
            if not entries or not isinstance(live, Mapping):
                continue
            for name in live.keys() ^ entries.keys():
                (self._missing if name in live else self._unexpected).append(
                    (*path, "state", key, name)
                )
            for name in live.keys() & entries.keys():
                index = _tensor_number(entries[name])
                if index is not None and self._reusable(live[name], index):
                    reuse[index] = live[name]
        self._partial(saved, children["param_groups"], path)
        self._fresh.update(reuse)
        self.fills.extend(reuse.items())
        return {name: self._defer(child) for name, child in children.items()}

    def _partial(
        self, saved: Mapping[Any, codec.Json], groups: codec.Json, path: codec.Path
    ) -> None:
        """Reports a parameter that has less state than its like: an entry was lost on the way."""
        for group in tree.items(groups) or []:
            likes: dict[int, dict[Any, set[Any]]] = {}
            for key in self._peek(tree.children(group) or {}, "params") or ():
                entries = tree.children(saved.get(key))
                if entries:
                    numbers = [_tensor_number(entry) for entry in entries.values()]
                    rank = max(
                        (len(self._tensors[n].shape) for n in numbers if n is not None), default=0
                    )
                    likes.setdefault(rank, {})[key] = set(entries)
            for like in likes.values():
                full = set().union(*like.values())
                for key, names in like.items():
                    self._missing.extend(
                        (*path, "state", key, name)
                        for name in sorted(full - names, key=str)
                        if (*path, "state", key, name) not in self._missing
                    )

    def _reusable(self, tensor: Any, index: int) -> bool:
        entry = self._tensors[index]
        return (
            isinstance(tensor, torch.Tensor)
            and tuple(tensor.shape) == entry.shape
            and str(tensor.dtype) == f"torch.{entry.dtype}"
            and index not in self._fresh
            and not _overlaps_itself(tensor)
            and not is_traceable_wrapper_subclass(tensor)
        )

    # -- helpers -----------------------------------------------------------------------------------

    def _defer(self, node: codec.Json) -> _Deferred:
        self._deferred.append(_Deferred(node))
        return self._deferred[-1]

    def _resolve(self, tag: str, body: Any) -> Any:
        if tag == "$t":
            if body not in self._fresh:
                self._fresh[body] = _empty(self._tensors[body])
                self.fills.append((body, self._fresh[body]))
            return self._fresh[body]
        return resolve(tag, body, self._values, self._resolve)

    def _peek(self, children: Mapping[Any, codec.Json], key: str) -> Any:
        """A plain value of the checkpoint, now."""
        return codec.decode(children[key], self._resolve) if key in children else None

    def _setter(self, container: Any, key: Any) -> Setter:
        def put(value: Any) -> None:
            container[key] = value

        return put

    def _inner(self, node: codec.Json, tag: str, path: codec.Path) -> Any:
        if isinstance(node, dict) and tag in node:
            return node[tag]
        what = {"$rank": "state of one rank", "$wrapper": "a tensor subclass"}[tag]
        self._problems.append((path, f"the state has {what}, the checkpoint {_kind(node)}"))
        return None

    def _compare_keys(
        self, live: Mapping[Any, Any], saved: Mapping[Any, Any], path: codec.Path
    ) -> None:
        self._missing.extend((*path, key) for key in live if key not in saved)
        self._unexpected.extend((*path, key) for key in saved if key not in live)

    def _refuse(self, strict: bool) -> None:
        lines = [(codec.key_text(path), why) for path, why in self._problems]
        if strict:
            lines += [(key, "not in the checkpoint") for key in map(codec.key_text, self._missing)]
            lines += [
                (key, "in the checkpoint, not in the state")
                for key in map(codec.key_text, self._unexpected)
            ]
        if not lines:
            return
        text = "".join(f"\n  {key}: {why}" for key, why in lines[:_NAMED_AT_MOST])
        more = len(lines) - _NAMED_AT_MOST
        raise StateError(
            "the state does not fit the checkpoint; nothing was filled. "
            "(strict=False leaves out what has no counterpart.)"
            + text
            + (f"\n  and {more} more" if more > 0 else ""),
            [key for key, _ in lines],
        )


class _Deferred:
    """A stored value that will be built once all checks have passed."""

    def __init__(self, node: codec.Json) -> None:
        self.node = node
        self.value: Any = None


def resolve(tag: str, body: Any, values: Sequence[codec.Json], leaf: codec.Resolve) -> Any:
    """The tree's own marks, given `leaf("$t", i)` for tensors."""
    if tag == "$v":
        return codec.decode(values[body])
    if tag == "$array":
        return codec.decode(body, leaf).numpy()
    if tag == "$rank":
        return codec.decode(body, leaf)
    if tag == "$wrapper":
        # The class may not be importable here; its parts are what was stored.
        return {name: codec.decode(part, leaf) for name, part in body[1].items()}
    raise StateError(f"the checkpoint has the unknown mark {tag}: install a newer ckptengine")


def _empty(entry: TensorEntry) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype, None)
    if dtype is None:
        raise StateError(f"this release of torch has no {entry.dtype}: upgrade torch to restore it")
    return torch.empty_strided(entry.shape, entry.stride, dtype=dtype)


def _tensor_number(node: codec.Json) -> int | None:
    if isinstance(node, dict):
        if "$array" in node:
            return _tensor_number(node["$array"])
        number = node.get("$t")
        return number if type(number) is int else None
    return None


def _kind(node: codec.Json) -> str:
    if _tensor_number(node) is not None:
        return "a tensor"
    if tree.children(node) is not None:
        return "a mapping"
    if tree.items(node) is not None:
        return "a sequence"
    if isinstance(node, dict) and "$rank" in node:
        return "state of one rank"
    return "a plain value"


def _is_plain(obj: Any) -> bool:
    """Whether `obj` is replaced whole: nothing in it has memory or methods to fill."""
    if isinstance(obj, Mapping):
        return all(_is_plain(value) for value in obj.values())
    if isinstance(obj, (list, tuple)):
        return all(_is_plain(value) for value in obj)
    return not (
        isinstance(obj, (torch.Tensor, PerRank, RngState, torch.Generator, np.ndarray))
        or is_stateful(obj)
    )


def _plain_module(module: torch.nn.Module) -> bool:
    cls = type(module)
    return (
        cls.state_dict is torch.nn.Module.state_dict
        and cls.load_state_dict is torch.nn.Module.load_state_dict
    )


def _plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    cls = type(optimizer)
    return (
        cls.state_dict is torch.optim.Optimizer.state_dict
        and cls.load_state_dict is torch.optim.Optimizer.load_state_dict
    )


def _hooked(module: torch.nn.Module) -> bool:
    """Whether some submodule wants to hear of a load."""
    return any(
        m._load_state_dict_pre_hooks
        or m._load_state_dict_post_hooks
        or type(m).set_extra_state is not torch.nn.Module.set_extra_state
        or (
            type(m)._load_from_state_dict is not torch.nn.Module._load_from_state_dict
            and not type(m).__module__.startswith("torch.")
        )
        for m in module.modules()
    )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _load(obj: Any, saved: Any, path: codec.Path, **options: Any) -> None:
    try:
        obj.load_state_dict(saved, **options)
    except StateError:
        raise
    except Exception as error:
        key = codec.key_text(path)
        raise StateError(
            f"{key}: {type(obj).__qualname__}.load_state_dict refused what was saved: {error!r}",
            [key],
        ) from error


def _keep_dtypes(optimizer: torch.optim.Optimizer, saved: Mapping[int, Any]) -> None:
    """Undoes the rounding of `Optimizer.load_state_dict`, which casts state to its parameter's
    dtype: 32-bit moments of 16-bit parameters would come back with 16 bits."""
    parameters = itertools.chain.from_iterable(g["params"] for g in optimizer.param_groups)
    for number, parameter in enumerate(parameters):
        for name, value in (saved.get(number) or {}).items():
            if isinstance(value, torch.Tensor):
                live = optimizer.state[parameter].get(name)
                if isinstance(live, torch.Tensor) and live.dtype != value.dtype:
                    optimizer.state[parameter][name] = value.to(live.device)

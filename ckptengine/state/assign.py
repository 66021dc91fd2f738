"""Matches a stored tree with a live state: which tensor is read into which memory.

In three steps, so that a state is never half filled for a reason that could be known before: `match`
compares everything and touches nothing; `allocate` makes memory for what has none; `finish`, after
all bytes have been read, hands values and dictionaries to the user's objects.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import StateError
from ..format import codec, tree
from ..format.index import TensorEntry
from ..types import Report
from .app_state import AppState, plain_name, unwrapped
from .collect import array_fits, is_stateful, readable
from .live import (
    convertible,
    is_hooked,
    is_plain_module,
    is_plain_optimizer,
    loads_its_own_way,
    memory_of,
    overlaps_itself,
    owns,
)
from .per_rank import PerRank
from .rebuild import MARKS, empty, kind_of, resolve, tensor_number, torch_dtype
from .rng import RngState

_NAMED_AT_MOST = 20  # keys in one error message
_EXTRA_STATE = "_extra_state"  # how keys end whose value is the module's own business

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
        self._targets: dict[Any, tuple[int, codec.Path]] = {}  # by memory and form
        self._fresh: dict[int, torch.Tensor] = {}
        self._missing: list[codec.Path] = []
        self._stateless: list[codec.Path] = []
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
            unfilled=(*missing, *map(codec.key_text, self._stateless)),
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
        elif isinstance(obj, torch.nn.Module) and is_plain_module(obj):
            self._module(obj, node, path)
        elif isinstance(obj, torch.optim.Optimizer) and is_plain_optimizer(obj):
            self._optimizer(obj, node, path)
        elif is_stateful(obj):
            deferred = self._defer(node)
            self._finish.append(lambda: _load(obj, deferred.value, path))
        elif isinstance(obj, torch.Generator):
            if tensor_number(node) is None:
                what = f"the state has a generator, the checkpoint {kind_of(node)}"
                self._problems.append((path, what))
            deferred = self._defer(node)
            self._finish_last.append(lambda: _set_generator(obj, deferred.value, path))
        elif isinstance(obj, np.ndarray) and array_fits(obj):
            self._array(obj, node, path, put)
        elif _is_plain(obj):
            self._plain(obj, node, put)
        elif isinstance(obj, Mapping):
            self._mapping(obj, node, path)
        else:
            self._sequence(obj, node, path, put)

    def _mapping(self, obj: Any, node: codec.Json, path: codec.Path) -> None:
        children = tree.children(node)
        if children is None:
            self._problems.append(
                (path, f"the state has a mapping, the checkpoint {kind_of(node)}")
            )
            return
        if not isinstance(obj, MutableMapping):
            self._problems.append(
                (path, f"a {type(obj).__qualname__} cannot be filled: use a dict")
            )
            return
        self._compare_keys(obj, children, path)
        for key, value in obj.items():
            if key in children:
                put = self._setter(obj, key)
                self._match(value, children[key], (*path, key), put)

    def _sequence(self, obj: Any, node: codec.Json, path: codec.Path, put: Setter) -> None:
        items = tree.items(node)
        if items is None or len(items) != len(obj):
            held = kind_of(node) if items is None else f"{len(items)} items"
            self._problems.append((path, f"the state has {len(obj)} items, the checkpoint {held}"))
            return
        target = obj if isinstance(obj, list) else list(obj)
        parts = getattr(obj, "_fields", range(len(obj)))
        for index, (part, value, item) in enumerate(zip(parts, obj, items, strict=True)):
            self._match(value, item, (*path, part), self._setter(target, index))
        if target is not obj:
            make = getattr(obj, "_make", type(obj))  # a named tuple takes its items one by one
            self._finish.append(lambda: put(make(target)))

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
            self._wrapper(tensor, node, path)
            return
        index = tensor_number(node)
        if index is None:
            self._problems.append((path, f"the state has a tensor, the checkpoint {kind_of(node)}"))
        elif self._fits(tensor, index, path):
            held, other = self._targets.setdefault(memory_of(tensor), (index, path))
            if held != index:
                why = f"shares its memory with {codec.key_text(other)}, but not in the checkpoint"
                self._problems.append((path, f"{why}: untie it first"))
            elif other is path:
                self.fills.append((index, tensor.detach()))

    def _wrapper(self, tensor: Any, node: codec.Json, path: codec.Path) -> None:
        body = self._inner(node, "$wrapper", path)
        if body is None:
            return
        names, constants = tensor.__tensor_flatten__()
        saved = self._values[body[2]["$v"]] if len(body) > 2 else None
        if _without_devices(codec.encode(constants, path)) != _without_devices(saved):
            self._problems.append(
                (path, f"the constants of the {type(tensor).__qualname__} differ")
            )
        self._compare_keys(dict.fromkeys(names), body[1], path)
        for name in names:
            if name in body[1]:
                inner = getattr(tensor, name)
                self._match(inner, body[1][name], (*path, name), lambda _: None)

    def _array(self, array: np.ndarray, node: codec.Json, path: codec.Path, put: Setter) -> None:
        filled = readable(array)
        self._tensor(torch.from_numpy(filled), node, path)
        if filled is not array and array.flags.writeable:
            self._finish.append(lambda: np.copyto(array, filled))
        elif filled is not array:
            self._finish.append(lambda: put(filled))

    def _fits(
        self, tensor: torch.Tensor, index: int, path: codec.Path, *, any_shape: bool = False
    ) -> bool:
        entry = self._tensors[index]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_meta:
            why = "a meta tensor has no memory: call `to_empty` first"
        elif is_lazy(tensor) and not any_shape:
            why = "an uninitialized parameter: run the model once before it is filled"
        elif not any_shape and tuple(tensor.shape) != entry.shape:
            why = f"shape {tuple(tensor.shape)} in the state, {entry.shape} in the checkpoint"
        elif not any_shape and overlaps_itself(tensor):
            why = "elements that share memory (expanded, say) cannot be filled: `clone` it first"
        elif dtype != entry.dtype and not self._cast:
            why = (
                f"{dtype} in the state, {entry.dtype} in the checkpoint: pass cast=True to convert"
            )
        elif dtype != entry.dtype and not convertible(torch_dtype(entry), tensor.dtype):
            why = (
                f"{dtype} in the state, {entry.dtype} in the checkpoint: torch cannot convert that"
            )
        else:
            if dtype != entry.dtype:
                self._casts.append(path)
            return True
        self._problems.append((path, why))
        return False

    def _module(
        self,
        module: torch.nn.Module,
        node: codec.Json,
        path: codec.Path,
        stored_name: Callable[[str], str] = str,
    ) -> None:
        """`stored_name`: of a key of the module's dictionary, that in the checkpoint."""
        children = tree.children(node)
        if children is None:
            self._problems.append((path, f"the state has a module, the checkpoint {kind_of(node)}"))
            return
        live = module.state_dict()
        names = {key: stored_name(key) for key in live}
        self._compare_keys(dict.fromkeys(names.values()), children, path)
        own_way = {prefix for prefix, inner in module.named_modules() if loads_its_own_way(inner)}
        in_place = not own_way and not is_hooked(module) and owns(live, module)
        given: OrderedDict[str, Any] = OrderedDict()
        for key, name in names.items():
            if name not in children:
                continue
            where = (*path, name)
            index = tensor_number(children[name])
            if in_place or is_traceable_wrapper_subclass(live[key]):
                self._tensor(live[key], children[name], where)
            elif not isinstance(live[key], torch.Tensor) or key.endswith(_EXTRA_STATE):
                given[key] = self._defer(children[name])
            elif index is None:
                self._tensor(live[key], children[name], where)  # says why not
            else:
                resizes = is_lazy(live[key]) or key.rpartition(".")[0] in own_way
                if self._fits(live[key], index, where, any_shape=resizes):
                    given[key] = self._defer(children[name])
        if not given:
            return
        saved_versions = tree.versions(node) or {}

        def finish() -> None:
            saved = OrderedDict((key, deferred.value) for key, deferred in given.items())
            versions = {
                prefix: saved_versions.get(stored_name(f"{prefix}.")[:-1], version)
                for prefix, version in getattr(live, "_metadata", {}).items()
            }
            saved._metadata = versions  # type: ignore[attr-defined]
            _load(module, saved, path, strict=False)

        self._finish.append(finish)

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
        model = unwrapped(app.model)
        if is_plain_module(model):
            self._module(model, children["model"], (*path, "model"), plain_name)
        else:
            self._match(model, children["model"], (*path, "model"), lambda _: None)
        names = app.names()
        saved_groups = tree.items((tree.children(children["optimizer"]) or {}).get("param_groups"))
        saved_names = [
            self._peek(tree.children(group) or {}, "params") or () for group in saved_groups or []
        ]
        unmatched = set(names.values()) ^ set(itertools.chain.from_iterable(saved_names))
        for name in sorted(unmatched):
            where = "state" if name in names.values() else "checkpoint"
            self._problems.append((path, f"only the {where}'s optimizer has the parameter {name}"))
        if not unmatched:
            try:
                app.group_sources(saved_names)
            except StateError as error:
                self._problems.append(((*path, "optimizer", "param_groups"), str(error)))
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
                (path, f"the state has an optimizer, the checkpoint {kind_of(node)}")
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
                index = tensor_number(entries[name])
                if index is not None and self._reusable(live[name], index):
                    reuse[index] = live[name]
                    self._targets[memory_of(live[name])] = (index, (*path, "state", key, name))
        self._partial(saved, children["param_groups"], path, type(optimizer))
        self._fresh.update(reuse)
        self.fills.extend(reuse.items())
        return {name: self._defer(child) for name, child in children.items()}

    def _partial(
        self, saved: Mapping[Any, codec.Json], groups: codec.Json, path: codec.Path, cls: type
    ) -> None:
        """Reports a parameter that has no state while others have, and one that has less than its
        like: an entry was lost on the way. Of torch's own optimizers alone is it known that they
        treat parameters of as many dimensions alike.
        """
        for group in tree.items(groups) or []:
            likes: dict[int, dict[Any, set[Any]]] = {}
            for key in self._peek(tree.children(group) or {}, "params") or ():
                entries = tree.children(saved.get(key))
                if saved and not entries:
                    self._stateless.append((*path, "state", key))
                if entries and cls.__module__.startswith("torch.optim."):
                    numbers = [tensor_number(entry) for entry in entries.values()]
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
            and memory_of(tensor) not in self._targets
            and not overlaps_itself(tensor)
            and not is_traceable_wrapper_subclass(tensor)
        )

    # -- helpers -----------------------------------------------------------------------------------

    def _defer(self, node: codec.Json) -> _Deferred:
        self._deferred.append(_Deferred(node))
        return self._deferred[-1]

    def _resolve(self, tag: str, body: Any) -> Any:
        if tag == "$t":
            if body not in self._fresh:
                self._fresh[body] = empty(self._tensors[body])
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
        self._problems.append((path, f"the state has {MARKS[tag]}, the checkpoint {kind_of(node)}"))
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


def _is_plain(obj: Any) -> bool:
    """Whether `obj` is replaced whole: nothing in it has memory or methods to fill."""
    if isinstance(obj, Mapping):
        return all(_is_plain(value) for value in obj.values())
    if isinstance(obj, (list, tuple)):
        return all(_is_plain(value) for value in obj)
    return not (
        isinstance(obj, (torch.Tensor, PerRank, RngState, torch.Generator))
        or (isinstance(obj, np.ndarray) and array_fits(obj))
        or is_stateful(obj)
    )


def _without_devices(value: codec.Json) -> codec.Json:
    """Tagged JSON in which nothing tells on which device it was."""
    if isinstance(value, dict):
        return {k: None if k == "$device" else _without_devices(v) for k, v in value.items()}
    return [_without_devices(item) for item in value] if isinstance(value, list) else value


def _set_generator(generator: torch.Generator, state: torch.Tensor, path: codec.Path) -> None:
    try:
        generator.set_state(state)
    except (RuntimeError, TypeError) as error:
        key = codec.key_text(path)
        raise StateError(f"{key}: the saved generator cannot be set: {error!r}", [key]) from error


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
            if name in optimizer.state[parameter]:
                live = optimizer.state[parameter][name]
                optimizer.state[parameter][name] = _unrounded(live, value)


def _unrounded(live: Any, saved: Any) -> Any:
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return live if live.dtype == saved.dtype else saved.to(live.device)
    if isinstance(live, dict) and isinstance(saved, dict) and live.keys() == saved.keys():
        return {key: _unrounded(value, saved[key]) for key, value in live.items()}
    if isinstance(live, (list, tuple)) and type(live) is type(saved) and len(live) == len(saved):
        return type(live)(map(_unrounded, live, saved))
    return live

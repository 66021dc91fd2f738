"""A model and its optimizer under the model's own names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from ..errors import StateError


class AppState:
    """Stores optimizer state by fully qualified parameter name instead of by number.

    Numbers depend on the order in which parameters were given to the optimizer; names do not. So
    the optimizer's state survives a regrouping or reordering of parameters, and is what resharding
    goes by. Unlike `torch.distributed.checkpoint.state_dict`, every option of every group is kept
    (`initial_lr` of schedulers, empty groups).

    `model`: a module; wrappers of `torch.compile` and DistributedDataParallel leave no trace in the
    names. `optimizer`: whose parameters all belong to `model`.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """`{"model": {name: tensor}, "optimizer": {"state": {name: ..}, "param_groups": [..]}}`."""
        names = self.names()
        saved = self.optimizer.state_dict()
        return {
            "model": _plainly_named(unwrapped(self.model).state_dict()),
            "optimizer": {
                "state": {names[number]: entry for number, entry in saved["state"].items()},
                "param_groups": [
                    {**group, "params": [names[number] for number in group["params"]]}
                    for group in saved["param_groups"]
                ],
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads both. Raises StateError when the checkpoint's parameters are not the optimizer's."""
        model, saved = unwrapped(self.model), state_dict["model"]
        names = {plain_name(name): name for name in model.state_dict()}
        if any(name != plain for plain, name in names.items()):
            saved = {names.get(plain, plain): value for plain, value in saved.items()}
        model.load_state_dict(saved)
        self.load_optimizer(state_dict["optimizer"])

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        """Loads the optimizer's half, by name.

        A parameter takes its options from the saved group that names it, so the groups may have been
        reordered; one live group must not mix parameters of two saved groups.
        """
        names = self.names()
        sources = self.group_sources([group["params"] for group in saved["param_groups"]])
        live_groups = self.optimizer.state_dict()["param_groups"]
        groups = [
            {
                **(live if source is None else saved["param_groups"][source]),
                "params": live["params"],
            }
            for live, source in zip(live_groups, sources, strict=True)
        ]
        state = {
            number: saved["state"][name] for number, name in names.items() if name in saved["state"]
        }
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def group_sources(self, saved: Sequence[Sequence[str]]) -> list[int | None]:
        """For each group of the optimizer, the saved one (of these parameters) that it goes on from;
        None where it is new and has no parameters. Raises StateError where that cannot be said."""
        names = self.names()
        group_of = {name: index for index, group in enumerate(saved) for name in group}
        absent = [name for name in names.values() if name not in group_of]
        if absent:
            raise StateError(f"the checkpoint has no optimizer group for {absent[:10]}", absent)
        empty = iter([index for index, group in enumerate(saved) if not group])
        sources: list[int | None] = []
        for live in self.optimizer.state_dict()["param_groups"]:
            found = {group_of[names[number]] for number in live["params"]}
            if len(found) > 1:
                raise StateError(
                    f"one of the optimizer's groups takes parameters from the saved groups {found}: "
                    "which one's options it should have cannot be said"
                )
            sources.append(found.pop() if found else next(empty, None))
        return sources

    def names(self) -> dict[int, str]:
        """The optimizer's number of each parameter, to its name in the model."""
        by_identity = {
            id(parameter): plain_name(name)
            for name, parameter in unwrapped(self.model).named_parameters()
        }
        names: dict[int, str] = {}
        for live, group in zip(
            self.optimizer.param_groups, self.optimizer.state_dict()["param_groups"], strict=True
        ):
            for parameter, number in zip(live["params"], group["params"], strict=True):
                if id(parameter) not in by_identity:
                    raise StateError(
                        f"parameter {number} of the optimizer, of shape {tuple(parameter.shape)}, "
                        "is not one of the model's"
                    )
                names[number] = by_identity[id(parameter)]
        return names


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside wrappers that only add a prefix to its names."""
    inner: Any = model
    while True:
        if isinstance(inner, torch.nn.parallel.DistributedDataParallel):
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):  # torch.compile's OptimizedModule
            inner = inner._orig_mod
        else:
            return cast(torch.nn.Module, inner)


def _plainly_named(live: Mapping[str, Any]) -> Mapping[str, Any]:
    """A module's dictionary under plain names, submodules' versions included."""
    if not any("_orig_mod." in name for name in live):
        return live
    renamed: OrderedDict[str, Any] = OrderedDict((plain_name(k), v) for k, v in live.items())
    versions: Mapping[str, Any] = getattr(live, "_metadata", {})
    renamed._metadata = {plain_name(f"{k}.")[:-1]: v for k, v in versions.items()}  # type: ignore[attr-defined]
    return renamed


def plain_name(name: str) -> str:
    """`name` without what a compiled submodule adds to it."""
    return name.replace("_orig_mod.", "")

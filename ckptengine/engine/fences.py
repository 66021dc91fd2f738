"""Where an overlapped capture must have ended: before an optimizer of the state takes its step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Fences:
    """Calls `fence` before every step of the optimizers it was shown.

    The pre-hook costs about a microsecond a step. It fires for every way to step that torch offers,
    but a loop that compiles its step whole (`fullgraph=True`), writes to `param.data` or averages
    weights itself calls `Engine.fence` itself.
    """

    def __init__(self, fence: Callable[[], None]) -> None:
        self._fence = fence
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = (
            weakref.WeakKeyDictionary()
        )

    def install(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Hooks those optimizers that are not hooked yet."""
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Takes all hooks off."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _before_step(self, *_: Any) -> None:
        self._fence()


def owned(
    tensors: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> frozenset[int]:
    """Numbers of the `tensors` that only a step of one of `optimizers` may change: parameters, and
    the optimizers' own state. Buffers are not among them: the forward pass changes those."""
    memory = {
        value.untyped_storage().data_ptr()
        for optimizer in optimizers
        for value in _tensors_of(optimizer)
    }
    return frozenset(
        number
        for number, tensor in enumerate(tensors)
        if tensor.numel() and tensor.untyped_storage().data_ptr() in memory
    )


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [
        value
        for entry in optimizer.state.values()
        if isinstance(entry, dict)
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]
    return [*parameters, *state]

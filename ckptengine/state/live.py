"""Questions about live modules, optimizers and tensors: what may be filled, and in which way."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_plain_module(module: torch.nn.Module) -> bool:
    """Whether a module is saved and loaded as torch does it."""
    cls = type(module)
    return (
        cls.state_dict is torch.nn.Module.state_dict
        and cls.load_state_dict is torch.nn.Module.load_state_dict
        and "load_state_dict" not in vars(module)
    )


def is_plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is saved and loaded as torch does it."""
    cls = type(optimizer)
    return (
        cls.state_dict is torch.optim.Optimizer.state_dict
        and cls.load_state_dict is torch.optim.Optimizer.load_state_dict
    )


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether some submodule wants to hear of a load."""
    return any(
        m._load_state_dict_pre_hooks
        or m._load_state_dict_post_hooks
        or type(m).set_extra_state is not torch.nn.Module.set_extra_state
        for m in module.modules()
    )


def loads_its_own_way(module: torch.nn.Module) -> bool:
    """Whether a module takes its part of a dictionary by a method of its own, which may resize what
    it has. Those of `torch.nn` only look at versions older than any checkpoint of ours."""
    cls = type(module)
    method = cls._load_from_state_dict
    return method is not torch.nn.Module._load_from_state_dict and not (
        method.__module__.startswith("torch.nn.modules.")
    )


def owns(live: Mapping[str, Any], module: torch.nn.Module) -> bool:
    """Whether a module's dictionary holds its own memory, so that filling it fills the module."""
    own = {_address(t) for t in itertools.chain(module.parameters(), module.buffers())}
    return None not in own and all(
        isinstance(t, torch.Tensor) and (not t.numel() or _address(t) in own) for t in live.values()
    )


def _address(tensor: torch.Tensor) -> int | None:
    """Of a tensor's memory, or of its first part's; None where there is no memory yet."""
    if is_lazy(tensor):
        return None
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return _address(getattr(tensor, names[0])) if names else 0
    return tensor.data_ptr()


def memory_of(tensor: torch.Tensor) -> Any:
    """Tells tensors apart that are filled one without the other."""
    if not tensor.numel():
        return object()
    form = (tensor.device, tensor.dtype, tensor.shape, tensor.stride())
    return (tensor.data_ptr(), form, tensor.is_conj(), tensor.is_neg())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory (expanded, sliding windows)."""
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return tensor.numel() > 0
            reach += step * (size - 1)
    return False


@lru_cache
def convertible(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether torch converts these dtypes without dropping a part of each number."""
    if source.is_complex and not target.is_complex:
        return False
    try:
        torch.empty(1, dtype=target).copy_(torch.empty(1, dtype=source))
    except (RuntimeError, NotImplementedError):
        return False
    return True

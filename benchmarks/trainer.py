"""The program that is being checkpointed: a transformer's parameters under AdamW, and a busy loop.

The tensors are those of a real optimizer, and its real step changes them in place; the forward and
backward passes are stood in for by matrix products of about the same duration as the update.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

State = dict[str, Any]


class Trainer:
    """About `nbytes` of fp32 state (parameters and both moments), and `step` to keep it moving.

    A step multiplies square matrices of `width` for as long as the update takes, and so long that
    it takes at least `least` seconds in all.
    """

    def __init__(
        self, nbytes: int, layers: int = 12, width: int = 1024, least: float = 0.0
    ) -> None:
        torch.manual_seed(0)
        shapes = transformer_shapes(nbytes, layers)
        self._parameters = {name: torch.nn.Parameter(torch.randn(s)) for name, s in shapes.items()}
        for parameter in self._parameters.values():
            parameter.grad = torch.randn_like(parameter)
        # Fused: one pass over the state and no temporaries, whose page faults would be the loop.
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=1e-4, fused=True)
        self._optimizer.step()
        self.state: State = {
            "model": {name: p.detach() for name, p in self._parameters.items()},
            "optimizer": {
                part: {n: self._optimizer.state[p][part] for n, p in self._parameters.items()}
                for part in ("exp_avg", "exp_avg_sq", "step")
            },
        }
        self.nbytes = sum(tensor.nbytes for _, tensor in tensors(self.state))
        self.items = sum(1 for _ in tensors(self.state))
        self._left = torch.randn(width, width)
        self._right = torch.randn(width, width)
        self._out = torch.empty(width, width)
        self.products = 1
        self._calibrate(least)

    def facts(self) -> dict[str, Any]:
        """What the results say of the state."""
        return {"bytes": self.nbytes, "items": self.items, "products_per_step": self.products}

    def step(self) -> None:
        """Keep all of torch's threads busy, then update the whole state in place."""
        for _ in range(self.products):
            torch.mm(self._left, self._right, out=self._out)
        self._optimizer.step()

    def _calibrate(self, least: float) -> None:
        product = _fastest(lambda: torch.mm(self._left, self._right, out=self._out), 10)
        update = _fastest(self._optimizer.step, 5)
        self.products = max(1, round(max(update, least - update) / product))


def tensors(state: State, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a nested mapping with its dotted name."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from tensors(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def blank_like(state: State) -> State:
    """The same structure in memory of its own, touched already, with other values."""
    return {
        key: blank_like(value) if isinstance(value, dict) else torch.full_like(value, torch.nan)
        for key, value in state.items()
    }


def scramble(state: State) -> None:
    """Fill with NaN, so that nothing of an earlier restore can pass for this one's."""
    for _, tensor in tensors(state):
        tensor.fill_(torch.nan)


def overwrite(target: State, source: State) -> None:
    """Copy all values of one state into another of the same structure."""
    for (_, place), (_, tensor) in zip(tensors(target), tensors(source), strict=True):
        place.copy_(tensor)


def differing(left: State, right: State) -> str | None:
    """The name of the first tensor whose bits differ, or None."""
    found = dict(tensors(right))
    for name, tensor in tensors(left):
        other = found.get(name)
        if other is None or other.shape != tensor.shape or other.dtype != tensor.dtype:
            return name
        # As integers: a NaN never equals itself, and -0.0 equals 0.0.
        if not torch.equal(tensor.view(torch.int32), other.view(torch.int32)):
            return name
    return None


def weights(nbytes: int) -> State:
    """A transformer's parameters alone, about `nbytes` of them."""
    return {name: torch.randn(shape) for name, shape in transformer_shapes(3 * nbytes).items()}


def transformer_shapes(nbytes: int, layers: int = 12) -> dict[str, tuple[int, ...]]:
    """Parameter shapes of a GPT whose parameters and two fp32 moments take about `nbytes`."""
    count = nbytes // 12
    # A block has 12 width^2 weights; six sevenths of all go there, the rest to the embedding.
    width = max(32, int((count * 6 / 7 / (12 * layers)) ** 0.5) // 32 * 32)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        block = f"blocks.{layer}."
        for norm in ("norm1", "norm2"):
            shapes[f"{block}{norm}.weight"] = (width,)
            shapes[f"{block}{norm}.bias"] = (width,)
        for name, rows, columns in (
            ("attention.qkv", 3 * width, width),
            ("attention.out", width, width),
            ("mlp.up", 4 * width, width),
            ("mlp.down", width, 4 * width),
        ):
            shapes[f"{block}{name}.weight"] = (rows, columns)
            shapes[f"{block}{name}.bias"] = (rows,)
    shapes["norm.weight"] = (width,)
    shapes["norm.bias"] = (width,)
    used = sum(torch.Size(shape).numel() for shape in shapes.values())
    shapes["embedding.weight"] = (max(1, (count - used) // width), width)
    return shapes


def _fastest(call: Any, times: int) -> float:
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best

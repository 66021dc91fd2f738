"""The demo's training run: an ordinary PyTorch loop with the engine beside it."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ckptengine as ce

from ..errors import ConfigError
from ..events import Event, SaveCommitted, SaveFailed, SaveScheduled, SaveSkipped
from .data import Loader, standard_library
from .model import GPT
from .options import SIZES, Options, add_arguments, from_args

HELD_OUT = 16
"""Windows at the end of the text that are never trained on: the final loss is theirs."""

CLEAR = "\r\x1b[K"
"""Takes a terminal back to the start of an empty line."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ckptengine demo")
    add_arguments(parser)
    return train(from_args(parser.parse_args(argv)))


def train(options: Options) -> int:
    size = SIZES[options.size]
    device = _prepare(options, size.threads)
    console = Console(options.steps)

    text = standard_library(size.text)
    cut = len(text) - (HELD_OUT * size.context + 1)
    loader = Loader(text[:cut], context=size.context, batch=size.batch, seed=options.seed)
    held_out = Loader(text[cut:], context=size.context, batch=HELD_OUT, seed=0)
    model = GPT(size.layers, size.heads, size.width, size.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": ce.PerRank(loader),
        "rng": ce.RngState(),
        "tokens_seen": 0,
    }

    with ce.Engine(str(options.dir), keep=options.keep) as engine:
        engine.add_listener(console.events.append)
        info = engine.restore(state)
        first = info.step + 1 if info else 1
        console.begin(model, device, options, info, state["tokens_seen"])
        for step in range(first, options.steps + 1):
            loss = train_step(model, optimizer, scheduler, next(loader).to(device))
            state["tokens_seen"] += size.batch * size.context
            console.step(step, loss, saves=options.saves_at(step))
            if step == options.kill_at:
                die_in_the_middle_of_the_save(engine, state, step, options.dir, console)
            if options.saves_at(step):
                engine.save_async(state, step=step)
    console.end(final_loss(model, next(held_out).to(device)), digest(model), state["tokens_seen"])
    return 0


def train_step(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    window: Tensor,
) -> Tensor:
    loss = model.loss(window)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.detach()


def final_loss(model: GPT, window: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return model.loss(window).item()


def digest(model: GPT) -> str:
    """SHA-256 of all weights: equal only if every bit is."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def die_in_the_middle_of_the_save(
    engine: ce.Engine, state: dict[str, Any], step: int, folder: Path, console: Console
) -> None:
    """Kills this process while the step's checkpoint is being written, unless done before."""
    marker = folder / f"killed-at-{step}"
    if marker.exists():
        return
    console.line(f"step {step}: killing this process (SIGKILL) in the middle of its save")
    # Durable before the save, not after: between the save and the kill it would give the
    # persister time to finish.
    folder.mkdir(parents=True, exist_ok=True)  # the engine makes it at the first save only
    with marker.open("x") as file:
        os.fsync(file.fileno())
    entry = os.open(folder, os.O_RDONLY)
    os.fsync(entry)
    os.close(entry)
    engine.save_async(state, step=step)
    os.kill(os.getpid(), signal.SIGKILL)


def _prepare(options: Options, threads: int) -> torch.device:
    """Makes two runs of the same options bit-equal; returns the device to train on."""
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: torch sees no GPU here")
    device = torch.device("cuda" if has_gpu and options.device != "cpu" else "cpu")
    torch.set_num_threads(threads)
    torch.manual_seed(options.seed)
    if device.type == "cuda":
        # cuBLAS wants this for sums in a fixed order, set before its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # The backward passes of these kernels add in any order.
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True)
    return device


class Console:
    """What the demo prints: a live line on a terminal, plain lines elsewhere.

    Events come from the engine's own threads; they wait in `events` until the loop prints them, so
    that lines never mix.
    """

    def __init__(self, steps: int) -> None:
        self.events: deque[Event] = deque()
        self._steps = steps
        self._live = sys.stdout.isatty()
        self._since = 0.0
        self._losses: list[Tensor] = []

    def begin(
        self,
        model: GPT,
        device: torch.device,
        options: Options,
        info: ce.CheckpointInfo | None,
        tokens: int,
    ) -> None:
        count = sum(parameter.numel() for parameter in model.parameters())
        self.line(
            f"training a GPT of {count:,} parameters on {device}, "
            f"a checkpoint every {options.every} steps in {options.dir}"
        )
        if info:
            self.line(f"resumed from step {info.step} ({tokens:,} tokens seen): {info.path}")
            if info.step >= options.steps:
                self.line("nothing is left to train: give more --steps, or another --dir")
        self._since = time.perf_counter()

    def step(self, step: int, loss: Tensor, *, saves: bool) -> None:
        """Shows the mean loss and pace since it last did. `saves`: a checkpoint follows."""
        self._print_events()
        self._losses.append(loss)
        now = time.perf_counter()
        if not saves and not (self._live and now - self._since >= 0.5):
            return
        mean = torch.stack(self._losses).mean().item()
        pace = _span((now - self._since) / len(self._losses))
        text = f"step {step}/{self._steps}  loss {mean:.3f}  {pace}/step"
        self._losses.clear()
        self._since = now
        if self._live:
            sys.stdout.write(f"{CLEAR}{text}")
            sys.stdout.flush()
        else:
            self.line(text)

    def line(self, text: str) -> None:
        print(CLEAR + text if self._live else text, flush=True)

    def end(self, loss: float, weights: str, tokens: int) -> None:
        self._print_events()
        self.line(f"final loss {loss:.6f} on held-out text, after {tokens:,} tokens")
        self.line(f"weights sha256 {weights}")

    def _print_events(self) -> None:
        while self.events:
            event = self.events.popleft()
            if isinstance(event, SaveScheduled):
                self.line(f"  checkpoint {event.step}: cost the loop {_span(event.stall)}")
            elif isinstance(event, SaveCommitted):
                self.line(
                    f"  checkpoint {event.info.step}: durable after {_span(event.durable)}, "
                    f"{event.info.nbytes / 1e6:.1f} MB"
                )
            elif isinstance(event, SaveSkipped):
                self.line(f"  checkpoint {event.step}: skipped, {event.reason}")
            elif isinstance(event, SaveFailed):
                self.line(f"  checkpoint {event.step}: FAILED, {event.error}")


def _span(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


if __name__ == "__main__":
    sys.exit(main())

"""A training loop with ckptengine beside it. Stop it however you like; run it again: it goes on.

python examples/train.py [directory]
"""

import logging
import sys

import torch

import ckptengine as ce
from ckptengine.demo.data import Loader, standard_library
from ckptengine.demo.model import GPT

STEPS, EVERY = 120, 20


def main(directory: str) -> None:
    # The engine tells what it does on the logger "ckptengine".
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("ckptengine").setLevel(logging.INFO)

    torch.manual_seed(0)
    model = GPT(layers=4, heads=4, width=256, context=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    loader = Loader(standard_library(4_000_000), context=64, batch=8, seed=0)

    with ce.Engine(directory, keep=3) as engine:
        state = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "loader": ce.PerRank(loader),  # each rank has its own place in the data
            "rng": ce.RngState(),  # dropout draws from it
            "tokens_seen": 0,
        }
        info = engine.restore(state)  # fills the objects in place; None on a fresh run
        if info:
            print(f"resumed from step {info.step}, {state['tokens_seen']:,} tokens seen")

        for step in range(info.step + 1 if info else 1, STEPS + 1):
            window = next(loader)
            loss = model.loss(window)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            state["tokens_seen"] += window[:, 1:].numel()

            if step % 5 == 0:
                print(f"step {step}  loss {loss.item():.3f}")
            if step % EVERY == 0:
                # Returns once the state is copied; steps go on while it is written.
                engine.save_async(state, step=step, user={"loss": loss.item()})


# The guard is a habit, not a need: the engine never imports this file in its own processes.
if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/example")

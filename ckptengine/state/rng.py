"""The random number generators that a training step draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ..errors import StateError


class RngState:
    """Python's, NumPy's (legacy global), torch's and every CUDA device's generator, as one state.

    Belongs to a rank by nature: each rank stores and gets back its own. Holds nothing itself; put
    one into the state, and restoring it sets the generators. The engine restores it last, so that
    nothing drawn while other objects load can disturb it.
    """

    def state_dict(self) -> dict[str, Any]:
        """The generators' states as plain numbers and tensors."""
        version, words, gauss = random.getstate()
        numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
        if numpy_state["bit_generator"] != "MT19937":
            raise StateError(
                f"NumPy's global generator is a {numpy_state['bit_generator']}, which NumPy cannot "
                "set again: keep its `bit_generator.state` in the state yourself"
            )
        state: dict[str, Any] = {
            "python": {
                "version": version,
                "words": torch.tensor(words, dtype=torch.int64),
                "gauss": gauss,
            },
            "numpy": {
                "bit_generator": numpy_state["bit_generator"],
                "key": torch.from_numpy(numpy_state["state"]["key"].copy()),
                "pos": int(numpy_state["state"]["pos"]),
                "has_gauss": int(numpy_state["has_gauss"]),
                "gauss": float(numpy_state["gauss"]),
            },
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = dict(enumerate(torch.cuda.get_rng_state_all()))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the generators. Raises StateError, naming the one that does not fit."""
        try:
            setting = "python"
            saved = state_dict["python"]
            random.setstate((saved["version"], tuple(saved["words"].tolist()), saved["gauss"]))
            setting = "numpy"
            saved = state_dict["numpy"]
            np.random.set_state(
                {
                    "bit_generator": saved["bit_generator"],
                    "state": {"key": saved["key"].numpy(), "pos": saved["pos"]},
                    "has_gauss": saved["has_gauss"],
                    "gauss": saved["gauss"],
                }
            )
            setting = "cuda"
            if "cuda" in state_dict and torch.cuda.is_available():
                for device, saved in state_dict["cuda"].items():
                    if device < torch.cuda.device_count():
                        torch.cuda.set_rng_state(saved, device)
            setting = "torch"
            torch.set_rng_state(state_dict["torch"])
        except (
            ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
        ) as error:  # fmt: skip
            raise StateError(
                f"the saved {setting} generator cannot be set: {error!r}. "
                "Leave RngState out of the state to go on with other random numbers"
            ) from error

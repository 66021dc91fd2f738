"""Checkpoint engine for any PyTorch training loop.

    import ckptengine as ce

    with ce.Engine("runs/demo") as engine:
        info = engine.restore(state)
        for step in range(info.step + 1 if info else 0, steps):
            train_step()
            engine.save_async(state, step=step)

Names are imported when first used, so that tools which need no tensors start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Keep as Keep
    from .engine.engine import Engine as Engine
    from .engine.handle import SaveHandle as SaveHandle
    from .errors import CheckpointError as CheckpointError
    from .errors import ConfigError as ConfigError
    from .errors import ConflictError as ConflictError
    from .errors import CorruptError as CorruptError
    from .errors import IncompleteError as IncompleteError
    from .errors import NotFoundError as NotFoundError
    from .errors import RankFailedError as RankFailedError
    from .errors import StateError as StateError
    from .errors import StoreError as StoreError
    from .errors import WorkerDiedError as WorkerDiedError
    from .restore.load import load as load
    from .restore.verify import verify as verify
    from .state.app_state import AppState as AppState
    from .state.per_rank import PerRank as PerRank
    from .state.rng import RngState as RngState
    from .types import CheckpointInfo as CheckpointInfo
    from .types import Durability as Durability

_HOMES = {
    "Engine": "engine.engine",
    "SaveHandle": "engine.handle",
    "Keep": "config",
    "load": "restore.load",
    "verify": "restore.verify",
    "AppState": "state.app_state",
    "PerRank": "state.per_rank",
    "RngState": "state.rng",
    "CheckpointInfo": "types",
    "Durability": "types",
    "CheckpointError": "errors",
    "NotFoundError": "errors",
    "IncompleteError": "errors",
    "CorruptError": "errors",
    "ConflictError": "errors",
    "StoreError": "errors",
    "WorkerDiedError": "errors",
    "RankFailedError": "errors",
    "StateError": "errors",
    "ConfigError": "errors",
}

__version__ = "0.1.0"
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'ckptengine' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

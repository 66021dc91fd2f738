"""How soon a checkpoint can be read without a template: one tensor of it, and all of them.

The figures; page cache warm, checkpoints of parameters, both moments and one tensor of 16 MiB more:

- first          milliseconds from the call to that tensor of 16 MiB, every page of it touched
- first quarter  the same from a checkpoint of as many tensors and a quarter of the bytes
- all            seconds until all tensors are there, as the library hands them out; mapped ones
                 may be only mapped
- all touched    the same, and every page of all tensors read once
"""

from __future__ import annotations

import contextlib
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from .. import cache, contenders, limits
from ..harness import Turn, Unavailable
from ..trainer import State, Trainer, differing, tensors
from ..workload import WARM, Figure, Race, Settings, Workload

_PROBE = "probe"
_PROBE_BYTES = 16 << 20
_PAGE = 4096


class Loader(ABC):
    """A way to read a checkpoint of which nothing is known but where it is."""

    name: str
    description: str
    writer: str  # the contender that wrote the checkpoint

    @abstractmethod
    def first(self, path: Path) -> torch.Tensor:
        """The probe."""

    @abstractmethod
    def all(self, path: Path) -> State:
        """All tensors, nested or by dotted names."""


class CkptEngine(Loader):
    writer = "ckptengine"

    def __init__(self, mmap: bool) -> None:
        self.name = f"ckptengine {'mmap' if mmap else 'read'}"
        self.description = f"ckptengine.load(mmap={mmap}), checksums of what is taken on"
        self._mmap = mmap

    def first(self, path: Path) -> torch.Tensor:
        import ckptengine as ce

        return ce.load(path, mmap=self._mmap)[_PROBE]

    def all(self, path: Path) -> State:
        import ckptengine as ce

        return ce.load(path, mmap=self._mmap).to_dict()


class TorchLoad(Loader):
    writer = "torch.save"

    def __init__(self, mmap: bool) -> None:
        self.name = f"torch.load {'mmap' if mmap else 'read'}"
        self.description = f"torch.load(mmap={mmap}, weights_only=True)"
        self._mmap = mmap

    def first(self, path: Path) -> torch.Tensor:
        return self.all(path)[_PROBE]

    def all(self, path: Path) -> State:
        return torch.load(path / "state.pt", mmap=self._mmap, weights_only=True)


class SafeOpen(Loader):
    name = "safetensors safe_open"
    description = "safetensors.safe_open and get_tensor"
    writer = "safetensors"

    def first(self, path: Path) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(path / "state.safetensors", framework="pt") as file:
            return file.get_tensor(_PROBE)

    def all(self, path: Path) -> State:
        from safetensors import safe_open

        with safe_open(path / "state.safetensors", framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


class LoadFile(Loader):
    name = "safetensors load_file"
    description = "safetensors.torch.load_file"
    writer = "safetensors"

    def first(self, path: Path) -> torch.Tensor:
        return self.all(path)[_PROBE]

    def all(self, path: Path) -> State:
        from safetensors.torch import load_file

        return load_file(path / "state.safetensors")


class DcpMetadata(Loader):
    name = "dcp metadata"
    description = "FileSystemReader.read_metadata, empty tensors, dcp.load"
    writer = "dcp.save"

    def first(self, path: Path) -> torch.Tensor:
        return self._load(path, lambda name: name == _PROBE)[_PROBE]

    def all(self, path: Path) -> State:
        return self._load(path, lambda name: True)

    def _load(self, path: Path, wanted: Callable[[str], bool]) -> State:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = FileSystemReader(path)
        found: dict[str, Any] = reader.read_metadata().state_dict_metadata
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in found.items()
            if wanted(name)
        }
        load(state, storage_reader=reader)
        return state


class DcpPlanner(Loader):
    name = "dcp planner"
    description = "dcp's _EmptyStateDictLoadPlanner, as its own converters use it"
    writer = "dcp.save"

    def first(self, path: Path) -> torch.Tensor:
        return self._load(path, {_PROBE})[_PROBE]

    def all(self, path: Path) -> State:
        return self._load(path, None)

    def _load(self, path: Path, keys: set[str] | None) -> State:
        from torch.distributed.checkpoint import state_dict_loader
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        state: State = {}
        state_dict_loader._load_state_dict(
            state,
            storage_reader=FileSystemReader(path),
            planner=_EmptyStateDictLoadPlanner(keys=keys),
            no_dist=True,
        )
        return state


class TorchCheckpointing(Loader):
    name = "torch_checkpointing"
    description = "CheckpointManager.load into items without values, mapped"
    writer = "torch_checkpointing"

    def first(self, path: Path) -> torch.Tensor:
        return self._load(path, [_PROBE])[_PROBE]

    def all(self, path: Path) -> State:
        return self._load(path, sorted({found.name.rsplit("_", 1)[0] for found in path.iterdir()}))

    def _load(self, path: Path, items: list[str]) -> State:
        return dict(self._manager.load(str(path), into=dict.fromkeys(items)))

    @cached_property
    def _manager(self) -> Any:
        from torch_checkpointing import CheckpointManager

        return CheckpointManager(CheckpointManager.Config.with_sync_save())


class TorchSnapshot(Loader):
    name = "torchsnapshot"
    description = "Snapshot.read_object; it has no way to read all without a template"
    writer = "torchsnapshot"

    def first(self, path: Path) -> torch.Tensor:
        from torchsnapshot import Snapshot

        return Snapshot(str(path)).read_object(f"0/state/{_PROBE}")

    def all(self, path: Path) -> State:
        raise Unavailable("reads all only into a template")


LOADERS: dict[str, Callable[[], Loader]] = {
    "ckptengine mmap": lambda: CkptEngine(mmap=True),
    "ckptengine read": lambda: CkptEngine(mmap=False),
    "torch.load mmap": lambda: TorchLoad(mmap=True),
    "torch.load read": lambda: TorchLoad(mmap=False),
    "safetensors safe_open": SafeOpen,
    "safetensors load_file": LoadFile,
    "dcp metadata": DcpMetadata,
    "dcp planner": DcpPlanner,
    "torch_checkpointing": TorchCheckpointing,
    "torchsnapshot": TorchSnapshot,
}


class Checkpoints:
    """The whole state and the quarter, written once by each contender that a loader needs."""

    def __init__(self, whole: State, quarter: State, directory: Path) -> None:
        self.whole = whole
        self._quarter = quarter
        self._directory = directory
        self._written: dict[str, tuple[Path, Path]] = {}

    def by(self, writer: str) -> tuple[Path, Path]:
        if writer not in self._written:
            contender = contenders.ALL[writer]()
            root = self._directory / writer
            root.mkdir()
            contender.open(root)
            try:
                for number, state in enumerate((self.whole, self._quarter)):
                    contender.save(state, root / str(number))
                self._written[writer] = (
                    contender.location(root / "0"),
                    contender.location(root / "1"),
                )
            finally:
                contender.close()
        return self._written[writer]


class Load:
    """One loader's turn."""

    def __init__(self, loader: Loader, checkpoints: Checkpoints) -> None:
        self.name = loader.name
        self.description = loader.description
        self._loader = loader
        self._checkpoints = checkpoints

    def turn(self) -> Turn:
        whole, quarter = self._checkpoints.by(self._loader.writer)
        figures = {"first": self._first(whole), "first quarter": self._first(quarter)}
        with contextlib.suppress(Unavailable):  # some can only name a tensor
            figures |= self._all(whole)
        return Turn(figures)

    def close(self) -> None:
        pass

    def _first(self, path: Path) -> float:
        _prepare_cache(path)
        start = time.perf_counter()
        probe = self._loader.first(path)
        _touch(probe)
        taken = time.perf_counter() - start
        self._check({_PROBE: self._checkpoints.whole[_PROBE]}, {_PROBE: probe})
        return 1000 * taken

    def _all(self, path: Path) -> dict[str, float]:
        _prepare_cache(path)
        start = time.perf_counter()
        state = self._loader.all(path)
        handed = time.perf_counter()
        for _, tensor in tensors(state):
            _touch(tensor)
        touched = time.perf_counter()
        self._check(self._checkpoints.whole, state)
        return {"all": handed - start, "all touched": touched - start}

    def _check(self, saved: State, found: State) -> None:
        if wrong := differing(saved, found):
            raise RuntimeError(f"{wrong} came back with other bits")


def _prepare_cache(path: Path) -> None:
    gc.collect()  # what an earlier load mapped or allocated must be gone
    cache.settle()
    cache.warm(cache.files(path))


def _touch(tensor: torch.Tensor) -> None:
    """Read something of every page."""
    tensor.reshape(-1).view(torch.int32)[:: _PAGE // 4].sum()


def _prepare(settings: Settings) -> Race:
    trainer = Trainer(settings.nbytes)
    probe = torch.randn(_PROBE_BYTES // 4)
    whole = {**trainer.state, _PROBE: probe}
    quarter = {**Trainer(settings.nbytes // 4).state, _PROBE: probe}
    arena = limits.Arena(whole)
    checkpoints = Checkpoints(whole, quarter, settings.directory)
    facts = {"bytes": trainer.nbytes + _PROBE_BYTES, "items": trainer.items + 1}
    return Race(
        state=facts,
        limits=[limits.ReadLimit(arena, settings.directory)],
        contenders=[Load(LOADERS[name](), checkpoints) for name in settings.contenders],
    )


WORKLOAD = Workload(
    name="load",
    figures=(
        Figure("first", "one tensor of 16 MiB from the whole state", unit="ms"),
        Figure("first quarter", "the same from a quarter of the state", unit="ms"),
        Figure("all", "all tensors, as they are handed out"),
        Figure("all touched", "all tensors, every page touched", WARM),
    ),
    contenders=tuple(LOADERS),
    prepare=_prepare,
    disk=10.0,
    first=("first", "all touched"),
    notes=(
        "No template; page cache warm. Only ckptengine checks checksums, those of what is taken. "
        "`first` is one tensor of 16 MiB, `all` may only be mapped, `all touched` has read every "
        "page; its limit is a raw read into memory that was touched before. `first first` and "
        "`first all touched` are those of the first round of all, in no median."
    ),
)

"""The ways to save and restore that are compared, one small class each.

Every peer runs in the best configuration that its authors publish and that a CPU machine can run;
where two are plausible, both are contenders.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from .harness import Unavailable
from .trainer import State, tensors

_PATIENCE = 900  # seconds without an end after which a peer is taken for hung


class Contender(ABC):
    """One at a time is in use; a directory is used for one save only."""

    name: str
    description: str
    queues = False  # whether it takes a save while an earlier one is still being written

    def open(self, root: Path) -> None:  # noqa: B027
        """Prepare, once; all directories lie directly below `root`. May raise `Unavailable`."""

    @abstractmethod
    def save_async(self, state: State, directory: Path) -> None:
        """Save; return as soon as the trainer may change the state."""

    def done(self) -> bool:
        """Whether the last save is durable. Never blocks; called from a thread beside the loop."""
        return True

    def wait(self) -> None:  # noqa: B027
        """Return when the last save is durable, raise when it failed."""

    def save(self, state: State, directory: Path) -> None:
        """Save durably."""
        self.save_async(state, directory)
        self.wait()

    @abstractmethod
    def restore_into(self, state: State, directory: Path) -> None:
        """Fill the tensors of `state`, which exist already, in place."""

    def location(self, directory: Path) -> Path:
        """Where the files of the save to `directory` are."""
        return directory

    def timings(self) -> dict[str, float]:
        """What it says itself of its last save, for the raw results."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Let go of buffers and processes; `open` may follow."""


class Nothing(Contender):
    """No save at all: shows what the method itself reports for a cost of zero."""

    name = "none"
    description = "no save: the noise of the method"

    def save_async(self, state: State, directory: Path) -> None:
        pass

    def restore_into(self, state: State, directory: Path) -> None:
        raise Unavailable("saves nothing")


class TorchSave(Contender):
    name = "torch.save"
    description = "torch.save and fsync; torch.load(mmap=True) and copy"

    def save_async(self, state: State, directory: Path) -> None:
        directory.mkdir()
        path = directory / "state.pt"
        torch.save(state, path)
        _sync(path)
        _sync(directory)

    def restore_into(self, state: State, directory: Path) -> None:
        # Mapped: otherwise torch.load fills fresh memory, whose first touch costs most of the time.
        _copy(torch.load(directory / "state.pt", mmap=True, weights_only=True), state)


class SafeTensors(Contender):
    name = "safetensors"
    description = "safetensors save_file and fsync; safe_open and copy"

    def open(self, root: Path) -> None:
        try:
            import safetensors.torch  # noqa: F401
        except ImportError:
            raise Unavailable("safetensors is not installed") from None

    def save_async(self, state: State, directory: Path) -> None:
        from safetensors.torch import save_file

        directory.mkdir()
        path = directory / "state.safetensors"
        save_file(dict(tensors(state)), path)
        _sync(path)
        _sync(directory)

    def restore_into(self, state: State, directory: Path) -> None:
        from safetensors import safe_open

        with safe_open(directory / "state.safetensors", framework="pt") as file:
            for name, tensor in tensors(state):
                tensor.copy_(file.get_tensor(name))


class _Background(Contender):
    """A save in the background that is known by a future."""

    _future: Future[Any] | None = None

    def done(self) -> bool:
        return self._future is None or self._future.done()

    def wait(self) -> None:
        if self._future is not None:
            self._future.result(timeout=_PATIENCE)
            # Its result may refer to the staged tensors: kept, they would stay allocated.
            self._future = None


class DcpSave(Contender):
    """`torch.distributed.checkpoint.save`, which is synchronous and fsyncs its files."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.name = "dcp.save" if threads == 1 else f"dcp.save x{threads}"
        self.description = f"dcp.save with {threads} writer thread(s); dcp.load"

    def open(self, root: Path) -> None:
        _join_group()

    def save_async(self, state: State, directory: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        save(state, storage_writer=FileSystemWriter(directory, thread_count=self._threads))

    def restore_into(self, state: State, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        load(state, checkpoint_id=directory)


class DcpAsync(_Background, DcpSave):
    """`torch.distributed.checkpoint.async_save`, by thread or process, stager as asked for."""

    def __init__(self, kind: str, cached: bool) -> None:
        super().__init__(threads=1)
        self._kind = kind
        self._cached = cached
        self._stager: Any = None
        stager = "DefaultStager cached in shared memory" if cached else "the default stager"
        self.name = f"dcp.async {kind}" + (" cached" if cached else "")
        self.description = f"dcp.async_save by {kind} with {stager}; dcp.load"

    def open(self, root: Path) -> None:
        _join_group()
        if self._cached:
            from torch.distributed.checkpoint import staging

            if not hasattr(staging, "DefaultStager"):
                raise Unavailable(f"torch {torch.__version__} has no DefaultStager")
            cuda = torch.cuda.is_available()
            # Without CUDA there is nothing to pin, and a stager in a thread would read the state
            # while the next step changes it.
            options = staging.StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=True,
                use_async_staging=False,
                use_non_blocking_copy=cuda,
            )
            self._stager = staging.DefaultStager(options)

    def save_async(self, state: State, directory: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        extra = {"async_stager": self._stager} if self._stager else {}
        # Without staging in a thread, as above, the answer is a plain future.
        self._future = cast(
            "Future[Any]",
            async_save(
                state,
                checkpoint_id=directory,
                async_checkpointer_type=AsyncCheckpointerType[self._kind.upper()],
                **extra,
            ),
        )

    def close(self) -> None:
        self.wait()
        if self._stager is not None:
            self._stager.close()


class _Unsynced(_Background):
    """A peer that leaves its files to the page cache: their fsync is part of the save here."""

    def open(self, root: Path) -> None:
        self._pool = ThreadPoolExecutor(1)

    def _finish(self, written: Callable[[], object], directory: Path) -> None:
        """Make the files durable, in a thread, once `written` returns."""

        def finish() -> None:
            written()
            for path in [*directory.rglob("*"), directory]:
                _sync(path)

        self._future = self._pool.submit(finish)

    def close(self) -> None:
        self.wait()
        self._pool.shutdown()


class TorchCheckpointing(_Unsynced):
    name = "torch_checkpointing"
    description = "CheckpointManager, asynchronous, as documented for CPUs, and fsync; its load"

    def open(self, root: Path) -> None:
        try:
            from torch_checkpointing import CheckpointManager
            from torch_checkpointing.config import AsyncCheckpointSaverConfig
            from torch_checkpointing.staging import CheckpointStagerConfig
            from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
        except ImportError as error:
            raise Unavailable(f"torch_checkpointing cannot be imported: {error}") from error
        super().open(root)
        cuda = torch.cuda.is_available()
        staging = CheckpointStagerConfig(
            use_pinned_memory=cuda,
            use_non_blocking_copy=cuda,
            # A stager in a thread would read the state while the next step changes it.
            use_async_staging=False,
        )
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging),
                # Its O_DIRECT writes are not aligned: where the file system insists, a save fails.
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def save_async(self, state: State, directory: Path) -> None:
        future = self._manager.save(str(directory), state)
        self._finish(partial(future.result, _PATIENCE), directory)

    def restore_into(self, state: State, directory: Path) -> None:
        self._manager.load(str(directory), into=state, strict=True)

    def close(self) -> None:
        super().close()
        self._manager.close()


class TorchSnapshot(_Unsynced):
    name = "torchsnapshot"
    description = "torchsnapshot Snapshot.async_take and fsync; Snapshot.restore"

    def open(self, root: Path) -> None:
        try:
            import torchsnapshot  # noqa: F401
        except ImportError as error:
            raise Unavailable(f"torchsnapshot cannot be imported: {error}") from error
        super().open(root)

    def save_async(self, state: State, directory: Path) -> None:
        from torchsnapshot import Snapshot, StateDict

        pending = Snapshot.async_take(str(directory), {"state": StateDict(**state)})
        self._finish(pending.wait, directory)

    def restore_into(self, state: State, directory: Path) -> None:
        from torchsnapshot import Snapshot, StateDict

        Snapshot(str(directory)).restore({"state": StateDict(**state)})


class NvrxAsync(Contender):
    name = "nvrx async"
    description = "nvidia-resiliency-ext, FileSystemWriterAsync in a persistent worker"

    def open(self, root: Path) -> None:
        try:
            import nvidia_resiliency_ext  # noqa: F401
        except ImportError:
            raise Unavailable("nvidia-resiliency-ext is not installed") from None
        if not torch.cuda.is_available():
            raise Unavailable("needs CUDA: it asserts that tensors are on a GPU")
        raise Unavailable("this workload keeps its state in host memory")

    def save_async(self, state: State, directory: Path) -> None:
        raise NotImplementedError

    def restore_into(self, state: State, directory: Path) -> None:
        raise NotImplementedError


class CkptEngine(Contender):
    """The engine with its defaults, but for `options`, which then belong into the name."""

    queues = True

    def __init__(self, suffix: str = "", **options: Any) -> None:
        self.name = f"ckptengine {suffix}".strip()
        chosen = "".join(f", {key}={value!r}" for key, value in options.items())
        self.description = (
            f"Engine.save_async with its defaults{chosen}; Engine.restore, checksums on"
        )
        self._options = options
        self._engine: Any = None
        self._handle: Any = None
        self._paths: dict[Path, Path] = {}

    def open(self, root: Path) -> None:
        try:
            import ckptengine as ce
        except ImportError as error:
            raise Unavailable(f"ckptengine cannot be imported: {error}") from error
        self._engine = ce.Engine(root, **self._options)

    def save_async(self, state: State, directory: Path) -> None:
        self._handle = self._engine.save_async(state, step=_number(directory))
        self._paths[directory] = Path(self._handle.path)

    def done(self) -> bool:
        return self._handle is None or self._handle.done()

    def wait(self) -> None:
        if self._handle is not None:
            self._handle.wait(timeout=_PATIENCE)

    def restore_into(self, state: State, directory: Path) -> None:
        if self._engine.restore(state, step=_number(directory)) is None:
            raise RuntimeError("restore found nothing")

    def location(self, directory: Path) -> Path:
        return self._paths.get(directory, directory)

    def timings(self) -> dict[str, float]:
        return dict(self._handle.timings)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._handle = None


class CkptEngineSave(CkptEngine):
    """The call that waits: it writes beside the copy, since nobody gains by an earlier return."""

    def __init__(self) -> None:
        super().__init__("save")
        self.description = "Engine.save with the engine's defaults; Engine.restore, checksums on"

    def save_async(self, state: State, directory: Path) -> None:
        info = self._engine.save(state, step=_number(directory))
        self._paths[directory] = Path(info.path)

    def timings(self) -> dict[str, float]:
        return {}


ALL: dict[str, Callable[[], Contender]] = {
    "none": Nothing,
    "ckptengine": CkptEngine,
    "ckptengine save": CkptEngineSave,
    "torch.save": TorchSave,
    "safetensors": SafeTensors,
    "dcp.save": lambda: DcpSave(1),
    "dcp.save x2": lambda: DcpSave(2),
    "dcp.async thread": lambda: DcpAsync("thread", cached=False),
    "dcp.async thread cached": lambda: DcpAsync("thread", cached=True),
    "dcp.async process": lambda: DcpAsync("process", cached=False),
    "dcp.async process cached": lambda: DcpAsync("process", cached=True),
    "torch_checkpointing": TorchCheckpointing,
    "torchsnapshot": TorchSnapshot,
    "nvrx async": NvrxAsync,
}


def _copy(source: State, target: State) -> None:
    found = dict(tensors(source))
    for name, tensor in tensors(target):
        tensor.copy_(found[name])


def _number(directory: Path) -> int:
    return int(directory.name)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _join_group() -> None:
    """A group of one without a network: DCP's process mode does not work without a group."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    # For DCP's own worker, which makes a TCP store and would look the host's name up.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

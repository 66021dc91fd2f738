"""What capturing from CUDA devices needs beyond a copy: pinned memory, and the right order.

Not run where there is no CUDA device; the tests of it are skipped there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch

_log = logging.getLogger("ckptengine")


def pin(address: int, nbytes: int) -> bool:
    """Page-locks host memory, so that devices copy into it at the bus's speed and by themselves.

    Returns whether it is pinned: never without CUDA, and not where a limit forbids it.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return False
    failed = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if failed:
        _log.warning(
            "host memory for snapshots cannot be pinned (CUDA error %d): copies are slower", failed
        )
    return not failed


def unpin(address: int) -> None:
    """Undoes `pin`."""
    torch.cuda.cudart().cudaHostUnregister(address)


class SideStreams:
    """Copies that start after what the caller's streams had been given at construction, and beside
    what these are given later."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            # Streams of torch do not wait for each other: without the event the copy could read
            # parameters that the last optimizer step is still writing.
            event = torch.cuda.current_stream(device).record_event()
            self._streams[device] = torch.cuda.Stream(device)
            self._streams[device].wait_event(event)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Copies inside go to the side streams, and are done when the block is left."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams.values():
                stack.enter_context(torch.cuda.stream(stream))
            yield
            self.synchronize()

    def synchronize(self) -> None:
        """Waits for what the side streams were given."""
        for stream in self._streams.values():
            stream.synchronize()

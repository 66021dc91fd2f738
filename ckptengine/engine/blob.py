"""A plan in shared memory: handed over once, used by every save of it."""

from __future__ import annotations

import os

from ..persist.pool import SharedMemory, new_id


class PlanMemory:
    """A sealed-by-convention memfd: written here, only read elsewhere."""

    def __init__(self, data: bytes) -> None:
        fd = os.memfd_create("ckptengine-plan")
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        self.shared = SharedMemory(new_id(), fd, len(data))

    def close(self) -> None:
        """Gives the memory back, once the persister has unmapped it too."""
        os.close(self.shared.fd)

"""The error tree, grouped by what a handler would do about it.

    CheckpointError                 catch this to catch everything the library raises on purpose
    ├── NotFoundError               nothing of that name or step: start fresh, or look elsewhere
    ├── IncompleteError             it exists but parts are missing: take another checkpoint
    ├── CorruptError                bytes do not verify: take another copy or checkpoint
    ├── ConflictError               another live owner has the directory: do not write here
    ├── StoreError                  the store refused (disk full, permission, gone); see `retryable`
    ├── WorkerDiedError             the persister process died; the next save starts a new one
    ├── RankFailedError             another rank failed; `rank` says which
    ├── StateError                  the state cannot be saved or does not fit; nothing was touched
    └── ConfigError                 an argument is wrong; also a ValueError

Each message says what went wrong, where (key, file, rank) and what to do.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable

_RETRYABLE = frozenset({errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE})


class CheckpointError(Exception):
    """Root of every error that ckptengine raises on purpose."""


class NotFoundError(CheckpointError):
    """No checkpoint, step or key of that name exists where it was looked for."""


class IncompleteError(CheckpointError):
    """A checkpoint is there, but parts that its commit record lists are missing."""


class CorruptError(CheckpointError):
    """Stored bytes do not match their checksums, sizes or form.

    `problems` holds one line per damaged file or chunk.
    """

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


class ConflictError(CheckpointError):
    """Another live owner writes to the same directory, or the name is already committed."""


class StoreError(CheckpointError):
    """The store refused an operation. `retryable` tells whether trying again can help."""

    def __init__(self, message: str, *, retryable: bool = False, errno: int | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.errno = errno

    @classmethod
    def from_os_error(cls, error: OSError, doing: str, path: object, hint: str = "") -> StoreError:
        """Names the operation, the path and the system's own word for what went wrong."""
        code = errno.errorcode.get(error.errno or 0, "EUNKNOWN")
        message = f"{code} while {doing} {path}: {error.strerror or error}"
        return cls(
            message + (f". {hint}" if hint else ""),
            retryable=error.errno in _RETRYABLE,
            errno=error.errno,
        )


class WorkerDiedError(CheckpointError):
    """The persister process ended before it had committed the save."""


class RankFailedError(CheckpointError):
    """A save or restore failed because of another rank."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class StateError(CheckpointError):
    """The state holds something that cannot be stored, or does not fit the checkpoint.

    `keys` names the leaves at fault. Raised before anything is written or filled.
    """

    def __init__(self, message: str, keys: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)


class ConfigError(CheckpointError, ValueError):
    """An argument or a combination of arguments is not allowed."""

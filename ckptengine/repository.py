"""Checkpoints in a store: the sole authority on what is there, and the only one that commits.

A checkpoint becomes visible in `Stage.commit`, by one rename, and nowhere else. It ceases to be
visible in `Repository.delete`, by one rename, before the first of its bytes is removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Iterable

from .errors import CorruptError, IncompleteError, NotFoundError, StoreError
from .format import index as index_format
from .format import manifest as manifest_format
from .format.checksum import bytes_digest
from .format.index import Index
from .format.manifest import FileEntry, Manifest
from .pause import collector_paused
from .store import local
from .types import CheckpointId

_TEMPORARY = ".tmp-"
_TRASH = ".trash-"


class Repository:
    """The checkpoints below one directory, `root`. Holds no state; every answer is read anew."""

    def __init__(self, root: str) -> None:
        self.root = root

    def path(self, checkpoint: CheckpointId) -> str:
        """The directory of a checkpoint, whether it is there or not."""
        return os.path.join(self.root, checkpoint.name)

    def ids(self) -> list[CheckpointId]:
        """All committed checkpoints, oldest first, by number: names and times prove nothing.

        An absent directory has none; one that cannot be read is a StoreError.
        """
        return [c for c in self.named() if os.path.exists(self._manifest_path(c))]

    def named(self) -> list[CheckpointId]:
        """All directories that carry a checkpoint's name, with a commit record or without."""
        found = (CheckpointId.parse(name) for name in self._names())
        return sorted(checkpoint for checkpoint in found if checkpoint)

    def manifest(self, checkpoint: CheckpointId) -> Manifest:
        """The verified commit record.

        Raises NotFoundError, IncompleteError (a directory without a record) or CorruptError.
        """
        path = self._manifest_path(checkpoint)
        if not os.path.isdir(self.path(checkpoint)):
            raise NotFoundError(f"{self.path(checkpoint)}: no such checkpoint")
        found = Manifest.from_bytes(local.read_exactly(path), path)
        if found.id != checkpoint:
            raise CorruptError(f"{path}: is the commit record of {found.id.name}")
        return found

    def index(self, checkpoint: CheckpointId, manifest: Manifest, rank: int) -> Index:
        """The verified index of one rank."""
        name = index_format.name(rank)
        path = os.path.join(self.path(checkpoint), name)
        entry = manifest.files.get(name)
        if entry is None:
            raise IncompleteError(f"{path}: not in the commit record")
        data = local.read_exactly(path, entry.nbytes)
        if bytes_digest(data) != entry.digest:
            raise CorruptError(f"{path}: the index does not match its digest")
        with collector_paused():
            return Index.from_bytes(data, path)

    def intact(self, checkpoint: CheckpointId) -> bool:
        """Whether the commit record verifies and every file has its size: what can be told
        without reading the data."""
        try:
            files = self.manifest(checkpoint).files
            directory = self.path(checkpoint)
            return all(
                os.stat(os.path.join(directory, name)).st_size == entry.nbytes
                for name, entry in files.items()
            )
        except (OSError, CorruptError, IncompleteError, NotFoundError, StoreError):
            return False

    def stage(self, checkpoint: CheckpointId) -> Stage:
        """A new, invisible directory to write a checkpoint into."""
        path = os.path.join(self.root, f"{_TEMPORARY}{checkpoint.name}-{uuid.uuid4().hex[:12]}")
        with local.store_errors("making", path):
            os.mkdir(path)
        return Stage(self, path)

    def leftovers(self) -> list[str]:
        """Directories of saves that were never committed and of deletions that were cut short."""
        return [name for name in self._names() if name.startswith((_TEMPORARY, _TRASH))]

    def sweep(self, names: Iterable[str]) -> None:
        """Removes `names` of `leftovers`. The caller knows that their owner is gone."""
        for name in names:
            local.remove_tree(os.path.join(self.root, name))

    def delete(self, checkpoint: CheckpointId) -> bool:
        """Makes a checkpoint invisible, then removes it as far as it can be.

        Returns False, and leaves it whole, while somebody reads it.
        """
        path = self.path(checkpoint)
        trash = os.path.join(self.root, f"{_TRASH}{checkpoint.name}-{uuid.uuid4().hex[:12]}")
        with local.store_errors("deleting", path):
            try:
                # For writing too: over NFS only that can be locked for one's own.
                fd = os.open(self._manifest_path(checkpoint), os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            try:
                if not _locked(fd, fcntl.LOCK_EX):
                    return False
                local.rename_noreplace(path, trash)
            except FileNotFoundError:
                return False
            finally:
                os.close(fd)
            # Else power loss could bring the name back without the data.
            local.sync_directory(self.root)
        local.remove_tree(trash)
        return True

    def hold(self, checkpoint: CheckpointId) -> Hold:
        """Keeps a checkpoint from being deleted while it is read."""
        return Hold(self._manifest_path(checkpoint))

    def _manifest_path(self, checkpoint: CheckpointId) -> str:
        return os.path.join(self.root, checkpoint.name, manifest_format.NAME)

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.root))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError.from_os_error(error, "listing", self.root) from error


class Stage:
    """A checkpoint being written. Invisible until `commit`; whoever made it removes it."""

    def __init__(self, repository: Repository, path: str) -> None:
        self.path = path
        self._repository = repository

    def file(self, name: str) -> str:
        """The path of a file in it."""
        return os.path.join(self.path, name)

    def put(self, name: str, data: bytes) -> FileEntry:
        """Writes a small file, durably."""
        path = self.file(name)
        with local.store_errors(f"writing {len(data)} bytes to", path):
            local.put_new(path, data)
        return FileEntry(len(data), bytes_digest(data))

    def share(self, name: str, source: str) -> bool:
        """Puts a committed file that is to stay as it is into this checkpoint too.

        As a copy that shares its blocks, where the file system can make one, since a change in
        place then hits one checkpoint only; else as a hard link. The bytes stay until the last
        checkpoint that has them is deleted. False, and nothing done, where neither can be made.
        """
        path = self.file(name)
        with local.store_errors("sharing", path):
            return local.share(source, path)

    def commit(self, manifest: Manifest) -> str:
        """Makes the checkpoint visible and durable, and returns its path.

        Every file that `manifest` lists must have been synced. Raises ConflictError where the name
        is taken; nothing is ever overwritten.
        """
        root = self._repository.root
        path = self._repository.path(manifest.id)
        self.put(manifest_format.NAME, manifest.to_bytes())
        with local.store_errors("committing", path):
            local.sync_directory(self.path)
            try:
                local.rename_noreplace(self.path, path)
            except FileExistsError:
                raise local.refuse_existing(path) from None
            local.sync_directory(root)
        return path

    def discard(self) -> None:
        """Removes what was written, as far as it can be."""
        local.remove_tree(self.path)


class Hold:
    """A shared lock on a commit record. A context manager; the lock goes with the process too."""

    def __init__(self, path: str) -> None:
        self._fd = local.open_for_reading(path)
        # A deletion that came between the opening and the lock has moved the record away.
        if not (_locked(self._fd, fcntl.LOCK_SH) and local.names(path, self._fd)):
            self.release()
            raise NotFoundError(f"{path}: the checkpoint was deleted")

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _locked(fd: int, kind: int) -> bool:
    """Takes a lock; False where another's stands against it. A file system without locks cannot
    keep anybody from deleting what is read; all else works there."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno != errno.EWOULDBLOCK
    return True


class Taken:
    """The ids that are taken, as far as the owner of a directory knows: no name is used twice, not
    even after a failure or a deletion."""

    def __init__(self, ids: Iterable[CheckpointId]) -> None:
        self._attempts: dict[int, int] = {}  # step to the number of its next attempt
        self._newest = -1
        for checkpoint in ids:
            self.add(checkpoint)

    def add(self, checkpoint: CheckpointId) -> None:
        step = checkpoint.step
        self._attempts[step] = max(self._attempts.get(step, 0), checkpoint.attempt + 1)
        self._newest = max(self._newest, step)

    def next(self, step: int | None) -> CheckpointId:
        """The next attempt at `step`, or at one more than the newest step."""
        step = self._newest + 1 if step is None else step
        return CheckpointId(step, self._attempts.get(step, 0))

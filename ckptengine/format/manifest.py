"""`manifest.json`: the commit record. A checkpoint is visible if and only if it is in place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import CorruptError
from ..types import CheckpointId, CheckpointInfo
from . import canonical
from .checksum import bytes_digest

NAME = "manifest.json"
FORMAT_VERSION = "1.0"
"""Major.minor. A reader refuses a newer major version and ignores what it does not know of a minor."""


class FileEntry(NamedTuple):
    """One file of the checkpoint."""

    nbytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """All that a reader must know before it opens any other file of the checkpoint."""

    step: int
    attempt: int
    created: float  # seconds since the epoch
    world_size: int
    files: Mapping[str, FileEntry]
    user: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    candidate: bool = False

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(self.step, self.attempt)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.files.values())

    def info(self, path: str) -> CheckpointInfo:
        """What users get to see of the checkpoint at `path`."""
        return CheckpointInfo(
            step=self.step,
            attempt=self.attempt,
            path=path,
            created=self.created,
            world_size=self.world_size,
            nbytes=self.nbytes,
            user=self.user,
            metrics=self.metrics,
            candidate=self.candidate,
        )

    def to_bytes(self) -> bytes:
        """The record, its own digest in it."""
        body = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "attempt": self.attempt,
            "created": self.created,
            "world_size": self.world_size,
            "files": {
                name: {"nbytes": entry.nbytes, "digest": entry.digest}
                for name, entry in self.files.items()
            },
            "user": self.user,
            # JSON has no NaN; metrics that are not finite travel as text.
            "metrics": {k: v if math.isfinite(v) else str(v) for k, v in self.metrics.items()},
            "candidate": self.candidate,
        }
        body["digest"] = bytes_digest(canonical.dumps(body))
        return canonical.dumps(body) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Parses and verifies a record read from `where`.

        Raises CorruptError when it is damaged or written by a newer major version.
        """
        try:
            body = json.loads(data)
            digest = body.pop("digest", None)
            version = str(body["format_version"])
            if int(version.partition(".")[0]) > int(FORMAT_VERSION.partition(".")[0]):
                raise CorruptError(
                    f"{where}: written in format {version}; this release reads up to "
                    f"{FORMAT_VERSION}. Install a newer ckptengine"
                )
            if digest != bytes_digest(canonical.dumps(body)):
                raise CorruptError(f"{where}: the commit record does not match its own digest")
            return cls(
                step=_count(body["step"]),
                attempt=_count(body["attempt"]),
                created=float(body["created"]),
                world_size=_count(body["world_size"]),
                files={
                    _file_name(name): FileEntry(_count(entry["nbytes"]), str(entry["digest"]))
                    for name, entry in body["files"].items()
                },
                user=body.get("user"),
                metrics={k: float(v) for k, v in body.get("metrics", {}).items()},
                candidate=bool(body.get("candidate", False)),
            )
        except CorruptError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptError(f"{where}: not a commit record: {error!r}") from error


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _file_name(name: str) -> str:
    # Names come from the store: one that leaves the directory must not be opened.
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a file name")
    return name

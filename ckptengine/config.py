"""Settings, checked where they are made: each error names the field, the value and what is allowed."""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay; one that any rule keeps stays.

    `last`: the newest so many. `every`: those whose step is a multiple. `best`: so many with the
    best `metric` (`mode` "min" or "max"; NaN and missing are worst). The newest good checkpoint
    stays whatever the rules say.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: str = "min"

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"keep: {name}={value!r} must be a whole number above 0, or None")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"keep: mode={self.mode!r} must be 'min' or 'max'")
        if (self.best is None) != (self.metric is None):
            raise ConfigError("keep: best and metric go together")
        if self.last is None and self.every is None and self.best is None:
            raise ConfigError("keep: give last, every or best; keep=None keeps all")


def keep_policy(keep: int | Keep | None) -> Keep | None:
    """`Engine(keep=...)`: a number is that many of the newest."""
    if keep is None or isinstance(keep, Keep):
        return keep
    if type(keep) is not int:
        raise ConfigError(f"keep={keep!r} must be a number of checkpoints, a Keep, or None for all")
    return Keep(last=keep)


_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):/")


def local_root(root: Any) -> str:
    """The absolute directory that `root` names: a later `chdir` must not move the run.

    Raises ConfigError for what is not a local directory's name.
    """
    try:
        text = os.fspath(root)
    except TypeError:
        raise ConfigError(f"root={root!r} must be a path") from None
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if not text or "\0" in text:
        raise ConfigError(f"root={text!r} names no directory")
    scheme = _SCHEME.match(text)
    if scheme and scheme[1].lower() == "file" and text.lower().startswith("file:///"):
        text = text[len("file://") :]
    elif scheme:
        raise ConfigError(
            f"root={text!r}: stores other than directories are not part of this release. "
            "(A pathlib.Path folds the two slashes of a URL into one: pass URLs as str)"
        )
    if os.path.exists(text) and not os.path.isdir(text):
        raise ConfigError(f"root={text!r} is a file: name a directory")
    return os.path.abspath(str(text))


def one_of(field: str, value: Any, allowed: tuple[str, ...]) -> str:
    """`value`, if it is one of the words allowed."""
    if value not in allowed:
        raise ConfigError(f"{field}={value!r} must be one of {', '.join(map(repr, allowed))}")
    return str(value)


def positive(field: str, value: Any) -> float:
    """`value`, if it is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{field}={value!r} must be a number above 0")
    return float(value)


def checked_step(step: Any) -> int:
    """`step`, if it is a count. NumPy's and torch's whole numbers are taken as well."""
    try:
        number = step.__index__()
    except (AttributeError, TypeError):
        raise ConfigError(f"step={step!r} must be a whole number") from None
    if number < 0:
        raise ConfigError(f"step={step!r} must not be negative")
    return int(number)


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """`metrics` as plain floats."""
    checked: dict[str, float] = {}
    if not isinstance(metrics, Mapping | None):
        raise ConfigError(f"metrics={metrics!r} must be a mapping of names to numbers")
    for name, value in (metrics or {}).items():
        try:
            checked[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise ConfigError(f"metrics[{name!r}]={value!r} must be a number") from None
    return checked


def checked_user(user: Any) -> Any:
    """`user` as it will come back: only what JSON can say, so that it comes back the same."""
    try:
        copied = json.loads(json.dumps(user, allow_nan=False))
        changed = _plain(user) != copied
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"user={reprlib.repr(user)} must be JSON: {error}") from None
    if changed:
        raise ConfigError(
            f"user={reprlib.repr(user)} would change its form as JSON: use text as keys"
        )
    return copied


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value

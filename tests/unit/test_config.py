"""Settings: what is taken, what is refused, and that the refusal names field and value."""

from __future__ import annotations

import enum
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptengine as ce
from ckptengine import config
from ckptengine.errors import ConfigError


@pytest.mark.parametrize("given_as", [str, Path, os.fsencode, lambda path: f"file://{path}"])
def test_a_root_is_taken_in_every_form(tmp_path: Path, given_as: Any) -> None:
    assert config.local_root(given_as(tmp_path / "a")) == str(tmp_path / "a")


def test_a_root_is_absolute_and_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config.local_root("runs/demo/") == str(tmp_path / "runs" / "demo")
    assert config.local_root("./x/../y") == str(tmp_path / "y")


@pytest.mark.parametrize(
    "root",
    ["", "a\0b", "s3://bucket/run", "s3:/bucket/run", Path("s3://bucket"), "memory://x", None, 5],
)
def test_a_root_that_names_no_directory(root: Any) -> None:
    with pytest.raises(ConfigError, match="root="):
        ce.Engine(root)


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        ce.Engine(tmp_path / "file")


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep": 0}, {"keep": -1}, {"keep": 1.0}, {"keep": "all"}, {"keep": True},
        {"on_busy": "retry"}, {"on_busy": None},
        {"timeout": 0}, {"timeout": -1}, {"timeout": "5"}, {"timeout": math.nan}, {"timeout": True},
        {"host_memory_limit": 0}, {"host_memory_limit": "1G"},
    ],
    ids=str,
)  # fmt: skip
def test_engine_settings_that_mean_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))) as caught:
        ce.Engine(tmp_path / "run", **wrong)
    assert isinstance(caught.value, ValueError)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [0, 7, np.int64(7), torch.tensor(7), 10**12])
def test_steps(step: Any) -> None:
    assert config.checked_step(step) == int(step)
    assert type(config.checked_step(step)) is int


@pytest.mark.parametrize("step", [-1, 1.0, "5", None, torch.tensor(1.5), [1]])
def test_steps_that_are_none(step: Any) -> None:
    with pytest.raises(ConfigError, match="step="):
        config.checked_step(step)


def test_metrics() -> None:
    found = config.checked_metrics(
        {"a": 1, "b": np.float32(0.5), "c": torch.tensor(2.0), "d": math.nan}
    )
    assert {k: v for k, v in found.items() if k != "d"} == {"a": 1.0, "b": 0.5, "c": 2.0}
    assert math.isnan(found["d"])
    assert all(type(value) is float for value in found.values())
    assert config.checked_metrics(None) == {}


@pytest.mark.parametrize(
    "metrics",
    [{"a": "much"}, {"a": None}, {"a": torch.ones(2)}, {"a": 10**400}, {"a": [1]}, [1], 5, "loss"],
)
def test_metrics_that_are_no_numbers(metrics: Any) -> None:
    with pytest.raises(ConfigError, match="metrics"):
        config.checked_metrics(metrics)


class Colour(enum.IntEnum):
    RED = 1


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(json_values)
def test_user_data_comes_back_the_same(user: Any) -> None:
    assert config.checked_user(user) == user


def test_user_data_that_json_changes_harmlessly() -> None:
    assert config.checked_user({"a": (1, 2), "c": Colour.RED}) == {"a": [1, 2], "c": 1}


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "user",
    [
        {1: "a"},
        {None: 1},
        {"x": math.nan},
        {"x": math.inf},
        {1, 2},
        b"bytes",
        object(),
        deep(100_000),
    ],
    ids=lambda user: type(user).__name__,
)
def test_user_data_that_would_not_come_back(user: Any) -> None:
    with pytest.raises(ConfigError, match="user="):
        config.checked_user(user)


def test_user_data_is_a_copy() -> None:
    user = {"tags": ["a"]}
    copied = config.checked_user(user)
    user["tags"].append("b")
    assert copied == {"tags": ["a"]}


def test_user_data_and_metrics_of_every_kind_survive_a_save(run: Path) -> None:
    user = {
        "text": "\ud800 \0 \N{SNOWMAN}",
        "deep": deep(100),
        "big": 10**30,
        "f": 1e-300,
        "n": None,
    }
    metrics = {"nan": math.nan, "inf": -math.inf, "": 0.1, "third": 1 / 3}
    with ce.Engine(run) as engine:
        engine.save({"a": 1}, step=1, user=user, metrics=metrics)
        info = engine.latest()
    assert info is not None
    assert info.user == user
    assert repr(dict(info.metrics)) == repr(dict(sorted(metrics.items())))

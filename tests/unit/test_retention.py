"""Which checkpoints may go: the rules one by one, and what holds whatever they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptengine.config import Keep
from ckptengine.errors import ConfigError
from ckptengine.format.manifest import Manifest
from ckptengine.retention import removable
from ckptengine.types import CheckpointId


def manifest(step: int, attempt: int = 0, candidate: bool = False, **metrics: float) -> Manifest:
    return Manifest(step, attempt, 0.0, 1, {}, metrics=metrics, candidate=candidate)


def kept(manifests: list[Manifest], *args: Any, **keep: Any) -> list[int]:
    gone = set(removable(manifests, Keep(**keep), *args))
    return sorted(m.step for m in manifests if m.id not in gone)


def test_last() -> None:
    run = [manifest(step) for step in range(0, 50, 10)]
    assert kept(run, last=2) == [30, 40]
    assert kept(run, last=9) == [0, 10, 20, 30, 40]
    assert removable(run, Keep(last=1)) == [CheckpointId(step) for step in (0, 10, 20, 30)]


def test_the_order_is_that_of_numbers_not_of_names_or_of_arrival() -> None:
    steps = [100_000_000, 99_999_999, 5, 10]
    assert kept([manifest(step) for step in steps], last=2) == [99_999_999, 100_000_000]
    attempts = [manifest(5, attempt) for attempt in (10, 9, 0)]
    assert removable(attempts, Keep(last=1)) == [CheckpointId(5, 0), CheckpointId(5, 9)]


def test_every() -> None:
    run = [manifest(step) for step in (3, 5, 10, 13, 15, 16)]
    assert kept(run, every=5) == [5, 10, 15, 16]
    assert kept(run, every=5, last=3) == [5, 10, 13, 15, 16]


@pytest.mark.parametrize(
    ("mode", "count", "expected"),
    [("min", 1, [2, 6]), ("max", 1, [4, 6]), ("min", 2, [1, 2, 6]), ("max", 9, [1, 2, 3, 4, 5, 6])],
)
def test_best(mode: str, count: int, expected: list[int]) -> None:
    losses = [0.5, 0.1, math.nan, 9.0, 0.7]
    run = [manifest(step, loss=loss) for step, loss in enumerate(losses, 1)] + [manifest(6)]
    assert kept(run, best=count, metric="loss", mode=mode) == expected


def test_nan_infinite_and_missing_are_worst_and_of_equals_the_newer_wins() -> None:
    run = [
        manifest(1, loss=math.nan),
        manifest(2),
        manifest(3, loss=math.inf),
        manifest(4, loss=8.0),
    ]
    assert kept([*run, manifest(9)], best=1, metric="loss") == [4, 9]
    assert kept([*run, manifest(9)], best=1, metric="loss", mode="max") == [3, 9]
    equal = [manifest(step, loss=1.0) for step in (1, 2, 3)]
    assert kept([*equal, manifest(9)], best=1, metric="loss") == [3, 9]
    # Nothing is known of any: the newest counts as the best.
    assert kept([manifest(step) for step in (1, 2, 3)], best=1, metric="loss") == [3]


def test_candidates_neither_count_nor_push_others_out() -> None:
    run = [manifest(1), manifest(2), manifest(3, candidate=True), manifest(4, candidate=True)]
    assert kept(run, last=1) == [2, 3, 4]
    assert kept([*run, manifest(5)], last=1) == [5]
    assert kept([manifest(1, candidate=True), manifest(2, candidate=True)], last=1) == [1, 2]
    assert kept([*run, manifest(5, candidate=True)], best=1, metric="loss") == [2, 3, 4, 5]


def test_protected_ones_stay() -> None:
    run = [manifest(step) for step in (1, 2, 3)]
    assert kept(run, {CheckpointId(1)}, last=1) == [1, 3]
    assert kept(run, {CheckpointId(9)}, last=1) == [3]


number = st.one_of(st.floats(), st.just(math.nan), st.sampled_from([0.0, 1.0, math.inf, -math.inf]))
manifests = st.lists(
    st.builds(
        manifest,
        st.integers(0, 12),
        st.integers(0, 3),
        st.booleans(),
        loss=number,
    ),
    unique_by=lambda m: m.id,
    max_size=14,
)
count = st.one_of(st.none(), st.integers(1, 5))


@st.composite
def keeps(draw: st.DrawFn) -> Keep:
    last, every, best = draw(st.tuples(count, count, count).filter(any))
    metric = draw(st.sampled_from(["loss", "absent"])) if best else None
    return Keep(last, every, best, metric, draw(st.sampled_from(["min", "max"])))


@given(manifests, keeps(), st.sets(st.builds(CheckpointId, st.integers(0, 12), st.integers(0, 3))))
def test_whatever_the_settings(
    found: list[Manifest], keep: Keep, protect: set[CheckpointId]
) -> None:
    gone = removable(found, keep, protect)
    stay = {m.id for m in found} - set(gone)
    good = sorted(m.id for m in found if not m.candidate)
    assert gone == sorted(set(gone))
    assert set(gone) <= {m.id for m in found}
    assert not set(gone) & protect
    assert set(good[-(keep.last or 1) :]) <= stay  # the newest good one, at the least
    if found:
        assert stay
    if keep.every:
        assert {c for c in good if c.step % keep.every == 0} <= stay
    if keep.best:
        assert len(stay & set(good)) >= min(keep.best, len(good))
    # Decided again without those that went, nothing more goes; and the order of finding is nothing.
    assert removable([m for m in found if m.id in stay], keep, protect) == []
    assert removable(found[::-1], keep, protect) == gone


@given(manifests, st.integers(1, 3), st.sampled_from(["min", "max"]))
def test_the_best_of_those_with_a_number_is_kept(
    found: list[Manifest], best: int, mode: str
) -> None:
    gone = set(removable(found, Keep(best=best, metric="loss", mode=mode)))
    good = [m for m in found if not m.candidate and not math.isnan(m.metrics["loss"])]
    values = sorted((m.metrics["loss"] for m in good), reverse=mode == "max")[:best]
    kept_values = [m.metrics["loss"] for m in good if m.id not in gone]
    for value in values:
        assert value in kept_values


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"last": 0},
        {"last": -1},
        {"last": True},
        {"last": 1.5},
        {"every": 0},
        {"best": 1},
        {"metric": "loss"},
        {"best": 0, "metric": "loss"},
        {"last": 1, "mode": "least"},
    ],
)
def test_settings_that_mean_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="keep"):
        Keep(**wrong)

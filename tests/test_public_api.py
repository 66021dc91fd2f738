"""The public surface is one file; a change of it is a decision, made here."""

import inspect

import pytest

import ckptengine as ce

NAMES = {
    "AppState", "CheckpointError", "CheckpointInfo", "ConfigError", "ConflictError", "CorruptError",
    "Durability", "Engine", "IncompleteError", "Keep", "NotFoundError", "PerRank", "RankFailedError",
    "RngState", "SaveHandle", "StateError", "StoreError", "WorkerDiedError", "load", "verify",
}  # fmt: skip
METHODS = {
    "abort", "add_listener", "close", "estimate", "fence", "latest", "pending", "restore", "save",
    "save_async", "steps", "wait",
}  # fmt: skip


def test_names():
    assert set(ce.__all__) == NAMES
    assert set(dir(ce)) == NAMES | {"__version__"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_resolves_and_says_what_it_is(name):
    found = getattr(ce, name)
    assert found.__name__ == name
    assert (found.__doc__ or "").strip()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        ce.no_such_name  # noqa: B018


def test_the_engine_offers_what_consumers_were_promised():
    internal = {"check_process", "deliver", "end_persister", "progress"}  # for its handles
    public = {name for name, _ in inspect.getmembers(ce.Engine) if not name.startswith("_")}
    assert public - internal == METHODS


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_is_documented(name):
    assert (getattr(ce.Engine, name).__doc__ or "").strip()


def test_errors_are_one_tree():
    errors = [getattr(ce, name) for name in NAMES if name.endswith("Error")]
    assert all(issubclass(error, ce.CheckpointError) for error in errors)
    assert issubclass(ce.ConfigError, ValueError)
    assert ce.StoreError("full", retryable=True).retryable
    assert ce.RankFailedError("gone", rank=3).rank == 3


def test_durability_is_ordered():
    levels = [ce.Durability[name] for name in ("CAPTURED", "PERSISTED", "REPLICATED", "SHARED")]
    assert levels == sorted(levels)

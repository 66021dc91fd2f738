"""The demo's loader continues at the exact batch, whatever else draws random numbers."""

from __future__ import annotations

import random

import pytest
import torch

from ckptengine.demo.data import Loader, standard_library

TEXT = random.Random(0).randbytes(512)


def loader(text: bytes = TEXT, seed: int = 3) -> Loader:
    return Loader(text, context=8, batch=5, seed=seed)


@pytest.mark.parametrize("taken", range(0, 40, 3))  # 12 batches are an epoch
def test_it_resumes_at_the_exact_batch(taken: int) -> None:
    original = loader()
    for _ in range(taken):
        next(original)
    saved = original.state_dict()
    expected = [next(original) for _ in range(30)]

    resumed = loader(seed=99)
    next(resumed)
    torch.rand(7)
    resumed.load_state_dict(saved)
    assert all(torch.equal(next(resumed), batch) for batch in expected)


def test_what_was_saved_does_not_change_as_the_loader_goes_on() -> None:
    original = loader()
    next(original)
    saved = original.state_dict()
    before = saved["generator"].clone()
    for _ in range(30):
        next(original)
    assert saved["position"] == 5
    assert torch.equal(saved["generator"], before)


def test_an_epoch_takes_each_window_once_and_each_epoch_has_its_own_order() -> None:
    # 512 bytes are 63 windows of 9 that overlap by one byte: 12 whole batches of 5.
    source = loader()
    epochs = [torch.cat([next(source) for _ in range(12)]) for _ in range(2)]
    for epoch in epochs:
        assert len({tuple(row) for row in epoch.tolist()}) == 60
    assert not torch.equal(*epochs)


def test_another_text_is_refused() -> None:
    with pytest.raises(ValueError, match="the text differs"):
        loader(TEXT[::-1]).load_state_dict(loader().state_dict())


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fill a batch"):
        loader(TEXT[:20])


def test_the_text_is_real_and_always_the_same() -> None:
    assert standard_library(10_000) == standard_library(20_000)[:10_000]
    assert b"import" in standard_library(10_000)

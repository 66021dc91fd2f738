"""Random streams go on exactly, and a state that cannot be set is an error."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptengine as ce
from ckptengine.errors import StateError


@pytest.fixture(autouse=True)
def _streams_as_they_were() -> Iterator[None]:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


def draw() -> list[Any]:
    return [
        *(random.random(), random.gauss(0, 1), random.sample(range(99), 5), random.getrandbits(70)),
        *(np.random.random(), np.random.standard_normal(), np.random.permutation(9).tolist()),
        *(torch.rand(3).tolist(), torch.randn(1).item(), torch.randperm(9).tolist()),
    ]


@pytest.mark.parametrize("drawn", [0, 1, 2, 3])
def test_all_streams_go_on_where_they_were(engine: ce.Engine, drawn: int) -> None:
    for _ in range(drawn):  # an odd number leaves half of a pair of normal numbers behind
        random.gauss(0, 1)
        np.random.standard_normal()
        torch.randn(1)
    engine.save({"rng": ce.RngState()})
    expected = [draw() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    engine.restore({"rng": ce.RngState()})
    assert [draw() for _ in range(3)] == expected


def test_generators_of_ones_own_go_on(engine: ce.Engine) -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    engine.save({"g": generator, "inner": {"list": [generator]}})
    expected = torch.rand(5, generator=generator)
    one, two = torch.Generator(), torch.Generator()
    engine.restore({"g": one, "inner": {"list": [two]}})
    for found in (one, two):
        assert torch.equal(torch.rand(5, generator=found), expected)


def test_a_generators_state_that_is_none_is_an_error_that_names_it(engine: ce.Engine) -> None:
    engine.save({"inner": {"g": torch.ones(3, dtype=torch.uint8)}})
    with pytest.raises(StateError, match="inner/g: the saved generator cannot be set") as caught:
        engine.restore({"inner": {"g": torch.Generator()}})
    assert caught.value.keys == ("inner/g",)


def test_what_draws_while_it_loads_does_not_disturb_the_streams(engine: ce.Engine) -> None:
    class Drawing:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            draw()

    engine.save({"rng": ce.RngState(), "drawing": Drawing()})
    expected = draw()
    engine.restore({"rng": ce.RngState(), "drawing": Drawing()})
    assert draw() == expected


DAMAGE: dict[str, tuple[str, Any]] = {
    "python short": (
        "python",
        {"version": 3, "words": torch.ones(7, dtype=torch.int64), "gauss": None},
    ),
    "python negative": (
        "python",
        {"version": 3, "words": torch.full((625,), -1, dtype=torch.int64), "gauss": None},
    ),
    "python of another kind": ("python", {"version": 3, "words": [1, 2], "gauss": None}),
    "python absent": ("python", None),
    "numpy short": ("numpy", {"key": torch.ones(3, dtype=torch.int64)}),
    "numpy of another kind": ("numpy", 3),
    "torch short": ("torch", torch.ones(5, dtype=torch.uint8)),
    "torch of another kind": ("torch", torch.ones(5056)),
    "torch a text": ("torch", "x"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_stream_is_an_error_that_names_it(
    run: Path, engine: ce.Engine, damage: str
) -> None:
    which, bad = DAMAGE[damage]
    saved = ce.RngState().state_dict()
    if isinstance(bad, dict) and isinstance(saved[which], dict):
        saved[which] = saved[which] | bad
    elif bad is None:
        del saved[which]
    else:
        saved[which] = bad
    engine.save({"rng": ce.PerRank(saved)})
    with pytest.raises(StateError, match=f"the saved {which} generator cannot be set"):
        engine.restore({"rng": ce.RngState()})


def test_rng_state_is_plain_data_that_stock_torch_reads(engine: ce.Engine, run: Path) -> None:
    engine.save({"rng": ce.RngState()})
    loaded = ce.load(run)["rng"].to_dict()
    assert set(loaded) == {"python", "numpy", "torch"}
    assert loaded["torch"].dtype == torch.uint8


def test_a_bit_generator_that_cannot_be_set_again_is_refused(engine: ce.Engine, run: Path) -> None:
    kept = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        with pytest.raises(StateError, match="PCG64"):
            engine.save({"rng": ce.RngState()})
    finally:
        np.random.set_bit_generator(kept)
    assert not run.exists()

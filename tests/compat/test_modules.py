"""Modules as people write them: buffers, ties, hooks, extra state, overridden dictionaries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptengine as ce
from ckptengine.errors import StateError

Identical = Callable[[Any, Any], bool]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)) * self.scale


def test_a_convolutional_model_with_batch_norm(
    engine: ce.Engine, run: Path, identical: Identical
) -> None:
    model = Convolutional()
    for _ in range(3):
        model(torch.randn(2, 3, 8, 8))
    assert model.norm.num_batches_tracked == 3
    engine.save({"model": model})
    other = Convolutional()
    parameters = list(other.parameters())
    engine.restore({"model": other})
    assert identical(dict(other.state_dict()), dict(model.state_dict()))
    assert all(a is b for a, b in zip(other.parameters(), parameters, strict=True))
    assert other.conv.weight.stride() == model.conv.weight.stride()
    plain = nn.Sequential(nn.Conv2d(3, 6, 3))  # not channels last
    engine.restore({"model": {"conv.weight": plain[0].weight}}, strict=False)
    assert torch.equal(plain[0].weight, model.conv.weight)
    assert ce.load(run)["model"]["conv.weight"].is_contiguous(memory_format=torch.channels_last)


def test_tied_weights_are_stored_once_and_tied_again(engine: ce.Engine, run: Path) -> None:
    model = Tied()
    info = engine.save({"model": model, "again": model.head.weight})
    assert info.nbytes < 2 * 50 * 8 * 4 + 4000

    other = Tied()
    state = {"model": other, "again": other.head.weight}
    engine.restore(state)
    assert torch.equal(other.head.weight, model.head.weight)
    assert other.head.weight is other.embedding.weight

    loaded = ce.load(run)
    assert loaded["model"]["head.weight"] is loaded["model"]["embedding.weight"]
    assert loaded["model"]["head.weight"] is loaded["again"]
    everything = loaded.to_dict()
    assert everything["model"]["head.weight"] is everything["again"]

    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(50, 8))
    engine.restore({"model": untied, "again": torch.zeros(50, 8)})
    assert torch.equal(untied.head.weight, model.head.weight)
    assert torch.equal(untied.embedding.weight, model.head.weight)


def test_a_tie_that_the_checkpoint_has_not_is_refused(engine: ce.Engine) -> None:
    model = Tied()
    model.head.weight = nn.Parameter(torch.zeros(50, 8))
    engine.save({"model": model})
    other = Tied()
    before = other.head.weight.clone()
    with pytest.raises(StateError, match="its memory with model/embedding") as caught:
        engine.restore({"model": other})
    assert caught.value.keys == ("model/head.weight",)
    assert torch.equal(other.head.weight, before)


class ExtraState(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra",
    [
        {"version": (1, 2), "seen": {"a"}},
        torch.arange(5, dtype=torch.uint8),
        {"scale": torch.ones(3), "history": [1.0]},
        None,
        "text",
    ],
    ids=str,
)
def test_extra_state_goes_through_the_modules_own_method(
    engine: ce.Engine, identical: Identical, extra: Any
) -> None:
    model = nn.Sequential(ExtraState(extra), nn.Linear(2, 2))
    engine.save({"model": model})
    for placeholder in (None, torch.empty(0, dtype=torch.uint8), {}):
        other = nn.Sequential(ExtraState(placeholder), nn.Linear(2, 2))
        engine.restore({"model": other})
        assert identical(other[0].extra, extra)
        assert torch.equal(other[0].weight, model[0].weight)
        assert torch.equal(other[1].weight, model[1].weight)


class Migrating(nn.Module):
    """Once called its weight `scale`, and kept it inverted in version 1."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.seen: list[Any] = []

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        self.seen.append(local_metadata.get("version"))
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = 1 / state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_a_module_learns_which_version_of_it_wrote_the_checkpoint(
    engine: ce.Engine, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(Migrating())
    engine.save({"model": model}, step=2)
    monkeypatch.setattr(Migrating, "_version", 1)
    engine.save({"model": model}, step=1)
    monkeypatch.undo()
    for step, expected in ((2, model[0].weight), (1, 1 / model[0].weight)):
        other = nn.Sequential(Migrating())
        engine.restore({"model": other}, step=step)
        assert other[0].seen == [step]
        assert torch.equal(other[0].weight, expected)
        whole, lazy = nn.Sequential(Migrating()), nn.Sequential(Migrating())
        whole.load_state_dict(ce.load(run, step=step).to_dict()["model"])
        lazy.load_state_dict(ce.load(run, keys=["model"], step=step)["model"])
        assert whole[0].seen == lazy[0].seen == [step]
        assert torch.equal(lazy[0].weight, expected)


class Observer(nn.Module):
    """Takes the size of what it is given, as observers of quantisation do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lowest", torch.empty(0))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.lowest = torch.empty(state_dict[f"{prefix}lowest"].shape, dtype=self.lowest.dtype)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_module_that_resizes_itself_is_let(engine: ce.Engine) -> None:
    model = nn.Sequential(Observer(), nn.Linear(2, 2))
    model[0].lowest = torch.arange(5.0)
    engine.save({"model": model})
    other = nn.Sequential(Observer(), nn.Linear(2, 2))
    engine.restore({"model": other})
    assert other[0].lowest.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(other[1].weight, model[1].weight)
    third = nn.Sequential(Observer(), nn.Linear(2, 3))
    with pytest.raises(StateError) as caught:
        engine.restore({"model": third})
    assert caught.value.keys == ("model/1.weight", "model/1.bias")
    half = nn.Sequential(Observer().half(), nn.Linear(2, 2))
    with pytest.raises(StateError, match="pass cast=True") as caught:
        engine.restore({"model": half})
    assert caught.value.keys == ("model/0.lowest",)


def test_load_hooks_run(engine: ce.Engine) -> None:
    def hooked() -> tuple[nn.Module, list[str]]:
        model, heard = nn.Sequential(nn.Linear(2, 2)), []
        model.register_load_state_dict_pre_hook(lambda *_: heard.append("before"))
        model[0].register_load_state_dict_post_hook(lambda *_: heard.append("after"))
        return model, heard

    model, _ = hooked()
    engine.save({"model": model})
    other, heard = hooked()
    engine.restore({"model": other})
    assert heard == ["before", "after"]
    assert torch.equal(other[0].weight, model[0].weight)


def test_a_save_hook_that_renames_or_copies_is_respected(engine: ce.Engine, run: Path) -> None:
    def hooked() -> nn.Module:
        model = nn.Linear(2, 2)

        def save(module: Any, saved: dict[str, Any], prefix: str, _: Any) -> None:
            saved[f"{prefix}kernel"] = saved.pop(f"{prefix}weight").t().contiguous()

        def load(module: Any, saved: dict[str, Any], prefix: str, *_: Any) -> None:
            saved[f"{prefix}weight"] = saved.pop(f"{prefix}kernel").t()

        model.register_state_dict_post_hook(save)
        model.register_load_state_dict_pre_hook(load)
        return model

    model = hooked()
    engine.save({"model": model})
    assert list(ce.load(run)["model"]) == ["bias", "kernel"]
    other = hooked()
    engine.restore({"model": other})
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)


class Overridden(nn.Linear):
    """Saves less than it has, in a form of its own."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {"packed": self.weight.detach().clone(), "kind": "overridden"}

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        assert state_dict["kind"] == "overridden"
        self.weight.data.copy_(state_dict["packed"])


def test_an_overridden_dictionary_is_given_back_as_it_was(engine: ce.Engine) -> None:
    model, other = Overridden(2, 2), Overridden(2, 2)
    engine.save({"model": model})
    engine.restore({"model": other})
    assert torch.equal(other.weight, model.weight)


def test_a_dictionary_overridden_on_one_object_is_respected(engine: ce.Engine) -> None:
    def adapters_only(model: Any) -> Any:
        whole = model.state_dict
        model.state_dict = lambda *a, **k: {
            key: value for key, value in whole(*a, **k).items() if key.startswith("1.")
        }
        return model

    def make() -> Any:
        return adapters_only(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))

    model, other = make(), make()
    frozen = other[0].weight.clone()
    engine.save({"model": model})
    engine.restore({"model": other})
    assert torch.equal(other[1].weight, model[1].weight)
    assert torch.equal(other[0].weight, frozen)


def test_a_load_overridden_on_one_object_is_called(engine: ce.Engine) -> None:
    model: Any = nn.Linear(2, 2)
    given: list[Any] = []
    model.load_state_dict = given.append
    engine.save({"model": model})
    engine.restore({"model": model})
    assert torch.equal(given[0]["weight"], model.weight)


def test_a_lazy_module_is_filled_and_takes_its_shape(engine: ce.Engine) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    engine.save({"model": model})
    other = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))
    engine.restore({"model": other})
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other(torch.ones(1, 3)), model(torch.ones(1, 3)))


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))


def spectral() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(3, 3))


def averaged() -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(nn.Linear(3, 3))


@pytest.mark.parametrize(
    "make",
    [
        parametrized,
        spectral,
        averaged,
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.TransformerEncoderLayer(8, 2, 16),
        lambda: nn.LSTM(3, 4, num_layers=2),
        lambda: nn.EmbeddingBag(5, 3),
        lambda: nn.SyncBatchNorm(3),
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        lambda: nn.ModuleDict({"a": nn.PReLU(), "b": nn.LayerNorm(3)}),
        lambda: nn.ParameterDict({"a": nn.Parameter(torch.randn(2)), "b": torch.randn(1)}),
        lambda: nn.Linear(3, 3, dtype=torch.complex64),
        nn.ReLU,
    ],
)
@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
def test_modules_of_torch_come_back(
    engine: ce.Engine, run: Path, identical: Identical, make: Callable[[], nn.Module]
) -> None:
    model, other, third = make(), make(), make()
    engine.save({"model": model})
    engine.restore({"model": other})
    third.load_state_dict(ce.load(run)["model"])
    expected = dict(model.state_dict())
    assert identical(dict(other.state_dict()), expected)
    assert identical(dict(third.state_dict()), expected)


class Quantised(torch.Tensor):
    """A subclass without storage: numbers and their scale, as parts and as a constant."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, zero: float = 0.0) -> Quantised:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        made.data_, made.scale, made.zero = data, scale, zero
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale"], {"zero": self.zero, "device": self.device}

    @staticmethod
    def __tensor_unflatten__(parts: Any, constants: Any, *_: Any) -> Quantised:
        return Quantised(parts["data_"], parts["scale"], constants["zero"])

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return Quantised(args[0].data_, args[0].scale, args[0].zero)
        raise NotImplementedError(function)


def quantised(zero: float = 0.0) -> Quantised:
    return Quantised(torch.randint(-99, 99, (3, 2), dtype=torch.int8), torch.rand(3), zero)


def with_weight(weight: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def test_a_subclass_without_storage_is_stored_by_its_parts(engine: ce.Engine, run: Path) -> None:
    model = with_weight(quantised())
    engine.save({"model": model, "bare": quantised()})
    other = with_weight(quantised())
    engine.restore({"model": other, "bare": quantised()})
    assert torch.equal(other.weight.data_, model.weight.data_)
    assert torch.equal(other.weight.scale, model.weight.scale)
    parts = ce.load(run)["model"]["weight"]
    assert torch.equal(parts["data_"], model.weight.data_)
    assert list(ce.load(run, keys=["bare/scale"])["bare"]) == ["scale"]


def test_constants_of_a_subclass_must_agree(engine: ce.Engine) -> None:
    engine.save({"w": quantised(zero=0.5)})
    engine.restore({"w": quantised(zero=0.5)})
    with pytest.raises(StateError, match="constants of the Quantised differ") as caught:
        engine.restore({"w": quantised(zero=0.25)})
    assert caught.value.keys == ("w",)


def test_a_subclass_and_a_plain_tensor_are_not_the_same(engine: ce.Engine) -> None:
    engine.save({"a": quantised(), "b": torch.ones(2)})
    with pytest.raises(StateError) as caught:
        engine.restore({"a": torch.ones(3, 2), "b": quantised()})
    assert caught.value.keys == ("a", "b")
    assert "a tensor subclass" in str(caught.value)

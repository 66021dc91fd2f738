"""Every optimizer and scheduler of torch goes on exactly as if it had not been interrupted."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers

import ckptengine as ce
from ckptengine.errors import StateError

Identical = Callable[[Any, Any], bool]


def model_of(dtype: torch.dtype = torch.float32, *, matrices: bool = False) -> nn.Module:
    if matrices:
        return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False)).to(dtype)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(dtype)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure) if isinstance(optimizer, optim.LBFGS) else (
            closure(),
            optimizer.step(),
        )


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p),
    "Adam amsgrad": lambda p: optim.Adam(p, amsgrad=True),
    "Adam tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(1e-3)),
    "Adam foreach": lambda p: optim.Adam(p, foreach=True),
    "AdamW": lambda p: optim.AdamW(p, weight_decay=0.1),
    "AdamW fused": lambda p: optim.AdamW(p, fused=True),
    "Adafactor": lambda p: optim.Adafactor(p),
    "Adagrad": lambda p: optim.Adagrad(p),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adamax": lambda p: optim.Adamax(p),
    "ASGD": lambda p: optim.ASGD(p),
    "LBFGS": lambda p: optim.LBFGS(p, max_iter=3, history_size=4),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam": lambda p: optim.RAdam(p),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": lambda p: optim.Rprop(p),
}
if hasattr(optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda p: optim.Muon(p, lr=0.02)


def test_no_optimizer_of_torch_is_left_out() -> None:
    known = {name.partition(" ")[0] for name in OPTIMIZERS} | {"Optimizer", "SparseAdam"}
    assert {n for n, c in vars(optim).items() if isinstance(c, type)} <= known


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "AppState"])
def test_training_goes_on_as_if_uninterrupted(
    engine: ce.Engine, identical: Identical, name: str, wrapped: bool
) -> None:
    def fresh() -> tuple[nn.Module, Any, dict[str, Any]]:
        model = model_of(matrices=name == "Muon")
        optimizer = OPTIMIZERS[name](model.parameters())
        if wrapped:
            return model, optimizer, {"app": ce.AppState(model, optimizer)}
        return model, optimizer, {"model": model, "optimizer": optimizer}

    model, optimizer, state = fresh()
    train(model, optimizer, 3)
    engine.save(state)
    train(model, optimizer, 3, first=3)

    for used_before in (False, True):
        other, other_optimizer, state = fresh()
        if used_before:
            train(other, other_optimizer, 2)
        engine.restore(state)
        train(other, other_optimizer, 3, first=3)
        assert identical(dict(other.state_dict()), dict(model.state_dict()))
        assert identical(other_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_before_its_first_step(
    engine: ce.Engine, identical: Identical, name: str
) -> None:
    optimizer = OPTIMIZERS[name](model_of(matrices=name == "Muon").parameters())
    before = copy.deepcopy(optimizer.state_dict())
    engine.save({"optimizer": optimizer})
    other = OPTIMIZERS[name](model_of(matrices=name == "Muon").parameters())
    engine.restore({"optimizer": other})
    assert identical(other.state_dict(), before)


def test_sparse_gradients(engine: ce.Engine, identical: Identical) -> None:
    def fresh() -> tuple[nn.Embedding, Any]:
        model = nn.Embedding(10, 3, sparse=True)
        return model, optim.SparseAdam(model.parameters())

    def step(model: nn.Embedding, optimizer: Any, row: int) -> None:
        optimizer.zero_grad()
        model(torch.tensor([row, 3])).square().sum().backward()
        optimizer.step()

    model, optimizer = fresh()
    step(model, optimizer, 1)
    engine.save({"model": model, "optimizer": optimizer})
    step(model, optimizer, 2)
    other, other_optimizer = fresh()
    engine.restore({"model": other, "optimizer": other_optimizer})
    step(other, other_optimizer, 2)
    assert torch.equal(other.weight, model.weight)
    assert identical(other_optimizer.state_dict(), optimizer.state_dict())


class Mixed(optim.Optimizer):
    """One that treats small parameters otherwise than large ones, and nests its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("momentum", torch.zeros_like(parameter, dtype=torch.float32))
            state["momentum"].add_(parameter.grad.float(), alpha=1e-4)
            if parameter.numel() > 20:
                state.setdefault("factors", {"rows": [torch.full((3,), 1 + 2**-20)], "n": 1})
            parameter.data.add_(state["momentum"], alpha=-0.1)


def test_an_optimizer_of_ones_own(engine: ce.Engine, identical: Identical) -> None:
    model = model_of(torch.bfloat16)
    optimizer = Mixed(model.parameters())
    train(model, optimizer, 2)
    engine.save({"optimizer": optimizer})
    other = Mixed(model_of(torch.bfloat16).parameters())
    engine.restore({"optimizer": other})
    assert identical(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_moments_of_32_bits_are_not_rounded_to_their_parameters(
    engine: ce.Engine, identical: Identical, dtype: torch.dtype
) -> None:
    def fresh() -> Any:
        model = model_of(dtype)
        optimizer = optim.AdamW(model.parameters())
        for parameter in model.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(5.0),
                "exp_avg": torch.rand(parameter.shape, dtype=torch.float32),
                "exp_avg_sq": torch.rand(parameter.shape, dtype=torch.float32),
            }
        return model, optimizer

    model, optimizer = fresh()
    engine.save({"o": optimizer, "app": ce.AppState(model, optimizer)})
    for state_was_there in (True, False):
        _, plain = fresh()
        inner, named = fresh()
        if not state_was_there:
            plain.state.clear()
            named.state.clear()
        engine.restore({"o": plain, "app": ce.AppState(inner, named)})
        assert identical(plain.state_dict(), optimizer.state_dict())
        assert identical(named.state_dict(), optimizer.state_dict())


def test_a_stateful_optimizer_of_another_kind_goes_through_its_own_methods(
    engine: ce.Engine,
) -> None:
    class Wrapper(optim.SGD):
        def state_dict(self) -> Any:
            return {"inner": super().state_dict(), "count": 7}

        def load_state_dict(self, state_dict: Any) -> None:
            self.count = state_dict["count"]
            super().load_state_dict(state_dict["inner"])

    optimizer = Wrapper(model_of().parameters(), lr=0.5)
    engine.save({"optimizer": optimizer})
    other = Wrapper(model_of().parameters(), lr=0.1)
    engine.restore({"optimizer": other})
    assert other.count == 7 and other.param_groups[0]["lr"] == 0.5


class Warmup:
    """A schedule with state of its own."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, epoch: int) -> float:
        return min(1.0, (epoch + 1) / self.length)


def half(epoch: int) -> float:
    return 0.5**epoch


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5, 5, 9]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o),
    "LinearLR": lambda o: schedulers.LinearLR(o),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 10),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=4),
    "CyclicLR object": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 4, scale_fn=Warmup(8)),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=30),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, half),
    "LambdaLR object": lambda o: schedulers.LambdaLR(o, Warmup(9)),
    "LambdaLR lambda": lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.9),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=3), schedulers.CosineAnnealingLR(o, 9)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, total_iters=4), schedulers.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, 0.05, anneal_epochs=5),
}


def test_no_scheduler_of_torch_is_left_out() -> None:
    known = {name.partition(" ")[0] for name in SCHEDULERS} | {"LRScheduler", "_LRScheduler"}
    base = schedulers.LRScheduler
    found = {n for n, c in vars(schedulers).items() if isinstance(c, type) and issubclass(c, base)}
    assert found <= known


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
def test_schedules_go_on_as_if_uninterrupted(
    engine: ce.Engine, identical: Identical, name: str
) -> None:
    def fresh() -> tuple[Any, Any]:
        optimizer = optim.SGD(model_of().parameters(), lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: Any, scheduler: Any, steps: range) -> list[Any]:
        found = []
        for step in steps:
            optimizer.step()
            if isinstance(scheduler, schedulers.ReduceLROnPlateau):
                scheduler.step(abs(math.sin(step)) + 1)
            else:
                scheduler.step()
            found.append([group["lr"] for group in optimizer.param_groups])
        return found

    optimizer, scheduler = fresh()
    rates(optimizer, scheduler, range(5))
    engine.save({"optimizer": optimizer, "scheduler": scheduler})
    expected = rates(optimizer, scheduler, range(5, 12))

    other, resumed = fresh()
    engine.restore({"scheduler": resumed, "optimizer": other})
    assert rates(other, resumed, range(5, 12)) == expected
    assert identical(resumed.state_dict(), scheduler.state_dict())


def test_a_gradient_scaler(engine: ce.Engine) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    model = model_of()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        scaler.scale(model(torch.randn(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    engine.save({"scaler": scaler, "disabled": torch.amp.GradScaler("cpu", enabled=False)})
    other = torch.amp.GradScaler("cpu")
    engine.restore({"scaler": other, "disabled": torch.amp.GradScaler("cpu", enabled=False)})
    assert other.state_dict() == scaler.state_dict()
    assert other.get_scale() == 16.0


def groups(model: nn.Module) -> list[dict[str, Any]]:
    first, last = model[0], model[2]
    return [
        {"params": [first.weight, last.weight], "weight_decay": 0.1, "lr": 0.01},
        {"params": [first.bias, last.bias], "weight_decay": 0.0, "lr": 0.02},
    ]


def test_app_state_names_parameters_and_survives_their_reordering(
    engine: ce.Engine, run: Path
) -> None:
    model = model_of()
    optimizer = optim.AdamW(groups(model))
    train(model, optimizer, 2)
    engine.save({"app": ce.AppState(model, optimizer)})
    stored = ce.load(run)["app"]["optimizer"]
    assert set(stored["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert stored["param_groups"][1]["params"] == ["0.bias", "2.bias"]

    other = model_of()
    (first, second) = groups(other)
    first["params"].reverse()
    resumed = optim.AdamW([second, first])
    engine.restore({"app": ce.AppState(other, resumed)})
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        for entry in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[one][entry], resumed.state[two][entry]), name
    assert [group["lr"] for group in resumed.param_groups] == [0.02, 0.01]
    train(model, optimizer, 2, first=2)
    train(other, resumed, 2, first=2)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_wrappers_of_compile_leave_no_trace_in_names(engine: ce.Engine, run: Path) -> None:
    def build(whole: bool, part: bool) -> ce.AppState:
        model: Any = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        if part:
            model[0] = torch.compile(model[0], backend="eager")
        if whole:
            model = torch.compile(model, backend="eager")
        return ce.AppState(model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    forms = [build(whole, part) for whole in (False, True) for part in (False, True)]
    for step, app in enumerate(forms):
        engine.save({"app": app}, step=step)
        assert "_orig_mod" not in repr(ce.load(run, step=step).to_dict()["app"])
        for other in forms:
            with torch.no_grad():
                for parameter in other.model.parameters():
                    parameter.zero_()
            engine.restore({"app": other}, step=step)
        with torch.no_grad():
            for parameter in app.model.parameters():
                parameter.add_(1)
        plain = forms[0].state_dict()
        assert next(iter(plain["model"])) == "0.weight"
        for other in forms[1:]:
            other.load_state_dict(plain)
            assert all(
                torch.equal(a, b)
                for a, b in zip(other.model.parameters(), forms[0].model.parameters(), strict=True)
            )


def test_app_state_refuses_parameters_that_are_not_the_models(engine: ce.Engine, run: Path) -> None:
    stranger = optim.SGD(model_of().parameters(), lr=0.1)
    with pytest.raises(StateError, match="is not one of the model's"):
        engine.save({"app": ce.AppState(model_of(), stranger)})
    assert not run.exists()


def test_app_state_of_another_optimizer_is_refused_by_name(engine: ce.Engine) -> None:
    model = model_of()
    engine.save({"app": ce.AppState(model, optim.SGD([model[0].weight], lr=0.1))})
    with pytest.raises(StateError, match=r"only the state's optimizer has the parameter 2\.bias"):
        engine.restore({"app": ce.AppState(model, optim.SGD(model.parameters(), lr=0.1))})


def test_app_state_refuses_a_group_of_two_origins_and_touches_nothing(engine: ce.Engine) -> None:
    model = model_of()
    engine.save({"app": ce.AppState(model, optim.AdamW(groups(model)))})
    other = model_of()
    before = other[0].weight.clone()
    app = ce.AppState(other, optim.AdamW(other.parameters()))
    with pytest.raises(StateError, match="takes parameters from the saved groups") as caught:
        engine.restore({"app": app})
    assert caught.value.keys == ("app/optimizer/param_groups",)
    assert torch.equal(other[0].weight, before)


def test_app_state_lets_a_group_be_divided(engine: ce.Engine) -> None:
    model = model_of()
    engine.save({"app": ce.AppState(model, optim.SGD(model.parameters(), lr=0.5))})
    other = model_of()
    divided = optim.SGD([{"params": [p]} for p in other.parameters()] + [{"params": []}], lr=0.1)
    engine.restore({"app": ce.AppState(other, divided)})
    assert [group["lr"] for group in divided.param_groups] == [0.5] * 4 + [0.1]


def test_wrappers_of_data_parallel_training_leave_no_trace_in_names(
    engine: ce.Engine, run: Path, tmp_path: Path
) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(model_of())
        optimizer = optim.AdamW(model.parameters())
        train(model, optimizer, 2)
        engine.save({"app": ce.AppState(model, optimizer)})
    finally:
        torch.distributed.destroy_process_group()
    assert list(ce.load(run)["app"]["model"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    other = model_of()
    engine.restore({"app": ce.AppState(other, optim.AdamW(other.parameters()))})
    assert torch.equal(other[0].weight, model.module[0].weight)

"""Capture in both modes: what is stored is the state of the call, whatever happens meanwhile."""

import threading

import numpy as np
import pytest
import torch

import ckptengine as ce
from ckptengine.snapshot.batches import batches
from ckptengine.snapshot.copier import Copier, Move
from ckptengine.types import TensorPlace


def place(nbytes):
    return TensorPlace(0, nbytes, "uint8", (nbytes,), (1,))


def trainer(width=1500):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer


def forward_backward(model):
    model(torch.randn(4, model[0].in_features)).sum().backward()


def copied(state):
    return {key: value.clone() for key, value in state.items()}


def same(one, other):
    return all(torch.equal(one[key], other[key]) for key in one) and len(one) == len(other)


def test_batches_hold_every_number_once_in_order():
    sizes = [10, 20, 0, 1 << 20, 5, 1 << 21, 1 << 21, 7, 300 << 10]
    cut = batches([place(n) for n in sizes], range(len(sizes)))
    assert [(b.numbers, b.large) for b in cut] == [
        ((0, 1), False), ((3,), True), ((4,), False), ((5, 6), True), ((7,), False), ((8,), True),
    ]  # fmt: skip


def test_small_batches_are_cut_so_that_the_persister_hears_of_them():
    cut = batches([place(200 << 10)] * 1000, range(1000))
    assert len(cut) > 2
    assert [n for b in cut for n in b.numbers] == list(range(1000))


def test_copier_copies_and_announces_in_order():
    source = torch.randint(0, 255, (40 << 20,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    moves = [Move(target.data_ptr() + at, source.data_ptr() + at, 20 << 20) for at in (0, 20 << 20)]
    told = []
    copier = Copier()
    copier.copy(moves, told.append)
    copier.close()
    assert torch.equal(source, target)
    assert told == sorted(told)
    assert told[-1] == target.data_ptr() + target.nbytes


@pytest.mark.parametrize("mode", ["copy", "overlap"])
def test_training_goes_on_and_each_save_holds_its_moment(tmp_path, mode):
    model, optimizer = trainer()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    moments = {}
    with ce.Engine(tmp_path / mode, capture=mode) as engine:
        for step in range(1, 7):
            forward_backward(model)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] = step
            moments[step] = copied(model.state_dict())
            engine.save_async(state, step=step)
            model.train()(torch.randn(4, 1500))  # changes BatchNorm's buffers at once
    for step, moment in moments.items():
        found = ce.load(tmp_path / mode, step=step)
        assert found["step"] == step
        assert same(moment, found["model"])


class SlowCopier(Copier):
    """Waits in the middle of the copy until it is told to go on."""

    def __init__(self):
        super().__init__()
        self.started, self.go_on = threading.Event(), threading.Event()

    def copy(self, moves, announce):
        self.started.set()
        assert self.go_on.wait(60)
        super().copy(moves, announce)


@pytest.fixture
def slow(tmp_path):
    engine = ce.Engine(tmp_path / "slow", capture="overlap")
    engine._copier = SlowCopier()
    yield engine
    engine._copier.go_on.set()
    engine.close()


def test_the_call_returns_before_the_copy_and_the_step_waits_for_it(slow):
    model, optimizer = trainer()
    forward_backward(model)
    optimizer.step()
    moment = copied(model.state_dict())
    handle = slow.save_async({"model": model, "optimizer": optimizer}, step=1)
    assert slow._copier.started.wait(60)
    stepped = threading.Event()

    def step():
        optimizer.step()
        stepped.set()

    stepping = threading.Thread(target=step)
    stepping.start()
    assert not stepped.wait(0.2)
    assert not handle.done()
    slow._copier.go_on.set()
    assert stepped.wait(60)
    stepping.join()
    assert handle.wait().step == 1
    assert handle.timings["fence"] > 0
    assert same(moment, ce.load(slow.root)["model"])


def test_what_no_optimizer_owns_is_copied_at_the_call(slow):
    model, optimizer = trainer()
    average = {key: value.clone() for key, value in model.state_dict().items()}
    moment = copied(average)
    slow._copier.go_on.set()
    slow.save_async({"model": model, "optimizer": optimizer, "average": average}, step=1)
    for value in average.values():
        value.zero_()
    slow.wait()
    assert same(moment, ce.load(slow.root)["average"])


def test_a_change_before_the_fence_gives_the_save_up_and_says_so(slow):
    model, optimizer = trainer()
    forward_backward(model)
    optimizer.step()
    handle = slow.save_async({"model": model, "optimizer": optimizer}, step=1)
    assert slow._copier.started.wait(60)
    with torch.no_grad():
        model[0].weight.add_(1)
    slow._copier.go_on.set()
    with pytest.raises(ce.StateError, match="were changed while the save of step 1"):
        slow.fence()
    handle.join()
    assert slow.steps() == []
    assert slow.save({"model": model, "optimizer": optimizer}, step=2).step == 2


def test_waiting_for_the_handle_needs_no_further_step(slow):
    model, optimizer = trainer()
    slow._copier.go_on.set()
    handle = slow.save_async({"model": model, "optimizer": optimizer}, step=1)
    assert handle.wait().step == 1


def test_the_hooks_are_gone_after_close(tmp_path):
    model, optimizer = trainer(10)
    with ce.Engine(tmp_path / "run", capture="overlap") as engine:
        engine.save_async({"optimizer": optimizer, "model": model}, step=1)
        engine.save_async({"optimizer": optimizer, "model": model}, step=2)
        assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert not optimizer._optimizer_step_pre_hooks


def test_an_unknown_mode_is_refused(tmp_path):
    with pytest.raises(ce.ConfigError, match="capture='lazy' must be one of"):
        ce.Engine(tmp_path, capture="lazy")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["copy", "overlap"])
def test_cuda_states_come_back(tmp_path, mode):
    model, optimizer = trainer(100)
    model.cuda()
    moments = {}
    with ce.Engine(tmp_path, capture=mode) as engine:
        for step in range(1, 5):
            model(torch.randn(4, 100, device="cuda")).sum().backward()
            optimizer.step()
            moments[step] = copied(model.state_dict())
            engine.save_async({"model": model, "optimizer": optimizer}, step=step)
        engine.restore({"model": model, "optimizer": optimizer}, step=2)
    assert same(moments[2], model.state_dict())


def everything(model, optimizer, values, average):
    """A state of all kinds, and what changes all of it in place, by means that the engine does not
    see: through views, `.data`, the optimizer's own dictionaries and Python's containers."""
    state = {"model": model, "optimizer": optimizer, "values": values, "average": average}

    def mutate():
        for tensor in [*model.state_dict().values(), *average.values()]:
            tensor.data.view(-1).fill_(-7)
        for entry in optimizer.state.values():
            for tensor in entry.values():
                tensor.view(-1)[:] = -7
        optimizer.param_groups[0]["lr"] = -7.0
        values["list"].append(-7)
        values["nested"]["number"] = -7
        values["array"][:] = -7
        del values["gone"]

    return state, mutate


@pytest.mark.parametrize("mode", ["copy", "auto", "overlap"])
@pytest.mark.parametrize(
    "moment",
    ["at once", "stage", *(f"write-{n}" for n in "123"), *(f"sync-{n}" for n in "1234"),
     "commit", "rename", "committed"],
)  # fmt: skip
def test_a_mutator_at_any_moment_changes_nothing_of_the_snapshot(tmp_path, faults, mode, moment):
    model, optimizer = trainer(width=400)
    forward_backward(model)
    optimizer.step()
    values = {"list": [1, 2], "nested": {"number": 3}, "array": np.arange(50), "gone": "x"}
    average = {key: value.clone() for key, value in model.state_dict().items()}
    state, mutate = everything(model, optimizer, values, average)
    with ce.Engine(tmp_path / "run", capture=mode) as engine:
        engine.save(state, step=1)
        wanted = ce.load(tmp_path / "run", step=1).to_dict()
        if moment != "at once":
            faults.set(moment, "wait")
        handle = engine.save_async(state, step=2)
        engine.fence()  # nothing may be changed in an overlapped capture before
        if moment != "at once":
            faults.await_hit(moment)
        mutate()
        faults.go()
        handle.wait()
        assert engine.save(state, step=3).step == 3
    found = ce.load(tmp_path / "run", step=2).to_dict()
    assert equal(found, wanted)
    assert not equal(ce.load(tmp_path / "run", step=3).to_dict(), wanted)


@pytest.mark.parametrize("piece", range(6))
def test_a_step_that_comes_in_the_middle_of_an_overlapped_copy_waits_for_it(tmp_path, piece):
    """Whichever piece is being copied when the optimizer wants to go on."""
    model, optimizer = trainer(width=400)
    forward_backward(model)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    with ce.Engine(tmp_path / "run", capture="overlap") as engine:
        engine.save(state, step=1)
        wanted = ce.load(tmp_path / "run", step=1).to_dict()
        engine._copier.close()
        engine._copier = copier = PausedCopier(piece)
        handle = engine.save_async(state, step=2)
        assert copier.paused.wait(60)
        model.train()(torch.randn(4, 400))  # buffers may change at once
        threading.Timer(0.05, copier.go_on.set).start()
        optimizer.step()
        assert copier.go_on.is_set()
        handle.wait()
    assert equal(ce.load(tmp_path / "run", step=2).to_dict(), wanted)


class PausedCopier(Copier):
    """Copies piece by piece, and pauses before that of a number until it is told to go on."""

    def __init__(self, number):
        super().__init__()
        self.number, self.seen = number, 0
        self.paused, self.go_on = threading.Event(), threading.Event()

    def copy(self, moves, announce):
        for move in moves:
            for start in range(0, move.nbytes, 128 << 10):
                if self.seen == self.number:
                    self.paused.set()
                    assert self.go_on.wait(60)
                self.seen += 1
                size = min(128 << 10, move.nbytes - start)
                super().copy([Move(move.target + start, move.source + start, size)], announce)


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other

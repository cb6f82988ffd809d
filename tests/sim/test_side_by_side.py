"""The layers that many clients share on a GPU, in a whole round: a CPU is taken for a GPU."""

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan
from fedbasin.core.net import Net
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.core.round import Launch, Sent
from fedbasin.data.transform import Transform
from fedbasin.local import SGD, Trainer
from fedbasin.methods.parts.client_momentum import ClientMomentum, SharedMomentum
from fedbasin.models import convolution
from fedbasin.models.convolution import Convolution
from fedbasin.models.parts import Normalisation, Pooling
from fedbasin.sim import LoopExecutor, Population
from fedbasin.sim.captured_step import CapturedStep, in_place, repeated
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.cohort import CohortExecutor, Counters

KEY = root(7)
SIZES = (20, 17, 24)  # as many steps for each, which is one graph to compile


@pytest.fixture
def calls(monkeypatch):
    """Count the layers' own operations, by which a cohort is told from a loop."""
    found = []

    def many(_):
        return torch._C._functorch.peek_interpreter_stack() is not None

    def counted(function):
        whole = function.apply
        monkeypatch.setattr(function, "apply", lambda *args: found.append(function) or whole(*args))

    monkeypatch.setattr(convolution, "_many_on_gpu", many)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    counted(Convolution)
    counted(Normalisation)
    counted(Pooling)
    return found


def update_of(make, mixed=False, side=8, model="resnet8"):
    """What two epochs change in the models of three clients."""
    rng = KEY.fold("data").numpy()
    shape = (3, side, side)
    inputs = rng.integers(0, 256, (sum(SIZES), *shape), dtype=np.uint8)
    ends = np.cumsum(SIZES)
    rows = [np.arange(end - n, end) for n, end in zip(SIZES, ends, strict=True)]
    people = Population.of(inputs, rng.integers(0, 10, sum(SIZES)), rows, "cpu")
    with torch_draws_from(KEY):
        net = Net(parse(model, "model")(shape, 10), mixed=mixed)
    transform = Transform((0.5,) * 3, (0.25,) * 3, augment=True, kind="image")
    executor = make(Trainer(net, (), SGD(0.9, 1e-3), 8, transform, 10, clip=10.0), people, KEY)
    vector, buffers = net.initial()
    states = ClientStates((), vector)
    everyone = np.arange(len(SIZES))
    gathered = executor.train(
        [Launch(everyone, Sent(vector, buffers, (), 0), Plan(0.05, 2), states)]
    )[0]
    return gathered.replies.models - vector


def distance(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


def cohort(compiled):
    """The step of a GPU, which is not the lean one."""
    settings = {"compiled": compiled, "backend": "aot_eager"}
    return lambda *args: CohortExecutor(*args, counters=Counters(lean=False), **settings)


@pytest.mark.parametrize(
    ("model", "side"),
    [("resnet8", 8), ("resnet8", 4), ("lenet", 10)],
    ids=["resnet", "one pixel, seen by one tap", "pooled, a row and a column left over"],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_cohort_trains_as_a_loop_does(calls, compiled, model, side):
    alone = update_of(LoopExecutor, side=side, model=model)
    assert not calls
    assert distance(update_of(cohort(compiled), side=side, model=model), alone) < 1e-4
    assert {*calls} == {Convolution, Pooling if model == "lenet" else Normalisation}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_in_halves_it_is_no_further_off_than_a_loop_in_halves(calls, compiled):
    exact = update_of(LoopExecutor)
    of_loop = distance(update_of(LoopExecutor, mixed=True), exact)
    assert distance(update_of(cohort(compiled), mixed=True), exact) < 2 * of_loop
    assert {*calls} == {Convolution, Normalisation}


def copies_of_a_step(rules, shared):
    """How many tensors a step in place writes over, once traced."""
    with torch_draws_from(KEY):
        net = Net(parse("mlp(widths=(5,))", "model")((1, 4, 4), 3))
    transform = Transform((0.5,), (0.25,), augment=False, kind="image")
    inputs = np.zeros((8, 1, 4, 4), dtype=np.uint8)
    labels = np.zeros(8, dtype=np.int64)
    people = Population.of(inputs, labels, [np.arange(4), np.arange(4, 8)], "cpu")
    executor = CohortExecutor(Trainer(net, rules, SGD(), 4, transform, 3), people, KEY)
    seen = []

    def looked_at(progress, batches, *data):
        graph = make_fx(in_place(executor._one_step))(progress, batches, *data)
        seen.append(sum(node.target is torch.ops.aten.copy_.default for node in graph.graph.nodes))
        return progress

    executor._captured[2, 1] = CapturedStep(repeated(looked_at), repeated(looked_at), people)
    vector, buffers = net.initial()
    everyone = np.arange(2)
    sent = Sent(vector, buffers, tuple(each(vector) for each in shared), 0)
    states = ClientStates(executor.trainer.zero_state(vector), vector)
    executor.train([Launch(everyone, sent, Plan(0.05, 1), states)])
    return seen[0]


def test_what_a_rule_carries_unchanged_is_not_written_in_every_step():
    plain = copies_of_a_step((), ())
    momentum = lambda vector: SharedMomentum(vector, vector.new_tensor(0.1))  # noqa: E731
    assert copies_of_a_step((ClientMomentum(),), (momentum,)) == plain
    assert plain >= 2, "models and sums are written"

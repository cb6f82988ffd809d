"""The cohort executor equals the loop: every model and setting, whatever the chunking."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedbasin.experiment  # noqa: F401  (fills the catalogue)
from fedbasin.core.expressions import parse
from fedbasin.core.method import Plan
from fedbasin.core.net import Net
from fedbasin.core.rng import keys_tensor, root, torch_draws_from
from fedbasin.core.round import Launch, ProbeRequest, Sent
from fedbasin.core.tree import tensors
from fedbasin.data.transform import Transform
from fedbasin.experiment import ConfigError, Experiment, build
from fedbasin.experiment.config import LocalConfig, PartitionConfig, SimConfig
from fedbasin.local import SGD, AdamW, Prox, Trainer, batches
from fedbasin.local.batches import cohort_rows
from fedbasin.local.step import Point
from fedbasin.methods import FedAvg, Scaffold
from fedbasin.sim import LoopExecutor, Population
from fedbasin.sim.captured_step import CapturedStep, Progress, cloned, in_place
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.cohort import LADDER, CohortExecutor, Counters, Unsupported, _Rows, rung
from fedbasin.sim.lean import LeanStep
from fedbasin.sim.memory import client_bytes, free_bytes
from fedbasin.sim.survey import gradients
from fedbasin.sim.tracing import Compiled
from fedbasin.testing import toy_federation

KEY = root(3)
SIZES = (13, 1, 8, 5)


@pytest.mark.parametrize(
    "plan", [Plan(0.1, 3), Plan(0.1, None, 7), Plan(0.1, 1), Plan(0.1, None, 1)]
)
def test_the_cohorts_rows_are_the_loops_batches(plan):
    sizes = [11, 1, 4, 30, 5]
    keys = [root(0).fold(i) for i in range(5)]
    from fedbasin.local.batches import count_steps

    steps = [count_steps(plan, n, 4) for n in sizes]
    epochs = max(-(-k // -(-n // 4)) for k, n in zip(steps, sizes, strict=True))
    rows, real = cohort_rows(
        keys_tensor(keys), torch.tensor(sizes), torch.tensor(steps), 4, max(steps) + 2, 33, epochs
    )
    for c, (key, n) in enumerate(zip(keys, sizes, strict=True)):
        expected = batches(key.tensor(), plan, n, 4)
        assert not real[c, len(expected) :].any()
        for k, batch in enumerate(expected):
            assert rows[c, k][real[c, k]].tolist() == batch.tolist()
            assert real[c, k].tolist() == [j < len(batch) for j in range(4)]


def executors(
    model,
    shape,
    *,
    sizes=SIZES,
    rules=(),
    optimiser=None,
    clip=None,
    augment=False,
    dtype=torch.float64,
    **settings,
):
    """A loop and a cohort executor over ragged clients with images or tokens of a shape."""
    rng = KEY.fold("data").numpy()
    inputs = rng.integers(0, 256, (sum(sizes), *shape), dtype=np.uint8)
    labels = rng.integers(0, 3, sum(sizes))
    ends = np.cumsum(sizes)
    people = Population.of(
        inputs, labels, [np.arange(e - n, e) for n, e in zip(sizes, ends, strict=True)]
    )
    with torch_draws_from(KEY):
        net = Net(parse(model, "model")(shape, 3), dtype=dtype)
    whiten = Transform((0.5,) * shape[0], (0.25,) * shape[0], augment=augment, kind="image")
    optimiser = optimiser or SGD()

    def transform(raw, key=None):
        return whiten(raw, key, dtype)

    trainer = Trainer(net, rules, optimiser, 4, transform, 3, clip=clip)
    return LoopExecutor(trainer, people, KEY), CohortExecutor(
        trainer, people, KEY, compiled=False, **settings
    )


def trained(executor, plan, rules=(), cohort=(0, 1, 2, 3), rounds=2):
    vector, buffers = executor.trainer.net.initial()
    states = ClientStates(executor.trainer.zero_state(vector), vector)
    for t in range(rounds):
        shared = tuple(() for _ in rules)
        gathered = executor.train(
            [Launch(np.array(cohort), Sent(vector, buffers, shared, t), plan, states)]
        )[0]
        states.put(cohort, gathered.own, t)
        vector = gathered.replies.models.mean(0)
    return gathered


def assert_equal(a, b, tolerance=1e-9):
    for name in ("models", "weights", "clients", "steps", "lr_sum", "effective_steps", "last_loss"):
        left = getattr(a.replies, name)
        right = getattr(b.replies, name)
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance, check_dtype=False)
    torch.testing.assert_close(
        a.train_loss, b.train_loss, rtol=tolerance, atol=tolerance, check_dtype=False
    )


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("logistic", (1, 6, 6)),
        ("mlp(widths=(7,))", (1, 6, 6)),
        ("fmnist_cnn(channels=(3, 3), widths=(8, 6))", (1, 16, 16)),
        ("resnet8", (3, 8, 8)),
        ("emnist_cnn", (1, 12, 12)),
    ],
)
@pytest.mark.parametrize(
    ("sgd", "clip"), [(SGD(), None), (SGD(0.9, 1e-2), 0.5)], ids=["plain", "full"]
)
def test_cohort_equals_loop_for_networks(model, shape, sgd, clip):
    rules = (Prox(0.3),)
    loop, cohort = executors(model, shape, rules=rules, optimiser=sgd, clip=clip, augment=True)
    assert_equal(trained(loop, Plan(0.05, 2), rules), trained(cohort, Plan(0.05, 2), rules))


def test_cohort_equals_loop_in_float32():
    loop, cohort = executors("mlp(widths=(7,))", (1, 6, 6), dtype=torch.float32)
    assert_equal(trained(loop, Plan(0.05, None, 5)), trained(cohort, Plan(0.05, None, 5)), 1e-5)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_the_result_does_not_depend_on_the_chunking_or_the_order(chunk):
    _, whole = executors("mlp(widths=(7,))", (1, 6, 6), optimiser=SGD(0.9))
    _, parts = executors("mlp(widths=(7,))", (1, 6, 6), optimiser=SGD(0.9), chunk=chunk)
    assert_equal(trained(whole, Plan(0.1, 2)), trained(parts, Plan(0.1, 2)), 1e-12)
    turned = trained(whole, Plan(0.1, 2), cohort=(2, 0, 3, 1), rounds=1)
    straight = trained(whole, Plan(0.1, 2), rounds=1)
    assert turned.replies.clients.tolist() == [2, 0, 3, 1]
    torch.testing.assert_close(turned.replies.models[1], straight.replies.models[0])


def test_padding_never_trains_anyone():
    """A client's result is the same whoever trains beside it."""
    _, cohort = executors("mlp(widths=(7,))", (1, 6, 6))
    alone = trained(cohort, Plan(0.1, 3), cohort=(1,), rounds=1)
    among = trained(cohort, Plan(0.1, 3), rounds=1)
    torch.testing.assert_close(
        alone.replies.models[0], among.replies.models[1], rtol=1e-12, atol=1e-14
    )


def test_clients_that_have_finished_stand_still_beside_those_that_have_not():
    """Seven of eight clients are active at a width of eight: the other must not drift."""
    settings = {"sizes": (33, 29, 25, 21, 17, 13, 9, 5), "optimiser": SGD(0.9, 0.1)}
    loop, cohort = executors("logistic", (1, 6, 6), **settings)
    cohort = replace(cohort, compiled=True, backend="eager")
    everyone = tuple(range(8))
    ends = [trained(e, Plan(0.1, 1), cohort=everyone, rounds=1) for e in (loop, cohort)]
    assert cohort.counters.share_useful < 1
    assert_equal(*ends)


def test_the_active_set_shrinks_and_little_is_wasted():
    _, cohort = executors("logistic", (1, 6, 6))
    trained(cohort, Plan(0.1, 5), rounds=1)
    assert cohort.counters.useful == sum(5 * -(-n // 4) for n in SIZES)
    # Four clients take 20, 10, 10 and 5 steps: five at a width of four, five of three, ten alone.
    assert cohort.facts() == {"executor": "cohort", "shapes_compiled": 0, "share_useful_steps": 1.0}
    assert [rung(n) for n in (1, 5, 7, 11, 129)] == [1, 5, 8, 13, 150]
    assert list(LADDER) == sorted(LADDER)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces
def test_a_run_compiles_a_handful_of_shapes_and_never_again():
    _, cohort = executors("logistic", (1, 6, 6))
    cohort = replace(cohort, compiled=True, backend="eager")
    seen = []
    vector, buffers = cohort.trainer.net.initial()
    for t in range(6):
        who = np.array([[0, 1, 2], [1, 2, 3], [0, 2, 3]][t % 3])
        cohort.train(
            [
                Launch(
                    who,
                    Sent(vector, buffers, (), t),
                    Plan(0.1 / (t + 1), 2),
                    ClientStates((), vector),
                )
            ]
        )[0]
        seen.append(cohort.counters.compiled)
    assert seen[0] > 0
    assert seen[-1] == seen[2] <= 2  # one client, and any number more


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fewer_epochs_need_no_further_compiling_and_train_as_ever():
    """`ima(decay="epochs")` asks for ever fewer."""
    loop, cohort = executors("logistic", (1, 6, 6))
    cohort = replace(cohort, compiled=True, backend="eager")
    vector, buffers = cohort.trainer.net.initial()
    who = np.array([0, 2, 3])
    seen = []
    for t, epochs in enumerate((3, 2, 1, 4)):
        sent = Sent(vector, buffers, (), t)
        plan = Plan(0.1, epochs)
        request = Launch(who, sent, plan, ClientStates((), vector))
        ours, theirs = (each.train([request])[0].replies for each in (cohort, loop))
        torch.testing.assert_close(ours.models, theirs.models, rtol=1e-9, atol=1e-12)
        assert ours.steps.tolist() == theirs.steps.tolist()
        seen.append(cohort.counters.compiled)
    assert 0 < seen[0] == seen[1] == seen[2] < seen[3]  # more steps than ever do need it


def test_a_step_that_is_compiled_for_each_size_takes_fewer_sizes():
    """On a CPU clients are groups of torch's convolution."""
    sizes = (29, 25, 21, 17, 13, 9, 5)
    network = "fmnist_cnn(channels=(3, 3), widths=(8, 6))"
    loop, cohort = executors(network, (1, 16, 16), sizes=sizes, optimiser=SGD(0.9))
    compiled = replace(cohort, compiled=True, backend="eager")
    everyone = tuple(range(7))
    ends = [trained(e, Plan(0.1, 1), cohort=everyone, rounds=2) for e in (loop, compiled)]
    assert_equal(*ends)
    assert compiled.counters.compiled == 4  # 7, 4, 2 and 1


def test_a_step_that_cannot_be_compiled_runs_as_it_is_and_says_so():
    _, cohort = executors("logistic", (1, 6, 6))
    broken = replace(cohort, compiled=True, backend="no such compiler")
    with pytest.warns(UserWarning, match="runs uncompiled, it cannot be compiled: "):
        ends = trained(broken, Plan(0.1, 2), rounds=1)
    assert_equal(ends, trained(cohort, Plan(0.1, 2), rounds=1))


def test_a_step_that_fails_as_it_is_fails_at_once():
    people = executors("logistic", (1, 6, 6))[0].population
    calls = []

    def broken(*given, **how):
        calls.append(given)
        raise ValueError("no such row")

    with pytest.raises(ValueError, match="no such row"):
        CapturedStep(broken, broken, people).run(None, None, 1)
    assert len(calls) == 1


def test_whole_runs_agree_and_auto_picks_by_device_and_model(tmp_path):
    base = Experiment(
        method="scaffold",
        model="mlp(widths=(16,))",
        rounds=3,
        partition=PartitionConfig(how="dirichlet(alpha=0.3, minimum=1)", clients=8),
        local=LocalConfig(lr=0.1, epochs=2, batch=16, momentum=0.5),
        sim=SimConfig(participation="fraction(rate=0.5)", precision="fp64", device="cpu"),
    )
    ends = {}
    for name in ("loop", "cohort", "auto"):
        federation = build(replace(base, sim=replace(base.sim, executor=name, chunk=3)))
        server, states = federation.begin()
        *_, (last, _) = federation.rounds_from(server, states)
        ends[name] = (type(federation.executor), last.send)
    assert ends["auto"][0] is CohortExecutor and ends["loop"][0] is LoopExecutor
    torch.testing.assert_close(ends["loop"][1], ends["cohort"][1], rtol=1e-9, atol=1e-11)
    large = build(replace(base, model="lenet", local=LocalConfig(batch=50)))
    assert type(large.executor) is LoopExecutor


def test_batchnorm_falls_back_to_the_loop_or_says_why():
    base = Experiment(
        model="resnet8(norm='batch')", partition=PartitionConfig(how="iid", clients=4)
    )
    assert type(build(base).executor) is LoopExecutor
    with pytest.raises(ConfigError, match="BatchNorm"):
        build(replace(base, sim=SimConfig(executor="cohort")))
    federation = build(base)
    with pytest.raises(Unsupported):
        CohortExecutor(federation.trainer, federation.population, KEY)


def test_client_states_are_kept_apart():
    loop = toy_federation(Scaffold(), rounds=3)
    one = loop.executor
    whole = replace(
        loop, executor=CohortExecutor(one.trainer, one.population, one.key, compiled=False)
    )
    kept = []
    for federation in (loop, whole):
        server, states = federation.begin()
        list(federation.rounds_from(server, states))
        kept.append(torch.stack([states.get(i)[0].control for i in range(6)]))
    torch.testing.assert_close(kept[0], kept[1], rtol=1e-10, atol=1e-12)
    assert FedAvg().rules() == ()


def test_a_memory_budget_cuts_the_cohort_into_even_chunks():
    loop, cohort = executors("mlp(widths=(4,))", (1, 2, 2))
    vector = cohort.trainer.net.initial()[0]
    one = client_bytes(cohort.trainer, cohort.population, vector)
    assert one > 5 * vector.numel() * 8
    plan = Plan(0.1, 2)
    whole = trained(loop, plan).replies.models
    for clients, width in ((1, 1), (3, 2), (4, 4), (9, 4)):
        tight = replace(cohort, memory=int(one * (clients + 0.5)), counters=Counters())
        torch.testing.assert_close(trained(tight, plan).replies.models, whole)
        assert tight._width(4, vector) == width
    assert free_bytes(torch.device("cpu")) > 2**20


def test_a_probe_is_cut_into_the_chunks_of_training(monkeypatch):
    loop, cohort = executors("mlp(widths=(4,))", (1, 2, 2))
    sent = Sent(*loop.trainer.net.initial(), (), 0)
    who = np.array([3, 0, 2])
    seen = []

    def watched(trainer, population, clients, sent):
        seen.append(clients.tolist())
        if len(clients) > most:
            raise torch.OutOfMemoryError("no room")
        return gradients(trainer, population, clients, sent)

    monkeypatch.setattr("fedbasin.sim.cohort.gradients", watched)
    wanted = loop.probe([ProbeRequest(who, sent)])[0]
    most = 3
    for chunk, cut in ((0, [[3, 0, 2]]), (2, [[3, 0], [2]]), (1, [[3], [0], [2]])):
        seen.clear()
        found = replace(cohort, chunk=chunk, counters=Counters()).probe([ProbeRequest(who, sent)])[
            0
        ]
        torch.testing.assert_close(found.gradients, wanted.gradients)
        assert found.weights.tolist() == wanted.weights.tolist() and seen == cut
    most = 1
    with pytest.warns(UserWarning, match=r"ran out of memory; continuing with [21]\b"):
        found = replace(cohort, counters=Counters()).probe([ProbeRequest(who, sent)])[0]
    torch.testing.assert_close(found.gradients, wanted.gradients)


def test_bigger_networks_and_batches_take_more_memory():
    _, small = executors("mlp(widths=(4,))", (1, 2, 2))
    _, large = executors("mlp(widths=(64,))", (1, 2, 2))
    wide = replace(small, trainer=replace(small.trainer, batch=64))
    momentum = replace(small, trainer=replace(small.trainer, optimiser=SGD(0.9)))
    moments = replace(small, trainer=replace(small.trainer, optimiser=AdamW()))
    kept = replace(small, trainer=replace(moments.trainer, keep_optimiser=True))
    keeping = replace(small, trainer=replace(small.trainer, rules=Scaffold().rules()))

    def bytes_of(executor):
        vector = executor.trainer.net.initial()[0]
        return client_bytes(executor.trainer, executor.population, vector)

    others = large, wide, momentum, keeping
    assert bytes_of(small) < min(bytes_of(each) for each in others)
    assert bytes_of(momentum) < bytes_of(moments) < bytes_of(kept)


def test_out_of_memory_halves_the_chunk_says_so_and_gives_the_same_result(monkeypatch):
    loop, cohort = executors("mlp(widths=(4,))", (1, 2, 2))
    whole = LeanStep.advance
    most = 1

    def narrow(self, progress, batches, steps):
        if len(progress.sums) > most:
            raise torch.OutOfMemoryError("no room")
        return whole(self, progress, batches, steps)

    monkeypatch.setattr(LeanStep, "advance", narrow)
    with pytest.warns(UserWarning, match=r"ran out of memory; continuing with [21]\b"):
        found = trained(cohort, Plan(0.1, 2))
    torch.testing.assert_close(found.replies.models, trained(loop, Plan(0.1, 2)).replies.models)
    assert cohort.counters.width == 1
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        trained(cohort, Plan(0.1, 2))


def test_mixed_precision_trains_close_to_single_and_keeps_models_in_it():
    _, single = executors("mlp(widths=(16,))", (1, 4, 4), dtype=torch.float32)
    net = single.trainer.net
    mixed = copy.copy(net)
    mixed.mixed = True
    half = replace(single, trainer=replace(single.trainer, net=mixed))
    a = trained(single, Plan(0.1, 2))
    b = trained(half, Plan(0.1, 2))
    assert b.replies.models.dtype == torch.float32
    assert not torch.equal(a.replies.models, b.replies.models)
    torch.testing.assert_close(a.replies.models, b.replies.models, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_step_in_place_is_the_step(backend):
    """What a captured graph replays, compiled or not, on a device that cannot capture."""
    _, cohort = executors("mlp(widths=(4,))", (1, 2, 2), optimiser=SGD(0.9, 0.01))
    vector, buffers = cohort.trainer.net.initial()
    sent = Sent(vector, buffers, (), 0)
    both = np.array([0, 1])
    request = Launch(both, sent, Plan(0.1, 1), ClientStates((), vector))
    batches, _ = cohort._batch_plan(_Rows([request], both * 0, both, np.array([4, 1])))
    point = Point(vector.expand(2, -1), cohort._fresh(vector, 2), buffers[None], ())
    point = point._replace(buffers=buffers.expand(2, -1))
    progress = cloned(Progress(point, vector.new_zeros(2, 4), torch.zeros((), dtype=torch.int64)))
    data = (cohort.population.inputs, cohort.population.labels)
    expected = cohort._one_step(progress, batches, *data)
    advance = in_place(cohort._one_step)
    if backend:
        advance = Compiled(advance, backend)
    advance(progress, batches, *data)
    assert int(progress.number) == 1
    torch.testing.assert_close(progress.point.vector, expected.point.vector, rtol=1e-12, atol=0)
    ours = tensors(progress.point.state)
    theirs = tensors(expected.point.state)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)

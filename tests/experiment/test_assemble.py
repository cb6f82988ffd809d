"""What is chosen for a run from its size."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedbasin.core.evaluator import Evaluator
from fedbasin.core.method import Plan
from fedbasin.core.net import Net
from fedbasin.core.rng import root
from fedbasin.core.task import Classification
from fedbasin.data import load
from fedbasin.experiment import Experiment, build, run
from fedbasin.experiment.assemble import _recalibration
from fedbasin.experiment.config import (
    ConfigError,
    DataConfig,
    LocalConfig,
    PartitionConfig,
    SimConfig,
)
from fedbasin.experiment.executors import compiling_pays
from fedbasin.experiment.rows import cut_rows
from fedbasin.local import SGD
from fedbasin.sim import Population


def population(clients: int, rows: int) -> Population:
    labels = np.zeros(clients * rows, dtype=np.int64)
    mine = list(np.arange(clients * rows).reshape(clients, rows))
    inputs = np.zeros((clients * rows, 1), dtype=np.uint8)
    return Population.of(inputs, labels, mine, torch.device("cpu"))


def sized(rounds: int, rate: float, **local) -> Experiment:
    base = Experiment(rounds=rounds)
    return replace(
        base,
        local=replace(base.local, **local),
        sim=replace(base.sim, participation=f"fraction(rate={rate})"),
    )


@pytest.mark.parametrize(
    ("rounds", "rate", "local", "pays"),
    [
        (300, 0.1, {"epochs": 5, "batch": 50}, True),  # rounds enough, however small
        (299, 0.1, {"epochs": 5, "batch": 50}, False),
        (60, 1.0, {"epochs": 5, "batch": 50}, True),  # 100 clients of 250 rows: 7.5 million
        (59, 1.0, {"epochs": 5, "batch": 50}, False),
        (60, 0.9, {"epochs": 5, "batch": 50}, False),  # those that take part count
        (150, 1.0, {"epochs": 1, "steps": 10, "batch": 50}, True),
        (149, 1.0, {"epochs": 1, "steps": 10, "batch": 50}, False),
    ],
)
def test_a_gpu_compiles_for_many_rounds_or_many_rows(rounds, rate, local, pays):
    run = sized(rounds, rate, **local)
    assert compiling_pays(run, population(100, 250), root(0), on_cuda=True) == pays


@pytest.mark.parametrize(
    ("rounds", "found", "pays"), [(80, True, True), (79, True, False), (80, False, False)]
)
def test_a_cpu_compiles_for_many_steps_where_there_is_a_compiler(monkeypatch, rounds, found, pays):
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/c++" if found else None)
    run = sized(rounds, 0.1, epochs=5, batch=5)  # 250 steps a client
    assert compiling_pays(run, population(10, 250), root(0), on_cuda=False) == pays


def test_held_out_rows_are_trained_on_by_nobody():
    whole = Experiment().resolved()
    part = replace(whole, partition=replace(whole.partition, hold_out=0.3))
    every, kept = (cut_rows(e, load("digits")).parts for e in (whole, part))
    assert kept.sizes().tolist() == [size - int(0.3 * size + 1e-9) for size in every.sizes()]
    held = cut_rows(part, load("digits")).held
    for mine, out, before in zip(kept.clients, held.clients, every.clients, strict=True):
        assert sorted([*mine, *out]) == before.tolist()


def test_unseen_clients_have_rows_at_home_and_none_in_training():
    whole = Experiment().resolved()
    some = replace(whole, partition=replace(whole.partition, hold_out=0.2, unseen=0.1))
    rows = cut_rows(some, load("digits"))
    assert len(rows.unseen) == 5
    assert (rows.parts.sizes() == 0).nonzero()[0].tolist() == rows.unseen.tolist()
    for client, (mine, home) in enumerate(zip(rows.parts.clients, rows.home.clients, strict=True)):
        assert len(home) and len(rows.held.clients[client])
        assert client in rows.unseen or np.array_equal(mine, home)
    assert set(build(some).eligible.tolist()) == set(range(50)) - set(rows.unseen.tolist())


def test_all_clients_cannot_be_unseen():
    parts = PartitionConfig(how="iid", clients=1, unseen=0.5)
    with pytest.raises(ConfigError, match=r"partition\.unseen is 0\.5, which leaves no client"):
        cut_rows(Experiment(partition=parts), load("digits"))


def test_classes_cannot_be_held_out_of_targets_without_any():
    parts = PartitionConfig(how="iid", clients=4, hold_out=0.2, hold_out_by="classes")
    with pytest.raises(ConfigError, match="targets have no classes: write 'rows'"):
        cut_rows(Experiment(task="regression", partition=parts), load("diabetes"))


@pytest.mark.parametrize("by", ["rows", "classes"])
def test_what_stands_in_held_out_rows_changes_no_model(tmp_path, by):
    """The marker: rows that are held out hold other pixels, and the trained models are equal."""
    experiment = Experiment(
        method="fedlaw",
        rounds=2,
        data=DataConfig(proxy_per_class=2),
        partition=PartitionConfig(clients=6, hold_out=0.3, hold_out_by=by, unseen=0.2),
        sim=SimConfig(participation="fraction(rate=1.0)", executor="loop", evaluate_train=True),
    ).resolved()
    plain = load("digits")
    rows = cut_rows(experiment, plain)
    hidden = rows.splits.train.inputs[rows.held.order]
    marked = plain.train.inputs.copy()
    known = {row.tobytes() for row in hidden}
    spots = [at for at, row in enumerate(marked) if row.tobytes() in known]
    marked[spots] = 255
    other = replace(plain, name="marked", train=replace(plain.train, inputs=marked))
    first, second = (run(experiment, tmp_path / data.name, data=data) for data in (plain, other))
    models = [(tmp_path / data.name / "model.safetensors").read_bytes() for data in (plain, other)]
    assert len(spots) >= 300 and models[0] == models[1]
    assert first["accuracy_train_last"] == second["accuracy_train_last"]


def test_the_servers_rows_have_a_tail_of_their_own_and_may_be_evened():
    whole = DataConfig(proxy_per_class=10, proxy_from="test")
    tailed = replace(whole, proxy_imbalance=0.1)
    found = [
        cut_rows(Experiment(data=settings), load("digits")).splits
        for settings in (whole, tailed, replace(tailed, proxy_evened=True))
    ]
    counts = [np.bincount(splits.proxy.labels, minlength=10).tolist() for splits in found]
    assert counts == [[10] * 10, [10, 7, 5, 4, 3, 2, 2, 1, 1, 1], [10] * 10]
    rows = [{row.tobytes() for row in splits.proxy.inputs} for splits in found]
    assert rows[1] == rows[2] < rows[0]
    for splits in found:  # what clients hold and what is scored is the same
        assert np.array_equal(splits.train.labels, found[0].train.labels)
        assert np.array_equal(splits.test.inputs, found[0].test.inputs)


def test_corrupted_clients_have_other_labels_and_the_same_rows():
    whole = Experiment().resolved()
    some = replace(whole, partition=replace(whole.partition, corrupted=0.1))
    before, after = (cut_rows(e, load("digits")) for e in (whole, some))
    assert before.parts.order.tolist() == after.parts.order.tolist()
    assert np.array_equal(before.splits.train.inputs, after.splits.train.inputs)
    assert np.array_equal(before.splits.test.labels, after.splits.test.labels)
    others = before.splits.train.labels != after.splits.train.labels
    corrupted = {i for i, mine in enumerate(after.parts.clients) if others[mine].any()}
    assert len(corrupted) == 5 and not before.corrupted
    assert after.corrupted == build(some).holdings.corrupted == corrupted
    assert before.splits.train.labels.dtype == after.splits.train.labels.dtype


def test_labels_of_rows_that_several_hold_are_not_exchanged():
    parts = PartitionConfig(
        how="client_dirichlet(alpha=0.1, refill=True)", clients=5, corrupted=0.5
    )
    with pytest.raises(ConfigError, match=r"partition\.corrupted: labels of some clients cannot"):
        cut_rows(Experiment(partition=parts), load("digits"))


def test_models_are_scored_on_the_clients_rows_where_that_is_asked_for():
    sim = SimConfig(evaluate_every=2, evaluate_last=0, evaluate_train=True, executor="loop")
    parts = PartitionConfig(how="iid", clients=4, hold_out=0.5)
    experiment = Experiment("wima", rounds=4, partition=parts, sim=sim)
    found = build(experiment)
    rows = found.executor.population
    for server, record in found.rounds_from(*found.begin()):
        if record.round % 2:
            assert record.metric("accuracy_train") is None and record.metric("accuracy") is None
            continue
        inputs = found.evaluator.transform(rows.inputs, None)
        guess = found.net(server.score, inputs, server.buffers).logits.argmax(1)
        right = (guess == rows.labels).double().mean().item()
        assert (
            record.metric("accuracy_train") == pytest.approx(right)
            and record.metric("accuracy") is not None
        )
    assert build(replace(experiment, sim=SimConfig())).train is None


def test_the_settings_of_a_run_reach_their_places():
    local = LocalConfig(
        lr=0.5,
        steps=4,
        batch=8,
        momentum=0.5,
        weight_decay=0.01,
        clip=2.0,
        schedule="exponential(decay=0.5)",
    )
    sim = SimConfig(
        participation="count(clients=3)",
        dropout=0.25,
        executor="cohort",
        compile="off",
        chunk=2,
        memory=0.5,
        device="cpu",
        buffers="keep",
        evaluate_every=3,
        evaluate_last=2,
        client_memory=1.5,
    )
    parts = PartitionConfig(how="iid", clients=9)
    found = build(Experiment(rounds=7, partition=parts, local=local, sim=sim))
    assert [found.schedule(t) for t in (0, 2)] == [Plan(0.5, None, 4), Plan(0.125, None, 4)]
    assert (found.rounds, found.dropout, found.buffers) == (7, 0.25, "keep")
    assert (found.evaluate_every, found.evaluate_last) == (3, 2)
    assert found.client_memory == 1.5 * 2**30
    context, executor = found.context, found.executor
    assert (context.clients, context.rounds, context.batch) == (9, 7, 8)
    assert context.effective_steps(3, 0.1) == SGD(0.5).effective_steps(3, 0.1)
    assert context.examples == pytest.approx(executor.population.sizes.mean())
    trainer = executor.trainer
    assert trainer.optimiser == SGD(0.5, 0.01) and (trainer.clip, trainer.batch) == (2.0, 8)
    assert (executor.compiled, executor.chunk, executor.memory) == (False, 2, 2**29)


def test_the_partition_has_a_seed_of_its_own():
    def held(**seeds):
        parts = PartitionConfig(how="iid", clients=5, seed=seeds.get("partition", -1))
        found = cut_rows(Experiment(seed=seeds["run"], partition=parts), load("digits"))
        return found.parts.order.tolist()

    assert held(run=1, partition=3) == held(run=2, partition=3) == held(run=3)
    assert held(run=1, partition=3) != held(run=1, partition=4)
    assert held(run=1) != held(run=2)


def test_clients_without_rows_are_never_asked():
    parts = PartitionConfig(how="class_dirichlet(alpha=0.01)", clients=60)
    found = build(Experiment(partition=parts))
    sizes = found.executor.population.sizes
    assert (sizes == 0).any()
    assert found.eligible.tolist() == [client for client in range(60) if sizes[client]]


@pytest.mark.parametrize("augment", [False, True])
def test_augmentation_is_of_training_alone_and_only_where_asked(augment):
    found = build(Experiment(model="logistic", data=DataConfig(augment=augment)))
    trainer, rows = found.trainer, found.evaluator.inputs[:32]
    plain, drawn = (trainer.transform(rows, key) for key in (None, root(0).tensor()))
    assert torch.equal(plain, drawn) != augment


@pytest.mark.parametrize(
    ("local", "told"),
    [
        (LocalConfig(batch=35), True),  # of 36 rows two, of 35 one
        (LocalConfig(batch=35, steps=3), False),
        (LocalConfig(batch=20), False),  # two of either
    ],
)
def test_clients_are_told_apart_by_their_steps(local, told, caplog):
    sized = PartitionConfig(how="iid", clients=41)
    build(Experiment(method="fedcm", partition=sized, local=local))
    assert ("different numbers of steps" in caplog.text) == told


@pytest.mark.parametrize(("buffers", "told"), [("mean", True), ("recalibrate", False)])
def test_averaged_models_are_cautioned_of_statistics_that_are_not_renewed(buffers, told, caplog):
    settings = Experiment(
        method="wima",
        model="resnet8(norm='batch')",
        data=DataConfig(proxy_per_class=2),
        sim=SimConfig(buffers=buffers),
    )
    build(settings)
    assert ("recalibrate" in caplog.text) == told


def test_a_cohort_that_cannot_be_drawn_is_refused_before_the_run():
    with pytest.raises(ValueError, match="51 clients asked for, only 50 hold data"):
        build(Experiment(sim=SimConfig(participation="count(clients=51)")))


def test_the_data_of_a_run_is_told_by_all_its_rows():
    for settings in (DataConfig(), DataConfig(proxy_per_class=3), DataConfig(imbalance=0.5)):
        assert build(Experiment(data=settings)).data["rows"] == 1797


def test_renewed_statistics_weigh_every_row_of_the_server_alike():
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 256, (700, 4)).astype(np.uint8)
    net = Net(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), dtype=torch.float64)
    labels = torch.zeros(700, dtype=torch.int64)
    proxy = Evaluator(
        net, torch.from_numpy(inputs), labels, lambda raw, key: raw.double(), Classification()
    )
    renew = _recalibration(Experiment(sim=SimConfig(buffers="recalibrate")), net, proxy)
    mean, variance = renew(*net.initial()).reshape(2, 4).numpy()
    np.testing.assert_allclose(mean, inputs.mean(axis=0))
    parts = [part.var(axis=0, ddof=1) for part in (inputs[:500], inputs[500:])]
    np.testing.assert_allclose(variance, (5 * parts[0] + 2 * parts[1]) / 7)


def test_methods_are_told_how_many_clients_hold_rows():
    how = {"how": "dirichlet(alpha=0.01, minimum=0)", "clients": 60}
    federation = build(Experiment(partition=PartitionConfig(**how)))
    sizes = federation.population.sizes
    holders = int((sizes > 0).sum())
    assert 0 < holders < 60 == federation.context.clients
    assert federation.context.able == federation.context.holders == holders
    assert federation.context.examples == float(sizes[sizes > 0].mean())

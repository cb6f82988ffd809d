"""Attacks of hostile clients against NumPy, in every engine, and in the record."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedbasin import Experiment, run
from fedbasin.core.expressions import parse
from fedbasin.core.record import RunFolder
from fedbasin.core.rng import root
from fedbasin.core.round import Sent
from fedbasin.experiment import ConfigError, build
from fedbasin.experiment.config import DataConfig, LocalConfig, PartitionConfig, SimConfig
from fedbasin.sim.attacks import Hostility, draw_hostile, largest_z
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.testing import replies_of, toy_federation

FORGERS = ["sign_flip", "scaled", "gaussian", "alie(z=1)", "ipm(eps=2)", "min_max"]


def forged(source, rows, hostile):
    attack = parse(source, "attack")
    mask = torch.zeros(len(rows), dtype=torch.bool)
    mask[hostile] = True
    return attack.forge(torch.from_numpy(rows), mask, root(0)).numpy()


def drawn(seed=0, count=10):
    return np.random.default_rng(seed).normal(size=(count, 6)) + 0.3


@pytest.mark.parametrize("source", [*FORGERS, "min_max(dev='unit')", "min_max(dev='sign')"])
def test_only_hostile_rows_change(source):
    d = drawn()
    out = forged(source, d, [1, 4])
    np.testing.assert_array_equal(np.delete(out, [1, 4], 0), np.delete(d, [1, 4], 0))
    assert np.isfinite(out).all() and not np.allclose(out[[1, 4]], d[[1, 4]])
    assert np.isfinite(forged(source, d, list(range(10)))).all(), "all of a cohort are hostile"
    assert np.isfinite(forged(source, d[:2], [0])).all(), "one is honest"


def test_forged_rows_are_those_of_the_formulas():
    d, bad = drawn(), [2, 7]
    honest = np.delete(d, bad, 0)
    mu, sd = honest.mean(0), honest.std(0)
    np.testing.assert_allclose(forged("sign_flip(scale=3)", d, bad)[bad], -3 * d[bad])
    np.testing.assert_allclose(forged("scaled", d, bad)[bad], 5 * d[bad])
    np.testing.assert_allclose(forged("scaled(kappa=7)", d, bad)[bad], 7 * d[bad])
    np.testing.assert_allclose(forged("backdoor(kappa=4)", d, bad)[bad], 4 * d[bad])
    np.testing.assert_allclose(forged("alie(z=1.5)", d, bad)[7], mu - 1.5 * sd)
    np.testing.assert_allclose(forged("ipm(eps=0.1)", d, bad)[2], -0.1 * mu)
    noise = forged("gaussian(mean=2, std=0.5)", np.zeros((4, 20_000)), [0, 1])
    assert noise[0].mean() == pytest.approx(2, abs=0.02)
    assert noise[1].std() == pytest.approx(0.5, abs=0.02) and not np.allclose(noise[0], noise[1])


@pytest.mark.parametrize(("n", "f", "z"), [(25, 5, 0.2533), (20, 4, 0.1573), (100, 20, 0.2858)])
def test_the_z_of_alie(n, f, z):
    assert largest_z(n, f) == pytest.approx(z, abs=1e-4)
    assert largest_z(10, 2) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("dev", ["unit", "sign", "std"])
def test_min_max_goes_as_far_as_the_honest_are_apart(dev):
    d = drawn(3)
    honest = d[2:]
    b = forged(f"min_max(dev='{dev}')", d, [0, 1])[0]
    widest = max(np.linalg.norm(a - c) for a in honest for c in honest)
    farthest = max(np.linalg.norm(b - h) for h in honest)
    assert farthest == pytest.approx(widest)
    mu = honest.mean(0)
    away = {"unit": -mu / np.linalg.norm(mu), "sign": -np.sign(mu), "std": -honest.std(0)}[dev]
    assert (b - mu) @ away == pytest.approx(np.linalg.norm(b - mu) * np.linalg.norm(away))


def test_hostile_clients_are_drawn_by_key_and_rounded_down():
    ids = np.arange(3, 30)
    one = draw_hostile(0.2, ids, root(0))
    assert len(one) == 5 and one <= set(ids.tolist()) and one == draw_hostile(0.2, ids, root(0))
    assert one != draw_hostile(0.2, ids, root(1)) and not draw_hostile(0.03, ids, root(0))


def servers(federation):
    return [after for after, _ in federation.rounds_from(*federation.begin())]


@pytest.mark.parametrize("source", FORGERS)
@pytest.mark.parametrize("method", ["scaffold", "median"])
def test_engines_agree_and_the_attack_matters(source, method):
    clean = toy_federation(parse(method, "method"), participation="fraction(rate=1.0)", rounds=2)
    hostility = Hostility(parse(source, "attack"), frozenset({1, 3}))
    loop = replace(clean, hostility=hostility)
    executor = CohortExecutor(loop.trainer, loop.population, loop.key, compiled=False)
    ours = servers(loop)
    for a, b in zip(ours, servers(replace(loop, executor=executor)), strict=True):
        torch.testing.assert_close(a.send, b.send, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(ours[-1].send, servers(clean)[-1].send)


def test_reports_statistics_and_claims_are_forged_too():
    method = parse("scaffold", "method")
    clean = toy_federation(method, participation="fraction(rate=1.0)", rounds=1)
    flip = replace(clean, hostility=Hostility(parse("sign_flip", "attack"), frozenset(range(6))))
    control = servers(flip)[0].state.control
    torch.testing.assert_close(control, -servers(clean)[0].state.control)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    alone = {"participation": "only(clients=(0, 2))", "rounds": 1, "module": module}
    clean = toy_federation(parse("fedavg", "method"), **alone)
    begun = clean.begin()[0].buffers
    flip = replace(clean, hostility=Hostility(parse("sign_flip", "attack"), frozenset(range(6))))
    moved = servers(clean)[0].buffers - begun
    assert bool((moved != 0).any())
    torch.testing.assert_close(servers(flip)[0].buffers - begun, -moved)
    attack = parse("scaled(claims=100)", "attack")
    claimed = attack.claimed(torch.tensor([1.0, 2.0]), torch.tensor([False, True]))
    assert claimed.tolist() == [1, 200]


def test_noise_of_the_hostile_is_new_in_every_round_and_repeats_with_the_seed():
    attack = Hostility(parse("gaussian(mean=0, std=1)", "attack"), frozenset({0}))

    def noise(round, seed=0):
        sent = Sent(torch.zeros(50), torch.zeros(0), (), round)
        replies = replies_of(torch.zeros(2, 50))
        return attack.forged(replies, sent, root(seed)).models[0]

    assert torch.equal(noise(3), noise(3))
    for other in (noise(4), noise(3, seed=1)):
        assert abs(float(torch.corrcoef(torch.stack([noise(3), other]))[0, 1])) < 0.5


def test_a_backdoor_stamps_pixels_and_asks_for_its_class():
    attack = parse("backdoor(target=2, square=2, share=1.0)", "attack")
    images = np.zeros((5, 1, 6, 6), np.uint8)
    labels = np.array([0, 1, 2, 3, 2])
    inputs, wrong = attack.poison(images, labels, 4, np.random.default_rng(0))
    assert (
        (wrong == 2).all() and (inputs[:, 0, 4:, 4:] == 255).all() and inputs.sum() == 5 * 4 * 255
    )
    assert images.sum() == 0
    rows, target = attack.triggered(images, labels)
    assert len(rows) == 3 and target == 2 and rows.sum() == 3 * 4 * 255
    with pytest.raises(ValueError, match="no images"):
        attack.triggered(np.zeros((2, 4)), np.zeros(2))
    with pytest.raises(ValueError, match="there are 2 classes"):
        attack.poison(images, labels, 2, np.random.default_rng(0))


def test_labels_are_flipped():
    labels = np.array([0, 1, 4])
    mirror = parse("label_flip", "attack").poison(labels, labels, 5, np.random.default_rng(0))
    assert mirror[1].tolist() == [4, 3, 0]
    following = parse("label_flip(to='next')", "attack")
    assert following.poison(labels, labels, 5, np.random.default_rng(0))[1].tolist() == [1, 2, 0]
    with pytest.raises(ValueError, match="no classes"):
        following.poison(labels, labels, 0, np.random.default_rng(0))


DIGITS = Experiment(
    model="mlp(widths=(16,))",
    rounds=4,
    data=DataConfig(),
    partition=PartitionConfig(how="iid", clients=10, hostile=0.4),
    local=LocalConfig(lr=0.2, batch=32),
    sim=SimConfig(participation="fraction(rate=0.5)", executor="loop"),
)


@pytest.mark.parametrize("attack", ["backdoor(square=2)", "label_flip", "sign_flip"])
def test_a_run_records_who_was_hostile_and_how_well_it_worked(attack, tmp_path):
    summary = run(replace(DIGITS, attack=attack), tmp_path / "run")
    assert len(summary["hostile"]) == 4
    records = RunFolder(tmp_path / "run").read_rounds()
    counts = [record.notes["hostile"] for record in records]
    assert sum(counts) > 0 and all(count == int(count) <= 4 for count in counts)
    assert all(("attack_success" in r.notes) == attack.startswith("backdoor") for r in records)
    honest = build(replace(DIGITS, attack=attack, partition=replace(DIGITS.partition, hostile=0.0)))
    attacked = build(replace(DIGITS, attack=attack))
    changed = not torch.equal(honest.population.labels, attacked.population.labels)
    assert changed == (attack != "sign_flip")
    assert honest.hostility is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"partition": {"hostile": 1.5}}, "partition.hostile must be in"),
        ({"attack": "alei", "partition": {"hostile": 0.2}}, "attack: .*alie"),
    ],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(ConfigError, match=words):
        Experiment(**settings)

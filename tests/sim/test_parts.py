import numpy as np
import pytest
import torch
from torch import nn

from fedbasin.core.evaluator import Evaluator
from fedbasin.core.expressions import parse
from fedbasin.core.net import Net
from fedbasin.core.rng import root
from fedbasin.core.task import Classification
from fedbasin.methods import Scaffold
from fedbasin.sim import Population
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.participation import draw_cohort, drop_out

EVERYONE = np.arange(40)


def cohorts(source, seeds=1, rounds=50):
    choice = parse(source, "participation")
    return [draw_cohort(choice, EVERYONE, root(s), t) for s in range(seeds) for t in range(rounds)]


def test_cohorts_are_distinct_sorted_and_of_the_right_size():
    for cohort in cohorts("fraction(rate=0.25)") + cohorts("count(clients=10)"):
        assert len(cohort) == len(set(cohort.tolist())) == 10 and (np.diff(cohort) > 0).all()
    assert {len(c) for c in cohorts("fraction(rate=0.001)")} == {1}
    assert {len(c) for c in cohorts("fraction(rate=1)")} == {40}
    assert len(parse("fraction(rate=0.29)")(np.arange(100), np.random.default_rng(0), 0)) == 29


@pytest.mark.parametrize(
    "source",
    ["fraction(rate=0.5)", "reseeded(seed=3, rate=0.5)", "count(2)", "bernoulli(rate=0.5)"],
)
def test_only_clients_that_hold_data_are_drawn_and_all_of_them(source):
    holders = np.array([3, 5, 8, 21])
    choice = parse(source, "participation")
    drawn = [draw_cohort(choice, holders, root(0), round) for round in range(40)]
    assert set(np.concatenate(drawn).tolist()) == set(holders.tolist())


def test_clients_may_be_named():
    for cohort in cohorts("only(clients=(7, 3, 7))", rounds=3):
        assert cohort.tolist() == [3, 7]
    for named in ("()", "(40,)", "(-1,)"):
        with pytest.raises(ValueError, match=r"numbered 0 to 39; .* only\(clients=\(0,\)\)"):
            cohorts(f"only(clients={named})")


def test_everyone_may_be_asked_for():
    assert cohorts("count(clients=40)", rounds=1)[0].tolist() == EVERYONE.tolist()


@pytest.mark.parametrize("source", ["fraction", "bernoulli", "reseeded(seed=3)"])
def test_a_tenth_takes_part_unless_told_otherwise(source):
    written = source.replace(")", ", rate=0.1)") if "(" in source else f"{source}(rate=0.1)"
    for left_out, told in zip(cohorts(source), cohorts(written), strict=True):
        assert left_out.tolist() == told.tolist()


def test_everyone_is_drawn_equally_often():
    counts = np.bincount(np.concatenate(cohorts("count(clients=4)", rounds=3000)), minlength=40)
    assert np.abs(counts / 3000 - 0.1).max() < 0.03


def test_bernoulli_draws_by_chance_and_never_an_empty_cohort():
    sizes = [len(c) for c in cohorts("bernoulli(rate=0.02)", rounds=400)]
    assert min(sizes) >= 1 and max(sizes) > 1
    sizes = [len(c) for c in cohorts("bernoulli(rate=0.5)", rounds=400)]
    assert abs(np.mean(sizes) - 20) < 1 and np.std(sizes) == pytest.approx(np.sqrt(10), rel=0.2)


def test_seeds_and_rounds_give_different_cohorts_and_equal_keys_equal_ones():
    found = cohorts("count(clients=5)", seeds=5)
    assert len({tuple(c) for c in found}) > 0.95 * len(found)
    assert all(
        (a == b).all() for a, b in zip(found, cohorts("count(clients=5)", seeds=5), strict=True)
    )


def test_reseeded_cohorts_are_those_of_code_that_seeds_numpy_every_round():
    """np.random.seed(2023 + t); np.random.choice(range(0, 100), 10, replace=False)"""
    choice = parse("reseeded(seed=2023)", "participation")
    for round, theirs in (
        (0, [0, 12, 20, 44, 46, 56, 66, 68, 82, 91]),
        (1, [14, 17, 19, 24, 26, 35, 58, 70, 77, 95]),
        (399, [2, 16, 18, 29, 36, 43, 50, 64, 85, 96]),
    ):
        for seed in (0, 1):
            ours = draw_cohort(choice, np.arange(100), root(seed), round)
            assert ours.tolist() == theirs


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("fraction(rate=0)", "rate"),
        ("fraction(rate=1.1)", "rate"),
        ("count(clients=0)", "clients"),
        ("count(clients=41)", "only 40"),
        ("bernoulli(rate=-1)", "rate"),
        ("reseeded(seed=1, rate=0)", "rate"),
        ("reseeded(seed=-1)", "seed must be from 0"),
        ("reseeded(seed=2147483648)", "seed must be from 0"),
        ("bernoulli(rate=1e-12)", "empty"),
    ],
)
def test_impossible_participation_is_refused(source, word):
    with pytest.raises(ValueError, match=word):
        draw_cohort(parse(source, "participation"), EVERYONE, root(0), 0)


def test_drop_outs_happen_at_their_rate():
    assert drop_out(EVERYONE, 0.0, root(0)) is EVERYONE
    left = [len(drop_out(EVERYONE, 0.3, root(t))) for t in range(500)]
    assert abs(np.mean(left) - 28) < 0.6


def test_a_population_holds_each_clients_rows():
    inputs = np.arange(20, dtype=np.uint8).reshape(10, 2)
    labels = np.arange(10) % 3
    parts = [np.array([7, 2]), np.array([], dtype=np.int64), np.array([0, 9, 5])]
    population = Population.of(inputs, labels, parts)
    assert len(population) == 3 and population.sizes.tolist() == [2, 0, 3]
    for client, rows in enumerate(parts):
        shard = population.shard(client)
        assert shard.inputs.tolist() == inputs[rows].tolist()
        assert shard.labels.tolist() == labels[rows].tolist()
    expected = [np.bincount(labels[rows], minlength=3).tolist() for rows in parts]
    assert population.class_counts(3).tolist() == expected
    assert population.shard(0).inputs.data_ptr() == population.inputs.data_ptr()


@pytest.mark.parametrize(
    "kind", ["u1", "i1", "u2", "i4", "u4", "u8", "f2", "f4", "f8", ">f4", ">i2", "<i8"]
)
@pytest.mark.parametrize("columns", [(), (2,)])
def test_a_population_holds_numbers_of_any_type(kind, columns):
    inputs = np.arange(30).reshape(10, 3).astype(kind)[:, ::-1]
    inputs.flags.writeable = False
    labels = np.linspace(-1, 1, 10 * max(1, len(columns) * 2), dtype=np.float32)
    labels = labels.reshape(10, *columns)
    parts = [np.array([7, 2]), np.array([], dtype=np.int64), np.array([0, 9, 5])]
    population = Population.of(inputs, labels, parts)
    for client, rows in enumerate(parts):
        shard = population.shard(client)
        assert shard.inputs.tolist() == inputs[rows].tolist()
        assert shard.labels.tolist() == labels[rows].tolist()
    floats = inputs.dtype.kind == "f"
    assert population.inputs.is_floating_point() == floats
    assert population.inputs[torch.tensor([[0, 1]])].shape == (1, 2, 3)  # rows are gathered
    limited = (torch.uint16, torch.uint32, torch.uint64)  # few of torch's operations take these
    assert population.inputs.dtype not in limited
    assert population.class_counts(0).shape == (3, 0)
    assert population.class_counts_of(torch.tensor([2, 0]), 0).shape == (2, 0)
    assert population.weights(np.array([0, 2])).tolist() == [2, 3]


def test_scores_equal_a_plain_loop():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net(nn.Linear(3, 4), dtype=torch.float64)
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.integers(0, 256, (57, 3)).astype(np.uint8))
    labels = torch.from_numpy(rng.integers(0, 3, 57))  # class 3 has no row
    examiner = Evaluator(
        net,
        inputs,
        labels,
        lambda raw, key=None: raw.double() / 255,
        Classification(),
        rows_at_once=10,
    )
    vector, _ = net.initial()
    weight = vector[:12].reshape(4, 3).numpy()
    bias = vector[12:].numpy()
    logits = (inputs.numpy() / 255) @ weight.T + bias
    y = labels.numpy()
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    score = examiner.score(vector, last=True)
    assert score["accuracy"] == pytest.approx((logits.argmax(1) == y).mean())
    assert score["loss"] == pytest.approx(-np.log(shares[np.arange(57), y]).mean())
    for c in range(3):
        assert score["accuracy_per_class"][c] == pytest.approx(
            (logits.argmax(1) == y)[y == c].mean()
        )
    assert np.isnan(score["accuracy_per_class"][3])
    assert examiner.loss(vector).item() == pytest.approx(score["loss"])
    rows = torch.tensor([3, 50])
    np.testing.assert_allclose(examiner.logits(vector, rows).numpy(), logits[[3, 50]])
    assert examiner.size == 57


def test_client_states_start_at_zero_and_come_back():
    vector = torch.arange(3.0)
    zero = tuple(rule.client_state(vector) for rule in Scaffold().rules())
    states = ClientStates(zero, vector)
    assert states.get(5)[0].control.tolist() == [0, 0, 0]
    states.put([5, 2], [(type(states.get(0)[0])(vector + i),) for i in (1, 2)], 0)
    fresh = ClientStates(zero, vector)
    fresh.restore(states.kept())
    assert fresh.get(5)[0].control.tolist() == [1, 2, 3] and fresh.get(2)[0].control.tolist() == [
        2,
        3,
        4,
    ]
    assert fresh.get(0)[0].control.tolist() == [0, 0, 0]
    stateless = ClientStates((), vector)
    stateless.put([1], [()], 0)
    assert stateless.kept().ids.tolist() == []

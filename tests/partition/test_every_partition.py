"""Laws that every partition of the catalogue obeys, and the bounds on its work."""

import numpy as np
import pytest
from counting import calls_in
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbasin.core.catalogue import CATALOGUE, cards
from fedbasin.core.expressions import parse
from fedbasin.partition import Pool, dirichlet, iid, natural

# Expression, whether every row finds a client. Groups are two coarse classes of three each.
CASES = {
    "iid": ("iid", True),
    "shards": ("shards(per_client=3)", False),
    "quantity_skew": ("quantity_skew(labels=2)", False),
    "dirichlet": ("dirichlet(alpha=0.3, minimum=5)", True),
    "class_dirichlet": ("class_dirichlet(alpha=0.3)", True),
    "hybrid_dirichlet": ("hybrid_dirichlet(alpha1=5, alpha2=0.1)", True),
    "client_dirichlet": ("client_dirichlet(alpha=0.3)", False),
    "pachinko": ("pachinko(alpha=0.5)", False),
    "natural": ("natural(merge=True)", True),
    "size_dirichlet": ("size_dirichlet(alpha=0.5, minimum=5)", True),
    "quantiles": ("quantiles(dirichlet(alpha=0.3, minimum=5), bins=4)", True),
    "domain_skew": ("domain_skew(alpha=0.5, minimum=2)", True),
    "categorical_dirichlet": ("categorical_dirichlet(alpha=0.3)", True),
    "grouped_dirichlet": ("grouped_dirichlet(alpha=0.3, group=3)", True),
    "fedlab_dirichlet": ("fedlab_dirichlet(alpha=0.3, minimum=5, seed=SEED)", True),
    "fedlab_shards": ("fedlab_shards(per_client=3, seed=SEED)", False),
}
VARIANTS = {
    "dirichlet without balance": ("dirichlet(alpha=0.05, minimum=5, balance=False)", True),
    "client_dirichlet 0": ("client_dirichlet(alpha=0)", False),
    "hybrid equal": ("hybrid_dirichlet(alpha1=5, alpha2=0.1, equal=True)", False),
    "grouped as drawn": ("grouped_dirichlet(alpha=0.3, group=3, equal=False)", True),
    "domain quantity": ("domain_skew(labels=2)", False),
    "domain iid": ("domain_skew", True),
    "natural drawn": ("natural(minimum=2)", False),
    "quantiles in shards": ("quantiles(shards(per_client=3))", False),
    "quantiles of sizes": ("quantiles(size_dirichlet(alpha=0.5, minimum=0))", True),
}
# The others refuse targets without classes.
WITHOUT_CLASSES = {
    *("iid", "natural", "natural drawn", "size_dirichlet", "domain iid"),
    *("quantiles", "quantiles in shards", "quantiles of sizes"),
}
ALL = {**CASES, **VARIANTS}


def made(name, seed=0):
    """Return a partition; those of FedLab have a seed of their own."""
    return parse(ALL[name][0].replace("SEED", str(seed)), kind="partition")


def pool_of(rows, seed):
    labels = np.random.default_rng(seed).integers(0, 6, rows)
    labels[:6] = np.arange(6)
    return Pool(labels, 6, labels // 3)


def split_of(name, pool, clients, seed):
    if name.startswith("natural"):  # its groups are people, many more than coarse classes
        pool = Pool(pool.labels, pool.classes, np.arange(pool.rows) * 7 % (3 * clients))
    return made(name, seed)(pool, clients, np.random.default_rng(seed))


def test_no_partition_is_left_out():
    assert set(CASES) == {card.name for card in cards("partition")}


@pytest.mark.parametrize("name", CASES)
def test_card_has_a_summary_and_a_source(name):
    card = CATALOGUE[name]
    assert len(card.summary) > 20
    no_papers = name in ("iid", "quantiles")
    assert no_papers or (card.paper and card.url.startswith("https://arxiv.org/abs/"))


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=12, deadline=None)
@given(rows=st.integers(120, 300), half=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_rows_are_held_once_and_class_totals_add_up(name, rows, half, seed):
    pool, clients = pool_of(rows, seed), 2 * half
    before = pool.labels.copy()
    split = split_of(name, pool, clients, seed)
    held = np.concatenate(split.clients)
    assert len(split.clients) == clients and split.rows == rows
    assert len(set(held.tolist())) == len(held)
    assert all(c.dtype == np.int64 and (np.diff(c) > 0).all() for c in split.clients)
    totals = split.counts(pool.labels, 6).sum(axis=0)
    assert (totals <= pool.class_sizes).all() and totals.sum() == len(held)
    if ALL[name][1]:
        assert sorted(held.tolist()) == list(range(rows))
    assert np.array_equal(pool.labels, before)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("columns", [(), (2,)], ids=["one target", "two"])
@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(120, 300),
    half=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    kind=st.sampled_from([np.float32, np.int64]),
)
def test_targets_without_classes_are_shared_out_or_refused_by_name(
    name, columns, rows, half, seed, kind
):
    clients = 2 * half
    targets = (np.random.default_rng(seed).normal(size=(rows, *columns)) * 100).astype(kind)
    people = 3 * clients if name.startswith("natural") else 2
    pool = Pool(targets, groups=np.arange(rows) * 7 % people)
    if name not in WITHOUT_CLASSES:
        asked = {"domain_skew": "dirichlet", "domain quantity": "quantity_skew"}
        called = asked.get(name, ALL[name][0].partition("(")[0])
        told = rf"^{called} needs classes, and the targets have none: write quantiles\({called}"
        with pytest.raises(ValueError, match=told):
            made(name, seed)(pool, clients, np.random.default_rng(seed))
        return
    split = made(name, seed)(pool, clients, np.random.default_rng(seed))
    held = np.concatenate(split.clients)
    assert len(split.clients) == clients and len(set(held.tolist())) == len(held)
    assert split.counts(pool.labels, 0).shape == (clients, 0)
    if ALL[name][1]:
        assert sorted(held.tolist()) == list(range(rows))


@pytest.mark.parametrize("name", ALL)
def test_same_seed_same_split_and_other_seeds_other_splits(name):
    pool = pool_of(300, 0)
    first, again, other = (split_of(name, pool, 6, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.order, again.order)
    assert np.array_equal(first.offsets, again.offsets)
    different = not np.array_equal(first.order, other.order)
    assert different or not np.array_equal(first.offsets, other.offsets)


@pytest.mark.parametrize("name", [n for n in ALL if not n.startswith("hybrid")])
def test_one_client_may_hold_everything(name):
    labels = np.arange(30) % 3
    groups = np.arange(30) // 2 if name.startswith("natural") else np.zeros(30, np.int64)
    split = made(name)(Pool(labels, 3, groups), 1, np.random.default_rng(0))
    assert len(split.clients) == 1 and len(split.order) >= 1


@pytest.mark.parametrize("name", ALL)
def test_classes_without_rows_do_no_harm(name):
    labels = np.repeat([1, 4], 150)
    pool = Pool(labels, 9, labels // 3)
    split = split_of(name, pool, 4, 0)
    assert split.counts(labels, 9)[:, [0, 2, 3, 5, 6, 7, 8]].sum() == 0
    assert len(split.order) >= 60


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("clients", [0, -3, 2.5, True])
def test_clients_must_be_a_positive_whole_number(name, clients):
    labels = np.arange(40) % 4
    with pytest.raises(ValueError, match=rf"clients is {clients}: give a whole number, at least"):
        made(name)(Pool(labels, 4, labels), clients, np.random.default_rng(0))


@pytest.mark.parametrize(
    "expression",
    [
        "dirichlet(alpha=%s)",
        "class_dirichlet(alpha=%s)",
        "hybrid_dirichlet(alpha1=%s, alpha2=1)",
        "hybrid_dirichlet(alpha1=1, alpha2=%s)",
        "categorical_dirichlet(alpha=%s)",
        "grouped_dirichlet(alpha=%s)",
        "pachinko(alpha=%s)",
        "pachinko(beta=%s)",
        "client_dirichlet(alpha=%s)",
        "size_dirichlet(alpha=%s)",
        "quantiles(dirichlet(alpha=%s))",
        "domain_skew(alpha=%s)",
    ],
)
@pytest.mark.parametrize("value", ["0", "-1", "1e999", "1e308"])
def test_concentrations_must_be_positive_and_finite(expression, value):
    if expression.startswith("client") and value == "0":
        pytest.skip("0 means one class a client")
    labels = np.arange(80) % 4
    with pytest.raises(ValueError, match=r"(alpha[12]?|beta) is .*: give a finite number"):
        parse(expression % value)(Pool(labels, 4, labels // 2), 4, np.random.default_rng(0))


class Bounded(np.random.Generator):
    """Counts draws of Dirichlet shares, and raises where they go on for too long."""

    def __init__(self, most):
        super().__init__(np.random.PCG64(0))
        self.most = most
        self.drawn = 0

    def dirichlet(self, *arguments, **settings):
        self.drawn += 1
        assert self.drawn <= self.most, "draws without an end"
        return super().dirichlet(*arguments, **settings)


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("minimum", [10, 60, 100])
def test_the_known_trap_ends_after_fifty_tries(balance, minimum):
    """No draw gives 500 clients their 60 rows each: fifty are made of each of 100 classes."""
    pool = Pool(np.repeat(np.arange(100), 500), 100)  # CIFAR-100
    rng = Bounded(50 * 100)
    split = dirichlet(pool, 500, rng, alpha=0.05, minimum=minimum, balance=balance)
    assert (rng.drawn == 50 * 100) == (minimum > 10)
    assert split.sizes().min() >= minimum and split.sizes().sum() == 50_000


def test_fashion_mnist_takes_no_call_for_a_row():
    pool = Pool(np.repeat(np.arange(10), 6000), 10)
    rng = Bounded(50 * 10)
    made = []
    calls = calls_in(lambda: made.append(dirichlet(pool, 100, rng, alpha=0.1)))
    assert calls < 20_000  # rows are 60,000
    assert made[0].sizes().min() >= 10


@pytest.mark.parametrize("split", [iid, natural])
def test_a_hundred_thousand_clients_take_few_calls_each(split):
    """A search through all rows for each client would be calls of its own, and take minutes."""
    rng = np.random.default_rng(0)
    pool = Pool(rng.integers(0, 10, 1_000_000), 10, rng.permutation(1_000_000) % 100_000)
    made = []
    calls = calls_in(lambda: made.append(split(pool, 100_000, rng)))
    assert calls < 5 * 100_000
    assert made[0].sizes().tolist() == [10] * 100_000


def test_more_clients_than_rows():
    rng = np.random.default_rng(0)
    small = Pool(rng.integers(0, 10, 60_000), 10)
    assert np.bincount(iid(small, 100_000, rng).sizes()).tolist() == [40_000, 60_000]

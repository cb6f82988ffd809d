"""Splits that need no classes: by sizes, and by quantiles of the target."""

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbasin.core.expressions import ExpressionError, parse, text
from fedbasin.partition import Pool, dirichlet, quantiles, shards, size_dirichlet

targets = st.lists(
    st.one_of(st.integers(-3, 3), st.floats(-10, 10, width=32)), min_size=2, max_size=60
)


def seen_by(inner):
    """Return an expression's partition and what it is handed."""
    seen = []

    class Spy(type(parse("iid"))):
        def __call__(self, pool, clients, rng):
            seen.append(pool)
            return super().__call__(pool, clients, rng)

    choice = parse(inner)
    return Spy(choice.name, choice.arguments), seen


@settings(max_examples=80, deadline=None)
@given(values=targets, bins=st.integers(2, 12), seed=st.integers(0, 99))
def test_bins_are_ordered_hold_equal_targets_together_and_are_as_even_as_ties_let_them(
    values, bins, seed
):
    values = np.array(values, np.float32)
    spy, seen = seen_by("iid")
    quantiles(Pool(values), 2, np.random.default_rng(seed), split=spy, bins=bins)
    (pool,) = seen
    assert pool.classes == bins
    for value, mine in zip(values, pool.labels, strict=True):
        assert mine == int(bins * (values < value).sum() // len(values))  # the definition
    order = np.argsort(values, kind="stable")
    assert (np.diff(pool.labels[order]) >= 0).all()
    if len(set(values.tolist())) == len(values):
        sizes = np.bincount(pool.labels, minlength=bins)
        assert sizes.max() - sizes.min() <= 1


def test_bins_are_pandas_quantiles_where_all_targets_differ():
    values = np.random.default_rng(0).permutation(1000).astype(np.float32)
    spy, seen = seen_by("iid")
    quantiles(Pool(values), 2, np.random.default_rng(0), split=spy, bins=8)
    wanted = pandas.qcut(values, 8, labels=False)
    assert (seen[0].labels == wanted).mean() > 0.99  # on an edge they go to either side


def test_it_is_the_inner_split_of_the_bins():
    values = np.random.default_rng(1).normal(size=400)
    rank = np.argsort(np.argsort(values))
    ours = parse("quantiles(dirichlet(alpha=0.2), bins=5)")(
        Pool(values), 6, np.random.default_rng(3)
    )
    theirs = dirichlet(Pool(rank // 80, 5), 6, np.random.default_rng(3), alpha=0.2)
    assert np.array_equal(ours.order, theirs.order) and ours.sizes().tolist() == (
        theirs.sizes().tolist()
    )


def test_shards_of_quantiles_are_stretches_of_the_target():
    values = np.random.default_rng(1).normal(size=1000)
    split = quantiles(
        Pool(values), 10, np.random.default_rng(0), split=parse("shards(per_client=1)"), bins=10
    )
    for mine in split.clients:
        low, high = values[mine].min(), values[mine].max()
        assert ((values >= low) & (values <= high)).sum() == len(mine) == 100
    even = shards(Pool(np.zeros(1000, int), 1), 10, np.random.default_rng(0), per_client=1)
    assert np.ptp([values[mine].mean() for mine in even.clients]) < 0.5
    assert np.ptp([values[mine].mean() for mine in split.clients]) > 3


def test_less_concentration_means_clients_with_targets_of_their_own():
    values = np.random.default_rng(1).normal(size=3000)

    def spread(alpha):
        how = parse(f"quantiles(dirichlet(alpha={alpha}, minimum=1))")
        split = how(Pool(values), 10, np.random.default_rng(0))
        return np.std([values[mine].mean() for mine in split.clients])

    assert spread(0.1) > 2 * spread(5) > 4 * spread(1000)


def test_the_column_that_decides_can_be_chosen():
    time = np.arange(100, dtype=np.float32)
    event = (np.arange(100) % 2).astype(np.float32)
    pool = Pool(np.stack([time, event], axis=1))
    rng = np.random.default_rng(0)
    by_event = parse("quantiles(client_dirichlet(alpha=0), bins=2, column=1)")(pool, 2, rng)
    assert [set(event[mine].tolist()) for mine in by_event.clients] in ([{0}, {1}], [{1}, {0}])
    by_time = parse("quantiles(client_dirichlet(alpha=0), bins=2)")(pool, 2, rng)
    assert sorted(time[mine].mean() for mine in by_time.clients) == [24.5, 74.5]


def test_groups_go_along():
    values = np.arange(80, dtype=np.float32)
    groups = np.arange(80) % 2
    how = parse("quantiles(domain_skew(alpha=0.3, minimum=2), bins=4)")
    split = how(Pool(values, groups=groups), 4, np.random.default_rng(0))
    assert [set(groups[mine].tolist()) for mine in split.clients] == [{0}, {0}, {1}, {1}]


def test_the_expression_reads_back():
    source = "quantiles(dirichlet(alpha=0.1), bins=5, column=1)"
    assert text(parse(source, "partition")) == source
    assert text(parse("quantiles(split=iid, bins=10)")) == "quantiles(iid)"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("quantiles(iid, bins=1)", "bins is 1: give a whole number, at least 2"),
        ("quantiles(iid, column=1)", "column is 1: the targets have 1 columns, numbered from 0"),
        ("quantiles(iid, column=-1)", "column is -1: give a whole number, at least 0"),
        ("quantiles(cosine)", "split is cosine, a schedule: give a partition"),
    ],
)
def test_mistakes_are_named(expression, message):
    import fedbasin.local  # noqa: F401  (enters schedules)

    with pytest.raises(ValueError, match=message):
        parse(expression)(Pool(np.arange(9.0)), 2, np.random.default_rng(0))


def test_the_inner_split_must_be_given():
    with pytest.raises(ExpressionError, match=r"quantiles needs 'split'"):
        parse("quantiles(bins=4)")
    with pytest.raises(ExpressionError, match=r"argument 'split' is 0.1"):
        parse("quantiles(0.1)")


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(40, 200),
    clients=st.integers(1, 10),
    alpha=st.sampled_from([0.05, 0.5, 5.0, 1000.0]),
    minimum=st.integers(0, 4),
    seed=st.integers(0, 999),
)
def test_sizes_are_dirichlet_shares_of_shuffled_rows(rows, clients, alpha, minimum, seed):
    values = np.arange(rows, dtype=np.float32)
    rng = np.random.default_rng(seed)
    split = size_dirichlet(Pool(values), clients, rng, alpha=alpha, minimum=minimum)
    assert split.sizes().sum() == rows and split.sizes().min() >= minimum
    if minimum == 0:  # the first draw is taken
        shares = np.random.default_rng(seed).dirichlet(np.full(clients, alpha))
        ends = np.floor(np.cumsum(shares) * rows).astype(int)
        ends[-1] = rows
        assert split.sizes().tolist() == np.diff(ends, prepend=0).tolist()


def test_sizes_alone_are_skewed():
    values = np.arange(20_000, dtype=np.float32)
    split = size_dirichlet(Pool(values), 10, np.random.default_rng(0), alpha=0.5)
    means = np.array([values[mine].mean() for mine in split.clients])
    error = values.std() / np.sqrt(split.sizes())
    assert (np.abs(means - values.mean()) < 4 * error).all()
    assert split.sizes().max() > 4 * split.sizes().min()

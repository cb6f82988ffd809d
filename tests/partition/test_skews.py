"""Each partition against what its paper says: moments, oracles, sizes."""

import numpy as np
import pytest

from fedbasin.partition import (
    Pool,
    categorical_dirichlet,
    class_dirichlet,
    client_dirichlet,
    dirichlet,
    domain_skew,
    grouped_dirichlet,
    hybrid_dirichlet,
    iid,
    natural,
    pachinko,
    quantity_skew,
    shards,
)
from fedbasin.partition.by_class import _draw
from fedbasin.partition.by_client import client_counts
from fedbasin.partition.deal import fill_up, missing
from fedbasin.partition.measures import classes_held, distance_from_global, effective_classes

CIFAR10 = Pool(np.repeat(np.arange(10), 5000), 10)
MANY = Pool(np.repeat(np.arange(300), 400), 300)  # every class is one draw of the shares


def seeded(seed=0):
    return np.random.default_rng(seed)


def shares_of(split):
    """Shares of every class over the clients, [draws, N]."""
    return split.counts(MANY.labels, 300).T / 400


def assert_dirichlet_moments(shares, concentration, extra=0.0):
    """Mean a/A and variance a(A-a)/(A^2(A+1)) of Dir(a), with `extra` added for a second draw."""
    total = sum(concentration)
    mean = np.array(concentration) / total
    variance = mean * (1 - mean) / (total + 1) + extra
    assert np.abs(shares.mean(axis=0) - mean).max() < 5 * np.sqrt(variance.max() / len(shares))
    spread = (shares - mean) ** 2
    error = spread.std(axis=0) / np.sqrt(len(shares))
    assert (np.abs(spread.mean(axis=0) - variance) < 5 * error).all()


@pytest.mark.parametrize("alpha", [0.2, 2.0])
@pytest.mark.parametrize(
    "how",
    [class_dirichlet, lambda *a, alpha: dirichlet(*a, alpha=alpha, minimum=0, balance=False)],
    ids=["class_dirichlet", "dirichlet"],
)
def test_shares_of_a_class_are_dirichlet(how, alpha):
    shares = np.concatenate([shares_of(how(MANY, 5, seeded(s), alpha=alpha)) for s in range(8)])
    assert_dirichlet_moments(shares, [alpha] * 5)


def test_categorical_shares_are_dirichlet_multinomial():
    pool = Pool(np.repeat(np.arange(300), 20), 300)
    splits = [categorical_dirichlet(pool, 4, seeded(s), alpha=0.5) for s in range(10)]
    shares = np.concatenate([s.counts(pool.labels, 300).T / 20 for s in splits])
    p, total = 1 / 4, 4 * 0.5
    extra = p * (1 - p) * (total / (total + 1)) / 20  # E[q (1 - q)] / n
    assert_dirichlet_moments(shares, [0.5] * 4, extra)


def test_client_priors_are_dirichlet_over_classes():
    stock = np.full(5, 10**6)
    shares = client_counts(stock, 3000, 40, seeded(), alpha=0.4) / 40
    p, total = 1 / 5, 5 * 0.4
    assert_dirichlet_moments(shares, [0.4] * 5, p * (1 - p) * (total / (total + 1)) / 40)


def test_hybrid_keeps_the_first_half_and_splits_the_rest_anew():
    draws = [hybrid_dirichlet(MANY, 6, seeded(s), alpha1=3.0, alpha2=0.2) for s in range(8)]
    shares = np.concatenate([shares_of(d) for d in draws])
    first = np.column_stack([shares[:, :3], shares[:, 3:].sum(axis=1)])
    assert_dirichlet_moments(first, [3.0, 3.0, 3.0, 9.0])
    rest = shares[:, 3:] / shares[:, 3:].sum(axis=1, keepdims=True)
    assert_dirichlet_moments(rest, [0.2] * 3)


def test_hybrid_of_figure_5_and_of_the_three_client_toy():
    split = hybrid_dirichlet(CIFAR10, 20, seeded(), alpha1=10, alpha2=0.1)
    gap = distance_from_global(split.counts(CIFAR10.labels, 10))
    assert gap[:10].max() < 0.3 < 0.45 < gap[10:].mean()
    toy = hybrid_dirichlet(CIFAR10, 3, seeded(), alpha1=100, alpha2=0.1, equal=True)
    assert toy.sizes().tolist() == [16666] * 3
    effective = effective_classes(toy.counts(CIFAR10.labels, 10))
    assert effective[0] > 9 and effective[1:].max() < 9


def hetero_dir_by_the_book(class_sizes, clients, alpha, rng):
    """FedLab's rule: zero the shares of clients with n/N rows, renormalise, cut at the floors."""
    sizes, total = np.zeros(clients), class_sizes.sum()
    counts = np.zeros((clients, len(class_sizes)))
    for label, size in enumerate(class_sizes):
        q = rng.dirichlet(np.repeat(alpha, clients))
        q = np.array(
            [share * (have < total / clients) for share, have in zip(q, sizes, strict=True)]
        )
        cuts = [0, *(np.cumsum(q / q.sum()) * size).astype(int)[:-1], size]
        counts[:, label] = np.diff(cuts)
        sizes = counts.sum(axis=1)
    return counts


def test_balanced_dirichlet_has_the_law_of_hetero_dir():
    pool = Pool(np.repeat(np.arange(6), [60, 100, 200, 80, 40, 120]), 6)

    def statistics(counts):
        sizes = np.sort(counts.sum(axis=1))
        return [*sizes, *((counts > 0).sum(axis=0)), *(counts.max(axis=0))]

    rng = seeded(5)
    book = [statistics(hetero_dir_by_the_book(pool.class_sizes, 5, 0.4, rng)) for _ in range(800)]
    ours = [
        statistics(dirichlet(pool, 5, rng, alpha=0.4, minimum=0).counts(pool.labels, 6))
        for _ in range(800)
    ]
    book, ours = np.array(book), np.array(ours)
    error = np.sqrt((book.var(axis=0) + ours.var(axis=0)) / 800)
    assert (np.abs(book.mean(axis=0) - ours.mean(axis=0)) < 4.5 * error).all()


def test_balancing_evens_the_sizes():
    def spread(balance):
        splits = [
            dirichlet(CIFAR10, 20, seeded(s), alpha=0.5, minimum=0, balance=balance)
            for s in range(5)
        ]
        return np.mean([s.sizes().std() for s in splits])

    assert spread(True) < 0.8 * spread(False)


def test_minimum_is_met_where_drawing_again_cannot_meet_it():
    split = dirichlet(CIFAR10, 100, seeded(), alpha=0.01, minimum=200)
    assert split.sizes().min() >= 200 and split.sizes().sum() == 50_000
    assert np.median(classes_held(split.counts(CIFAR10.labels, 10))) <= 2  # the skew survives


def test_a_draw_that_meets_the_minimum_is_left_alone():
    free = dirichlet(CIFAR10, 10, seeded(3), alpha=5.0, minimum=0)
    assert free.sizes().min() > 500
    assert np.array_equal(free.order, dirichlet(CIFAR10, 10, seeded(3), alpha=5.0).order)


@pytest.mark.parametrize(("minimum", "met"), [(6, True), (11, False)])
def test_of_fifty_draws_the_first_that_meets_the_minimum_counts_or_the_nearest(minimum, met):
    pool, rng = Pool(np.repeat(np.arange(4), 40), 4), seeded(1)
    draws = [_draw(pool.class_sizes, 10, rng, 0.8, False) for _ in range(50)]
    lacking = [missing(draw, minimum) for draw in draws]
    chosen = int(np.argmin(lacking))
    assert 0 < chosen < 49 and (lacking[chosen] == 0) == met
    split = dirichlet(pool, 10, seeded(1), alpha=0.8, minimum=minimum, balance=False)
    expected = fill_up(draws[chosen], minimum)
    assert split.counts(pool.labels, 4).tolist() == expected.tolist()


def test_a_client_with_exactly_its_share_is_passed_over():
    pool = Pool(np.arange(5), 5)
    for seed in range(5):
        split = dirichlet(pool, 5, seeded(seed), alpha=0.5, minimum=0)
        assert split.sizes().tolist() == [1] * 5


@pytest.mark.parametrize("alpha", [1e-300, 1e-6, 1e6, 1e100])
def test_extreme_concentrations_are_drawn_without_a_hitch(alpha):
    for how in (dirichlet, class_dirichlet, client_dirichlet, categorical_dirichlet):
        split = how(CIFAR10, 20, seeded(), alpha=alpha)
        held = classes_held(split.counts(CIFAR10.labels, 10))
        assert split.sizes().sum() == 50_000 and (
            held.max() <= 10 if alpha < 1 else held.min() == 10
        )


def test_an_impossible_minimum_is_refused():
    with pytest.raises(
        ValueError,
        match=r"minimum is 10: 6000 clients would need 60000 rows.*"
        r"are 50000; use minimum=8 or at most 5000 clients",
    ):
        dirichlet(CIFAR10, 6000, seeded(), alpha=0.1)
    with pytest.raises(ValueError, match="minimum is -1"):
        dirichlet(CIFAR10, 10, seeded(), alpha=0.1, minimum=-1)


def test_class_dirichlet_rounds_and_leaves_the_rest_to_the_last_client():
    pool = Pool(np.zeros(1000, np.int64), 1)
    sizes = class_dirichlet(pool, 7, seeded(4), alpha=0.5).sizes()
    q = seeded(4).dirichlet(np.full(7, 0.5))
    rounded = [round(x * 1000) for x in q[:-1]]
    assert sizes.tolist() == [*rounded, 1000 - sum(rounded)]


def test_class_dirichlet_may_leave_clients_empty_and_categorical_may_not():
    pool = Pool(np.repeat(np.arange(3), 40), 3)
    plain = [class_dirichlet(pool, 30, seeded(s), alpha=0.05).sizes().min() for s in range(5)]
    assert min(plain) == 0
    for s in range(5):
        assert categorical_dirichlet(pool, 30, seeded(s), alpha=0.05).sizes().min() == 1
    with pytest.raises(ValueError, match="121 clients would need 121 rows"):
        categorical_dirichlet(pool, 121, seeded(), alpha=1.0)


def test_iid_sizes_and_mix():
    split = iid(CIFAR10, 30, seeded())
    assert sorted(set(split.sizes().tolist())) == [1666, 1667]
    assert distance_from_global(split.counts(CIFAR10.labels, 10)).max() < 0.06


def test_shards_of_cifar10():
    split = shards(CIFAR10, 100, seeded(), per_client=2)
    counts = split.counts(CIFAR10.labels, 10)
    assert split.sizes().tolist() == [500] * 100
    assert set(counts.ravel().tolist()) == {0, 250, 500}  # 500: two shards of one class
    assert classes_held(counts).max() == 2
    one_class = Pool(np.zeros(40, np.int64), 1)  # its rows are shuffled before the cut
    assert np.diff(shards(one_class, 2, seeded(), per_client=1).clients[0]).max() > 1


def test_shards_drop_the_odd_rows_of_the_last_class():
    pool = Pool(np.array([0] * 7 + [1] * 9), 2)
    split = shards(pool, 3, seeded(), per_client=1)
    assert split.sizes().tolist() == [5, 5, 5]
    assert split.counts(pool.labels, 2).sum(axis=0).tolist() == [7, 8]
    with pytest.raises(ValueError, match="per_client is 4: 5 clients would need 20 shards of 16"):
        shards(pool, 5, seeded(), per_client=4)
    with pytest.raises(ValueError, match="per_client is 0"):
        shards(pool, 5, seeded(), per_client=0)


def test_there_may_be_as_many_shards_as_rows():
    pool = Pool(np.arange(12) % 3, 3)
    assert shards(pool, 6, seeded(), per_client=2).sizes().tolist() == [2] * 6


@pytest.mark.parametrize(
    ("how", "given", "default"),
    [
        (shards, {}, {"per_client": 2}),
        (quantity_skew, {}, {"labels": 2}),
        (grouped_dirichlet, {"alpha": 0.3}, {"group": 10}),
        (domain_skew, {"alpha": 0.01}, {"minimum": 10}),
    ],
)
def test_what_is_left_out_is_as_in_the_papers(how, given, default):
    pool = Pool(np.arange(600) % 6, 6, np.arange(600) % 2)
    left_out, written = (
        how(pool, 20, seeded(), **given),
        how(pool, 20, seeded(), **given, **default),
    )
    assert [c.tolist() for c in left_out.clients] == [c.tolist() for c in written.clients]


def test_quantity_skew_owners_share_evenly():
    split = quantity_skew(CIFAR10, 23, seeded(), labels=3)
    counts = split.counts(CIFAR10.labels, 10)
    assert (classes_held(counts) == 3).all()
    assert all(counts[i, i % 10] > 0 for i in range(23))
    for held in counts.T:
        owned = held[held > 0]
        assert owned.max() - owned.min() <= 1 and owned.sum() == 5000


def test_quantity_skew_draws_the_other_classes_evenly():
    pool = Pool(np.repeat(np.arange(4), 3000), 4)
    counts = quantity_skew(pool, 3000, seeded(), labels=2).counts(pool.labels, 4)
    zero = counts[::4]  # clients whose own class is 0
    assert (zero[:, 0] > 0).all()
    assert (zero > 0).mean(axis=0)[1:] == pytest.approx([1 / 3] * 3, abs=0.08)


def test_quantity_skew_drops_classes_without_an_owner_and_refuses_too_many():
    split = quantity_skew(CIFAR10, 2, seeded(), labels=1)
    assert split.counts(CIFAR10.labels, 10).sum(axis=0).tolist() == [5000, 5000, *[0] * 8]
    with pytest.raises(ValueError, match="labels is 11: the data has 10 classes"):
        quantity_skew(CIFAR10, 5, seeded(), labels=11)
    with pytest.raises(ValueError, match="labels is 0"):
        quantity_skew(CIFAR10, 5, seeded(), labels=0)


def test_client_dirichlet_gives_equal_sizes_and_no_refill():
    tail = Pool(np.repeat(np.arange(5), [4000, 1000, 250, 60, 15]), 5)
    split = client_dirichlet(tail, 40, seeded(), alpha=0.1)
    assert split.sizes().tolist() == [5325 // 40] * 40
    assert (split.counts(tail.labels, 5).sum(axis=0) <= tail.class_sizes).all()


def test_client_dirichlet_skew_falls_with_alpha():
    gaps = [
        distance_from_global(
            client_dirichlet(CIFAR10, 100, seeded(), alpha=a).counts(CIFAR10.labels, 10)
        ).mean()
        for a in (0.05, 0.5, 5.0, 1000.0)
    ]
    assert gaps == sorted(gaps, reverse=True) and gaps[0] > 0.6 and gaps[-1] < 0.06


def test_alpha_zero_is_one_class_a_client():
    split = client_dirichlet(CIFAR10, 100, seeded(), alpha=0)
    counts = split.counts(CIFAR10.labels, 10)
    assert (classes_held(counts) == 1).all() and split.sizes().tolist() == [500] * 100
    assert ((counts > 0).sum(axis=0) == 10).all()
    uneven = Pool(np.repeat(np.arange(3), [70, 21, 9]), 3)
    counts = client_dirichlet(uneven, 10, seeded(), alpha=0).counts(uneven.labels, 3)
    assert (counts > 0).sum(axis=0).tolist() == [7, 2, 1]
    assert counts.sum(axis=0).tolist() == [70, 20, 9] and counts.max() == 10


def test_whoever_holds_the_one_class_is_drawn():
    held = [
        client_dirichlet(CIFAR10, 20, seeded(s), alpha=0).counts(CIFAR10.labels, 10).argmax(axis=1)
        for s in range(300)
    ]
    assert np.abs(np.mean(held, axis=0) - 4.5).max() < 5 * np.sqrt(8.25 / 300)


def test_client_dirichlet_refuses_more_clients_than_rows():
    with pytest.raises(ValueError, match=r"clients is 50001.*at most 50000 clients"):
        client_dirichlet(CIFAR10, 50_001, seeded(), alpha=1.0)


def test_grouped_dirichlet_sizes():
    split = grouped_dirichlet(CIFAR10, 33, seeded(), alpha=0.1)
    assert split.sizes().max() - split.sizes().min() <= 1
    drawn = grouped_dirichlet(CIFAR10, 25, seeded(), alpha=0.1, equal=False)
    by_group = np.add.reduceat(drawn.sizes(), [0, 10, 20])
    assert by_group.tolist() == [20_000, 20_000, 10_000]
    assert drawn.sizes().min() >= 1000  # half the mean of 2000
    assert distance_from_global(split.counts(CIFAR10.labels, 10)).mean() > 0.4


def test_grouped_dirichlet_recuts_lists_sorted_by_class():
    """One group, so the equal pieces are stretches of the drawn clients, class after class."""
    equal = grouped_dirichlet(CIFAR10, 10, seeded(2), alpha=0.3)
    drawn = grouped_dirichlet(CIFAR10, 10, seeded(2), alpha=0.3, equal=False)
    table = drawn.counts(CIFAR10.labels, 10)
    line = np.concatenate([np.repeat(np.arange(10), row) for row in table])
    expected = np.stack([np.bincount(piece, minlength=10) for piece in np.split(line, 10)])
    assert equal.counts(CIFAR10.labels, 10).tolist() == expected.tolist()


def test_grouped_dirichlet_shuffles_the_rows_before_it_shares_them_among_groups():
    split = grouped_dirichlet(CIFAR10, 20, seeded(), alpha=0.1, equal=False)
    first = split.counts(CIFAR10.labels, 10)[:10].sum(axis=0)
    assert np.abs(first - 2500).max() < 5 * np.sqrt(5000 / 4)


@pytest.mark.parametrize(
    "how", [dirichlet, lambda *a, **k: grouped_dirichlet(*a, **k, group=5, equal=False)]
)
def test_whoever_has_its_share_takes_no_further_class(how):
    pool = Pool(np.repeat(np.arange(100), 10), 100)
    for seed in range(5):
        assert how(pool, 5, seeded(seed), alpha=0.1).sizes().max() < 200 + 10


def pachinko_by_the_book(coarse_of, class_sizes, clients, quota, alpha, beta, rng):
    """One client after another, one row at a time: coarse, then fine, then put nothing back."""
    left, kinds = class_sizes.copy(), len(class_sizes)
    counts = np.zeros((clients, kinds))
    for client in range(clients):
        theta = rng.dirichlet(np.full(coarse_of.max() + 1, alpha))
        phi = [rng.dirichlet(np.full((coarse_of == g).sum(), beta)) for g in range(len(theta))]
        for _ in range(quota):
            able = theta * [left[coarse_of == g].sum() > 0 for g in range(len(theta))]
            g = rng.choice(len(theta), p=able / able.sum())
            fine = np.flatnonzero(coarse_of == g)
            able = phi[g] * (left[fine] > 0)
            kind = fine[rng.choice(len(fine), p=able / able.sum())]
            left[kind] -= 1
            counts[client, kind] += 1
    return counts


def test_pachinko_has_the_law_of_the_published_allocation():
    coarse_of = np.array([0, 0, 1, 1, 1, 2])
    labels = np.repeat(np.arange(6), [15, 15, 10, 10, 10, 20])
    pool = Pool(labels, 6, coarse_of[labels])
    statistics = []
    for draw in (
        lambda rng: pachinko_by_the_book(coarse_of, pool.class_sizes, 5, 16, 0.6, 2.0, rng),
        lambda rng: pachinko(pool, 5, rng, alpha=0.6, beta=2.0).counts(labels, 6),
    ):
        rng, runs = seeded(3), []
        for _ in range(250):
            counts = draw(rng)
            runs.append([*((counts > 0).sum(axis=1)), *counts.max(axis=1), *counts[0], *counts[3]])
        statistics.append(np.array(runs))
    book, ours = statistics
    error = np.sqrt((book.var(axis=0) + ours.var(axis=0)) / 250)
    assert (np.abs(book.mean(axis=0) - ours.mean(axis=0)) < 4.5 * error).all()


def test_pachinko_of_cifar100():
    fine = np.repeat(np.arange(100), 500)
    pool = Pool(fine, 100, fine % 20)
    split = pachinko(pool, 500, seeded())
    assert split.sizes().tolist() == [100] * 500
    coarse = split.counts(pool.groups, 20)
    early = effective_classes(coarse[:250]).mean()
    assert 1.5 < early < 4  # Dir(0.1) over 20: about 2.6 effective coarse classes


def test_pachinko_needs_coarse_classes():
    with pytest.raises(ValueError, match="groups is None: pachinko needs"):
        pachinko(CIFAR10, 10, seeded())
    with pytest.raises(ValueError, match="groups gives class 1 more than one coarse class"):
        pachinko(Pool(np.array([0, 1, 1, 2]), 3, np.array([0, 0, 1, 1])), 2, seeded())


def test_natural_clients_are_the_groups():
    groups = np.array([7, -2, 7, 40, -2, 7, 9])
    pool = Pool(np.zeros(7, np.int64), 1, groups)
    everyone = natural(pool, 4, seeded())
    assert [c.tolist() for c in everyone.clients] == [[1, 4], [0, 2, 5], [6], [3]]
    large = natural(pool, 2, seeded(), minimum=2)
    assert [c.tolist() for c in large.clients] == [[1, 4], [0, 2, 5]]
    with pytest.raises(ValueError, match="clients is 3: the data has 2 groups of at least 2 rows"):
        natural(pool, 3, seeded(), minimum=2)
    with pytest.raises(ValueError, match="groups is None: natural needs"):
        natural(CIFAR10, 3, seeded())


def test_natural_draws_any_group_and_merges_evenly():
    groups = np.repeat(np.arange(10), 3)
    pool = Pool(np.zeros(30, np.int64), 1, groups)
    seen = {int(groups[c[0]]) for s in range(30) for c in natural(pool, 3, seeded(s)).clients}
    assert seen == set(range(10))
    merged = natural(pool, 4, seeded(), merge=True)
    assert sorted(merged.sizes().tolist()) == [6, 6, 9, 9]
    assert all(len(c) == 3 * len(set(groups[c].tolist())) for c in merged.clients)


def test_groups_too_small_to_count_are_merged_into_nobody():
    groups = np.repeat(np.arange(6), [1, 3, 1, 3, 3, 3])
    merged = natural(Pool(np.zeros(14, np.int64), 1, groups), 2, seeded(), minimum=2, merge=True)
    assert sorted(merged.order.tolist()) == [r for r in range(14) if groups[r] not in (0, 2)]
    assert merged.sizes().tolist() == [6, 6]


@pytest.mark.parametrize("inner", [{"alpha": 0.1, "minimum": 40}, {"labels": 2}, {}])
def test_domain_skew_keeps_domains_apart(inner):
    domain = np.repeat([5, 1, 3], 400)
    labels = np.tile(np.arange(8), 150)
    split = domain_skew(Pool(labels, 8, domain), 12, seeded(), **inner)
    assert [set(domain[c].tolist()) for c in split.clients] == [{1}] * 4 + [{3}] * 4 + [{5}] * 4
    counts = split.counts(labels, 8)
    if "alpha" in inner:
        assert counts.sum(axis=1).min() >= 40 and effective_classes(counts).mean() < 5
    elif "labels" in inner:
        assert (classes_held(counts) == 2).all()
    else:
        assert split.sizes().tolist() == [100] * 12


def test_domain_skew_refuses_what_does_not_fit():
    pool = Pool(np.arange(90) % 3, 3, np.arange(90) % 4)
    with pytest.raises(ValueError, match=r"clients is 6: the data has 4 domains.*give 4 or 8"):
        domain_skew(pool, 6, seeded())
    with pytest.raises(ValueError, match=r"clients is 2: the data has 4 domains.*give 4"):
        domain_skew(pool, 2, seeded())
    with pytest.raises(ValueError, match=r"alpha is 0.1 and labels is 2: give one"):
        domain_skew(pool, 4, seeded(), alpha=0.1, labels=2)
    with pytest.raises(ValueError, match="groups is None: domain_skew needs"):
        domain_skew(CIFAR10, 4, seeded())


def test_refilled_clients_keep_to_their_priors_and_a_long_tail_is_lost():
    labels = np.repeat(np.arange(10), [1000, 600, 400, 300, 200, 150, 100, 80, 60, 50])
    pool, how = Pool(labels, 10), {"alpha": 0.1}
    plain = client_dirichlet(pool, 100, np.random.default_rng(0), **how)
    refilled = client_dirichlet(pool, 100, np.random.default_rng(0), **how, refill=True)
    assert set(plain.sizes()) == set(refilled.sizes()) == {29}
    counts = refilled.counts(labels, 10)
    priors = np.random.default_rng(0).dirichlet(np.full(10, 0.1), size=100)
    assert np.abs(counts / 29 - priors).max() < 0.45  # 29 draws: at most five deviations away
    assert np.abs(counts - 29 * priors).mean() < 1
    totals = counts.sum(axis=0)
    assert totals.min() > 150 and totals.max() < 500  # about 290 each, of 50 to 1000 rows
    assert plain.counts(labels, 10).sum(axis=0)[-1] <= 50
    assert np.bincount(refilled.order)[labels == 9].min() >= 3
    with pytest.raises(ValueError, match="refill is True with alpha = 0"):
        client_dirichlet(pool, 100, np.random.default_rng(0), alpha=0, refill=True)


def test_refilling_leaves_out_a_class_without_rows():
    pool = Pool(np.repeat([0, 2], 30), 3)
    split = client_dirichlet(pool, 6, np.random.default_rng(0), alpha=1.0, refill=True)
    assert split.counts(pool.labels, 3).sum(axis=0)[1] == 0
    assert set(split.sizes()) == {10}

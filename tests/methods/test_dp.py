"""Client-level privacy against NumPy: clipping, noise, the clip that adapts, and what it costs."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.numpy_clients import NumpyClients, linear_federation
from torch import nn

import fedbasin.methods
from fedbasin.core.catalogue import CATALOGUE, cards
from fedbasin.core.expressions import parse
from fedbasin.core.method import Context, Sampling, Wrapper
from fedbasin.core.rng import root
from fedbasin.core.rule import Setting
from fedbasin.core.vectors import Layout
from fedbasin.local.privacy import (
    LARGEST_NORMAL,
    ClipAndNoise,
    ClipUpdate,
    LocalDP,
    PrivateUpload,
    secret_noise,
    secret_normal,
    without_noise,
)
from fedbasin.methods import FedAvg
from fedbasin.methods.dp import DP
from fedbasin.methods.parts import accounting
from fedbasin.testing import replies_of, toy_federation

assert fedbasin.methods
POISSON = Sampling("poisson", 50.0, 1000)
needs_accountant = pytest.mark.skipif(
    not accounting.installed(), reason="needs the extra fedbasin[dp]"
)


def step(method, updates, *, round=0, sampling=POISSON, weights=None, state=None, **around):
    """Return the model after a round from zero, the state and the notes."""
    updates = torch.as_tensor(np.asarray(updates), dtype=torch.float64)
    start = torch.zeros(updates.shape[1], dtype=torch.float64)
    layout = Layout(("w",), ((len(start),),))
    context = Context(layout, sampling.clients, 5, root(0), sampling=sampling, **around)
    context = context.at(round, 0.1)
    state = method.init(start, context) if state is None else state
    return method.aggregate(state, start, replies_of(updates, weights), context)


def noted(served):
    """Return all notes of a round by name."""
    notes, found = served.notes, {}
    while notes:
        first, notes = notes
        found |= first._asdict()
    return found


def numpy_clipped(d, bound):
    lengths = np.linalg.norm(d, axis=1, keepdims=True)
    return d * np.minimum(1, bound / lengths)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 9), clip=st.floats(0.05, 20))
@settings(deadline=None, max_examples=40)
def test_without_noise_it_is_the_clipped_sum_over_the_expected_cohort(seed, count, clip):
    draws = np.random.default_rng(seed)
    d = draws.normal(size=(count, 7)) * 10 ** draws.uniform(-2, 2, size=(count, 1))
    weights = draws.integers(1, 9, count).astype(float)
    served, _ = step(DP(clip=clip, noise=0.0), d, weights=weights)
    np.testing.assert_allclose(served.send, numpy_clipped(d, clip).sum(0) / 50, rtol=1e-10)


def test_it_equals_numpy_over_rounds_of_training_and_server_momentum():
    """All six clients train; the clip follows the median of the lengths; momentum is around."""
    method = parse(
        "dp(fedavgm(fedavg(weighting='uniform'), momentum=0.9), clip=0.3, noise=0.0, "
        "adaptive=True, quantile=0.7)",
        "method",
    )
    federation = linear_federation(method, rounds=4, participation="count(clients=6)")
    world = NumpyClients(federation)
    server, momentum, clip = world.start, 0.0, 0.3
    for t, (after, record) in enumerate(federation.rounds_from(*federation.begin())):
        ends, _, _ = world.sgd(t, server)
        d = ends - server
        assert record.notes["clip"] == pytest.approx(clip)
        momentum = 0.9 * momentum + numpy_clipped(d, clip).sum(0) / 6
        server = server + momentum
        short = (np.linalg.norm(d, axis=1) <= clip).mean()
        clip = clip * np.exp(-0.2 * (short - 0.7))
        np.testing.assert_allclose(after.send, server, rtol=1e-7)


@pytest.mark.parametrize("count", [0, 3, 50])
@pytest.mark.parametrize("adaptive", [False, True])
def test_noise_has_the_stated_spread_whatever_the_cohort(count, adaptive):
    """Of the mean it is z S / M; with an adaptive clip z_D = (z^-2 - (2 s_b)^-2)^(-1/2) counts."""
    d = np.random.default_rng(0).normal(size=(count, 200_000))
    noisy, _ = step(DP(clip=2.0, noise=1.0, adaptive=adaptive), d)
    plain, _ = step(DP(clip=2.0, noise=0.0, adaptive=adaptive), d)
    noise = (noisy.send - plain.send).numpy() * 50 / 2.0
    z = 1.0206 if adaptive else 1.0  # the specification's number for M = 50
    assert noise.std() == pytest.approx(z, abs=4 / math.sqrt(2 * 200_000))
    assert abs(noise.mean()) < 4 / math.sqrt(200_000)
    assert noted(noisy)["noise_std"] == pytest.approx(z * 2 / 50, rel=1e-4)


def test_noise_is_new_in_every_round_and_for_every_purpose():
    """A round that is repeated, as after a resume, repeats its noise; no two rounds share any."""
    method = DP(clip=1.0, noise=1.0, adaptive=True)
    d = np.zeros((3, 500))
    rounds = [step(method, d, round=t) for t in range(4)]
    models = [served.send.numpy() for served, _ in rounds]
    assert np.array_equal(models[2], step(method, d, round=2)[0].send)
    for i in range(4):
        for j in range(i):
            assert abs(np.corrcoef(models[i], models[j])[0, 1]) < 0.15
    clips = {float(state.own.clip) for _, state in rounds}
    assert len(clips) == 4  # the noisy bits too


def test_a_resumed_run_goes_on_with_other_noise_and_to_the_same_model(tmp_path):
    from fedbasin.core.state import load, save

    method = DP(clip=1e-9, noise=1e9)  # noise alone moves the model
    toy = toy_federation(method, rounds=4, participation="poisson(rate=0.5)")
    server, states = toy.begin()
    whole = []
    for after, _ in toy.rounds_from(server, states):
        whole.append(after.send - server.send)
        if after.round == 2:
            save(tmp_path / "state", (after, states.kept()))
        server = after
    fresh, states = toy.begin()
    server, kept = load(tmp_path / "state", (fresh, states.kept()))
    states.restore(kept)
    resumed = []
    for after, _ in toy.rounds_from(server, states):
        resumed.append(after.send - server.send)
        server = after
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], resumed, strict=True))
    moves = [*whole[:2], *resumed]
    for i in range(4):
        for j in range(i):
            assert not torch.equal(moves[i], moves[j])
            cosine = torch.nn.functional.cosine_similarity(moves[i], moves[j], dim=0)
            assert abs(float(cosine)) < 0.7  # 29 parameters


def test_the_server_of_real_clients_draws_noise_that_no_key_gives():
    d = np.zeros((2, 1000))
    once, again = (step(DP(), d, real=True)[0].send for _ in range(2))
    assert not torch.equal(once, again)
    assert float(once.std()) == pytest.approx(1 / 50, rel=0.1)


@given(seed=st.integers(0, 10**6), clip=st.floats(0.1, 5))
@settings(deadline=None, max_examples=30)
def test_one_client_moves_the_sum_by_at_most_the_clip(seed, clip):
    draws = np.random.default_rng(seed)
    d = draws.normal(size=(6, 5)) * 10 ** draws.uniform(-2, 3, size=(6, 1))
    method = DP(clip=clip, noise=0.0)
    whole = 50 * step(method, d)[0].send
    assert float((whole - 50 * step(method, d[:-1])[0].send).norm()) <= clip * (1 + 1e-9)
    d[-1] = -d[-1] * 1e3
    assert float((whole - 50 * step(method, d)[0].send).norm()) <= 2 * clip * (1 + 1e-9)


def test_the_clip_moves_to_the_quantile():
    sampling = Sampling("poisson", 10.0, 100)
    method = DP(clip=1.0, noise=0.0, adaptive=True, quantile=0.5)
    d = np.eye(10) * np.arange(1, 11)[:, None]  # lengths 1 to 10
    state, clips = None, []
    for _ in range(60):
        _, state = step(method, d, sampling=sampling, state=state)
        clips.append(float(state.own.clip))
    assert clips[0] > 1.0  # few are below
    assert 5 <= clips[-1] <= 6  # half of the lengths are
    assert float(step(replace(method, clip=100.0), d, sampling=sampling)[1].own.clip) < 100


@pytest.mark.parametrize("count", [0, 3, 30])
def test_the_short_updates_are_counted_from_the_middle_of_the_expected_cohort(count):
    """b = 1/2 + (sum of 1[short] - 1/2) / M: a client moves it by 1 / 2M, whoever else is there."""
    d = np.eye(30)[:count] * np.where(np.arange(count) % 3, 0.5, 2.0)[:, None]
    lengths = np.linalg.norm(d, axis=1)
    _, state = step(DP(noise=0.0, adaptive=True, quantile=0.3), np.zeros((count, 30)) + d)
    b = 0.5 + ((lengths <= 1) - 0.5).sum() / 50
    assert float(state.own.clip) == pytest.approx(math.exp(-0.2 * (b - 0.3)), rel=1e-12)


@pytest.mark.parametrize("card", cards("method"), ids=lambda card: card.name)
def test_methods_of_the_uniform_mean_are_taken_and_others_refused_with_the_reason(card):
    method = card.make()
    if isinstance(method, Wrapper):
        return  # `test_composition` has them
    uniform = method
    if any(p.name == "weighting" for p in CATALOGUE[card.name].parameters):
        uniform = replace(method, weighting="uniform")
    if uniform.streams() == "uniform":
        DP(uniform)
    else:
        with pytest.raises(ValueError, match="single replies, reports or server data"):
            DP(uniform)
    if method.streams() == "samples":
        with pytest.raises(ValueError, match="weighting='uniform'"):
            DP(method)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"clip": 0.0}, "clip"),
        ({"noise": -1.0}, "noise"),
        ({"quantile": 1.0}, "quantile"),
        ({"delta": 0.0}, "delta"),
        ({"accountant": "gdp"}, "write 'rdp' or 'pld'"),
        ({"clip": math.inf}, "bounds nothing"),
        ({"adaptive": True, "noise_by": "clients"}, "single updates"),
    ],
)
def test_bad_settings_are_named(arguments, why):
    with pytest.raises(ValueError, match=why):
        DP(**arguments)


def test_what_shows_single_clients_around_it_is_refused():
    for source in ("norm_bound(dp)", "bucketing(dp)", "fedgma(dp)", "fedexp(dp)"):
        with pytest.raises(ValueError, match="looks at the clients' replies"):
            toy_federation(parse(source, "method"))
    for source in ("wima(dp)", "ima(dp)", "fedadam(dp)"):
        toy_federation(parse(source, "method"))


def test_statistics_that_are_merged_plain_are_refused():
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    for method in (DP(), parse("wima(dp)", "method")):
        with pytest.raises(ValueError, match="does not protect BatchNorm statistics"):
            toy_federation(method, module=module)
    plain = toy_federation(FedAvg(weighting="uniform"), module=module)
    kept = replace(plain, buffers="keep", method=DP())
    assert kept.begin()[0].buffers.numel() == 10


def said(method, clients):
    plain = dict(momentum=0.0, weight_decay=0.0, clip=None, ragged=False, statistics=False)
    return " ".join(method.cautions(Setting(**plain, clients=clients)))


def test_small_federations_are_told_that_epsilon_means_little():
    assert "not below 1 / N = 1 / 100" in said(DP(delta=0.02), 100)
    assert "no epsilon that lets a model learn" in said(DP(), 100)
    many = said(DP(delta=1e-6), 100_000)
    assert "no epsilon" not in many and "not below" not in many
    assert "nothing is private" in said(DP(noise=0.0), 100)


# Noise of the clients.


def test_the_noise_of_clients_adds_up_to_that_of_a_server():
    """Every client adds 1 / sqrt(M) of it; the mean is over those that answered."""
    method = DP(clip=2.0, noise=1.5, noise_by="clients")
    toy = toy_federation(method, participation="count(clients=6)")
    server, _ = toy.begin()
    (sent,) = method.broadcast(server.state, server.send, toy.context)
    assert float(sent.std) == pytest.approx(1.5 * 2 / math.sqrt(6))
    d = np.random.default_rng(0).normal(size=(6, 9)) * 5
    served, _ = step(method, d, answered=6)
    np.testing.assert_allclose(served.send, d.mean(0))  # they have clipped: their noise stays
    assert noted(served)["noise_std"] == pytest.approx(1.5 * 2 / math.sqrt(50 * 6))


def test_a_mean_stands_for_the_cohort_where_clients_add_the_noise():
    method = DP(noise_by="clients")
    assert method.streams() == "uniform" and DP().streams() is None
    d = torch.randn(6, 9, dtype=torch.float64)
    layout = Layout(("w",), ((9,),))
    context = Context(layout, 1000, 5, root(0), sampling=POISSON, answered=6).at(0, 0.1)
    start = torch.zeros(9, dtype=torch.float64)
    replies = replies_of(d, [1.0, 2, 3, 4, 5, 6])
    state = method.init(start, context)
    apart = method.aggregate(state, start, replies, context)
    together = method.aggregate(state, start, replies.averaged("uniform"), context)
    torch.testing.assert_close(apart[0].send, together[0].send)
    assert apart[1].own.shares == together[1].own.shares == 50 / 6


@needs_accountant
def test_the_noise_of_clients_is_counted_as_it_came_and_no_draw_hides_anyone():
    """Rounds with 50, 25 and 100 answers cost what a Gaussian of z / sqrt(1 + 2 + 1/2) costs."""
    method = DP(noise=4.0, noise_by="clients")
    state = None
    for answered in (50, 25, 100):
        served, state = step(method, np.ones((3, 4)), answered=answered, state=state)
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(GaussianDpEvent(4.0 / math.sqrt(3.5)))
    assert noted(served)["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5), rel=0.01)


def numpy_uploads(rule, vector, start, shared=(), key=(3, 4)):
    from fedbasin.core.rule import Finish, Start
    from fedbasin.local.privacy import NoiseCarry

    begun = Start(
        **{name: None for name in Start._fields} | {"vector": torch.tensor(start), "shared": shared}
    )
    ended = Finish(**{name: None for name in Finish._fields} | {"vector": torch.tensor(vector)})
    return rule.upload(NoiseCarry(torch.tensor(key)), begun, ended).numpy()


def test_rules_of_clients_clip_and_add_noise():
    draws = np.random.default_rng(0)
    start, move = draws.normal(size=10_000), draws.normal(size=10_000)
    far = start + move
    expected = start + move / np.linalg.norm(move)
    np.testing.assert_allclose(numpy_uploads(ClipUpdate(1.0), far, start), expected)
    np.testing.assert_allclose(numpy_uploads(ClipUpdate(1e9), far, start), far)
    noise = numpy_uploads(LocalDP(1.0, 0.5), far, start) - expected
    assert noise.std() == pytest.approx(0.5, rel=0.03) and abs(noise.mean()) < 0.02
    sent = ClipAndNoise(torch.tensor(1.0), torch.tensor(0.25))
    np.testing.assert_allclose(numpy_uploads(PrivateUpload(), far, start, sent), expected)
    noise = numpy_uploads(PrivateUpload(True), far, start, sent) - expected
    assert noise.std() == pytest.approx(0.25, rel=0.03)
    other = numpy_uploads(PrivateUpload(True), far, start, sent, key=(3, 5)) - expected
    assert abs(np.corrcoef(noise, other)[0, 1]) < 0.05


def test_real_clients_add_the_noise_that_the_rule_would():
    rules = (ClipUpdate(), LocalDP(2.0, 0.5), PrivateUpload(True), PrivateUpload())
    quiet = without_noise(rules)
    assert quiet == (ClipUpdate(), LocalDP(2.0, 0.0), PrivateUpload(), PrivateUpload())
    sent = ClipAndNoise(torch.tensor(1.0), torch.tensor(3.0))
    vector = torch.zeros(40_000)
    noise = secret_noise(vector, rules, ((), (), sent, sent))
    assert float(noise.std()) == pytest.approx(math.sqrt(1 + 9), rel=0.02)
    assert not torch.equal(noise, secret_noise(vector, rules, ((), (), sent, sent)))
    assert not secret_noise(vector, quiet, ((), (), sent, sent)).any()


def test_no_secret_number_is_larger_than_the_largest(monkeypatch):
    """Words of secure aggregation count on it. The smallest word gives the longest radius."""
    monkeypatch.setattr("os.urandom", bytes)
    assert float(secret_normal(2).abs().max()) == pytest.approx(LARGEST_NORMAL, rel=1e-12)


def test_secret_numbers_are_normal():
    from scipy import stats

    drawn = secret_normal(100_001)
    assert len(drawn) == 100_001 and not torch.equal(drawn, secret_normal(100_001))
    assert stats.kstest(drawn.numpy(), "norm").statistic < 2.2 / math.sqrt(100_001)


# What it costs.


@needs_accountant
@pytest.mark.parametrize(
    ("clients", "rate", "rounds", "wanted"),
    [
        (100, 0.1, 500, {2: 2.98, 8: 1.22, 32: 0.68}),
        (1000, 0.1, 500, {2: 3.72, 8: 1.38, 32: 0.71}),
        (3400, 100 / 3400, 1500, {2: 2.16, 8: 0.92, 32: 0.55}),
    ],
)
def test_the_noise_for_an_epsilon_is_that_of_the_table(clients, rate, rounds, wanted):
    sampling = Sampling("poisson", rate * clients, clients)
    for epsilon, z in wanted.items():
        ours = accounting.noise_for(epsilon, rounds, 1 / clients, sampling)
        assert ours == pytest.approx(z, rel=0.01, abs=0.005)  # the table has two decimals
        assert accounting.epsilon(ours, rounds, 1 / clients, sampling) <= epsilon * 1.001


@needs_accountant
def test_cohorts_of_fixed_size_cost_what_replacing_a_client_does():
    """The trap: replacing moves the sum by 2 S, and the accountant does not know."""
    fixed, poisson = Sampling("fixed", 100, 1000), Sampling("poisson", 100, 1000)
    assert accounting.epsilon(1.0, 100, 1e-3, poisson) == pytest.approx(5.66, rel=0.01)
    assert accounting.epsilon(1.0, 100, 1e-3, fixed) == pytest.approx(79, rel=0.01)


@needs_accountant
@pytest.mark.parametrize(
    ("cohort", "clients", "z", "rounds", "delta", "recorded", "held"),
    [
        (50, 1000, 1.0, 80, 1e-5, 3.74, 4.30),
        (20, 1000, 1.5, 500, 1e-4, 1.29, 3.27),
        (20, 400, 1.0, 200, 1e-3, 3.75, 7.09),
    ],
)
def test_what_an_adaptive_clip_cost_before_the_count_was_centred(
    cohort, clients, z, rounds, delta, recorded, held
):
    """The changelog's numbers: a client moved the count by 1, of which s_b hides 1/2."""
    sampling = Sampling("poisson", float(cohort), clients)
    assert accounting.epsilon(z, rounds, delta, sampling) == pytest.approx(recorded, abs=0.006)
    updates = DP(noise=z, adaptive=True)._update_noise(cohort)
    effective = (updates**-2 + (cohort / 20) ** -2) ** -0.5
    assert accounting.epsilon(effective, rounds, delta, sampling) == pytest.approx(held, abs=0.006)


@needs_accountant
def test_the_accountants_differ_by_as_much_as_the_page_says():
    """docs/methods/trust.md, the last table's row with noise 1."""
    assert accounting.epsilon(1.0, 80, 1e-5, POISSON) == pytest.approx(3.74, abs=0.005)
    assert accounting.epsilon(1.0, 80, 1e-5, POISSON, "pld") == pytest.approx(3.20, abs=0.005)


@needs_accountant
def test_without_a_draw_rounds_add_up_to_one_gaussian():
    everyone = Sampling("other", 1000, 1000)
    once = accounting.epsilon(1.0, 1, 1e-5, everyone)
    assert accounting.epsilon(10.0, 100, 1e-5, everyone) == pytest.approx(once, rel=1e-6)
    assert accounting.epsilon(10.0, 100, 1e-5, Sampling("fixed", 1000, 1000)) == once


@needs_accountant
def test_epsilon_grows_with_rounds_and_rate_and_falls_with_noise():
    base = accounting.epsilon(1.0, 50, 1e-4, POISSON)
    assert accounting.epsilon(1.0, 51, 1e-4, POISSON) > base
    assert accounting.epsilon(1.1, 50, 1e-4, POISSON) < base
    assert accounting.epsilon(1.0, 50, 1e-4, Sampling("poisson", 60.0, 1000)) > base


@needs_accountant
@pytest.mark.parametrize("noise", [0.3, 1.0, 2.0])
def test_loss_distributions_give_a_tighter_bound(noise):
    """Against the package's own steps, which are ten times as fine at z = 1."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    fine = PLDAccountant()
    fine.compose(PoissonSampledDpEvent(0.05, GaussianDpEvent(noise)), 50)
    tight = accounting.epsilon(noise, 50, 1e-4, POISSON, "pld")
    assert tight == pytest.approx(fine.get_epsilon(1e-4), rel=1e-3)
    assert 0.4 < tight / accounting.epsilon(noise, 50, 1e-4, POISSON) < 0.95


@needs_accountant
def test_loss_distributions_of_one_gaussian_are_exact():
    """Balle and Wang: delta = F(1/2z - epsilon z) - e^epsilon F(-1/2z - epsilon z)."""
    from scipy.stats import norm

    for z in (0.5, 2.0):
        epsilon = accounting.epsilon(z, 1, 1e-3, Sampling("other", 20, 20), "pld")
        first, second = norm.cdf(0.5 / z - epsilon * z), norm.cdf(-0.5 / z - epsilon * z)
        assert first - math.exp(epsilon) * second == pytest.approx(1e-3, rel=0.02)


@needs_accountant
def test_less_noise_does_by_the_tighter_accountant():
    wide = accounting.noise_for(4.0, 50, 1e-4, POISSON)
    found = accounting.noise_for(4.0, 50, 1e-4, POISSON, "pld")
    assert 0.7 * wide < found < 0.97 * wide
    assert accounting.epsilon(found, 50, 1e-4, POISSON, "pld") == pytest.approx(4.0, rel=1e-3)


@needs_accountant
def test_cohorts_of_fixed_size_are_refused_by_the_accountant_that_does_not_know_them():
    method = DP(accountant="pld")
    with pytest.raises(ValueError, match="does not know cohorts of fixed size"):
        toy_federation(method, participation="count(clients=3)").begin()
    with pytest.raises(ValueError, match="write accountant='rdp'"):
        accounting.noise_for(4.0, 5, 1e-3, Sampling("fixed", 3.0, 6), "pld")
    for taken, who in (
        (method, "poisson(rate=0.5)"),
        (method, "fraction(rate=1.0)"),
        (replace(method, noise_by="clients"), "count(clients=3)"),
    ):
        toy = toy_federation(taken, rounds=1, participation=who)
        ((_, record),) = toy.rounds_from(*toy.begin())
        assert record.notes["epsilon"] > 0


@needs_accountant
def test_epsilon_of_the_rounds_so_far_is_in_the_record():
    toy = toy_federation(DP(noise=2.0), rounds=3, participation="poisson(rate=0.3)")
    sampling = toy.context.sampling
    assert sampling == ("poisson", pytest.approx(1.8), 6)
    found = [record.notes["epsilon"] for _, record in toy.rounds_from(*toy.begin())]
    assert found == [accounting.epsilon(2.0, t, 1e-5, sampling) for t in (1, 2, 3)]


def test_without_the_package_the_run_goes_on_and_says_so(monkeypatch):
    monkeypatch.setattr(accounting, "installed", lambda: False)
    module = sys.modules["fedbasin.methods.dp"]  # the package's `dp` is the method
    monkeypatch.setattr(module, "installed", lambda: False)
    assert "pip install 'fedbasin[dp]'" in said(DP(), 100_000)
    toy = toy_federation(DP(noise=2.0), rounds=1, participation="poisson(rate=0.9)")
    ((_, record),) = toy.rounds_from(*toy.begin())
    assert "epsilon" not in record.notes and "noise_std" in record.notes
    with pytest.raises(accounting.NoAccountant, match="pip install"):
        accounting.noise_for(8, 10, 1e-5, POISSON)


def test_local_dp_runs_and_composes():
    uniform = FedAvg(weighting="uniform", local=(LocalDP(clip=1.0, noise=0.1),))
    toy = toy_federation(uniform, rounds=2)
    assert all(torch.isfinite(after.send).all() for after, _ in toy.rounds_from(*toy.begin()))

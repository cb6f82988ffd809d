"""IMA, WIMA and SWA: the invariants of the papers, against plain NumPy means."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.numpy_clients import linear_federation

from fedbasin.core.expressions import parse
from fedbasin.core.method import Context, Plan
from fedbasin.core.rng import root
from fedbasin.core.tree import tensors
from fedbasin.core.vectors import Layout
from fedbasin.methods import IMA, SWA, WIMA, FedAvg, FedProx, Scaffold
from fedbasin.methods.parts.trajectory import RunningMean, empty, mean, push
from fedbasin.testing import replies_of, toy_federation, trajectory

LAYOUT = Layout(("body", "head.weight"), ((2,), (3,)), head=("head.weight",))


def context(round=0, rounds=40):
    return Context(LAYOUT, clients=4, rounds=rounds, key=root(0), round=round)


def feed(method, models, rounds=None):
    """Let a method see one reply a round; yield what it serves."""
    models = torch.as_tensor(models, dtype=torch.float64)
    total = rounds or len(models)
    state = method.init(models[0] * 0, context(rounds=total))
    for t, model in enumerate(models):
        served, state = method.aggregate(
            state, model * 0, replies_of(model[None]), context(t, total)
        )
        yield served


def walk(count, size=5, seed=0):
    return np.cumsum(np.random.default_rng(seed).normal(size=(count, size)), axis=0)


# --- the window


@given(st.integers(1, 7), st.integers(1, 40), st.integers(0, 5))
@settings(max_examples=60)
def test_a_window_holds_the_mean_of_the_last_models(width, count, seed):
    window = empty(width, torch.zeros(3, dtype=torch.float64))
    models = walk(count, 3, seed)
    for t, model in enumerate(models):
        window = push(window, torch.from_numpy(model))
        np.testing.assert_allclose(
            mean(window), models[max(0, t + 1 - width) : t + 1].mean(0), rtol=1e-12, atol=1e-12
        )
    assert window.filled == min(width, count)


def test_a_window_does_not_drift_over_thousands_of_rounds():
    rng = np.random.default_rng(0)
    window, last = empty(50, torch.zeros(4)), []
    for _ in range(5000):
        model = (rng.normal(size=4) * 10.0 ** rng.integers(-6, 7, 4)).astype(np.float32)
        window = push(window, torch.from_numpy(model))
        last = [*last, model.astype(np.float64)][-50:]
    np.testing.assert_allclose(mean(window).numpy(), np.mean(last, 0), rtol=2e-7, atol=1e-3)
    exact = sum((slot.double() for slot in window.slots), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(window.total, exact, rtol=1e-12, atol=1e-9)


def test_pushing_copies_only_the_new_model_and_changes_nothing():
    window = empty(4, torch.zeros(3))
    for t in range(6):
        before = [slot.data_ptr() for slot in window.slots]
        after = push(window, torch.full((3,), float(t)))
        changed = [a != b.data_ptr() for a, b in zip(before, after.slots, strict=True)]
        assert sum(changed) <= 1 and window.pushed == t
        window = after


def test_bfloat16_halves_the_memory_and_keeps_three_digits_of_the_movement():
    models = torch.from_numpy(1000 + walk(30)).float()
    half, full = empty(8, models[0], "bfloat16"), empty(8, models[0])
    for model in models:
        half, full = push(half, model), push(full, model)
    assert all(slot.element_size() == 2 for slot in half.slots)
    moved = (models[-8:] - models[0]).abs().max()
    assert (mean(half) - mean(full)).abs().max() < moved * 2**-8
    with pytest.raises(ValueError, match="no model"):
        mean(empty(3, models[0]))


def test_bfloat16_stays_exact_however_far_the_trajectory_has_come():
    steps = np.random.default_rng(3).normal(size=(400, 5)).cumsum(0) * 0.01
    models = torch.from_numpy(steps + np.arange(400)[:, None]).float()  # 400 away from its start
    window = empty(8, models[0], "bfloat16")
    for t, model in enumerate(models):
        window = push(window, model)
        expected = models[max(0, t - 7) : t + 1].double().mean(0)
        # Differences are at most 16 rounds long, and bfloat16 keeps 8 bits of them.
        assert (mean(window).double() - expected).abs().max() < 16 * 2**-8


@pytest.mark.parametrize(("width", "expected"), [(1, 5.0), (3, 4.0)])
def test_a_window_forgets_what_a_huge_model_rounded_away(width, expected):
    window = empty(width, torch.zeros(1, dtype=torch.float64))
    for model in (0.0, 1e20, 1.0, 2.0, 3.0, 4.0, 5.0):
        window = push(window, torch.tensor([model], dtype=torch.float64))
    assert mean(window).item() == expected


def test_but_once_in_a_window_a_push_looks_at_the_oldest_and_the_newest_alone():
    window = empty(4, torch.zeros(1))
    for model in (0.0, 1.0, 2.0, 3.0, 4.0):
        window = push(window, torch.tensor([model]))
    others = tuple(slot if place == 1 else slot * torch.nan for place, slot in
                   enumerate(window.slots))  # fmt: skip
    assert mean(push(replace(window, slots=others), torch.tensor([5.0]))).item() == 3.5


@pytest.mark.parametrize("method", [WIMA(window=3), IMA(window=3)], ids=str)
def test_a_window_is_stored_as_the_method_says(method):
    def slots(like, **settings):
        own = replace(method, **settings).begin(like, context())
        windows = [own] if isinstance(method, WIMA) else [own.scored, own.sent]
        return [slot for window in windows for slot in window.slots]

    model, elsewhere = torch.zeros(5), torch.zeros(5, device="meta")
    assert {slot.dtype for slot in slots(model)} == {torch.float32}
    assert {slot.dtype for slot in slots(model, storage="bfloat16")} == {torch.bfloat16}
    assert {slot.device.type for slot in slots(elsewhere)} == {"meta"}
    assert {slot.device.type for slot in slots(elsewhere, on_cpu=True)} == {"cpu"}


def test_a_running_mean_is_the_mean():
    models = walk(20)
    running = RunningMean(torch.zeros(5, dtype=torch.float64), 0)
    for model in models:
        running = running.push(torch.from_numpy(model))
    np.testing.assert_allclose(running.mean(torch.zeros(5, dtype=torch.float64)), models.mean(0))


# --- WIMA


@pytest.mark.parametrize("width", [1, 2, 5, 100])
def test_wima_scores_the_window_and_sends_the_raw_model(width):
    models = walk(12)
    for t, served in enumerate(feed(WIMA(window=width), models)):
        np.testing.assert_array_equal(served.send, models[t])
        np.testing.assert_allclose(
            served.score, models[max(0, t + 1 - width) : t + 1].mean(0), rtol=1e-12, atol=1e-12
        )


def test_equation_4_equals_equation_6():
    """The mean is w^{t'} minus the steps since: the oldest counts fully, the newest 1/W."""
    models, width = walk(30), 6
    scores = [served.score.numpy() for served in feed(WIMA(window=width), models)]
    for end in range(width, 30):
        first = end - width  # w^{t'}; the window holds the models after it
        step = [models[tau] - models[tau + 1] for tau in range(first, end)]
        shares = [(width - k) / width for k in range(width)]
        assert sum(shares) == pytest.approx((width + 1) / 2)
        expected = models[first] - sum(s * d for s, d in zip(shares, step, strict=True))
        np.testing.assert_allclose(scores[end], expected, rtol=1e-10, atol=1e-10)
        if end > width:
            np.testing.assert_allclose(
                scores[end] - scores[end - 1],
                (models[end] - models[end - width]) / width,
                atol=1e-10,
            )


@pytest.mark.parametrize("inner", [FedAvg(), FedProx(mu=0.5), Scaffold()], ids=str)
def test_wima_leaves_the_trajectory_alone(inner):
    for a, b in zip(trajectory(WIMA(inner, window=3)), trajectory(inner), strict=True):
        assert torch.equal(a.send, b.send)


@pytest.mark.parametrize("part", ["all", "head"])
@pytest.mark.parametrize("kind", [WIMA, SWA])
def test_what_is_scored_is_averaged_where_another_model_is_sent(kind, part):
    models, averaged = walk(8), slice(0 if part == "all" else 2, 5)
    method, width = (WIMA(window=3), 3) if kind is WIMA else (SWA(start=0.0, cycle=1), 8)
    for t, served in enumerate(feed(replace(method, inner=Ahead(), part=part), models)):
        expected = models[t].copy()
        expected[averaged] = models[max(0, t + 1 - width) : t + 1].mean(0)[averaged]
        np.testing.assert_allclose(served.score, expected, rtol=1e-12)
        np.testing.assert_allclose(served.send, models[t] + 10.0 * (t + 1), rtol=1e-12)


@pytest.mark.parametrize("server", ["fedadam(lr=0.1)", "fedavgm", "fedadam(ima(window=2))"])
def test_equation_7_holds_for_the_steps_of_any_server(server):
    raw = [s.send.numpy() for s in trajectory(parse(server, "method"), rounds=9)]
    scores = [s.score.numpy() for s in trajectory(WIMA(parse(server, "method"), 4), rounds=9)]
    for end in range(4, 9):
        steps = [raw[tau] - raw[tau + 1] for tau in range(end - 4, end)]
        expected = raw[end - 4] - sum((4 - k) / 4 * d for k, d in enumerate(steps))
        np.testing.assert_allclose(scores[end], expected, rtol=1e-9, atol=1e-11)


def test_a_convex_loss_of_the_mean_is_at_most_the_mean_of_the_losses():
    """Jensen, with the cross-entropy of a linear network."""
    plain, wima = (linear_federation(m, rounds=9) for m in (FedAvg(), WIMA(window=4)))
    loss = plain.context.proxy.loss
    raw = [float(loss(after.send)) for after, _ in plain.rounds_from(*plain.begin())]
    scored = [float(loss(after.score)) for after, _ in wima.rounds_from(*wima.begin())]
    gains = [np.mean(raw[max(0, t - 3) : t + 1]) - scored[t] for t in range(9)]
    assert gains[0] == 0 and all(gain > 1e-6 for gain in gains[1:])


@pytest.mark.parametrize(
    "method", [WIMA(window=3), IMA(window=3, start=0.0), SWA(start=4 / 7, cycle=1)], ids=str
)
def test_averages_of_a_part_take_the_rest_from_the_newest_model(method):
    models = walk(7)  # all three average the last three models
    for part, averaged in (("head", slice(2, 5)), ("backbone", slice(0, 2))):
        *_, last = feed(replace(method, part=part), models)
        expected = models[-1].copy()
        expected[averaged] = models[-3:].mean(0)[averaged]
        np.testing.assert_allclose(last.score, expected, rtol=1e-12)
        fed_back = isinstance(method, IMA)
        np.testing.assert_allclose(last.send, expected if fed_back else models[-1], rtol=1e-12)


@pytest.mark.parametrize(("window", "stride"), [(1, 3), (2, 3), (3, 2), (100, 4)])
def test_with_a_stride_every_nth_model_is_averaged(window, stride):
    models, taken = walk(14), []
    for t, served in enumerate(feed(WIMA(window=window, stride=stride), models)):
        if (t + 1) % stride == 0:
            taken.append(models[t])
        np.testing.assert_array_equal(served.send, models[t])
        expected = np.mean(taken[-window:], 0) if taken else models[t]
        np.testing.assert_allclose(served.score, expected, rtol=1e-12)


def test_wima_steadies_a_noisy_run():
    """On a noisy walk around an optimum the variance of the scored model falls with W."""
    noise = np.random.default_rng(0).normal(size=(400, 5))
    spread = []
    for width in (1, 5, 25):
        scores = np.stack([served.score.numpy() for served in feed(WIMA(window=width), noise)])
        spread.append(scores[50:].var())
    assert spread[0] > 3 * spread[1] > 9 * spread[2]


# --- IMA


def test_ima_hands_out_the_mean_of_the_last_raw_models_from_its_start_on():
    models = walk(20)
    for t, served in enumerate(feed(IMA(window=4, start=0.5), models)):
        expected = models[t - 3 : t + 1].mean(0) if t >= 10 else models[t]
        np.testing.assert_allclose(served.send, expected, rtol=1e-12)
        assert served.score is served.send


def test_ima_before_the_window_is_full_averages_what_there_is():
    models = walk(6)
    for t, served in enumerate(feed(IMA(window=4, start=0.0), models)):
        np.testing.assert_allclose(served.send, models[max(0, t - 3) : t + 1].mean(0), rtol=1e-12)


@dataclass(frozen=True)
class Ahead(FedAvg):
    """FedAvg that sends a model further along than the one it scores, from a round on."""

    first: int = 0

    def aggregate(self, state, server, replies, context):
        served, state = super().aggregate(state, server, replies, context)
        lead = 10.0 * (context.round + 1) if context.round >= self.first else 0.0
        return (replace(served, send=served.score + lead) if lead else served), state


@pytest.mark.parametrize("first", [0, 5, 11])
def test_ima_averages_what_is_sent_and_what_is_scored_each_for_itself(first):
    scored = walk(20)
    leads = np.where(np.arange(20) >= first, 10.0 * np.arange(1, 21), 0.0)
    sent = scored + leads[:, None]
    for t, served in enumerate(feed(IMA(Ahead(first=first), window=4, start=0.5), scored)):
        last = slice(t - 3, t + 1) if t >= 10 else slice(t, t + 1)
        np.testing.assert_allclose(served.send, sent[last].mean(0), rtol=1e-9)
        np.testing.assert_allclose(served.score, scored[last].mean(0), rtol=1e-9)
    raw = feed(IMA(Ahead(first=first), window=4, start=0.5, feedback=False), scored)
    for served, model in zip(raw, sent, strict=True):
        np.testing.assert_array_equal(served.send, model)


def test_ima_averages_the_same_part_of_what_is_sent():
    models = walk(6)
    sent = models + 10.0 * np.arange(1, 7)[:, None]
    *_, last = feed(IMA(Ahead(), window=3, start=0.0, part="head"), models)
    np.testing.assert_allclose(last.send, np.append(sent[-1, :2], sent[-3:, 2:].mean(0)))
    np.testing.assert_allclose(last.score, np.append(models[-1, :2], models[-3:, 2:].mean(0)))


@pytest.mark.parametrize("inner", ["feddyn", "fedacg", "adabest", "creff"])
def test_the_first_mean_is_of_one_model_and_what_the_base_sends(inner):
    base = trajectory(parse(inner, "method"), rounds=1)[0]
    assert not torch.equal(base.send, base.score)
    found = trajectory(IMA(parse(inner, "method"), window=4, start=0.0), rounds=1)[0]
    assert torch.equal(found.send, base.send) and torch.equal(found.score, base.score)


def test_a_second_window_takes_memory_only_where_it_is_needed():
    method, models = IMA(window=4, start=0.5), torch.from_numpy(walk(6))
    state = method.init(models[0], context(rounds=6))
    for t, model in enumerate(models):
        _, state = method.aggregate(state, model * 0, replies_of(model[None]), context(t, 6))
    assert sum(each.numel() for each in tensors(state.own.sent)) == 0


def test_ima_finds_the_centre_of_an_oscillation():
    centre, swing = np.arange(5.0), np.random.default_rng(0).normal(size=(4, 5))
    swing -= swing.mean(0)
    models = np.stack([centre + swing[t % 4] for t in range(16)])
    *_, last = feed(IMA(window=4), models)
    np.testing.assert_allclose(last.send, centre, atol=1e-12)


@pytest.mark.parametrize("inner", [FedAvg(), Scaffold()], ids=str)
def test_ima_is_its_base_before_the_start_and_without_window(inner):
    base = trajectory(inner, rounds=8)
    late = trajectory(IMA(inner, window=3), rounds=8)
    for a, b in zip(base[:6], late[:6], strict=True):
        assert torch.equal(a.send, b.send)
    assert not torch.equal(base[6].send, late[6].send)
    for neutral in (IMA(inner, window=1, decay="none"), IMA(inner, start=1.0)):
        for a, b in zip(base, trajectory(neutral, rounds=8), strict=True):
            assert torch.equal(a.send, b.send) and torch.equal(a.score, b.score)


def test_clients_train_from_the_mean():
    """A cohort that stands still returns the mean it was sent, and that enters the window."""
    federation = toy_federation(IMA(window=3, start=0.5, decay="none"), rounds=8)
    still = replace(federation, schedule=lambda t: Plan(0.3 if t < 5 else 0.0, 2))
    server, states = still.begin()
    sent = [after.send for after, _ in still.rounds_from(server, states)]
    # sent[4] = mean(a2, a3, a4) and sent[5] = mean(a3, a4, sent[4]), with a2 = sent[2] still raw
    torch.testing.assert_close(sent[5], sent[4] + (sent[4] - sent[2]) / 3)


def lrs(method, rounds=40, base=0.01):
    def schedule(t):
        return Plan(base * 0.99**t, 5)

    return [method.plan(schedule, context(t, rounds)) for t in range(rounds)]


def test_learning_rates_follow_the_closed_forms_and_are_continuous_at_the_start():
    plain = [0.01 * 0.99**t for t in range(40)]
    exponential = [p.lr for p in lrs(IMA())]
    assert exponential[:30] == pytest.approx(plain[:30])
    assert exponential[30:] == pytest.approx([0.01 * 0.99**30 * 0.97**k for k in range(10)])
    assert [p.lr for p in lrs(IMA(decay="none"))] == pytest.approx(plain)
    assert [p.lr for p in lrs(IMA(decay="constant"))][30:] == [5e-5] * 10
    half = [p.lr for p in lrs(IMA(decay="step", start=0.0))]
    assert half == pytest.approx([0.01] * 20 + [0.005] * 20)
    cycle = [p.lr for p in lrs(IMA(decay="cyclic", start=0.0, low=0.002))]
    assert cycle[0] == pytest.approx(0.01) and cycle[10] == pytest.approx(0.002)
    assert cycle[5] == pytest.approx(0.006) == pytest.approx(cycle[15]) and max(cycle) == cycle[20]
    epochs = lrs(IMA(decay="epochs", start=0.0), rounds=120)
    assert [epochs[t].epochs for t in (0, 19, 20, 60, 119)] == [5, 5, 4, 2, 1]
    assert epochs[50].lr == pytest.approx(0.01 * 0.99**50)


def test_ima_decays_from_what_the_inner_method_plans():
    inner = SWA(start=0.0, cycle=4, ratio=0.1)
    cycles = [p.lr for p in lrs(inner)]
    found = [p.lr for p in lrs(IMA(inner))]
    assert found[:30] == pytest.approx(cycles[:30])
    assert found[30:] == pytest.approx([cycles[30] * 0.97**k for k in range(10)])
    assert [p.lr for p in lrs(IMA(inner, decay="none"))] == pytest.approx(cycles)
    shorter = lrs(IMA(inner, decay="epochs", start=0.25))
    assert [p.lr for p in shorter] == pytest.approx(cycles)
    assert [p.epochs for p in shorter] == [5] * 30 + [4] * 10


def test_a_share_of_the_rounds_is_not_rounded_down_by_its_last_digit():
    assert 0.29 * 100 < 29
    assert IMA(start=0.29).begins(100) == SWA(start=0.29).begins(context(rounds=100)) == 29


def test_paper_example_of_the_learning_rate():
    """R = 400, t_s = 300: 4.9e-4 at the start of averaging and about 2.4e-5 at the end."""
    found = [p.lr for p in lrs(IMA(), rounds=400)]
    assert found[300] == pytest.approx(4.9e-4, rel=0.01) and found[-1] == pytest.approx(
        2.4e-5, rel=0.03
    )


def test_ima_without_feedback_is_wima():
    ima = trajectory(IMA(window=3, start=0.0, decay="none", feedback=False), rounds=6)
    wima = trajectory(WIMA(window=3), rounds=6)
    for a, b in zip(ima, wima, strict=True):
        assert torch.equal(a.send, b.send) and torch.equal(a.score, b.score)


# --- SWA


def test_swa_averages_the_ends_of_cycles_and_trains_on():
    models = walk(20)
    taken = []
    for t, served in enumerate(feed(SWA(start=0.5, cycle=3), models)):
        if t >= 10 and (t - 10 + 1) % 3 == 0:
            taken.append(models[t])
        np.testing.assert_array_equal(served.send, models[t])
        np.testing.assert_allclose(
            served.score, np.mean(taken, 0) if taken else models[t], rtol=1e-12
        )
    assert len(taken) == 3


def test_swa_with_feedback_goes_on_from_the_mean_after_each_cycle():
    models, taken = walk(20), []
    for t, served in enumerate(feed(SWA(start=0.5, cycle=3, feedback=True), models)):
        ends = t >= 10 and (t - 10 + 1) % 3 == 0
        if ends:
            taken.append(models[t])
        np.testing.assert_allclose(served.send, np.mean(taken, 0) if ends else models[t])
        np.testing.assert_allclose(served.score, np.mean(taken, 0) if taken else models[t])
    assert len(taken) == 3


@pytest.mark.parametrize("part", ["all", "head"])
def test_swa_with_feedback_goes_on_from_the_mean_of_what_is_sent(part):
    models = walk(9)
    sent = models + 10.0 * np.arange(1, 10)[:, None]
    *_, last = feed(SWA(Ahead(), start=0.0, cycle=3, feedback=True, part=part), models)
    kept = slice(2, None) if part == "head" else slice(None)
    for found, trail in ((last.send, sent), (last.score, models)):
        expected = trail[-1].copy()
        expected[kept] = trail[2::3, kept].mean(0)
        np.testing.assert_allclose(found, expected)


def test_swa_cycles_begin_at_its_start():
    found = [p.lr for p in lrs(SWA(start=0.5, cycle=4, ratio=0.1))]
    plain = [0.01 * 0.99**t for t in range(40)]
    assert found[:20] == pytest.approx(plain[:20])
    factors = [(1 - s) + 0.1 * s for s in (0.25, 0.5, 0.75, 1.0)]
    assert found[20:28] == pytest.approx(
        [p * f for p, f in zip(plain[20:28], factors * 2, strict=True)]
    )
    assert [p.lr for p in lrs(SWA(cycle=1))] == pytest.approx(plain)


def test_swa_cycles_are_of_what_the_inner_method_plans():
    inner = [p.lr for p in lrs(IMA(start=0.25))]
    found = [p.lr for p in lrs(SWA(IMA(start=0.25), start=0.5, cycle=2, ratio=0.1))]
    assert found[:20] == pytest.approx(inner[:20])
    factors = [0.55, 0.1] * 10
    assert found[20:] == pytest.approx([p * f for p, f in zip(inner[20:], factors, strict=True)])


def test_swa_of_every_round_is_wima_without_an_end():
    swa = trajectory(SWA(start=0.0, cycle=1), rounds=6)
    wima = trajectory(WIMA(window=1000), rounds=6)
    for a, b in zip(swa, wima, strict=True):
        assert torch.equal(a.send, b.send)
        torch.testing.assert_close(a.score, b.score, rtol=1e-12, atol=1e-14)


def test_swa_with_equal_learning_rates_trains_like_its_base():
    for a, b in zip(trajectory(SWA(ratio=1.0, start=0.0)), trajectory(FedAvg()), strict=True):
        assert torch.equal(a.send, b.send)


# --- all


@pytest.mark.parametrize("source", ["ima", "wima", "swa(start=0.0, cycle=1)"])
def test_averages_have_the_type_of_the_models(source):
    method, models = parse(source, "method"), torch.from_numpy(walk(4)).float()
    state = method.init(models[0], context(rounds=4))
    for t, model in enumerate(models):
        served, state = method.aggregate(state, model * 0, replies_of(model[None]), context(t, 4))
        assert served.send.dtype == served.score.dtype == torch.float32


def test_the_ends_of_what_is_allowed_are_allowed():
    assert IMA(window=1, start=0.0, rate=0.0, low=0.0).begins(40) == 0
    assert SWA(start=0.0, cycle=1, ratio=0.0).begins(context()) == 0
    assert IMA(start=1.0).begins(40) == SWA(start=1.0).begins(context()) == 40


@pytest.mark.parametrize(
    "source", ["ima(wima(scaffold))", "wima(ima(fedprox(mu=0.1)), window=3)", "swa(ima)"]
)
def test_averagers_nest(source):
    method = parse(source, "method")
    assert str(method) == source
    last = trajectory(method)[-1]
    assert torch.isfinite(last.send).all() and torch.isfinite(last.score).all()


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("ima(window=0)", "window"),
        ("ima(start=75)", "start"),
        ("ima(rate=1)", "rate"),
        ("ima(low=-1)", "low"),
        ("wima(window=0)", "window"),
        ("wima(stride=0)", "stride"),
        ("swa(cycle=0)", "cycle"),
        ("swa(start=-1)", "start"),
        ("swa(ratio=-1)", "ratio"),
        ("wima(part='tail')", "part"),
        ("wima(inner=prox)", "inner"),
    ],
)
def test_bad_settings_are_named(source, word):
    with pytest.raises(ValueError, match=word):
        parse(source, "method")


def test_epoch_decay_of_a_plan_in_steps_is_refused():
    with pytest.raises(ValueError, match="epochs"):
        IMA(decay="epochs", start=0.0).plan(lambda t: Plan(0.1, None, 3), context(5))


def test_a_network_without_head_cannot_average_its_head():
    headless = replace(context(), layout=Layout(("a",), ((5,),)))
    method = WIMA(window=2, part="head")
    state = method.init(torch.zeros(5), headless)
    with pytest.raises(ValueError, match="head"):
        method.aggregate(state, torch.zeros(5), replies_of(torch.ones(1, 5)), headless)

"""Another method merges the models that FedCDA picks: fedcda(merge=fedlaw)."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from methods.numpy_clients import linear_federation, same_models
from methods.test_fedcda import NumpyFedCDA
from methods.test_fedlaw import jacobian, numpy_descent, step_decay

import fedbasin.methods
from fedbasin.core.catalogue import cards, needs_of
from fedbasin.core.expressions import ExpressionError, parse, text
from fedbasin.core.method import Context, Method, Plan, Served
from fedbasin.core.protocols import NeedsGradients, needs_gradients
from fedbasin.core.rng import root
from fedbasin.core.rule import LocalRule, Setting
from fedbasin.core.state import load, same, save
from fedbasin.core.vectors import Layout
from fedbasin.methods import IMA, WIMA, FedAdam, FedAvg, FedCDA, FedLAW
from fedbasin.testing import check_method, replies_of, toy_federation, trajectory

assert fedbasin.methods
LAW = FedLAW(epochs=2, lr=0.1)


class NumpyFedLAWOnPicks(NumpyFedCDA):
    """FedLAW by hand on the picked models, from the mean on."""

    def merge(self, t, picked, weights):
        law = self.method.merge
        weights = weights if law.weighting == "samples" else np.ones(len(weights))
        anchors = self.server + law.server_lr * (picked - self.server)
        free = np.log(np.append(np.array(weights) / np.sum(weights), law.gamma))
        key = self.federation.context.at(t, 0.0).key.fold("fedlaw", 0)
        moves = np.ones(len(free))
        free = numpy_descent(
            self.world,
            free,
            self.server,
            anchors,
            law,
            moves,
            law.epochs,
            step_decay(law.lr),
            key,
            average=False,
        )
        model, self.lambdas, self.gamma, _ = jacobian(free[:-1], free[-1], anchors, "exponential")
        return model


@pytest.mark.parametrize(
    "method",
    [
        FedCDA(warmup=2, merge=FedLAW(epochs=6, lr=0.1, guard=0)),
        FedCDA(warmup=1, weighting="samples", merge=FedLAW(epochs=3, batch=4, server_lr=0.5)),
        FedCDA(warmup=0, weighting="samples", merge=FedLAW(epochs=3, weighting="uniform")),
        FedCDA(warmup=3, strategy="newest", warmup_by="newest", merge=FedLAW(epochs=3, guard=30)),
    ],
    ids=str,
)
def test_fedlaw_on_the_picked_models_equals_a_plain_numpy_loop(method):
    federation = linear_federation(method, rounds=9, participation="count(clients=4)")
    oracle = NumpyFedLAWOnPicks(federation, method)
    rounds = federation.rounds_from(*federation.begin())
    learnt = 0
    for (after, record), _ in zip(rounds, oracle.rounds(9, method.warmup), strict=True):
        np.testing.assert_allclose(after.send.numpy(), oracle.server, rtol=1e-8, atol=1e-11)
        assert torch.equal(after.send, after.score)
        assert {"divergence", "age", "older"} <= record.notes.keys()  # beside FedLAW's own
        if record.round > method.warmup:
            by_id = [oracle.lambdas[list(oracle.picked).index(n)] for n in sorted(oracle.picked)]
            np.testing.assert_allclose(record.notes["lambdas"], by_id, rtol=1e-8)
            assert record.notes["gamma"] == pytest.approx(oracle.gamma, rel=1e-9)
            learnt += np.ptp(by_id) > 1e-3
        else:
            assert "lambdas" not in record.notes
    assert learnt > 3 and len(oracle.picked) == 6  # more clients than a cohort has


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("merge", ["fedavg", "fedlaw(epochs=0)", "fedgma(threshold=0.0)"])
def test_a_merge_that_is_the_mean_is_fedcda_itself(merge, weighting):
    ours = FedCDA(warmup=1, weighting=weighting, merge=parse(merge))
    plain = replace(ours, merge=None)
    same_models(linear_federation(ours, rounds=8), linear_federation(plain, rounds=8), 1e-10)


def test_a_merge_has_a_weighting_of_its_own():
    everyone = FedCDA(warmup=0, loss_term=False, weighting="samples", strategy="newest")
    ours = linear_federation(replace(everyone, merge=FedAvg("uniform")), rounds=6)
    same_models(ours, linear_federation(replace(everyone, weighting="uniform"), rounds=6), 1e-10)
    with pytest.raises(AssertionError):
        same_models(ours, linear_federation(everyone, rounds=6), 1e-3)


@dataclass(frozen=True)
class Witness(Method):
    """Keeps what it is given, and counts."""

    seen: list

    def init(self, server, context):
        return 0

    def aggregate(self, state, server, replies, context):
        self.seen.append((state, server, replies, context))
        return Served(server, server), state + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_picked_models_come_with_what_their_clients_said_of_them(dtype):
    generator, seen, sent = torch.Generator().manual_seed(0), [], {}
    method = FedCDA(2, warmup=1, weighting="samples", strategy="random", merge=Witness(seen))
    context = Context(Layout(("w",), ((5,),)), 8, 100, root(0))
    state = method.init(torch.zeros(5, dtype=dtype), context)
    for t in range(10):
        server = torch.full((5,), float(t), dtype=dtype)
        drawn = torch.randperm(8, generator=generator)[:3] if t else torch.tensor([6, 3, 1])
        size = {"generator": generator, "dtype": torch.float64}
        replies = replace(
            replies_of(torch.randn(3, 5, **size).to(dtype), (1 + drawn).tolist(), drawn.tolist()),
            steps=torch.rand(3, **size),
            lr_sum=torch.rand(3, **size),
            effective_steps=torch.rand(3, **size),
            last_loss=torch.rand(3, **size).to(dtype),
        )
        sent |= {(n, t): replies.take(torch.tensor([i])) for i, n in enumerate(drawn.tolist())}
        now = context.at(t, 0.1)
        _, state = method.aggregate(state, server, replies, now)
        picked = [(n, r) for n, r in enumerate(state.picked.tolist()) if r >= 0]
        assert len(seen) == t == state.merge  # not in the warm-up
        if t == 0:
            continue
        own, received, given, around = seen[-1]
        assert own == t - 1 and received is server and around is now
        for row, pick in enumerate(picked):
            one, then = given.take(torch.tensor([row])), sent[pick]
            assert one.train_loss.isnan().all()  # it is not kept
            assert same(replace(one, train_loss=then.train_loss), then)
        assert len(given.clients) == len(picked)
    assert len(picked) > 3 and any(r < max(q for m, q in sent if m == n) for n, r in picked)


def test_the_warm_up_is_that_of_fedcda_and_leaves_the_merge_as_it_was():
    for how in ("fedavg", "newest"):
        plain = FedCDA(warmup=3, warmup_by=how)
        method = replace(plain, merge=FedAdam())
        before = trajectory(plain, rounds=5)
        after = trajectory(method, rounds=5)
        start = toy_federation(method).begin()[0].state.merge
        for ours, theirs in zip(after[:3], before[:3], strict=True):
            assert torch.equal(ours.send, theirs.send) and same(ours.state.merge, start)
        assert not torch.allclose(after[3].send, before[3].send)
        assert not same(after[3].state.merge, start)


def test_a_merge_may_score_another_model_than_it_sends():
    scored = trajectory(FedCDA(warmup=2, merge=WIMA(LAW, window=2)), rounds=6)
    plain = [s.send for s in trajectory(FedCDA(warmup=2, merge=LAW), rounds=6)]
    for t, server in enumerate(scored):
        assert torch.equal(server.send, plain[t])
        mean = (plain[t] + plain[t - 1]) / 2 if t > 2 else plain[t]
        torch.testing.assert_close(server.score, mean)


def test_wrappers_see_the_merged_models():
    method = FedCDA(warmup=1, merge=LAW)
    plain = [s.send for s in trajectory(method, rounds=6)]
    wima = trajectory(WIMA(method, window=2), rounds=6)
    assert all(torch.equal(a.send, b) for a, b in zip(wima, plain, strict=True))
    torch.testing.assert_close(wima[-1].score, (plain[-1] + plain[-2]) / 2)
    ima = [s.send for s in trajectory(IMA(method, window=2, start=0.5), rounds=6)]
    assert torch.equal(ima[2], plain[2]) and not torch.allclose(ima[-1], plain[-1])


CARDS = cards("method")
AROUND = {"ima", "swa"}  # have a plan of their own


def quick(card):
    few = [p.name for p in card.parameters if p.name.endswith(("epochs", "steps"))]
    return card.make(**{name: 2 for name in few if isinstance(getattr(card.make, name), int)})


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_method_of_the_server_alone_merges_and_resumes_exactly_and_others_are_refused(
    card, tmp_path
):
    merge = quick(card)
    if merge.rules() or needs_gradients(merge) or card.name in AROUND | {"fedcda"}:
        with pytest.raises(ExpressionError, match=rf"fedcda: merge={card.name}"):
            parse(f"fedcda(merge={text(merge)})")
        return
    method = parse(f"fedcda(warmup=1, merge={text(merge)})", "method")
    assert parse(text(method)) == method == FedCDA(warmup=1, merge=merge)
    needs = needs_of(merge) | {"losses"}
    assert needs_of(method) == needs_of(parse(f"wima({method})")) == needs
    made = replace(toy_federation(method), schedule=lambda t: Plan(0.3, None, 1))
    server, states = made.begin()
    whole = []
    for after, _ in made.rounds_from(server, states):
        whole.append(after)
        if after.round == 2:
            save(tmp_path / "state.safetensors", after)
        context = made.context.at(after.round, 0.3)
        assert method.plan(made.schedule, context) == made.schedule(after.round)
        assert method.broadcast(after.state, after.send, context) == () == method.rules()
        assert merge.broadcast(after.state.merge, after.send, context) == ()
    stopped = load(tmp_path / "state.safetensors", made.begin()[0])
    for after, _ in made.rounds_from(stopped, states):
        assert same(after, whole[after.round - 1])
    assert after.round == 4 and torch.isfinite(after.send).all()


def test_most_methods_of_the_server_alone_are_let_in():
    """So that the test above does not pass by refusing everything."""
    names = ["fedavg", "fedlaw", "fednova", "ldawa", "fedadam", "wima", "feddf", "fedma"]
    for name in names:
        assert parse(f"fedcda(merge={name})").merge == parse(name)


class Asks(NeedsGradients, FedAvg):
    """Asks for gradients, by no rule."""


class Plans(FedAvg):
    """Halves the learning rate, by no rule."""

    def plan(self, schedule, context):
        return replace(schedule(context.round), lr=0.1)


@pytest.mark.parametrize(
    ("merge", "words"),
    [
        ("fedprox", r"asks something of the clients; .* fedcda\(local=\.\.\.\)"),
        ("wima(fedavg(local=prox(mu=0.1)), window=2)", "asks something of the clients"),
        ("mimelite", "asks something of the clients"),
        (Asks(), "asks something of the clients"),
        ("ima", r"sets how clients train; put it around fedcda, as in ima\(fedcda\)"),
        ("wima(swa)", "sets how clients train"),
        ("ima(wima)", "sets how clients train"),
        (Plans(), "sets how clients train"),
        (WIMA(Plans()), "sets how clients train"),
        ("fedcda", "picks models itself"),
        ("fedadam(fedcda(store='disk'))", "picks models itself"),
    ],
    ids=str,
)
def test_a_merge_that_is_more_than_the_servers_is_refused(merge, words):
    with pytest.raises(ValueError, match=words):
        FedCDA(merge=parse(merge) if isinstance(merge, str) else merge)


def test_a_merge_is_a_method():
    with pytest.raises(ExpressionError, match=r"'merge' is prox, it must be method or None"):
        parse("fedcda(merge=prox)")


class Warns(LocalRule):
    """A rule with something to say."""

    def cautions(self, setting):
        yield "mind the step"


def test_cautions_of_clients_and_merge_are_passed_on():
    setting = Setting(0.0, 0.0, None, False, statistics=True)
    assert list(FedCDA().cautions(setting)) == []
    first, second = FedCDA(local=Warns(), merge=parse("wima")).cautions(setting)
    assert first == "mind the step" and "BatchNorm" in second


def test_fedlaw_on_picked_models_obeys_the_laws():
    check_method(FedCDA(warmup=1, merge=LAW))

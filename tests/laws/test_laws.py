"""Every method of the catalogue obeys every law, or says on its card why it cannot."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import fedbasin.methods
from fedbasin.core.catalogue import CATALOGUE, card_of, cards, entry
from fedbasin.core.expressions import parse
from fedbasin.core.method import Method, Replies, ReplyError, Served, Wrapper
from fedbasin.core.protocols import shared_prefix
from fedbasin.core.rule import LocalRule, Setting
from fedbasin.core.vectors import shares, weighted_mean
from fedbasin.methods import IMA, FedAvg
from fedbasin.sim import Population
from fedbasin.testing import (
    LAWS,
    check_method,
    law_bad_replies_are_refused,
    law_prefix_is_shared,
    toy_federation,
)

CARDS = cards("method")


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__.removeprefix("law_"))
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_law(card, law):
    if law.__name__ in card.exempt:
        assert card.exempt[law.__name__]
        pytest.skip(card.exempt[law.__name__])
    law(card.make())


def test_exemptions_name_laws_that_exist():
    known = {law.__name__ for law in LAWS}
    for card in CARDS:
        assert set(card.exempt) <= known, card.name
        assert not isinstance(card.is_fedavg_when, str) or card.is_fedavg_when.startswith("never:")
    assert fedbasin.methods


SETTINGS = """
adabest(mu=0.02, beta=0.8, score='mean', weighting='uniform')
bucketing(fedavg, size=2)
bulyan(hostile=0.1)
centered_clipping(tau=0.1, iterations=1)
krum(hostile=0.2, keep=0)
norm_bound(fedavg, times=1.0, bound=0.0, claims=5.0, action='clip')
rfa(iterations=10, nu=1e-05, weighting='uniform')
trimmed_mean(hostile=0.2)
balancefl(noise=True, distil=1.0, temperature=2.0, entropy=0.002, weighting='samples')
creff(features=100, match=100, match_lr=0.1, epochs=300, lr=0.01, batch=32, weighting='samples')
dp(fedavg(weighting='uniform'), clip=1.0, noise=1.0, adaptive=False, quantile=0.5, delta=1e-05)
dp(noise_by='server')
fedacg(momentum=0.85, beta=0.01, weighting='uniform')
fedadagrad(fedavg, lr=0.1, beta1=0.0, tau=0.001, first='tau')
fedadam(fedavg, lr=0.01, beta1=0.9, beta2=0.99, tau=0.001, first='tau', restart=1.0)
fedasam(rho=0.7, eta=0.2, weighting='samples')
fedavg(weighting='samples')
fedavgm(fedavg, lr=1.0, momentum=0.9)
fedbe(fedavg, samples=10, scale=0.1, mode='gaussian', mix='probabilities', temperature=0.5)
fedbe(epochs=20, lr=0.001, optimiser='sgd', batch=128, average_from=500, average_every=25)
fedcda(memory=3, batches=3, warmup=0.25, smoothness=1.0, strategy='greedy', weighting='uniform')
fedcm(alpha=0.1, server_lr=1.0, weighting='uniform', counted='steps')
feddf(fedavg, epochs=100, lr=0.001, optimiser='adam', betas=(0.9, 0.999), batch=128, clip=5.0)
feddf(cosine=True, holdout=0.0, patience=0)
feddyn(alpha=0.1, score='mean', by_size=False, guard=1e999, weighting='uniform')
fedexp(fedavg, eps=0.001, average=True, follow_lr=False)
fedfa(pull=0.1, keep=0.9, head_lr=0.001, calibrate_from=0.0, weighting='samples')
fedgen(alpha=10.0, beta=10.0, decay=0.98, synthetic=20, weighting='samples')
fedgen(steps=50, lr=0.0003, weight_decay=0.01, batch=32, noise=32, hidden=256)
fedgma(fedavg, threshold=0.8, mask='soft', vote='clients', lr=1.0)
fedgrab(kp=10.0, ki=0.01, kd=0.1, cut=0.95, weighting='samples')
fedlaw(learn='both', gamma=1.0, guard=5.0, guard_growth=False, swa=False, weighting='samples')
fedlaw(parameterisation='exponential', epochs=100, lr=0.01, batch=128, patience=0, server_lr=1.0)
fedlesam(rho=0.1, weighting='uniform')
fedma(fedavg, reference='server', sweeps=20)
fednova(effective='lengths', weighting='samples')
fedprox(mu=0.01, weighting='samples')
fedsam(rho=0.1, weighting='samples')
fedsmoo(rho=0.1, beta=10.0, sends='paper', weighting='uniform')
fedspeed(rho=0.1, lam=10.0, share=1.0, server='paper', weighting='uniform')
fedwcm(score='scarcity', temperature='imbalance', tau=0.3, momentum='mix', unequal=False)
fedwcm(alpha=0.1, alpha_max=0.9, kappa=0.3, counted='steps', server_lr=1.0)
fedyogi(fedavg, lr=0.01, beta1=0.9, beta2=0.99, tau=0.001, first='tau', restart=1.0)
gamf(fedavg(weighting='uniform'), tau=0.05, decay=0.9, tau_end=0.005, sweeps=20, joint=True)
ima(fedavg, window=5, start=0.75, decay='exponential', rate=0.03, low=5e-05, feedback=True)
ldawa(clamp=False, weighting='uniform')
mime(momentum=0.9, server_lr=1.0, weighting='uniform')
mimelite(momentum=0.9, server_lr=1.0, weighting='uniform')
mofedsam(rho=0.1, alpha=0.1, server_lr=1.0, weighting='uniform')
scaffold(server_lr=1.0, option='steps', weighting='uniform')
serverft(fedavg, epochs=2, lr=0.001, optimiser='adam', betas=(0.5, 0.999), batch=128)
swa(fedavg, start=0.75, cycle=10, ratio=0.01, feedback=False)
wima(fedavg, window=100, stride=1, part='all')
"""


@pytest.mark.parametrize("source", SETTINGS.split("\n")[1:-1])
def test_settings_left_out_are_those_of_the_papers(source):
    assert parse(source, "method") == parse(source.split("(")[0], "method")


@dataclass(frozen=True)
class Cautious(LocalRule):
    def cautions(self, setting):
        yield "mind this"


@pytest.mark.parametrize(
    "card",
    [card for card in CARDS if any(p.name == "local" for p in card.parameters)],
    ids=lambda card: card.name,
)
def test_the_cautions_of_a_clients_rule_are_passed_on(card):
    even = Setting(momentum=0, weight_decay=0, clip=None, ragged=False, statistics=False)
    assert "mind this" in list(card.make(local=Cautious()).cautions(even))


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_wrapper_that_looks_at_replies_says_itself_whether_they_may_be_averaged(card):
    """An average of the replies as they arrive is not what such a wrapper would see."""
    kind = type(card.make())
    if issubclass(kind, Wrapper) and kind.aggregate is not Wrapper.aggregate:
        assert kind.streams is not Wrapper.streams


MEAN_ALONE = {"adabest", "balancefl", "fedacg", "fedavg", "fedgrab", "fedprox"}
MEAN_ALONE |= {"fedasam", "fedlesam", "fedsam"}


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_methods_of_the_mean_alone_stream_and_others_do_not(card):
    """Around FedAvg, a wrapper that takes no look at the replies streams too."""
    method = card.make()
    base = method.base if isinstance(method, Wrapper) else method
    looks = {"fedbe", "feddf", "fedexp", "fedgma", "fedma", "gamf"}
    looks |= {"bucketing", "dp", "norm_bound"}
    streams = card_of(base).name in MEAN_ALONE and card.name not in looks
    assert method.streams() == (base.weighting if streams else None)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_client_without_rows_spoils_nothing(card):
    """Executors leave such clients out; whoever lets one in gets no NaN from it."""
    federation = toy_federation(card.make(), participation="count(clients=6)")
    people = federation.population
    rows = [np.arange(lo, hi) for lo, hi in itertools.pairwise((0, 16, 25, 32, 37, 41))]
    empty = np.array([], dtype=np.int64)
    people = Population.of(people.inputs.numpy(), people.labels.numpy(), [*rows, empty])
    federation = replace(
        federation,
        population=people,
        executor=replace(federation.executor, population=people),
        context=replace(federation.context, class_counts=people.class_counts(3)),
    )
    for after, _ in federation.rounds_from(*federation.begin()):
        assert torch.isfinite(after.send).all()


@dataclass(frozen=True)
class Broken(FedAvg):
    """FedAvg with one fault."""

    fault: str = ""

    def aggregate(self, state, server, replies, context):
        models, share = replies.models, shares(replies.weights)
        if self.fault == "order":
            share = torch.linspace(1, 2, len(models), dtype=torch.float64)
            share = share / share.sum()
        if self.fault == "scale":
            share = replies.weights / 20
        if self.fault == "ghost":
            share = torch.full_like(share, 1 / len(share))
        if self.fault == "mutates":
            models.mul_(2)
        if self.fault == "dtype":
            models = models.float()
        mean = weighted_mean(models, share)
        if self.fault == "score":
            return Served(mean, mean * 2), state
        return Served(mean, mean), state


@pytest.fixture
def broken_card():
    entry("method", name="broken")(Broken)
    yield
    del CATALOGUE["broken"]


@pytest.mark.parametrize("fault", ["order", "scale", "ghost", "mutates", "dtype", "score", ""])
def test_the_laws_catch_broken_methods(fault, broken_card):
    method = Broken(fault=fault)
    if fault == "":  # a faithful copy fails only because it is FedAvg under another name
        check = [law for law in LAWS if law.__name__ != "law_differs_by_default"]
        check_method(method, check)
    else:
        with pytest.raises((AssertionError, RuntimeError)):
            check_method(method, [law for law in LAWS if law.__name__ != "law_differs_by_default"])


def test_an_engine_that_lets_bad_replies_through_breaks_the_law(monkeypatch):
    monkeypatch.setattr(Replies, "check", lambda self, server: None)
    with pytest.raises(AssertionError, match="fedavg was given a reply with nan"):
        law_bad_replies_are_refused(FedAvg())


def test_an_error_that_names_no_client_breaks_the_law(monkeypatch):
    def check(self, server):
        raise ReplyError("somebody sent NaN")

    monkeypatch.setattr(Replies, "check", check)
    with pytest.raises(AssertionError, match=r"does not name client 0: .*somebody sent NaN"):
        law_bad_replies_are_refused(FedAvg())


@dataclass(frozen=True)
class Whole(FedAvg):
    """Counts on all of the cohort that it drew."""

    def aggregate(self, state, server, replies, context):
        served, state = super().aggregate(state, server, replies, context)
        lost = torch.tensor(float(len(replies.clients) - 4))
        return served.moved(served.send + 0 / (lost == 0).double()), state


def test_a_method_that_fails_without_a_refused_client_breaks_the_law():
    with pytest.raises(AssertionError, match="without one client's reply `send` is not"):
        law_bad_replies_are_refused(Whole())


LATE = """
ima(window=2, start=0.5)
wima(ima(scaffold, window=2, start=0.5), window=3)
fedadam(ima(window=3, start=0.5), restart=0.5)
fedyogi(restart=0.25)
"""


@pytest.mark.parametrize("source", LATE.split("\n")[1:-1])
def test_late_methods_share_a_prefix(source):
    method = parse(source, "method")
    assert shared_prefix(method, 12)[0] != method, "so that the law checks something"
    law_prefix_is_shared(method)


class TooLate(IMA):
    """Says that it parts from the inner method one model after it does."""

    def shared_prefix(self, rounds):
        inner, common = super().shared_prefix(rounds)
        return inner, common + self.window


class Restless(IMA):
    """Begins its inner method anew where it parts from it."""

    def state_from_prefix(self, state, server, context):
        return super().state_from_prefix(self.inner.init(server, context), server, context)


@pytest.mark.parametrize(
    ("kind", "words"),
    [(TooLate, "does not equal fedavgm"), (Restless, "continued from the prefix, `send`")],
)
def test_the_laws_catch_a_prefix_that_is_not_shared(kind, words):
    method = kind(parse("fedavgm", "method"), window=2, start=0.5)
    with pytest.raises(AssertionError, match=words):
        law_prefix_is_shared(method)


@dataclass(frozen=True)
class Forgetful(FedAvg):
    """Its state lives on a mutable attribute, so resuming loses it."""

    calls = 0

    def aggregate(self, state, server, replies, context):
        type(self).calls += 1
        served, state = super().aggregate(state, server, replies, context)
        return Served(served.send * type(self).calls, served.score), state


def test_hidden_state_breaks_the_resume_law():
    entry("method", name="forgetful")(Forgetful)
    try:
        with pytest.raises(AssertionError, match="resuming") as broken:
            check_method(Forgetful(), [law for law in LAWS if "resume" in law.__name__])
        (note,) = broken.value.__notes__
        assert "Forgetful breaks law_resume" in note and 'exempt={"law_resume' in note
    finally:
        del CATALOGUE["forgetful"]


def test_a_method_that_is_not_in_the_catalogue_is_told_so():
    class Nameless(FedAvg):
        pass

    with pytest.raises(KeyError, match="Nameless is not in the catalogue"):
        check_method(Nameless())
    assert issubclass(Nameless, Method)

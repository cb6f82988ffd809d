"""Every method of the catalogue obeys every law, or says on its card why it cannot."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import fedbasin.methods
from fedbasin.core.catalogue import CATALOGUE, cards, entry
from fedbasin.core.method import Method, Served, Wrapper
from fedbasin.core.vectors import shares, weighted_mean
from fedbasin.methods import FedAvg
from fedbasin.sim import Population
from fedbasin.testing import LAWS, check_method, toy_federation

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


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_wrapper_that_looks_at_replies_says_itself_whether_they_may_be_averaged(card):
    """An average of the replies as they arrive is not what such a wrapper would see."""
    kind = type(card.make())
    if issubclass(kind, Wrapper) and kind.aggregate is not Wrapper.aggregate:
        assert kind.streams is not Wrapper.streams


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_client_without_rows_spoils_nothing(card):
    """Executors leave such clients out; whoever lets one in gets no NaN from it."""
    federation = toy_federation(card.make(), participation="count(clients=6)")
    people = federation.executor.population
    rows = [np.arange(lo, hi) for lo, hi in itertools.pairwise((0, 16, 25, 32, 37, 41))]
    empty = np.array([], dtype=np.int64)
    people = Population.of(people.inputs.numpy(), people.labels.numpy(), [*rows, empty])
    federation = replace(
        federation,
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
        with pytest.raises(AssertionError, match="resuming"):
            check_method(Forgetful(), [law for law in LAWS if "resume" in law.__name__])
    finally:
        del CATALOGUE["forgetful"]


def test_a_method_that_is_not_in_the_catalogue_is_told_so():
    class Nameless(FedAvg):
        pass

    with pytest.raises(KeyError, match="Nameless is not in the catalogue"):
        check_method(Nameless())
    assert issubclass(Nameless, Method)

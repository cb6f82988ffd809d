import pytest
import torch
from local.directions import Small
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedbasin.core.expressions import ExpressionError, parse
from fedbasin.core.rule import Setting
from fedbasin.local import SGD, KeptMomentum, Prox, batches
from fedbasin.methods import FedAvg, Mime
from fedbasin.sim.loop import client_key
from fedbasin.testing import (
    LAWS,
    TOY_TASKS,
    check_method,
    law_cohort_equals_loop,
    law_is_fedavg_when_declared,
    law_right_or_refused_on_every_task,
    toy_federation,
    trajectory,
)

ALL, HALF = "count(clients=6)", "count(clients=3)"


class Living:
    """FedAvg whose clients each make torch's own SGD once, for the whole run.

    Only the first model, cohorts, batches and learning rates are taken from fedbasin.
    """

    def __init__(self, federation, beta, decay, mu=0.0):
        self.federation, self.mu = federation, mu
        self.population = federation.population
        self.modules = [Small().double() for _ in federation.eligible]
        self.optimisers = [
            torch.optim.SGD(module.parameters(), lr=1.0, momentum=beta, weight_decay=decay)
            for module in self.modules
        ]

    def models(self):
        """Yield the mean of the clients' models, by their rows, after each round."""
        server = self.federation.net.initial()[0]
        for round in range(self.federation.rounds):
            cohort = self.federation.cohort(round)[1].tolist()
            ends = torch.stack([self.train(round, client, server) for client in cohort])
            rows = torch.from_numpy(self.population.sizes[cohort]).double()
            server = rows / rows.sum() @ ends
            yield server

    def train(self, round, client, server):
        """Write the server's model over the client's and train it with what it is used to."""
        module, optimiser = self.modules[client], self.optimisers[client]
        vector_to_parameters(server.clone(), module.parameters())
        anchors = [parameter.detach().clone() for parameter in module.parameters()]
        plan, shard = self.federation.schedule(round), self.population.shard(client)
        optimiser.param_groups[0]["lr"] = plan.lr
        key = client_key(self.federation.key, round, client).tensor()
        for index in batches(key, plan, len(shard.labels), 4):
            optimiser.zero_grad()
            logits = module(shard.inputs[index].double() / 255)
            nn.functional.cross_entropy(logits, shard.labels[index]).backward()
            for parameter, anchor in zip(module.parameters(), anchors, strict=True):
                parameter.grad += self.mu * (parameter.detach() - anchor)
            optimiser.step()
        return parameters_to_vector(module.parameters()).detach()


def check_living(local, *optimiser, participation=ALL):
    """FedAvg with the rules sends the models of the optimisers that live, for three rounds."""
    method, settings = FedAvg(local=local), {"rounds": 3, "participation": participation}
    theirs = Living(toy_federation(method, **settings), *optimiser).models()
    for ours, wanted in zip(trajectory(method, **settings), theirs, strict=True):
        torch.testing.assert_close(ours.send, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("participation", [ALL, HALF])
@pytest.mark.parametrize(("beta", "decay"), [(0.9, 0.0), (0.8, 0.05), (0.0, 0.05)])
def test_clients_step_as_torch_optimisers_that_live_through_the_run(beta, decay, participation):
    check_living(KeptMomentum(beta, decay), beta, decay, participation=participation)


@pytest.mark.parametrize("first", [True, False])
def test_other_rules_act_inside_the_momentum_wherever_they_are_named(first):
    rules = KeptMomentum(0.8, 0.05), Prox(0.7)
    check_living(rules if first else rules[::-1], 0.8, 0.05, 0.7)


def test_a_method_s_own_correction_acts_inside_the_momentum():
    settings = {"rounds": 3, "participation": ALL}
    ours = trajectory(parse("fedprox(mu=0.7, local=kept_momentum(0.8))", "method"), **settings)
    theirs = trajectory(FedAvg(local=(KeptMomentum(0.8), Prox(0.7))), **settings)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.send, other.send, rtol=1e-12, atol=1e-14)


def test_a_method_that_asks_for_two_gradients_a_step_moves_the_momentum_once():
    calls = []

    class Counting(KeptMomentum):
        def direction(self, carry, vector, gradient):
            calls.append(vector)
            return super().direction(carry, vector, gradient)

    counts = []
    for method in (FedAvg(local=Counting()), Mime(local=Counting())):
        trajectory(method, rounds=1, participation=ALL)
        counts.append(len(calls))
        calls.clear()
    assert counts[0] == counts[1] > 0


def test_without_momentum_and_decay_it_is_fedavg():
    method = FedAvg(local=KeptMomentum(beta=0.0, decay=0.0))
    for ours, plain in zip(trajectory(method), trajectory(FedAvg()), strict=True):
        torch.testing.assert_close(ours.send, plain.send, rtol=1e-12, atol=1e-14)


def test_only_the_first_round_is_that_of_momentum_that_starts_at_zero():
    ours = trajectory(FedAvg(local=KeptMomentum(0.8, 0.05)), rounds=2, participation=ALL)
    fresh = trajectory(FedAvg(), optimiser=SGD(0.8, 0.05), rounds=2, participation=ALL)
    torch.testing.assert_close(ours[0].send, fresh[0].send, rtol=1e-12, atol=1e-14)
    assert (ours[1].send - fresh[1].send).abs().max() > 0.01


def test_a_client_that_stays_away_keeps_its_momentum():
    federation = toy_federation(FedAvg(local=KeptMomentum()), participation=HALF)
    server, states = federation.begin()

    def momenta():
        return [states.get(client)[0].momentum.clone() for client in range(6)]

    before, waited = momenta(), 0
    assert all(momentum.abs().max() == 0 for momentum in before)
    for round, _ in enumerate(federation.rounds_from(server, states)):
        after, cohort = momenta(), federation.cohort(round)[1].tolist()
        moved = [c for c in range(6) if not torch.equal(before[c], after[c])]
        assert moved == sorted(cohort)
        waited += sum(bool(before[c].abs().max() > 0) for c in range(6) if c not in cohort)
        before = after
    assert waited > 0, "nobody who had momentum stayed away"


def test_it_obeys_the_laws():
    """Resume, engines, payload: all but that of FedAvg, which FedAvg with a rule is not."""
    never = (law_is_fedavg_when_declared, law_right_or_refused_on_every_task)  # which asks it too
    laws = [law for law in LAWS if law not in never]
    assert len(laws) == len(LAWS) - 2
    method = parse("fedavg(local=kept_momentum(beta=0.8, decay=0.05))", "method")
    check_method(method, laws)
    for task in TOY_TASKS:
        law_cohort_equals_loop(method, task)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, []),
        ({"momentum": 0.9}, ["local.momentum = 0.9"]),
        ({"weight_decay": 0.01}, ["local.weight_decay = 0.01"]),
        (
            {"momentum": 0.5, "weight_decay": 0.1},
            ["local.momentum = 0.5", "local.weight_decay = 0.1"],
        ),
    ],
)
def test_a_second_momentum_or_decay_is_named_with_what_to_set(given, named):
    setting = Setting(momentum=0.0, weight_decay=0.0, clip=None, ragged=True, statistics=True)
    found = list(FedAvg(local=KeptMomentum()).cautions(setting._replace(**given)))
    assert [caution.split(" comes")[0] for caution in found] == named
    for caution, name in zip(found, named, strict=True):
        assert f"set {name.split(' = ')[0]} = 0" in caution


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kept_momentum(beta=1)", r"beta must be in \[0, 1\), got 1"),
        ("kept_momentum(beta=-0.1)", r"beta must be in \[0, 1\), got -0.1"),
        ("kept_momentum(decay=-0.01)", "decay must be at least 0, got -0.01"),
    ],
)
def test_bad_settings_are_refused(text, message):
    with pytest.raises(ExpressionError, match=message):
        parse(text, "rule")


def test_what_is_not_a_number_is_refused():
    for name in ("beta", "decay"):
        with pytest.raises(ValueError, match=f"{name} must be .*, got nan"):
            KeptMomentum(**{name: float("nan")})

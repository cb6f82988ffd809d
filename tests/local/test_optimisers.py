"""Optimisers against `torch.optim`, in every engine, and kept between rounds."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fedbasin.core.catalogue import cards, needs_of
from fedbasin.core.expressions import parse, text
from fedbasin.core.method import Plan
from fedbasin.core.net import Net
from fedbasin.core.rng import root
from fedbasin.core.round import Launch, Sent
from fedbasin.core.state import load, same, save
from fedbasin.core.tree import tensors
from fedbasin.local import SGD, Adam, AdamW, KeptMomentum, Prox, Received, Shard, Trainer, batches
from fedbasin.local.optimisers import Optimiser, check_plain_steps
from fedbasin.local.step import Point, step
from fedbasin.methods import FedAvg, FedCM, FedNova, FedWCM, MoFedSAM, Scaffold
from fedbasin.sim.clients import ClientStates
from fedbasin.sim.cohort import CohortExecutor
from fedbasin.sim.loop import client_key
from fedbasin.testing import toy_federation, trajectory

KEY = root(0).fold("client", 3, 4).tensor()
PAIRS = {
    "sgd": (SGD(), torch.optim.SGD, {}),
    "sgd decay": (SGD(weight_decay=0.1), torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (SGD(0.9, 1e-2), torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-2}),
    "nesterov": (
        SGD(0.9, 1e-2, nesterov=True),
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 1e-2, "nesterov": True},
    ),
    "adam": (Adam(), torch.optim.Adam, {}),
    "adam decay": (
        Adam((0.5, 0.9), 1e-3, 0.1),
        torch.optim.Adam,
        {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1},
    ),
    "adam without means": (Adam((0.0, 0.0)), torch.optim.Adam, {"betas": (0.0, 0.0)}),
    "adamw": (AdamW(), torch.optim.AdamW, {}),
    "adamw decay": (
        AdamW((0.8, 0.99), weight_decay=0.3),
        torch.optim.AdamW,
        {"betas": (0.8, 0.99), "weight_decay": 0.3},
    ),
}
every_pair = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def transform(raw, key=None):
    return raw.to(torch.float64) / 255


def make_module():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def make_shard(rows=11, seed=0):
    rng = np.random.default_rng(seed)
    inputs = torch.from_numpy(rng.integers(0, 256, (rows, 3)).astype(np.uint8))
    return Shard(inputs, torch.from_numpy(rng.integers(0, 2, rows)))


def torch_client(module, optimiser, shard, plan, key=KEY):
    """Train a module by hand with torch's own optimiser; return its parameters as one vector."""
    for index in batches(key, plan, len(shard.labels), 4):
        optimiser.zero_grad()
        logits = module(transform(shard.inputs[index]))
        nn.functional.cross_entropy(logits, shard.labels[index]).backward()
        optimiser.step()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


# --- against torch.optim


@every_pair
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_fifty_steps_are_those_of_torch(pair, dtype, tolerance):
    """The oracle steps in float64; a float32 of ours stays as near as float32 allows."""
    ours, theirs, settings = pair
    draw = torch.Generator().manual_seed(0)
    vector = torch.randn(40, generator=draw, dtype=torch.float64)
    leaf = nn.Parameter(vector.clone())
    oracle = theirs([leaf], lr=0.03, **settings)
    vector = vector.to(dtype)
    state = ours.init(vector)
    for _ in range(50):
        gradient = torch.randn(40, generator=draw, dtype=torch.float64)
        leaf.grad = gradient
        oracle.step()
        vector, state = ours.update(gradient.to(dtype), state, vector, 0.03)
        assert vector.dtype == dtype
        torch.testing.assert_close(vector.double(), leaf.detach(), rtol=tolerance, atol=tolerance)


@every_pair
def test_a_whole_client_trains_as_with_torch(pair):
    ours, theirs, settings = pair
    module, shard, plan = make_module(), make_shard(), Plan(0.02, None, 50)
    net = Net(make_module(), dtype=torch.float64)
    given = Received(*net.initial(), (), (), 0, KEY)
    trained = Trainer(net, (), ours, 4, transform, 2).train(shard, given, plan)
    oracle = theirs(module.parameters(), lr=0.02, **settings)
    wanted = torch_client(module, oracle, shard, plan)
    assert trained.steps == 50
    torch.testing.assert_close(trained.vector, wanted, rtol=1e-9, atol=1e-11)
    assert torch.equal(given.vector, net.initial()[0]), "what was received is not written over"


@every_pair
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it traces
@pytest.mark.parametrize("compiled", [False, True], ids=["vmap", "compiled"])
def test_a_cohort_trains_as_one_client_after_another(pair, compiled):
    federation = toy_federation(FedAvg(), optimiser=pair[0], clip=1.0)
    loop = federation.executor
    cohort = CohortExecutor(
        loop.trainer, loop.population, loop.key, compiled=compiled, backend="aot_eager"
    )
    vector, buffers = loop.trainer.net.initial()
    sent = Sent(vector, buffers, (), 0)
    states = ClientStates(loop.trainer.zero_state(vector), vector)
    who, plan = np.array([5, 0, 2, 3]), Plan(0.05, 3)
    request = Launch(who, sent, plan, states)
    wanted, found = (e.train([request])[0].replies for e in (loop, cohort))
    torch.testing.assert_close(found.models, wanted.models, rtol=1e-10, atol=1e-12)
    assert torch.equal(found.effective_steps, wanted.effective_steps)
    if compiled:
        assert cohort.counters.compiled > 0


def test_the_bias_correction_keeps_the_digits_of_a_float32():
    """Written as 1 - beta^t it is off by 1e-5 in the first steps."""
    ones = torch.ones(1)
    adam = Adam((0.9, 0.999), eps=1e-30)
    vector, state = torch.zeros(1), adam.init(ones)
    for taken in range(1, 20):
        before = vector
        vector, state = adam.update(ones, state, vector, 1.0)
        assert float(before - vector) == pytest.approx(1.0, abs=1e-6 * taken)


def test_a_pace_scales_the_whole_step_and_a_rate_may_be_a_tensor():
    draw = torch.Generator().manual_seed(3)
    vector, direction = torch.randn(2, 9, generator=draw, dtype=torch.float64)
    half = torch.tensor(0.5, dtype=torch.float64)
    for ours, _, _ in PAIRS.values():
        state = ours.init(vector)
        paced, _ = ours.update(direction, state, vector, 0.1, [None, half])
        slower, _ = ours.update(direction, state, vector, torch.tensor(0.05, dtype=torch.float64))
        torch.testing.assert_close(paced, slower, rtol=1e-12, atol=0)


# --- what steps add up to


def test_effective_steps_are_how_far_a_gradient_of_one_leads():
    """By stepping along it; torch's own steps are the oracle."""
    for ours, theirs, settings in list(PAIRS.values())[:4]:
        ours = replace(ours, weight_decay=0.0)
        given = {name: value for name, value in settings.items() if name != "weight_decay"}
        for pull in (0.0, 0.3):
            leaf = nn.Parameter(torch.zeros(1, dtype=torch.float64))
            oracle = theirs([leaf], lr=1.0, **given)
            for steps in range(1, 12):
                leaf.grad = 1 + pull * leaf.detach()
                oracle.step()
                counted = ours.effective_steps(steps, pull)
                assert counted == pytest.approx(-float(leaf.detach())), (ours, pull, steps)


def test_adaptive_steps_have_no_length_and_count_as_steps():
    assert Adam().adaptive and AdamW().adaptive and not SGD(0.9, nesterov=True).adaptive
    assert Adam().effective_steps(7) is None
    net = Net(make_module(), dtype=torch.float64)
    trainer = Trainer(net, (), AdamW(), 4, transform, 2)
    trained = trainer.train(make_shard(), Received(*net.initial(), (), (), 0, KEY), Plan(0.01, 2))
    assert trained.length == trained.steps == 6 and trained.lr_sum == pytest.approx(0.06)


COUNTING = ["fednova", "fedcm", "fedwcm", "mofedsam"]


def test_methods_that_count_plain_steps_say_so_and_are_refused():
    found = [card.name for card in cards("method") if "plain_sgd" in card.needs]
    assert sorted(found) == sorted(COUNTING)
    for method in (FedNova(), FedCM(), FedWCM(), MoFedSAM(), parse("ima(fedcm)", "method")):
        check_plain_steps(method, SGD(0.9))
        check_plain_steps(method, SGD(), kept=True)
        with pytest.raises(ValueError, match=r"adamw cannot be counted.*sgd.*scaffold"):
            check_plain_steps(method, AdamW())
        with pytest.raises(ValueError, match=r"sgd\(momentum=0.9\) that is kept.*keep_optimiser"):
            check_plain_steps(method, SGD(0.9), kept=True)
    check_plain_steps(Scaffold(), AdamW(), kept=True)


def test_fednova_counts_nesterov_steps_beside_a_pull():
    """The server counts with the clients' optimiser, not with its momentum alone."""
    sgd, method = SGD(0.5, nesterov=True), FedNova(local=Prox(0.4))
    federation = toy_federation(method, optimiser=sgd, rounds=1)
    server, states = federation.begin()
    ((after, record),) = federation.rounds_from(server, states)
    cohort = federation.cohort(0)[1]
    plan = federation.schedule(0)
    sent = Sent(server.send, server.buffers, ((),), 0)
    request = Launch(cohort, sent, plan, federation.begin()[1])
    replies = federation.executor.train([request])[0].replies
    lengths = [sgd.effective_steps(int(k), 0.4 * plan.lr) for k in replies.steps]
    share = (replies.weights / replies.weights.sum()).numpy()
    tau = share @ np.array(lengths)
    moved = (replies.models - server.send).numpy() / np.array(lengths)[:, None]
    np.testing.assert_allclose(after.send, server.send.numpy() + tau * (share @ moved), rtol=1e-9)
    assert record.notes["effective"] == pytest.approx(tau)


# --- kept between rounds


def torch_clients_of_a_run(federation, make):
    """FedAvg whose clients each have torch's own optimiser for the whole run."""
    server, _ = federation.begin()
    net, people = federation.net, federation.executor.population
    modules, optimisers = {}, {}
    vector = server.send
    sent = []
    for t in range(federation.rounds):
        plan, ends, sizes = federation.schedule(t), [], []
        for client in federation.cohort(t)[1].tolist():
            if client not in modules:
                modules[client] = nn.Linear(4, 3).double()
                optimisers[client] = make(modules[client].parameters())
            module, optimiser = modules[client], optimisers[client]
            module.load_state_dict(net.state_dict(vector, server.buffers))
            for group in optimiser.param_groups:
                group["lr"] = plan.lr
            shard = people.shard(client)
            key = client_key(federation.key, t, client).tensor()
            ends.append(torch_client(module, optimiser, shard, plan, key))
            sizes.append(len(shard.labels))
        weights = torch.tensor(sizes, dtype=torch.float64)
        vector = (torch.stack(ends) * weights[:, None]).sum(0) / weights.sum()
        sent.append(vector)
    return sent


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adam decay", "adamw"])
def test_a_kept_optimiser_is_torchs_that_lives_through_the_run(name):
    ours, theirs, settings = PAIRS[name]
    torch.manual_seed(0)
    given = {"module": nn.Linear(4, 3), "optimiser": ours, "keep_optimiser": True, "rounds": 5}
    federation = toy_federation(FedAvg(), **given)
    wanted = torch_clients_of_a_run(federation, lambda p: theirs(p, lr=1.0, **settings))
    servers = [server for server, _ in federation.rounds_from(*federation.begin())]
    for server, vector in zip(servers, wanted, strict=True):
        torch.testing.assert_close(server.send, vector, rtol=1e-8, atol=1e-10)
    fresh = trajectory(FedAvg(), module=given["module"], optimiser=ours, rounds=5)
    assert torch.equal(fresh[0].send, servers[0].send), "the first round of every client is equal"
    assert not torch.allclose(fresh[-1].send, servers[-1].send, rtol=1e-6)


def test_a_kept_momentum_is_the_rule_of_that_name():
    kept = trajectory(FedAvg(), optimiser=SGD(0.8, 0.05), keep_optimiser=True, rounds=5)
    ruled = trajectory(FedAvg(local=KeptMomentum(0.8, 0.05)), rounds=5)
    for a, b in zip(kept, ruled, strict=True):
        torch.testing.assert_close(a.send, b.send, rtol=1e-10, atol=1e-12)


def test_what_is_kept_stays_with_its_client_and_is_not_written_over():
    """Also where steps write over their own tensors."""
    for optimiser in (SGD(0.9), AdamW()):
        federation = toy_federation(FedAvg(), optimiser=optimiser, keep_optimiser=True)
        server, states = federation.begin()
        assert not any(bool(leaf.any()) for leaf in tensors(states.get(0)))
        zero = [leaf.clone() for leaf in tensors(states.get(0))]
        sent = Sent(server.send, server.buffers, (), 0)
        plan = Plan(0.1, 1)
        first = federation.executor.one(0, sent, plan, states.get(0), federation.key)
        again = federation.executor.one(0, sent, plan, states.get(0), federation.key)
        assert same(first.own, again.own) and same(tuple(zero), tuple(tensors(states.get(0))))
        later = federation.executor.one(0, sent, plan, first.own, federation.key)
        assert not same(later.own, first.own)
        empty = federation.executor.one(0, sent, Plan(0.1, None, 0), first.own, federation.key)
        assert same(empty.own, first.own)


@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize("method", [FedAvg(), Scaffold()], ids=str)
def test_resuming_after_any_round_gives_the_same_bits(method, kept, tmp_path):
    given = {"optimiser": AdamW(weight_decay=0.1), "keep_optimiser": kept}
    whole = trajectory(method, **given)
    server, states = toy_federation(method, **given).begin()
    for wanted in whole:
        federation = toy_federation(method, **given)
        server, _ = next(iter(federation.rounds_from(server, states)))
        assert same(server, wanted)
        save(tmp_path / "state.safetensors", (server, states.kept()))
        fresh, states = federation.begin()
        server, rows = load(tmp_path / "state.safetensors", (fresh, states.kept()))
        states.restore(rows)


ACCEPTING = [c.make() for c in cards("method") if "plain_sgd" not in needs_of(c.make())]


@pytest.mark.parametrize("method", ACCEPTING, ids=str)
def test_every_method_that_accepts_adamw_gives_finite_models_of_its_own(method):
    """The laws compare the loop with the cohort; here it is shown that AdamW was used."""
    plain = trajectory(method, optimiser=SGD())[-1]
    adaptive = trajectory(method, optimiser=AdamW())[-1]
    assert torch.isfinite(adaptive.send).all() and torch.isfinite(adaptive.score).all()
    assert not torch.allclose(plain.send, adaptive.send)


# --- of one's own


class Count(NamedTuple):
    steps: torch.Tensor


@dataclass(frozen=True)
class SignDescent(Optimiser):
    """Step by the sign of the gradient; the rate falls with the steps."""

    power: float = 0.5

    def init(self, vector):
        return Count(torch.zeros((), dtype=torch.int64))

    def update(self, direction, state, vector, lr, paces=()):
        steps = state.steps + 1
        return vector - lr * steps.to(vector.dtype) ** -self.power * direction.sign(), Count(steps)


def test_an_optimiser_of_ones_own_is_used_as_an_object_in_loop_and_cohort():
    federation = toy_federation(FedAvg(), optimiser=SignDescent(), keep_optimiser=True)
    loop = federation.executor
    cohort = CohortExecutor(loop.trainer, loop.population, loop.key, compiled=False)
    ours, theirs = federation, replace(federation, executor=cohort)
    for (a, _), (b, _) in zip(*(f.rounds_from(*f.begin()) for f in (ours, theirs)), strict=True):
        torch.testing.assert_close(a.send, b.send, rtol=1e-9, atol=1e-11)
    point = Point(torch.zeros(2), SignDescent().init(torch.zeros(2)), torch.zeros(0), ())
    moved, state = SignDescent().update(torch.tensor([3.0, -2.0]), point.state, point.vector, 0.1)
    assert moved.tolist() == pytest.approx([-0.1, 0.1]) and int(state.steps) == 1
    assert "SignDescent" in str(SignDescent())


@dataclass(frozen=True)
class Halved(SGD):
    """A subclass with an update of its own."""

    def update(self, direction, state, vector, lr, paces=()):
        return super().update(direction / 2, state, vector, lr, paces)


def test_a_subclass_of_sgd_is_not_stepped_in_place_behind_its_back():
    halved = trajectory(FedAvg(), optimiser=Halved())
    plain = toy_federation(FedAvg(), optimiser=SGD())
    slow = replace(
        plain, schedule=lambda t: replace(plain.schedule(t), lr=plain.schedule(t).lr / 2)
    )
    for a, (b, _) in zip(halved, slow.rounds_from(*slow.begin()), strict=True):
        torch.testing.assert_close(a.send, b.send, rtol=1e-10, atol=1e-12)


# --- settings


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("sgd(momentum=1.0)", "momentum must be in"),
        ("sgd(weight_decay=-1.0)", "weight_decay must be at least 0"),
        ("sgd(nesterov=True)", "nesterov needs momentum"),
        ("adam(betas=(1.0, 0.9))", "betas must be two numbers in"),
        ("adamw(betas=(0.9, -0.1))", "betas must be two numbers in"),
        ("adam(eps=0.0)", "eps must be above 0"),
        ("adamw(weight_decay=-1.0)", "weight_decay must be at least 0"),
        ("adamax", "no optimiser is called 'adamax'; did you mean"),
        ("fedadam", "'fedadam' is a method, not an optimiser"),
    ],
)
def test_bad_settings_name_the_field(source, word):
    with pytest.raises(ValueError, match=word):
        parse(source, "optimiser")


def test_an_old_third_argument_of_sgd_is_refused():
    with pytest.raises(ValueError, match=r"nesterov must be True or False, got 0\.5"):
        SGD(0.9, 0.0, 0.5)


@pytest.mark.parametrize("card", cards("optimiser"), ids=lambda card: card.name)
def test_every_optimiser_reads_back_and_has_a_rate(card):
    made = card.make()
    assert parse(text(made), "optimiser") == made
    assert str(made) == card.name and math.isfinite(made.default_lr) and made.default_lr > 0
    assert card.summary


def test_defaults_are_torchs():
    for ours, theirs in ((Adam(), torch.optim.Adam), (AdamW(), torch.optim.AdamW)):
        defaults = theirs([nn.Parameter(torch.zeros(1))]).defaults
        for name in ("betas", "eps", "weight_decay"):
            assert getattr(ours, name) == defaults[name]
        assert ours.default_lr == defaults["lr"]


def test_the_direction_of_a_step_is_clipped_before_the_optimiser():
    net, shard = Net(make_module(), dtype=torch.float64), make_shard()
    vector, buffers = net.initial()
    trainer = Trainer(net, (), SGD(), 11, transform, 2, clip=1e-3)
    given = Received(vector, buffers, (), (), 0, KEY)
    trained = trainer.train(shard, given, Plan(1.0, 1))
    assert float((trained.vector - vector).norm()) == pytest.approx(1e-3, rel=1e-2)
    with pytest.raises(ValueError, match="clip must be above 0 or left out, got 0"):
        replace(trainer, clip=0.0)
    assert step.__kwdefaults__["clip"] is None

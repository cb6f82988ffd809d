from dataclasses import replace

import numpy as np
import pytest
import torch
from methods.numpy_clients import NumpyClients, linear_federation, models

from fedbasin.core.method import Context, Plan
from fedbasin.core.rng import root
from fedbasin.core.vectors import Layout
from fedbasin.local import SGD
from fedbasin.methods import FedAvg, Scaffold
from fedbasin.methods.scaffold import Change
from fedbasin.testing import _one_round, replies_of, trajectory

LAYOUT = Layout(("head.weight",), ((2,),), head=("head.weight",))


def numpy_scaffold(world, rounds, option, weighting, server_lr, sgd):
    """Karimireddy et al., Algorithm 1, with per-client variates and 1/N on the server."""
    server, c = world.start.copy(), np.zeros_like(world.start)
    own = np.zeros((world.count, len(server)))
    for t in range(rounds):
        ends, sizes, changes = [], [], []
        for client in world.cohort(t):
            v, speed, raw = server.copy(), np.zeros_like(server), []
            for inputs, labels in world.steps(t, client):
                g = world.gradient(v, inputs, labels)
                raw.append(g)
                speed = sgd.momentum * speed + g + c - own[client] + sgd.weight_decay * v
                v = v - world.lr(t) * speed
            new = np.mean(raw, axis=0)
            if option == "full":
                new = world.gradient(server, *world.rows(client))
            ends.append(v)
            sizes.append(world.sizes[client] if weighting == "samples" else 1)
            changes.append(new - own[client])
            own[client] = new
        server = server + server_lr * (np.average(ends, axis=0, weights=sizes) - server)
        c = c + np.sum(changes, axis=0) / world.count
        yield server, c, own.copy()


@pytest.mark.parametrize("option", ["steps", "full"])
@pytest.mark.parametrize(("weighting", "server_lr"), [("uniform", 1.0), ("samples", 0.5)])
@pytest.mark.parametrize("sgd", [SGD(), SGD(0.5, 0.01)])
def test_scaffold_equals_a_plain_numpy_loop(option, weighting, server_lr, sgd):
    federation = linear_federation(Scaffold(server_lr, option, weighting), rounds=5, optimiser=sgd)
    oracle = numpy_scaffold(NumpyClients(federation), 5, option, weighting, server_lr, sgd)
    server, states = federation.begin()
    rounds = federation.rounds_from(server, states)
    for (after, _), (model, c, own) in zip(rounds, oracle, strict=True):
        np.testing.assert_allclose(after.send.numpy(), model, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(after.state.control.numpy(), c, rtol=1e-9, atol=1e-12)
        for client in range(6):
            np.testing.assert_allclose(
                states.get(client)[0].control.numpy(), own[client], rtol=1e-9, atol=1e-12
            )


def test_the_server_variate_is_the_mean_of_all_clients_variates():
    federation = linear_federation(Scaffold(), rounds=6)
    server, states = federation.begin()
    for after, _ in federation.rounds_from(server, states):
        mean = torch.stack([states.get(i)[0].control for i in range(6)]).mean(0)
        torch.testing.assert_close(after.state.control, mean, rtol=1e-10, atol=1e-13)


def test_under_plain_sgd_the_gradients_give_the_papers_option_two():
    federation = linear_federation(Scaffold(), rounds=4)
    world = NumpyClients(federation)
    server, states = federation.begin()
    for t in range(4):
        before = {i: states.get(i)[0].control.clone() for i in range(6)}
        c, x = server.state.control, server.send
        (server, _) = next(iter(federation.rounds_from(server, states)))
        for client in world.cohort(t):
            v, k = x.numpy().copy(), 0
            for inputs, labels in world.steps(t, client):
                v = v - world.lr(t) * (
                    world.gradient(v, inputs, labels) + (c - before[client]).numpy()
                )
                k += 1
            expected = (before[client] - c).numpy() + (x.numpy() - v) / (k * world.lr(t))
            np.testing.assert_allclose(
                states.get(client)[0].control.numpy(), expected, rtol=1e-8, atol=1e-11
            )


def test_the_first_round_is_uniform_fedavg():
    ours, theirs = trajectory(Scaffold(), rounds=2), trajectory(FedAvg("uniform"), rounds=2)
    torch.testing.assert_close(ours[0].send, theirs[0].send, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(ours[1].send, theirs[1].send, rtol=1e-6)


def gradient_at_the_end(method, rounds):
    """Norm of the gradient of the mean objective, made strongly convex by weight decay."""
    decay = 0.05
    federation = linear_federation(
        method, rounds=rounds, participation="count(clients=6)", optimiser=SGD(weight_decay=decay)
    )
    trainer = replace(federation.trainer, batch=64)
    federation = replace(
        federation,
        schedule=lambda t: Plan(0.5, None, 8),
        trainer=trainer,
        executor=replace(federation.executor, trainer=trainer),
    )
    world = NumpyClients(federation)
    last = models(federation)[-1]
    mean = np.mean([world.gradient(last, *world.rows(i)) for i in range(6)], axis=0)
    return np.linalg.norm(mean + decay * last)


@pytest.mark.parametrize("option", ["steps", "full"])
def test_scaffold_removes_the_drift_that_stops_fedavg(option):
    """Full batches, 8 steps each: FedAvg's fixed point is off the optimum, SCAFFOLD's is not."""
    fedavg = gradient_at_the_end(FedAvg("uniform"), 50)
    ours = gradient_at_the_end(Scaffold(option=option), 50)
    assert fedavg > 1e-2 and ours < 1e-5


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="server_lr"):
        Scaffold(server_lr=0.0)


def test_a_client_without_rows_leaves_the_servers_control_alone():
    state, server, replies, context = _one_round(Scaffold(), 0)
    counted = torch.arange(len(replies.weights)) > 0
    cohort = replace(replies, weights=replies.weights * counted)
    _, after = Scaffold().aggregate(state, server, cohort, context)
    changes = replies.report(Change).control.numpy()
    expected = state.control.numpy() + changes[1:].sum(0) / context.clients
    np.testing.assert_allclose(after.control.numpy(), expected, rtol=1e-10, atol=1e-13)
    assert np.abs(changes[0]).max() > 1e-3


def test_variates_are_averaged_over_the_clients_that_hold_rows():
    """Four of eight clients hold rows: c moves as it does in a federation of these four."""

    def control(**known):
        context = Context(LAYOUT, rounds=4, key=root(0), **known)
        change = Change(torch.tensor([[1.0, 2.0], [3.0, -2.0]], dtype=torch.float64))
        replies = replies_of(torch.zeros(2, 2, dtype=torch.float64), reports=(change,))
        server = torch.zeros(2, dtype=torch.float64)
        state = Scaffold().init(server, context)
        return Scaffold().aggregate(state, server, replies, context)[1].control

    assert control(clients=8, holders=4).tolist() == [1.0, 0.0] == control(clients=4).tolist()
    assert control(clients=8).tolist() == [0.5, 0.0]

import numpy as np
import pytest
from methods.numpy_clients import (
    NumpyClients,
    check_composed,
    close,
    linear_federation,
    models,
    rounds_of,
    same_models,
    unit,
)

from fedbasin.core.expressions import parse
from fedbasin.local import SGD
from fedbasin.methods import FedSpeed


def numpy_fedspeed(world, rounds, method, sgd=None):
    """Sun et al., in the paper's duals q_i; the release averages them over all clients."""
    server, q = world.start.copy(), np.zeros((world.count, len(world.start)))
    for t in range(rounds):
        cohort, ends = world.cohort(t), []
        for i in cohort:

            def direction(v, inputs, labels, i=i, x=server):
                g1 = world.gradient(v, inputs, labels)
                g2 = world.gradient(v + method.rho * unit(g1), inputs, labels)
                mixed = (1 - method.share) * g1 + method.share * g2
                return mixed - q[i] + (v - x) / method.lam

            ends.append(world.descend(t, i, server, direction, sgd)[0])
        for i, y in zip(cohort, ends, strict=True):
            q[i] = q[i] - (y - server) / method.lam
        if method.server == "paper":
            amended = [y - method.lam * q[i] for i, y in zip(cohort, ends, strict=True)]
            server = world.mean(amended, cohort, method.weighting)
        else:
            server = world.mean(ends, cohort, method.weighting) - method.lam * q.mean(0)
        yield server, q.copy()


@pytest.mark.parametrize("sgd", [SGD(), SGD(0.5, 0.01)])
@pytest.mark.parametrize("server", ["paper", "release"])
@pytest.mark.parametrize("settings", [(0.1, 10.0, 1.0), (0.4, 2.0, 0.6)])
def test_fedspeed_equals_a_plain_numpy_loop(settings, server, sgd):
    weighting = "uniform" if sgd.momentum else "samples"
    method = FedSpeed(*settings, server, weighting)
    federation = linear_federation(method, rounds=5, optimiser=sgd)
    oracle = numpy_fedspeed(NumpyClients(federation), 5, method, sgd)
    for (after, _, states), (model, q) in zip(rounds_of(federation), oracle, strict=True):
        close(after.send, model)
        for i in range(6):
            close(-states.get(i)[0].total / method.lam, q[i])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("fedspeed(rho=0.0, lam=4.0, server='release')", "feddyn(alpha=0.25)"),
        ("fedspeed(rho=0.5, lam=4.0, share=0.0, server='release')", "feddyn(alpha=0.25)"),
        ("fedspeed(rho=0.5, lam=4.0, share=0.3, server='release')",
         "feddyn(alpha=0.25, local=sam(rho=0.5, share=0.3))"),
    ],
)  # fmt: skip
def test_the_release_is_feddyn_around_sam(one, other):
    same_models(
        linear_federation(parse(one, "method"), rounds=5),
        linear_federation(parse(other, "method"), rounds=5),
    )


def test_the_two_servers_agree_only_when_all_take_part():
    def both(participation):
        return [
            models(linear_federation(FedSpeed(server=s), rounds=4, participation=participation))
            for s in ("paper", "release")
        ]

    for paper, release in zip(*both("count(clients=6)"), strict=True):
        np.testing.assert_allclose(paper, release, rtol=1e-11, atol=1e-12)
    paper, release = both("count(clients=3)")
    assert np.linalg.norm(paper[-1] - release[-1]) > 1e-2


def test_lambda_may_be_small_but_not_without_end():
    assert FedSpeed(lam=0.01).own_rules()[0].alpha == pytest.approx(100)
    with pytest.raises(ValueError, match="lam must be above 0 and finite, got inf"):
        FedSpeed(lam=np.inf)


@pytest.mark.parametrize(
    "source", ["wima(fedspeed, window=2)", "ima(fedspeed(server='release'), start=0.0)"]
)
def test_fedspeed_composes(source):
    check_composed(source)

import numpy as np
import pytest
import torch
from methods.numpy_clients import (
    NumpyClients,
    check_composed,
    close,
    linear_federation,
    models,
    rounds_of,
    unit,
)

from fedbasin.core.rule import Start
from fedbasin.local import SGD
from fedbasin.local.sharpness import LESAM, LastSeen
from fedbasin.methods import FedAvg, FedLESAM


def numpy_fedlesam(world, rounds, method, sgd=None):
    """Fan et al.: every client remembers the model IT received last."""
    server, last = world.start.copy(), {}
    for t in range(rounds):
        cohort, ends, lengths = world.cohort(t), [], []
        for i in cohort:
            e = method.rho * unit(last[i] - server) if i in last else np.zeros_like(server)

            def direction(v, inputs, labels, e=e):
                return world.gradient(v + e, inputs, labels)

            ends.append(world.descend(t, i, server, direction, sgd)[0])
            last[i] = server.copy()
            lengths.append(np.linalg.norm(e))
        server = world.mean(ends, cohort, method.weighting)
        yield server, dict(last), lengths


@pytest.mark.parametrize("sgd", [SGD(), SGD(0.5, 0.01)])
@pytest.mark.parametrize("method", [FedLESAM(), FedLESAM(0.8, "samples")])
def test_fedlesam_equals_a_plain_numpy_loop(method, sgd):
    federation = linear_federation(method, rounds=8, optimiser=sgd)
    oracle = numpy_fedlesam(NumpyClients(federation), 8, method, sgd)
    seen = set()
    for (after, _, states), (model, last, lengths) in zip(
        rounds_of(federation), oracle, strict=True
    ):
        close(after.send, model)
        for i, received in last.items():
            close(states.get(i)[0].model, received)
        seen.update(np.round(lengths, 9))
    assert seen == {0.0, method.rho}  # |e| is 0 the first time, then rho


def test_the_first_round_is_fedavg():
    ours, theirs = (
        models(linear_federation(m, rounds=3)) for m in (FedLESAM(0.5), FedAvg("uniform"))
    )
    np.testing.assert_array_equal(ours[0], theirs[0])
    assert np.linalg.norm(ours[2] - theirs[2]) > 1e-3


def start(received, last, known=1.0):
    number = torch.tensor(1.0).double()
    own = LastSeen(last, torch.tensor(known).double())
    return Start(received, (), own, *(number,) * 6, ())


def test_a_client_of_every_round_looks_back_along_the_last_global_step():
    old, new = torch.randn(2, 9, generator=torch.Generator().manual_seed(1)).double()
    e = LESAM(0.3).begin(start(new, old), None).shift
    step = new - old
    assert e.norm() == pytest.approx(0.3)
    assert float(e @ step / (e.norm() * step.norm())) == pytest.approx(-1)
    assert e.std() > 0  # one number for each element, not one for each tensor


def test_a_model_that_did_not_move_and_a_first_time_give_no_perturbation():
    old, new = torch.randn(2, 9, generator=torch.Generator().manual_seed(1)).double()
    assert LESAM(0.3).begin(start(old, old), None).shift.norm() == 0
    assert LESAM(0.3).begin(start(new, old, known=0.0), None).shift.norm() == 0


@pytest.mark.parametrize(
    "source",
    [
        "wima(fedlesam, window=2)",
        "scaffold(local=lesam(rho=0.3))",
        "feddyn(local=lesam(rho=0.3))",
        "ima(feddyn(local=lesam), start=0.0)",
    ],
)
def test_fedlesam_and_its_variants_compose(source):
    check_composed(source)

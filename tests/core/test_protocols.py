from dataclasses import dataclass, field

import pytest
import torch

from fedbasin.core.method import Method, Wrapped, Wrapper
from fedbasin.core.protocols import (
    NeedsGradients,
    ScoresCounts,
    StartsLate,
    needs_gradients,
    score_counts,
    shared_prefix,
    state_from_prefix,
)
from fedbasin.methods import IMA, WIMA, FedAvg, FedExP, FedWCM, Mime
from fedbasin.testing import toy_federation, trajectory


@dataclass(frozen=True)
class Curious(NeedsGradients, Wrapper):
    """A wrapper that itself asks for gradients."""

    inner: Method = field(default_factory=FedAvg)


@pytest.mark.parametrize(
    ("method", "asks"),
    [
        (Mime(), True),
        (WIMA(Mime()), True),
        (WIMA(FedExP(Mime())), True),
        (WIMA(Curious()), True),
        (FedAvg(), False),
        (WIMA(FedExP()), False),
    ],
    ids=str,
)
def test_gradients_are_asked_for_through_any_wrapper(method, asks):
    assert needs_gradients(method) is asks
    federation = toy_federation(method)
    _, record = next(iter(federation.rounds_from(*federation.begin())))
    models = record.bytes_up / record.replies / (8 * federation.context.layout.size)
    assert round(models) == (2 if asks else 1)


def test_a_wrapped_method_that_needs_gradients_trains_as_it_does_alone():
    alone, wrapped = trajectory(Mime()), trajectory(WIMA(Mime()))
    assert all(torch.equal(a.send, b.send) for a, b in zip(alone, wrapped, strict=True))


def test_a_client_scores_its_counts_for_the_method_inside():
    counts, total = torch.tensor([5, 0, 1]), torch.tensor([50, 20, 10])
    alone = FedWCM().score_counts(counts, total)
    assert score_counts(WIMA(FedExP(FedWCM())), counts, total) == alone != 0
    with pytest.raises(NotImplementedError, match=r"wima.* needs the clients' class counts"):
        score_counts(WIMA(), counts, total)


def test_a_method_that_does_not_start_late_is_its_own_prefix():
    plain = WIMA(FedAvg(), window=3)
    assert shared_prefix(plain, 9) == (plain, 9)
    state = Wrapped("window", ())
    assert state_from_prefix(plain, state, torch.zeros(2), None) == state


def test_a_wrapper_wraps_the_prefix_of_the_method_inside():
    late = IMA(FedAvg(), window=2, start=0.5)
    method, common = shared_prefix(WIMA(late, window=3), 8)
    assert (method, common) == (WIMA(FedAvg(), window=3), 3)
    assert isinstance(late, StartsLate) and not isinstance(method, StartsLate)


@pytest.mark.parametrize("kind", [ScoresCounts, StartsLate])
def test_a_method_that_implements_half_of_it_cannot_be_made(kind):
    class Half(kind, FedAvg):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Half()

"""Every wrapper of the catalogue over every base: runs, resumes to the same bits, is neutral.

A method that starts late has its first rounds in common with a plainer one, its shared prefix, and
goes on from there to the models that it comes to alone.
The matrix is made from cards, so a method that is added later is in it.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

import fedbasin.methods
from fedbasin import Experiment, run
from fedbasin.core.catalogue import CATALOGUE, cards
from fedbasin.core.expressions import text
from fedbasin.core.method import Plan, Wrapper
from fedbasin.core.protocols import Private, shared_prefix, state_from_prefix
from fedbasin.core.record import RunFolder
from fedbasin.core.state import load, same, save
from fedbasin.experiment.config import DataConfig, LocalConfig, PartitionConfig, SimConfig
from fedbasin.testing import toy_federation

assert fedbasin.methods
CARDS = cards("method")
WRAPPERS = [card.name for card in CARDS if issubclass(card.make, Wrapper)]
BASES = [card.name for card in CARDS if not issubclass(card.make, Wrapper)]
ROUNDS = 3


def quick(name, **arguments):
    """A method whose server does no more passes over its data than it must."""
    few = {
        p.name: 2
        for p in CATALOGUE[name].parameters
        if p.name.endswith(("epochs", "steps")) and isinstance(p.default, int) and p.default > 2
    }
    return CATALOGUE[name].make(**few | arguments)


def federation(method, rounds=ROUNDS):
    """Two clients and one step a round: the toy federation at its cheapest."""
    toy = toy_federation(method, rounds=rounds, participation="count(clients=2)")
    return replace(
        toy, schedule=lambda t: Plan(0.3, None, 1), evaluate_every=rounds, evaluate_last=0
    )


def servers(made):
    return [after for after, _ in made.rounds_from(*made.begin())]


@cache
def inner_alone(name):
    return servers(federation(quick(name)))


def stopped_and_whole(method, file):
    """Run all rounds, and write a checkpoint after the first on the way."""
    made = federation(method)
    server, states = made.begin()
    whole = []
    for after, _ in made.rounds_from(server, states):
        whole.append(after)
        if after.round == 1:
            save(file, (after, states.kept()))
        assert torch.isfinite(after.send).all() and torch.isfinite(after.score).all()
    return made, whole


def check_resuming(method, file):
    """After the first round everything goes through a file, as a run that was stopped does."""
    made, whole = stopped_and_whole(method, file)
    fresh, states = made.begin()
    server, kept = load(file, (fresh, states.kept()))
    states.restore(kept)
    assert server.round == 1
    for after, _ in made.rounds_from(server, states):
        assert same(after, whole[after.round - 1]), f"{text(method)} resumes to another model"


def private(wrapper, inner):
    """Whether a wrapper takes methods of the uniform mean alone; then it must refuse this one."""
    if not issubclass(CATALOGUE[wrapper].make, Private):
        return False
    with pytest.raises(ValueError, match=r"sample counts|single replies"):
        quick(wrapper, inner=inner)
    return True


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_over_a_base(wrapper, base, tmp_path):
    if issubclass(CATALOGUE[wrapper].make, Private) and quick(base).streams() == "samples":
        assert private(wrapper, quick(base))
        inner = quick(base, weighting="uniform")
    else:
        inner = quick(base)
        if inner.streams() != "uniform" and private(wrapper, inner):
            return
    method = quick(wrapper, inner=inner)
    check_resuming(method, tmp_path / "state.safetensors")
    neutral = CATALOGUE[wrapper].is_fedavg_when
    if isinstance(neutral, str):
        return
    ours = servers(federation(replace(method, **neutral)))
    alone = inner_alone(base) if inner == quick(base) else servers(federation(inner))
    for mine, theirs in zip(ours, alone, strict=True):
        torch.testing.assert_close(mine.send, theirs.send, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(mine.score, theirs.score, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("place", range(len(WRAPPERS)))
def test_a_wrapper_over_a_wrapper(place, tmp_path):
    """Each wrapper around the next one of the catalogue, and that around a base with memory."""
    outer, inner = WRAPPERS[place], WRAPPERS[(place + 1) % len(WRAPPERS)]
    if private(outer, quick("scaffold")) or private(inner, quick("scaffold")):
        return
    method = quick(outer, inner=quick(inner, inner=quick("scaffold")))
    check_resuming(method, tmp_path / "state.safetensors")
    assert method.base == quick("scaffold")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_leaves_the_notes_of_its_base_in_the_record(wrapper):
    if private(wrapper, quick("fedwcm")):
        return
    made = federation(quick(wrapper, inner=quick("fedwcm")))
    for _, record in made.rounds_from(*made.begin()):
        assert {"alpha", "imbalance"} <= set(record.notes)


LONG = 6
LATE = {"start": 0.67, "window": 2}  # averages after round 4, counted from 0, of models from 3 on


def with_kept(made):
    server, states = made.begin()
    return [(after, states.kept()) for after, _ in made.rounds_from(server, states)]


def check_growing(method, plain, parts=3):
    prefix, common = shared_prefix(method, LONG)
    assert (text(prefix), common) == (text(plain), parts)
    made = federation(method, LONG)
    whole, before = servers(made), with_kept(federation(prefix, LONG))
    for mine, (theirs, _) in zip(whole[:common], before, strict=False):
        assert same((mine.send, mine.score), (theirs.send, theirs.score))
    server, kept = before[common - 1]
    _, states = made.begin()
    states.restore(kept)
    state = state_from_prefix(method, server.state, server.send, made.context.at(server.round, 0.0))
    for after, _ in made.rounds_from(replace(server, state=state), states):
        expected = whole[after.round - 1]
        torch.testing.assert_close(after.send, expected.send, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(after.score, expected.score, rtol=1e-9, atol=1e-11)
    assert after.round == LONG
    assert not torch.allclose(after.send, before[-1][0].send, rtol=1e-6), "the prefix went on"


@pytest.mark.parametrize("base", BASES)
def test_late_averaging_goes_on_from_any_base(base):
    check_growing(quick("ima", inner=quick(base), **LATE), quick(base))


@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "ima"])
def test_a_wrapper_around_late_averaging_goes_on_from_the_wrapper_alone(wrapper):
    base = quick("fedavg", weighting="uniform")
    plain = quick(wrapper, inner=base)
    check_growing(quick(wrapper, inner=quick("ima", inner=base, **LATE)), plain)


@pytest.mark.parametrize("optimiser", ["fedadam", "fedyogi"])
def test_an_optimiser_that_restarts_goes_on_from_one_that_does_not(optimiser):
    averaged = quick("ima", **LATE)
    check_growing(quick(optimiser, inner=averaged, restart=0.67), quick(optimiser))
    check_growing(quick(optimiser, restart=0.5), quick(optimiser))
    early = quick(optimiser, inner=averaged, restart=0.2)
    assert shared_prefix(early, LONG) == (quick(optimiser), 1)


def test_two_windows_part_where_the_first_of_them_needs_to():
    plain, later = quick("fedavg"), quick("ima", start=0.9, window=2)
    assert shared_prefix(quick("ima", inner=later, start=0.67, window=3), LONG) == (plain, 2)
    sooner = quick("ima", start=0.67, window=3)
    assert shared_prefix(quick("ima", inner=sooner, start=0.9, window=2), LONG) == (plain, 2)
    assert shared_prefix(quick("ima", start=0.3, window=5), LONG) == (plain, 0)
    assert shared_prefix(plain, LONG) == (plain, LONG)


DIGITS = Experiment(
    model="mlp(widths=(16,))",
    rounds=ROUNDS,
    data=DataConfig(proxy_per_class=3),
    partition=PartitionConfig(how="dirichlet(alpha=0.3, minimum=2)", clients=6),
    local=LocalConfig(lr=0.2, batch=32),
    sim=SimConfig(participation="fraction(rate=0.5)", executor="loop"),
)


@pytest.mark.parametrize("base", ["fedavg", "scaffold"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_runs_on_digits(wrapper, base, tmp_path):
    base = quick(base, weighting="uniform")
    if base.streams() is None and private(wrapper, base):
        return
    method = quick(wrapper, inner=base)
    summary = run(replace(DIGITS, method=text(method)), tmp_path / "run")
    assert summary["status"] == "finished" and summary["method"] == text(method)
    records = RunFolder(tmp_path / "run").read_rounds()
    assert [record.round for record in records] == [1, 2, 3]
    assert all(0 <= record.metric("accuracy") <= 1 and record.update_norm > 0 for record in records)

"""`local.optimiser` from the settings to the end of a run."""

import logging
import sys
from dataclasses import replace

import pytest
import torch

from fedbasin import Experiment, resume, run
from fedbasin.core.catalogue import CATALOGUE
from fedbasin.core.state import read
from fedbasin.experiment import ConfigError, build, from_mapping
from fedbasin.experiment.checks import check_needs
from fedbasin.experiment.comparison import cells
from fedbasin.experiment.config import LocalConfig, PartitionConfig, SimConfig
from fedbasin.experiment.training import optimiser_of
from fedbasin.local import SGD, Adam, AdamW
from fedbasin.papers.grid import fingerprint

BASE = Experiment(
    model="mlp(widths=(16,))",
    rounds=8,
    partition=PartitionConfig(how="dirichlet(alpha=0.3, minimum=2)", clients=10),
    local=LocalConfig(lr=0.01, epochs=2, batch=16, optimiser="adamw(weight_decay=0.02)"),
    sim=SimConfig(participation="fraction(rate=0.5)", device="cpu", checkpoint_every=2),
)


def with_local(**settings):
    return replace(BASE, local=replace(BASE.local, **settings))


def with_sim(experiment, **settings):
    return replace(experiment, sim=replace(experiment.sim, **settings))


def test_adamw_learns_on_digits(tmp_path):
    summary = run(replace(BASE, rounds=20), tmp_path / "r")
    assert summary["accuracy_mean_last10"] > 0.75


@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
def test_a_resumed_run_ends_as_an_uninterrupted_one(kept, tmp_path):
    experiment = with_local(keep_optimiser=kept)

    def stop(record):
        if record.round == 5:
            raise ConnectionAbortedError("pulled")

    with pytest.raises(ConnectionAbortedError):
        run(experiment, tmp_path / "stopped", on_round=stop)
    resume(tmp_path / "stopped")
    run(experiment, tmp_path / "whole")
    stopped, whole = (tmp_path / name / "model.safetensors" for name in ("stopped", "whole"))
    assert stopped.read_bytes() == whole.read_bytes()
    lines = (tmp_path / "stopped" / "config.toml").read_text().splitlines()
    assert 'optimiser = "adamw(weight_decay=0.02)"' in lines
    assert f"keep_optimiser = {str(kept).lower()}" in lines


def test_a_kept_state_makes_another_run(tmp_path):
    run(BASE, tmp_path / "fresh")
    run(with_local(keep_optimiser=True), tmp_path / "kept")
    fresh, kept = (read(tmp_path / name / "model.safetensors") for name in ("fresh", "kept"))
    assert not all(torch.equal(fresh[name], kept[name]) for name in fresh)


@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_worker_processes_give_the_bits_of_the_loop(method, kept):
    experiment = replace(with_local(keep_optimiser=kept), method=method, rounds=3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ends = []
    try:
        for workers in (1, 2):
            federation = build(with_sim(experiment, executor="loop", workers=workers))
            *_, (server, _) = federation.rounds_from(*federation.begin())
            federation.close()
            ends.append(server)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(ends[0].send, ends[1].send)


def test_settings_of_sgd_stay_settings():
    """Papers' results are found by their settings: these are never written into an expression."""
    local = LocalConfig(momentum=0.9, weight_decay=0.01)
    assert optimiser_of(local) == SGD(0.9, 0.01)
    assert Experiment(local=local).resolved().local == local
    assert optimiser_of(LocalConfig()) == SGD()
    nesterov = LocalConfig(optimiser="sgd(0.9, nesterov=True)", weight_decay=0.01)
    assert optimiser_of(nesterov) == SGD(0.9, 0.01, nesterov=True)
    written = Experiment(local=LocalConfig(optimiser="adamw( weight_decay = 0.01)")).resolved()
    assert written.local.optimiser == "adamw"
    assert optimiser_of(LocalConfig(optimiser="adam(betas=(0.5, 0.9))")) == Adam((0.5, 0.9))


def test_the_optimiser_and_whether_it_is_kept_tell_runs_apart():
    prints = [
        fingerprint(e)
        for e in (
            BASE,
            with_local(optimiser="sgd"),
            with_local(optimiser="adam"),
            with_local(keep_optimiser=True),
        )
    ]
    assert len(set(prints)) == 4


@pytest.mark.parametrize(
    ("local", "words"),
    [
        ({"optimiser": "adamx"}, ["local.optimiser", "adamx", "adam"]),
        ({"optimiser": "fedadam"}, ["local.optimiser", "method"]),
        ({"optimiser": "sgd(momentum=2.0)"}, ["local.optimiser", "momentum must be in [0, 1)"]),
        (
            {"optimiser": "adamw", "momentum": 0.9},
            ["local.momentum = 0.9", "sgd", "adamw", "set local.momentum = 0"],
        ),
        (
            {"optimiser": "adamw", "weight_decay": 0.1},
            ["local.weight_decay = 0.1", "local.optimiser = 'adamw(weight_decay=0.1)'"],
        ),
        (
            {"optimiser": "sgd(momentum=0.5)", "momentum": 0.9},
            ["momentum is given twice", "local.momentum = 0.9", "sgd(momentum=0.5)"],
        ),
        (
            {"optimiser": "sgd(weight_decay=0.5)", "weight_decay": 0.9},
            ["weight_decay is given twice", "keep one"],
        ),
        ({"keep_optimiser": 1}, ["local.keep_optimiser", "True or False"]),
    ],
)
def test_bad_settings_name_the_field_and_the_fix(local, words):
    with pytest.raises(ConfigError) as error:
        from_mapping({"local": local})
    for word in words:
        assert word in str(error.value)
    assert "betas" not in str(error.value)


@pytest.mark.parametrize("method", ["fednova", "fedcm", "fedwcm", "mofedsam", "ima(fednova)"])
def test_methods_that_count_steps_are_refused_before_data_is_loaded(method, monkeypatch):
    def load(*_, **__):
        raise AssertionError("data was loaded")

    monkeypatch.setattr("fedbasin.data.load", load)
    experiment = replace(BASE, method=method)
    with pytest.raises(ConfigError, match=r"local\.optimiser: .*take the optimiser sgd"):
        build(experiment)
    with pytest.raises(ConfigError, match=r"local\.optimiser"):
        cells(BASE, ["fedavg", method], [0], None)
    plain = with_local(optimiser="sgd", momentum=0.9)
    check_needs(replace(plain, method=method))
    kept = replace(plain, method=method, local=replace(plain.local, keep_optimiser=True))
    with pytest.raises(ConfigError, match="set keep_optimiser to false"):
        check_needs(kept)


def cautions(experiment, caplog):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fedbasin.experiment"):
        build(experiment)
    return caplog.text


def test_a_rate_that_was_left_out_is_named_and_not_changed(caplog):
    left_out = with_local(lr=LocalConfig().lr)
    assert "local.lr = 0.1 is the default" in cautions(left_out, caplog)
    assert "run at 0.001: set local.lr" in caplog.text
    assert left_out.resolved().local.lr == 0.1
    assert "local.lr" not in cautions(BASE, caplog)
    assert "local.lr" not in cautions(with_local(optimiser="sgd", lr=0.1), caplog)


@pytest.mark.parametrize(
    ("method", "word"),
    [
        ("scaffold", "rescales the correction c - c_i"),
        ("feddyn", "rescales the pull"),
        ("adabest", "rescales the estimate h_i"),
        ("mime", "a state that changes in every step"),
        ("mimelite", "a state that changes in every step"),
        ("fedavg(local=kept_momentum)", "a momentum of its own"),
    ],
)
def test_methods_that_their_papers_have_with_sgd_say_so(method, word, caplog):
    assert word in cautions(replace(BASE, method=method), caplog)
    plain = with_local(optimiser="sgd(nesterov=True, momentum=0.5)")
    assert word not in cautions(replace(plain, method=method), caplog)


OWN = '''
from dataclasses import dataclass

from fedbasin.core.catalogue import entry
from fedbasin.local import Optimiser


@entry("optimiser")
@dataclass(frozen=True)
class Signs(Optimiser):
    """Step by the sign of the gradient."""

    scale: float = 1.0

    def init(self, vector):
        return ()

    def update(self, direction, state, vector, lr, paces=()):
        return vector - lr * self.scale * direction.sign(), state
'''


def test_an_optimiser_of_ones_own_is_named_by_its_module(tmp_path, monkeypatch):
    (tmp_path / "my_steps.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        experiment = with_local(optimiser="my_steps.signs(scale=0.5)", lr=0.01)
        assert experiment.resolved().local.optimiser == "my_steps.signs(scale=0.5)"
        summary = run(replace(experiment, rounds=15), tmp_path / "r")
        assert summary["accuracy_mean_last10"] > 0.5
        with pytest.raises(ConfigError, match=r"local\.momentum = 0.5 is for the optimiser sgd"):
            with_local(optimiser="my_steps.signs", momentum=0.5)
    finally:
        sys.modules.pop("my_steps", None)
        CATALOGUE.pop("signs", None)


def test_a_warmup_runs_from_the_settings_and_a_bad_one_names_its_setting(tmp_path):
    records = []
    warm = replace(with_local(schedule="warmup(rounds=3, then=cosine)"), rounds=5)
    run(warm, tmp_path / "r", on_round=records.append)
    assert [r.lr for r in records] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.01, 0.0])
    with pytest.raises(ConfigError, match=r"local\.schedule, .*then must be a schedule, got iid"):
        build(with_local(schedule="warmup(then=iid)"))


def test_the_trainer_has_what_the_settings_say():
    trainer = build(with_local(keep_optimiser=True, clip=3.0)).executor.trainer
    assert trainer.optimiser == AdamW(weight_decay=0.02)
    assert trainer.keep_optimiser and trainer.clip == 3.0

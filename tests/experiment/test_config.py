import sys
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Linear

from fedbasin.experiment import ConfigError, Experiment, build, from_mapping
from fedbasin.experiment.config import (
    DataConfig,
    LocalConfig,
    PartitionConfig,
    SimConfig,
    SnapshotConfig,
    override,
    read_config,
    read_preset,
)

positive = st.floats(min_value=0, max_value=1e9, allow_nan=False)
experiments = st.builds(
    Experiment,
    method=st.sampled_from(["fedavg", "fedprox(mu=0.5)", "scaffold(option='full')"]),
    model=st.sampled_from(["mlp", "mlp(widths=(8, 8))"]),
    seed=st.integers(0, 2**40),
    rounds=st.integers(1, 10**6),
    data=st.builds(
        DataConfig,
        name=st.text(max_size=10),
        imbalance=st.floats(min_value=1e-6, max_value=1),
        proxy_per_class=st.integers(0, 100),
        augment=st.booleans(),
    ),
    partition=st.builds(
        PartitionConfig, clients=st.integers(1, 10**6), seed=st.integers(-1, 10**9)
    ),
    local=st.builds(LocalConfig, lr=positive, momentum=st.floats(0, 0.999), clip=positive),
    sim=st.builds(SimConfig, dropout=st.floats(0, 0.99), device=st.text(max_size=6)),
)


@given(experiments)
@settings(max_examples=150)
def test_toml_reads_back_as_the_same_experiment(experiment):
    assert from_mapping(tomllib.loads(experiment.to_toml())) == experiment


def test_settings_over_a_base_keep_what_they_do_not_name():
    network = Linear(2, 2)
    base = Experiment(model=network, rounds=7, local=LocalConfig(lr=0.5, epochs=3))
    read = from_mapping({"seed": 4, "local": {"lr": 0.25}}, base)
    assert read == replace(base, seed=4, local=LocalConfig(lr=0.25, epochs=3))
    assert read.objects.model is network
    whole = from_mapping({"local": LocalConfig(lr=0.25), "model": "logistic"}, base)
    assert whole.local == LocalConfig(lr=0.25) and whole.objects.model is None


def test_resolving_is_canonical_and_idempotent():
    loose = Experiment(
        method="fedprox( 0.5 )",
        seed=3,
        partition=PartitionConfig(how="dirichlet(0.1, balance=True)"),
        local=LocalConfig(schedule="exponential( decay = .9 )"),
    )
    tight = loose.resolved()
    assert tight.method == "fedprox(mu=0.5)" and tight.partition.how == "dirichlet(alpha=0.1)"
    assert tight.local.schedule == "exponential(decay=0.9)" and tight.partition.seed == 3
    assert tight.resolved() == tight
    for seed in (0, 9):
        fixed = Experiment(partition=PartitionConfig(seed=seed), seed=3)
        assert fixed.resolved().partition.seed == seed


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"metod": "fedavg"}, ["'metod'", "method"]),
        ({"local": {"lrr": 1}}, ["'local.lrr'", "lr"]),
        ({"local": 3}, ["local", "section"]),
        ({"local": {"lr": "fast"}}, ["local.lr", "'fast'", "a number"]),
        ({"local": {"epochs": 1.5}}, ["local.epochs", "1.5", "a whole number"]),
        ({"data": {"augment": 1}}, ["data.augment", "True or False"]),
        ({"data": {"proxy_from": "moon"}}, ["data.proxy_from", "moon", "train"]),
        ({"method": "fedavgg"}, ["method", "fedavgg", "fedavg"]),
        ({"model": "fedavg"}, ["model", "fedavg"]),
        ({"partition": {"how": "dirichlet"}}, ["partition.how", "alpha"]),
        ({"sim": {"participation": "all"}}, ["sim.participation", "all"]),
        ({"local": {"schedule": "linear"}}, ["local.schedule", "linear"]),
        ({"rounds": 0}, ["rounds", "0"]),
        ({"local": {"lr": float("nan")}}, ["local.lr", "nan"]),
        ({"local": {"momentum": 1.0}}, ["local.momentum", "1.0"]),
        ({"sim": {"dropout": -0.1}}, ["sim.dropout", "-0.1"]),
        ({"partition": {"hold_out": 1.0}}, ["partition.hold_out", "1.0"]),
        ({"data": {"imbalance": 0.0}}, ["data.imbalance", "0.0"]),
        ({"data": {"proxy_imbalance": 1.5}}, ["data.proxy_imbalance", "1.5"]),
        ({"data": {"proxy_imbalance": 0.5}}, ["data.proxy_imbalance", "set data.proxy_per_class"]),
        ({"data": {"proxy_evened": True}}, ["data.proxy_evened", "set data.proxy_per_class"]),
        (
            {"data": {"proxy_rows": 5, "proxy_per_class": 2}},
            ["data.proxy_per_class is 2", "data.proxy_rows is 5", "set one"],
        ),
        ({"partition": {"corrupted": 1.1}}, ["partition.corrupted", "1.1"]),
        ({"partition": {"corrupted": -0.1}}, ["partition.corrupted", "-0.1"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"sim": {"executor": "cohort", "workers": 2}}, ["sim.workers", "one matrix"]),
        ({"sim": {"address": "auto"}}, ["sim.address", "sim.executor=ray"]),
        ({"sim": {"executor": "ray", "workers": -1}}, ["sim.workers", "-1"]),
        ({"sim": {"executor": "ray", "address": "ray://a:10001"}}, ["ray://a:10001", "host:port"]),
        ({"sim": {"executor": "ray", "address": "head"}}, ["'head'", "host:port"]),
        ({"sim": {"executor": "ray", "address": "head:"}}, ["'head:'", "host:port"]),
    ],
)
def test_bad_settings_name_the_field_the_value_and_the_fix(mapping, words):
    with pytest.raises(ConfigError) as error:
        from_mapping(mapping)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("setting", "least"),
    [
        ("rounds", 1),
        ("seed", 0),
        ("data.proxy_per_class", 0),
        ("data.proxy_rows", 0),
        ("partition.clients", 0),
        ("partition.seed", -1),
        ("local.lr", 0),
        ("local.epochs", 1),
        ("local.steps", 0),
        ("local.batch", 1),
        ("local.weight_decay", 0),
        ("local.clip", 0),
        ("sim.workers", 0),
        ("sim.chunk", 0),
        ("sim.memory", 0),
        ("sim.evaluate_every", 1),
        ("sim.evaluate_last", 0),
        ("sim.checkpoint_every", 1),
        ("sim.client_memory", 0),
        ("snapshots.every", 0),
    ],
)
def test_a_setting_may_be_its_least_and_no_less(setting, least):
    from_mapping(override({}, [f"{setting}={least}"]))
    with pytest.raises(ConfigError, match=f"^{setting} must be at least {least}, got {least - 1}"):
        from_mapping(override({}, [f"{setting}={least - 1}"]))


@pytest.mark.parametrize("setting", ["partition.hold_out", "local.momentum", "sim.dropout"])
def test_a_share_may_be_none_and_not_all(setting):
    from_mapping(override({}, [f"{setting}=0.0"]))
    for share in (-0.1, 1.0):
        with pytest.raises(ConfigError, match=rf"^{setting} must be in \[0, 1\), got {share}"):
            from_mapping(override({}, [f"{setting}={share}"]))


def test_snapshots_are_of_rounds_that_there_are():
    from_mapping({"rounds": 4, "snapshots": {"rounds": [1, 4]}})
    for round in (0, 5):
        with pytest.raises(ConfigError, match=rf"lie in 1 to 4 \(rounds\), got {round}"):
            from_mapping({"rounds": 4, "snapshots": {"rounds": [1, round]}})


def test_every_kth_round_is_kept_beside_those_that_are_named():
    assert SnapshotConfig().chosen(6) == set()
    assert SnapshotConfig(every=3).chosen(6) == {3, 6}
    assert SnapshotConfig(rounds=(1, 4), every=2).chosen(5) == {1, 2, 4}


def test_without_ray_its_executor_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "fedbasin.sim.ray_executor", raising=False)
    with pytest.raises(ConfigError, match=r"^sim.executor: .*'fedbasin\[ray\]'"):
        build(Experiment(sim=SimConfig(executor="ray", address="head:6379")))


def test_overrides_reach_any_field_and_read_toml_or_text():
    settings = override(
        {},
        [
            "local.lr=0.5",
            "method=fedprox(mu=0.1)",
            'data.name="usps"',
            "data.augment=true",
            "rounds=7",
        ],
    )
    experiment = from_mapping(settings)
    assert experiment.local.lr == 0.5 and experiment.method == "fedprox(mu=0.1)"
    assert experiment.data == DataConfig(name="usps", augment=True) and experiment.rounds == 7


@pytest.mark.parametrize("bad", ["local.lr", "=3", "method.x=3"])
def test_overrides_that_cannot_be_read_are_refused(bad):
    with pytest.raises(ConfigError):
        from_mapping(override({"method": "fedavg"}, [bad]))


def test_presets_are_whole_and_others_are_named():
    for name in ("demo", "fmnist", "cifar10"):
        assert from_mapping(read_preset(name)).resolved()
    with pytest.raises(ConfigError, match="demo"):
        read_preset("dmo")


def test_files_that_are_not_toml_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_config(tmp_path / "absent.toml")
    for content in (b"a = ", b"\xff\xfe"):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(ConfigError, match="not TOML"):
            read_config(tmp_path / "bad.toml")

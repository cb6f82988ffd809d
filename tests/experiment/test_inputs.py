"""Inputs of any kind: tables, whole numbers and arrays in memory, from data to a trained model."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
import torch

from fedbasin import Experiment, resume, run
from fedbasin.core.expressions import parse
from fedbasin.core.record import RecordError
from fedbasin.data import DataError, Dataset, Rows, load
from fedbasin.experiment import ConfigError, build
from fedbasin.experiment.config import DataConfig, LocalConfig, PartitionConfig, SimConfig
from fedbasin.experiment.rows import cut_rows
from fedbasin.partition import Pool
from fedbasin.sim import LoopExecutor
from fedbasin.sim.cohort import CohortExecutor

WINE = Experiment(
    "scaffold",
    model="mlp(widths=(8,))",
    rounds=3,
    data=DataConfig(name="wine", proxy_rows=10),
    partition=PartitionConfig(how="dirichlet(alpha=0.5, minimum=4)", clients=6),
    local=LocalConfig(lr=0.1, epochs=2, batch=8, momentum=0.5),
    sim=SimConfig(participation="count(clients=4)", device="cpu", executor="loop", compile="off"),
)


def trained(experiment, dataset=None, executor=None):
    federation = build(experiment, data=dataset)
    if executor is not None:
        federation = replace(federation, executor=executor(federation.executor))
    try:
        *_, (server, record) = federation.rounds_from(*federation.begin())
    finally:
        federation.close()
    return server.send, record


def changed(experiment, **settings):
    parts = {name: replace(getattr(experiment, name), **new) for name, new in settings.items()}
    return replace(experiment, **parts)


@pytest.mark.parametrize("name", ["wine", "breast-cancer"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedlaw(epochs=2)"])
def test_a_table_gives_the_same_model_in_loop_and_cohort(name, method):
    experiment = replace(changed(WINE, data={"name": name}), method=method)
    loop, record = trained(experiment)
    assert np.isfinite(record.metric("loss")) and record.metric("accuracy") > 0.5
    cohort, _ = trained(changed(experiment, sim={"executor": "cohort"}))
    torch.testing.assert_close(cohort, loop, rtol=1e-4, atol=1e-6)


def test_a_table_gives_the_same_bits_in_processes():
    assert torch.equal(trained(changed(WINE, sim={"workers": 2}))[0], trained(WINE)[0])


def test_the_engines_are_the_ones_meant():
    for settings, kind in (({}, LoopExecutor), ({"executor": "cohort"}, CohortExecutor)):
        assert type(build(changed(WINE, sim=settings)).executor) is kind


def test_a_compiled_step_takes_a_table():
    plain, _ = trained(changed(WINE, sim={"executor": "cohort"}))

    def compiled(executor):
        return CohortExecutor(
            executor.trainer, executor.population, executor.key, True, backend="aot_eager"
        )

    found, _ = trained(changed(WINE, sim={"executor": "cohort"}), executor=compiled)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-6)


def halves(dtype):
    """A table whose numbers every type holds exactly."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 9, (120, 5))
    labels = (numbers[:, 0] > numbers[:, 1]).astype(np.int64) + (numbers[:, 2] > 4)
    rows = Rows(numbers.astype(dtype), labels)
    train, test = rows.take(slice(0, 90)), rows.take(slice(90, None))
    return Dataset("halves", "table", train, test, ("a", "b", "c"))


@pytest.mark.parametrize("executor", ["loop", "cohort"])
def test_the_type_of_the_numbers_does_not_change_the_model(executor):
    experiment = changed(WINE, sim={"executor": executor})
    wanted, _ = trained(experiment, halves(np.float32))
    for dtype in (np.uint8, np.int16, np.uint16, np.int64, np.float16, np.float64):
        found, _ = trained(experiment, halves(dtype))
        assert torch.equal(found, wanted), dtype


@pytest.mark.parametrize("executor", ["loop", "cohort"])
def test_tokens_may_be_of_any_whole_numbers(executor):
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, 80, (60, 5)), rng.integers(0, 80, 60)

    def made(dtype):
        rows = Rows(tokens.astype(dtype), labels)
        names = tuple(str(c) for c in range(80))  # the next character
        return Dataset("chars", "text", rows.take(slice(0, 45)), rows.take(slice(45, 60)), names)

    experiment = replace(
        changed(WINE, sim={"executor": executor}), model="shakespeare_lstm", method="fedavg",
        rounds=1,
    )  # fmt: skip
    wanted, _ = trained(experiment, made(np.uint8))
    for dtype in (np.int32, np.uint16, np.int64):
        assert torch.equal(trained(experiment, made(dtype))[0], wanted)


@pytest.mark.parametrize("name", ["digits", "wine"])
def test_data_in_memory_is_as_good_as_its_name(name):
    by_name = changed(WINE, data={"name": name})
    other = changed(WINE, data={"name": "cifar10"})  # not looked at
    assert torch.equal(trained(by_name)[0], trained(other, load(name))[0])
    assert build(by_name).data == build(other, data=load(name)).data


class Crash(BaseException):
    pass


def crash(record):
    raise Crash


def test_a_run_on_data_in_memory_goes_on_with_that_data_alone(tmp_path):
    mine = halves(np.float32)
    whole = run(WINE, tmp_path / "whole", data=mine)
    assert whole["dataset"] == "halves"
    assert 'name = "halves"' in (tmp_path / "whole/config.toml").read_text()
    out = tmp_path / "stopped"
    with pytest.raises(Crash):
        run(WINE, out, data=mine, on_round=crash)
    scaled = replace(mine, test=replace(mine.test, inputs=mine.test.inputs * 2))
    for other in (scaled, halves(np.float64), load("wine")):
        with pytest.raises(RecordError, match=r"begun on other data: .*data="):
            resume(out, data=other)
    with pytest.raises(DataError, match=r"unknown dataset 'halves': .* as data=, when a run is"):
        resume(out)
    assert resume(out, data=halves(np.float32))["status"] == "finished"
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert models[0] == models[1]
    held = pandas.read_csv(out / "partition.csv")
    assert (held["rows"] == held[["a", "b", "c"]].sum(axis=1)).all()


@pytest.mark.parametrize(
    ("section", "setting", "message"),
    [
        ("data", {"normalise": "unit"}, r"data.normalise is 'unit', which scales pixels, and wine"),
        ("data", {"normalise": "symmetric"}, r"wine is table: leave it at 'dataset'"),
        ("data", {"augment": True}, r"data.augment crops and flips images, and wine is table"),
        ("data", {"name": "diabetes"}, r"task: classification needs one whole number"),
    ],
)
def test_settings_of_pixels_are_refused_for_a_table(section, setting, message):
    with pytest.raises(ConfigError, match=message):
        build(changed(WINE, **{section: setting}))


REGRESSION = replace(
    changed(WINE, data={"name": "diabetes"}, partition={"how": "iid"}), method="fedavg"
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data": {"proxy_rows": 0, "proxy_per_class": 3}},
            r"data.proxy_per_class is 3, .*diabetes have no classes: set data.proxy_rows",
        ),
        ({"data": {"imbalance": 0.5}}, r"data.imbalance is 0.5, .* no classes: leave it at 1.0"),
        ({"data": {"proxy_imbalance": 0.5}}, r"data.proxy_imbalance is 0.5, .*leave it at 1.0"),
        ({"data": {"proxy_evened": True}}, r"data.proxy_evened is True, .*leave it at False"),
        ({"partition": {"corrupted": 0.1}}, r"partition.corrupted is 0.1, .*leave it at 0.0"),
        (
            {"partition": {"how": "shards"}},
            r"partition.how, shards: shards needs classes, .*write quantiles\(shards\(",
        ),
    ],
)
def test_settings_of_classes_are_refused_without_them(settings, message):
    with pytest.raises(ConfigError, match=message):
        cut_rows(changed(REGRESSION, **settings), load("diabetes"))


@pytest.mark.parametrize("how", ["iid", "size_dirichlet(alpha=1)", "quantiles(dirichlet(alpha=1))"])
def test_rows_without_classes_are_cut(how):
    experiment = changed(REGRESSION, partition={"how": how, "hold_out": 0.25})
    rows = cut_rows(experiment, load("diabetes"))
    assert rows.classes == 0 and len(rows.splits.proxy) == 10 and len(rows.splits.train) == 344
    assert rows.splits.proxy.labels.dtype == np.float32
    whole = cut_rows(changed(experiment, partition={"hold_out": 0.0}), load("diabetes")).parts
    assert whole.sizes().sum() == 344 and rows.parts.sizes().sum() < 0.8 * 344


def test_the_server_may_hold_rows_without_regard_to_class():
    federation = build(WINE)
    assert federation.context.proxy.size == 10
    assert federation.executor.population.sizes.sum() == 134
    with pytest.raises(ConfigError, match=r"set data.proxy_per_class .*or data.proxy_rows"):
        build(replace(changed(WINE, data={"proxy_rows": 0}), method="fedlaw"))


FOLDER = Path(os.environ.get("FEDBASIN_DATA", ""), "local")
needs_data = pytest.mark.skipif(
    "FEDBASIN_DATA" not in os.environ or not FOLDER.is_dir(),
    reason="FEDBASIN_DATA names no mirror with tables",
)


def table(name):
    """Return train and test of a table as data frames."""
    folder = next((FOLDER / name).glob("*/train-*.parquet")).parent
    return [pq.read_table(sorted(folder.glob(f"{s}-*.parquet"))).to_pandas() for s in SPLITS]


SPLITS = ("train", "test")


@needs_data
def test_covertype_by_wilderness_area_learns(tmp_path):
    """Seven classes of forest from ten whole numbers (int16) a row, four natural clients."""
    train, test = table("covertype-sample")
    numbers = train.drop(columns=["wilderness_area", "soil_type", "cover_type"]).columns
    classes = tuple(sorted(train["cover_type"].unique()))
    areas = tuple(sorted(train["wilderness_area"].unique()))
    middle, spread = train[numbers].mean(), train[numbers].std()

    def rows(frame):
        return Rows(
            ((frame[numbers] - middle) / spread).to_numpy(),
            frame["cover_type"].map(classes.index).to_numpy(np.int64),
            frame["wilderness_area"].map(areas.index).to_numpy(np.int64),
        )

    data = Dataset("covertype", "table", rows(train), rows(test), classes, areas)
    assert data.train.inputs.dtype == np.float64
    experiment = Experiment(
        "fedavg",
        model="mlp(widths=(32,))",
        rounds=10,
        partition=PartitionConfig(how="natural", clients=4),
        local=LocalConfig(lr=0.1, batch=64),
        sim=SimConfig(participation="fraction(rate=1.0)", device="cpu", evaluate_every=10),
    )
    summary = run(experiment, tmp_path, data=data)
    assert summary["accuracy_last"] > 0.45  # 0.61 when it was written; chance is 0.14
    held = pandas.read_csv(tmp_path / "partition.csv")
    assert held["rows"].tolist() == train["wilderness_area"].value_counts()[list(areas)].tolist()


@needs_data
def test_california_housing_is_shared_out_by_price_and_by_place():
    train, test = table("california-housing")
    train, test = train.dropna(), test.dropna()
    numbers = train.drop(columns=["median_house_value", "ocean_proximity"]).columns
    places = tuple(sorted(train["ocean_proximity"].unique()))

    def rows(frame):
        return Rows(
            frame[numbers].to_numpy(np.float32),
            frame["median_house_value"].to_numpy(np.float32),
            frame["ocean_proximity"].map(places.index).to_numpy(np.int64),
        )

    data = Dataset("housing", "table", rows(train), rows(test), (), places)
    pool = Pool(data.train.labels, groups=data.train.groups)
    price = data.train.labels
    for how in ("iid", "quantiles(shards(per_client=1))", "natural"):
        split = parse(how)(pool, 5, np.random.default_rng(0))
        assert split.sizes().sum() >= len(train) - 5
        means = sorted(price[mine].mean() for mine in split.clients)
        if how == "iid":
            assert means[-1] / means[0] < 1.05
        elif how == "natural":
            wanted = train.groupby("ocean_proximity")["median_house_value"].mean()
            np.testing.assert_allclose(means, sorted(wanted), rtol=1e-4)
        else:
            fifths = np.array_split(np.sort(price), 5)
            np.testing.assert_allclose(means, [part.mean() for part in fifths], rtol=0.01)
    with pytest.raises(ValueError, match=r"inputs holds nan in row \d+: fill in"):
        rows(table("california-housing")[0])


@needs_data
def test_breast_cancer_survival_has_two_targets_a_row():
    train, _ = table("fed-tcga-brca")
    features = train.drop(columns=["center", "region", "event", "time"]).to_numpy(np.int16)
    rows = Rows(features, train[["time", "event"]].to_numpy(np.float32), train["center"].to_numpy())
    data = Dataset("brca", "table", rows, rows, ())
    experiment = changed(
        REGRESSION, partition={"how": "quantiles(dirichlet(alpha=0.3), column=0)", "clients": 6}
    )
    cut = cut_rows(experiment, data)
    assert cut.splits.train.labels.shape == (len(train) - 10, 2)
    assert cut.parts.sizes().sum() == len(train) - 10
    centers = cut_rows(changed(REGRESSION, partition={"how": "natural", "clients": 6}), data)
    kept = np.bincount(centers.splits.train.groups)
    assert centers.parts.sizes().tolist() == kept.tolist()

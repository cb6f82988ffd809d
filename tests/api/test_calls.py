"""Run and compare from Python: data, networks and methods as objects."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedbasin as fb
from fedbasin.api.progress import console_for_a_bar
from fedbasin.core.catalogue import CATALOGUE
from fedbasin.core.expressions import ExpressionError
from fedbasin.core.record import RecordError
from fedbasin.core.settings import flatten
from fedbasin.core.state import read
from fedbasin.experiment import ConfigError, Experiment
from fedbasin.experiment import run as run_experiment
from fedbasin.experiment.sharing import StoredDataset

ROUNDS = {"rounds": 2, "progress": False}


def table(rows=200, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 5)).astype(np.float32)
    y = (x @ np.array([1.0, -1.0, 0.5, 0.0, 0.0]) > 0).astype(np.int64)
    return x, y, np.array([f"site {i % 4}" for i in range(rows)])


@pytest.fixture(scope="module")
def data():
    x, y, sites = table()
    return fb.data.from_arrays(x, y, clients=sites)


def make_network(shape, outputs):
    return nn.Sequential(nn.Linear(shape[0], 4), nn.ReLU(), nn.Linear(4, outputs))


def same_models(*folders, slack=0.0):
    models = [read(Path(folder) / "model.safetensors") for folder in folders]
    return all(
        torch.allclose(models[0][name], other[name], rtol=0, atol=slack)
        for other in models[1:]
        for name in models[0]
    )


# -- names of the catalogue ------------------------------------------------------------------------


def test_every_entry_of_the_house_is_a_name_of_the_package():
    house = {n for n, card in CATALOGUE.items() if card.make.__module__.startswith("fedbasin.")}
    assert house <= set(dir(fb))
    for name in house:
        made = getattr(fb, name)
        assert callable(made) and inspect.getdoc(made)
        names = list(inspect.signature(made).parameters)
        assert set(names) >= {p.name for p in CATALOGUE[name].parameters}


def test_no_room_of_the_package_hides_a_public_name():
    rooms = {path.stem for path in Path(fb.__file__).parent.iterdir()}
    assert rooms & set(fb.__all__) == {"data", "testing"}  # which are meant as modules


def test_constructors_say_what_expressions_say():
    assert fb.text(fb.ima(fb.scaffold(server_lr=0.5), window=3)) == (
        "ima(scaffold(server_lr=0.5), window=3)"
    )
    assert fb.dirichlet(alpha=0.3) == fb.parse("dirichlet(alpha=0.3)")
    assert fb.dirichlet(0.3) == fb.dirichlet(alpha=0.3)
    assert fb.warmup(then=fb.cosine()) == fb.parse("warmup(then=cosine)")
    with pytest.raises(ExpressionError, match="dirichlet: argument 'alpha' is 'x', it must be a"):
        fb.dirichlet(alpha="x")
    with pytest.raises(TypeError, match="alpha"):
        fb.dirichlet()
    with pytest.raises(AttributeError, match="no attribute 'dirichle'"):
        _ = fb.dirichle


def test_an_experiment_takes_objects_for_every_expression():
    by_object = Experiment(
        method=fb.ima(fb.fedadam(lr=0.02), window=3),
        model=fb.mlp(widths=(8,)),
        task=fb.binary(),
        partition=fb.PartitionConfig(how=fb.shards(per_client=3)),
        local={"schedule": fb.cosine(), "optimiser": fb.adamw(weight_decay=0.1), "lr": 0.01},
        sim=fb.SimConfig(participation=fb.count(clients=3), metrics=[fb.macro_f1(), "ece"]),
    )
    by_text = Experiment(
        method="ima(fedadam(lr=0.02), window=3)",
        model="mlp(widths=(8,))",
        task="binary",
        partition=fb.PartitionConfig(how="shards(per_client=3)"),
        local=fb.LocalConfig(schedule="cosine", optimiser="adamw(weight_decay=0.1)", lr=0.01),
        sim=fb.SimConfig(participation="count(clients=3)", metrics=("macro_f1", "ece")),
    )
    assert by_object == by_text
    assert by_object.to_toml() == by_text.to_toml()
    assert "objects" not in by_object.to_toml()
    assert Experiment(method=fb.fedavg) == Experiment(method="fedavg")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": 3}, "model is 3: give an expression such as 'mlp', a torch.nn.Module, or a"),
        ({"method": object()}, "method: .* is not in the catalogue: .*@entry.'method'"),
        ({"method": fb.cosine()}, "method: 'cosine' is a schedule, not a method"),
        ({"local": 3}, r"local is 3, it must be a section: write local=\{'lr': \.\.\.\}"),
        ({"local": {"rate": 1}}, "unknown setting 'local.rate'; "),
        ({"sim": {"metrics": [3]}}, "sim.metrics: 3 is not in the catalogue"),
    ],
)
def test_objects_that_do_not_fit_are_refused_by_field(settings, message):
    with pytest.raises(ConfigError, match=message):
        Experiment(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 2.5}, r"^rounds is 2\.5, it must be a whole number"),
        ({"rounds": "3"}, r"^rounds is '3', it must be a whole number"),
        ({"rounds": True}, r"^rounds is True, it must be a whole number"),
        ({"rounds": 0}, r"^rounds must be at least 1, got 0"),
        ({"seed": 1.5}, r"^seed is 1\.5, it must be a whole number"),
        ({"seed": None}, r"^seed is None, it must be a whole number"),
        ({"init": 3}, r"^init is 3, it must be a quoted string"),
        ({"local": fb.LocalConfig(lr="fast")}, r"^local\.lr is 'fast', it must be a number"),
        ({"local": fb.LocalConfig(lr=-1)}, r"^local\.lr must be at least 0, got -1"),
        ({"sim": fb.SimConfig(executor="fast")}, r"^sim\.executor is 'fast', it must be 'auto' or"),
        ({"sim": {"metrics": "macro_f1"}}, r"^sim\.metrics is 'macro_f1'.*: write \('macro_f1',\)"),
        ({"sim": {"participation": 0.1}}, r"^sim\.participation: 0\.1 .*such as 'fraction', or"),
        ({"partition": 5}, r"^partition is 5, .*: write partition=\{'how': \.\.\.\}"),
    ],
)
def test_python_is_refused_what_the_command_line_refuses(settings, message, data, tmp_path):
    calls = (
        lambda: Experiment(**settings),
        lambda: fb.run(data, tmp_path / "run", progress=False, **settings),
        lambda: fb.run(Experiment(), tmp_path / "run", progress=False, **settings),
    )
    for call in calls:
        with pytest.raises(ConfigError, match=message):
            call()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value", "advised"),
    [
        ("lr", 0.05, "local={'lr': ...}"),
        ("participation", "fraction(rate=0.5)", "sim={'participation': ...}"),
        ("clients", 7, "partition={'clients': ...}"),
    ],
)
def test_a_setting_outside_its_section_is_refused_with_advice_that_works(
    name, value, advised, data
):
    with pytest.raises(ConfigError) as refused:
        fb.run(data, **{name: value})
    assert str(refused.value).startswith(f"unknown setting {name!r}; did you mean {advised}")
    advice = ast.parse(f"given({advised.replace('...', repr(value))})", mode="eval").body
    settings = {one.arg: ast.literal_eval(one.value) for one in advice.keywords}
    assert flatten(Experiment(**settings).settings()).items() >= flatten(settings).items()


def test_numbers_of_numpy_are_settings(data, tmp_path):
    settings = {"rounds": np.int64(1), "seed": np.int64(3), "local": {"lr": np.float32(0.5)}}
    run = fb.run(data, tmp_path / "a", model="logistic", progress=False, **settings)
    kept = (run.path / "config.toml").read_text()
    assert "seed = 3" in kept and "rounds = 1" in kept and "lr = 0.5" in kept


def test_a_file_is_no_folder_for_results(data, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for call in (fb.run, fb.compare, fb.tune):
        with pytest.raises(ValueError, match=r"^out: .*notes\.txt is a file; name a folder$"):
            call(data, out=tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_without_a_run_cannot_predict(tmp_path):
    with pytest.raises(RecordError, match=r"nothing holds no run: there is no config\.toml in it"):
        fb.predict(tmp_path / "nothing", table()[0])


def test_similar_names_of_the_package_are_suggested():
    with pytest.raises(AttributeError, match=r"no attribute 'fedproxx'; did you mean fedprox"):
        _ = fb.fedproxx
    with pytest.raises(AttributeError, match=r"no attribute 'zzzzzz'$"):
        _ = fb.zzzzzz


def test_numbers_of_numpy_are_seeds(data, tmp_path):
    out = tmp_path / "a"
    seeds = np.arange(2)
    fb.compare(data, ["fedavg"], seeds, out, model="logistic", jobs=1, **ROUNDS)
    assert sorted(path.name for path in out.glob("fedavg/*")) == ["seed0", "seed1"]


def test_a_definition_executed_again_replaces_the_earlier_one():
    def define(factor):
        @fb.entry("schedule", name="halving_twice")
        def halving_twice(round, rounds, *, by: float = factor):
            """A schedule that a notebook cell defines."""
            return by

        return halving_twice

    try:
        first = define(2.0)
        second = define(3.0)
        assert CATALOGUE["halving_twice"].make is second and first is not second
        with pytest.raises(ValueError, match="'halving_twice' is taken by"):

            @fb.entry("schedule", name="halving_twice")
            def another(round, rounds):
                """Another one."""
    finally:
        del CATALOGUE["halving_twice"]


# -- runs ------------------------------------------------------------------------------------------


def test_a_module_is_copied_and_its_weights_are_the_start(data, tmp_path):
    module = nn.Linear(5, 1)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    still = fb.run(data, tmp_path / "a", model=module, task="binary", local={"lr": 0.0}, **ROUNDS)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert torch.allclose(read(still.path / "model.safetensors")[name], before[name])
    for seed in (0, 1):  # the start is the same for every seed
        run = fb.run(
            data, tmp_path / f"b{seed}", model=module, task="binary", seed=seed, rounds=1,
            local={"lr": 0.0}, progress=False,
        )  # fmt: skip
        assert torch.allclose(read(run.path / "model.safetensors")["weight"], before["weight"])
    assert still.model().weight.shape == (1, 5)
    assert not still.model().training


def test_arrays_a_dataset_and_an_experiment_are_the_same_run(tmp_path):
    x, y, sites = table()
    data = fb.data.from_arrays(x, y, clients=sites)
    fb.run(data, tmp_path / "a", model=make_network, **ROUNDS)
    fb.run(data=data, out=tmp_path / "b", model=make_network, **ROUNDS)
    base = Experiment(
        model=make_network,
        rounds=2,
        partition={"how": "natural", "clients": 0},
        sim={"participation": "at_most(clients=20)"},
    )
    fb.run(base, tmp_path / "c", data=data)
    run_experiment(base, tmp_path / "d", data=data)
    assert same_models(*(tmp_path / name for name in "abcd"))
    pair = fb.run((x, y), tmp_path / "e", model="logistic", partition={"clients": 3}, **ROUNDS)
    assert pair["clients"] == 3 and pair["task"] == "classification"


def test_the_run_folder_names_objects_by_content(data, tmp_path):
    run = fb.run(data, tmp_path / "run", model=make_network, **ROUNDS)
    config = (run.path / "config.toml").read_text()
    assert f'name = "{data.name}"' in config
    assert "model = \"given(name='make_network')\"" in config
    assert run["dataset"] == data.name and run["clients"] == 4
    assert run.records[-1].round == 2
    assert list(run.rounds["round"]) == [1, 2]
    assert "make_network" not in repr(run) and "seed 0" in repr(run)


class Stop(Exception):
    pass


def stop(record):
    raise Stop


def test_resume_takes_the_same_objects_and_refuses_others_by_name(data, tmp_path):
    whole = fb.run(data, tmp_path / "whole", model=make_network, **ROUNDS)
    out = tmp_path / "stopped"
    with pytest.raises(Stop):
        fb.run(data, out, model=make_network, on_round=stop, **ROUNDS)
    with pytest.raises(RecordError, match=rf"begun on other data: {data.name}, and data= is arr"):
        fb.resume(out, data=fb.data.from_arrays(*table(seed=1)[:2]), model=make_network)

    def wider(shape, outputs):
        return nn.Linear(shape[0], outputs)

    with pytest.raises(RecordError, match=r"begun with the network .*make_network.*wider"):
        fb.resume(out, data=data, model=wider)
    wider.__name__ = "make_network"
    with pytest.raises(RecordError, match=r"begun with the network make_network \(hash"):
        fb.resume(out, data=data, model=wider)
    with pytest.raises(ConfigError, match=r"make_network was given as a Python object; give it ag"):
        fb.resume(out, data=data)
    with pytest.raises(RecordError, match=r"begun on data in memory, arrays-.*, data=\.\.\.\)"):
        fb.resume(out, model=make_network)
    assert fb.resume(out, data=data, model=make_network)["status"] == "finished"
    assert same_models(whole.path, out)


def test_a_finished_run_is_read_without_its_objects_and_refuses_others(data, tmp_path):
    run = fb.run(data, tmp_path / "run", model=make_network, **ROUNDS)
    for objects in ({}, {"data": data}, {"model": make_network}):
        assert fb.resume(run.path, **objects)["rounds"] == 2
    with pytest.raises(RecordError, match="was begun on other data"):
        fb.resume(run.path, data=fb.data.from_arrays(*table(seed=1)[:2]))

    def wider(shape, outputs):
        return nn.Linear(shape[0], outputs)

    with pytest.raises(RecordError, match=r"begun with the network .*make_network.*wider"):
        fb.resume(run.path, model=wider)
    with pytest.raises(RecordError, match=r"trained with another network than .*wider"):
        fb.predict(run.path, table()[0][:3], model=wider)


def test_a_run_that_is_ended_early_has_a_summary_and_a_model(data, tmp_path):
    run = fb.run(
        data, tmp_path / "run", model=make_network, rounds=9, on_round=lambda r: r.round == 2
    )
    assert run["rounds"] == 2 and run["status"] == "finished"
    assert run["reason"] == "ended early by on_round after round 2"
    assert run.model() is not None
    assert fb.resume(run.path, data=data, model=make_network)["rounds"] == 2


def test_weights_from_a_file_are_the_start(data, tmp_path):
    first = fb.run(data, tmp_path / "first", model="mlp(widths=(4,))", **ROUNDS)
    file = str(first.path / "model.safetensors")
    again = fb.run(
        data, tmp_path / "again", model="mlp(widths=(4,))", init=file, seed=5, local={"lr": 0.0},
        **ROUNDS,
    )  # fmt: skip
    assert same_models(first.path, again.path, slack=1e-6)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no tensors")
    cases = [
        (str(tmp_path / "none"), "mlp(widths=(4,))", "init: .*none does not exist"),
        (str(broken), "mlp(widths=(4,))", "init: .*broken.safetensors is not a readable safetens"),
        (file, "mlp(widths=(3,))", r"init: .* has the shape \[4.*the network's has \[3"),
        (file, "logistic", "init: .* holds 'body.* does not fit"),
    ]
    for init, model, message in cases:
        with pytest.raises(ConfigError, match=message):
            fb.run(data, tmp_path / "bad", model=model, init=init, **ROUNDS)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda shape, outputs: 3, "model: <lambda> returned a int, not a torch.nn.Module"),
        (lambda shape: nn.Linear(5, 1), r"model: <lambda> cannot be called with \(shape, outputs"),
        (nn.Linear, r"model: Linear\(\(5,\), 2\) failed .*give a module, or a function"),
        (nn.Linear(5, 7), r"model: .* gives 7 outputs a row, and the task classification needs 2"),
        (nn.LazyLinear(2), "model: weight of LazyLinear has no shape yet"),
        (nn.Linear(5, 2, device="meta"), "model: weight of Linear is on the device 'meta'"),
    ],
)
def test_networks_that_do_not_fit_are_refused(data, tmp_path, model, message):
    with pytest.raises(ConfigError, match=message):
        fb.run(data, tmp_path / "run", model=model, **ROUNDS)


def test_a_network_that_cannot_take_the_rows_is_named_beside_them(data, tmp_path):
    with pytest.raises(ConfigError, match=r"Linear.*cannot take rows of .*, float32 \[5\] each"):
        fb.run(data, tmp_path / "a", model=nn.Linear(9, 2), **ROUNDS)
    tokens = np.arange(60).reshape(20, 3)
    lookup = nn.Sequential(nn.Embedding(60, 2), nn.Flatten(), nn.Linear(6, 1))
    settings = {"model": lookup, "partition": {"clients": 2}, **ROUNDS}
    with pytest.raises(ConfigError, match="kind='text'"):
        fb.run((tokens, np.linspace(0, 1, 20)), tmp_path / "b", **settings)
    data = fb.data.from_arrays(tokens, np.linspace(0, 1, 20), kind="text")
    assert fb.run(data, tmp_path / "c", **settings)["rounds"] == 2


def test_few_rows_without_clients_are_dealt_to_few(tmp_path):
    x, y, _ = table(130)
    assert fb.run((x, y), tmp_path / "a", model="logistic", **ROUNDS)["clients"] == 2


def test_what_is_given_wins_over_the_defaults_of_own_data(data, tmp_path):
    given = {
        "partition": {"how": "iid", "clients": 3},
        "sim": {"participation": "count(clients=2)"},
    }
    run = fb.run(data, tmp_path / "a", model="logistic", **given, **ROUNDS)
    assert run["clients"] == 3 and run["partition"] == "iid"
    kept = (run.path / "config.toml").read_text()
    assert 'participation = "count(clients=2)"' in kept


def test_a_method_is_imported_from_its_room():
    from fedbasin.methods import IMA, ima
    from fedbasin.methods.ima import IMA as of_its_file

    assert ima is IMA is of_its_file
    assert fb.text(ima(fb.scaffold(), window=3)) == "ima(scaffold, window=3)"


def test_calls_that_make_no_sense_are_refused(data, tmp_path):
    cases = [
        (lambda: fb.run(data, data=data), "the data is given twice"),
        (lambda: fb.compare(data, "fedavg"), r"methods is 'fedavg': give a list"),
        (lambda: fb.compare(data, ["fedavg"], method="fedavg"), r"takes methods=\[...\]"),
        (lambda: fb.compare(data, fb.fedprox), r"methods is .*: give a list, such as methods=\['f"),
        (lambda: fb.compare(data, ["fedavg"], jobs=0), "jobs must be at least 1, got 0"),
        (
            lambda: fb.compare(data, ["fedavg"], jobs=1.5),
            r"jobs is 1\.5, it must be a whole number",
        ),
        (lambda: fb.compare(data, seed=3), r"takes seeds=\[3\], not seed"),
        (lambda: fb.compare(data, seeds=3), r"seeds is 3: give a list, such as seeds=\[0, 1, 2\]"),
        (lambda: fb.compare(data, seeds="0..2"), r"seeds is '0\.\.2': give a list"),
        (lambda: fb.compare(data, seeds=[0.5]), r"seed is 0\.5, it must be a whole number"),
        (lambda: fb.run(data, out=3), "out is 3, it must be a path or a quoted string or None"),
        (lambda: fb.run(data, epsilon="3"), "epsilon is '3', it must be a number or None"),
        (lambda: fb.compare(data, data_dir=3), "data_dir is 3, it must be a path or"),
        (lambda: fb.run(data, lr=0.1), r"unknown setting 'lr'; did you mean local=\{'lr'"),
        (lambda: fb.run(3), r"data is a int: give \(x, y\)"),
    ]
    for call, message in cases:
        with pytest.raises(ConfigError, match=message):
            call()


# -- comparisons -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comparison(data, tmp_path_factory):
    return fb.compare(
        data,
        ["fedavg", fb.wima(fb.scaffold(), window=2)],
        seeds=range(2),
        out=tmp_path_factory.mktemp("comparison") / "c",
        model=make_network,
        task="binary",
        rounds=2,
        jobs=1,
        progress=False,
    )


def test_a_comparison_shows_itself(comparison, tmp_path):
    assert [(run["method"], run["seed"]) for run in comparison] == [
        ("fedavg", 0), ("wima(scaffold, window=2)", 0),
        ("fedavg", 1), ("wima(scaffold, window=2)", 1),
    ]  # fmt: skip
    assert len(comparison) == 4 and len(comparison.frame) == 4
    assert {"method", "seed", "auroc_last", "path"} <= set(comparison.frame.columns)
    assert comparison.rounds.groupby(["method", "seed"]).size().to_dict() == {
        (run["method"], run["seed"]): 2 for run in comparison
    }
    assert "wima(scaffold, window=2)" in repr(comparison)
    page = comparison._repr_html_()
    assert "<table>" in page and "data:image/png" in page and comparison.verdict[:20] in page
    assert comparison.report(tmp_path / "report.html").read_text().startswith("<!")


def test_a_comparison_is_text_in_a_notebook_too(comparison, monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # a kernel sets it
    shown = repr(comparison)
    assert "│ fedavg" in shown and "\x1b" not in shown and shown.endswith(str(comparison.path))


def test_the_bar_of_a_notebook_needs_ipywidgets(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setitem(sys.modules, "ipykernel", pytest)
    monkeypatch.setattr("fedbasin.api.progress.find_spec", lambda name: "found")
    assert console_for_a_bar().is_jupyter
    monkeypatch.setattr("fedbasin.api.progress.find_spec", lambda name: None)
    plain = console_for_a_bar()
    assert not plain.is_jupyter
    assert not plain.is_terminal  # a notebook does not understand codes that move a cursor


def test_the_best_run_is_of_the_method_with_the_best_mean(comparison):
    frame = comparison.frame
    means = frame.groupby("method")["auroc_mean_last10"].mean()
    own = frame[frame["method"] == means.idxmax()]
    assert comparison.best["auroc_mean_last10"] == own["auroc_mean_last10"].max()
    assert comparison.best["method"] == means.idxmax()
    lucky = [  # one run of the other method is better than all
        fb.RunResult(run.path, {**run.summary, "auroc_mean_last10": 2.0}, make_network)
        if run["method"] != means.idxmax()
        else run
        for run in comparison
    ]
    assert fb.Comparison(lucky, comparison.path).best.path == comparison.best.path


def test_prediction_equals_the_network_by_hand(comparison):
    x, _, _ = table(seed=3)
    module = comparison.best.model()
    with torch.no_grad():
        chance = module(torch.from_numpy(x)).sigmoid()[:, 0].numpy()
    told = comparison.best.predict(x, probabilities=True)
    assert np.allclose(told[:, 1], chance, atol=1e-6)
    assert (comparison.best.predict(x) == np.where(chance > 0.5, "1", "0")).all()
    with pytest.raises(ValueError, match=r"rows have the shape \[200, 4\], the network takes \[n,"):
        comparison.best.predict(x[:, :4])


def test_processes_give_the_same_runs(comparison, data, tmp_path):
    other = fb.compare(
        data,
        ["fedavg", fb.wima(fb.scaffold(), window=2)],
        seeds=range(2),
        out=tmp_path / "c",
        model=make_network,
        task="binary",
        rounds=2,
        jobs=2,
        progress=False,
    )
    for one, two in zip(comparison, other, strict=True):
        assert same_models(one.path, two.path)


def test_stored_data_is_the_data(data, tmp_path):
    stored = StoredDataset.write(data, tmp_path / "stored")
    opened = stored.dataset
    assert stored.dataset is opened  # runs of one process share it
    assert isinstance(opened.train.inputs, np.memmap)
    for split in ("train", "test"):
        for name in ("inputs", "labels", "groups"):
            one, two = (getattr(getattr(each, split), name) for each in (data, opened))
            assert np.array_equal(one, two)
    assert (opened.name, opened.classes, opened.group_names) == (
        data.name, data.classes, data.group_names,
    )  # fmt: skip


SCRIPT = """
import numpy as np
import fedbasin as fb
from torch import nn

x = np.random.default_rng(0).normal(size=(60, 3)).astype("float32")
{definition}
result = fb.compare((x, x[:, 0]), ["fedavg"], seeds=[0, 1], rounds=1, out="out", jobs={jobs},
                    model={model}, partition={{"clients": 3}})
print("runs", len(result))
"""
NETWORK = "def mine(shape, outputs):\n    return nn.Linear(shape[0], outputs)\n"


@pytest.mark.parametrize(
    ("definition", "model", "jobs", "expected"),
    [
        ("", "'logistic'", 2, "runs 2"),  # the script has no main guard
        (NETWORK, "mine", 2, "mine is defined in script.py, which other processes must import"),
        (NETWORK, "mine", None, "runs 2"),
    ],
)
def test_scripts_without_a_main_guard(tmp_path, definition, model, jobs, expected):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(definition=definition, model=model, jobs=jobs))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert expected in done.stdout + done.stderr


def test_networks_that_cannot_be_sent_run_in_one_process(data, tmp_path):
    def inner(shape, outputs):
        return nn.Linear(shape[0], outputs)

    other = nn.Sequential(nn.Linear(5, 2))
    other.scale = lambda x: x
    elsewhere = {"nn": nn, "__name__": "no_such_module"}
    exec(NETWORK, elsewhere)
    for number, model in enumerate((inner, other, elsewhere["mine"])):
        settings = {"model": model, "seeds": [0, 1], "out": tmp_path / str(number), **ROUNDS}
        with pytest.raises(ConfigError, match="cannot be sent to other processes"):
            fb.compare(data, ["fedavg"], jobs=2, **settings)
        assert len(fb.compare(data, ["fedavg"], **settings)) == 2


def test_what_a_notebook_defines_runs_in_one_process(data, tmp_path):
    code = (
        "import fedbasin as fb, numpy as np\nfrom dataclasses import dataclass\n"
        "from fedbasin.methods import FedAvg\n"
        "@fb.entry('method')\n@dataclass(frozen=True)\nclass Mine(FedAvg):\n    'Mine.'\n"
        "x = np.random.default_rng(0).normal(size=(60, 3))\n"
        "def go(jobs):\n"
        "    return fb.compare((x, x[:, 0]), ['mine'], seeds=[0, 1], rounds=1,\n"
        "        out=f'out{jobs}', jobs=jobs, model='logistic', partition={'clients': 3})\n"
        "print('runs', len(go(None)))\n"
        "try:\n    go(2)\nexcept ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-"], input=code, cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert "runs 2" in done.stdout, done.stderr
    assert "mine is defined in this notebook" in done.stdout

"""Pieces and modules of a user's own give equal models in every engine, through `fb.run`."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedbasin as fb
import fedbasin.experiment
from fedbasin.core.catalogue import CATALOGUE
from fedbasin.core.rng import root, torch_draws_from
from fedbasin.core.state import read

ENGINES = {
    "cohort": {"executor": "cohort"},
    "workers": {"executor": "loop", "workers": 2},
    "ray": {"executor": "ray", "workers": 1},
}
# Ray leaves files of its own open while it starts.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def engine(request):
    if request.param == "ray":
        ray = pytest.importorskip("ray", reason="needs the extra ray: pip install 'fedbasin[ray]'")
        yield ENGINES["ray"]
        ray.shutdown()
    else:
        yield ENGINES[request.param]


def rows():
    x = np.random.default_rng(0).normal(size=(160, 4)).astype(np.float32)
    return x, x[:, 0] + 0.1 * x[:, 1]


def trained(out, sim, **settings):
    sim = {"device": "cpu", "precision": "fp64", "participation": "fraction(rate=1)"} | sim
    return fb.run(out=out, rounds=3, progress=False, sim=sim, **settings)


def assert_same(one, other):
    ours, theirs = (read(run.path / "model.safetensors") for run in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-8, atol=1e-9)


@pytest.fixture
def pieces(monkeypatch):
    """A module that worker processes import by name; the catalogue is restored afterwards."""
    before = set(CATALOGUE)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    yield "own_pieces"
    for name in set(CATALOGUE) - before:
        del CATALOGUE[name]
    sys.modules.pop("own_pieces", None)


@pytest.mark.parametrize("engine", ["cohort", "workers"], indirect=True)
def test_loss_metric_optimiser_schedule_and_partition_of_ones_own(engine, pieces, tmp_path):
    settings = {
        "data": fb.data.from_arrays(*rows()),
        "model": "mlp(widths=(8,))",
        "task": f"{pieces}.quartic",
        "partition": {"how": f"{pieces}.in_order", "clients": 4},
        "local": {
            "lr": 0.01,
            "optimiser": f"{pieces}.signed",
            "schedule": f"{pieces}.harmonic",
        },
    }
    metrics = {"metrics": [f"{pieces}.within"]}
    loop = trained(tmp_path / "loop", metrics | {"executor": "loop"}, **settings)
    assert loop["headline"] == "rmse" and 0 <= loop["within_last"] <= 1
    other = trained(tmp_path / "other", metrics | engine, **settings)
    assert_same(loop, other)
    plain = trained(tmp_path / "plain", {}, **settings | {"local": {"lr": 0.01}})
    weights = [read(run.path / "model.safetensors")["head.weight"] for run in (loop, plain)]
    assert not torch.allclose(*weights)


def normalised():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def dropping():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))


def attentive():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return nn.Sequential(
        nn.Unflatten(1, (4, 1)), nn.Linear(1, 4), encoder, nn.Flatten(), nn.Linear(16, 1)
    )


def settings_of(maker):
    with torch_draws_from(root(3)):
        module = maker()
    return {
        "data": fb.data.from_arrays(*rows()),
        "model": module,
        "partition": {"how": "iid", "clients": 4},
        "local": {"batch": 16},
    }


@pytest.mark.parametrize(
    ("maker", "engine"),
    [
        (maker, engine)
        for maker in (normalised, dropping, attentive)
        for engine in ENGINES
        if (maker, engine) != (normalised, "cohort")  # refused: the test below
    ],
    indirect=["engine"],
)
def test_a_module_of_ones_own_is_the_same_in_every_engine(maker, engine, tmp_path):
    settings = settings_of(maker)
    loop = trained(tmp_path / "loop", {"executor": "loop"}, **settings)
    assert_same(loop, trained(tmp_path / "other", engine, **settings))
    start = settings["model"].state_dict()
    end = read(loop.path / "model.safetensors")
    assert any(not torch.allclose(end[name].to(start[name].dtype), start[name]) for name in start)


def test_batchnorm_is_refused_as_one_matrix_and_trained_by_auto(tmp_path):
    settings = settings_of(normalised)
    with pytest.raises(fb.experiment.ConfigError, match="BatchNorm statistics cannot be kept"):
        trained(tmp_path / "cohort", {"executor": "cohort"}, **settings)
    loop = trained(tmp_path / "loop", {"executor": "loop"}, **settings)
    assert_same(loop, trained(tmp_path / "auto", {"executor": "auto"}, **settings))

"""Exported networks give the run's outputs, in a process that cannot import fedbasin."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from typer.testing import CliRunner

import fedbasin as fb
from fedbasin.cli import app
from fedbasin.experiment.interface import Interface
from fedbasin.models import with_lora
from fedbasin.models.lora import LoRALinear, without_lora

OTHER = """
import json, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "fedbasin":
            raise ImportError("fedbasin is not here")
sys.meta_path.insert(0, Refuse())
import numpy as np
kind, *paths = sys.argv[1:]
for path in paths:  # one process for all: importing torch takes most of the time
    name = {"torch": "model.pt2", "onnx": "model.onnx"}[kind]
    if kind == "torch":
        import torch
        program = torch.export.load(f"{path}/{name}").module()
        network = lambda rows: program(torch.from_numpy(rows)).detach().numpy()
    else:
        import onnxruntime
        session = onnxruntime.InferenceSession(f"{path}/{name}", providers=["CPUExecutionProvider"])
        network = lambda rows: session.run(None, {"rows": rows})[0]
    rows = np.load(f"{path}/rows.npy")
    np.savez(f"{path}/answers.npz", one=network(rows[:1]), all=network(rows))
"""


def images():
    draws = np.random.default_rng(0)
    x = draws.integers(0, 256, (40, 1, 28, 28), dtype=np.uint8)
    return fb.data.from_arrays(x, np.arange(40) % 3)


def table():
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    return fb.data.from_arrays(x, x[:, 0])


CASES = {"mlp(widths=(8,))": table, "fmnist_cnn": images}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run and five of its rows, for every case."""
    made = {}
    for name, data in ((name, make()) for name, make in CASES.items()):
        place = tmp_path_factory.mktemp("run") / "r"
        settings = {"model": name, "partition": {"how": "iid", "clients": 2}, "rounds": 1}
        made[name] = fb.run(data, place, progress=False, **settings), data.train.inputs[:5]
    return made


def expected(run, rows):
    interface = Interface.read(run.path / "interface.json")
    with torch.no_grad():
        return run.model()(interface.prepared(rows)).numpy()


@pytest.mark.parametrize(("to", "name"), [("torch", "model.pt2"), ("onnx", "model.onnx")])
def test_programs_give_the_outputs_of_the_run(trained, to, name, tmp_path):
    if to == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason="needs the extra onnx")
    folders = [tmp_path / str(place) for place in range(len(trained))]
    for folder, (run, rows) in zip(folders, trained.values(), strict=True):
        written = fb.export(run.path, folder, to=to)
        assert [path.name for path in written] == [name, "interface.json"]
        np.save(folder / "rows.npy", rows)
    done = subprocess.run(
        [sys.executable, "-c", OTHER, to, *map(str, folders)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for folder, (run, rows) in zip(folders, trained.values(), strict=True):
        answers = np.load(folder / "answers.npz")
        wanted = expected(run, rows)
        np.testing.assert_allclose(answers["all"], wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(answers["one"], wanted[:1], rtol=1e-5, atol=1e-6)


def test_weights_are_those_of_the_run(trained, tmp_path):
    run, _ = trained["fmnist_cnn"]
    result = CliRunner().invoke(
        app, ["export", str(run.path), "--to", "safetensors", "--out", str(tmp_path / "e")]
    )
    assert result.exit_code == 0, result.output
    stored = load_file(tmp_path / "e" / "model.safetensors")
    own = run.model().state_dict()
    assert stored.keys() == own.keys()
    for name, values in stored.items():
        np.testing.assert_array_equal(values, own[name].numpy())
    interface = json.loads((tmp_path / "e" / "interface.json").read_text())
    assert interface["outputs"] == 3


def test_what_cannot_be_exported_is_said(trained, tmp_path):
    run, _ = trained["fmnist_cnn"]
    with pytest.raises(ValueError, match="to='tflite' is no format; available: "):
        fb.export(run.path, tmp_path / "e", to="tflite")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        fb.export(run.path, tmp_path / "full", to="torch")
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="to='hf' is for networks of hf"):
        fb.export(run.path, tmp_path / "e", to="hf")


def test_pairs_of_lora_are_added_to_their_weights():
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    adapted = with_lora(plain, rank=2, targets=("0",))
    torch.nn.init.ones_(adapted[0].lora_B)
    merged = without_lora(adapted)
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(merged(x), adapted(x))
    assert not any(isinstance(part, LoRALinear) for part in merged.modules())
    assert isinstance(adapted[0], LoRALinear)  # the network that is given stays

"""The app that `fedbasin flower new` writes runs as it is, and gives what a simulation gives."""

from __future__ import annotations

import sys
import tomllib

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid
from flwr.app import Context, RecordDict

from fedbasin.cli.app import app as command
from fedbasin.core.record import RunFolder
from fedbasin.deploy import Guard, nested, write_app
from fedbasin.deploy.federation import LocalFederation
from fedbasin.experiment import from_mapping, run


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A new app, importable for the time of a test."""
    result = CliRunner().invoke(command, ["flower", "new", str(tmp_path / "My-first app")])
    assert result.exit_code == 0, result.output
    assert "fedbasin flower up" in result.output
    monkeypatch.syspath_prepend(str(tmp_path / "My-first app"))
    yield tmp_path / "My-first app"
    for name in [n for n in sys.modules if n.startswith("my_first_app")]:
        del sys.modules[name]


def flat(settings, path=""):
    found = {}
    for key, value in settings.items():
        found |= flat(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
    return found


def test_a_new_app_equals_the_simulation_of_its_settings(package, tmp_path):
    described = tomllib.loads((package / "pyproject.toml").read_text())
    app = described["tool"]["flwr"]["app"]
    assert described["project"]["name"] == "my-first-app"
    assert app["components"]["serverapp"] == "my_first_app.server_app:app"
    from my_first_app import client_app, server_app

    assert app["config"]["federation"]["guard"] is True  # Guard(), whose bounds attacks.py measures
    assert (Guard().times, Guard().weight) == (3.0, 3.0)
    settings = flat(app["config"]) | {
        "federation.folder": str(tmp_path / "run"),
        "federation.guard": False,
        "method": "ima(scaffold, window=2, start=0.3)",
    }
    grid = LocalGrid(client_app.app, settings["partition.clients"])
    for context in grid.contexts.values():
        context.run_config = settings
    server_app.main(grid, Context(1, 1, {}, RecordDict(), settings))
    plain = nested(settings)
    del plain["federation"]
    run(from_mapping(plain), tmp_path / "simulated")
    ours = RunFolder(tmp_path / "run")
    theirs = RunFolder(tmp_path / "simulated")
    for a, b in zip(ours.read_rounds(), theirs.read_rounds(), strict=True):
        assert a.metric("accuracy") == pytest.approx(b.metric("accuracy"), abs=0.01)
        assert a.metric("loss") == pytest.approx(b.metric("loss"), rel=1e-4)
    found = load_file(ours.model)
    expected = load_file(theirs.model)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_folder_that_is_taken_or_has_no_name_is_refused(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ValueError, match="not empty"):
        write_app(tmp_path / "taken")
    for name in ("1st", "___", "a" * 33):
        with pytest.raises(ValueError, match="makes no app name"):
            write_app(tmp_path / name)


def test_flat_settings_become_sections():
    flat_settings = {"a": 1, "b.c": 2, "b.d.e": "x"}
    assert nested(flat_settings) == {"a": 1, "b": {"c": 2, "d": {"e": "x"}}}
    assert flat(nested(flat_settings)) == flat_settings


def test_a_federation_that_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        LocalFederation(tmp_path, 0)
    with pytest.raises(ValueError, match="leave tls out"):
        LocalFederation(tmp_path, 2, tls=True, simulate=True)


def test_a_mistake_is_told_before_any_process_is_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    app = tmp_path / "app"
    app.mkdir()
    said = [CliRunner().invoke(command, ["flower", "up", "app"]).exception]
    (app / "pyproject.toml").touch()
    (app / "mine_here.py").touch()
    for method in ("fedavgg", "mine_here.median"):
        result = CliRunner().invoke(command, ["flower", "up", "app", "--method", method])
        said.append(result.exception)
    assert "app is no Flower app, it has no pyproject.toml; fedbasin flower new app" in str(said[0])
    assert "no method is called 'fedavgg'; did you mean fedavg" in str(said[1])
    assert "the module mine_here enters nothing called 'median'" in str(said[2])
    assert list(tmp_path.iterdir()) == [app]


def test_without_flower_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr("fedbasin.cli.flower.find_spec", lambda name: None)
    for words in (["new", "x"], ["up"]):
        result = CliRunner().invoke(command, ["flower", *words])
        assert "pip install 'fedbasin[flower]'" in str(result.exception)


def test_the_bar_knows_the_rounds_that_an_app_asks_for(tmp_path):
    from fedbasin.cli.flower import _rounds

    write_app(tmp_path / "app")
    assert _rounds(tmp_path / "app") == 3
    for text in ("", "[tool]\nflwr = 1\n", "[tool.flwr.app.config]\nrounds = '3'\n"):
        (tmp_path / "pyproject.toml").write_text(text)
        assert _rounds(tmp_path) is None

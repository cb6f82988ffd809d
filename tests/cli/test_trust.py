"""A run folder that somebody sent: its settings may name modules, and these are code."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fedbasin.cli.app import app
from fedbasin.core.record import RunFolder

EVIL = {
    "method": 'method = "evil_module.median"',
    "task": 'task = "evil_module.task"',
    "network": "model = \"custom(path='evil_module:net')\"",
    "partition": '[partition]\nhow = "evil_module.cut"',
    "optimiser": '[local]\noptimiser = "evil_module.opt"',
}
COMMANDS = {
    "resume": ["resume"],
    "analyze": ["analyze", "plane"],
    "export": ["export"],
}


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """A folder beside a module that must not run."""
    (tmp_path / "evil_module.py").write_text("raise RuntimeError('it ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    return run


def refused(command, run):
    outcome = CliRunner().invoke(app, [*COMMANDS[command], str(run.path)])
    assert isinstance(outcome.exception, ValueError), outcome.exception
    said = str(outcome.exception)
    assert "the module 'evil_module' would be imported and run" in said and "--trust" in said


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("text", EVIL.values(), ids=list(EVIL))
def test_modules_of_a_sent_folder_are_not_imported(sent, command, text):
    sent.config.write_text(text)
    refused(command, sent)


def test_the_settings_that_a_run_was_begun_with_are_checked_too(sent):
    sent.config.write_text('method = "fedavg"')
    sent.begun.write_text(EVIL["method"])
    refused("resume", sent)


def test_a_report_imports_nothing(sent):
    sent.config.write_text(EVIL["method"])
    outcome = CliRunner().invoke(app, ["report", str(sent.path)])
    assert "it ran" not in str(outcome.exception)


@pytest.mark.parametrize("command", ["resume", "analyze"])  # export looks for a model first
def test_trusted_modules_are_imported(sent, command):
    sent.config.write_text(EVIL["method"])
    outcome = CliRunner().invoke(app, [*COMMANDS[command], str(sent.path), "--trust"])
    assert "it ran" in str(outcome.exception)

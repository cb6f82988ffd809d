"""The commands of the documents, as they are written: options, names and settings exist."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import fedbasin.experiment  # noqa: F401  (fills the catalogue)
from fedbasin.cli.app import _settings, app
from fedbasin.core.catalogue import CATALOGUE
from fedbasin.core.expressions import parse

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
AT_ONCE = ("methods", "data list", "partition digits", "paper list", "paper show", "paper config")


def commands(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = [
        line for block in re.findall(r"```\w*\n(.*?)```", text, re.S) for line in block.split("\n")
    ]
    spans = re.findall(r"`(fedbasin [^`]+)`", text)
    for line in (*blocks, *spans):
        if found := re.match(r"\s*(?:cd \S+ && )?fedbasin (.+)", line):
            words = shlex.split(found[1], comments=True)
            yield tuple(words[: next((i for i, w in enumerate(words) if w[0] in ">;|"), None)])


ALL = list(dict.fromkeys(command for page in PAGES for command in commands(page)))


def read(words):
    """Parse a command as the command line does, and return what it would be given."""
    command, left = typer.main.get_command(app), list(words)
    while hasattr(command, "commands") and left:
        assert left[0] in command.commands, f"there is no command {left[0]}"
        command = command.commands[left.pop(0)]
    if not left:  # the text speaks of the command and does not give it
        return {}
    return command.make_context(command.name, left).params


@pytest.fixture
def examples(monkeypatch):
    """Modules of the examples can be named; what they enter is gone afterwards."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    before = set(CATALOGUE)
    yield
    for name in set(CATALOGUE) - before:
        sys.modules.pop(CATALOGUE.pop(name).make.__module__, None)


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_a_documented_command_can_be_given(words, examples):
    given = read(words)
    if words[0] in ("run", "compare") and given:
        experiment = _settings(None, given["preset"], given["set_"])
        for method in given.get("methods") or [given.get("method") or experiment.method]:
            parse(method, "method")


SHOWN = [w for w in ALL if " ".join(w).startswith(AT_ONCE) and "NAME" not in w]


@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_a_documented_command_that_only_shows_something_shows_it(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, words, catch_exceptions=False)
    assert shown.exit_code == 0 and shown.output


def test_a_method_of_one_s_own_has_a_card(examples):
    shown = CliRunner().invoke(app, ["methods", "new_method.my_median"], catch_exceptions=False)
    assert shown.exit_code == 0 and "Coordinate-wise median" in shown.output
    with pytest.raises(ValueError, match="is an expression; give the name of one method"):
        CliRunner().invoke(app, ["methods", "ima(new_method.my_median)"], catch_exceptions=False)


def test_the_documents_have_commands():
    assert len(ALL) > 50

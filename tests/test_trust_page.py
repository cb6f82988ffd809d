"""docs/methods/trust.md against the lines of the runs it speaks of."""

import importlib.util
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "methods" / "trust.md").read_text(encoding="utf-8")


def loaded():
    spec = importlib.util.spec_from_file_location(
        "trust_evidence", ROOT / "benchmarks" / "evidence" / "trust.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TRUST = loaded()


def accuracy(setting, method, attack="none", case=""):
    """The mean over three seeds, in percent."""
    found = [
        line["accuracy"]
        for line in TRUST.lines(setting)
        if (line["method"], line["attack"], line["case"]) == (method, attack, case)
    ]
    assert len(found) == 3, (setting, method, attack, case)
    return 100 * mean(found)


@pytest.mark.parametrize("setting", TRUST.SETTINGS)
def test_the_tables_on_the_page_are_those_of_the_lines(setting):
    assert "\n".join(["", *TRUST.table(setting), ""]) in PAGE


@pytest.mark.parametrize("setting", TRUST.SETTINGS)
def test_lines_are_those_of_the_script(setting):
    """Same settings as written there, three seeds, nothing left out of a cell."""
    planned = {(c.method, c.attack, c.case, c.seed): c for c in TRUST.SETTINGS[setting]()}
    found = [TRUST.key(line) for line in TRUST.lines(setting)]
    assert len(found) == len(set(found)) and set(found) <= set(planned)
    for line in TRUST.lines(setting):
        assert line["expression"] == planned[TRUST.key(line)].experiment["method"]

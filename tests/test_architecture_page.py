"""The page of architecture names the functions that a round goes through: a trace compares."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedbasin
from fedbasin.cli.app import app
from fedbasin.methods import FedAvg
from fedbasin.testing import toy_federation

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
PACKAGE = Path(fedbasin.__file__).parent
ROW = re.compile(r"\| (\d+) \| `([\w.]+)` \| `([\w./]+)` \|")


def listed(title):
    """The functions in the table below a title: (file, function)."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")
    section = rest.partition("\n## ")[0]
    rows = ROW.findall(section)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    return [(file, function) for _, function, file in rows]


def entered(work, first):
    """The functions of the library that a piece of work enters, in order, from the first on."""
    found = {}

    def note(frame, event, argument):
        code = frame.f_code
        path = Path(code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            each = (path.relative_to(PACKAGE).as_posix(), code.co_qualname)
            if found or each == first:
                found.setdefault(each)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return list(found)


def test_a_reply_on_flower_goes_through_the_functions_of_the_page_in_this_order():
    pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")
    from deploy.grids import LocalGrid, app_for, strategy_for
    from flwr.app import ArrayRecord

    from fedbasin.deploy import Guard

    functions = listed("One reply on Flower, from the wire to the merged model")
    assert 0 < len(functions) <= 15
    federation = toy_federation(FedAvg(), rounds=1)
    strategy = strategy_for(federation, federation.method, guard=Guard())
    grid = LocalGrid(app_for(federation), 6)
    arrays = ArrayRecord(federation.net.state_dict(*federation.net.initial()))
    seen = entered(lambda: strategy.start(grid, arrays, num_rounds=1, timeout=5), functions[0])
    assert [each for each in seen if each in functions] == functions


def test_a_round_goes_through_the_functions_of_the_page_in_this_order(tmp_path):
    functions = listed("One round, from the command to the record")
    assert 0 < len(functions) <= 12
    words = ["run", "--method", "fedavg", "--rounds", "1", "--set", "sim.executor=loop"]
    words += ["--model", "logistic", "--device", "cpu", "--out", str(tmp_path / "run")]

    def command():
        assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0

    seen = entered(command, functions[0])
    assert [each for each in seen if each in functions] == functions

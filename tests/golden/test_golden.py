"""What an earlier version gave still comes out: models, record lines, papers' results."""

from __future__ import annotations

import gzip
import json
import shutil

import pytest
import torch
from golden import make
from safetensors.torch import load_file

from fedbasin.core.record import RoundRecord
from fedbasin.experiment import resume
from fedbasin.papers.results import fresh, shipped
from fedbasin.papers.tables import load_table, table_names

STORED, MACHINE = make.stored()


def same_machine(method: str = "") -> bool:
    """Whether the last bits must agree; another CPU or torch may round otherwise."""
    return method not in MACHINE and make.machine().items() <= MACHINE.items()


@pytest.mark.parametrize("executor", make.EXECUTORS)
@pytest.mark.parametrize("method", make.expressions())
def test_every_method_gives_the_stored_models(method, executor):
    torch.set_num_threads(1)
    for which, vector in make.final_models(method, executor).items():
        stored = STORED.get(f"{method} {executor} {which}")
        assert stored is not None, "no model of this method is stored: run make generated"
        if same_machine(method) and executor == "loop":  # the reference
            assert torch.equal(vector, stored), (vector - stored).abs().max()
        else:
            torch.testing.assert_close(vector, stored, rtol=1e-3, atol=1e-4)


def test_no_stored_method_has_left_the_catalogue():
    kept = {make.method_of(name) for name in STORED}
    assert kept <= set(make.expressions())


def test_old_record_lines_are_written_back_byte_for_byte():
    lines = gzip.decompress(make.RECORDS.read_bytes()).decode().splitlines()
    assert len(lines) >= 2700
    for line in lines:
        assert RoundRecord.read(line).line() == line
    assert any(json.loads(line)["accuracy_per_class"] for line in lines)


def test_every_shipped_result_of_a_paper_is_still_fresh():
    """A new setting, or another default, would orphan results that took days of GPU time."""
    tables = [load_table(name) for name in table_names()]
    assert sum(len(fresh(table, shipped())) for table in tables) == len(shipped()) >= 332


def test_a_run_begun_by_an_earlier_version_is_resumed(tmp_path):
    """It was stopped in round 6 of 6, after a checkpoint of round 4; clients keep a state."""
    folder = tmp_path / "run"
    shutil.copytree(make.HERE / "old_run", folder)
    summary = resume(folder)
    assert summary["status"] == "finished" and summary["rounds"] == 6
    resumed = load_file(folder / "model.safetensors")
    whole = load_file(make.HERE / "old_run_model.safetensors")
    assert resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        if same_machine():
            assert torch.equal(resumed[name], tensor), name
        else:
            torch.testing.assert_close(resumed[name], tensor, rtol=1e-3, atol=1e-4)

"""What `make same` calls a difference."""

from __future__ import annotations

import pytest
import torch
from golden.same import LINES, MODELS, differences
from safetensors.torch import save_file

LINE = '{"round": 1, "accuracy": 0.5, "seconds": 1.5, "seconds_train": 0.25}\n'


def written(folder, models, lines):
    folder.mkdir()
    save_file(models, folder / MODELS)
    (folder / LINES).write_text(lines)
    return folder


@pytest.fixture
def base(tmp_path):
    return written(tmp_path / "base", {"fedavg loop score": torch.ones(3)}, LINE)


def test_seconds_are_no_difference(base, tmp_path):
    lines = LINE.replace("1.5", "9.0").replace("0.25", "7.0")
    here = written(tmp_path / "here", {"fedavg loop score": torch.ones(3)}, lines)
    assert differences(base, here) == []


@pytest.mark.parametrize(
    ("models", "lines", "named"),
    [
        ({"fedavg loop score": torch.ones(3) + 2**-23}, LINE, "fedavg loop score: the models"),
        ({"fedavg cohort score": torch.ones(3)}, LINE, "fedavg loop score: only in the base"),
        ({"fedavg loop score": torch.ones(3)}, LINE.replace("0.5,", "0.500001,"), "record line 1"),
        ({"fedavg loop score": torch.ones(3)}, LINE + LINE, "1 record lines in the base, 2 here"),
    ],
)
def test_another_bit_model_line_or_number_of_lines_is_named(base, tmp_path, models, lines, named):
    found = differences(base, written(tmp_path / "here", models, lines))
    assert any(each.startswith(named) for each in found)

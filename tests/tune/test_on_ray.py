"""Runs as tasks of a Ray cluster: the same result as here, and an error that names its cause."""

import gc
from dataclasses import replace
from functools import partial

import pytest
from tune.asking import request

from fedbasin.experiment.comparison import Cell
from fedbasin.tuning import tune
from fedbasin.tuning.result import table_lines, trial_lines

ray = pytest.importorskip("ray", reason="needs the extra ray: pip install 'fedbasin[ray]'")
from fedbasin.sim import ray_executor  # noqa: E402
from fedbasin.tuning.on_ray import run_on_ray  # noqa: E402

# Ray leaves files of its own open while it starts.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def cluster():
    """A cluster of this process; runs find it and leave it running."""
    ray_executor.join("", 2)
    yield
    ray.shutdown()
    gc.collect()  # what Ray left open is told of here, where it is ignored


def test_a_tune_on_ray_is_that_of_one_process_and_errors_are_those_of_the_run(tmp_path, cluster):
    asked = request(budget=2, halving=2)
    here = tune(asked, tmp_path / "here")
    there = tune(asked, tmp_path / "there", partial(run_on_ray, jobs=2))
    assert trial_lines(there) == trial_lines(here)
    assert table_lines(there) == table_lines(here)
    assert not list((tmp_path / "there").glob("data-*")) and ray.is_initialized()

    cell = asked.tuning_cell(tmp_path / "bad", "fedavg", 0, (0.05,), 0)
    edited = replace(cell.experiment, rounds=3)
    path = next((tmp_path / "there").glob("tuning/fedavg/setting000/*"))
    with pytest.raises(ValueError, match="rounds"):
        run_on_ray([Cell(edited, path, root=tmp_path / "bad")], jobs=1)

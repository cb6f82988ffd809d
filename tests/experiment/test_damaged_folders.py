"""Run folders after a power cut, or from somebody who means harm: resumed, or refused in a line."""

from __future__ import annotations

import shutil

import pytest

import fedbasin.experiment  # noqa: F401
from fedbasin.experiment.config import from_mapping
from fedbasin.experiment.runs import resume, run

SETTINGS = {
    "rounds": 3,
    "method": "fedavg",
    "model": "mlp(widths=(8,))",
    "data": {"name": "digits"},
    "partition": {"clients": 5},
    "local": {"epochs": 1},
    "sim": {"executor": "loop", "checkpoint_every": 1, "participation": "fraction(rate=0.4)"},
}
TEXTS = (
    "config.toml",
    "begun.toml",
    "data.json",
    "interface.json",
    "partition.csv",
    "rounds.jsonl",
    "summary.json",
)
WIPED = {
    "emptied": lambda path: path.write_bytes(b""),
    "of NUL bytes": lambda path: path.write_bytes(b"\0" * path.stat().st_size),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A whole run, and one that was paused after two rounds."""
    place = tmp_path_factory.mktemp("runs")
    run(from_mapping(SETTINGS), place / "whole")
    run(from_mapping(SETTINGS), place / "paused", until=2)
    return place


@pytest.fixture
def paused(runs, tmp_path):
    """A copy of the paused run."""
    return shutil.copytree(runs / "paused", tmp_path / "run")


def model(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("wipe", WIPED.values(), ids=WIPED)
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_a_power_cut_took_does_not_block_resuming(runs, paused, name, wipe):
    wipe(paused / name)
    resume(paused)
    assert model(paused) == model(runs / "whole")


@pytest.mark.parametrize("wipe", WIPED.values(), ids=WIPED)
def test_a_checkpoint_that_was_wiped_is_named_with_what_to_do(runs, paused, wipe):
    wipe(paused / "checkpoint.safetensors")
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors is not a whole.*delete it"):
        resume(paused)
    (paused / "checkpoint.safetensors").unlink()
    resume(paused)
    assert model(paused) == model(runs / "whole")


def test_settings_that_were_edited_are_still_refused(paused):
    config = paused / "config.toml"
    config.write_text(config.read_text().replace("epochs = 1", "epochs = 2"))
    with pytest.raises(ValueError, match="was edited since the run began"):
        resume(paused)


@pytest.mark.parametrize("name", [*TEXTS, "checkpoint.safetensors", "model.safetensors"])
def test_links_lead_nothing_out_of_the_folder(runs, paused, tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (paused / f"{name}.part").symlink_to(victim)
    (paused / "run.lock").symlink_to(tmp_path / "lock")
    resume(paused)
    assert victim.read_text() == "precious"
    assert model(paused) == model(runs / "whole")
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("name", [*TEXTS, "checkpoint.safetensors", "model.safetensors"])
def test_a_file_that_is_a_link_keeps_what_it_leads_to(paused, tmp_path, name):
    path, victim = paused / name, tmp_path / "victim"
    content = path.read_bytes() if path.exists() else b"precious"
    victim.write_bytes(content)
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    resume(paused)
    assert victim.read_bytes() == content

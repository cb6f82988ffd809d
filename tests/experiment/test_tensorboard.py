import builtins

import pytest

from fedbasin.core.record import RoundRecord
from fedbasin.experiment import Experiment, LocalConfig, PartitionConfig, SimConfig
from fedbasin.experiment.config import ConfigError
from fedbasin.experiment.runs import cells, run_cells
from fedbasin.experiment.tensorboard import tensorboard_events

TINY = Experiment(
    model="mlp(widths=(4,))",
    rounds=3,
    partition=PartitionConfig(clients=6),
    local=LocalConfig(epochs=1),
    sim=SimConfig(participation="count(clients=2)"),
)


def scalars(folder):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own dependencies
def test_a_run_writes_its_records_as_events(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    layout = cells(TINY, ["fedavg"], [0], tmp_path)
    run_cells(layout, tensorboard=True)
    from fedbasin.core.record import RunFolder

    records = RunFolder(layout[0].path).read_rounds()
    found = scalars(layout[0].path / "tensorboard")
    assert [step for step, _ in found["accuracy"]] == [1, 2, 3]
    assert [v for _, v in found["accuracy"]] == pytest.approx(
        [r.metric("accuracy") for r in records]
    )
    assert [v for _, v in found["bytes_up"]] == [r.bytes_up for r in records]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_rounds_made_again_are_forgotten_and_notes_kept_apart(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    for rounds in ((1, 2, 3), (2, 3)):  # killed after round 3, resumed from round 1
        with tensorboard_events(tmp_path) as write:
            for n in rounds:
                notes = {"gamma": n / 2, "weights": [0.5, 0.5]}
                write(RoundRecord(round=n, accuracy=n / len(rounds), notes=notes))
    found = scalars(tmp_path)
    assert [step for step, _ in found["accuracy"]] == [1, 2, 3]
    assert [value for _, value in found["accuracy"]] == pytest.approx([1 / 3, 1.0, 1.5])
    assert [value for _, value in found["note/gamma"]] == [0.5, 1.0, 1.5]
    assert "note/weights" not in found and "loss" not in found and "round" not in found


def test_without_the_package_the_fix_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def absent(name, *rest):
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    layout = cells(TINY, ["fedavg"], [0], tmp_path)
    with pytest.raises(ConfigError, match=r"pip install 'fedbasin\[tensorboard\]'"):
        run_cells(layout, tensorboard=True)
    assert not layout[0].path.exists()

"""fedbasin: train one model from many clients whose data differ, and see which merge is best.

from fedbasin import Experiment, run
summary = run(Experiment(method="scaffold", rounds=50), "runs/first")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbasin.core.expressions import parse as parse
    from fedbasin.core.expressions import text as text
    from fedbasin.core.sink import Sink as Sink
    from fedbasin.experiment import Experiment as Experiment
    from fedbasin.experiment import resume as resume
    from fedbasin.experiment import run as run

# Torch takes seconds to import, so names are fetched when they are first used.
_HOMES = {
    "DataConfig": "experiment",
    "Experiment": "experiment",
    "LocalConfig": "experiment",
    "PartitionConfig": "experiment",
    "SimConfig": "experiment",
    "Sink": "core.sink",
    "SnapshotConfig": "experiment",
    "build": "experiment",
    "compare": "experiment",
    "parse": "core.expressions",
    "resume": "experiment",
    "run": "experiment",
    "text": "core.expressions",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedbasin' has no attribute {name!r}")
    import_module("fedbasin.experiment")  # fills the catalogue
    return getattr(import_module(f"fedbasin.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

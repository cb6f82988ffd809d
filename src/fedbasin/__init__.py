"""fedbasin: train one model from many clients whose data differ, and see which merge is best.

import fedbasin as fb
data = fb.data.from_table("patients.csv", target="died", client="hospital")
result = fb.compare(data, ["fedavg", fb.ima(fb.scaffold(), window=5)], task="binary", rounds=50)

Every entry of the catalogue is a name here: ``fb.scaffold(server_lr=0.5)`` is what the expression
"scaffold(server_lr=0.5)" says.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import Any

# Torch takes seconds to import, so names are fetched when they are first used. `make generated`
# writes `__init__.pyi`, which tells type checkers what each name is.
_HOMES = {
    "Comparison": "api",
    "DataConfig": "experiment",
    "Experiment": "experiment",
    "LocalConfig": "experiment",
    "PartitionConfig": "experiment",
    "RunResult": "api",
    "SimConfig": "experiment",
    "Sink": "core.sink",
    "SnapshotConfig": "experiment",
    "TableConfig": "experiment",
    "Tuned": "api",
    "build": "experiment",
    "compare": "api",
    "entry": "core.catalogue",
    "export": "api",
    "parse": "core.expressions",
    "predict": "api",
    "resume": "api",
    "run": "api",
    "text": "core.expressions",
    "tune": "api",
}
_ROOMS = ("data", "testing")  # modules that users reach as attributes


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name in _ROOMS:
        return import_module(f"fedbasin.{name}")
    if name in _HOMES:
        import_module("fedbasin.experiment")  # fills the catalogue
        return getattr(import_module(f"fedbasin.{_HOMES[name]}"), name)
    hint = ""
    if not name.startswith("_") and not _is_module(name):
        from fedbasin.core.expressions import constructor
        from fedbasin.core.suggest import did_you_mean

        if name in _entries():
            return constructor(_entries()[name])
        similar = get_close_matches(name, __dir__())
        hint = f"; {did_you_mean(similar)}" if similar else ""
    raise AttributeError(f"module 'fedbasin' has no attribute {name!r}{hint}")


def _is_module(name: str) -> bool:
    """Whether Python is about to import a room: torch is not loaded to look for such a name."""
    from importlib.util import find_spec

    return find_spec(f"fedbasin.{name}") is not None


def _entries() -> dict[str, Any]:
    """Return the cards of the catalogue that are the library's own."""
    import_module("fedbasin.experiment")  # fills the catalogue
    from fedbasin.core.catalogue import CATALOGUE

    return {
        n: card for n, card in CATALOGUE.items() if card.make.__module__.startswith("fedbasin.")
    }


def __dir__() -> list[str]:
    return sorted({*_HOMES, *_ROOMS, *_entries()})

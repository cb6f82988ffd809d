"""Sinks by name. A new one is a file of this folder and a line of `SINKS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from fedbasin.core.record import RoundRecord
from fedbasin.core.sink import FunctionSink, Sink, SinkError
from fedbasin.core.suggest import nearest
from fedbasin.sinks.mlflow import MLflow
from fedbasin.sinks.tensorboard import TensorBoard
from fedbasin.sinks.wandb import WandB

# What `log=[...]` takes: a name of `SINKS`, a sink, or a function of each round's record.
Target = str | Sink | Callable[[RoundRecord], object]

# The extra that installs a sink's package has the sink's name.
SINKS: dict[str, type[Sink]] = {
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "wandb": WandB,
}


def sinks_of(log: Sequence[Target]) -> list[Sink]:
    """Return the sinks that `log` asks for; refuse unknown names and packages that are missing."""
    if isinstance(log, str):
        raise SinkError(f"log is {log!r}; write a list: log=[{log!r}]")
    once = dict.fromkeys(target for target in log if isinstance(target, str))
    named = {name: _named(name) for name in once}
    others = [_unnamed(target) for target in log if not isinstance(target, str)]
    return [*named.values(), *others]


def refuse_across_processes(log: Sequence[Target], jobs: int) -> None:
    """Refuse what only this process has where runs are processes of their own."""
    unnamed = [_unnamed(target).name for target in log if not isinstance(target, str)]
    if jobs > 1 and unnamed:
        raise SinkError(
            f"log: {unnamed[0]} cannot be used with jobs={jobs}, because each run is a process of "
            f"its own; set jobs=1, or log by name: {', '.join(SINKS)}"
        )


def _named(name: str) -> Sink:
    if name not in SINKS:
        raise SinkError(f"log: {name!r} is no sink; {nearest(name, SINKS)}")
    kind = SINKS[name]
    if find_spec(kind.package) is None:
        raise SinkError(
            f"log: {name} needs the package {kind.package}: pip install 'fedbasin[{name}]'"
        )
    return kind()


def _unnamed(target: Sink | Callable[[RoundRecord], object]) -> Sink:
    if isinstance(target, Sink):
        return target
    if isinstance(target, type) or not callable(target):
        raise SinkError(
            f"log: {target!r} must be a name ({', '.join(SINKS)}), a Sink object, or a function of "
            "a RoundRecord"
        )
    return FunctionSink(target)

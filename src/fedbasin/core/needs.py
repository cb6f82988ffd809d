"""What methods and rules need, and the error if it is missing.

A card names needs. Some are given by the task (`Task.provides`), others by settings or by the
network. A method that lacks one is refused before data is loaded, in one sentence that names an
alternative: otherwise it would run and do something else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedbasin.core.catalogue import needs_of
from fedbasin.core.net import Net
from fedbasin.core.task import Provided, Task


class NeedError(ValueError):
    """A method or rule that cannot run here, with the reason and an alternative."""


@dataclass(frozen=True)
class _Need:
    """Why a task does not meet a need, and what runs instead."""

    lacks: str
    instead: str


# By what a task provides.
_OF_TASKS = {
    "classes": _Need(
        "works on the class probabilities of a network, and {task} has none",
        "take serverft or fedlaw for data on the server, fedavg, scaffold or fedadam without",
    ),
    "class_labels": _Need(
        "counts rows by class, and {task} has no classes",
        "drop it, or take task = 'classification' or 'binary'",
    ),
    "class_counts": _Need(
        "uses how many rows of each class clients hold, and {task} has no classes",
        "take fedcm, which has the same momentum without class counts",
    ),
    "row_losses": _Need(
        "uses full gradients, and the loss of {task} does not add up over rows",
        "take scaffold or fedavgm",
    ),
}
_GIVEN_BY = {"class_counts": "class_labels"}  # the same thing on the side of the task


def missing_of(needs: Iterable[str], provided: frozenset[Provided]) -> list[str]:
    """Return the needs that are a task's to meet and are not among what it provides."""
    of_tasks = sorted(set(needs) & _OF_TASKS.keys())
    return [need for need in of_tasks if _GIVEN_BY.get(need, need) not in provided]


def check_task(things: object | Iterable[object], task: Task) -> None:
    """Refuse a method, or rules, that need what the task does not provide."""
    several = things if isinstance(things, tuple | list) else (things,)
    for thing in several:
        for need in missing_of(needs_of(thing), task.provides):
            why = _OF_TASKS[need]
            name = type(task).__name__.lower()
            raise NeedError(f"{thing} {why.lacks.format(task=name)}; {why.instead}")


def check_network(method: object, net: Net, model: str) -> None:
    """Refuse a method that works on features where the network does not show them.

    Args:
        method: what is to run.
        net: the network.
        model: what the network is called in messages.
    """
    if "features" in needs_of(method) and not net.has_features:
        raise NeedError(
            f"{method} works on features, and {model} has no `features` and `head`; take a network "
            "of the catalogue such as mlp or cnn, or a method such as fedavg or scaffold"
        )

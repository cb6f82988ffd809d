"""From the settings of runs back to the commands that make them again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedbasin.core.settings import nest, write_toml
from fedbasin.report.runs import Run, partition_follows_seed


@dataclass(frozen=True)
class Recipe:
    """A settings file and the commands that read it."""

    file: str
    settings: str
    commands: tuple[str, ...]


def recipes(runs: Sequence[Run]) -> list[Recipe]:
    """Return what makes the runs again; those without settings on record are left out.

    Runs that differ in method and seed alone share a settings file; methods that ran with the
    same seeds share a command.
    """
    shared: dict[str, list[Run]] = {}
    follows = partition_follows_seed(runs)
    for run in runs:
        if run.settings:
            shared.setdefault(write_toml(nest(_common(run, follows))), []).append(run)
    found = []
    for number, (settings, members) in enumerate(shared.items(), start=1):
        file = "settings.toml" if len(shared) == 1 else f"settings{number}.toml"
        found.append(Recipe(file, settings, tuple(_commands(members, file))))
    return found


def _common(run: Run, follows: bool) -> dict[str, Any]:
    """Return the settings without what the command line gives."""
    kept = {k: v for k, v in run.settings.items() if k not in ("method", "seed")}
    return kept | ({"partition.seed": -1} if follows and "partition.seed" in kept else {})


def _commands(runs: Sequence[Run], file: str) -> list[str]:
    seeds: dict[str, list[int]] = {}
    for run in runs:
        seeds.setdefault(str(run.settings.get("method", run.method)), []).append(run.seed)
    methods: dict[tuple[int, ...], list[str]] = {}
    for method, of_method in seeds.items():
        methods.setdefault(tuple(sorted(of_method)), []).append(method)
    return [
        shlex.join(["fedbasin", "compare", *named, "--seeds", _listed(given), "--config", file])
        for given, named in methods.items()
    ]


def _listed(seeds: Sequence[int]) -> str:
    return ",".join(map(str, seeds))

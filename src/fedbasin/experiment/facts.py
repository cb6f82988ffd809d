"""What a summary records about how a run was made."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fedbasin.core.expressions import parse
from fedbasin.core.protocols import guarantee_of
from fedbasin.experiment.config import Experiment
from fedbasin.experiment.executors import pick_device


def facts(experiment: Experiment) -> dict[str, Any]:
    """Return what a summary records about how a run was made."""
    device = pick_device(experiment.sim.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "method": experiment.method,
        "seed": experiment.seed,
        "dataset": experiment.data.name,
        "model": experiment.model,
        "task": experiment.task,
        "partition": experiment.partition.how,
        "device": f"{device} ({name})",
        "python": platform.python_version(),
        "versions": dict(_versions()),
        "commit": _own_commit(),
        **guarantee_of(parse(experiment.method, "method")),
    }


@cache
def _versions() -> dict[str, str]:
    """Return the versions of what a run depends on."""
    packages = ("fedbasin", "torch", "numpy")
    return {package: metadata.version(package) for package in packages if _installed(package)}


@cache
def _own_commit() -> str | None:
    """Return the commit of the code that this process runs."""
    return commit_of(Path(__file__))


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def commit_of(file: Path) -> str | None:
    """Return the commit that a source file belongs to, or None outside a repository.

    "-dirty" is appended if tracked files have uncommitted changes.
    """
    git = ["git", "-C", str(file.parent)]
    try:
        for command in (
            ["ls-files", "--error-unmatch", file.name],
            ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        ):
            answer = subprocess.run(
                [*git, *command], capture_output=True, text=True, timeout=10, check=False
            )
            if answer.returncode:
                return None
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None

"""What a summary records about how a run was made."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fedbasin.experiment.config import Experiment
from fedbasin.experiment.executors import pick_device


def facts(experiment: Experiment) -> dict[str, Any]:
    """Return what a summary records about how a run was made."""
    device = pick_device(experiment.sim.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = {
        package: metadata.version(package)
        for package in ("fedbasin", "torch", "numpy")
        if _installed(package)
    }
    return {
        "method": experiment.method,
        "seed": experiment.seed,
        "dataset": experiment.data.name,
        "model": experiment.model,
        "task": experiment.task,
        "partition": experiment.partition.how,
        "device": f"{device} ({name})",
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit_of(Path(__file__)),
    }


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

"""The house keeps its shape: names, pins and versions."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fedbasin"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FILES = sorted(PACKAGE.rglob("*.py"))


def plain(requirement: str) -> str:
    """The package a requirement names: ``Flwr_X[sim]>=1`` is ``flwr-x``."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, f"not a requirement: {requirement!r}"
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def test_no_room_for_odds_and_ends():
    shelves = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}
    assert not [
        str(f) for f in FILES if shelves & set(f.relative_to(PACKAGE).with_suffix("").parts)
    ]


def test_importing_the_room_imports_every_method():
    """A method file that the room forgets would never reach the catalogue."""
    code = "import sys, fedbasin.methods; print(*(m for m in sys.modules if 'fedbasin' in m))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    files = {f"fedbasin.methods.{f.stem}" for f in (PACKAGE / "methods").glob("[!_]*.py")}
    assert files, "no method files found"
    assert files <= set(seen.stdout.split())


def test_every_dependency_is_pinned():
    pins = [
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert all(len(pin) == 2 and "+" not in pin[1] for pin in pins)
    project = PYPROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = {plain(requirement) for group in groups for requirement in group}
    assert wanted <= {plain(name) for name, _ in pins}


def test_the_version_is_one():
    version = PYPROJECT["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    sections = re.findall(
        r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sections[0] == "Unreleased"
    assert sections[1:2] in ([], [version])

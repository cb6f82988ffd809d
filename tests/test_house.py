"""The house keeps its shape: names, pins and versions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fedbasin"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = ROOT / "tests"

CLOCK = re.compile(r"\b(?:time|monotonic|perf_counter|process_time|thread_time)(?:_ns)?\b")
CLOCK_IN_TEXT = re.compile(rf"\btime\.{CLOCK.pattern}\(")
MEMORY = re.compile(r"\b(?:psutil|getrusage|ru_maxrss|Vm(?:RSS|HWM)|RssAnon|statm)\b")
# Files that may read a clock or resident memory, and what for.
MAY_MEASURE = {
    "deploy/test_operations.py": "bounds a wait for real processes by minutes",
    "deploy/test_processes.py": "bounds a wait for real processes by minutes",
    "deploy/test_two_machines.py": "bounds a wait for real processes by minutes",
    "sim/test_allocator.py": "is about pages that are kept, next to the bytes that were freed",
    "test_house.py": "names what is refused",
    "tune/dying.py": "spreads kills over the time that a tune takes",
}


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


def measures(node: ast.AST) -> bool:
    """Whether code, or a script in a string, reads a clock or how much memory is resident."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return bool(CLOCK_IN_TEXT.search(node.value) or MEMORY.search(node.value))
    if isinstance(node, ast.ImportFrom):
        names = [name.name for name in node.names]
        return node.module == "time" and any(map(CLOCK.fullmatch, names))
    if isinstance(node, ast.Attribute):
        of_time = isinstance(node.value, ast.Name) and node.value.id == "time"
        return bool((of_time and CLOCK.fullmatch(node.attr)) or MEMORY.fullmatch(node.attr))
    return isinstance(node, ast.Name) and bool(MEMORY.fullmatch(node.id))


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        ("time.perf_counter()", True),
        ("from time import monotonic_ns", True),
        ("psutil.Process().memory_info().rss", True),
        ("resource.getrusage(0).ru_maxrss", True),
        ("script = 'import time; print(time.time())'", True),
        ("Path('/proc/self/statm')", True),
        ("time.sleep(1)", False),
        ("clock.monotonic()", False),
        ("record.time", False),
    ],
)
def test_what_reads_a_clock_or_resident_memory_is_known(code, refused):
    assert any(map(measures, ast.walk(ast.parse(code)))) == refused


def test_tests_judge_by_no_clock_and_no_resident_memory():
    """Both depend on what else the machine does. `tests/counting.py` counts work and bytes."""
    found = set()
    for file in TESTS.rglob("*.py"):
        if any(map(measures, ast.walk(ast.parse(file.read_text(encoding="utf-8"))))):
            found.add(file.relative_to(TESTS).as_posix())
    assert found == set(MAY_MEASURE)


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

"""What comes from the catalogue is up to date, and an entry takes the files that the docs name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import generated
import pytest
from golden.make import without_models

import fedbasin

ROOT = generated.ROOT
RUN = "stale: run make generated"
# What the command reads and writes.
COPIED = ("src", "docs/methods.md", "tests/golden", "tests/generated.py")

METHOD = '''"""A coordinate-wise maximum: w+ = max_i y_i."""

from dataclasses import dataclass

from fedbasin.core.catalogue import entry
from fedbasin.core.method import Method, Served


@entry("method", name="largest", paper="P", url="https://example.org")
@dataclass(frozen=True)
class Largest(Method):
    """Take the largest of each coordinate."""

    def aggregate(self, state, server, replies, context):
        middle = replies.models.amax(0)
        return Served(send=middle, score=middle), state
'''
RULE = '''"""A rule that changes nothing."""

from dataclasses import dataclass

from fedbasin.core.catalogue import entry
from fedbasin.core.rule import LocalRule


@entry("rule", name="idle")
@dataclass(frozen=True)
class Idle(LocalRule):
    """Leave the gradient as it is."""
'''
METRIC = '''

@entry("metric", name="error_rate")
@dataclass(frozen=True)
class ErrorRate(Accuracy):
    """The share of rows whose answer is wrong."""

    higher_is_better: ClassVar[bool] = False
'''
PARTITION = '''

@entry("partition")
def one_each(pool: Pool, clients: int, rng: np.random.Generator) -> Partition:
    """Give every client as many rows."""
    return size_dirichlet(pool, clients, rng, alpha=1e9)
'''
# Where what is added stands, by kind: the row of the docs, its files, the name to look for.
ADDITIONS = {
    "a method": {
        "methods/fedexp.py": ("methods/largest.py", METHOD),
        "methods/__init__.py": (
            "methods/__init__.py",
            "from fedbasin.methods.largest import Largest as Largest\n",
        ),
    },
    "a client rule": {
        "local/privacy.py": ("local/idle.py", RULE),
        "local/__init__.py": (
            "local/__init__.py",
            "from fedbasin.local.idle import Idle as Idle\n",
        ),
    },
    "a metric": {"core/metric.py": ("core/metric.py", METRIC)},
    "a partition": {"partition/by_target.py": ("partition/by_target.py", PARTITION)},
}
NAMES = {
    "a method": "largest",
    "a client rule": "idle",
    "a metric": "error_rate",
    "a partition": "one_each",
}
STUB = "src/fedbasin/__init__.pyi"
PAGE = "docs/methods.md"
MODELS = "tests/golden/models.safetensors"
WRITTEN = {
    "a method": {STUB, PAGE, MODELS},
    "a client rule": {STUB, PAGE},
    "a metric": {STUB, PAGE},
    "a partition": {STUB},  # docs/partitions.md explains each in words
}


@pytest.mark.parametrize("path", list(generated.contents()), ids=lambda path: path.name)
def test_what_comes_from_the_catalogue_is_up_to_date(path):
    assert path.read_text(encoding="utf-8") == generated.contents()[path], RUN


def test_every_method_has_golden_models():
    assert without_models() == [], RUN


def test_the_names_of_the_package_are_those_of_the_stub():
    stub = (ROOT / STUB).read_text(encoding="utf-8")
    names = re.findall(r" as ([a-zA-Z]\w*)$|^([a-z]\w*)(?: = |: )", stub, re.MULTILINE)
    assert sorted(a or b for a, b in names) == fedbasin.__all__ == dir(fedbasin)


def python(root: Path, *arguments: str) -> str:
    """Run Python with the source of a folder."""
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize(
    "statement",
    [
        "import fedbasin",
        "import fedbasin; hasattr(fedbasin, '__wrapped__')",
        "from fedbasin import report",
    ],
)
def test_torch_is_imported_when_a_name_needs_it(statement):
    seen = python(ROOT, "-c", f"{statement}; import sys; print('torch' in sys.modules)")
    assert seen.strip() == "False"


def files(root: Path) -> dict[str, bytes]:
    """The content of every file below a folder, by its path."""
    paths = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("kind", ADDITIONS)
def test_to_add_something_takes_the_files_that_the_docs_name(kind, tmp_path):
    """A scratch copy gets an entry; then the command; then the changed files are counted."""
    guide = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    row = next(line for line in guide.splitlines() if line.startswith(f"| {kind} |"))
    required = row.split("|")[3].partition(";")[0]
    assert set(re.findall(r"`(\w+/\w+\.py)`", required)) == set(ADDITIONS[kind])
    for name in COPIED:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target)
        else:
            shutil.copy(ROOT / name, target)
    before = files(tmp_path)
    by_hand = set()
    for name, text in ADDITIONS[kind].values():
        path = tmp_path / "src" / "fedbasin" / name
        path.write_text((path.read_text("utf-8") if path.exists() else "") + text, "utf-8")
        by_hand.add(f"src/fedbasin/{name}")
    python(tmp_path, "tests/generated.py")
    after = files(tmp_path)
    changed = {name for name in after if before.get(name) != after[name]}
    assert changed == by_hand | WRITTEN[kind]
    seen = python(tmp_path, "-c", f"import fedbasin; print(fedbasin.{NAMES[kind]}.__module__)")
    assert seen.startswith("fedbasin.")

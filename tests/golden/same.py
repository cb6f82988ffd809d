"""Compare what this checkout gives with what another commit gives, on this machine.

    python tests/golden/same.py BASE

Every method of the catalogue is run by `make.py` of each side, in loop and cohort. Models must be
equal to the bit, and record lines byte by byte, without seconds. A commit that changes only the
shape of the code passes.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
MODELS = "models.safetensors"
LINES = "rounds.jsonl"
ERRORS = "errors.txt"
FOLDERS = ("src", "tests")
_SHOWN = 20  # differences that are listed


def produce(out: Path) -> None:
    """Write all models and record lines of the code that this process imports."""
    from golden import make

    torch.set_num_threads(1)
    save_file(dict(make.all_models()), out / MODELS)
    (out / LINES).write_text("".join(f"{line}\n" for line in make.record_lines()), "utf-8")


def start(tree: Path, out: Path) -> subprocess.Popen[bytes]:
    """Begin to produce the results of a tree of sources, in a process of its own."""
    out.mkdir()
    paths = os.pathsep.join([str(tree / "src"), str(tree / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--produce", str(out)]
    with (out / ERRORS).open("wb") as errors:
        return subprocess.Popen(command, cwd=tree, env=environment, stderr=errors)


def wait_for(process: subprocess.Popen[bytes], out: Path) -> None:
    """Wait for the results; if they could not be computed, show why and stop."""
    if process.wait():
        sys.exit((out / ERRORS).read_text("utf-8"))


def copy_sources(tree: Path) -> None:
    """Copy the sources of this checkout, which may be edited meanwhile."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))


def extract(commit: str, tree: Path) -> None:
    """Write the sources of a commit to a folder."""
    command = ["git", "archive", "--format=tar", commit, *FOLDERS]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        sys.exit(f"BASE={commit}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(tree, filter="data")


def timeless(line: str) -> str:
    """Return a record line without its seconds."""
    fields = {name: x for name, x in json.loads(line).items() if not name.startswith("seconds")}
    return json.dumps(fields)


def differences(base: Path, here: Path) -> list[str]:
    """List what differs between two folders of results."""
    found = []
    before = load_file(base / MODELS)
    after = load_file(here / MODELS)
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            found.append(f"{name}: only {'here' if name in after else 'in the base'}")
        elif not torch.equal(before[name], after[name]):
            found.append(f"{name}: the models differ")
    lines = [(each / LINES).read_text("utf-8").splitlines() for each in (base, here)]
    if len(lines[0]) != len(lines[1]):
        found.append(f"{len(lines[0])} record lines in the base, {len(lines[1])} here")
    for number, (old, new) in enumerate(zip(*lines, strict=False), 1):
        if timeless(old) != timeless(new):
            found.append(f"record line {number}: {old} | {new}")
    return found


def main(commit: str) -> None:
    """Run both sides at once, and list the differences."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = folder / "base"
        here = folder / "here"
        extract(commit, folder / "old")
        copy_sources(folder / "new")
        first = start(folder / "old", base)
        second = start(folder / "new", here)
        wait_for(first, base)
        wait_for(second, here)
        found = differences(base, here)
        models = len(load_file(here / MODELS))
        lines = len((here / LINES).read_text("utf-8").splitlines())
    for each in found[:_SHOWN]:
        print(each)
    if found:
        sys.exit(f"{len(found)} differences from {commit}")
    print(f"same as {commit}: {models} models to the bit, {lines} record lines without seconds")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--produce", out]:
            produce(Path(out))
        case [commit]:
            main(commit)
        case _:
            sys.exit("usage: make same BASE=<commit>")

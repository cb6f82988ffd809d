"""Write the hash-locked requirements: core.txt, build.txt, and one file for each extra.

    python locks/make.py                  # all of them, from pyproject.toml and constraints.txt
    python locks/make.py flower ray       # some extras; core.txt is the one that lies here
    python locks/make.py --cpu WHEEL DIR  # copies for PyTorch's CPU build on Linux, into DIR

An extra's file includes core.txt and adds what the extra alone needs. Versions are those of
constraints.txt, for every platform; hashes are those that the package index states. PyTorch's CPU
build for Linux is not on the index: its file has hashes of its own, and needs no CUDA packages.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
OLDEST = "3.11.5"  # the oldest Python that all packages of all extras take
_ON_CUDA = re.compile(r"(nvidia|cuda|triton)\b")


def resolved(requirements: Path, extra: str = "") -> list[str]:
    """Return one entry for each package: its version, its marker and the hashes of its files."""
    command = ["uv", "pip", "compile", str(requirements), "--universal", "--generate-hashes"]
    command += ["--python-version", OLDEST, "--constraints", str(ROOT / "constraints.txt")]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--quiet"]
    command += ["--extra", extra] if extra else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return entries(done.stdout)


def entries(text: str) -> list[str]:
    """Cut a file of requirements into its packages."""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(("#", "-r"))]
    return re.split(r"\n(?=[A-Za-z])", "".join(lines).strip()) if lines else []


def write_locks(wanted: list[str]) -> None:
    """Write some files anew; all of them where none is named."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if not wanted or "core" in wanted:
        write("core", resolved(ROOT / "pyproject.toml"))
    core = entries((HERE / "core.txt").read_text(encoding="utf-8"))
    for extra in project["project"]["optional-dependencies"]:
        if wanted and extra not in wanted:
            continue
        more = [entry for entry in resolved(ROOT / "pyproject.toml", extra) if entry not in core]
        write(extra, ["-r core.txt", *more])
    if wanted and "build" not in wanted:
        return
    with tempfile.TemporaryDirectory() as folder:
        build = Path(folder) / "build.in"
        build.write_text("\n".join(project["build-system"]["requires"]), encoding="utf-8")
        write("build", resolved(build))


def write(name: str, lines: list[str], folder: Path = HERE) -> None:
    """Write one file."""
    head = "# Made by make lock. Do not edit.\n"
    (folder / f"{name}.txt").write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


def write_for_cpu(wheel: Path, folder: Path) -> None:
    """Write copies in which torch is one file of PyTorch's CPU build, without CUDA packages."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    version = re.match(r"torch-([^-]+)", wheel.name)
    if version is None:
        raise SystemExit(f"{wheel} is no wheel of torch")
    torch = f"torch=={version[1]} \\\n    --hash=sha256:{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(HERE.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        kept = [entry for entry in entries(text) if not _ON_CUDA.match(entry)]
        changed = [torch if entry.startswith("torch==") else entry for entry in kept]
        include = ["-r core.txt"] if "-r core.txt" in text else []
        write(path.stem, include + changed, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", nargs=2, type=Path, metavar=("WHEEL", "DIR"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    asked = parser.parse_args()
    write_for_cpu(*asked.cpu) if asked.cpu else write_locks(asked.names)

"""The hash-locked requirements: complete, of the pinned versions, with hashes of every package."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PIN = re.compile(r"([a-z0-9-]+)(?:\[[a-z0-9,-]+\])?==(\S+)")


def locked(path):
    """The versions and hashes of a file and of what it includes, by package."""
    found = {}
    name = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            found |= locked(path.parent / line[3:])
        elif pin := PIN.match(line):
            name = pin[1]
            found.setdefault(name, (pin[2], set()))
        elif hashed := re.fullmatch(r"    --hash=sha256:([0-9a-f]{64})( \\)?", line):
            found[name][1].add(hashed[1])
        else:
            assert line.startswith("#"), line
    return found


def plain(requirement):
    name = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("extra", ["core", *EXTRAS])
def test_every_package_is_locked_with_hashes_at_the_pinned_version(extra):
    found = locked(ROOT / "locks" / f"{extra}.txt")
    wanted = [*PROJECT["dependencies"], *EXTRAS.get(extra, [])]
    assert {plain(requirement) for requirement in wanted} <= set(found)
    assert all(hashes for _, hashes in found.values())
    known = pins()
    other = {n: (v, known[n]) for n, (v, _) in found.items() if known.get(n, v) != v}
    assert not other, "run make lock"


def test_the_build_is_locked():
    assert "hatchling" in locked(ROOT / "locks" / "build.txt")


def test_copies_for_the_cpu_build_name_its_file_and_no_cuda(tmp_path):
    wheel = tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    wheel.write_bytes(b"the CPU build")
    command = [sys.executable, str(ROOT / "locks" / "make.py"), "--cpu", str(wheel)]
    subprocess.run([*command, str(tmp_path / "cpu")], check=True)
    before = locked(ROOT / "locks" / "flower.txt")
    after = locked(tmp_path / "cpu" / "flower.txt")
    assert after["torch"] == ("2.13.0+cpu", {hashlib.sha256(b"the CPU build").hexdigest()})
    gone = set(before) - set(after)
    assert gone and all(name.startswith(("nvidia-", "cuda-", "triton")) for name in gone)
    same = set(after) - {"torch"}
    assert {name: after[name] for name in same} == {name: before[name] for name in same}

"""Reading a dataset repository's file names: which parquet files make up which split.

Both layouts of the hub are understood, in a repository and in a local mirror of it:
``config/split-00000-of-00003.parquet`` and (its converted branch) ``config/split/0000.parquet``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fedbasin.data.dataset import DataError
from fedbasin.data.sources import Part

Split = Literal["train", "test"]
_SPLIT = r"(?P<split>\w+(\.\w+)*)"
_PATTERNS = (
    re.compile(rf"((?P<config>[^/]+)/)?{_SPLIT}(-[^/]*)?\.parquet"),
    re.compile(rf"(?P<config>[^/]+)/(?P<partial>partial-)?{_SPLIT}/[^/]+\.parquet"),
)
_NUMBERED = re.compile(r"-(\d+)-of-(\d+)[^/]*\.parquet$")
# The names under which repositories publish the rows to score, best first.
_TEST_NAMES = ("test", "validation", "valid", "val")


@dataclass(frozen=True)
class SourceFile:
    """One parquet file of a dataset, where it lies here and what identifies its content.

    Args:
        name: ``owner/dataset/config/file``, for messages and the manifest.
        path: where it lies on this machine.
        part: which part of the source it belongs to.
        split: which split its rows go to.
        size: bytes.
        mtime_ns: time of last change, nanoseconds.
        sha256: of its content; empty until it has been checked.
        commit: the hub commit it came from; empty from a mirror.
    """

    name: str
    path: Path
    part: int
    split: Split
    size: int
    mtime_ns: int
    sha256: str = ""
    commit: str = ""

    @classmethod
    def at(cls, path: Path, name: str, part: int, split: Split) -> SourceFile:
        """Describe a file that lies on this machine."""
        stat = path.stat()
        return cls(name, path, part, split, stat.st_size, stat.st_mtime_ns)

    def checked(self, sha256: str, commit: str = "") -> SourceFile:
        """Return the same file with its checksum (and commit) known."""
        return replace(self, sha256=sha256, commit=commit)


def choose(paths: Iterable[str], part: Part, needs_test: bool) -> dict[Split, list[str]] | None:
    """Pick the files of the train and test splits; None where the configuration is absent.

    Args:
        paths: file names relative to the repository, with forward slashes.
        part: names the repository and its configuration.
        needs_test: whether a test split must be among the files.
    """
    configs = _by_config(paths, part.repo)
    if not configs:
        return None
    wanted = [config for config in part.configs if config in configs]
    if not part.configs and len(configs) > 1 and "default" in configs:
        wanted = ["default"]
    elif not part.configs:
        wanted = list(configs)
    if not wanted:
        return None
    if len(wanted) > 1 and not part.configs:
        raise DataError(
            f"{part.repo} has several configurations ({', '.join(sorted(configs))}); "
            f"name one, as in hf:{part.repo}/{sorted(configs)[0]}"
        )
    splits = configs[wanted[0]]
    test = next((name for name in _TEST_NAMES if name in splits), None)
    if "train" not in splits or (needs_test and test is None):
        raise DataError(
            f"{part.repo}/{wanted[0]} needs train and test files, "
            f"found only: {', '.join(sorted(splits))}"
        )
    chosen: dict[Split, list[str]] = {"train": splits["train"]}
    if test is not None:
        chosen["test"] = splits[test]
    for files in chosen.values():
        _check_complete(part.repo, files)
    return chosen


def _by_config(paths: Iterable[str], repo: str) -> dict[str, dict[str, list[str]]]:
    """Sort parquet files into configurations and splits."""
    configs: dict[str, dict[str, list[str]]] = {}
    for path in sorted(paths):
        match = next((m for p in _PATTERNS if (m := p.fullmatch(path))), None)
        if match is None:
            continue
        if match.groupdict().get("partial"):
            raise DataError(
                f"the hub has only a part of {repo} as parquet, so it cannot be read whole"
            )
        splits = configs.setdefault(match["config"] or "default", {})
        splits.setdefault(match["split"], []).append(path)
    return configs


def _check_complete(repo: str, files: list[str]) -> None:
    """Refuse a split whose numbered files (``-00001-of-00003``) are not all there."""
    numbers = [match.groups() for path in files if (match := _NUMBERED.search(path))]
    if not numbers:
        return
    total = int(numbers[0][1])
    if sorted(int(n) for n, _ in numbers) != list(range(total)) or len(numbers) != len(files):
        raise DataError(
            f"{repo}: {total} files belong to this split, found {len(files)} "
            f"({', '.join(path.rsplit('/', 1)[-1] for path in files)}); get the missing files "
            "or remove the extra ones"
        )

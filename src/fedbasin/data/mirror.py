"""A local folder that holds datasets in the hub's layout, checked against its SHA256SUMS."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedbasin.data.dataset import DataError
from fedbasin.data.layout import SourceFile, choose
from fedbasin.data.sources import Source

VARIABLE = "FEDBASIN_DATA"
_SUM_LINE = re.compile(r"(?P<sha256>[0-9a-f]{64}) [ *](?P<path>.+)")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Mirror:
    """Datasets under ``root/owner/name/config/split-*.parquet``.

    Args:
        root: the folder that holds the owners' folders.
    """

    root: Path

    @classmethod
    def named(cls, data_dir: Path | None) -> Mirror | None:
        """Return the mirror an argument or the environment names, if either does."""
        chosen = data_dir or os.environ.get(VARIABLE)
        if not chosen:
            return None
        root = Path(chosen).expanduser()
        if not root.is_dir():
            raise DataError(
                f"the data folder {root} does not exist; correct --data-dir or {VARIABLE}"
            )
        return cls(root.resolve())

    @property
    def key(self) -> str:
        """What tells this place from others in the cache."""
        return f"mirror {self.root}"

    @cached_property
    def sums(self) -> dict[Path, str]:
        """Checksums by absolute path, from SHA256SUMS here or one folder up."""
        for folder in (self.root, self.root.parent):
            listing = folder / "SHA256SUMS"
            if listing.is_file():
                return _read_sums(listing)
        return {}

    def pick(self, sources: tuple[Source, ...]) -> Source:
        """Return the first source whose files are all here."""
        for source in sources:
            if self.has(source):
                return source
        wanted = " or ".join(
            f"{part.repo}/{'|'.join(part.configs) or '*'}/train-*.parquet"
            for source in sources
            for part in source.parts
            if not self._paths(part.repo)
        )
        raise DataError(
            f"{sources[0].name} is not in the data folder {self.root}: expected "
            f"{wanted or 'its parquet files'} there; add it, or unset {VARIABLE} to use the hub"
        )

    def has(self, source: Source) -> bool:
        """Whether every part of a source has files here."""
        return all(choose(self._paths(p.repo), p, source.needs_test) for p in source.parts)

    def locate(self, source: Source) -> list[SourceFile]:
        """List a source's files, unread; one that SHA256SUMS names but is not there is an error."""
        files = []
        for number, part in enumerate(source.parts):
            chosen = choose(self._paths(part.repo), part, source.needs_test) or {}
            for split, names in chosen.items():
                for name in names:
                    path = self.root / part.repo / name
                    if not path.is_file():
                        raise DataError(
                            f"{path} is listed in SHA256SUMS but missing; copy it again"
                        )
                    files.append(SourceFile.at(path, f"{part.repo}/{name}", number, split))
        return files

    def collect(self, source: Source) -> list[SourceFile]:
        """List a source's files with their checksums, compared with SHA256SUMS where listed."""
        checked = []
        for file in self.locate(source):
            actual = sha256_of(file.path)
            listed = self.sums.get(file.path)
            if listed is not None and actual != listed:
                raise DataError(
                    f"{file.path} is truncated or altered: its SHA-256 is {actual[:12]}..., "
                    f"SHA256SUMS says {listed[:12]}...; copy it again"
                )
            checked.append(file.checked(actual))
        return checked

    def _paths(self, repo: str) -> list[str]:
        """Parquet files of a repository, present or listed in SHA256SUMS, relative to it."""
        folder = self.root / repo
        present = {path for path in folder.rglob("*.parquet")} if folder.is_dir() else set()
        listed = {path for path in self.sums if path.is_relative_to(folder)}
        return [path.relative_to(folder).as_posix() for path in present | listed]


def _read_sums(listing: Path) -> dict[Path, str]:
    """Read the lines ``<sha256>  <path>`` of a SHA256SUMS file, paths relative to it."""
    sums = {}
    for number, line in enumerate(listing.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        match = _SUM_LINE.fullmatch(line)
        if match is None:
            raise DataError(f"{listing} line {number} is not '<sha256>  <path>': {line[:80]!r}")
        sums[Path(os.path.normpath(listing.parent / match["path"]))] = match["sha256"]
    return sums

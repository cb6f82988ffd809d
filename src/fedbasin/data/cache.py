"""Decoded arrays on disk: complete or absent, never half-written, and checked when opened.

An entry is a folder of .npy files and a manifest that says what they were made from. It is built
under another name and renamed into place, so a process that is killed leaves no entry behind,
and of two processes that build the same entry one simply wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbasin.data.arrays import CACHE_VARIABLE, Contents
from fedbasin.data.dataset import DataError, Dataset, Rows
from fedbasin.data.layout import SourceFile
from fedbasin.data.sources import Source

FORMAT = 1
_MANIFEST = "manifest.json"
_A_DAY = 86_400


@dataclass(frozen=True)
class Entry:
    """A complete, checked entry of the cache.

    Args:
        folder: where it lies.
        files: what it was made from.
        contents: its class and group names.
        train: the training rows, mapped from disk.
        test: the test rows, mapped from disk.
    """

    folder: Path
    files: tuple[SourceFile, ...]
    contents: Contents
    train: Rows
    test: Rows

    def made_from(self, files: list[SourceFile], *, by: tuple[str, ...]) -> bool:
        """Whether the entry was made from these files, as far as the named facts tell."""
        ours = [[getattr(file, fact) for fact in by] for file in self.files]
        theirs = [[getattr(file, fact) for fact in by] for file in files]
        return ours == theirs

    def dataset(self, source: Source) -> Dataset:
        """Return the dataset the entry holds."""
        channels = self.train.inputs.shape[1] if source.kind == "image" else 0
        return Dataset(
            source.name,
            source.kind,
            self.train,
            self.test,
            self.contents.classes,
            self.contents.group_names,
            source.mean or (0.0,) * channels,
            source.std or (1.0,) * channels,
        )


def cache_folder(cache_dir: Path | None) -> Path:
    """Return the cache folder: the argument, FEDBASIN_CACHE, or the user's own cache folder."""
    chosen = cache_dir or os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    home = {
        "darwin": Path.home() / "Library" / "Caches",
        "win32": Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"),
    }.get(sys.platform, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"))
    return home / "fedbasin" / "data"


def entry_folder(cache: Path, source: Source, place: str) -> Path:
    """Name the entry of a source read from a place; anything that changes its arrays changes it."""
    facts = (FORMAT, place, source.layout, source.parts, source.classes, source.channels)
    digest = hashlib.blake2b(repr((*facts, source.size, source.holdout)).encode(), digest_size=6)
    return cache / f"{re.sub(r'[^0-9A-Za-z.-]+', '_', source.name)}-{digest.hexdigest()}"


def read(folder: Path) -> Entry | None:
    """Open an entry; None where there is none or where it is damaged and must be built again."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text("utf-8"))
        if manifest["format"] != FORMAT:
            return None
        arrays = {name: _opened(folder, name, facts) for name, facts in manifest["arrays"].items()}
        train, test = (
            Rows(arrays[f"{s}_inputs"], arrays[f"{s}_labels"], arrays.get(f"{s}_groups"))
            for s in ("train", "test")
        )
        files = tuple(SourceFile(path=Path(), **record) for record in manifest["files"])
        contents = Contents(tuple(manifest["classes"]), tuple(manifest["group_names"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Entry(folder, files, contents, train, test)


def write(
    folder: Path, source: Source, files: list[SourceFile], build: Callable[[Path], Contents]
) -> Entry:
    """Build an entry beside its place and move it there once complete."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        building = folder.with_name(f".building-{uuid.uuid4().hex}")
        building.mkdir()
    except OSError as error:
        raise DataError(
            f"cannot write to the cache folder {folder.parent} ({error.strerror}); "
            f"name another with --cache-dir or {CACHE_VARIABLE}"
        ) from error
    try:
        contents = build(building)
        _write_manifest(building, source, files, contents)
        _sync(building)
        _publish(building, folder, files)
    except OSError as error:
        raise DataError(
            f"cannot write the cache entry {folder} ({error.strerror or error}); "
            f"make room there, or name another folder with --cache-dir or {CACHE_VARIABLE}"
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    entry = read(folder)
    if entry is None:
        raise DataError(f"the cache entry {folder} was damaged as it was written; check the disk")
    return entry


def refresh(entry: Entry, files: list[SourceFile]) -> None:
    """Note new file times in an entry whose files were touched but hold the same bytes."""
    with suppress(OSError):  # a read-only cache still serves; its files are only hashed each time
        manifest = json.loads((entry.folder / _MANIFEST).read_text("utf-8"))
        _write_json(entry.folder, manifest | {"files": [_record(file) for file in files]})


def _opened(folder: Path, name: str, facts: dict[str, Any]) -> NDArray[Any]:
    """Map one array of an entry, after comparing it with the manifest."""
    path = folder / f"{name}.npy"
    if path.stat().st_size != facts["bytes"]:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, the manifest says {facts['bytes']}"
        )
    array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    if list(array.shape) != facts["shape"] or array.dtype.name != facts["dtype"]:
        raise ValueError(f"{path} is not what the manifest says")
    return array


def _record(file: SourceFile) -> dict[str, Any]:
    """What the manifest keeps of a source file."""
    return {key: value for key, value in asdict(file).items() if key != "path"}


def _write_manifest(
    folder: Path, source: Source, files: list[SourceFile], contents: Contents
) -> None:
    arrays = {}
    for path in sorted(folder.glob("*.npy")):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays[path.stem] = {
            "shape": list(array.shape),
            "dtype": array.dtype.name,
            "bytes": path.stat().st_size,
        }
    manifest = {
        "format": FORMAT,
        "name": source.name,
        "kind": source.kind,
        "files": [_record(file) for file in files],
        "arrays": arrays,
        "classes": list(contents.classes),
        "group_names": list(contents.group_names),
    }
    _write_json(folder, manifest)


def _write_json(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest whole or not at all."""
    draft = folder / f"{_MANIFEST}.{os.getpid()}"
    draft.write_text(json.dumps(manifest, indent=1), "utf-8")
    draft.replace(folder / _MANIFEST)


def _sync(folder: Path) -> None:
    """Force an entry to the disk, so that a loss of power cannot leave holes in a published one."""
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def _publish(building: Path, folder: Path, files: list[SourceFile]) -> None:
    """Move a finished entry into place; an equal one that another process put there first stays."""
    aside = building.with_name(f"{building.name}-old")
    for attempt in range(10):
        try:
            building.rename(folder)
            return
        except OSError:
            if attempt and not folder.exists():
                raise
        present = read(folder)
        if present is not None and present.made_from(files, by=("name", "sha256")):
            return
        with suppress(OSError):  # another process may be moving it aside at this moment
            folder.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
    raise DataError(
        f"the cache entry {folder} cannot be replaced; remove that folder and try again"
    )


def _sweep(cache: Path) -> None:
    """Remove what killed processes left behind more than a day ago."""
    for leftover in cache.glob(".building-*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _A_DAY:
                shutil.rmtree(leftover, ignore_errors=True)

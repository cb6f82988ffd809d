"""Loading a dataset by its name: from the cache, a local mirror or the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedbasin.data import cache, centres, images, text
from fedbasin.data.arrays import Contents, Progress
from fedbasin.data.cache import Entry
from fedbasin.data.dataset import DataError, Dataset
from fedbasin.data.embedded import EMBEDDED
from fedbasin.data.hub import Hub
from fedbasin.data.layout import SourceFile
from fedbasin.data.mirror import Mirror
from fedbasin.data.sources import SOURCES, Layout, Source, resolve

_BUILDERS: dict[Layout, Callable[[Source, list[SourceFile], Path, Progress], Contents]] = {
    "images": images.build,
    "roles": text.build_roles,
    "windows": text.build_windows,
    "tcga_brca": centres.build_tcga_brca,
    "heart_disease": centres.build_heart_disease,
    "heart_disease_pooled": centres.build_heart_disease_pooled,
}


@dataclass(frozen=True)
class Listing:
    """One line of the catalogue.

    Args:
        name: what to load it by.
        rows: (train, test), as published until it has been decoded; test 0 if to be held out.
        classes: how many classes; 0 for targets without classes.
        shape: of one input.
        groups: what a group is, such as a writer; empty without groups.
        paper: where it is used.
        at_hand: ``"built in"``, ``"decoded"``, ``"in folder"``, ``"on hub"`` or ``"no"``.
    """

    name: str
    rows: tuple[int, int]
    classes: int
    shape: tuple[int, ...]
    groups: str
    paper: str
    at_hand: str


@dataclass(frozen=True)
class Fetched:
    """A loaded dataset and where it came from.

    Args:
        dataset: the data.
        entry: its place in the cache; None for data that is built in.
        decoded: whether it had to be decoded just now.
    """

    dataset: Dataset
    entry: Entry | None
    decoded: bool


def load(
    name: str,
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Load a dataset by name, decoding (and if need be downloading) it the first time.

    Args:
        name: a name of the catalogue, or ``hf:owner/name`` for another image dataset of the hub.
        data_dir: local mirror of the hub's layout; else FEDBASIN_DATA; else the hub itself.
        cache_dir: where decoded arrays are kept; else FEDBASIN_CACHE; else the user's cache folder.
        progress: called as (what is being done, rows done, rows in all).
    """
    return fetch(name, data_dir=data_dir, cache_dir=cache_dir, progress=progress).dataset


def fetch(
    name: str,
    *,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Fetched:
    """Load a dataset like `load`, and say where it lies."""
    if name in EMBEDDED:
        return Fetched(EMBEDDED[name].load(), None, False)
    sources = resolve(name)
    place = Mirror.named(data_dir) or Hub()
    source = place.pick(sources)
    folder = cache.entry_folder(cache.cache_folder(cache_dir), source, place.key)
    entry = cache.read(folder)
    if entry is not None and _is_current(entry, source, place):
        return Fetched(entry.dataset(source), entry, False)
    files = place.collect(source)

    def build(building: Path) -> Contents:
        return _BUILDERS[source.layout](source, files, building, progress or _silent)

    entry = cache.write(folder, source, files, build)
    return Fetched(entry.dataset(source), entry, True)


def available(*, data_dir: Path | None = None, cache_dir: Path | None = None) -> list[Listing]:
    """List every dataset of the catalogue and whether it is at hand."""
    names = (*EMBEDDED, *SOURCES)
    return [describe(name, data_dir=data_dir, cache_dir=cache_dir) for name in names]


def describe(name: str, *, data_dir: Path | None = None, cache_dir: Path | None = None) -> Listing:
    """Say what is known about a dataset without decoding or downloading anything."""
    if name in EMBEDDED:
        known = EMBEDDED[name]
        return Listing(name, known.rows, known.classes, known.shape, "", known.use, "built in")
    sources = resolve(name)
    place = Mirror.named(data_dir) or Hub()
    return _listing(sources, place, cache.cache_folder(cache_dir))


def _listing(sources: tuple[Source, ...], place: Mirror | Hub, folder: Path) -> Listing:
    """Describe one dataset as it stands here."""
    try:
        source = place.pick(sources)
        at_hand = "in folder" if isinstance(place, Mirror) else "on hub"
    except DataError:
        source = sources[0]
        at_hand = "no"
    rows = source.rows or (0, 0)
    shape = source.shape
    entry = cache.read(cache.entry_folder(folder, source, place.key)) if at_hand != "no" else None
    if entry is not None:
        rows = (len(entry.train), len(entry.test))
        shape = entry.train.inputs.shape[1:]
        at_hand = "decoded"
    return Listing(
        source.name, rows, len(source.classes), shape, source.groups, source.paper, at_hand
    )


def _is_current(entry: Entry, source: Source, place: Mirror | Hub) -> bool:
    """Whether an entry still stands for its source: a commit never changes, a folder may have.

    File sizes and times decide; where they differ, the content does.
    """
    if isinstance(place, Hub):
        return True
    if entry.made_from(place.locate(source), by=("name", "size", "mtime_ns")):
        return True
    files = place.collect(source)
    if not entry.made_from(files, by=("name", "sha256")):
        return False
    cache.refresh(entry, files)
    return True


def _silent(what: str, done: int, total: int) -> None:
    """Report no progress."""

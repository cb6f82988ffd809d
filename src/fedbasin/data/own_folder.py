"""A folder of pictures, sorted by class or by client and class, as a `Dataset`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedbasin.data.dataset import DataError, Dataset
from fedbasin.data.holdout import TestBy
from fedbasin.data.own_arrays import from_arrays
from fedbasin.data.pictures import decoded

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def from_folder(
    path: str | Path,
    *,
    size: tuple[int, int] | None = None,
    test: Any = 0.2,
    test_by: TestBy = "rows",
    name: str | None = None,
) -> Dataset:
    """Make a dataset of ``path/class/*.png``, or of ``path/client/class/*.png``.

    The depth tells which of the two it is. Pictures are read in the order of their paths. They are
    grey where the first one is, else RGB.

    Args:
        path: the folder.
        size: (height, width) that pictures are resized to; None where all have one size.
        test: the share of pictures, or clients, to hold out; or another such folder.
        test_by: hold out ``"rows"`` or whole ``"clients"``.
        name: by default that of the folder. A hash of the content is added.
    """
    root = Path(path).expanduser()
    files, depth = _listed(root)
    apart = test
    if isinstance(test, str | Path):
        other = Path(test).expanduser()
        tested, other_depth = _listed(other)
        if other_depth != depth:
            raise DataError(f"{root} has {depth} levels of folders and {other} {other_depth}")
        apart = _arrays(other, tested, depth, size)
    x, y, *clients = _arrays(root, files, depth, size)
    return from_arrays(
        x,
        y,
        *clients,
        test=apart,
        test_by=test_by,
        classes=True,
        kind="image",
        name=name or root.name,
    )


def _listed(root: Path) -> tuple[list[Path], int]:
    """Return the picture files and how many folders lie between them and the root."""
    if not root.is_dir():
        raise DataError(f"there is no folder {root}: check the path")
    files = sorted(each for each in root.rglob("*") if each.suffix.lower() in _ENDINGS)
    if not files:
        raise DataError(f"the folder {root} holds no pictures ({', '.join(_ENDINGS)})")
    depths = [len(file.relative_to(root).parts) - 1 for file in files]
    for file, depth in zip(files, depths, strict=True):
        if depth not in (1, 2):
            raise DataError(f"{file} must lie in {root}/class or in {root}/client/class: move it")
        if depth != depths[0]:
            raise DataError(
                f"{file} lies {depth} folders below {root} and {files[0]} {depths[0]}: sort all by "
                "class, or all by client and class"
            )
    return files, depths[0]


def _arrays(
    root: Path, files: list[Path], depth: int, size: tuple[int, int] | None
) -> tuple[Any, ...]:
    """Return pictures, names of classes and, below folders of clients, names of clients."""
    x = decoded(((str(file), file) for file in files), len(files), size)
    y = [file.parent.name for file in files]
    if depth == 1:
        return x, y
    return x, y, [file.relative_to(root).parts[0] for file in files]

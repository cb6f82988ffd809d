"""A dataset of the library `datasets` in memory, as a `Dataset`; the library is not imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedbasin.data.dataset import DataError, Dataset
from fedbasin.data.holdout import TestBy
from fedbasin.data.own_arrays import from_arrays
from fedbasin.data.own_table import from_table
from fedbasin.data.own_texts import from_texts
from fedbasin.data.pictures import decoded
from fedbasin.data.targets import Classes


def from_huggingface(
    ds: Any,
    target: str,
    client: str | None = None,
    *,
    text: str | None = None,
    tokenizer: Callable[..., Any] | None = None,
    length: int = 64,
    size: tuple[int, int] | None = None,
    features: Iterable[str] | None = None,
    drop: Iterable[str] = (),
    test: Any = 0.2,
    test_by: TestBy = "rows",
    name: str = "huggingface",
) -> Dataset:
    """Make a dataset of a `datasets.Dataset`, or of a `DatasetDict` with train and test.

    An image column makes it images. A text column that is named makes it texts. Anything else is a
    table as in `from_table`. Names of a `ClassLabel` target are kept.

    Args:
        ds: the dataset, or a mapping with ``"train"`` and ``"test"``.
        target: the column to predict.
        client: the column that names the client of each row; None without one.
        text: the column of texts.
        tokenizer: as for `from_texts`.
        length: as for `from_texts`.
        size: (height, width) that images are resized to.
        features: of a table, as for `from_table`.
        drop: of a table, as for `from_table`.
        test: the share to hold out, or another dataset; a mapping's ``"test"`` goes first.
        test_by: hold out ``"rows"`` or whole ``"clients"``.
        name: what the dataset is called. A hash of the content is added.
    """
    if isinstance(ds, Mapping):
        if "train" not in ds:
            raise DataError(f"the mapping has {', '.join(ds)}, and no 'train': name the rows so")
        test = ds.get("test", test)
        ds = ds["train"]
    if not hasattr(ds, "features") or not hasattr(ds, "with_format"):
        raise DataError(f"expected a datasets.Dataset, got {type(ds).__name__}: use from_table")
    for column in (target, client, text):
        if column is not None and column not in ds.features:
            raise DataError(f"{column!r} is no column; available: {', '.join(ds.features)}")
    classes: Classes = getattr(ds.features[target], "names", None)
    images = [key for key, kind in ds.features.items() if type(kind).__name__ == "Image"]
    apart = test
    held = hasattr(test, "with_format")
    if text is None and not images:
        return from_table(
            _arrow(ds),
            target,
            client,
            features=features,
            drop=drop,
            classes=classes,
            test=_arrow(test) if held else test,
            test_by=test_by,
            name=name,
        )
    if text is not None:
        if held:
            apart = tuple(_values(test, key) for key in (text, target, client) if key)
        return from_texts(
            _values(ds, text),
            _values(ds, target),
            tokenizer=tokenizer,
            length=length,
            clients=None if client is None else _values(ds, client),
            test=apart,
            test_by=test_by,
            classes=classes,
            name=name,
        )
    if len(images) > 1:
        raise DataError(f"there are several image columns ({', '.join(images)}): keep one")
    if held:
        others = (_values(test, key) for key in (target, client) if key)
        apart = (decoded(_pictures(test, images[0]), len(test), size), *others)
    return from_arrays(
        decoded(_pictures(ds, images[0]), len(ds), size),
        _values(ds, target),
        None if client is None else _values(ds, client),
        test=apart,
        test_by=test_by,
        classes=classes,
        kind="image",
        name=name,
    )


def _arrow(ds: Any) -> Any:
    """Return all rows as an Arrow table."""
    return ds.with_format("arrow")[:]


def _values(ds: Any, column: str) -> list[Any]:
    """Return a column as Python values."""
    values: list[Any] = ds.select_columns([column]).with_format("arrow")[:][column].to_pylist()
    return values


def _pictures(ds: Any, column: str) -> Iterator[tuple[str, Path | bytes]]:
    """Yield the stored bytes of each image, or the file that holds them."""
    stored = ds.select_columns([column]).with_format("arrow")
    for row in range(len(ds)):
        value = stored[row][column][0].as_py() or {}
        picture = value.get("bytes") or (Path(value["path"]) if value.get("path") else None)
        place = f"column {column!r}, row {row} (counted from 0)"
        if picture is None:
            raise DataError(f"{place}: the image is missing: remove the row")
        yield place, picture

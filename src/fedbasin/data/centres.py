"""FLamby's two tables of patients, prepared as FLamby does it; the hospitals are the groups.

Fed-TCGA-BRCA: 39 numbers a patient as they are, age in years; targets are (days, death).

Fed-Heart-Disease: cp and restecg become one column a level without the first. Every column is
scaled by the mean and the deviation (over n - 1) of training rows:

    x <- (x - mean) / (std + 1e-9)

They are those of a row's own centre, in training and in test. FLamby trains its pooled baseline on
rows that are scaled by the training rows of all centres together, and still tests it on each centre
as scaled by that centre: `build_heart_disease_pooled`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbasin.data.arrays import Contents, Progress
from fedbasin.data.dataset import DataError
from fedbasin.data.layout import SourceFile
from fedbasin.data.parquet import open_parquet, read_column
from fedbasin.data.sources import Source

Numbers = NDArray[np.float64]
_TINY = 1e-9  # keeps a column that is constant in a centre finite
_HEART_NUMBERS = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")
_HEART_LEVELS = (("cp", (1, 2, 3, 4)), ("restecg", (0, 1, 2)))


@dataclass(frozen=True, eq=False)
class _Split:
    """One split of a table, in the order of its files.

    Args:
        columns: every column of numbers by name, float64 [n].
        centre: int64 [n].
        names: the name of each centre that has rows here, by number.
    """

    columns: dict[str, Numbers]
    centre: NDArray[np.int64]
    names: dict[int, str]

    def stacked(self, names: Iterable[str]) -> Numbers:
        """Return some columns side by side, [n, k]."""
        return np.stack([self.columns[name] for name in names], axis=1)


def build_tcga_brca(
    source: Source, files: list[SourceFile], folder: Path, progress: Progress
) -> Contents:
    """Write Fed-TCGA-BRCA: numbers as they are, targets float32 (time, event)."""
    train, test = _read(files, "region")
    features = [name for name in train.columns if name not in ("time", "event")]
    _check_width(source, files, len(features))
    for split, rows in (("train", train), ("test", test)):
        targets = rows.stacked(("time", "event")).astype(np.float32)
        _write(folder, split, rows.stacked(features), targets, rows.centre)
    return _contents(source, train, test, progress)


def build_heart_disease(
    source: Source, files: list[SourceFile], folder: Path, progress: Progress
) -> Contents:
    """Write Fed-Heart-Disease, all rows scaled by the training rows of their own centre."""
    return _build_heart_disease(source, files, folder, progress, pooled=False)


def build_heart_disease_pooled(
    source: Source, files: list[SourceFile], folder: Path, progress: Progress
) -> Contents:
    """Write Fed-Heart-Disease, training rows scaled by the training rows of all centres."""
    return _build_heart_disease(source, files, folder, progress, pooled=True)


def _build_heart_disease(
    source: Source, files: list[SourceFile], folder: Path, progress: Progress, *, pooled: bool
) -> Contents:
    train, test = _read(files, "center_name")
    raw = _heart_features(train)
    _check_width(source, files, raw.shape[1])
    group = np.zeros_like(train.centre) if pooled else train.centre
    inputs = _scaled(raw, group, raw, group)
    _write(folder, "train", inputs, train.columns["label"].astype(np.int64), train.centre)
    inputs = _scaled(_heart_features(test), test.centre, raw, train.centre)
    _write(folder, "test", inputs, test.columns["label"].astype(np.int64), test.centre)
    return _contents(source, train, test, progress)


def _heart_features(rows: _Split) -> Numbers:
    """Return the 13 inputs, not scaled: 8 numbers, then the levels of cp and of restecg."""
    parts = [rows.columns[name] for name in _HEART_NUMBERS]
    for name, levels in _HEART_LEVELS:
        unknown = np.setdiff1d(rows.columns[name], levels)
        if len(unknown):
            raise DataError(
                f"column {name!r} of fed_heart_disease holds {unknown[0]:g}, expected one of "
                f"{levels}; fetch or copy the files again"
            )
        parts += [(rows.columns[name] == level).astype(np.float64) for level in levels[1:]]
    return np.stack(parts, axis=1)


def _scaled(
    inputs: Numbers, group: NDArray[np.int64], known: Numbers, known_group: NDArray[np.int64]
) -> Numbers:
    """Scale the rows of each group by the known rows of the same group."""
    scaled = np.empty_like(inputs)
    for number in np.unique(group):
        base = known[known_group == number]
        if len(base) < 2:
            raise DataError(
                f"centre {number} has {len(base)} training rows, two are needed to scale by; fetch "
                "or copy the files again"
            )
        mine = group == number
        spread = base.std(axis=0, ddof=1) + _TINY
        scaled[mine] = (inputs[mine] - base.mean(axis=0)) / spread
    return scaled


def _read(files: list[SourceFile], centre_name: str) -> tuple[_Split, _Split]:
    """Read the train and the test rows; all columns but the centre's name are numbers."""
    train = _read_split([file for file in files if file.split == "train"], centre_name)
    test = _read_split([file for file in files if file.split == "test"], centre_name)
    if list(train.columns) != list(test.columns):
        raise DataError(
            f"{files[0].name} and {files[-1].name} have other columns; fetch or copy them again"
        )
    return train, test


def _read_split(files: list[SourceFile], centre_name: str) -> _Split:
    parts = [_read_file(file, centre_name) for file in files]
    names: dict[int, str] = {}
    for part in parts:
        names |= part.names
    return _Split(
        {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns},
        np.concatenate([part.centre for part in parts]),
        names,
    )


def _read_file(file: SourceFile, centre_name: str) -> _Split:
    with open_parquet(file) as reader:
        known = list(reader.schema_arrow.names)
    needed = ("center", centre_name)
    missing = [name for name in needed if name not in known]
    if missing:
        raise DataError(
            f"{file.path} has no column {missing[0]!r} (it has: {', '.join(known)}); it is not "
            "this dataset, or another version of it"
        )
    columns = {}
    for name in known:
        if name not in needed:
            try:
                columns[name] = np.array(read_column(file, name), dtype=np.float64)
            except (ValueError, TypeError) as error:
                raise DataError(
                    f"{file.path}: column {name!r} holds no numbers ({error}); it is not this "
                    "dataset, or another version of it"
                ) from error
    centre = np.array(read_column(file, "center"), dtype=np.int64)
    said = zip(centre.tolist(), read_column(file, centre_name), strict=True)
    return _Split(columns, centre, dict(said))


def _check_width(source: Source, files: list[SourceFile], width: int) -> None:
    """Refuse files that give another number of inputs than is published."""
    if (width,) != source.shape:
        raise DataError(
            f"{files[0].path} gives {width} inputs a row, {source.name} has {source.shape[0]}; "
            "fetch or copy it again"
        )


def _write(
    folder: Path,
    split: str,
    inputs: Numbers,
    targets: NDArray[np.int64] | NDArray[np.float32],
    centre: NDArray[np.int64],
) -> None:
    np.save(folder / f"{split}_inputs.npy", inputs.astype(np.float32), allow_pickle=False)
    np.save(folder / f"{split}_labels.npy", targets, allow_pickle=False)
    np.save(folder / f"{split}_groups.npy", centre, allow_pickle=False)


def _contents(source: Source, train: _Split, test: _Split, progress: Progress) -> Contents:
    rows = len(train.centre) + len(test.centre)
    progress(f"reading {source.name}", rows, rows)
    names = train.names | test.names
    if sorted(names) != list(range(len(names))):
        raise DataError(
            f"the centres of {source.name} are numbered {sorted(names)}, expected 0, 1, 2 and so "
            "on; fetch or copy the files again"
        )
    return Contents(source.classes, tuple(names[number] for number in range(len(names))))

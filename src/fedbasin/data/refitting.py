"""Fitting a table's encoding again, on those training rows that no client holds out.

`from_table` fits the encoding before clients hold any rows out. Means and deviations of numbers,
and shares of true flags, are then fitted again without the rows that are held out. Which categories
there are, and so what a column becomes, stays.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedbasin.data.dataset import Rows, Splits
from fedbasin.data.encoding import Category, Encoding, Flag, Number


def refitted(
    encoding: Encoding, splits: Splits, used: NDArray[np.bool_]
) -> tuple[Encoding, Splits]:
    """Fit numbers and flags on some of the training rows, and encode all rows accordingly.

    Args:
        encoding: how the rows are encoded.
        splits: the rows.
        used: which of the training rows to fit on, [n].
    """
    train, proxy, test = splits.train, splits.proxy, splits.test
    written = [
        None if rows is None else np.array(rows.inputs, order="C") for rows in (train, proxy, test)
    ]
    columns = list(encoding.columns)
    number = -1
    for place, (column, at) in enumerate(zip(columns, encoding.starts, strict=True)):
        if isinstance(column, Category):
            continue
        number += 1
        known = used if train.missing is None else used & ~train.missing[:, number]
        if not known.any():
            continue
        new = columns[place] = _fitted(column, train.inputs[known, at].astype(np.float64))
        for rows, array in zip((train, proxy, test), written, strict=True):
            if rows is not None and array is not None:
                gone = None if rows.missing is None else rows.missing[:, number]
                array[:, at] = _encoded(column, new, rows.inputs[:, at], gone)
    made = [
        None if rows is None or array is None else _with(rows, array)
        for rows, array in zip((train, proxy, test), written, strict=True)
    ]
    assert made[0] is not None and made[2] is not None
    return replace(encoding, columns=tuple(columns)), Splits(made[0], made[1], made[2])


def _fitted(column: Number | Flag, values: NDArray[np.float64]) -> Number | Flag:
    """Return the column as fitted on encoded values that are known."""
    middle = float(values.mean())
    if isinstance(column, Flag):
        return replace(column, mean=middle)
    constant = values.min() == values.max()
    spread = 1.0 if constant else column.std * float(values.std()) or 1.0
    return replace(column, mean=column.mean + column.std * middle, std=spread)


def _encoded(
    old: Number | Flag,
    new: Number | Flag,
    values: NDArray[np.float32],
    gone: NDArray[np.bool_] | None,
) -> NDArray[np.float64]:
    """Turn what the old column encoded into what the new one encodes."""
    if isinstance(old, Number) and isinstance(new, Number):
        made = (values.astype(np.float64) * old.std + (old.mean - new.mean)) / new.std
        fill = 0.0
    else:
        made = values.astype(np.float64)
        fill = new.mean
    return made if gone is None else np.where(gone, fill, made)


def _with(rows: Rows, inputs: NDArray[np.float32]) -> Rows:
    inputs.flags.writeable = False
    return replace(rows, inputs=inputs)

"""A user's own arrays, or a torch dataset, as a `Dataset`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedbasin.data.coding import Coded, coded, missing_rows, refuse_missing
from fedbasin.data.dataset import KINDS, DataError, Dataset, Kind, first_gap
from fedbasin.data.holdout import Holdout, TestBy, check_share, plan
from fedbasin.data.naming import finished
from fedbasin.data.targets import Classes, Labels, labels_of

_CHANNELS = (1, 3)


def from_arrays(
    x: Any,
    y: Any,
    clients: Any = None,
    *,
    test: Any = 0.2,
    test_by: TestBy = "rows",
    time: Any = None,
    classes: Classes = None,
    kind: Kind | None = None,
    name: str = "arrays",
) -> Dataset:
    """Make a dataset of arrays of NumPy, tensors of torch, or lists.

    Inputs stay as they are, but float64 becomes float32, true/false 0 and 1, and ``[n]`` becomes
    ``[n, 1]``. Nothing is scaled: see `from_table` for that.

    Args:
        x: the inputs, [n, ...].
        y: the targets, [n] or [n, k]. Text, true/false and at most 20 whole numbers are classes;
            numbers become float32; several columns of whole numbers stay whole (int64).
        clients: the name or number of each row's client, [n]; None without clients.
        test: the share of rows, or clients, to hold out; or a separate test set (x, y), with
            clients (x, y, clients).
        test_by: hold out ``"rows"``, whole ``"clients"``, or the latest rows by ``"time"``.
        time: numbers or dates, [n], that grow with time.
        classes: whether `y` is classes, or the names of the classes; None for the rule above.
        kind: ``"image"``, ``"text"`` or ``"table"``; by default uint8 [n, channels, height, width]
            is images and anything else a table. Tokens, which a network looks up, are ``"text"``.
        name: what the dataset is called. A hash of the content is added.
    """
    share = check_share(test, test_by, clients is not None, time is not None)
    inputs = _inputs(x, "x")
    targets = _array(y, "y")
    owners = None if clients is None else _array(clients, "clients")
    is_test = None
    count = len(inputs)
    if share is None:
        apart = _separate(test, with_clients=owners is not None)
        tested = _inputs(apart[0], "x of test")
        if tested.shape[1:] != inputs.shape[1:]:
            raise DataError(
                f"a row of x is {list(inputs.shape[1:])} and one of the test set "
                f"{list(tested.shape[1:])}: make them alike"
            )
        _check_lengths(len(tested), {"y of test": apart[1]})
        inputs = np.concatenate([inputs, tested.astype(inputs.dtype)])
        targets = _joined(targets, _array(apart[1], "y of test"), "y")
        if owners is not None:
            owners = _joined(owners, _array(apart[2], "clients of test"), "clients")
        is_test = np.arange(len(inputs)) >= count
    moments = None if time is None or share is None else _moments(time)
    _check_lengths(len(inputs), {"y": targets, "clients": owners, "time": moments})
    labels = _labels(targets, classes)
    named = None if owners is None else _owners(owners)
    chosen = plan(labels, named, Holdout(share, test_by, moments, is_test), "y", _place)
    parts = (inputs[~chosen.is_test], inputs[chosen.is_test])
    return finished(name, _kind(inputs, kind), chosen, parts)


def from_torch(
    dataset: Any,
    *,
    clients: Any = None,
    test: Any = 0.2,
    test_by: TestBy = "rows",
    time: Any = None,
    classes: Classes = None,
    kind: Kind | None = None,
    name: str = "torch",
) -> Dataset:
    """Make a dataset of a map-style torch dataset, whose items are pairs (x, y) of one shape.

    Args:
        dataset: has a length and gives (x, y) by number.
        clients: the name or number of each row's client, [n]; None without clients.
        test: the share to hold out, or another such dataset.
        test_by: as for `from_arrays`.
        time: as for `from_arrays`.
        classes: as for `from_arrays`.
        kind: as for `from_arrays`.
        name: what the dataset is called. A hash of the content is added.
    """
    inputs, targets = _stacked(dataset, "the dataset")
    apart = test
    if not isinstance(test, int | float | tuple):
        apart = _stacked(test, "the test dataset")
    return from_arrays(
        inputs,
        targets,
        clients,
        test=apart,
        test_by=test_by,
        time=time,
        classes=classes,
        kind=kind,
        name=name,
    )


def _stacked(dataset: Any, what: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read all items of a torch dataset."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{what} is {type(dataset).__name__}, which has no length or no items by number: give "
            "a map-style dataset of pairs (x, y)"
        )
    inputs: NDArray[Any] | None = None
    targets = []
    for row in range(len(dataset)):
        item = dataset[row]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"{what}, {_place(row)}: expected a pair (x, y), got {type(item)}")
        value = _array(item[0], "x")
        if inputs is None:
            inputs = np.empty((len(dataset), *value.shape), dtype=value.dtype)
        if value.shape != inputs.shape[1:]:
            raise DataError(
                f"{what}, {_place(row)}: x is {list(value.shape)}, and {list(inputs.shape[1:])} in "
                "row 0: bring all to one size"
            )
        inputs[row] = value
        targets.append(_array(item[1], "y"))
    if inputs is None:
        raise DataError(f"{what} has no items: give some")
    return inputs, np.stack(targets)


def _place(row: int) -> str:
    return f"row {row} (counted from 0)"


def _array(values: Any, what: str) -> NDArray[Any]:
    """Return an array of NumPy, from a tensor, a list or whatever NumPy takes."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":  # NumPy has no such type
            values = values.float()
        values = values.numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(f"{what} has rows of several lengths: give as many numbers each") from error
    return array


def _inputs(x: Any, what: str) -> NDArray[Any]:
    """Return inputs as `Rows` takes them."""
    array = _array(x, what)
    if array.dtype == np.bool_:
        array = array.astype(np.uint8)
    if array.dtype.kind not in "iuf" or array.dtype.itemsize > 8:
        raise DataError(
            f"{what} is {array.dtype.name}: give numbers; use from_table for columns of text, and "
            "from_texts for texts"
        )
    if array.ndim == 0 or 0 in array.shape:
        raise DataError(f"{what} has shape {list(array.shape)}: give [n, ...] with some rows")
    if array.dtype == np.float64:
        with np.errstate(over="ignore"):  # infinity is refused below, by row
            array = array.astype(np.float32)
    if array.ndim == 1:
        array = array[:, None]
    _refuse_gaps(array, what)
    return array


def _refuse_gaps(array: NDArray[Any], what: str) -> None:
    """Refuse NaN and infinity, and name row and column."""
    gap = first_gap(array)
    if gap is None:
        return
    row, *column = gap
    where = column[0] if len(column) == 1 else column
    place = f"{_place(row)}, column {where}"
    fix = "fill in a number below the type's largest, or remove the row"
    raise DataError(
        f"{what} holds {array[gap]} in {place}: {fix}",
        f"{what} is not finite in {place}: {fix}",
    )


def _kind(inputs: NDArray[Any], kind: Kind | None) -> Kind:
    """Return the kind of the inputs, and refuse images with channels last."""
    if kind is not None and kind not in KINDS:
        raise DataError(f"kind is {kind!r}: available: {', '.join(KINDS)}")
    pixels = inputs.dtype == np.uint8 and inputs.ndim == 4
    if kind == "image" and not pixels:
        raise DataError(
            f"images must be uint8 [n, channels, height, width], got {inputs.dtype.name} "
            f"{list(inputs.shape)}: convert them, or use kind='table'"
        )
    if kind == "text" and inputs.dtype.kind == "f":
        raise DataError(f"tokens must be whole numbers, got {inputs.dtype.name}: convert them")
    last = pixels and inputs.shape[1] not in _CHANNELS and inputs.shape[3] in _CHANNELS
    if last and kind != "table":
        raise DataError(
            f"x has shape {list(inputs.shape)}, with channels last: give "
            "x.transpose(0, 3, 1, 2), or kind='table'"
        )
    return kind or ("image" if pixels else "table")


def _separate(test: Any, *, with_clients: bool) -> Sequence[Any]:
    """Check a separate test set."""
    wanted = "(x, y, clients)" if with_clients else "(x, y)"
    if not isinstance(test, tuple | list) or len(test) != 2 + with_clients:
        raise DataError(f"test must be a share between 0 and 1, or a tuple {wanted}")
    return test


def _joined(first: NDArray[Any], second: NDArray[Any], what: str) -> NDArray[Any]:
    """Join the values of two sets, which must have one type and shape."""
    kinds = [array.dtype.kind.replace("u", "i") for array in (first, second)]
    if first.shape[1:] != second.shape[1:] or kinds[0] != kinds[1]:
        raise DataError(
            f"{what} is {first.dtype.name} {list(first.shape)} and {second.dtype.name} "
            f"{list(second.shape)} in the test set: make them alike"
        )
    return np.concatenate([first, second])


def _check_lengths(rows: int, arrays: dict[str, Any]) -> None:
    for name, array in arrays.items():
        if array is not None and (not np.ndim(array) or len(array) != rows):
            count = len(array) if np.ndim(array) else "no"
            raise DataError(f"{name} has {count} rows and x has {rows}: give as many")


def _column(array: NDArray[Any], what: str) -> pa.ChunkedArray:
    """Return an array [n] as a column without missing values."""
    try:
        column = pa.chunked_array([pa.array(array.tolist() if array.dtype == object else array)])
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"{what} holds values of several types ({str(error).splitlines()[0]}): give numbers or "
            "names"
        ) from error
    refuse_missing(missing_rows(column), what, _place, "fill it in, or remove the row")
    return column


def _labels(targets: NDArray[Any], classes: Classes) -> Labels:
    if targets.ndim == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    if targets.ndim == 1:
        return labels_of(_column(targets, "y"), classes, "y", _place)
    if targets.ndim != 2 or 0 in targets.shape:
        raise DataError(f"y has shape {list(targets.shape)}: give [n], or [n, k] for k targets")
    if classes:
        raise DataError(f"classes are of y [n], got {list(targets.shape)}: leave classes out")
    if targets.dtype.kind in "biu":
        return Labels(targets.astype(np.int64))
    if targets.dtype.kind != "f":
        raise DataError(f"y is {targets.dtype.name} {list(targets.shape)}: give numbers")
    with np.errstate(over="ignore"):  # infinity is refused below, by row
        narrow = targets.astype(np.float32)
    _refuse_gaps(narrow, "y")
    return Labels(narrow)


def _owners(clients: NDArray[Any]) -> Coded:
    if clients.ndim != 1:
        raise DataError(f"clients has shape {list(clients.shape)}: give one name or number a row")
    return coded(_column(clients, "clients"))


def _moments(time: Any) -> NDArray[Any]:
    """Return times as numbers."""
    array = _array(time, "time")
    if array.ndim != 1 or array.dtype.kind not in "iufmM":
        raise DataError(
            f"time is {array.dtype.name} {list(array.shape)}: give numbers or dates [n]"
        )
    gone = np.isnat(array) if array.dtype.kind in "mM" else np.isnan(array)
    refuse_missing(gone, "time", _place, "fill it in")
    return array

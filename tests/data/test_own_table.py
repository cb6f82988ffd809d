import json
import logging

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from fedbasin.data import DataError, Encoding, from_clients, from_table
from fedbasin.data.encoding import Category, Flag, Number


def patients(rows=200, seed=0):
    rng = np.random.default_rng(seed)
    age = rng.normal(60, 10, rows).round(2)
    age[::17] = np.nan
    sex = np.array(["f", "m", None], dtype=object)[rng.integers(0, 3, rows)]
    return pd.DataFrame(
        {
            "age": age,
            "visits": rng.integers(0, 50, rows),
            "sex": sex,
            "smoker": rng.integers(0, 2, rows).astype(bool),
            "hospital": np.array(["north", "south", "east"])[rng.integers(0, 3, rows)],
            "died": rng.integers(0, 2, rows),
        }
    )


def same(a, b):
    assert (a.name, a.kind, a.classes, a.group_names) == (b.name, b.kind, b.classes, b.group_names)
    assert a.encoding == b.encoding and a.clients == b.clients
    for one, two in ((a.train, b.train), (a.test, b.test)):
        assert np.array_equal(one.inputs, two.inputs) and np.array_equal(one.labels, two.labels)
        assert np.array_equal(one.groups, two.groups)


def made(source, **options):
    return from_table(source, "died", "hospital", **{"name": "p"} | options)


def test_every_kind_of_table_gives_the_same_dataset(tmp_path):
    frame = patients()
    wanted = made(frame)
    frame.to_csv(tmp_path / "p.csv", index=False)
    frame.to_csv(tmp_path / "p.tsv", index=False, sep="\t")
    frame.set_index(frame.index * 2).to_parquet(tmp_path / "p.parquet")
    parts = tmp_path / "parts"
    parts.mkdir()
    frame[:70].to_parquet(parts / "a.parquet")
    frame[70:].to_parquet(parts / "b.parquet")
    (parts / "_notes.parquet").write_text("no table")
    records = frame.astype(object).where(frame.notna(), None).to_dict("records")
    text = frame.astype({"sex": "category", "hospital": "category"})
    for source in (
        pa.Table.from_pandas(frame),
        pl.from_pandas(frame),
        pl.from_pandas(text),
        text,
        tmp_path / "p.csv",
        str(tmp_path / "p.tsv"),
        tmp_path / "p.parquet",
        parts,
        records,
    ):
        same(wanted, made(source))
    assert wanted.name.startswith("p-") and len(wanted.name) == 10
    assert made(frame, name=None).name[:6] == "table-"
    assert from_table(tmp_path / "p.csv", "died").name[:2] == "p-"


def test_inputs_are_scikit_learns():
    frame = patients(500)
    frame["row"] = np.arange(500)
    data = made(frame)
    assert data.encoding.names == (
        *("age", "visits", "sex=f", "sex=m", "sex missing", "smoker", "row"),
    )
    at = data.encoding.names.index("row")
    number = data.encoding.columns[-1]
    rows = np.rint(data.train.inputs[:, at] * number.std + number.mean).astype(int)
    tested = np.rint(data.test.inputs[:, at] * number.std + number.mean).astype(int)
    assert sorted([*rows, *tested]) == list(range(500)) and (np.diff(rows) > 0).all()
    train = frame.iloc[rows]
    scaler = StandardScaler().fit(train[["age", "visits", "row"]])
    onehot = OneHotEncoder(sparse_output=False).fit(train[["sex"]].astype(object))
    for part, index in ((data.train, rows), (data.test, tested)):
        some = frame.iloc[index]
        numbers = np.nan_to_num(scaler.transform(some[["age", "visits", "row"]]), nan=0.0)
        sex = onehot.transform(some[["sex"]].astype(object))
        wanted = np.column_stack([numbers[:, :2], sex, some["smoker"], numbers[:, 2]])
        np.testing.assert_allclose(part.inputs, wanted, atol=2e-6)
        assert part.inputs.dtype == np.float32
        assert part.labels.tolist() == some["died"].tolist()
        names = [data.group_names[group] for group in part.groups]
        assert names == some["hospital"].tolist()
    assert data.classes == ("0", "1") and data.clients
    assert data.group_names == ("east", "north", "south")
    shares = [np.bincount(part.labels) for part in (data.train, data.test)]
    assert (shares[1] == np.floor(0.2 * (shares[0] + shares[1]))).all()


def test_test_rows_do_not_enter_the_encoding():
    """Rows that are held out are planted with values that would show in any statistic."""
    frame = patients(300)
    frame["when"] = np.arange(300)
    plain = made(frame, test_by="time", time="when")
    planted = frame.copy()
    planted.loc[240:, "age"] = 1e9
    planted.loc[240:, "visits"] = -(10**9)
    planted.loc[240:, "sex"] = "planted"
    planted.loc[240:, "smoker"] = True
    found = made(planted, test_by="time", time="when")
    assert found.encoding == plain.encoding
    assert np.array_equal(found.train.inputs, plain.train.inputs)
    sex = [i for i, name in enumerate(found.encoding.names) if name.startswith("sex")]
    assert not found.test.inputs[:, sex].any() and found.test.inputs[:, 0].min() > 1e6
    assert len(found.test) == 60 and "when" not in found.encoding.names


def test_missing_rules():
    frame = patients(100)
    gone = frame["age"].isna().to_numpy()
    with_column = made(frame, missing="indicator")
    at = with_column.encoding.names.index("age missing")
    both = np.concatenate([with_column.train.inputs[:, at], with_column.test.inputs[:, at]])
    assert set(both) == {0, 1} and both.sum() == gone.sum()
    assert "visits missing" not in with_column.encoding.names
    late = frame.assign(when=range(100), age=1.0)
    late.loc[90:, "age"] = None
    of_test = made(late, missing="indicator", test_by="time", time="when")
    assert "age missing" not in of_test.encoding.names  # training rows have no gap to learn from
    with pytest.raises(DataError, match=r"column 'age', row 0 \(counted from 0\): the value is mi"):
        made(frame, missing="refuse")
    full = frame.assign(age=1.0)
    with pytest.raises(DataError, match=r"column 'sex', row \d+ .*missing"):
        made(full, missing="refuse")
    assert not np.isnan(made(full).train.inputs).any()  # a constant column
    assert (made(full).train.inputs[:, 0] == 0).all()
    assert made(frame.assign(age=0.1)).encoding.columns[0].std == 1


def test_index_categories_can_be_embedded():
    frame = patients(100)
    data = made(frame, categories="index")
    (column,) = data.encoding.index_columns
    assert (column.name, column.position, column.size) == ("sex", 2, 4)
    fresh = pd.DataFrame({"age": [1.0] * 4, "visits": 2, "sex": ["f", "m", None, "x"]})
    got = data.encoding.apply(fresh.assign(smoker=True))
    assert got[:, 2].tolist() == [1, 2, 3, 0]
    import torch

    table = torch.nn.Embedding(column.size, 3)
    assert table(torch.tensor(data.train.inputs[:, 2]).long()).shape == (len(data.train), 3)


def test_apply_gives_the_rows_of_the_dataset_and_checks_columns(tmp_path):
    frame = patients(80)
    data = made(frame, drop=["visits"])
    again = data.encoding.apply(frame)
    assert len(again) == 80
    seen = {row.tobytes() for row in again}
    assert {row.tobytes() for row in data.train.inputs} <= seen
    one = {"age": 50, "sex": "m", "smoker": False}
    assert data.encoding.apply([one]).shape == (1, data.encoding.width)
    for change, message in (
        ({"smoker": None, "extra": 1}, "column 'extra' is not known to the encoding"),
        ({"age": "old"}, r"'age' holds text and the encoding has numbers there \(row 0 .*'old'"),
        ({"sex": 1}, "'sex' holds whole numbers and the encoding has text"),
        ({"smoker": 1.5}, "'smoker' holds numbers and the encoding has true or false"),
        ({"age": float("inf")}, "column 'age', row 0 .*the value is inf"),
    ):
        with pytest.raises(DataError, match=message):
            data.encoding.apply([one | change])
    with pytest.raises(DataError, match="column 'age' is no column; available: sex, smoker"):
        data.encoding.apply([{"sex": "m", "smoker": True}])


def test_a_csv_file_of_new_rows_keeps_text_that_looks_like_numbers(tmp_path):
    frame = pd.DataFrame({"code": ["A", "12"] * 10, "y": [0.5, 1.5] * 10})
    data = from_table(frame, "y")
    (tmp_path / "new.csv").write_text("code\n12\n12\n")
    assert data.encoding.apply(tmp_path / "new.csv").tolist() == [[1, 0]] * 2
    (tmp_path / "test.csv").write_text("code,y\n12,0.5\n")
    frame = pd.DataFrame({"code": ["A", "12", "B"] * 10, "y": [0.5, 1.5, 2.5] * 10})
    apart = from_table(frame, "y", test=tmp_path / "test.csv")
    assert apart.test.inputs.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    ("values", "classes", "dtype"),
    [
        (["b", "a"], ("a", "b"), np.int64),
        ([True, False], ("False", "True"), np.int64),
        ([10, 9], ("9", "10"), np.int64),
        ([1.0, 2.0], (), np.float32),
        (list(range(21)), (), np.float32),
    ],
)
def test_the_rule_for_one_target(values, classes, dtype):
    rows = 42 * 5
    frame = pd.DataFrame({"x": np.arange(rows), "y": (values * rows)[:rows]})
    data = from_table(frame, "y")
    assert data.classes == classes and data.train.labels.dtype == dtype
    if not classes and len(values) == 2:
        named = from_table(frame, "y", classes=True)
        assert named.classes == ("1", "2")
    if classes == ("9", "10"):
        numbers = from_table(frame, "y", classes=False)
        assert set(numbers.train.labels) == {9.0, 10.0} and numbers.classes == ()


def test_names_of_classes_can_be_given():
    frame = pd.DataFrame({"x": np.arange(20), "y": [0, 1] * 10, "z": ["no", "yes"] * 10})
    for target, drop in (("y", ["z"]), ("z", ["y"])):
        data = from_table(frame, target, drop=drop, classes=("no", "yes", "maybe"))
        assert data.classes == ("no", "yes", "maybe") and set(data.train.labels) == {0, 1}
    with pytest.raises(DataError, match=r"target 'z', row 1 .*'yes' is not among the classes"):
        from_table(frame, "z", drop=["y"], classes=("no", "maybe"))
    # Whole numbers that are names themselves are not counted from 0.
    twice = pd.DataFrame({"x": [2, 1] * 10, "y": [2, 1] * 10})
    data = from_table(twice, "y", classes=("1", "2"))
    assert data.train.labels.tolist() == (data.train.inputs[:, 0] > 0).tolist()


def test_several_targets():
    frame = patients(50).assign(time=np.arange(50), event=[0.0, 1.0] * 25, a=[0, 1] * 25, b=True)
    survival = from_table(frame, ("time", "event"), "hospital")
    assert survival.train.labels.dtype == np.float32 and survival.train.labels.shape[1] == 2
    several = from_table(frame, ("a", "b"), "hospital", drop=["time"])
    assert several.train.labels.dtype == np.int64 and set(several.train.labels[:, 1]) == {1}
    measured = from_table(frame, ("event", "a"), "hospital", drop=["time"])  # 0.0 is a number
    assert measured.train.labels.dtype == np.float32
    with pytest.raises(DataError, match="target 'sex' is one of several and holds large_string"):
        from_table(frame.fillna({"sex": "f"}), ("a", "sex"))


def test_splits_by_clients_by_time_and_by_a_table(tmp_path):
    frame = patients(300).assign(
        hospital=[f"h{i % 5}" for i in range(300)], day=pd.date_range("2019-09-01", periods=300)
    )
    whole = made(frame, test_by="clients", drop=["day"], test=0.4)
    trained, tested = set(whole.train.groups), set(whole.test.groups)
    assert trained == {0, 1, 2} and tested == {3, 4}  # training clients have the first numbers
    assert sorted(whole.group_names) == [f"h{i}" for i in range(5)]
    late = made(frame, test_by="time", time="day", test=0.1)
    assert len(late.test) == 30
    assert late.test.labels.tolist() == frame["died"][270:].tolist()
    parts = frame.assign(year=frame["day"].dt.year, month=frame["day"].dt.month)
    by_month = made(parts.drop(columns="day"), test_by="time", time=("year", "month"), test=0.2)
    # A month is never cut, so May and June of the later year: 57 of 300 rows.
    last = (parts["year"] == 2020) & (parts["month"] > 4)
    assert last.sum() == 57
    assert by_month.test.labels.tolist() == frame["died"][last].tolist()
    train, test = frame[:250].drop(columns="day"), frame[250:].drop(columns="day")
    train.to_csv(tmp_path / "train.csv", index=False)
    test.to_parquet(tmp_path / "test.parquet")
    given_test = made(tmp_path / "train.csv", test=tmp_path / "test.parquet")
    same(given_test, made(train, test=test))
    assert given_test.test.labels.tolist() == frame["died"][250:].tolist()
    assert len(given_test.train) == 250


def test_a_client_of_one_row_keeps_it_for_training():
    frame = patients(40).assign(hospital=[*"abcdefghij"] + ["k"] * 30)
    data = made(frame, test=0.7)
    assert sorted(set(data.train.groups)) == list(range(11))


def test_an_encoding_is_shared_between_sites():
    frame = patients(200)
    wanted = made(frame)
    site = frame[frame["hospital"] == "north"]
    own = from_table(site, "died", drop=["hospital"], encoding=wanted.encoding)
    assert own.encoding == wanted.encoding and own.classes == wanted.classes
    assert own.train.groups is None and not own.clients
    rows = {row.tobytes() for row in wanted.encoding.apply(frame)}
    assert {row.tobytes() for row in own.train.inputs} <= rows
    with pytest.raises(DataError, match=r"row 0 .*the class '7' is not among the classes"):
        from_table(site.assign(died=7), "died", encoding=wanted.encoding)
    with pytest.raises(DataError, match="the encoding was made for"):
        from_table(site, "smoker", encoding=wanted.encoding)


def test_sites_with_their_own_files(tmp_path):
    frame = patients(240)
    sites = {}
    for name, rows in frame.groupby("hospital", sort=True):
        sites[name] = rows.drop(columns="hospital")
    sites["north"].to_csv(tmp_path / "north.csv", index=False)
    files = sites | {"north": tmp_path / "north.csv"}
    data = from_clients(files, "died")
    assert data.group_names == ("east", "north", "south") and data.clients
    stacked = frame.sort_values("hospital", kind="stable")
    one = from_table(stacked, "died", "hospital", name="clients")
    assert np.array_equal(one.train.inputs, data.train.inputs) and one.name == data.name
    tested = from_clients(sites, "died", test={"north": sites["north"][:9]})
    assert len(tested.test) == 9 and set(tested.test.groups) == {1}
    for change, message in (
        ({"north": sites["north"].drop(columns="age")}, "client 'north' lacks the column 'age'"),
        ({"north": sites["north"].assign(new=1)}, "client 'north' has a column 'new'"),
        ({"south": sites["south"][:0]}, "client 'south' has no rows"),
        (
            {"south": sites["south"].assign(age="x")},
            "column 'age' holds numbers in client 'east' and text in client 'south'",
        ),
        ({"south": tmp_path / "none.csv"}, "client 'south': there is no file"),
    ):
        with pytest.raises(DataError, match=message):
            from_clients(sites | change, "died")
    with pytest.raises(DataError, match=r"there is one client .*a federation needs two"):
        from_clients({"a": sites["north"]}, "died")
    empty = sites | {"south": sites["south"].astype({"died": float}).assign(died=np.nan)}
    with pytest.raises(DataError, match="client 'south' has no rows with a target"):
        from_clients(empty, "died", missing_target="drop")


def test_missing_targets_are_refused_or_left_out(caplog):
    frame = patients(50).astype({"died": object})
    frame.loc[[3, 8], "died"] = None
    message = r"target 'died', row 3 \(counted from 0\): the value is missing \(2 such rows\)"
    with pytest.raises(DataError, match=message):
        made(frame)
    with caplog.at_level(logging.WARNING, "fedbasin"):
        data = made(frame, missing_target="drop")
    assert len(data.train) + len(data.test) == 48
    assert "left out 2 of 50 rows" in caplog.text
    rest = frame.drop(index=[3, 8])
    apart = made(frame[:40], test=frame[40:], missing_target="drop")
    assert apart.train.labels.tolist() == rest["died"][:38].tolist()
    assert apart.test.labels.tolist() == rest["died"][38:].tolist()
    parts = {"a": frame[:20], "b": frame[20:40]}
    parts = {name: part.drop(columns="hospital") for name, part in parts.items()}
    test = {"b": frame[40:].drop(columns="hospital")}
    sites = from_clients(parts, "died", test=test, missing_target="drop")
    assert sites.train.groups.tolist() == [0] * 18 + [1] * 20 and set(sites.test.groups) == {1}
    frame.loc[20, "age"] = np.inf  # rows are named by their place in the file
    with pytest.raises(DataError, match=r"'age', row 20 "):
        made(frame, missing_target="drop")


def test_a_string_in_a_number_column_is_named(tmp_path):
    frame = patients(50).astype({"age": object})
    frame.loc[7, "age"] = "about sixty"
    frame.to_csv(tmp_path / "p.csv", index=False)
    message = r"column 'age', row 7 \(counted from 0\): 'about sixty' is text in a column of numb"
    records = frame.to_dict("records")
    for source in (tmp_path / "p.csv", frame, records, frame.astype({"age": str})):
        with pytest.raises(DataError, match=message):
            made(source)
    kept = made(frame.assign(age=frame["age"].astype(str).astype("category")))
    assert "age=about sixty" in kept.encoding.names


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"id": [f"id{i}" for i in range(200)]}, {}, "column 'id' has 1\\d\\d categories.*drop="),
        ({"age": np.inf}, {}, r"column 'age', row 0 \(counted from 0\): the value is inf"),
        ({"age": np.nan}, {}, "column 'age' has no values in the training rows"),
        ({"hospital": "one"}, {}, "there is one client to train on .'one'.: a federation needs"),
        ({"day": pd.Timestamp("2020-01-01")}, {}, r"column 'day' holds dates.*drop=\['day'\]"),
        ({"day": "2020-01-01"}, {}, r"column 'day' holds dates as text.*'2020-01-01'.*drop="),
        ({"day": ["2020-1-1T10:00Z", None] * 100}, {}, "column 'day' holds dates as text"),
        ({"day": ["31.12.2020", "1/2/2020 9:30"] * 100}, {}, "column 'day' holds dates as text"),
        ({"day": [[1]] * 200}, {}, "column 'day' holds list<"),
        ({"died": 1}, {}, "target 'died' has one class, '1'"),
        ({}, {"test": 1.5}, "test is 1.5: give a share between 0 and 1"),
        ({}, {"test_by": "moon"}, "test_by is 'moon': available: rows, clients, time"),
        ({}, {"test_by": "time"}, "no time is given"),
        ({}, {"test_by": "time", "time": "sex"}, "time 'sex' holds text"),
        ({}, {"features": ["agee"]}, "feature 'agee' is no column; did you mean age"),
        ({}, {"features": ["died"]}, "'died' is both target and feature"),
        ({}, {"drop": "age"}, r"drop is 'age': give a list, \['age'\]"),
        ({}, {"missing": "zero"}, "missing is 'zero': available: mean, indicator, refuse"),
        ({}, {"test": 0.001}, "none is left for the test set"),
        ({"hospital": [None] * 200}, {}, "client 'hospital' holds nothing: give names"),
        ({"hospital": ["a", None] * 100}, {}, r"client 'hospital', row 1 .*missing"),
        ({"hospital": [0.5] * 200}, {}, r"client 'hospital', row 0 .*0.5 is no whole number"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(change, options, message):
    with pytest.raises(DataError, match=message) as caught:
        made(patients().assign(**change), **options)
    assert "\n" not in str(caught.value)


def test_bad_files_are_named(tmp_path):
    frame = patients(30)
    with pytest.raises(DataError, match="two columns named 'age'"):
        made(pd.concat([frame, frame[["age"]]], axis=1))
    (tmp_path / "twice.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(DataError, match="two columns named 'a': rename"):
        from_table(tmp_path / "twice.csv", "b")
    (tmp_path / "odd.csv").write_text("a,b\n1,2\n3,4,5\n")
    with pytest.raises(DataError, match=r"row 1 \(counted from 0\) has 3 values.*names 2"):
        from_table(tmp_path / "odd.csv", "b")
    (tmp_path / "semi.csv").write_text("a;b\n1;2\n")
    with pytest.raises(DataError, match="separates columns by ';'"):
        from_table(tmp_path / "semi.csv", "b")
    (tmp_path / "empty.csv").write_text("a,b\n")
    with pytest.raises(DataError, match="has no rows"):
        from_table(tmp_path / "empty.csv", "b")
    (tmp_path / "broken.parquet").write_text("PAR1")
    with pytest.raises(DataError, match=r"broken.parquet cannot be read"):
        from_table(tmp_path / "broken.parquet", "b")
    with pytest.raises(DataError, match="there is no file"):
        from_table(tmp_path / "nowhere.csv", "b")
    with pytest.raises(DataError, match=r"a table is a frame .*got ndarray: use from_arrays"):
        from_table(np.ones((3, 3)), "b")


def test_a_class_or_a_client_of_test_rows_only():
    frame = patients(100).assign(when=np.arange(100))
    late = frame.assign(died=np.where(frame["when"] >= 90, 2, frame["died"]))
    message = r"target 'died', row 90 .*the class '2' occurs in test rows only \(10 rows"
    with pytest.raises(DataError, match=message):
        made(late, test_by="time", time="when", test=0.1)
    first = frame.assign(died=np.where(frame["when"] >= 90, -1, frame["died"]))
    with pytest.raises(DataError, match=r"target 'died', row 90 .*the class '-1' occurs in test"):
        made(first, test_by="time", time="when", test=0.1)
    new = frame.assign(hospital=np.where(frame["when"] >= 90, "new", frame["hospital"]))
    with pytest.raises(DataError, match="client 'new' has no training rows"):
        made(new, test_by="time", time="when", test=0.1)


def test_the_name_tells_content_apart():
    frame = patients()
    names = {
        made(frame).name,
        made(frame.assign(age=frame["age"] + 1e-2 * np.arange(200))).name,
        made(frame.assign(died=1 - frame["died"])).name,
        made(frame.assign(died=frame["died"] * 0.5)).name,  # numbers: the same rows are held out
        made(frame.assign(died=frame["died"] * 0.7)).name,
        made(frame, test=0.3).name,
        made(frame[:150], test=frame[150:]).name,
        made(frame[:150], test=frame[150:].assign(visits=3)).name,
        from_table(frame, "died", drop=["hospital"], name="p").name,
        made(frame.replace({"hospital": {"east": "west"}})).name,
    }
    assert len(names) == 10 and made(frame).name in names


numbers = st.floats(-1e30, 1e30)
columns = st.one_of(
    st.builds(Number, st.text(), numbers, st.floats(1e-30, 1e30), st.booleans()),
    st.builds(Flag, st.text(), st.floats(0, 1), st.booleans()),
    st.builds(
        Category,
        st.text(),
        st.lists(st.text(), min_size=1, max_size=5, unique=True).map(tuple),
        st.booleans(),
    ),
)


@settings(max_examples=50, deadline=None)
@given(
    st.builds(
        Encoding,
        st.lists(columns, min_size=1, max_size=6, unique_by=lambda c: c.name).map(tuple),
        st.sampled_from(["onehot", "index"]),
        st.sampled_from(["mean", "indicator", "refuse"]),
        st.lists(st.text(), max_size=3).map(tuple),
        st.lists(st.text(), max_size=3).map(tuple),
        st.none() | st.text(),
        st.lists(st.text(), max_size=3).map(tuple),
    )
)
def test_an_encoding_survives_json(encoding):
    assert Encoding.from_json(encoding.to_json()) == encoding
    assert len(encoding.names) == encoding.width


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": []}, "at least one column"),
        ({"missing": "magic"}, "missing is 'magic', it must be"),
        ({"more": 1}, "must be an object with"),
        ({"columns": [{"kind": "code", "name": "x"}]}, r"columns\[0\].kind is 'code'"),
        ({"classes": [1]}, "classes is"),
    ],
)
def test_a_changed_encoding_file_is_refused(change, message):
    good = json.loads(made(patients()).encoding.to_json())
    with pytest.raises(DataError, match=message):
        Encoding.from_json(json.dumps(good | change))


def test_a_damaged_encoding_file_is_refused():
    text = made(patients()).encoding.to_json()
    with pytest.raises(DataError, match="this is no encoding"):
        Encoding.from_json(text[:-5])
    with pytest.raises(DataError, match="std above 0"):
        Encoding.from_json(text.replace('"std": ', '"std": -', 1))
    with pytest.raises(DataError, match="characters is refused"):
        Encoding.from_json(" " * 64_000_001)


def test_a_parquet_file_is_read_by_column(tmp_path, monkeypatch):
    """No read holds more than one column."""
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(50, 4)), columns=list("abcd"))
    frame.to_parquet(tmp_path / "f.parquet")
    asked = []
    read = pq.ParquetFile.read

    def watched(self, columns=None, **options):
        asked.append(columns)
        return read(self, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read", watched)
    from_table(tmp_path / "f.parquet", "d")
    assert asked and all(len(columns) == 1 for columns in asked)

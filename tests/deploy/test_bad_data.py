"""Bad data of every kind: the site's log and a simulation quote it, and nothing reaches the server.

Each kind plants a marker where its fault is. The marker is looked for in all that the server gets:
messages, error replies, its log, its folder, and the error that ends the run.
"""

from __future__ import annotations

import json
import logging
import traceback
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch import nn

pytest.importorskip("flwr", reason="needs the extra fedbasin[flower]")

from deploy.grids import LocalGrid, over_the_wire
from flwr.app import ArrayRecord, ConfigRecord, Context

from fedbasin.data import DataError, from_clients, from_folder, from_table, from_texts
from fedbasin.deploy import (
    FedbasinStrategy,
    Handling,
    Records,
    Secure,
    ServerSide,
    client_app,
    node_table,
)
from fedbasin.deploy.clients import ASK
from fedbasin.deploy.own_rows import Held
from fedbasin.deploy.secure.client import KEYS, SHARES, UNMASK

MARK = "Quibbleworth"
DIGITS = "867530986753"
FOLDER = "of Merriweather"
HEADER = "age,smokes,sex,died,name\n"
WHO = ("first", "second", "third")
ROWS = [
    f"{30 + 3 * n}.5,{'true' if n % 2 else 'false'},{'fm'[n % 2]},{n % 2},patient {n}\n"
    for n in range(20)
]


@pytest.fixture
def encoding(tmp_path):
    """The encoding that all sites share, of a sample without faults."""
    sample = tmp_path / "sample.csv"
    sample.write_text(HEADER + "".join(ROWS))
    return from_table(sample, "died", drop=["name"], classes=["0", "1"]).encoding


@dataclass(frozen=True)
class Site:
    """Where a kind of bad data puts its file, and the encoding to read it by."""

    folder: object
    encoding: object

    def table(self, path, **settings):
        """Read a table as a node does."""
        context = Context(1, 1, {"data": str(path)}, None, {})
        return node_table(context, self.encoding, **settings)

    def csv(self, *rows, header=HEADER):
        """Read a CSV file of which some rows, by number, are others than the good ones."""
        lines = [*ROWS]
        for number, row in rows:
            lines[number] = row
        path = self.folder / FOLDER / "site.csv"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((header + "".join(lines)).encode("latin-1"))
        return self.table(path)

    def frame(self, **columns):
        """Read a parquet file with some columns replaced."""
        self.csv()
        table = pandas.read_csv(self.folder / FOLDER / "site.csv").assign(**columns)
        path = self.folder / "site.parquet"
        parquet.write_table(pyarrow.Table.from_pandas(table), path)
        return self.table(path)


def malformed(site):
    return site.csv((3, f"61,true,f,1,{MARK},carcinoma, left\n"))


def too_few_cells(site):
    return site.csv((3, f"61,{MARK}\n"))


def open_quote(site):
    return site.csv((3, f'61,true,"f,1,{MARK}\n'))


def other_encoding(site):
    return site.csv((3, f"61,true,f\xe9,1,{MARK}\n"), header=HEADER.replace("died", "di\xe9d"))


def wrong_label(site):
    return site.csv((3, f"61,true,f,{MARK},x\n"))


def wrong_number_as_label(site):
    return site.csv((3, f"61,true,f,{DIGITS},x\n"))


def text_among_numbers(site):
    return site.csv((3, f"{MARK},true,f,1,x\n"))


def text_among_flags(site):
    return site.csv((3, f"61,{MARK},f,1,x\n"))


def dates_among_numbers(site):
    return site.csv(*((n, f"1961-03-{n + 1:02d},true,f,1,x\n") for n in range(20)))


def too_large(site):
    return site.csv((3, f"1e999,true,f,1,{MARK}\n"))


def missing_target(site):
    return site.csv((3, f"61,true,f,,{MARK}\n"))


def unknown_column(site):
    return site.csv(header=HEADER.replace("name", MARK))


def no_header(site):
    return site.csv(header=f"61.5,true,f,1,{MARK}\n")


def doubled_column(site):
    lines = [row.replace("patient", "p,q") for row in ROWS]
    header = f"age,smokes,sex,died,{MARK},{MARK}\n"
    return site.csv(*enumerate(lines), header=header)


def semicolons(site):
    lines = [row.replace(",", ";") for row in ROWS]
    return site.csv(*enumerate(lines), header=f"age;smokes;sex;died;{MARK}\n")


def lists_in_parquet(site):
    return site.frame(age=[[{MARK: n}] for n in range(20)])


def damaged_parquet(site):
    path = site.folder / "site.parquet"
    path.write_bytes(f"PAR1{MARK}".encode() * 9)
    return site.table(path)


def no_such_file(site):
    return site.table(site.folder / FOLDER / "none.csv")


def parts_that_differ(site):
    folder = site.folder / "parts"
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(("name", MARK)):
        table = pyarrow.table({"age": [1.0, 2.0], name: ["a", "b"]})
        parquet.write_table(table, folder / f"part{number}.parquet")
    return site.table(folder)


def mixed_values(site):
    rows = [{"age": 61.0, "died": 1}] * 3 + [{"age": MARK, "died": 0}]
    return from_table(rows, "died")


def one_class(site):
    return from_table([{"age": float(n), "died": MARK} for n in range(9)], "died")


def class_of_test_rows(site):
    rows = [{"age": float(n), "died": "ny"[n % 2]} for n in range(9)]
    return from_table(rows, "died", test=[{"age": 1.0, "died": MARK}])


def many_categories(site):
    rows = [{"age": n, "ward": f"{MARK} {n}", "died": n % 2} for n in range(200)]
    return from_table(rows, "died")


def infinite_without_a_header(site):
    rows = [{MARK: float("inf") if n == 3 else 1.0, "died": n % 2} for n in range(20)]
    return from_table(rows, "died")


def text_as_number_target(site):
    rows = [{"age": 1.0, "days": "7" if n != 3 else MARK} for n in range(20)]
    return from_table(rows, "days", classes=False)


def text_in_several_targets(site):
    rows = [{"age": 1.0, "a": "7" if n != 3 else MARK, "b": 1.0} for n in range(20)]
    return from_table(rows, ("a", "b"))


def clients_by_name(site):
    rows = [{"age": 1.0, "died": None if n == 3 else n % 2} for n in range(20)]
    return from_clients({MARK: rows, "x": rows}, "died")


def client_of_one_name(site):
    rows = [{"age": float(n), "died": n % 2, "doctor": MARK} for n in range(20)]
    return from_table(rows, "died", client="doctor")


def arrays_of_text(site):
    return [[MARK, 1.0], ["61", 2.0]], [0, 1]


def neither_dataset_nor_arrays(site):
    return {MARK: [1, 2]}


def text_that_is_none(site):
    return from_texts(["good", "texts", "and", (MARK,)], [0, 1, 0, 1])


def tokens_that_are_none(site):
    return from_texts([f"{MARK} is ill", "texts"] * 4, [0, 1] * 4, tokenizer=str.split)


def damaged_picture(site):
    for name in ("ill", "well"):
        (site.folder / "pictures" / name).mkdir(parents=True, exist_ok=True)
        (site.folder / "pictures" / name / f"{MARK}.png").write_bytes(b"no picture")
    return from_folder(site.folder / "pictures")


def jsonl_line(site):
    line = f'{{"age": 61, "name": "{MARK}"'
    try:
        json.loads(line)
    except ValueError as error:
        raise ValueError(f"line 3 is no JSON: {line}") from error


def key_error(site):
    return {"name": "x"}[MARK]


def float_of_text(site):
    return float(MARK)


def undecodable(site):
    return f"{MARK} \xe9".encode("latin-1").decode("ascii")


def exception_group(site):
    raise ExceptionGroup(f"rows of {MARK}", [ValueError(MARK)])


def noted(site):
    error = ValueError("a row is bad")
    error.add_note(f"it is {MARK}'s")
    raise error


def with_a_cause(site):
    try:
        raise ValueError(f"row of {MARK}")
    except ValueError as error:
        raise RuntimeError(f"the reader failed on {error}\nthe last line is {MARK}") from error


def users_own_data_error(site):
    raise DataError(f"row 3 is {MARK}'s: correct it")


class Textless(Exception):
    """An exception whose text cannot be made."""

    def __str__(self):
        raise ValueError(MARK)


def without_a_text(site):
    raise Textless(MARK)


@dataclass(frozen=True)
class Kind:
    """A kind of bad data.

    Args:
        make: returns the data of a site, or raises.
        server: what the server is told.
        site: what the site's own log quotes.
    """

    make: object
    server: tuple[str, ...]
    site: str = MARK


ROW = "row 3 (counted from 0)"
MORE = "(the site's own log says more)"
KINDS = (
    Kind(malformed, ("site.csv: ", ROW, "has 7 values and the header names 5", "quote values")),
    Kind(too_few_cells, ("site.csv: ", ROW, "has 2 values", "quote values")),
    Kind(open_quote, ("site.csv",)),
    Kind(other_encoding, ("site.csv cannot be read: write it again",), "invalid UTF8"),
    Kind(wrong_label, ("site.csv: ", "target 'died'", ROW, "not among the classes: correct it")),
    Kind(wrong_number_as_label, ("site.csv: ", "target 'died'", ROW, "not among"), DIGITS),
    Kind(text_among_numbers, ("site.csv: ", "column 'age' holds text", ROW, "correct the value")),
    Kind(text_among_flags, ("site.csv: ", "column 'smokes' holds text", ROW, "convert")),
    Kind(dates_among_numbers, ("site.csv: ", "column 'age' holds dates"), "1961, 3, 1"),
    Kind(too_large, ("site.csv: ", "column 'age', " + ROW, "is infinite: give a finite"), "inf"),
    Kind(missing_target, ("site.csv: ", "target 'died', " + ROW, "missing: fill it in"), "1 such"),
    Kind(unknown_column, ("site.csv: ", "column number 5 is not known to the encoding: remove")),
    Kind(no_header, ("site.csv: ", "target 'died' is no column: name it in the header")),
    Kind(doubled_column, ("site.csv: ", "two columns of one name: rename or remove")),
    Kind(semicolons, ("site.csv separates columns by ';': write it with commas",), FOLDER),
    Kind(lists_in_parquet, ("site.parquet: column 'age' holds lists", "convert the column")),
    Kind(damaged_parquet, ("site.parquet cannot be read: write it again",), "Parquet magic bytes"),
    Kind(no_such_file, ("there is no file none.csv",), FOLDER),
    Kind(parts_that_differ, ("part1.parquet lacks a column that other parts have",), "name"),
    Kind(mixed_values, (ROW, "a value is of another type than the rest of its column: correct")),
    Kind(one_class, ("target 'died' has one class in all training rows",)),
    Kind(class_of_test_rows, ("target 'died', row 0", "of the test table", "in test rows only")),
    Kind(many_categories, ("DataError " + MORE,)),
    Kind(infinite_without_a_header, ("DataError " + MORE,)),
    Kind(text_as_number_target, ("target 'days' holds text", ROW, "give numbers")),
    Kind(text_in_several_targets, ("target 'a' is one of several", ROW, "give numbers")),
    Kind(clients_by_name, ("DataError " + MORE,)),
    Kind(client_of_one_name, ("DataError " + MORE,)),
    Kind(arrays_of_text, ("its arrays (x, y) are not rows that",), "str1024"),
    Kind(neither_dataset_nor_arrays, ("its data is dict: give a fedbasin.data.Dataset",), "dict"),
    Kind(text_that_is_none, (ROW, "a value is no text: fill in one")),
    Kind(tokens_that_are_none, ("DataError " + MORE,)),
    Kind(damaged_picture, ("DataError " + MORE,)),
    Kind(jsonl_line, ("ValueError " + MORE,)),
    Kind(key_error, ("KeyError " + MORE,)),
    Kind(float_of_text, ("ValueError " + MORE,)),
    Kind(undecodable, ("UnicodeDecodeError " + MORE,), "0xe9"),
    Kind(exception_group, ("ExceptionGroup " + MORE,)),
    Kind(noted, ("ValueError " + MORE,)),
    Kind(with_a_cause, ("RuntimeError " + MORE,)),
    Kind(users_own_data_error, ("DataError " + MORE,)),
    Kind(without_a_text, ("Textless " + MORE,), "Textless"),
)
# Long ones: a hash or a random number does not hold them by chance.
PLANTED = (MARK, DIGITS, FOLDER, "1961, 3", "1961-03", "patient", "carcinoma")
by_name = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.make.__name__)


class Apart(logging.Handler):
    """What a federation inside one process logs, tracebacks included: the sites and the server."""

    def __init__(self):
        super().__init__()
        self.site_log = []
        self.server_log = []
        self.travelled = []  # what messages hold, both ways
        self.stage = ""  # what the site that is at work was asked for

    def emit(self, record):
        """Note a line as it is printed."""
        (self.site_log if self.stage else self.server_log).append(self.format(record))

    @contextmanager
    def listening(self):
        """Listen to all that is logged."""
        named = [logging.getLogger(name) for name in ("", "flwr", "fedbasin")]
        loggers = [each for each in named if each.name == "root" or not each.propagate]
        for each in loggers:
            each.addHandler(self)
        try:
            yield
        finally:
            for each in loggers:
                each.removeHandler(self)

    def app(self, app):
        """A ClientApp whose log lines are a site's."""

        def answer(message, context):
            kind = message.metadata.message_type
            self.stage = message.content["config"][ASK] if kind == "query" else kind
            try:
                return app(message, context)
            finally:
                self.stage = ""

        return answer

    def carry(self, message):
        """Note what a message holds on its way."""
        arrived = over_the_wire(message)
        if arrived.has_error():
            self.travelled.append(arrived.error.reason)
        else:
            self.travelled.append(repr(arrived.content))
        return arrived


def module():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(5, 2)


GOOD = np.arange(60, dtype=np.float32).reshape(12, 5) / 60, np.arange(12) % 2
NOISY = "dp(fedavg(weighting='uniform'), clip=0.2, noise=0.5, noise_by='clients')"
SECURE = {"secure": Secure(clip=1.0, rows=50, threshold=0.5)}
COUNTED = {"server": ServerSide(classes=2, counts="private")}
SCORED = {"fraction_evaluate": 1.0}
WAYS = {"plain": ("scaffold", SCORED), "secure": ("fedavg", SECURE), "dp": (NOISY, SCORED)}


def federate(folder, data, way, make_module=module, **client):
    """Run a federation of three sites; return all that its server got, and the sites' log."""
    apart = Apart()
    method, settings = WAYS[way] if isinstance(way, str) else way
    app = client_app(
        make_module,
        data(apart),
        method,
        classes=2,
        secure=2 if "secure" in settings else 0,
        **client,
    )
    strategy = FedbasinStrategy(
        method,
        records=Records(folder),
        handling=Handling(patience=0.1),
        min_train_nodes=2,
        min_available_nodes=2,
        **({"fraction_evaluate": 0.0} | settings),
    )
    grid = LocalGrid(apart.app(app), 3, carry=apart.carry)
    with apart.listening():
        try:
            arrays = ArrayRecord(module().state_dict())
            lr = ConfigRecord({"lr": 0.05})
            strategy.start(grid, arrays, num_rounds=1, timeout=0.1, train_config=lr)
        except Exception as error:
            apart.travelled.append("".join(traceback.format_exception(error)))
    files = [each.read_bytes().decode("latin-1") for each in folder.rglob("*") if each.is_file()]
    assert apart.travelled and apart.server_log
    server = "\n".join([*apart.travelled, *files, *apart.server_log])
    return server.splitlines(), "\n".join(apart.site_log)


def check_apart(server, log, words, quoted):
    """Check that the server got these words and nothing planted, and that the site's log quotes."""
    assert not [line for line in server if any(each in line for each in PLANTED)]
    told = [line for line in server if "Refused" in line]
    assert any(all(each in line for each in words) for line in told), told
    assert "Traceback" in log and any(quoted in line for line in log.splitlines()), log


def held_by(make, culprits, stage=None):
    """Good rows, but where culprits are asked for a stage, or for anything: what `make` returns."""

    def data(apart):
        def rows(client, clients):
            return make() if client in culprits and stage in (None, apart.stage) else GOOD

        return rows

    return data


@pytest.mark.parametrize("way", WAYS)
@by_name
def test_a_server_gets_nothing_of_bad_data(kind, way, tmp_path, encoding):
    site = Site(tmp_path, encoding)
    server, log = federate(tmp_path / "run", held_by(lambda: kind.make(site), {1}), way)
    check_apart(server, log, kind.server, kind.site)


@pytest.mark.parametrize("way", ["plain", "secure"])  # a round of dp may have an empty cohort
def test_the_error_that_ends_a_run_tells_nothing_of_bad_data(way, tmp_path, encoding):
    site = Site(tmp_path, encoding)
    data = held_by(lambda: malformed(site), {0, 1, 2})
    server, log = federate(tmp_path / "run", data, way)
    assert "Traceback (most recent call last):" in server
    check_apart(server, log, ("site.csv: ", ROW), "carcinoma")


@pytest.mark.parametrize(
    ("way", "stage"),
    [
        ("plain", "who"),
        ("plain", "train"),
        ("plain", "evaluate"),
        ("dp", "train"),
        ("secure", KEYS),
        ("secure", SHARES),
        ("secure", "train"),
        ("secure", UNMASK),
        (("mime", {}), "gradient"),
        (("fedwcm", COUNTED), "keys"),
        (("fedwcm", COUNTED), "encrypt"),
        (("fedwcm", COUNTED), "decrypt"),
        (("fedwcm", COUNTED), "score"),
        (("fedwcm", {}), "who"),
    ],
)
def test_no_question_of_a_server_gets_anything_of_bad_data(way, stage, tmp_path, encoding):
    if way[1] == COUNTED:
        pytest.importorskip("tenseal", reason="needs the extra fedbasin[he]")
    site = Site(tmp_path, encoding)
    data = held_by(lambda: wrong_label(site), {0, 1, 2}, stage)
    server, log = federate(tmp_path / "run", data, way, counts="private")
    check_apart(server, log, ("site.csv: ", "target 'died'", ROW), MARK)


class Quoting(nn.Linear):
    """A network that cannot work with a row, and quotes it."""

    def forward(self, rows):
        raise RuntimeError(f"cannot work with {MARK}, {rows}")


def quoting(rows, key=None):
    raise KeyError(MARK, rows)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("client", "label", "words", "quoted"),
    [
        ({"make_module": lambda: Quoting(5, 2)}, 1, "RuntimeError " + MORE, MARK),
        ({"transform": quoting}, 1, "KeyError " + MORE, MARK),
        ({}, -int(DIGITS), "Error " + MORE, "Error: "),
    ],
    ids=["network", "transform", "label"],
)
def test_a_server_gets_nothing_of_rows_that_code_quotes(
    client, label, words, quoted, way, tmp_path
):
    labels = GOOD[1].copy()
    labels[3] = label
    data = held_by(lambda: (GOOD[0], labels), {0, 1, 2})
    server, log = federate(tmp_path / "run", data, way, **client)
    check_apart(server, log, (words,), quoted)


@by_name
def test_a_simulation_shows_what_is_wrong_in_full(kind, tmp_path, encoding):
    site = Site(tmp_path, encoding)
    with pytest.raises(Exception) as caught:
        Held.of(kind.make(site), 1)
    assert kind.site in "".join(traceback.format_exception(caught.value))
    if isinstance(caught.value, DataError):
        assert kind.site in str(caught.value)

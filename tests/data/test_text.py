import numpy as np
import pytest
from data.making import write
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbasin.data import DataError
from fedbasin.data.labels import CHARACTERS
from fedbasin.data.text import last_share, tokens

ROLES = "local/shakespeare-roles/data/train-00000-of-00001.parquet"
WINDOWS = "flwrlabs/shakespeare/data/train-00000-of-00001.parquet"


def spelled(row):
    return "".join(CHARACTERS[t] for t in row)


def test_the_alphabet_is_leafs_eighty_characters_and_one_for_the_rest():
    assert len(CHARACTERS) == 81 and len(set(CHARACTERS)) == 81
    assert all(len(c) == 1 for c in CHARACTERS[:80])
    assert CHARACTERS[80] == "<unknown>"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=50)
def test_tokens_number_every_character(text):
    known = {c: n for n, c in enumerate(CHARACTERS)}
    assert tokens(text, CHARACTERS).tolist() == [known.get(c, 80) for c in text]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
@settings(max_examples=40)
def test_the_last_fifth_of_each_group_is_test(groups):
    mask = last_share(np.array(groups))
    for group in set(groups):
        mine = [bool(m) for m, g in zip(mask, groups, strict=True) if g == group]
        held = len(mine) // 5
        assert mine == [False] * (len(mine) - held) + [True] * held


def test_roles_are_cut_into_windows_that_do_not_overlap(root, open_):
    letters = "abcdefghijklmnopqrstuvwxyz "
    texts = {
        "HAMLET": "".join(letters[i * i % 27] for i in range(80 * 11 + 37)),
        "GHOST": "Adieu, adieu! Hamlet, remember me. " * 3,
        "CROWD": "O" * 80,  # nothing follows its only 80 characters
        "KING": "x" * 80 + "é",
    }
    columns = {"play": ["Hamlet"] * 4, "role": list(texts), "text": list(texts.values())}
    write(root / ROLES, columns)
    data = open_("shakespeare")
    assert data.kind == "text" and data.classes == CHARACTERS and data.mean == ()
    assert data.group_names == ("Hamlet: HAMLET", "Hamlet: GHOST", "Hamlet: KING")
    seen = []
    for rows in (data.train, data.test):
        assert rows.inputs.shape[1:] == (80,) and rows.inputs.dtype == np.uint8
        seen.append(
            [
                (data.group_names[g].split(": ")[1], spelled(row), CHARACTERS[label])
                for row, label, g in zip(rows.inputs, rows.labels, rows.groups, strict=True)
            ]
        )
    hamlet = [
        ("HAMLET", texts["HAMLET"][k : k + 80], texts["HAMLET"][k + 80]) for k in range(0, 880, 80)
    ]
    assert seen[0] == [
        *hamlet[:9],
        ("GHOST", texts["GHOST"][:80], texts["GHOST"][80]),
        ("KING", "x" * 80, "<unknown>"),
    ]
    assert seen[1] == hamlet[9:]


def windows(root, count=60, **changes):
    source = "To be, or not to be, that is the question. " * 10
    columns = {
        "character_id": [["b", "a", "c"][i % 3] for i in range(count)],
        "x": [source[i : i + 80] for i in range(count)],
        "y": [source[i + 80] for i in range(count)],
    }
    for part, rows in enumerate((slice(0, 25), slice(25, count))):
        path = root / WINDOWS.replace("00000-of-00001", f"0000{part}-of-00002")
        cut = {name: values[rows] for name, values in (columns | changes).items()}
        write(path, cut, row_group_size=7)
    return columns


def test_windows_cut_beforehand_are_read_as_they_are(root, open_):
    columns = windows(root)
    data = open_("shakespeare")
    assert data.group_names == ("a", "b", "c")
    kept = {"a": 16, "b": 16, "c": 16}
    rows = {"train": [], "test": []}
    for who, x, y in zip(*columns.values(), strict=True):
        kept[who] -= 1
        rows["train" if kept[who] >= 0 else "test"].append((who, x, y))
    for split, found in (("train", data.train), ("test", data.test)):
        assert [
            (data.group_names[g], spelled(row), CHARACTERS[label])
            for row, label, g in zip(found.inputs, found.labels, found.groups, strict=True)
        ] == rows[split]


def test_roles_are_preferred_where_both_layouts_are_there(root, open_):
    windows(root)
    write(root / ROLES, {"play": ["P"], "role": ["R"], "text": ["y" * 900]})
    assert open_("shakespeare").group_names == ("P: R",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": ["a" * 80] * 59 + ["short"]}, "row 34: the text is 5 characters long, expected 80"),
        ({"x": ["a" * 80] * 59 + [None]}, "row 34: the text is empty, expected 80"),
        ({"y": ["a"] * 5 + ["ab"] * 55}, "row 5: 'y' is 'ab', expected one character"),
        ({"character_id": [None] * 60}, "column 'character_id' holds null, expected text"),
        ({"x": [1] * 60}, "column 'x' holds int64, expected text"),
    ],
)
def test_bad_windows_are_named_by_row(root, open_, changes, message):
    windows(root, **changes)
    with pytest.raises(DataError, match=message):
        open_("shakespeare")


def test_texts_too_short_for_any_window_are_refused(root, open_):
    write(root / ROLES, {"play": ["P"], "role": ["R"], "text": ["brief"]})
    with pytest.raises(DataError, match="no text of more than 80 characters"):
        open_("shakespeare")
    write(root / ROLES, {"play": ["P"], "role": ["R"], "text": ["brief" * 50]})
    with pytest.raises(DataError, match="of 3 rows none is left for the test split"):
        open_("shakespeare")

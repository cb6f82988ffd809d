import io
import subprocess
import sys

import numpy as np
import pytest
from data.making import bomb
from PIL import Image

from fedbasin.data import DataError, HashedWords, from_folder, from_huggingface, from_texts

TEXTS = ["Good, good film", "bad film", "", "so good"] * 5
LABELS = [1, 0, 0, 1] * 5


def test_hashed_words_are_the_same_everywhere():
    words = HashedWords(1000)
    first, comma, second, film = words("Good, good film")
    assert first == second != film != comma and 1 <= min(words("a b c d")) < 1000
    assert HashedWords()("") == []


def test_texts_are_cut_and_padded_with_0():
    data = from_texts(TEXTS, LABELS, length=3, clients=["a", "b"] * 10)
    assert data.kind == "text" and data.train.inputs.dtype == np.int32
    rows = {tuple(row) for row in np.concatenate([data.train.inputs, data.test.inputs])}
    words = HashedWords()
    assert rows == {tuple((words(text) + [0] * 3)[:3]) for text in TEXTS}
    own = from_texts(TEXTS, LABELS, length=2, tokenizer=lambda text: [len(text)])
    assert set(own.train.inputs[:, 0]) <= {15, 8, 0, 7} and not own.train.inputs[:, 1].any()
    apart = from_texts(TEXTS, LABELS, length=2, test=(["bad film"], [0]))
    assert apart.test.inputs.tolist() == [words("bad film")]

    class Like:
        pad_token_id = 9

        def __call__(self, text, truncation, max_length):
            return {"input_ids": [5] * min(len(text), max_length), "attention_mask": []}

    taken = from_texts(TEXTS, LABELS, length=10, tokenizer=Like())
    assert {tuple(np.bincount(row, minlength=10)[[5, 9]]) for row in taken.train.inputs} <= {
        (10, 0),
        (8, 2),
        (0, 10),
        (7, 3),
    }


def test_bad_texts():
    with pytest.raises(DataError, match=r"texts, row 1 \(counted from 0\): None is no text"):
        from_texts(["a", None], [0, 1])
    with pytest.raises(DataError, match="it must give a list of whole numbers"):
        from_texts(["a", "b"], [0, 1], tokenizer=lambda text: [0.5])
    with pytest.raises(DataError, match="length must be 1 or more"):
        from_texts(["a", "b"], [0, 1], length=0)


def picture(path, value, size=(4, 3), mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value,) * 3).save(path)


def test_a_folder_by_class_and_by_client(tmp_path):
    for client in ("a", "b"):
        for at in range(10):
            label = ("cat", "dog")[at % 2]
            picture(tmp_path / "by" / client / label / f"{at}.png", 10 * at + (client == "b"))
    data = from_folder(tmp_path / "by")
    assert data.kind == "image" and data.classes == ("cat", "dog") and data.clients
    assert data.group_names == ("a", "b") and data.train.inputs.shape == (16, 1, 3, 4)
    for part in (data.train, data.test):
        value = part.inputs[:, 0, 0, 0]
        assert (part.labels == value // 10 % 2).all() and (part.groups == value % 10).all()
    flat = from_folder(tmp_path / "by" / "a", test=tmp_path / "by" / "b", size=(4, 3))
    assert not flat.clients and len(flat.test) == 10 and flat.train.inputs.shape == (10, 1, 4, 3)
    picture(tmp_path / "by" / "a" / "cat" / "z.png", 0, size=(5, 5))
    with pytest.raises(DataError, match=r"z.png: the picture has 5 x 5 pixels .*size=\(height"):
        from_folder(tmp_path / "by")
    picture(tmp_path / "by" / "a" / "x.png", 0)
    with pytest.raises(DataError, match="sort all by class"):
        from_folder(tmp_path / "by")
    (tmp_path / "broken" / "cat").mkdir(parents=True)
    (tmp_path / "broken" / "cat" / "x.png").write_text("no picture")
    with pytest.raises(DataError, match=r"x.png: the image cannot be decoded"):
        from_folder(tmp_path / "broken")
    (tmp_path / "broken" / "cat" / "x.png").write_bytes(bomb(60_000, 60_000))
    with pytest.raises(DataError, match=r"x.png: the image has more than 32,000,000 pixels"):
        from_folder(tmp_path / "broken")
    with pytest.raises(DataError, match="there is no folder"):
        from_folder(tmp_path / "nowhere")


def test_colour_pictures_have_three_channels(tmp_path):
    for at in range(10):
        picture(tmp_path / "cd"[at % 2] / f"{at}.png", at, mode="RGB")
    assert from_folder(tmp_path).train.inputs.shape[1:] == (3, 3, 4)


def test_hugging_face_datasets():
    datasets = pytest.importorskip("datasets", reason="the library datasets is an extra")
    rows = {"age": np.arange(40.0), "who": ["a", "b"] * 20, "text": TEXTS * 2, "y": LABELS * 2}
    kinds = datasets.Features(
        {
            "age": datasets.Value("float64"),
            "who": datasets.Value("string"),
            "text": datasets.Value("string"),
            "y": datasets.ClassLabel(names=["bad", "good"]),
        }
    )
    ds = datasets.Dataset.from_dict(rows, features=kinds)
    table = from_huggingface(ds, "y", "who", drop=["text"])
    assert table.classes == ("bad", "good") and table.encoding.names == ("age",) and table.clients
    chosen = ds.select(range(5, 35))
    assert len(from_huggingface(chosen, "y", "who", drop=["text"]).train) < 30
    both = datasets.DatasetDict({"train": ds, "test": ds.select(range(7))})
    texts = from_huggingface(both, "y", "who", text="text", length=4)
    assert texts.kind == "text" and len(texts.test) == 7 and len(texts.train) == 40
    data = io.BytesIO()
    Image.new("L", (3, 2), 7).save(data, "PNG")
    pictures = {"image": [{"bytes": data.getvalue(), "path": None}] * 10, "y": [0, 1] * 5}
    images = datasets.Dataset.from_dict(
        pictures, features=datasets.Features({"image": datasets.Image(), "y": kinds["y"]})
    )
    shown = from_huggingface(images, "y")
    assert shown.kind == "image" and (shown.train.inputs == 7).all()
    with pytest.raises(DataError, match="'z' is no column"):
        from_huggingface(ds, "z")
    with pytest.raises(DataError, match="and no 'train'"):
        from_huggingface({"rows": ds}, "y")


def test_the_room_imports_no_torch_and_no_frames():
    code = "import sys, fedbasin.data; print(*sys.modules)"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "pandas", "polars", "datasets"} & set(seen.stdout.split())

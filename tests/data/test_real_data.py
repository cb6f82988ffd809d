"""What can be known about the published data, checked on the files FEDBASIN_DATA names."""

import io
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedbasin.data import load

FOLDER = os.environ.get("FEDBASIN_DATA")


def present(repo):
    missing = FOLDER is None or not Path(FOLDER, repo).is_dir()
    return pytest.mark.skipif(missing, reason=f"FEDBASIN_DATA holds no {repo}")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def table(repo, split):
    parts = sorted(Path(FOLDER, repo).glob(f"*/{split}-*.parquet"))
    return pq.read_table(parts[0]) if len(parts) == 1 else pq.read_table(parts)


@present("flwrlabs/usps")
def test_usps_has_the_published_counts(cache):
    data = load("usps", data_dir=Path(FOLDER), cache_dir=cache)
    train = [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644]
    test = [359, 264, 198, 166, 200, 160, 170, 147, 166, 177]
    assert np.bincount(data.train.labels).tolist() == train
    assert np.bincount(data.test.labels).tolist() == test
    assert data.train.inputs.shape == (7291, 1, 16, 16)


@present("ufldl-stanford/svhn")
def test_svhn_pixels_are_those_in_the_file(cache):
    data = load("svhn", data_dir=Path(FOLDER), cache_dir=cache)
    rows = table("ufldl-stanford/svhn", "train")
    assert len(rows) == len(data.train)
    for index in np.random.default_rng(0).integers(0, len(rows), 30).tolist():
        image = Image.open(io.BytesIO(rows["image"][index]["bytes"].as_py()))
        assert np.array_equal(np.moveaxis(data.train.inputs[index], 0, 2), np.asarray(image))
        assert data.train.labels[index] == rows["label"][index].as_py()


@present("flwrlabs/pacs")
def test_pacs_has_four_domains_and_a_tenth_of_each_class_for_test(cache):
    data = load("pacs", data_dir=Path(FOLDER), cache_dir=cache)
    assert data.group_names == ("art_painting", "cartoon", "photo", "sketch")
    rows = table("flwrlabs/pacs", "train").to_pandas()
    for number, domain in enumerate(data.group_names):
        for label in range(7):
            whole = int(((rows.domain == domain) & (rows.label == label)).sum())
            test = int(((data.test.groups == number) & (data.test.labels == label)).sum())
            train = int(((data.train.groups == number) & (data.train.labels == label)).sum())
            assert test == whole // 10 and train + test == whole > 0


@present("local/shakespeare-roles")
def test_shakespeare_windows_spell_the_plays(cache):
    data = load("shakespeare", data_dir=Path(FOLDER), cache_dir=cache)
    rows = table("local/shakespeare-roles", "train").to_pylist()
    texts = {f"{row['play']}: {row['role']}": row["text"] for row in rows}
    assert len(data.train) + len(data.test) == sum((len(t) - 1) // 80 for t in texts.values())
    assert set(data.group_names) == {name for name, text in texts.items() if len(text) > 80}
    letters = np.array([c if len(c) == 1 else "\0" for c in data.classes])
    for number in (0, 100, 500):
        windows = np.concatenate(
            [part.inputs[part.groups == number] for part in (data.train, data.test)]
        )
        text = texts[data.group_names[number]]
        spelled = "".join(letters[windows.ravel()])
        assert all(a in (b, "\0") for a, b in zip(spelled, text, strict=False))
    assert (data.train.labels == 80).mean() < 1e-3  # almost no unknown characters


@present("zalando-datasets/fashion_mnist")
def test_fashion_mnist_has_its_known_brightness(cache):
    data = load("fashion-mnist", data_dir=Path(FOLDER), cache_dir=cache)
    assert np.bincount(data.train.labels).tolist() == [6000] * 10
    assert np.bincount(data.test.labels).tolist() == [1000] * 10
    counts = np.bincount(data.train.inputs.ravel(), minlength=256)
    values = np.arange(256) / 255
    mean = (counts * values).sum() / counts.sum()
    std = ((counts * values**2).sum() / counts.sum() - mean**2) ** 0.5
    assert (round(mean, 4), round(std, 4)) == (0.2860, 0.3530)
    assert data.classes[data.train.labels[0]] == "Ankle boot"


@present("uoft-cs/cifar100")
def test_cifar100_class_names_and_their_families_belong_together():
    from fedbasin.data.labels import CIFAR100, CIFAR100_COARSE

    rows = table("uoft-cs/cifar100", "test").select(["fine_label", "coarse_label"]).to_pandas()
    family = rows.groupby("fine_label").coarse_label.agg(["min", "max"])
    assert len(family) == 100 and (family["min"] == family["max"]).all()
    named = {CIFAR100[f]: CIFAR100_COARSE[c] for f, c in family["min"].items()}
    assert [named[n] for n in ("apple", "whale", "worm", "streetcar", "boy", "oak_tree")] == [
        "fruit_and_vegetables",
        "aquatic_mammals",
        "non-insect_invertebrates",
        "vehicles_2",
        "people",
        "trees",
    ]

import os
import subprocess
import sys

import numpy as np
import pytest
from data.making import images_file, pictures, sums, usps

from fedbasin.data import DataError, available, load
from fedbasin.data.sources import SOURCES, resolve

TRAIN = "flwrlabs/usps/data/train-00000-of-00001.parquet"
TEST = TRAIN.replace("train", "test")


@pytest.fixture
def made(root, rng):
    return usps(root, rng)


@pytest.mark.parametrize("up", [False, True])
def test_checksums_beside_or_above_the_folder_are_checked(made, root, open_, up):
    where = root.parent if up else root
    sums(root, [root / TRAIN, root / TEST], where)
    open_("usps")
    (where / "SHA256SUMS").write_text((where / "SHA256SUMS").read_text().replace("  ", " *"))
    open_("usps")
    content = bytearray((root / TRAIN).read_bytes())
    content[200] ^= 1
    (root / TRAIN).write_bytes(content)
    with pytest.raises(DataError, match=r"is truncated or altered: its SHA-256 is \w{12}\.\.\."):
        open_("usps")


def test_files_the_list_does_not_name_are_read_all_the_same(made, root, open_):
    sums(root, [root / TRAIN])
    assert len(open_("usps").test) == 10


def test_a_file_the_list_names_must_be_there(made, root, open_):
    sums(root, [root / TRAIN, root / TEST])
    (root / TEST).unlink()
    with pytest.raises(DataError, match=r"test-00000.* is listed in SHA256SUMS but missing"):
        open_("usps")


def test_a_garbled_list_is_refused(made, root, open_):
    (root / "SHA256SUMS").write_text("\nhello world\n")
    with pytest.raises(DataError, match=r"SHA256SUMS line 2 is not '<sha256>  <path>'"):
        open_("usps")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train-00000-of-00002"], r"2 files belong to this split, found 1 \(train-00000-of-00002"),
        (["train-00001-of-00002", "train-00000-of-00001"], "files belong to this split, found 2"),
        (["train-00000-of-00001", "train-extra"], "1 files belong to this split, found 2"),
        ([], "needs train and test files, found only: test"),
    ],
)
def test_a_split_must_be_complete(made, root, open_, rng, names, message):
    (root / TRAIN).unlink()
    for name in names:
        images_file((root / TRAIN).with_name(f"{name}.parquet"), pictures(rng, 3), [0] * 3)
    with pytest.raises(DataError, match=message):
        open_("usps")


def test_a_missing_test_split_is_told(made, root, open_):
    (root / TEST).unlink()
    with pytest.raises(DataError, match="needs train and test files, found only: train"):
        open_("usps")


def test_the_converted_layout_and_other_splits_are_understood(root, rng, open_):
    folder = root / "flwrlabs/usps/default"
    pixels = pictures(rng, 9)
    for k in range(3):
        images_file(folder / f"train/000{k}.parquet", pixels[3 * k : 3 * k + 3], [k] * 3)
    for split in ("test", "extra"):
        images_file(folder / split / "0000.parquet", pixels[:2], [0] * 2)
    data = open_("usps")
    assert np.array_equal(data.train.inputs[:, 0], pixels) and len(data.test) == 2


def test_a_part_of_a_dataset_is_not_taken_for_the_whole(root, rng, open_):
    for split in ("partial-train", "test"):
        images_file(root / f"flwrlabs/usps/default/{split}/0000.parquet", pictures(rng, 2), [0, 1])
    with pytest.raises(DataError, match="the hub has only a part of flwrlabs/usps as parquet"):
        open_("usps")


def test_configurations_are_chosen_or_asked_for(root, rng, open_):
    for config, count in (("small", 3), ("large", 7)):
        for split in ("train", "test"):
            images_file(
                root / f"me/x/{config}/{split}-0.parquet", pictures(rng, count), [0] * count
            )
    with pytest.raises(DataError, match=r"several configurations \(large, small\).*hf:me/x/large"):
        open_("hf:me/x")
    assert len(open_("hf:me/x/small").train) == 3
    with pytest.raises(DataError, match=r"expected .* there"):
        open_("hf:me/x/medium")
    for split in ("train", "test"):
        images_file(root / f"me/x/{split}.parquet", pictures(rng, 5), [0] * 5)
    assert len(open_("hf:me/x").train) == 5


def test_the_folder_comes_from_the_argument_or_the_environment(made, root, cache, monkeypatch):
    monkeypatch.setenv("FEDBASIN_DATA", str(root))
    assert len(load("usps", cache_dir=cache).train) == 20
    monkeypatch.setenv("FEDBASIN_DATA", str(root / "nowhere"))
    assert len(load("usps", data_dir=root, cache_dir=cache).train) == 20
    with pytest.raises(
        DataError, match=r"nowhere does not exist; correct --data-dir or FEDBASIN_DATA"
    ):
        load("usps", cache_dir=cache)


def test_what_is_not_in_the_folder_is_told_with_where_it_should_be(made, open_):
    with pytest.raises(DataError) as caught:
        open_("femnist")
    assert "flwrlabs/femnist/data|default/train-*.parquet" in str(caught.value)
    assert "unset FEDBASIN_DATA to use the hub" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar_10", r"unknown dataset 'cifar_10': did you mean cifar10"),
        ("FashionMNIST", "did you mean fashion-mnist"),
        ("zzz", "available: digits, breast-cancer, wine, diabetes, fashion-mnist"),
        ("hf:cifar10", r"is not of the form hf:OWNER/NAME"),
        ("hf:../../etc", "is not of the form"),
        ("hf:me/..", "is not of the form"),
        ("hf:a/b?colour=red", "unknown option 'colour'"),
        ("hf:a/b?size=0", "size=0 .* must be a number of pixels"),
        ("hf:a/b?size=big", "size=big .* must be a number of pixels"),
        ("hf:a/b?mode=CMYK", "mode=CMYK .* must be L .* or RGB"),
    ],
)
def test_a_wrong_name_is_explained(name, message):
    with pytest.raises(DataError, match=message):
        resolve(name)


def test_a_full_hub_name_is_taken_apart():
    (source,) = resolve("hf:me/my.birds-2/big@refs/pr/1?label=kind&size=64&mode=L")
    (part,) = source.parts
    assert (part.repo, part.configs, part.revision) == ("me/my.birds-2", ("big",), "refs/pr/1")
    assert (part.label, source.size, source.channels) == ("kind", (64, 64), 1)


def test_the_table_is_consistent():
    for name, sources in SOURCES.items():
        for source in sources:
            assert source.name == name and source.rows and source.shape and source.paper
            assert len(set(source.classes)) == len(source.classes) != 1  # 0: no classes
            assert len(source.mean) == len(source.std)
            assert not source.mean or len(source.mean) == source.channels == source.shape[0]
            assert (source.rows[1] == 0) == (source.holdout is not None or source.kind == "text")
            assert all(part.revision is None or len(part.revision) == 40 for part in source.parts)


def test_available_says_what_is_at_hand(made, root, cache, open_):
    def at_hand():
        listed = available(data_dir=root, cache_dir=cache)
        return {item.name: item for item in listed}

    before = at_hand()
    assert set(before) == {"digits", "breast-cancer", "wine", "diabetes", *SOURCES}
    assert (before["usps"].at_hand, before["usps"].rows) == ("in folder", (7291, 2007))
    assert (before["femnist"].at_hand, before["digits"].at_hand) == ("no", "built in")
    open_("usps")
    after = at_hand()["usps"]
    assert (after.at_hand, after.rows, after.shape) == ("decoded", (20, 10), (1, 6, 5))
    without = {item.name: item.at_hand for item in available(cache_dir=cache)}
    assert without["usps"] == "on hub" and without["digit-five"] == "no"


def test_digits_need_neither_network_nor_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBASIN_DATA", str(tmp_path / "nowhere"))
    data = load("digits", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    assert data.train.inputs.shape == (1442, 1, 8, 8) and data.test.inputs.shape == (355, 1, 8, 8)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    whole = np.bincount(bunch.target)
    assert np.array_equal(np.bincount(data.test.labels), whole // 5)
    assert np.array_equal(np.bincount(data.train.labels), whole - whole // 5)
    ink = np.sort(
        np.concatenate([data.train.inputs, data.test.inputs]).sum(axis=(1, 2, 3), dtype=int)
    )
    assert np.array_equal(ink, np.sort(np.rint(bunch.data * 255 / 16).sum(axis=1).astype(int)))
    assert data.train.inputs.max() == 255 and not data.train.inputs.flags.writeable


def test_importing_the_room_does_not_bring_torch():
    heavy = "{'torch', 'huggingface_hub', 'pyarrow', 'PIL', 'sklearn'}"
    code = f"import sys, fedbasin.data; print(sorted({heavy} & set(sys.modules)))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    seen = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert seen.stdout.strip() == "[]"

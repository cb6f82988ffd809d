import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.making import bomb, cell, encoded, images_file, pictures, usps, write
from PIL import Image

from fedbasin.data import DataError, images
from fedbasin.data.split import held_out


def stand_in(root, rng, **changes):
    """Write a USPS stand-in whose train file has some columns replaced."""
    usps(root, rng)
    pixels = pictures(rng, 20)
    columns = {"image": [cell(encoded(p)) for p in pixels], "label": list(range(10)) * 2}
    path = root / "flwrlabs/usps/data/train-00000-of-00001.parquet"
    columns = {name: value for name, value in (columns | changes).items() if value is not None}
    return write(path, columns)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "BMP"])
def test_grey_images_arrive_pixel_by_pixel(root, rng, open_, form):
    made = usps(root, rng, train=600, test=10, form=form)  # more than two chunks
    data = open_("usps")
    for split, rows in (("train", data.train), ("test", data.test)):
        pixels, labels = made[split]
        assert np.array_equal(rows.inputs[:, 0], pixels)
        assert rows.inputs.shape == (len(pixels), 1, 6, 5)
        assert np.array_equal(rows.labels, labels)
        assert rows.groups is None
    assert data.classes == tuple("0123456789")
    assert (data.kind, data.mean, data.std) == ("image", (0.0,), (1.0,))


def test_colour_images_are_channels_first_and_files_keep_their_order(root, rng, open_):
    pixels, labels = pictures(rng, 30, channels=3), rng.integers(0, 10, 30)
    folder = root / "uoft-cs/cifar10/plain_text"
    for k in range(3):
        part = slice(10 * k, 10 * k + 10)
        path = folder / f"train-0000{k}-of-00003.parquet"
        images_file(path, pixels[part], labels[part], image="img", form="WEBP")
    images_file(folder / "test-00000-of-00001.parquet", pixels[:4], labels[:4], image="img")
    data = open_("cifar10")
    assert np.array_equal(data.train.inputs, pixels.transpose(0, 3, 1, 2))
    assert np.array_equal(data.train.labels, labels)
    assert np.array_equal(data.test.inputs, pixels[:4].transpose(0, 3, 1, 2))
    assert data.mean == (0.491, 0.482, 0.447)


def test_big_images_are_decoded_in_threads_and_small_chunks(root, rng, open_, monkeypatch):
    made = usps(root, rng, train=40)
    monkeypatch.setattr(images, "_PIXELS_WORTH_A_THREAD", 1)
    monkeypatch.setattr(images, "_CHUNK_BYTES", 3 * 30 * 16)  # as if 16 rows filled the memory
    monkeypatch.setattr(images.os, "cpu_count", lambda: 4)
    seen = []
    data = open_("usps", progress=lambda _, done, __: seen.append(done))
    assert seen == [16, 32, 40, 50]
    assert np.array_equal(data.train.inputs[:, 0], made["train"][0])


def test_every_eight_bit_mode_is_understood(root, rng, open_):
    grey = pictures(rng, 1)[0]
    colours = np.repeat(grey[..., None], 3, axis=2)
    modes = [None, "RGB", "RGBA", "LA", "P"]
    cells = [cell(encoded(grey, mode=mode)) for mode in modes]
    cells.append(cell(encoded(colours, "WEBP")))
    stand_in(root, rng, image=cells, label=[0] * len(cells))
    assert (open_("usps").train.inputs == grey).all()


def test_progress_counts_rows_up_to_the_total(root, rng, open_):
    usps(root, rng, train=600, test=10)
    seen = []
    open_("usps", progress=lambda *report: seen.append(report))
    assert [done for _, done, _ in seen] == [256, 512, 600, 610]
    assert {(what, total) for what, _, total in seen} == {("decoding usps", 610)}


GOOD = encoded(np.zeros((6, 5)))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"not an image", "the image cannot be decoded"),
        (GOOD[:-30], "the image cannot be decoded"),
        (encoded(np.zeros((6, 5)), "PPM"), "the image cannot be decoded"),  # not a form we allow
        (b"", "empty or stored outside the file"),
        (None, "empty or stored outside the file"),
        (encoded(np.zeros((6, 6))), "the image is 6x6, the first one is 5x6"),
        (encoded(np.eye(6, 5)[..., None] * [9, 8, 7]), "a colour image in a grey dataset"),
        (bomb(6000, 6000), "more than 32,000,000 pixels"),
        (bomb(10_000, 10_000), "more than 32,000,000 pixels"),
        (bomb(60_000, 60_000), "more than 32,000,000 pixels"),
    ],
)
def test_a_bad_image_is_named_by_file_and_row(root, rng, open_, cache, monkeypatch, bad, message):
    monkeypatch.setattr(images, "_CHUNK", 8)
    cells = [cell(GOOD)] * 20
    cells[13] = cell(bad)
    path = stand_in(root, rng, image=cells)
    with pytest.raises(DataError, match=message) as caught:
        open_("usps")
    assert f"{path} row 13: " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(cache.iterdir())


def test_sixteen_bit_images_are_refused(root, rng, open_):
    image = Image.fromarray(np.full((6, 5), 40_000, dtype=np.uint16))
    image.save(root / "deep.png")
    deep = cell((root / "deep.png").read_bytes())
    stand_in(root, rng, image=[cell(GOOD)] * 19 + [deep])
    with pytest.raises(DataError, match=r"row 19: pixels of mode I;16 are not 8 bits deep"):
        open_("usps")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": [*range(10), *range(10, 20)]}, r"row 10: label 10 in 'label' must be 0..9"),
        ({"label": [0] * 19 + [-1]}, r"row 19: label -1 in 'label' must be 0..9"),
        ({"label": [0] * 5 + [None] * 15}, "row 5: 'label' is empty"),
        ({"label": [0.5] * 20}, "column 'label' holds double, expected integer labels"),
        ({"label": None, "digit": [0] * 20}, r"no column 'label' \(it has: image, digit\)"),
        ({"image": ["a.png"] * 20}, "column 'image' holds string, expected images"),
        ({"image": None}, "no column 'image'"),
        ({"image": [None] * 20}, "column 'image' holds null"),
    ],
)
def test_a_file_of_another_kind_is_refused(root, rng, open_, changes, message):
    path = stand_in(root, rng, **changes)
    with pytest.raises(DataError, match=message) as caught:
        open_("usps")
    assert str(path) in str(caught.value)


def test_another_number_of_classes_is_refused(root, rng, open_):
    usps(root, rng, classes={"label": ["even", "odd"]})
    with pytest.raises(DataError, match=r"has other classes \(2\) than expected \(10\)"):
        open_("usps")


def test_a_truncated_file_is_refused(root, rng, open_):
    usps(root, rng)
    path = root / "flwrlabs/usps/data/train-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="is not a readable parquet file") as caught:
        open_("usps")
    assert str(path) in str(caught.value) and "copy it again" in str(caught.value)


def test_a_file_without_rows_is_refused(root, rng, open_):
    path = stand_in(root, rng)
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(DataError, match=r"train-00000-of-00001.parquet has no rows"):
        open_("usps")


def test_writers_of_mnist_are_groups_where_the_files_name_them(root, rng, open_):
    pixels, writers = pictures(rng, 12), [30, 4, 30, 100] * 3
    folder = root / "ylecun/mnist/mnist"
    for split, who in (("train", writers), ("test", [7] * 12)):
        images_file(folder / f"{split}-0.parquet", pixels, [1] * 12, writer_id=who)
    data = open_("mnist")
    assert data.group_names == ("4", "7", "30", "100")  # in order of number, over both splits
    assert data.train.groups.tolist() == [2, 0, 2, 3] * 3
    assert data.test.groups.tolist() == [1] * 12
    images_file(folder / "test-0.parquet", pixels, [1] * 12)
    without = open_("mnist")
    assert without.train.groups is None and without.group_names == ()


def test_femnist_holds_out_a_tenth_of_every_writer(root, rng, open_):
    count = 400
    writers = [f"f{w:04d}_14" for w in rng.integers(0, 7, count)]
    labels, pixels = rng.integers(0, 62, count), pictures(rng, count)
    path = root / "flwrlabs/femnist/data/train-00000-of-00001.parquet"
    images_file(path, pixels, labels, label="character", writer_id=writers, hsf_id=[0] * count)
    data = open_("femnist")
    names, codes = np.unique(writers, return_inverse=True)
    is_test = held_out(codes, 0.1)
    assert data.group_names == tuple(names)
    assert len(data.classes) == 62 and data.classes[10] == "A" and data.classes[61] == "z"
    for rows, mask in ((data.train, ~is_test), (data.test, is_test)):
        assert np.array_equal(rows.inputs[:, 0], pixels[mask])
        assert np.array_equal(rows.labels, labels[mask])
        assert np.array_equal(rows.groups, codes[mask])
    assert np.array_equal(np.bincount(data.test.groups), np.bincount(codes) // 10)


def test_pacs_holds_out_a_tenth_of_every_domain_and_class(root, rng, open_):
    domains = np.repeat(["photo", "sketch"], 140)
    labels = np.tile(np.repeat(np.arange(7), 20), 2)
    order = rng.permutation(280)
    pixels = pictures(rng, 280, channels=3)
    path = root / "flwrlabs/pacs/data/train-00000-of-00001.parquet"
    images_file(path, pixels, labels[order], domain=domains[order].tolist())
    data = open_("pacs")
    cells = data.test.groups * 7 + data.test.labels
    assert data.group_names == ("photo", "sketch")
    assert np.bincount(cells).tolist() == [2] * 14
    assert len(data.train) == 280 - 28


DOMAINS = {
    "ylecun/mnist/mnist": (1, 28),
    "ufldl-stanford/svhn/cropped_digits": (3, 32),
    "flwrlabs/usps/data": (1, 16),
    "local/synthetic-digits/data": (3, 32),
    "Mike0307/MNIST-M/data": (3, 32),
}


def test_digit_five_joins_five_domains_at_one_size(root, rng, open_):
    made = []
    for number, (folder, (channels, side)) in enumerate(DOMAINS.items()):
        pixels = pictures(rng, 3 + number, side, side, channels)
        for split in ("train", "test"):
            images_file(root / folder / f"{split}-0.parquet", pixels, [number] * len(pixels))
        made.append(pixels)
    data = open_("digit-five")
    assert data.group_names == ("mnist", "svhn", "usps", "synthetic-digits", "mnist-m")
    assert data.train.inputs.shape == (25, 3, 28, 28)
    wanted = np.repeat(np.arange(5), [3, 4, 5, 6, 7])
    assert np.array_equal(data.train.groups, wanted) and np.array_equal(data.test.groups, wanted)
    assert np.array_equal(data.train.labels, wanted)
    assert np.array_equal(data.train.inputs[0], np.repeat(made[0][0][None], 3, axis=0))
    resized = Image.fromarray(made[2][4]).resize((28, 28), Image.Resampling.BILINEAR)
    assert np.array_equal(data.train.inputs[11, 1], np.asarray(resized))


def test_without_one_domain_there_is_no_digit_five(root, rng, open_):
    usps(root, rng)
    with pytest.raises(DataError, match=r"digit-five is not in the data folder .* ylecun/mnist"):
        open_("digit-five")


def other(root, rng, name="me/birds/default", test="validation", **columns):
    pixels = pictures(rng, 40)
    for split in ("train", test):
        if split:
            path = root / name / f"{split}-00000-of-00001.parquet"
            base = {"picture": [cell(encoded(p)) for p in pixels], "kind": [0, 1] * 20}
            write(path, base | columns, {"kind": ["finch", "owl"]})
    return pixels


def test_any_image_dataset_is_read_by_what_its_schema_says(root, rng, open_):
    pixels = other(root, rng, age=list(range(40)))
    data = open_("hf:me/birds")
    assert np.array_equal(data.train.inputs[:, 0], pixels)
    assert data.classes == ("finch", "owl")
    assert len(data.test) == 40
    assert (data.name, data.mean, data.std) == ("hf:me/birds", (0.0,), (1.0,))
    by_age = open_("hf:me/birds?label=age")
    assert by_age.classes == tuple(map(str, range(40)))


def test_without_a_test_split_a_fifth_of_each_class_is_held_out(root, rng, open_):
    other(root, rng, test=None)
    data = open_("hf:me/birds")
    assert np.bincount(data.test.labels).tolist() == [4, 4]
    assert np.bincount(data.train.labels).tolist() == [16, 16]


def test_images_of_several_sizes_are_resized_when_asked(root, rng, open_):
    mixed = [cell(encoded(pictures(rng, 1, side, 9, 3)[0])) for side in range(4, 44)]
    other(root, rng, picture=mixed)
    with pytest.raises(DataError, match=r"row 1: the image is 9x5, .*\?size=PIXELS"):
        open_("hf:me/birds")
    assert open_("hf:me/birds?size=12").train.inputs.shape == (40, 3, 12, 12)
    assert open_("hf:me/birds?size=12&mode=RGB").train.inputs.shape == (40, 3, 12, 12)
    with pytest.raises(DataError, match=r"row 0: a colour image in a grey dataset"):
        open_("hf:me/birds?size=12&mode=L")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"kind": ["owl"] * 40}, "column 'kind' holds string, expected integer labels"),
        ({"again": [cell(GOOD)] * 40}, r"has several image columns \(picture, again\)"),
        ({"picture": [1] * 40}, "has no image column, fedbasin needs exactly one$"),
    ],
)
def test_a_dataset_that_is_not_one_image_and_one_label_is_refused(
    root, rng, open_, columns, message
):
    other(root, rng, **columns)
    with pytest.raises(DataError, match=message):
        open_("hf:me/birds")


def test_columns_that_hold_no_labels_are_listed_with_what_they_hold(root, rng, open_):
    for split in ("train", "test"):
        columns = {"image": [cell(GOOD)] * 4, "kind": ["cat"] * 4, "score": [0.5] * 4}
        write(root / f"me/words/default/{split}-0.parquet", columns)
    expected = r"no column of labels, that is of whole numbers.*kind \(string\), score \(double\)"
    with pytest.raises(DataError, match=expected):
        open_("hf:me/words")


def test_several_label_columns_ask_for_a_choice(root, rng, open_):
    for split in ("train", "test"):
        columns = {"image": [cell(GOOD)] * 4, "fine": [0] * 4, "coarse": [1] * 4}
        write(root / f"me/two/default/{split}-0.parquet", columns)
    with pytest.raises(DataError, match=r"several label columns \(fine, coarse\).*\?label=COLUMN"):
        open_("hf:me/two")
    assert open_("hf:me/two?label=coarse").train.labels.tolist() == [1] * 4


def test_splits_that_name_other_classes_are_refused(root, rng, open_):
    other(root, rng)
    path = root / "me/birds/default/validation-00000-of-00001.parquet"
    write(path, {"picture": [cell(GOOD)], "kind": [0]}, {"kind": ["owl", "finch"]})
    with pytest.raises(DataError, match=r"has other classes \(2\) than expected \(2\)"):
        open_("hf:me/birds")


def test_files_without_the_hubs_metadata_are_understood_from_their_types(root, rng, open_):
    for split in ("train", "test"):
        path = root / f"me/plain/default/{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"photo": [cell(GOOD)] * 3, "answer": [2, 0, 1]}), path)
    data = open_("hf:me/plain")
    assert data.classes == ("0", "1", "2") and data.train.labels.tolist() == [2, 0, 1]

"""The tables that ship with scikit-learn, against scikit-learn's own tools."""

import numpy as np
import pytest
from sklearn import datasets
from sklearn.preprocessing import StandardScaler

from fedbasin.data import available, describe, load
from fedbasin.data.embedded import EMBEDDED
from fedbasin.data.split import held_out

TABLES = {
    "breast-cancer": datasets.load_breast_cancer,
    "wine": datasets.load_wine,
    "diabetes": lambda: datasets.load_diabetes(scaled=False),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_published_row_is_in_one_split_and_scaled_by_the_training_rows(name):
    data, published = load(name), TABLES[name]()
    strata = published.target if data.classes else np.zeros(len(published.target))
    is_test = held_out(strata.astype(np.int64), 0.2)
    scaler = StandardScaler().fit(published.data[~is_test])
    assert data.kind == "table" and data.train.inputs.dtype == np.float32
    for split, mine in ((data.train, ~is_test), (data.test, is_test)):
        wanted = scaler.transform(published.data[mine])
        np.testing.assert_allclose(split.inputs, wanted, rtol=1e-5, atol=1e-6)
        if data.classes:
            assert split.labels.tolist() == published.target[mine].tolist()


@pytest.mark.parametrize("name", ["breast-cancer", "wine"])
def test_a_fifth_of_every_class_is_test(name):
    data, published = load(name), TABLES[name]()
    assert data.classes == tuple(published.target_names) and data.train.labels.dtype == np.int64
    whole = np.bincount(published.target)
    assert np.bincount(data.test.labels).tolist() == (whole // 5).tolist()
    assert np.bincount(data.train.labels).tolist() == (whole - whole // 5).tolist()


def test_the_target_of_diabetes_is_a_number_scaled_by_the_training_rows():
    data, published = load("diabetes"), TABLES["diabetes"]()
    train, test = data.train.labels, data.test.labels
    assert data.classes == () and train.dtype == test.dtype == np.float32
    assert abs(train.mean()) < 1e-6 and abs(train.std() - 1) < 1e-6
    order = np.sort(np.concatenate([train, test]))
    wanted = np.sort(published.target)
    slope, shift = np.polyfit(order, wanted, 1)
    np.testing.assert_allclose(order * slope + shift, wanted, atol=1e-3)
    # What is learned from rows and targets together is as good as on the published table.
    from sklearn.linear_model import LinearRegression

    model = LinearRegression().fit(data.train.inputs, train)
    assert 0.35 < model.score(data.test.inputs, test) < 0.65


def test_what_is_listed_is_what_is_loaded():
    assert [each.name for each in available()][:4] == list(EMBEDDED)
    for name in EMBEDDED:
        listing, data = describe(name), load(name)
        assert listing.rows == (len(data.train), len(data.test))
        assert listing.classes == len(data.classes)
        assert listing.shape == data.train.inputs.shape[1:]
        assert listing.at_hand == "built in" and data.name == name
        again = load(name)
        assert np.array_equal(again.test.inputs, data.test.inputs)

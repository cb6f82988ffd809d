import numpy as np
import pytest

from fedbasin.data import load


@pytest.fixture(autouse=True)
def no_outside(monkeypatch, tmp_path):
    """No test may find data, a cache or the hub by chance."""
    monkeypatch.delenv("FEDBASIN_DATA", raising=False)
    monkeypatch.setenv("FEDBASIN_CACHE", str(tmp_path / "default cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def root(tmp_path):
    """A local mirror, empty."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def open_(root, cache):
    """Load a dataset from the mirror."""

    def open_it(name, **options):
        return load(name, data_dir=root, cache_dir=cache, **options)

    return open_it

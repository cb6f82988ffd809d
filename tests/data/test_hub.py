import hashlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from data.making import images_file, pictures, write
from huggingface_hub import errors

from fedbasin.data import DataError, fetch, hub, load

CONVERTED = "refs/convert/parquet"


class FakeHub:
    """Repositories with revisions, in a folder; counts what it is asked."""

    def __init__(self, folder):
        self.folder, self.trees, self.asked = folder, {}, []
        self.lfs, self.spoil = True, 0

    def revision(self, repo, revision, commit, files):
        self.trees[repo, revision] = self.trees[repo, commit] = (commit, files)

    def dataset_info(self, repo, *, revision, files_metadata):
        assert files_metadata
        self.asked.append((repo, revision))
        if not any(known == repo for known, _ in self.trees):
            raise blank(errors.RepositoryNotFoundError)
        if (repo, revision) not in self.trees:
            raise blank(errors.RevisionNotFoundError)
        commit, files = self.trees[repo, revision]
        return SimpleNamespace(sha=commit, siblings=[self._sibling(n, p) for n, p in files.items()])

    def _sibling(self, name, path):
        content = path.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        lfs = SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()) if self.lfs else None
        return SimpleNamespace(rfilename=name, blob_id=git, lfs=lfs)

    def hf_hub_download(self, repo, name, *, repo_type, revision, force_download):
        assert repo_type == "dataset" and len(revision) == 40
        self.asked.append((repo, name, force_download))
        content = self.trees[repo, revision][1][name].read_bytes()
        if self.spoil > 0:
            self.spoil -= 1
            content = content[:-1]
        path = self.folder / revision / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return str(path)


def blank(kind, *arguments):
    """An exception of the client without the HTTP response it usually carries."""
    error = kind.__new__(kind)
    error.args = arguments
    return error


@pytest.fixture
def fake(tmp_path, monkeypatch):
    fake = FakeHub(tmp_path / "downloads")
    monkeypatch.setattr(hub, "_api", lambda: fake)
    return fake


@pytest.fixture
def files(tmp_path, rng):
    """Train and test files of a small USPS."""
    made = {}
    for split, count in (("train", 12), ("test", 4)):
        path = tmp_path / "origin" / f"{split}.parquet"
        images_file(path, pictures(rng, count), np.arange(count) % 10)
        made[split] = path
    return made


def own(files, folder="data"):
    return {f"{folder}/{s}-00000-of-00001.parquet": path for s, path in files.items()}


def converted(files, config="default"):
    return {f"{config}/{s}/0000.parquet": path for s, path in files.items()}


def test_files_come_from_one_commit_which_the_manifest_keeps(fake, files, cache):
    fake.revision("flwrlabs/usps", "main", "c" * 40, own(files) | {"README.md": files["train"]})
    found = fetch("usps", cache_dir=cache)
    assert found.decoded and len(found.dataset.train) == 12
    assert {file.commit for file in found.entry.files} == {"c" * 40}
    assert [file.name for file in found.entry.files] == [
        "flwrlabs/usps/data/train-00000-of-00001.parquet",
        "flwrlabs/usps/data/test-00000-of-00001.parquet",
    ]
    assert found.entry.files[0].sha256 == hashlib.sha256(files["train"].read_bytes()).hexdigest()
    assert ("flwrlabs/usps", "README.md", False) not in fake.asked


def test_once_fetched_the_network_is_not_needed(fake, files, cache):
    fake.revision("flwrlabs/usps", "main", "c" * 40, own(files))
    fetch("usps", cache_dir=cache)
    fake.trees.clear()
    assert not fetch("usps", cache_dir=cache).decoded


def test_a_pinned_revision_is_asked_for(fake, files, cache):
    pin = "77f3279092a1c1579b2250db8eafed0ad422088c"
    fake.revision("ylecun/mnist", "main", "b" * 40, {})
    fake.revision("ylecun/mnist", pin, pin, own(files, "mnist"))
    assert {f.commit for f in fetch("mnist", cache_dir=cache).entry.files} == {pin}
    assert fake.asked[0] == ("ylecun/mnist", pin)


def test_converted_files_serve_where_the_repository_has_none(fake, cache, tmp_path):
    window = {"character_id": ["a"] * 10, "x": ["b" * 80] * 10, "y": list("0123456789")}
    path = write(tmp_path / "w.parquet", window)
    fake.revision("flwrlabs/shakespeare", "main", "a" * 40, {"shakespeare.csv": path})
    fake.revision("flwrlabs/shakespeare", CONVERTED, "d" * 40, {"default/train/0000.parquet": path})
    found = fetch("shakespeare", cache_dir=cache)
    assert len(found.dataset.train) == 8 and found.entry.files[0].commit == "d" * 40


def test_other_datasets_are_read_as_converted_or_as_they_are(fake, files, cache):
    fake.revision("me/x", "main", "a" * 40, own(files))
    fake.revision("me/x", CONVERTED, "b" * 40, converted(files))
    commits = [
        fetch(name, cache_dir=cache).entry.files[0].commit[0]
        for name in ("hf:me/x", f"hf:me/x@{'a' * 40}", "hf:me/x@main")
    ]
    assert commits == ["b", "a", "a"]
    fake.revision("me/y", "main", "e" * 40, own(files))
    assert fetch("hf:me/y", cache_dir=cache).entry.files[0].commit[0] == "e"


@pytest.mark.parametrize("lfs", [True, False])
def test_a_bad_download_is_repeated_once_and_then_refused(fake, files, cache, lfs):
    fake.revision("flwrlabs/usps", "main", "c" * 40, own(files))
    fake.lfs, fake.spoil = lfs, 1
    assert len(load("usps", cache_dir=cache).train) == 12
    downloads = [asked for asked in fake.asked if len(asked) == 3]
    assert [forced for *_, forced in downloads] == [False, True, False]
    fake.spoil = 2
    with pytest.raises(DataError, match=r"data/train-0.* arrived altered twice"):
        load("usps", cache_dir=cache.with_name("other"))
    assert not cache.with_name("other").exists()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ConnectionError("[Errno -2] Name or service not known"),
            r"cannot fetch .*Name or service",
        ),
        (TimeoutError(), r"cannot fetch flwrlabs/usps from the Hugging Face hub \(TimeoutError\)"),
        (blank(errors.OfflineModeIsEnabled, "offline mode is enabled"), "offline mode is enabled"),
        (
            blank(errors.LocalEntryNotFoundError, "check your connection\nmore"),
            r"connection\); check",
        ),
        (
            blank(errors.RepositoryNotFoundError),
            "the hub has no dataset 'flwrlabs/usps' that you may",
        ),
        (
            blank(errors.GatedRepoError),
            r"accept its terms: .*huggingface.co/datasets/flwrlabs/usps",
        ),
    ],
)
def test_trouble_on_the_way_is_one_sentence_with_a_way_out(fake, files, cache, error, message):
    def fail(*_, **__):
        raise error

    for method in ("hf_hub_download", "dataset_info"):
        fake.revision("flwrlabs/usps", "main", "c" * 40, own(files))
        setattr(fake, method, fail)
        with pytest.raises(DataError, match=message) as caught:
            load("usps", cache_dir=cache)
        assert "\n" not in str(caught.value)
        assert "FEDBASIN_DATA" in str(caught.value) or "hf auth login" in str(caught.value)
    assert not Path(cache).exists()


def test_a_missing_configuration_or_revision_is_told(fake, files, cache):
    fake.revision("me/x", "main", "a" * 40, own(files))
    with pytest.raises(
        DataError, match=r"no parquet files for configuration big on the hub at refs"
    ):
        load("hf:me/x/big", cache_dir=cache)
    with pytest.raises(
        DataError, match=r"me/x has no parquet files on the hub at v2; check the name"
    ):
        load("hf:me/x@v2", cache_dir=cache)


@pytest.mark.parametrize("name", ["synthetic-digits", "digit-five"])
def test_what_the_hub_does_not_have_needs_a_folder(fake, name):
    with pytest.raises(
        DataError, match=r"is not on the hub \(local/synthetic-digits\); set FEDBASIN"
    ):
        load(name)
    assert fake.asked == []


def test_the_real_client_is_used_otherwise():
    client = hub._api()
    assert callable(client.dataset_info) and callable(client.hf_hub_download)

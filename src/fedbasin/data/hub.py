"""The Hugging Face hub: the only place in fedbasin that downloads data.

A revision is resolved to a commit first; every file is then fetched at that commit and compared
with the checksum the hub itself keeps of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbasin.data.dataset import DataError
from fedbasin.data.layout import SourceFile, Split, choose
from fedbasin.data.mirror import VARIABLE, sha256_of
from fedbasin.data.sources import Part, Source

# Where the hub keeps its own parquet conversion of every dataset.
_CONVERTED = "refs/convert/parquet"


def _api() -> Any:
    """Return the hub's client; tests put their own in its place."""
    from huggingface_hub import HfApi

    return HfApi(library_name="fedbasin")


@dataclass(frozen=True)
class RemoteFile:
    """What the hub says of a file: its SHA-256, or for a small one its git object id."""

    sha256: str | None
    blob_id: str | None


@dataclass(frozen=True)
class Tree:
    """The files of a dataset repository at one commit."""

    commit: str
    files: dict[str, RemoteFile]


class Hub:
    """Datasets on the Hugging Face hub, in the form the cache reads them."""

    key = "hub"

    def pick(self, sources: tuple[Source, ...]) -> Source:
        """Return the first source that the hub has whole."""
        for source in sources:
            if all(part.on_hub for part in source.parts):
                return source
        absent = [p.repo for source in sources for p in source.parts if not p.on_hub]
        raise DataError(
            f"{sources[0].name} is not on the hub ({', '.join(absent)}); "
            f"set {VARIABLE} or --data-dir to a folder that holds it"
        )

    def collect(self, source: Source) -> list[SourceFile]:
        """Download a source's files, each checked against the hub's own record of it."""
        files = []
        for number, part in enumerate(source.parts):
            tree, chosen = _find(part, source.needs_test)
            for split, names in chosen.items():
                for name in names:
                    path, sha256 = _fetch(part.repo, tree, name)
                    file = SourceFile.at(path, f"{part.repo}/{name}", number, split)
                    files.append(file.checked(sha256, tree.commit))
        return files


def _find(part: Part, needs_test: bool) -> tuple[Tree, dict[Split, list[str]]]:
    """Find the commit and the files of a part: its own parquet files, else the converted ones."""
    if part.inputs is None:  # any dataset: the converted branch has one layout for all of them
        revisions = (part.revision,) if part.revision else (_CONVERTED, "main")
    else:
        revisions = (part.revision or "main", _CONVERTED)
    for revision in revisions:
        tree = _tree(part.repo, revision)
        chosen = choose(tree.files, part, needs_test) if tree else None
        if tree and chosen:
            return tree, chosen
    wanted = f" for configuration {part.configs[0]}" if part.configs else ""
    raise DataError(
        f"{part.repo} has no parquet files{wanted} on the hub at {' or '.join(revisions)}; "
        "check the name, the configuration and the revision"
    )


def _tree(repo: str, revision: str) -> Tree | None:
    """List a repository at a revision; None where it has no such revision."""
    from huggingface_hub.errors import RevisionNotFoundError

    with _plain_errors(repo):
        try:
            info = _api().dataset_info(repo, revision=revision, files_metadata=True)
        except RevisionNotFoundError:
            return None
        files = {
            file.rfilename: RemoteFile(file.lfs.sha256 if file.lfs else None, file.blob_id)
            for file in info.siblings or ()
        }
        return Tree(info.sha, files)


def _fetch(repo: str, tree: Tree, name: str) -> tuple[Path, str]:
    """Download one file at a commit and check it; a bad copy is downloaded once more."""
    remote = tree.files[name]
    for again in (False, True):
        with _plain_errors(repo):
            path = Path(
                _api().hf_hub_download(
                    repo, name, repo_type="dataset", revision=tree.commit, force_download=again
                )
            )
        sha256 = sha256_of(path)
        if sha256 == remote.sha256 or (remote.sha256 is None and _git_id(path) == remote.blob_id):
            return path, sha256
    raise DataError(
        f"{repo}/{name} arrived altered twice (it does not match the hub's checksum); "
        "try again later, and check for a proxy that changes downloads"
    )


def _git_id(path: Path) -> str:
    """Return the id git gives a file that is stored without LFS."""
    content = path.read_bytes()
    head = f"blob {len(content)}\0".encode()
    return hashlib.sha1(head + content, usedforsecurity=False).hexdigest()


@contextmanager
def _plain_errors(repo: str) -> Iterator[None]:
    """Turn the client's exceptions into one sentence with what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise DataError(
            f"{repo} asks you to accept its terms: do so on huggingface.co/datasets/{repo}, "
            "then run 'hf auth login'"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DataError(
            f"the hub has no dataset {repo!r} that you may read; check the name, "
            "or run 'hf auth login' if it is private"
        ) from error
    except Exception as error:  # the client lets through the errors of its HTTP library
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"cannot fetch {repo} from the Hugging Face hub ({reason}); check the network, "
            f"or set {VARIABLE} or --data-dir to a folder that holds it"
        ) from error

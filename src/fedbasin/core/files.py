"""Files that are written whole or not at all, and outlive a power cut.

A file is written under a name of its own, ``NAME.part``, handed to the disk, and then takes the
place of the old one. What lies under that name already, such as a link in a folder that somebody
sent, is removed and never followed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedbasin.core.system import sync_folder


class FileError(OSError):
    """A file that cannot be written, with the reason and what to do."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a new, empty file to write to; in the end it takes the place of `path`."""
    temporary = path.with_name(path.name + ".part")
    try:
        _make_new(temporary)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except FileError:
        raise
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        reason = error.strerror or str(error)
        raise FileError(
            f"{path} cannot be written ({reason}); the old file is as it was: make room, or give "
            "another folder, and start again"
        ) from error


def _make_new(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        raise FileError(f"{path} is a folder; remove it")
    path.unlink(missing_ok=True)
    path.touch(exist_ok=False)

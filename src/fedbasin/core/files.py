"""Files that are written whole or not at all, and outlive a power cut.

A file is written under a name of its own, ``NAME.part``, handed to the disk, and then takes the
place of the old one. What lies under that name already, such as a link in a folder that somebody
sent, is removed and never followed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from fedbasin.core.system import sync_folder

_MANY_PARTS = re.compile(r"""(?:\.[\w\s"'-]{0,40}){64}""")  # of a name in TOML
_WHAT_TO_DO = {
    errno.ENOSPC: "make room, or give another folder",
    errno.EDQUOT: "make room, or give another folder",
    errno.EROFS: "nothing can be written there: give another folder",
    errno.EACCES: "this user may not: change the permissions, or give another path",
    errno.EPERM: "this user may not: change the permissions, or give another path",
    errno.EISDIR: "it is a folder: name a file",
    errno.ENOTDIR: "a file lies where a folder must be: give another path",
    errno.ENOENT: "check the path",
    errno.EEXIST: "it is there already: give another path",
}


class FileError(OSError):
    """A file that cannot be written, with the reason and what to do."""


def explained(error: OSError) -> str:
    """Say which file the system refused, why, and what to do."""
    if isinstance(error, FileError) or error.filename is None:
        return str(error)
    hint = _WHAT_TO_DO.get(error.errno or 0)
    return f"{error.filename}: {error.strerror}" + (f"; {hint}" if hint else "")


def parsed_json(text: str) -> Any:
    """Read JSON from elsewhere; what is nested too deeply is a ValueError, too."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file from elsewhere; a ValueError says what is wrong with it.

    Names of very many parts are refused first: reading them takes time that grows with the square
    of their number.
    """
    text = path.read_text(encoding="utf-8")
    if _MANY_PARTS.search(text):
        raise ValueError("a name has more than 64 parts")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def output_folder(out: Path | str | None, name: str, argument: str = "out") -> Path:
    """Return where results go: a new folder below ``runs/`` where nothing is given.

    Args:
        out: what was given; a file is refused.
        name: what the new folder's name begins with.
        argument: what the caller gives the folder as, for errors.
    """
    if out is None:
        return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    path = Path(out)
    if path.is_file():
        raise ValueError(f"{argument}: {path} is a file; name a folder")
    return path


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

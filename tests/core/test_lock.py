import os
import subprocess
import sys

import pytest

from fedbasin.core import lock
from fedbasin.core.lock import Busy, alone_in

HOLD = """
import sys
from pathlib import Path
from fedbasin.core.lock import alone_in
with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_held_by_one_process_until_that_is_killed(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(Busy, match=f"another process is running {tmp_path}"), alone_in(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    assert (tmp_path / "run.lock").exists()  # left by the kill, and nobody's
    with alone_in(tmp_path):
        with pytest.raises(Busy), alone_in(tmp_path):
            pass
        assert (tmp_path / "run.lock").exists()
    assert not list(tmp_path.iterdir())


def test_a_lock_file_that_its_holder_took_away_is_nobodys(tmp_path, monkeypatch):
    """Between opening and locking, the holder before may remove the file that was opened."""
    taken, path = lock.take, tmp_path / "run.lock"
    handles = []

    def late(handle, *, patient):
        handles.append(handle)
        if len(handles) == 1:
            path.unlink()
        taken(handle, patient=patient)

    monkeypatch.setattr(lock, "take", late)
    with alone_in(tmp_path):
        assert len(handles) == 2
        with pytest.raises(Busy), alone_in(tmp_path):
            pass


@pytest.mark.parametrize("without", ["module", "support"])
def test_where_there_are_no_locks_work_goes_on(without, tmp_path, monkeypatch):
    def refuse(handle, operation):
        raise OSError(os.strerror(38))

    if without == "module":
        monkeypatch.setattr(lock, "fcntl", None)
    else:
        monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with alone_in(tmp_path), alone_in(tmp_path):
        pass

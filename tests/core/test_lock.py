import subprocess
import sys
import threading
import time

import pytest

from fedbasin.core import lock
from fedbasin.core.lock import Busy, alone_in, waiting_for

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
    with (
        pytest.raises(Busy, match=rf"another process \(id {holder.pid}\) is running {tmp_path}"),
        alone_in(tmp_path),
    ):
        pass
    holder.kill()
    holder.communicate()
    assert (tmp_path / "run.lock").exists()  # left by the kill, and nobody's
    with alone_in(tmp_path):
        with pytest.raises(Busy), alone_in(tmp_path):
            pass
        assert (tmp_path / "run.lock").exists()
    assert not list(tmp_path.iterdir())


def test_two_that_wait_for_a_lock_come_one_after_the_other(tmp_path):
    inside = []
    most = []

    def work():
        with waiting_for(tmp_path / "file.lock"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.05)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]
    assert not list(tmp_path.iterdir())


def test_where_there_are_no_locks_work_goes_on(tmp_path, monkeypatch):
    def refuse(self, *_, **__):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.FileLock, "acquire", refuse)
    with alone_in(tmp_path), alone_in(tmp_path):
        pass

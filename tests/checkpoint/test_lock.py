"""The lock in `save`: one writer, and a dead one does not block the next."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from megatron.checkpoint.layout import LOCK
from megatron.checkpoint.lock import SaveLock
from megatron.errors import UserError

pytestmark = pytest.mark.cpu


def write_lock(root, **content):
    root.mkdir(exist_ok=True)
    (root / LOCK).write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "token": "x", **content}))


def test_a_second_job_is_refused_and_the_writer_is_named(tmp_path):
    with SaveLock(tmp_path / "save"):
        with pytest.raises(UserError, match=f"process {os.getpid()} on {socket.gethostname()}"):
            SaveLock(tmp_path / "save").acquire()
    with SaveLock(tmp_path / "save") as lock:
        assert lock.held()
    assert list((tmp_path / "save").iterdir()) == []


def test_a_killed_process_on_this_host_is_taken_over_at_once(tmp_path):
    code = (
        f"import os; from megatron.checkpoint.lock import SaveLock; SaveLock({str(tmp_path)!r}).acquire(); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert (tmp_path / LOCK).exists()
    start = time.monotonic()
    with SaveLock(tmp_path) as lock:
        assert lock.held()
    assert time.monotonic() - start < 5


def test_a_reused_process_id_is_not_the_old_job(tmp_path):
    write_lock(tmp_path, started=1.0)
    with SaveLock(tmp_path) as lock:
        assert lock.held()


def test_another_host_without_heartbeat_is_taken_over_after_patience(tmp_path):
    write_lock(tmp_path, host="elsewhere")
    with SaveLock(tmp_path, patience=0.3) as lock:
        assert lock.held()


def test_another_host_with_heartbeat_is_not(tmp_path):
    write_lock(tmp_path, host="elsewhere")
    stop = threading.Event()

    def beat():
        while not stop.wait(0.05):
            os.utime(tmp_path / LOCK)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(UserError, match="elsewhere"):
            SaveLock(tmp_path, patience=5).acquire()
    finally:
        stop.set()
        thread.join()


def test_the_holder_beats_and_notices_a_takeover(tmp_path):
    lock = SaveLock(tmp_path, heartbeat=0.05)
    lock.acquire()
    before = (tmp_path / LOCK).stat().st_mtime_ns
    deadline = time.monotonic() + 5
    while (tmp_path / LOCK).stat().st_mtime_ns == before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / LOCK).stat().st_mtime_ns > before
    write_lock(tmp_path, token="another")
    assert not lock.held()
    lock.release()
    assert (tmp_path / LOCK).exists(), "another job's lock is not ours to delete"


def test_a_damaged_lock_is_decided_by_its_heartbeat(tmp_path):
    (tmp_path / LOCK).write_text("{")
    with SaveLock(tmp_path, patience=0.2) as lock:
        assert lock.held()

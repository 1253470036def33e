"""The lock in `save`: one writer, and a dead one does not block the next."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from megatron.checkpoint import lock as lock_module
from megatron.checkpoint.layout import LOCK
from megatron.checkpoint.lock import SaveLock, refuse_if_held
from megatron.errors import UserError

pytestmark = pytest.mark.cpu


def write_lock(root, **content):
    root.mkdir(exist_ok=True)
    (root / LOCK).write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "token": "x", **content}))


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Seconds that a running job, and one that is ending, are waited for."""
    monkeypatch.setattr(lock_module, "WATCH_SECONDS", 0.5)
    monkeypatch.setattr(lock_module, "SAVING_SECONDS", 20.0)


def test_a_second_job_is_refused_and_the_writer_is_named(tmp_path):
    with SaveLock(tmp_path / "save"):
        with pytest.raises(UserError, match=f"process {os.getpid()} on {socket.gethostname()}"):
            SaveLock(tmp_path / "save").acquire()
    with SaveLock(tmp_path / "save") as lock:
        assert lock.held()
    assert list((tmp_path / "save").iterdir()) == []


def killed_holder(root):
    """A process that took the lock and was killed; nobody has asked for its exit code: it is a zombie."""
    code = (
        "import os, signal; from megatron.checkpoint.lock import SaveLock; "
        f"SaveLock({str(root)!r}).acquire(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


def test_a_killed_process_on_this_host_is_taken_over_at_once(tmp_path):
    process = killed_holder(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == process.pid
    start = time.monotonic()
    refuse_if_held(tmp_path, wait=False)
    with SaveLock(tmp_path) as lock:
        assert lock.held()
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    assert process.wait(timeout=10) == -signal.SIGKILL
    assert time.monotonic() - start < 5


def test_a_job_that_ends_is_waited_for_and_named(tmp_path, caplog):
    caplog.set_level("INFO", "deepy")
    ending = SaveLock(tmp_path)
    ending.acquire()

    def finish():
        time.sleep(0.2)  # its last step
        ending.announce_end()
        time.sleep(1.2)  # its last checkpoint, longer than a running job is waited for
        ending.release()

    thread = threading.Thread(target=finish)
    thread.start()
    with SaveLock(tmp_path) as lock:
        assert lock.held() and not thread.join(timeout=10)
    assert f"{tmp_path} is written by process {os.getpid()} on {socket.gethostname()}" in caplog.text
    assert "up to 20 s" in caplog.text


def test_a_job_that_never_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "SAVING_SECONDS", 0.5)
    with SaveLock(tmp_path) as lock:
        lock.announce_end()
        for refuse in (lambda: refuse_if_held(tmp_path), lambda: SaveLock(tmp_path).acquire()):
            with pytest.raises(UserError, match=f"process {os.getpid()}"):
                refuse()
        assert lock.held()


def test_a_killed_job_is_not_waited_for_any_longer(tmp_path, monkeypatch):
    """It may be killed while it saves."""
    monkeypatch.setattr(lock_module, "WATCH_SECONDS", 20.0)
    process = subprocess.Popen(["sleep", "60"])
    write_lock(tmp_path, pid=process.pid, ending=True)
    threading.Timer(0.4, process.kill).start()
    start = time.monotonic()
    with SaveLock(tmp_path) as lock:
        assert lock.held() and 0.3 < time.monotonic() - start < 10
    process.wait(timeout=10)


def test_a_reused_process_id_is_not_the_old_job(tmp_path):
    write_lock(tmp_path, started=1.0)
    with SaveLock(tmp_path) as lock:
        assert lock.held()


def test_a_process_id_of_another_container_means_nothing_here(tmp_path):
    """Containers may share the name of their host: only the heartbeat tells whether the job lives."""
    write_lock(tmp_path, namespace="another boot pid:[1]", pid=2**22 + 1)
    refuse_if_held(tmp_path, wait=False)
    beating = threading.Timer(0.1, os.utime, [tmp_path / LOCK])
    beating.start()
    with pytest.raises(UserError, match=str(2**22 + 1)):
        SaveLock(tmp_path, patience=5).acquire()
    write_lock(tmp_path, namespace="another boot pid:[1]")  # a process with this number lives, but here
    with SaveLock(tmp_path, patience=0.3) as lock:
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

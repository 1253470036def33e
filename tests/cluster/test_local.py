"""The local process manager with tiny ranks that import nothing: failures, exit codes, signals, output."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.cluster.local import LocalJob, exit_code, rank_environment
from megatron.cluster.status import stop_limits

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]

# Runs LocalJob over a rank script as deepy.py does, in a process of its own because signal handling belongs to one.
DRIVER = """
import json, os, sys
from pathlib import Path
from megatron import log
from megatron.cluster.launchers import find_launcher
from megatron.cluster.local import LocalJob, rank_environment, run_local
log.configure()
given = json.loads(sys.argv[1])
n = given["ranks"]
envs = [rank_environment(os.environ, rank=r, local_rank=r, world_size=n, local_world_size=n, master_addr="127.0.0.1",
                         master_port=1, cores=4, gpus=0) for r in range(n)]
logs = Path(given["logs"]) if given["logs"] else None
other = {}
if given["launcher"]:
    launcher = find_launcher(given["launcher"])
    names = ("stop_signal", "stopped_code", "failure_line", "failure_signal")
    other = {name: getattr(launcher, name) for name in names} | {"name": launcher.tool}
sys.exit(run_local(LocalJob([sys.executable, "-u", given["script"]], envs, log_folder=logs, settle=0.5, grace=1.5,
                            launcher_fd=given["fd"], patience=given["patience"],
                            sign_of_life=Path("alive"), **other)).code)
"""


class Job:
    """A started driver with its rank script."""

    def __init__(self, folder: Path, code: str, ranks: int, logs: Path | None = None, **popen: object) -> None:
        script = folder / "ranks.py"
        script.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + code)
        fd, launcher = popen.pop("launcher_fd", None), popen.pop("launcher", None)
        given = {"ranks": ranks, "script": str(script), "logs": str(logs) if logs else None}
        given |= {"fd": fd, "launcher": launcher, "patience": popen.pop("patience", 60.0)}
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        env["PYTHONPATH"] = str(ROOT)
        options = {
            "cwd": folder,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "env": env,
            **popen,
        }
        self.start = time.monotonic()
        self.process = subprocess.Popen([sys.executable, "-c", DRIVER, json.dumps(given)], **options)

    def finish(self, timeout: float = 20) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout)
        self.seconds = time.monotonic() - self.start
        return self.process.returncode, out, err

    def wait_for(self, path: Path, count: int, timeout: float = 15) -> None:
        """Until `count` ranks have touched a file in `path`."""
        deadline = time.monotonic() + timeout
        while len(list(path.iterdir())) < count:
            assert time.monotonic() < deadline, f"only {len(list(path.iterdir()))} ranks reported"
            time.sleep(0.02)


def run(folder: Path, code: str, ranks: int = 2, logs: Path | None = None, timeout: float = 20) -> tuple[int, str, str]:
    return Job(folder, code, ranks, logs).finish(timeout)


def terminate_when_up(folder: Path, code: str) -> tuple[int, str, str]:
    """SIGTERM to a job of two ranks once each has made its file in `up`: its exit code, stdout and stderr."""
    job = Job(folder, code, ranks=2)
    job.wait_for(folder / "up", 2)
    job.process.send_signal(signal.SIGTERM)
    return job.finish()


def test_ranks_get_their_variables_and_rank_0_keeps_its_stdout(tmp_path: Path) -> None:
    code = (
        "keys = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS DS_ACCELERATOR'\n"
    )
    code += "print(rank, [os.environ[k] for k in keys.split()])"
    rc, out, err = run(tmp_path, code, ranks=2)
    assert rc == 0
    assert out == "0 ['0', '0', '2', '2', '127.0.0.1', '1', '2', 'cpu']\n"  # results on stdout, untouched
    assert err == "[rank 1] 1 ['1', '1', '2', '2', '127.0.0.1', '1', '2', 'cpu']\n"


def test_a_failing_rank_ends_the_job_within_seconds_its_traceback_last(tmp_path: Path) -> None:
    code = "if rank == 1:\n  raise ValueError('boom in rank 1')\ntime.sleep(60)"
    job = Job(tmp_path, code, ranks=3)
    rc, _, err = job.finish()
    assert rc == 1
    assert job.seconds < 10
    assert re.search(r"rank 1 of 3 .*code 1\b", err)
    assert err.rstrip().endswith("ValueError: boom in rank 1")
    assert "Traceback (most recent call last)" in err.split("rank 1 of 3 failed")[1]


def test_a_peer_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank == 0:\n  sys.exit(2)\ntime.sleep(60)"
    job = Job(tmp_path, code, ranks=2)
    assert job.finish()[0] == 2
    assert job.seconds < 10


@pytest.mark.parametrize(
    ("end", "expected"),
    [("sys.exit(0)", 0), ("sys.exit(2)", 2), ("sys.exit(3)", 3), ("sys.exit(4)", 4), ("sys.exit(5)", 5)]
    + [("sys.exit(7)", 1), ("1/0", 1), ("os.kill(os.getpid(), 9)", 5), ("os.abort()", 5)],
)
def test_the_exit_code_is_that_of_the_failing_rank_in_terms_of_the_table(
    tmp_path: Path, end: str, expected: int
) -> None:
    code = f"if rank == 1:\n  {end}\n" + ("sys.exit(3)" if expected == 3 else "")
    assert run(tmp_path, code)[0] == expected


def test_the_considered_verdict_is_blamed_not_the_peer_that_lost_its_connection_first(tmp_path: Path) -> None:
    code = "if rank == 1:\n  time.sleep(0.3); print('loss is nan', file=sys.stderr); sys.exit(4)\n"
    code += "raise OSError('peer closed')"
    rc, _, err = run(tmp_path, code)
    assert rc == 4
    assert re.search(r"rank 1 of 2 .*code 4\b", err) and err.rstrip().endswith("loss is nan")


def test_a_crash_is_blamed_before_a_rank_that_reports_a_lost_peer(tmp_path: Path) -> None:
    code = "if rank == 1:\n  sys.exit(5)\ntime.sleep(0.2); os.kill(os.getpid(), 9)"
    rc, _, err = run(tmp_path, code)
    assert rc == 5 and re.search(r"rank 0 of 2 .*SIGKILL", err)


def test_the_last_output_of_rank_0_is_not_repeated(tmp_path: Path) -> None:
    rc, _, err = run(tmp_path, "if rank == 0:\n  print('error: a.yml:3: bad key', file=sys.stderr); sys.exit(2)")
    assert rc == 2 and err.count("error: a.yml:3: bad key") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank_once_and_saving_is_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "up").mkdir()
    code = f"""
count = []
[signal.signal(number, lambda *_: count.append(1)) for number in (signal.SIGINT, signal.SIGTERM)]
open({str(tmp_path)!r} + f'/up/{{rank}}', 'w').close()
while not count: time.sleep(0.02)
time.sleep(2.5)  # longer than settle + grace: a slow save
open({str(tmp_path)!r} + f'/saved{{rank}}', 'w').write(str(len(count)))
sys.exit(3)
"""
    job = Job(tmp_path, code, ranks=3)
    job.wait_for(tmp_path / "up", 3)
    job.process.send_signal(number)
    if number == signal.SIGTERM:
        time.sleep(0.3)
        job.process.send_signal(number)  # schedulers repeat themselves
    rc, _, err = job.finish()
    assert rc == 3
    assert [(tmp_path / f"saved{rank}").read_text() for rank in range(3)] == ["1", "1", "1"]
    assert "failed" not in err


def test_ranks_without_a_handler_have_nothing_to_save_yet_and_that_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    job = Job(tmp_path, f"open({str(tmp_path)!r} + f'/up/{{rank}}', 'w').close()\ntime.sleep(60)", ranks=2)
    job.wait_for(tmp_path / "up", 2)
    job.process.send_signal(signal.SIGTERM)
    rc, _, err = job.finish()
    assert rc == 3 and "failed" not in err


def test_ranks_that_save_nothing_at_a_signal_did_not_stop_with_everything_saved(tmp_path: Path) -> None:
    """One ends by the signal, with the code that shells show for it; the other then fails, as its peer is gone."""
    (tmp_path / "up").mkdir()
    code = f"""
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number) if rank else time.sleep(0.3) or sys.exit(5))
open({str(tmp_path)!r} + f'/up/{{rank}}', 'w').close()
time.sleep(60)
"""
    rc, _, err = terminate_when_up(tmp_path, code)
    assert rc == 143 and "failed" not in err


@pytest.mark.parametrize(("seconds", "least"), [(4.0, 3600.0), (600.0, 3600.0), (7200.0, 7200.0), (0.0, math.inf)])
def test_a_stop_waits_for_a_checkpoint_as_long_as_the_ranks_do(tmp_path: Path, seconds: float, least: float) -> None:
    for folder in (None, str(tmp_path)):
        limits = stop_limits({"save": folder, "log_dir": None, "watchdog_seconds": seconds})
        job = LocalJob(["true"], [], **limits)
        assert least <= job.patience and (job.patience <= least + 60) and (job.sign_of_life is None) is (folder is None)


def test_a_second_interrupt_ends_the_job_at_once(tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    code = (
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        + f"open({str(tmp_path)!r} + f'/up/{{rank}}', 'w').close()\ntime.sleep(60)"
    )
    job = Job(tmp_path, code, ranks=2)
    job.wait_for(tmp_path / "up", 2)
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert job.process.poll() is None  # still waiting for the ranks to save
    job.process.send_signal(signal.SIGINT)
    assert job.finish(timeout=5)[0] == 130


def test_a_rank_that_fails_while_stopping_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    code = f"""
def stop(*_):
    if rank == 1: raise OSError('disk full')
    time.sleep(60)
signal.signal(15, stop)
open({str(tmp_path)!r} + f'/up/{{rank}}', 'w').close()
time.sleep(60)
"""
    rc, _, err = terminate_when_up(tmp_path, code)
    assert rc == 1 and err.rstrip().endswith("OSError: disk full")


def test_what_a_failed_rank_started_dies_with_it(tmp_path: Path) -> None:
    code = f"""
import subprocess
worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
open({str(tmp_path)!r} + f'/worker{{rank}}', 'w').write(str(worker.pid))
time.sleep(1)
if rank == 1: sys.exit(4)
signal.signal(15, signal.SIG_IGN)
time.sleep(60)
"""
    assert run(tmp_path, code)[0] == 4
    time.sleep(0.2)
    for rank in range(2):
        state = Path(f"/proc/{(tmp_path / f'worker{rank}').read_text()}/stat")
        assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_ranks_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    job = Job(tmp_path, f"open({str(tmp_path)!r} + f'/up/{{os.getpid()}}', 'w').close()\ntime.sleep(60)", ranks=2)
    job.wait_for(tmp_path / "up", 2)
    job.process.kill()
    job.finish()
    deadline = time.monotonic() + 5
    for pid in (p.name for p in (tmp_path / "up").iterdir()):
        while (
            Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_remote_agent_ends_with_its_connection(tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    read_fd, write_fd = os.pipe()
    code = f"open({str(tmp_path)!r} + f'/up/{{rank}}', 'w').close()\ntime.sleep(60)"
    job = Job(tmp_path, code, ranks=2, launcher_fd=write_fd, pass_fds=[write_fd])
    os.close(write_fd)
    job.wait_for(tmp_path / "up", 2)
    assert job.process.poll() is None
    os.close(read_fd)
    assert job.finish(timeout=5)[0] == 3


@pytest.mark.parametrize(
    ("launcher", "line", "number"),
    [
        ("pdsh", "pdsh@h: b: ssh exited with exit code 4", signal.SIGINT),
        ("slurm", "srun: error: a[1-2]: tasks 0,3: Exited with exit code 4", signal.SIGTERM),
    ],
)
def test_a_failure_that_another_launcher_only_reports_ends_it_and_names_the_code(
    tmp_path: Path, launcher: str, line: str, number: int
) -> None:
    code = f"print({line!r}, file=sys.stderr)\nsignal.signal({number}, lambda *_: sys.exit(1))\ntime.sleep(60)"
    job = Job(tmp_path, code, ranks=1, launcher=launcher)
    rc, _, err = job.finish()
    tool = "srun" if launcher == "slurm" else launcher
    assert rc == 4 and job.seconds < 10 and f"{tool} failed: exit code 4" in err


def test_ranks_that_stopped_are_no_failure_that_srun_reports(tmp_path: Path) -> None:
    """SLURM's own signal before the time limit reaches the ranks only; some still save when others have ended."""
    code = "print('srun: error: a2: tasks 2-3: Exited with exit code 3', file=sys.stderr)\ntime.sleep(2.5)\nsys.exit(3)"
    rc, _, err = Job(tmp_path, code, ranks=1, launcher="slurm").finish()
    assert rc == 3 and "failed" not in err


def test_another_launcher_s_way_to_say_stopped_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    code = f"signal.signal(2, lambda *_: sys.exit(1))\nopen({str(tmp_path)!r} + '/up/0', 'w').close()\ntime.sleep(60)"
    job = Job(tmp_path, code, ranks=1, launcher="pdsh")
    job.wait_for(tmp_path / "up", 1)
    job.process.send_signal(signal.SIGTERM)
    rc, _, err = job.finish()
    assert rc == 128 + signal.SIGTERM and "failed" not in err


def test_an_abandoned_agent_does_not_wait_for_ever(tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    read_fd, write_fd = os.pipe()
    code = f"signal.signal(15, signal.SIG_IGN)\nopen({str(tmp_path)!r} + f'/up/{{rank}}', 'w').close()\ntime.sleep(60)"
    job = Job(tmp_path, code, ranks=2, launcher_fd=write_fd, pass_fds=[write_fd], patience=3.0)
    os.close(write_fd)
    job.wait_for(tmp_path / "up", 2)
    os.close(read_fd)
    rc, _, err = job.finish(timeout=15)
    assert rc == 5 and "rank 0, rank 1" in err and "3 s" in err  # the patience, and who had to be killed


def test_a_hung_rank_obeys_a_stop_and_shows_where_it_hangs(tmp_path: Path) -> None:
    """Ranks show for 4 s that they work (on a checkpoint), then one waits in C for ever and one is stopped."""
    (tmp_path / "up").mkdir()
    code = f"""
import ctypes, faulthandler
faulthandler.register(signal.SIGURG)
signal.signal(signal.SIGTERM, lambda *_: None)
open({str(tmp_path)!r} + f'/up/{{rank}}', 'w').close()
for _ in range(40):
    time.sleep(0.1); open('alive', 'w').close()
def hangs_here():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(mutex)
def is_stopped_here():
    while True: os.kill(os.getpid(), signal.SIGSTOP)
hangs_here() if rank else is_stopped_here()
"""
    job = Job(tmp_path, code, ranks=2, logs=tmp_path / "logs", patience=3.0)
    job.wait_for(tmp_path / "up", 2)
    job.process.send_signal(signal.SIGTERM)
    rc, _, err = job.finish()
    assert rc == 5 and 6.5 < job.seconds < 15
    assert re.search(r"3 s .*SIGTERM.*rank 0 \(stopped\), rank 1\b", err) and "in is_stopped_here" in err
    assert "in hangs_here" in (tmp_path / "logs" / "rank_1.log").read_text()


def test_with_a_run_folder_the_other_ranks_write_logs(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    code = "print('hello from', rank, file=sys.stderr)\nif rank == 1: print('partial', end='')"
    rc, _, err = run(tmp_path, code, logs=logs)
    assert rc == 0
    assert err == "hello from 0\n"
    for rank in range(2):
        first, *rest = (logs / f"rank_{rank}.log").read_text().splitlines()
        assert first.startswith("--- started ")
        assert rest == [f"hello from {rank}"] + (["partial"] if rank else [])


def test_the_log_folder_appears_with_the_first_line_only(tmp_path: Path) -> None:
    assert run(tmp_path, "pass", logs=tmp_path / "run" / "logs")[0] == 0
    assert not (tmp_path / "run").exists()


def test_a_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    code = "if rank == 1:\n  [print(f'line {i}') for i in range(500)]\n  sys.exit(1)\ntime.sleep(60)"
    rc, _, err = run(tmp_path, code, logs=tmp_path / "logs")
    assert rc == 1 and "line 499" in err and "line 400" not in err and f"logs: {tmp_path / 'logs'}/" in err


def test_rank_0_sees_a_terminal_when_there_is_one(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    code = "print('terminal' if sys.stderr.isatty() else 'pipe', file=sys.stderr)\ntime.sleep(0.3)"
    job = Job(tmp_path, code, ranks=2, stderr=terminal)
    job.finish()
    os.close(terminal)
    shown = os.read(controller, 4096).decode()
    os.close(controller)
    assert "terminal" in shown and "[rank 1] pipe" in shown


def test_rank_0_reads_what_is_typed(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    code = "if rank == 0: print('heard', input())\nelse: print(repr(sys.stdin.read()), file=sys.stderr)"
    job = Job(tmp_path, code, ranks=2, stdin=terminal)
    os.write(controller, b"hello\n")
    rc, out, err = job.finish()
    os.close(terminal), os.close(controller)
    assert (rc, out, err) == (0, "heard hello\n", "[rank 1] ''\n")


def test_rank_environment_respects_what_the_user_set() -> None:
    common = {"rank": 3, "local_rank": 1, "world_size": 4, "local_world_size": 2, "master_addr": "h", "master_port": 7}
    env = rank_environment({"OMP_NUM_THREADS": "9", "RANK": "0"}, cores=16, gpus=2, devices=[1, 3], **common)
    assert env["RANK"] == "3" and env["OMP_NUM_THREADS"] == "9" and env["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert "DS_ACCELERATOR" not in env
    env = rank_environment({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, cores=16, gpus=4, devices=[1, 3], **common)
    assert env["CUDA_VISIBLE_DEVICES"] == "5,7"  # numbers count within what the user left visible
    env = rank_environment({}, cores=1, gpus=0, **common)
    assert env["OMP_NUM_THREADS"] == "1" and env["DS_ACCELERATOR"] == "cpu"


def test_exit_code_table() -> None:
    assert [exit_code(code) for code in (0, 1, 2, 3, 4, 5, 6, 7, 255, -9, -11)] == [0, 1, 2, 3, 4, 5, 6, 1, 1, 5, 5]
    assert [exit_code(128 + number) for number in (9, 15, 11)] == [5, 5, 5]  # as srun and shells put it

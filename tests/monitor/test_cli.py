"""slurm/monitor.py as it is typed: the table, its JSON, what it finds, and SLURM that does not answer."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.errors import UserError
from megatron.monitor.cli import main
from megatron.monitor.rows import Row
from tests.monitor.runs import change
from tests.monitor.slurm_texts import AWAY, install

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "slurm/monitor.py")
FIELDS = set(Row.__dataclass_fields__)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`slurm(...)` installs the stand-ins; before that there is no SLURM."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr("megatron.monitor.collect.shutil.which", lambda name, path=None: _which(tmp_path / "bin", name))
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    monkeypatch.chdir(tmp_path)
    return lambda *arguments, **options: install(tmp_path / "bin", *arguments, **options)


def _which(folder: Path, name: str) -> str | None:
    return str(folder / name) if (folder / name).exists() else None


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main([*argv, "--json"], {}) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == 1 and all(set(run) == FIELDS for run in found["runs"])
    return found


def by_job(found: dict) -> dict:
    return {run["job_id"]: run for run in found["runs"]}


def test_jobs_in_every_state(slurm: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    slurm()
    found = shown(capsys, "--all")
    runs = by_job(found)
    assert {
        job: (run["state"], run["action"], [one["kind"] for one in run["problems"]]) for job, run in runs.items()
    } == {
        "1038": ("running", "wait", []),
        "1047": ("running", "wait", []),
        "1040": ("pending", "fix", ["dependency_never_satisfied"]),
        "1041": ("pending", "wait", []),
        "1042": ("pending", "fix", ["held"]),
        "1043_0": ("pending", "wait", []),
        "1046": ("failed", "retry", ["node_failure"]),
        "1039": ("failed", "fix", ["crashed"]),
        "1044": ("stopped", None, ["cancelled"]),
    }
    assert (runs["1038"]["job_name"], runs["1038"]["gpus"], runs["1038"]["nodes"]) == ("neox|training", 8, 2)
    assert runs["1038"]["log"] == "/w/neox-1038.out" and runs["1043_0"]["restarts"] == 1
    assert found["notes"] == [] and "DOWN, DRAINED" in runs["1041"]["job_reason"]
    assert set(by_job(shown(capsys))) == set(runs) - {"1044"}  # what was cancelled needs nobody
    assert set(by_job(shown(capsys, "1043", "1039"))) == {"1043_0", "1039"}
    assert set(by_job(shown(capsys, "1043_0"))) == {"1043_0"}


def test_a_job_and_its_run_folder_are_one_row(
    slurm: Callable, place: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the number in the run's files, whatever the job is called; else by the folder that its log names."""
    slurm()
    folder = place("running", "runs/small", age=3, job_id="1038")
    for argv in ((), ("1038",), (str(folder),)):
        (run,) = [run for run in shown(capsys, *argv)["runs"] if run["job_id"] == "1038"]
        assert (run["run_folder"], run["experiment"], run["state"]) in {
            (path, "small", "training") for path in (str(folder), "runs/small")
        }
        assert (run["iteration"], run["job_state"]) == (7, "RUNNING")


def test_a_job_and_the_folder_of_another_run(
    slurm: Callable, place: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm()
    place("running", "elsewhere/small", age=3, job_id="77")
    both = shown(capsys, "1038", "elsewhere/small")["runs"]
    assert [(run["job_id"], run["experiment"]) for run in both] == [("1038", None), ("77", "small")]
    (one,) = shown(capsys, "77", "elsewhere/small")["runs"]  # which only its folder knows
    assert one["experiment"] == "small"
    place("running", "elsewhere/mine", age=3, job_id="1038")
    (one,) = shown(capsys, "1038", "elsewhere/mine")["runs"]
    assert (one["experiment"], one["job_state"]) == ("mine", "RUNNING")


def test_the_log_names_the_run_folder(
    slurm: Callable, place: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = place("running", "far/away", age=3, job_id="1038")
    log = tmp_path / "neox-1038.out"
    log.write_text("run away starts at iteration 0 of 10, save: far/away\n")
    text = (
        (ROOT / "tests/monitor/slurm/squeue.txt")
        .read_text()
        .replace("/w/", f"{tmp_path}/")
        .replace(";/w;", f";{tmp_path};")
    )
    slurm({"squeue": text})
    for argv in ((), ("1038",)):
        run = by_job(shown(capsys, *argv))["1038"]
        assert (run["run_folder"], run["state"], run["log"]) == (str(folder), "training", str(log))


def test_without_slurm_runs_are_shown(slurm: Callable, place: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    place("running", "checkpoints/one/deep", age=3, job_id=None)
    place("ended", "runs/two", job_id=None)
    place("ended", "runs/old_failure", job_id=None, age=3e5, state="failed", exit_code=1)
    place("ended", "runs/new_failure", job_id=None, age=300, state="failed", exit_code=1)
    assert {run["experiment"] for run in shown(capsys)["runs"]} == {"deep", "new_failure"}
    found = shown(capsys, "--all")
    assert [run["experiment"] for run in found["runs"]] == ["deep", "new_failure", "old_failure", "two"]
    assert found["runs"][-1]["scores"]["test/lm_loss"] == {"value": 3.0, "iteration": 10}
    assert main([], {}) == 0
    table = capsys.readouterr().out.splitlines()
    assert " ".join(table[0].split()) == "job state experiment iteration loss tokens/s MFU ETA seen scores problem"
    assert len(table) == 3 and "7/10 #####... 70%" in table[1] and "\x1b" not in "".join(table)
    assert main(["runs"], {}) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4  # a folder above runs: all of them


def test_nothing_is_not_an_error(slurm: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], {}) == 0
    assert "--all" in capsys.readouterr().out
    assert shown(capsys)["runs"] == []


def test_what_sbatch_refused_is_not_in_the_table_and_has_its_reason(
    slurm: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    """SLURM keeps a record of it, as of a job that failed when it was submitted."""
    at = "2026-11-28T23:35:30"
    ended = f"50;50;many;me;lab;main;FAILED;1:0;{at};{at};{at};00:00:00;None assigned;9;;/w\n"
    queued = (
        f"51;51;many;me;lab;main;FAILED;BadConstraints;9;;0:00;1:00;{at};;0;/w;(null);/w/slurm-51.out;(null);(null);"
    )
    recorded = {name: (ROOT / f"tests/monitor/slurm/{name}.txt").read_text() for name in ("sacct", "squeue")}
    slurm({"sacct": recorded["sacct"] + ended + ended.replace("50", "51"), "squeue": recorded["squeue"] + queued})
    assert not {"50", "51"} & set(by_job(shown(capsys))) and "1039" in by_job(shown(capsys))
    runs = by_job(shown(capsys, "--all"))
    for job, reason in (("50", "job 50: see sbatch"), ("51", "job 51: BadConstraints")):
        assert [one["kind"] for one in runs[job]["problems"]] == ["refused"] and reason in runs[job]["action_reason"]


@pytest.mark.parametrize("argv", [["99999"], ["1038", "99999"], ["99999", "--json"], ["99999", "--watch", "1"]])
def test_a_job_that_does_not_exist(slurm: Callable, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    for _ in range(2):  # without SLURM, and with it
        with pytest.raises(UserError, match="99999: no such job"):
            main(argv, {})
        assert capsys.readouterr().out == ""
        slurm()
    slurm(broken=True)  # then nobody knows
    assert main(["99999"], {}) == 0
    assert "no jobs" not in capsys.readouterr().out


def test_slurm_that_does_not_answer(slurm: Callable, place: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    slurm(broken=True)
    place("running", "runs/small", age=3)
    found = shown(capsys)
    assert [run["experiment"] for run in found["runs"]] == ["small"] and AWAY in found["notes"][0]
    assert [note.split()[0] for note in found["notes"]] == ["`sacct", "`squeue"]
    assert not any("\x1f" in note or "--Format" in note for note in found["notes"])  # half a screen of names


def test_slurm_without_accounting(slurm: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slurm()
    (tmp_path / "bin/sacct").write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
    found = shown(capsys, "--all")
    assert by_job(found)["1046"]["action"] == "retry" and "1039" not in by_job(found) and found["notes"] == []
    (tmp_path / "bin/sacct").write_text("#!/bin/sh\necho 'slurmdbd: Connection refused' >&2; exit 1\n")
    found = shown(capsys, "--all")
    assert "1046" in by_job(found) and "Connection refused" in found["notes"][0]


def test_the_profile_s_folders(
    slurm: Callable, place: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place("running", "site/runs/a", age=3, job_id=None)
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters/here.yml").write_text(f"folders: {{checkpoints: {tmp_path}/site, logs: {tmp_path}/logs}}\n")
    env = {"DEEPY_CLUSTERS": str(tmp_path / "clusters"), "DEEPY_CLUSTER": "here"}
    assert main(["--json"], env) == 0
    assert [run["experiment"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["a"]
    (tmp_path / "clusters/here.yml").write_text("folders: {checkpoints: '${OF_THE_SITE}/x'}\n")
    assert main(["--json", "site"], env) == 0  # what is named is shown without it
    shown = capsys.readouterr()
    assert [run["experiment"] for run in json.loads(shown.out)["runs"]] == ["a"] and "OF_THE_SITE" in shown.err


def test_wrong_arguments(slurm: Callable) -> None:
    for argv in (["no/such/folder"], ["--wait-iterations", "5"], ["--wait-iterations", "0", "1"], ["--cluster"]):
        with pytest.raises(UserError):
            main(argv, {})
    slurm()
    with pytest.raises(UserError, match="a b c"):
        main(["--usage", "a", "b", "c"], {})


def test_thousands_of_runs(slurm: Callable, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are over cost a small file each."""
    big = (written / "ended/metrics.jsonl").read_bytes() * 200
    for number in range(1000):
        folder = tmp_path / f"checkpoints/{number // 100}/{number}"
        folder.mkdir(parents=True)
        shutil.copy(written / "ended/status.json", folder)
        if number < 5:
            (folder / "metrics.jsonl").write_bytes(big)
        else:
            os.link(tmp_path / "checkpoints/0/0/metrics.jsonl", folder / "metrics.jsonl")
    change(tmp_path / "checkpoints/5/555", state="running", exit_code=None, host="x", job_id=None)
    began = time.process_time()
    assert [run["experiment"] for run in shown(capsys)["runs"]] == ["555"]
    assert time.process_time() - began < 5


def run_in_terminal(width: int, *argv: str, until: str) -> tuple[str, int]:
    """What a terminal shows of a command that gets Ctrl-C when it has shown `until`, and its exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(COLUMNS=str(width), TERM="xterm", PATH="/usr/bin:/bin")
        os.execv(sys.executable, [sys.executable, SCRIPT, *argv])
    shown, asked, deadline = "", False, time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                shown += os.read(terminal, 65536).decode(errors="replace")
            except OSError:
                break
        if until in shown and not asked:
            asked = True
            os.kill(pid, signal.SIGINT)
    else:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    return shown, code


def test_watching_in_a_terminal(place: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place("running", "runs/a_run_with_quite_a_long_name_of_its_own", age=700, job_id=None)
    monkeypatch.chdir(tmp_path)
    shown, code = run_in_terminal(64, "--watch", "1", until="Ctrl-C ends")
    assert code == 0 and "Traceback" not in shown and "interrupted" not in shown
    lines = shown.replace("\r", "").split("\n")
    assert any("7/10 #####... 70%" in line and "2.0000" in line for line in lines)
    assert "retry: no sign of progress for 12 min" in " ".join(shown.split())  # below the table


def test_through_a_pipe(place: Callable, tmp_path: Path) -> None:
    """The real script, from another folder; a reader that leaves."""
    place("running", "runs/small", age=3, job_id=None)
    environment = {"PATH": str(tmp_path / "empty"), "HOME": str(tmp_path)}  # no SLURM
    command = f"{sys.executable} {SCRIPT} --watch 0.2 | /usr/bin/head -2"
    done = subprocess.run(
        ["/bin/bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == "" and done.stdout.splitlines()[1].startswith("job  state")

"""The process of a SLURM job around the run, with stand-ins for SLURM's commands and for deepy.py."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import lock
from megatron.errors import UserError
from megatron.jobs import training
from megatron.jobs.chain import Chain
from megatron.training.watchdog import Sign, name_silent

pytestmark = pytest.mark.cpu

CONFIG = """
num_layers: 2
hidden_size: 16
num_attention_heads: 2
seq_length: 8
train_micro_batch_size_per_gpu: 1
train_iters: 2
data_path: tokens
save: run
"""
# Answers with the text in a file of its name, and notes how it was called.
TOOL = """#!/bin/sh
printf '%s' "$(basename "$0")" >> "{0}/calls"; printf ' %s' "$@" >> "{0}/calls"; echo >> "{0}/calls"
case "$*" in
*"show job"*) cat "{0}/job"; exit;;
requeue*) sed -i 's/Restarts=0/Restarts=1/' "{0}/job";;
esac
test ! -f "{0}/$(basename "$0")" || cat "{0}/$(basename "$0")"
"""
RUN = """
import json, os, sys
print("ran", *sys.argv[2:])
with open("seen.json", "w") as file:
    json.dump(dict(os.environ), file)
if os.path.exists("says"):
    sys.stderr.write(open("says").read())
if os.path.exists("waits_for"):
    import time
    while open("waits_for").read() not in open("calls").read():
        time.sleep(0.05)
sys.exit(int(open("code").read()))
"""
JOB = (
    "JobId=77 JobName=neox-training JobState={state} Reason={reason} Requeue={requeue} Restarts={restarts} "
    "EndTime=2026-11-29T10:00:00 PreemptTime=None TimeLimit=01:00:00 ExcNodeList=(null) NumNodes=2"
)
SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}


class Bed:
    """A folder to submit from, as SLURM's job sees it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, monkeypatch
        for name, text in {"run.yml": CONFIG, "deepy.py": RUN, "train.py": "", "code": "0"}.items():
            (folder / name).write_text(text)
        (folder / "bin").mkdir()
        for name in ("scontrol", "squeue", "sbatch"):
            tool = folder / "bin" / name
            tool.write_text(TOOL.format(folder))
            tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        (folder / "sbatch").write_text("78\n")
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setattr(training, "HOME", folder)
        monkeypatch.chdir(folder)

    def run(self, code: int, *arguments: str, requeue: int = 1, state: str = "RUNNING", restarts: int = 0,
            now: int | None = None, reason: str = "None", **variables: str) -> int:  # fmt: skip
        """`restarts`: of the job when it begins, `now`: when it ends."""
        (self.folder / "calls").write_text("")
        (self.folder / "seen.json").unlink(missing_ok=True)
        (self.folder / "code").write_text(str(code))
        shown = restarts if now is None else now
        (self.folder / "job").write_text(JOB.format(state=state, requeue=requeue, restarts=shown, reason=reason) + "\n")
        self._patch.setenv("SLURM_RESTART_COUNT", str(restarts))
        env = {**os.environ, **SLURM, **variables}
        return training.run(["run.yml", *arguments], env)

    @property
    def calls(self) -> list[str]:
        """The commands that change something."""
        asked = ("scontrol --oneliner show job", "squeue ")
        return [line for line in (self.folder / "calls").read_text().splitlines() if not line.startswith(asked)]

    @property
    def chain(self) -> Chain:
        return Chain.read(self.folder / "run")

    @property
    def seen(self) -> dict[str, str]:
        """The environment of the run."""
        return json.loads((self.folder / "seen.json").read_text())

    def save(self, step: int) -> None:
        """As if the run had saved."""
        self._patch.setattr(training.Job, "step", property(lambda job: step))


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(tmp_path, monkeypatch)


def test_a_stopped_run_is_requeued_and_knows_its_end(bed: Bed) -> None:
    assert bed.run(3, "train_iters=5") == 3
    assert bed.calls == ["scontrol requeue 77"]
    (link,) = bed.chain.links
    assert (link.job_id, link.code, link.next, link.nodes, link.count) == ("77", 3, "requeue", "a[1-2]", 1)
    assert link.started <= link.ended <= time.time()
    assert bed.seen["SLURM_JOB_CHAIN_COUNT"] == "0"
    assert time.localtime(int(bed.seen["SLURM_JOB_END_TIME"]))[:6] == (2026, 11, 29, 10, 0, 0)
    assert bed.run(3, restarts=1, SLURM_JOB_END_TIME="55") == 3
    assert bed.seen["SLURM_JOB_CHAIN_COUNT"] == "1" and bed.seen["SLURM_JOB_END_TIME"] == "55"
    assert [link.count for link in bed.chain.links] == [1, 2]


def test_a_job_that_may_not_be_requeued_has_a_successor(bed: Bed) -> None:
    assert bed.run(3, requeue=0) == 3
    write, submit = [call for call in bed.calls if not call.startswith("squeue")]
    assert write == "scontrol write batch_script 77 -"
    assert submit.startswith("sbatch --parsable ") and "--dependency=afterany:77" in submit and "--nodes=2" in submit
    assert bed.chain.links[-1].next == "78"


def test_all_jobs_of_a_chain_have_one_name_in_trackers(bed: Bed, capfd: pytest.CaptureFixture[str]) -> None:
    named = {"DEEPY_EXPERIMENT": "e", "DEEPY_CLUSTER": "generic"}
    assert bed.run(3, "use_wandb=true", requeue=0, **named) == 3
    assert bed.run(3, "use_wandb=true", SLURM_JOB_ID="78", **named) == 3
    assert capfd.readouterr().out.count("wandb_run_name=e_generic_77") == 2


def test_a_run_that_outlives_its_time_limit_is_requeued_before_slurm_kills_it(bed: Bed) -> None:
    (bed.folder / "waits_for").write_text("scontrol requeue 77")
    at_limit = {"state": "COMPLETING", "reason": "TimeLimit", "SLURM_JOB_END_TIME": str(int(time.time()))}
    assert bed.run(5, **at_limit) == 5
    assert bed.calls == ["scontrol requeue 77"]
    assert (bed.chain.links[-1].code, bed.chain.links[-1].next) == (5, "requeue")


@pytest.mark.parametrize("requeue", [0, 1])
def test_no_job_follows_that_could_not_be_counted(bed: Bed, requeue: int, caplog: pytest.LogCaptureFixture) -> None:
    (bed.folder / "run/chain.json").mkdir(parents=True)  # so it cannot be replaced, by root either
    assert bed.run(3, requeue=requeue) == 3
    assert bed.calls == []
    assert any("MAX_JOB_CHAINS" in one.message for one in caplog.records if one.levelname == "ERROR")


@pytest.mark.parametrize(
    "limits", [{"MAX_JOB_CHAINS": "3", "MAX_JOB_FAILURES": "9"}, {"MAX_JOB_CHAINS": "9", "MAX_JOB_FAILURES": "3"}]
)
def test_limits_hold_where_nothing_survives(bed: Bed, limits: dict[str, str]) -> None:
    for restarts, expected in enumerate([["scontrol requeue 77"], ["scontrol requeue 77"], []]):
        assert bed.run(5, restarts=restarts, **limits) == 5
        assert bed.calls == expected
        (bed.folder / "run/chain.json").unlink()  # the next link runs on another node


@pytest.mark.parametrize("code", [0, 2, 4, 6])
def test_no_job_follows_these_codes(bed: Bed, code: int) -> None:
    assert bed.run(code) == code
    assert bed.calls == []
    assert (bed.chain.links[-1].code, bed.chain.links[-1].next) == (code, None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"state": "CANCELLED"}, None),
        ({"state": "COMPLETING"}, None),
        ({"state": "COMPLETING", "now": 1}, "requeue"),  # by SLURM
        ({"MAX_JOB_CHAINS": "1"}, None),
    ],
)
def test_what_slurm_or_the_user_has_decided(bed: Bed, options: dict[str, Any], expected: str | None) -> None:
    assert bed.run(3, **options) == 3
    assert bed.calls == [] and bed.chain.links[-1].next == expected


def test_a_stop_file_ends_the_chain(bed: Bed) -> None:
    (bed.folder / "run").mkdir()
    (bed.folder / "run/STOP").touch()
    assert bed.run(3) == 3 and bed.calls == []


def test_a_stop_file_ends_a_job_that_slurm_requeued(bed: Bed) -> None:
    bed.run(3, state="COMPLETING", now=1)  # preempted
    (bed.folder / "run/STOP").touch()
    assert bed.run(0, restarts=1) == 3
    assert not (bed.folder / "seen.json").exists() and bed.calls == []
    link = bed.chain.links[-1]
    assert (link.count, link.code, link.next) == (2, 3, None) and "STOP" in str(link.reason)


@pytest.mark.parametrize("variables", [{"MAX_JOB_CHAINS": "0"}, {"SLURM_JOB_ID": ""}])
def test_without_a_chain_a_job_only_trains(bed: Bed, variables: dict[str, str]) -> None:
    env = {name: value for name, value in {**SLURM, **variables}.items() if value}
    (bed.folder / "code").write_text("3")
    (bed.folder / "job").write_text(JOB.format(state="RUNNING", requeue=1, restarts=0, reason="None"))
    assert training.run(["run.yml"], {**os.environ, **env}) == 3
    assert not (bed.folder / "run").exists()


def test_a_run_without_save_has_no_successor(bed: Bed) -> None:
    (bed.folder / "run.yml").write_text(CONFIG.replace("save: run", "log_dir: run"))
    assert bed.run(3) == 3 and bed.calls == [] and not (bed.folder / "run/chain.json").exists()


@pytest.mark.parametrize("where", ["chain", "status"])
def test_a_run_that_had_finished_is_not_started_again(bed: Bed, where: str) -> None:
    """SLURM preempted the job between the end of the run and that of the job: before or after the end was noted."""
    bed.run(0)
    if where == "status":
        bed.chain.end(ended=None, code=None).write(bed.folder / "run")
        status = {"state": "ended", "exit_code": 0, "heartbeat": time.time()}
        (bed.folder / "run/status.json").write_text(json.dumps(status))
    assert bed.run(3, restarts=1) == 0
    assert not (bed.folder / "seen.json").exists() and bed.calls == []
    assert bed.run(0, SLURM_JOB_ID="80") == 0 and (bed.folder / "seen.json").exists()  # submitted again


def test_slurm_may_requeue_too_often(bed: Bed) -> None:
    limit = {"MAX_JOB_CHAINS": "2"}
    bed.run(3, state="COMPLETING", now=1, **limit)
    bed.run(3, state="COMPLETING", restarts=1, now=2, **limit)
    assert bed.run(3, restarts=2, **limit) == 3
    assert not (bed.folder / "seen.json").exists() and bed.calls == []


def test_a_crash_loop_leaves_the_node_and_then_ends(bed: Bed) -> None:
    killed = "srun: error: a2: tasks 2-3: Exited with exit code 5\nsrun: error: a1: task 1: Killed\n"
    (bed.folder / "says").write_text(killed)
    assert bed.run(5) == 5 and bed.calls == ["scontrol requeue 77"]
    assert bed.run(5, restarts=1) == 5
    assert bed.calls == ["scontrol requeue 77", "scontrol update JobId=77 ExcNodeList=a1"]
    assert bed.run(5, restarts=2) == 5 and bed.calls == []
    assert bed.chain.excluded == ("a1",) and bed.chain.in_a_row == 3
    assert [link.failed_node for link in bed.chain.links] == ["a1", "a1", "a1"]
    bed.save(10)  # a new job begins a new chain, and progress forgives
    assert bed.run(5, SLURM_JOB_ID="90") == 5 and bed.chain.in_a_row == 1


def test_a_rank_that_slurm_lost_sight_of_and_that_still_writes_does_not_end_the_chain(bed: Bed) -> None:
    held = json.dumps({"host": "a9", "pid": 7, "token": "x"})
    (bed.folder / "run").mkdir()
    (bed.folder / "run/lock.json").write_text(held)
    assert bed.run(2) == 2 and bed.calls == []  # a first link: `save` is that of another job
    (bed.folder / "run/lock.json").unlink()
    bed.run(3, state="COMPLETING", now=1, SLURM_JOB_ID="78")
    (bed.folder / "run/lock.json").write_text(held)
    assert bed.run(2, restarts=1, SLURM_JOB_ID="78") == 2
    assert [call.split()[1] for call in bed.calls] == ["requeue"]
    link = bed.chain.links[-1]
    assert (link.code, link.next, bed.chain.in_a_row) == (2, "requeue", 2)
    (bed.folder / "run/lock.json").unlink()
    assert bed.run(2, restarts=2, SLURM_JOB_ID="78") == 2 and bed.calls == []  # nobody holds it: the input is wrong


def test_a_second_submission_of_a_run_that_trains_leaves_its_chain_alone(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "WATCH_SECONDS", 0.1)
    chain = Chain().begin("70", 0, time.time(), "a1", 0)
    chain.write(bed.folder / "run")
    with lock.SaveLock(bed.folder / "run"):
        for another in ("77", "78"):
            with pytest.raises(UserError, match=f"process {os.getpid()} "):
                bed.run(2, SLURM_JOB_ID=another)
            assert not (bed.folder / "seen.json").exists() and bed.calls == [] and bed.chain == chain
        bed.run(3, SLURM_JOB_ID="70", restarts=1)  # of the same chain: as before
        assert [link.count for link in bed.chain.links] == [1, 2]
    chain.write(bed.folder / "run")
    assert bed.run(3) == 3  # it was killed: nobody holds the lock
    assert [(link.job_id, link.count) for link in bed.chain.links] == [("70", 1), ("77", 1)]


def test_a_hung_rank_is_found_by_its_number() -> None:
    signs = {rank: Sign(1, 7, "training", 9.0, 1.0, True) for rank in (0, 1, 3)}
    reason = f"LostRankError: no progress for 9 s: {name_silent({**signs, 2: None}, 4)}"
    lines = ["srun: error: a[1-2]: tasks 0-1,3: Exited with exit code 5"]
    assert training.failed_node(lines, reason, SLURM) == "a2"
    assert training.failed_node(lines, "another rank is gone", SLURM) is None
    assert training.failed_node(["srun: error: a[1-2]: tasks 0-3: Exited with exit code 1"], "", SLURM) is None


@pytest.mark.parametrize(("rank", "node"), [(0, "a1"), (3, "a1"), (4, "a2"), (9, "b7"), (10, None)])
def test_the_node_of_a_rank(rank: int, node: str | None) -> None:
    env = {"SLURM_JOB_NODELIST": "a[1-2],b7", "SLURM_TASKS_PER_NODE": "4(x2),2"}
    assert training.node_of_rank(rank, env) == node


def test_a_limit_that_is_no_number_is_refused(bed: Bed) -> None:
    with pytest.raises(UserError, match="MAX_JOB_CHAINS=many"):
        bed.run(0, MAX_JOB_CHAINS="many")

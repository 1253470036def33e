"""The next job: flags recorded from SLURM, the environment of sbatch, waiting for ranks and for a controller."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.cluster.slurm import Slurm, SlurmError, parse_fields
from megatron.jobs import next_job
from megatron.jobs.next_job import await_ranks, flags_of, persist, requeue, resubmit

pytestmark = pytest.mark.cpu

# `scontrol --oneliner show job` of 22.05
SHOWN = (
    "JobId=5012 JobName=neox-training UserId=root(0) Priority=4294901759 Nice=0 Account=(null) QOS=(null) "
    "JobState=RUNNING Reason=None Dependency=(null) Requeue=0 Restarts=0 BatchFlag=1 ExitCode=0:0 TimeLimit=1-00:00:00 "
    "TimeMin=N/A EndTime=2026-11-29T23:36:58 PreemptTime=None Partition=main ReqNodeList=(null) ExcNodeList=a[7-8] "
    "NodeList=a[1-2] BatchHost=a1 NumNodes=2 NumCPUs=16 NumTasks=8 CPUs/Task=2 ReqB:S:C:T=0:0:*:* "
    "NtasksPerN:B:S:C=4:0:*:* MinCPUsNode=8 MinMemoryNode=0 MinTmpDiskNode=0 Features=(null) OverSubscribe=NO "
    "Licenses=(null) Network=(null) Command=/home/you/deepy/pretrain_neox.sbatch run.yml name=a b WorkDir=/home/you "
    "Comment=mine StdErr=/home/you/logs/neox-training-5012.out StdIn=/dev/null "
    "StdOut=/home/you/logs/neox-training-5012.out Power= TresPerNode=gres:gpu:gh200:4"
)


def test_the_flags_of_a_job_are_those_of_its_successor() -> None:
    flags = flags_of(parse_fields(SHOWN), {}, ["a1"])
    assert sorted(flags) == sorted(
        [
            *("--job-name=neox-training", "--nodes=2", "--cpus-per-task=2", "--time=1-00:00:00", "--partition=main"),
            *("--comment=mine", "--chdir=/home/you", "--ntasks-per-node=4", "--gpus-per-node=gh200:4"),
            *("--exclude=a[7-8],a1", "--output=/home/you/logs/neox-training-%j.out", "--exclusive"),
            *("--open-mode=append", "--no-requeue"),
        ]
    )


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/projects/2012/logs/neox-training-12.out", "/projects/2012/logs/neox-training-%j.out"),
        ("/projects/12/logs/neox-training-12.out", "/projects/12/logs/neox-training-%j.out"),
        ("/logs/run2012-12_2.out", "/logs/run2012-%j_2.out"),
        ("/logs/v12.5_12.out", "/logs/v%j.5_%j.out"),
        ("/logs/2012.out", "/logs/2012.out"),
    ],
)
def test_the_number_of_the_job_is_replaced_in_the_name_of_its_log(path: str, expected: str) -> None:
    assert f"--output={expected}" in flags_of(parse_fields(f"JobId=12 StdOut={path}"), {})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("TresPerNode=gres/gpu:2 NumTasks=3", ["--gpus-per-node=2", "--ntasks=3"]),
        ("TresPerNode=gres:nvme:1,gres:gpu:2", ["--gpus-per-node=2", "--gres=nvme:1"]),
        ("TresPerJob=gres:gpu:8 MinMemoryCPU=4G", ["--gpus=8", "--mem-per-cpu=4G"]),
        (
            "StdOut=/x/log StdErr=/x/err Account=a QOS=q",
            ["--output=/x/log", "--error=/x/err", "--account=a", "--qos=q"],
        ),
    ],
)
def test_flags_that_other_jobs_have(fields: str, expected: list[str]) -> None:
    assert sorted(flags_of(parse_fields(f"{fields} Requeue=1"), {})) == sorted([*expected, "--open-mode=append"])


def test_the_ranks_of_a_job_are_those_of_its_environment() -> None:
    """One rank per GPU, and none: SLURM itself says one task a node."""
    shown = parse_fields("NumNodes=2 NumTasks=2 TresPerNode=gres:gpu:4 Requeue=1")
    assert {"--ntasks-per-node=4", "--gpus-per-node=4"} < {*flags_of(shown, {"SLURM_NTASKS_PER_NODE": "4"})}
    cpu = flags_of(parse_fields("NumTasks=2 Requeue=1"), {"SLURM_NTASKS_PER_NODE": "1", "SLURM_GPUS_PER_NODE": "0"})
    assert sorted(cpu) == ["--gpus-per-node=0", "--ntasks-per-node=1", "--open-mode=append"]


class Recorded(Slurm):
    """Answers with what is recorded, and remembers the commands."""

    def __init__(self, **answers: list[str | SlurmError]) -> None:
        super().__init__()
        self.__dict__["answers"], self.__dict__["asked"] = answers, []

    def run(self, *command: str, text: str | None = None) -> str:
        self.__dict__["asked"].append(command)
        given = self.__dict__["answers"].get(command[0], [""])
        answer = given.pop(0) if len(given) > 1 else given[0]
        if isinstance(answer, SlurmError):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(next_job.time, "sleep", waited.append)
    return waited


def test_a_controller_that_is_restarted_is_waited_for(slept: list[float]) -> None:
    slurm = Recorded(scontrol=[SlurmError("down"), SlurmError("down"), SHOWN])
    assert persist(lambda: slurm.job("5012"))["JobState"] == "RUNNING"
    assert slept == [2.0, 4.0]
    with pytest.raises(SlurmError):
        persist(lambda: Recorded(scontrol=[SlurmError("gone")]).job("1"), waits=(1.0, 2.0))
    assert slept == [2.0, 4.0, 1.0, 2.0]


def test_ranks_that_still_run_are_waited_for(slept: list[float]) -> None:
    slurm = Recorded(scontrol=[SHOWN], squeue=["7.batch\n7.extern\n7.0\n", "7.batch\n7.0\n", "7.batch\n7.extern\n"])
    assert await_ranks(slurm, "7", 0)["JobId"] == "5012"
    assert len(slept) == 2
    requeued = Recorded(scontrol=[SHOWN, SHOWN.replace("Restarts=0", "Restarts=1")], squeue=["7.0"])
    assert await_ranks(requeued, "7", 0)["Restarts"] == "1"  # of a node that is gone SLURM still lists them
    assert len(slept) == 3


def test_a_requeued_job_is_pending_before_its_nodes_are_excluded() -> None:
    shown, again = ("scontrol", "--oneliner", "show", "job", "5012"), ("scontrol", "requeue", "5012")
    slurm = Recorded(scontrol=[SHOWN, ""])
    requeue(slurm, "5012", 0, parse_fields(SHOWN), ["a1"])
    assert slurm.asked == [shown, again, ("scontrol", "update", "JobId=5012", "ExcNodeList=a[7-8],a1")]
    slurm = Recorded(scontrol=[SHOWN, ""])
    requeue(slurm, "5012", 0, parse_fields(SHOWN), [])
    assert slurm.asked == [shown, again]


# `scontrol --oneliner show job 12` of an array of three: the last task has the number of the array.
TASKS = "\n".join(
    SHOWN.replace("JobId=5012", f"JobId={job} ArrayJobId=12 ArrayTaskId={task}") for job, task in ((13, 0), (12, 2))
)


def test_a_task_of_an_array_acts_on_itself_alone(
    slept: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = Recorded(scontrol=[TASKS], squeue=["12_2.0\n12_2.batch\n", "12_2.batch\n"], sbatch=["20\n"])
    fields = await_ranks(slurm, "12", 0)
    assert fields["ArrayTaskId"] == "2" and len(slept) == 1
    assert {command[4] for command in slurm.asked if command[0] == "squeue"} == {"12_2"}
    requeue(slurm, "12", 0, fields, ["a1"])
    assert slurm.asked[-2:] == [
        ("scontrol", "requeue", "12_2"),
        ("scontrol", "update", "JobId=12_2", "ExcNodeList=a[7-8],a1"),
    ]
    slurm.__dict__["queue"] = lambda *arguments: []
    monkeypatch.setattr(next_job, "Slurm", lambda env: slurm)
    assert resubmit({}, fields, [], tmp_path, []) == "20"
    assert {"--array=2", "--dependency=afterany:12_2"} < {*slurm.asked[-1]}
    first = parse_fields(TASKS.splitlines()[0])
    assert "--array=0" in flags_of(first, {})


def test_a_lost_answer_makes_no_second_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = SlurmError("gave no answer within 15 s")
    slurm = Recorded(scontrol=[SHOWN, lost, SHOWN.replace("Restarts=0", "Restarts=1")])
    persist(lambda: requeue(slurm, "5012", 0, parse_fields(SHOWN), []))
    assert [command[1] for command in slurm.asked] == ["--oneliner", "requeue", "--oneliner"]
    slurm = Recorded(sbatch=[lost])
    rows = [[], [{"name": "evaluation", "dependency": "afterany:5012(unfulfilled)", "raw_id": "5013"}]]
    rows += [[*rows[1], {"name": "neox-training", "dependency": "afterany:5012(unfulfilled)", "raw_id": "5014"}]]
    slurm.__dict__["queue"] = lambda *arguments: rows.pop(0)
    monkeypatch.setattr(next_job, "Slurm", lambda env: slurm)
    assert persist(lambda: resubmit({}, parse_fields(SHOWN), [], tmp_path, [])) == "5014"
    assert [command[0] for command in slurm.asked].count("sbatch") == 2


def test_a_successor_has_slurms_copy_of_the_script_and_waits_for_this_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = Recorded(scontrol=["#!/bin/sh\n"], sbatch=["5013;main\n"])
    slurm.__dict__["queue"] = lambda *arguments: []
    monkeypatch.setattr(next_job, "Slurm", lambda env: slurm)
    assert resubmit({}, parse_fields(SHOWN), ["run.yml", "name=a b"], tmp_path, []) == "5013"
    assert (tmp_path / "chain.sbatch").read_text() == "#!/bin/sh\n"
    submitted = slurm.asked[-1]
    assert submitted[:2] == ("sbatch", "--parsable") and "--dependency=afterany:5012" in submitted
    assert submitted[-3:] == (str(tmp_path / "chain.sbatch"), "run.yml", "name=a b")

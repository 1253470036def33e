"""All checkpoints of a run to the Hub: as jobs of a SLURM that only notes them, or in this process without one."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest

from megatron.checkpoint import layout
from megatron.checkpoint.manifest import FileEntry, Manifest
from megatron.checksums import file_crc32
from megatron.errors import UserError
from megatron.jobs.publishing import publish_all, publish_one
from tests.hub.published_run import log_in
from tests.hub.upload_server import UploadHub
from tests.tools.command import ROOT

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]

STEPS = (9, 20, 100)
RAW_ONLY = ("--upload-neox-only", "--retry-min-wait=0", "--retry-max-wait=0")


def write_checkpoint(root, step, text="state"):
    """A complete checkpoint of a model without parameters."""
    folder = root / layout.step_folder(step)
    folder.mkdir(parents=True)
    state = folder / layout.state_file(0)
    state.write_text(f"{text} of step {step}")
    files = {state.name: FileEntry(state.stat().st_size, file_crc32(state))}
    config = {"train_iters": 100, "seq_length": 8, "num_layers": 1}
    sizes = {"tp": 1, "pp": 1, "dp": 1}
    Manifest(step, 8 * step, sizes, {}, False, {}, files, config).write(folder, durable=False)


@pytest.fixture
def runs(tmp_path):
    """A folder of checkpoints with the run `mine`, one of whose checkpoints is damaged and one incomplete."""
    base = tmp_path / "runs"
    for step in STEPS:
        write_checkpoint(base / "mine", step)
    write_checkpoint(base / "mine", 50)
    (base / "mine/global_step50" / layout.state_file(0)).write_bytes(b"short")
    (base / "mine/global_step60").mkdir()
    return base


@pytest.fixture
def environment(tmp_path, runs):
    """Of a machine with a SLURM that notes its jobs in `jobs`, a line for each."""
    program = tmp_path / "bin/sbatch"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/bash\nprintf '%q ' \"$@\" >> {tmp_path}/jobs\necho >> {tmp_path}/jobs\ndeclare -x > {tmp_path}/env\n"
        f"echo $((100 + $(/usr/bin/wc -l < {tmp_path}/jobs)))\n"
    )
    program.chmod(0o755)
    return {"PATH": str(program.parent), "DEEPY_CHECKPOINTS": str(runs), "HOME": str(tmp_path)}


@pytest.fixture
def without_slurm(environment, tmp_path):
    return {**environment, "PATH": str(tmp_path / "nothing")}


def jobs(tmp_path):
    return [shlex.split(line) for line in (tmp_path / "jobs").read_text().splitlines()]


def split(job):
    """(flags of sbatch, what runs in the job)."""
    at = job.index(str(ROOT / "slurm/run_on_compute.sbatch"))
    return job[:at], job[at + 1 :]


def test_a_job_for_each_checkpoint_the_newest_first_one_at_a_time(tmp_path, environment, runs, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with UploadHub() as hub:
        log_in(hub, tmp_path, monkeypatch)
        assert publish_all(["mine", *RAW_ONLY, "--upload-delay", "60", "--max-retries=3"], environment) == 0
    found = [split(job) for job in jobs(tmp_path)]
    commands = [command for _, command in found]
    assert [command[2:5] for command in commands] == [[str(runs / "mine"), str(step), "me"] for step in (100, 20, 9)]
    assert all(command[1] == str(ROOT / "huggingface/upload_checkpoint.py") for command in commands)
    assert [command[-1] for command in commands] == [f"--upload-delay={delay}" for delay in (60, 90, 120)]
    options = {"--upload-neox-only", "--max-retries=3", "--retry-min-wait=0.0", "--skip-if-exists"}
    assert all(options <= set(command) and "--skip-eval" not in command for command in commands)
    flags = {
        "--parsable",
        "--time=4:02:00",
        "--job-name=convert_mine",
        "--dependency=singleton",
        f"--output={tmp_path}/%x-%j.out",
    }
    assert all(flags <= set(given) for given, _ in found)
    streams = capsys.readouterr()
    assert streams.out.splitlines() == [f"global_step{s}: job {n}" for s, n in ((100, 101), (20, 102), (9, 103))]
    for name in ("global_step50", "global_step60"):
        assert name in streams.err and name not in (tmp_path / "jobs").read_text()


def test_what_the_hub_has_gets_no_job(tmp_path, environment, runs, monkeypatch, capsys):
    with UploadHub() as hub:
        log_in(hub, tmp_path, monkeypatch)
        publish_one(["mine", "20", "lab", *RAW_ONLY], environment, None)
        publish_all(["mine", "lab", *RAW_ONLY, "--no-singleton", "--upload-delay=random"], environment)
        found = [split(job) for job in jobs(tmp_path)]
        assert [command[3] for _, command in found] == ["100", "9"]
        assert "global_step20: published already" in capsys.readouterr().out
        assert all(command.count("--upload-delay=random") == 1 for _, command in found)
        assert not any("--dependency=singleton" in flags for flags, _ in found)


def test_a_dry_run_prints_commands_that_the_job_understands(tmp_path, environment, runs, monkeypatch, capsys):
    (tmp_path / "names.yml").write_text("prefix: lab-\n")
    monkeypatch.chdir(tmp_path)  # the jobs may start elsewhere
    given = ["mine", "--names=names.yml", "--eval", "--eval-tasks=a,b", "--sbatch=--mem=1G --time=5", "--dry-run"]
    assert publish_all([*given, "--delete-local", "lab"], environment) == 0
    assert not (tmp_path / "jobs").exists()
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3 and all(line[0] == "sbatch" and {"--mem=1G", "--time=5"} <= set(line) for line in lines)
    monkeypatch.chdir("/")
    publish_one([*split(lines[1])[1][2:], "--dry-run"], {"HOME": str(tmp_path)}, None)
    plan = capsys.readouterr().out
    for fact in ("step 20 of 100", "lab/lab-mine, revision global_step20\n", "evaluate a, b", "delete"):
        assert fact in plan
    assert f"{runs}/hf_checkpoints/lab-mine/global_step20" in plan


def test_runs_in_folders_called_checkpoints_have_the_names_of_the_folders_above(tmp_path, without_slurm, monkeypatch):
    for run in ("a", "b"):
        write_checkpoint(tmp_path / run / "checkpoints", 5, run)
    with UploadHub() as hub:
        log_in(hub, tmp_path, monkeypatch)
        for run in ("a", "b"):
            publish_one([str(tmp_path / run / "checkpoints"), "lab", *RAW_ONLY], without_slurm, None)
        sent = {name: model.branches["global_step5"] for name, model in hub.models.items()}
        states = {name: files[layout.state_file(0)] for name, files in sent.items()}
        assert states == {f"lab/neox-ckpt-{run}": f"{run} of step 5".encode() for run in ("a", "b")}
    (tmp_path / "names.yml").write_text("replace: {b: a}\n")
    with pytest.raises(UserError, match="b and a would both be a"):
        publish_one(
            [str(tmp_path / "b/checkpoints"), "--dry-run", f"--names={tmp_path}/names.yml"], without_slurm, None
        )


@pytest.mark.parametrize("publish", [lambda *given: publish_one(*given, None), publish_all])
def test_another_checkpoint_on_the_hub_is_replaced_only_when_asked(tmp_path, without_slurm, monkeypatch, publish):
    for place in ("one", "two"):
        write_checkpoint(tmp_path / place / "mine", 5, place)
    with UploadHub() as hub:
        log_in(hub, tmp_path, monkeypatch)
        publish([str(tmp_path / "one/mine"), "lab", *RAW_ONLY], without_slurm)
        model, state = hub.models["lab/neox-ckpt-mine"], layout.state_file(0)
        with pytest.raises(UserError, match="lab/neox-ckpt-mine has another checkpoint as global_step5.*--replace"):
            publish([str(tmp_path / "two/mine"), "lab", *RAW_ONLY], without_slurm)
        assert model.branches["global_step5"][state] == b"one of step 5"
        publish([str(tmp_path / "two/mine"), "lab", "--replace", *RAW_ONLY], without_slurm)
        assert model.branches["global_step5"][state] == b"two of step 5"


@pytest.mark.parametrize("given", [["--sbatch", "--time=0:10:00"], ["--sbatch", "-t0:10:00 -n1"], ["--sbatch=-n1"]])
def test_flags_of_sbatch_begin_with_a_dash(environment, capsys, given):
    publish_all(["mine", *given, "lab", "--dry-run"], environment)
    flags, command = split(shlex.split(capsys.readouterr().out.splitlines()[0]))
    assert command[4] == "lab"
    words = given[-1].removeprefix("--sbatch=").split()
    assert flags[-len(words) :] == words
    with pytest.raises(UserError, match="--sbatch"):
        publish_all(["mine", "lab", "--dry-run", "--sbatch"], environment)


def test_a_job_fits_on_a_small_node_unless_the_user_asks_for_more(environment, capsys):
    for given, cpus in (("", ["4"]), ("--sbatch=--cpus-per-task=16", ["4", "16"])):  # of two the later counts
        publish_all(["mine", "lab", "--dry-run", *filter(None, [given])], environment)
        flags, _ = split(shlex.split(capsys.readouterr().out.splitlines()[0]))
        asked = [flag.removeprefix("--cpus-per-task=") for flag in flags if flag.startswith("--cpus-per-task=")]
        assert asked == cpus


def test_pauses_between_submissions(tmp_path, environment, monkeypatch):
    slept = []
    monkeypatch.setattr("megatron.jobs.publishing.time.sleep", slept.append)
    with UploadHub() as hub:
        log_in(hub, tmp_path, monkeypatch)
        publish_all(["mine", *RAW_ONLY, "--delay-between-jobs=7"], environment)
    assert slept.count(7.0) == 2 and len(jobs(tmp_path)) == 3


def test_without_slurm_they_are_published_one_after_the_other(tmp_path, without_slurm, monkeypatch, capsys):
    with UploadHub() as hub:
        log_in(hub, tmp_path, monkeypatch)
        hub.fail("/commit/global_step20", status=403, times=1)
        with pytest.raises(UserError, match="not published: global_step20,"):
            publish_all(["mine", "lab", *RAW_ONLY], without_slurm)
        model = hub.models["lab/neox-ckpt-mine"]
        assert set(model.branches) == {"main", "global_step100", "global_step9", "global_step20"}
        assert not model.branches["global_step20"]
        publish_all(["mine", "lab", *RAW_ONLY], without_slurm)
        assert layout.MANIFEST in model.branches["global_step20"]
        done = [line for line in capsys.readouterr().out.splitlines() if line.endswith("published already")]
        assert done == ["global_step100: published already", "global_step9: published already"]


def test_a_run_without_a_complete_checkpoint_and_one_that_is_not_there(tmp_path, environment, runs):
    (runs / "empty/global_step3").mkdir(parents=True)
    with pytest.raises(UserError, match="global_step3"):
        publish_all(["empty", "lab", "--dry-run"], environment)
    with pytest.raises(UserError, match=r"mime.*--checkpoints-base-dir.*'mine'"):
        publish_all(["mime", "lab", "--dry-run"], environment)


@pytest.mark.parametrize("place", ["/", "."])
def test_the_script_works_from_any_folder_with_one_argument(tmp_path, environment, runs, place):
    command = ["bash", str(ROOT / "huggingface/batch_submit_checkpoints.sh"), "mine", "--dry-run"]
    env = {**os.environ, **environment, "PATH": f"{environment['PATH']}:{os.environ['PATH']}"}
    (tmp_path / "megatron").mkdir(exist_ok=True)  # of another clone
    (tmp_path / "megatron/__init__.py").write_text("raise SystemExit('another megatron was imported')\n")
    done = subprocess.run(command, cwd=tmp_path / place, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["sbatch"] * 3


@pytest.mark.parametrize(
    ("given", "iteration", "more"), [(["a/b-c"], "0", []), (["a/b-c", "7", "--tp", "2"], "7", ["--tp", "2"])]
)
def test_the_script_that_imports_a_model_finds_deepy_from_slurms_copy(tmp_path, given, iteration, more):
    copy = tmp_path / "spool/slurm_script"
    copy.parent.mkdir()
    home = tmp_path / "deepy"  # without an environment, whose python3 would come first
    scripts = ("huggingface/convert_hf_to_neox.sbatch", "slurm/run_on_compute.sbatch", "slurm/run_module.py")
    for script in scripts:
        (home / script).parent.mkdir(parents=True, exist_ok=True)
        (home / script).write_bytes((ROOT / script).read_bytes())
    copy.write_bytes((home / scripts[0]).read_bytes())
    for name, text in {
        "scontrol": f"echo '   Command={home}/huggingface/convert_hf_to_neox.sbatch a/b-c'",
        "python3": f'case "$1" in -*) ;; *) printf "%s\\n" "$@" > {tmp_path}/given ;; esac',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "5", "DEEPY_CHECKPOINTS": "/ck", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", str(copy), *given], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    script, *arguments = (tmp_path / "given").read_text().splitlines()
    assert script == str(home / "huggingface/convert_hf_to_neox.py")
    assert arguments == ["--hf-model", "a/b-c", "--iteration", iteration, *more]
    assert subprocess.run(["bash", str(copy)], env=env, capture_output=True, timeout=60).returncode == 2


@pytest.mark.parametrize(
    ("options", "limits", "time"),
    [
        (["--upload-delay=random"], "big infinite", "36:00:00"),  # 12 hours, 20 retries, 4 hours
        (["--upload-delay=random", "--max-retries=0"], "big n/a", "16:00:00"),
        (["--upload-delay=1800"], "big 1-00:00:00", "24:00:00"),
        (["--upload-delay=random", "--sbatch=-p small"], "small 8:00:00", "8:00:00"),
        ([], "broken", "24:00:00"),
    ],
)
def test_a_job_has_time_for_its_delay_and_retries(tmp_path, environment, capsys, options, limits, time):
    """Of the partition's limit it asks for no more: such a job would never start."""
    (tmp_path / "site.yml").write_text("partition: big\n")
    program = tmp_path / "bin/sinfo"
    program.write_text(f"#!/bin/bash\necho \"$*\" >> {tmp_path}/asked\nprintf '{limits}\\n'\n")
    program.chmod(0o755)
    publish_all(
        ["mine", "lab", "--dry-run", "--cluster=site", *options], environment | {"DEEPY_CLUSTERS": str(tmp_path)}
    )
    streams = capsys.readouterr()
    lines = [shlex.split(line) for line in streams.out.splitlines()]
    assert [[flag for flag in line if flag.startswith("--time=")] for line in lines] == [[f"--time={time}"]] * 3
    partition = "small" if "small" in limits else "big"
    assert (tmp_path / "asked").read_text().splitlines() == [f"--noheader --format=%P %l --partition={partition}"]
    assert ("--upload-delay" in streams.err) == (time == "8:00:00")


def test_times_that_the_site_and_the_user_give(tmp_path, environment, capsys):
    (tmp_path / "site.yml").write_text("time: '2:00:00'\n")
    environment |= {"DEEPY_CLUSTERS": str(tmp_path)}
    given = ["mine", "lab", "--dry-run", "--cluster=site"]
    for more, env, times in (
        ([], {}, ["2:00:00", "2:00:00"]),
        (["--sbatch=--time=9:00:00"], {}, ["2:00:00", "2:00:00", "9:00:00"]),
        ([], {"SBATCH_TIMELIMIT": "5"}, ["2:00:00"]),
    ):
        publish_all([*given, *more], environment | env)
        first = shlex.split(capsys.readouterr().out.splitlines()[0])
        assert [flag.removeprefix("--time=") for flag in first if flag.startswith("--time=")] == times


def test_jobs_go_by_the_site_s_own_command(tmp_path, environment, monkeypatch, capsys):
    (tmp_path / "site.yml").write_text("submit_command: site_sbatch --check\n")
    environment |= {"DEEPY_CLUSTERS": str(tmp_path), "DEEPY_CLUSTER": "site"}
    (tmp_path / "bin/sbatch").rename(tmp_path / "bin/site_sbatch")
    with UploadHub() as hub:
        log_in(hub, tmp_path, monkeypatch)
        publish_all(["mine", "lab", *RAW_ONLY], environment | {"SLURM_NTASKS": "8", "RANK": "0", "SLURM_CONF": "/c"})
    given = (tmp_path / "env").read_text()  # from inside a job too
    assert "SLURM_CONF" in given and "SLURM_NTASKS" not in given and "RANK" not in given
    assert [job[:2] for job in jobs(tmp_path)] == [["--check", "--parsable"]] * 3
    (tmp_path / "bin/site_sbatch").unlink()
    with pytest.raises(UserError, match=r"site\.yml:1: submit_command: .*site_sbatch"):
        publish_all(["mine", "lab", "--dry-run"], environment)


def test_folders_and_flags_of_the_cluster_profile(tmp_path, environment, runs, capsys):
    (tmp_path / "site.yml").write_text(f"folders: {{checkpoints: {runs}, logs: {tmp_path}/logs}}\npartition: gpu\n")
    del environment["DEEPY_CHECKPOINTS"]
    publish_all(["mine", "lab", "--dry-run", "--cluster=site"], {**environment, "DEEPY_CLUSTERS": str(tmp_path)})
    first = shlex.split(capsys.readouterr().out.splitlines()[0])
    flags = {"--partition=gpu", f"--output={tmp_path}/logs/%x-%j.out", "--export=ALL,DEEPY_CLUSTER=site", "--gpus=0"}
    assert flags <= set(first) and "--cluster=site" in split(first[1:])[1]

"""How many ranks go where, and launchers on several hosts with stand-ins for pdsh, srun and mpirun."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cluster import launch as launching
from megatron.cluster.launch import Placement, place
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
num_layers: 4
hidden_size: 16
num_attention_heads: 2
seq_length: 8
train_micro_batch_size_per_gpu: 1
train_iters: 2
tokenizer_type: CharLevelTokenizer
"""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "count_gpus", lambda env: int(env.get("GPUS", "0")))


def args(folder: Path, *overrides: str) -> NeoXArgs:
    (folder / "run.yml").write_text(CONFIG)
    return NeoXArgs.from_files([str(folder / "run.yml")], list(overrides))


def placed(folder: Path, *overrides: str, **env: str) -> Placement:
    return place(args(folder, *overrides), env, default_hostfile=str(folder / "no such file"))


def hosts(folder: Path, text: str) -> str:
    (folder / "hosts").write_text(text)
    return f"hostfile={folder / 'hosts'}"


@pytest.mark.parametrize(
    ("overrides", "env", "ranks"),
    [
        ((), {}, 1),
        (("model_parallel_size=2", "pipe_parallel_size=2"), {}, 4),
        (("expert_parallel_size=4", "model_parallel_size=2"), {}, 8),
        (("model_parallel_size=2", "num_gpus=6"), {}, 6),
        (("global_num_gpus=3",), {}, 3),
        ((), {"GPUS": "8"}, 8),
        (("num_gpus=2",), {"GPUS": "8"}, 2),
        (("launcher=slurm", "deepspeed_slurm=true"), {}, 1),
        (("include=localhost:1,3",), {"GPUS": "4"}, 2),
    ],
)
def test_ranks_on_this_machine(tmp_path: Path, overrides: tuple[str, ...], env: dict[str, str], ranks: int) -> None:
    placement = placed(tmp_path, *overrides, **env)
    assert placement.launcher is None and placement.world_size == ranks


def test_hostfile_decides_hosts_and_the_launcher_key_who_starts_them(tmp_path: Path) -> None:
    hostfile = hosts(tmp_path, "a slots=4\nb slots=4\n")
    placement = placed(tmp_path, hostfile)
    assert (placement.launcher, placement.world_size, placement.hosts) == ("pdsh", 8, ("a", "b"))
    placement = placed(tmp_path, hostfile, "launcher=slurm", "include=b:0,2")
    assert (placement.launcher, placement.resources) == ("slurm", {"b": [0, 2]})
    assert placed(tmp_path, hostfile, "num_nodes=1").launcher is None  # one host, pdsh: we start the ranks
    assert placed(tmp_path, hostfile, "num_nodes=1", "force_multi=true").launcher == "pdsh"
    assert placed(tmp_path, DLTS_HOSTFILE=str(tmp_path / "hosts")).world_size == 8


def test_inside_a_slurm_job_the_allocation_is_used(tmp_path: Path) -> None:
    env = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}
    placement = placed(tmp_path, "launcher=slurm", **env)
    assert (placement.launcher, placement.world_size, placement.hosts) == ("slurm", 8, ("n1", "n2"))
    assert placed(tmp_path, **env).launcher is None  # launcher: pdsh without hosts is this node


def test_what_cannot_be_placed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="num_nodes=2 .*hostfile=.*launcher=slurm"):
        placed(tmp_path, "num_nodes=2")
    with pytest.raises(UserError, match="global_num_gpus=5"):
        placed(tmp_path, hosts(tmp_path, "a slots=4\nb slots=4\n"), "global_num_gpus=5")
    with pytest.raises(UserError, match="no such file"):
        placed(tmp_path, "hostfile=/nowhere")


def named_in_a_file(folder: Path, *overrides: str) -> NeoXArgs:
    """GPT-NeoX's 125M.yml has `hostfile: /mock_path`, and nobody the file."""
    (folder / "run.yml").write_text(f"{CONFIG}hostfile: /mock_path\n")
    return NeoXArgs.from_files([str(folder / "run.yml")], list(overrides))


def test_a_missing_hostfile_that_a_config_file_names_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in DeepSpeed, which warns and uses this machine."""
    placement = place(named_in_a_file(tmp_path, "num_gpus=2"), {}, default_hostfile=hosts(tmp_path, "a slots=4"))
    assert (placement.launcher, placement.world_size, placement.hosts) == (None, 2, ("localhost",))
    (record,) = caplog.records
    assert record.levelname == "WARNING" and f"{tmp_path / 'run.yml'}:9: hostfile: /mock_path" in record.message
    env = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "8"}
    assert place(named_in_a_file(tmp_path, "launcher=slurm"), env, default_hostfile="/nowhere").world_size == 8


@pytest.mark.parametrize(
    "asks", ["num_nodes=2", "include=worker-1", "exclude=worker-1:0", "global_num_gpus=16 num_gpus=8"]
)
def test_a_missing_hostfile_is_an_error_where_more_machines_are_asked_for(tmp_path: Path, asks: str) -> None:
    with pytest.raises(UserError, match=rf"run\.yml:9: hostfile: /mock_path .*{asks.split()[0]}"):
        place(named_in_a_file(tmp_path, *asks.split()), {}, default_hostfile="/nowhere")
    with pytest.raises(UserError, match="^hostfile=/mock_path"):
        placed(tmp_path, "hostfile=/mock_path", *asks.split())


@pytest.mark.parametrize("nodes", [None, "n[1-", "n1,n2"])
def test_an_allocation_whose_hosts_are_not_known_is_refused(tmp_path: Path, nodes: str | None) -> None:
    """A list that was cut off would let the ranks wait for each other at another machine."""
    env = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "3", "SLURM_JOB_NUM_NODES": "3"}
    with pytest.raises(UserError, match=f"SLURM_JOB_NODELIST='?{re.escape(nodes or '')}"):
        placed(tmp_path, "launcher=slurm", **env, **({"SLURM_JOB_NODELIST": nodes} if nodes else {}))


@pytest.mark.parametrize(
    ("env", "tool"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"}, "torchrun"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "srun"),
    ],
)
def test_started_once_per_rank_by_another_launcher_it_refuses(tmp_path: Path, env: dict[str, str], tool: str) -> None:
    run = args(tmp_path)
    with pytest.raises(UserError, match=f"started by {tool}"):
        launching.launch("train.py", run, Placement({"localhost": [0]}, 1), env)


# --- the whole way, with stand-ins for the tools that reach other hosts ---

RANKS = """
import hashlib, json, os, sys
from megatron.neox_arguments import NeoXArgs
rank = next(os.environ[k] for k in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID") if k in os.environ)
config = NeoXArgs.from_resolved(open(sys.argv[2]).read())
keys = ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_TEST", "FROM_FILE", "WANDB_API_KEY")
record = {"rank": int(rank), "iters": config.training.train_iters, **{k: os.environ.get(k) for k in keys}}
sys.stdout.write(json.dumps(record) + "\\n")  # one write: the ranks share a pipe
if os.environ.get("NCCL_FAIL") == rank: sys.exit(4)
"""

# pdsh runs the remote command once per host; this one uses the local shell and leaves HOSTS' environment bare.
PDSH = """#!/usr/bin/env python3
import os, subprocess, sys
hosts, command = sys.argv[sys.argv.index("-w") + 1].split(","), sys.argv[-1]
assert os.environ["PDSH_RCMD_TYPE"] == "ssh"
bare = {k: os.environ[k] for k in ("PATH", "HOME")}
runs = [subprocess.Popen(["sh", "-c", command.replace("%n", str(n))], env=bare, cwd="/") for n in range(len(hosts))]
sys.exit(max(run.wait() for run in runs))
"""
# srun and mpirun start every rank; options before the program are skipped, their number of tasks is not.
STARTER = """#!/usr/bin/env python3
import os, subprocess, sys
name = os.path.basename(sys.argv[0])
rank, extra = ("SLURM_PROCID", {}) if name == "srun" else ("OMPI_COMM_WORLD_RANK", {})
for i, word in enumerate(sys.argv):
    if word == "-x": extra.update([sys.argv[i + 1].split("=", 1)])
program = sys.argv[sys.argv.index(PYTHON):]
count = int(sys.argv[sys.argv.index("-n") + 1])
runs = [subprocess.Popen(program, env={**os.environ, **extra, rank: str(r)}) for r in range(count)]
codes = [run.wait() for run in runs]
sys.exit(1 if any(codes) else 0)
"""


def start(folder: Path, *overrides: str, more: str = "", **env: str) -> tuple[int, list[dict], str]:
    """deepy.py with two made-up hosts; what the ranks reported, by rank."""
    (folder / "bin").mkdir(exist_ok=True)
    tools = {"pdsh": PDSH, "srun": STARTER, "mpirun": STARTER}
    for name, text in tools.items():
        path = folder / "bin" / name
        path.write_text(text.replace("PYTHON", repr(sys.executable)))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (folder / "ranks.py").write_text(RANKS + more)
    (folder / "run.yml").write_text(CONFIG)
    (folder / ".deepspeed_env").write_text("FROM_FILE=a b\n")
    drop = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    base = {k: v for k, v in os.environ.items() if k not in drop and not k.startswith(("SLURM", "OMPI"))}
    base |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "NCCL_TEST": "x", "WANDB_API_KEY": "secret", "HOME": "/"}
    command = [sys.executable, str(ROOT / "deepy.py"), "ranks.py", "run", hosts(folder, "h0 slots=2\nh1 slots=1\n")]
    command += ["master_addr=127.0.0.1", *overrides]
    done = subprocess.run(command, cwd=folder, env=base | env, capture_output=True, text=True, timeout=60, check=False)
    text = done.stdout + done.stderr
    records = [json.loads(line[line.index("{") :]) for line in text.splitlines() if '{"rank"' in line]
    return done.returncode, sorted(records, key=lambda record: record["rank"]), text


def test_pdsh_reaches_every_rank_with_config_and_variables_by_value(tmp_path: Path) -> None:
    rc, records, text = start(tmp_path, "train_iters=7")
    assert rc == 0, text
    assert [record["rank"] for record in records] == [0, 1, 2]
    assert [record["LOCAL_RANK"] for record in records] == ["0", "1", "0"]
    for record in records:
        assert record["iters"] == 7 and record["WORLD_SIZE"] == "3" and record["MASTER_ADDR"] == "127.0.0.1"
        assert record["NCCL_TEST"] == "x" and record["FROM_FILE"] == "a b" and record["WANDB_API_KEY"] is None
    assert "WANDB_API_KEY" in text and "secret" not in text  # it is said that the key was kept back


def test_pdsh_ends_with_the_code_of_the_failing_rank(tmp_path: Path) -> None:
    rc, _, text = start(tmp_path, NCCL_FAIL="2")
    assert rc == 4 and re.search(r"rank 2 of 3 .*code 4\b", text)


@pytest.mark.parametrize(("launcher", "caps"), [("openmpi", ()), ("slurm", ("num_gpus=1",))])
def test_launchers_that_start_every_rank_themselves(tmp_path: Path, launcher: str, caps: tuple[str, ...]) -> None:
    rc, records, text = start(tmp_path, f"launcher={launcher}", "train_iters=7", *caps)
    assert rc == 0, text
    assert [record["rank"] for record in records] == list(range(2 if caps else 3))
    for record in records:
        assert record["iters"] == 7 and record["MASTER_ADDR"] == "127.0.0.1" and record["MASTER_PORT"] == "29500"
        assert record["NCCL_TEST"] == "x" and record["FROM_FILE"] == "a b"
    assert list(tmp_path.glob(".deepy-resolved*")) == []  # the shared copy is gone again


def test_jobs_of_slurm_that_share_a_node_have_ports_of_their_own(tmp_path: Path) -> None:
    def port(launcher: str, *overrides: str, **env: str) -> int:
        placement = Placement({}, 2, launcher, ("a", "b"))
        return launching._multi_node_job("x.py", args(tmp_path, *overrides), placement, env, "FILE", "a").master_port

    assert [port("slurm", SLURM_JOB_ID=job) for job in ("4007", "4008")] == [29507, 29508]
    assert port("slurm", SLURM_JOB_ID="4007", MASTER_PORT="7000") == 7000
    assert port("slurm", "master_port=6000", SLURM_JOB_ID="4007", MASTER_PORT="7000") == 6000
    assert port("slurm") == port("pdsh", SLURM_JOB_ID="4007") == 29500


def test_the_run_s_own_account_replaces_a_flattened_exit_code(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    status = {"state": "failed", "step": 5, "reason": "nan", "exit_code": 4}
    more = f"\njson.dump({status}, open('run/status.json', 'w'))\nsys.exit(4)"
    rc, _, text = start(tmp_path, "launcher=openmpi", "save=run", more=more)
    assert rc == 4 and "failed at step 5: nan" in text


def test_the_command_can_be_shown_before_it_is_run(tmp_path: Path) -> None:
    run = args(tmp_path, hosts(tmp_path, "a slots=4\nb slots=4\n"))
    shown = launching.command_preview("train.py", run, place(run, {}), {})
    assert shown.startswith("pdsh -S -b -N -f 1024 -w a,b ") and "--config=... train.py" in shown
    shown = launching.command_preview("train.py", run, Placement({"a": [0]}, 1, "slurm", ("a",)), {})
    assert shown.startswith("srun -n 1 --nodelist a ") and shown.endswith("-u train.py --resolved FILE")
    assert "once per rank" in launching.command_preview("train.py", run, Placement({"localhost": [0]}, 1), {})


def test_where_only_ssh_knows_the_first_host_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(
        '#!/bin/sh\ncase "$*" in *" known hostname -I") echo 10.1.2.3 fe80::1;; *) exit 255;; esac\n'
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def unresolved(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(launching.socket, "getaddrinfo", unresolved)
    run = args(tmp_path)
    address = launching._master_address
    assert address(run, Placement({}, 2, "pdsh", ("known", "b")), {}) == "10.1.2.3"
    with pytest.raises(UserError, match="key-based ssh"):
        address(run, Placement({}, 2, "pdsh", ("other", "b")), {})
    assert address(run, Placement({}, 2, "pdsh", ("other", "b")), {"MASTER_ADDR": "x"}) == "x"
    assert address(args(tmp_path, "master_addr=y"), Placement({}, 2, "pdsh", ("other", "b")), {}) == "y"
    with pytest.raises(UserError, match="set master_addr"):
        address(args(tmp_path, "no_ssh_check=true"), Placement({}, 2, "pdsh", ("other", "b")), {})


def test_in_a_slurm_job_no_ssh_is_needed_for_the_address_of_the_first_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that only SLURM knows; `.invalid` never resolves."""
    shown = "NodeName=n1.invalid Arch=x86_64 NodeAddr=127.0.0.5 NodeHostName=vm Version=22.05.8"
    for tool, text in {
        "scontrol": f'[ "$*" = "--oneliner show node n1.invalid" ] && echo "{shown}"',
        "ssh": "false",
    }.items():
        (tmp_path / tool).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = args(tmp_path)
    assert launching._master_address(run, Placement({}, 2, "slurm", ("n1.invalid", "n2.invalid")), {}) == "127.0.0.5"
    with pytest.raises(UserError, match="n2.invalid does not resolve"):
        launching._master_address(run, Placement({}, 2, "slurm", ("n2.invalid",)), {})


def test_a_launcher_that_is_not_installed_is_named(tmp_path: Path) -> None:
    rc, _, text = start(tmp_path, PATH="/nonexistent")
    assert rc == 2 and "needs pdsh" in text

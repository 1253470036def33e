"""deepy.py as a user starts it: help, explain, local ranks, exit codes, no heavy imports in the parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]
DEEPY = str(ROOT / "deepy.py")
CONFIG = """\
num_layers: 4
hidden_size: 16
num_attention_heads: 2
seq_length: 8
train_micro_batch_size_per_gpu: 1
train_iters: 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yml").write_text(CONFIG)
    (tmp_path / "ranks.py").write_text("print('ranks ran')\n")
    return tmp_path


def environment() -> dict[str, str]:
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DLTS_HOSTFILE", "OMP_NUM_THREADS", "PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if k not in drop and not k.startswith(("SLURM", "OMPI"))}
    return env | {"DS_ACCELERATOR": "cpu"}


def deepy(folder: Path, *argv: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, DEEPY, *argv]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


def test_help_needs_no_config() -> None:
    done = deepy(ROOT, "--help")
    assert done.returncode == 0 and "examples:" in done.stdout and "exit codes:" in done.stdout


def test_explain_shows_value_source_default_and_meaning(folder: Path) -> None:
    done = deepy(
        folder, "ranks.py", "run", "train_iters=7", "--explain", "train_iters", "--explain", "train_batch_size"
    )
    assert done.returncode == 0
    assert "train_iters = 7" in done.stdout and "command line" in done.stdout
    assert "train_batch_size = 1" in done.stdout and "derived" in done.stdout
    assert "ranks ran" not in done.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("ranks.py", "run", "train_itres=3"), "Did you mean 'train_iters'?"),
        (("ranks.py", "run", "num_layers=many"), "num_layers"),
        (("ranks.py", "run", "model_parallel_size=2", "num_gpus=3"), "nearest 2 or 4"),
        (("ranks.py", "run", "model_parallel_size=2", "num_gpus=4", "train_batch_size=7"), "7"),
        (("ranks.py", "runs"), "runs.yml: no such config file"),
        (("ranks.py", "run", "--hostfile", "/nowhere/hosts"), "/nowhere/hosts"),
        (("ranks.py", "run", "master_port=99999"), "master_port=99999 is not a port number"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(folder: Path, argv: tuple[str, ...], message: str) -> None:
    done = deepy(folder, *argv)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr and "ranks ran" not in done.stdout


def test_the_parent_imports_neither_torch_nor_deepspeed(folder: Path) -> None:
    code = (
        "import atexit, runpy, sys; sys.argv = ['deepy.py', 'ranks.py', 'run.yml']\n"
        "heavy = {'torch', 'deepspeed', 'transformers'}\n"
        "atexit.register(lambda: print('heavy:', sorted(heavy & set(sys.modules))))\n"
        f"runpy.run_path({DEEPY!r}, run_name='__main__')\n"
    )
    env = environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0 and "ranks ran" in done.stdout and "heavy: []" in done.stdout, done.stderr


def test_ranks_get_the_merged_config_by_a_private_file_that_is_gone_afterwards(folder: Path) -> None:
    (folder / "ranks.py").write_text(
        "import os, stat, sys\n"
        "from megatron.neox_arguments import NeoXArgs\n"
        "args = NeoXArgs.from_resolved(open(sys.argv[2]).read())\n"
        "print(sys.argv[1], args.training.train_iters, args.source('train_iters'), os.environ['WORLD_SIZE'])\n"
        "print(oct(stat.S_IMODE(os.stat(sys.argv[2]).st_mode)), sys.argv[2])\n"
    )
    done = deepy(folder, "ranks.py", "run", "train_iters=9", "num_gpus=2")
    first, second = done.stdout.splitlines()
    assert first == "--resolved 9 command line 2"
    mode, path = second.split()
    assert mode == "0o600" and not Path(path).exists()


def test_a_free_port_is_used_unless_one_is_asked_for(folder: Path) -> None:
    (folder / "ranks.py").write_text("import os\nprint(os.environ['MASTER_PORT'], os.environ['MASTER_ADDR'])\n")
    port, address = deepy(folder, "ranks.py", "run").stdout.split()
    assert 1024 < int(port) < 65536 and address == "127.0.0.1"
    assert deepy(folder, "ranks.py", "run", f"master_port={port}").stdout.split()[0] == port
    with socket.create_server(("127.0.0.1", int(port))):
        taken = deepy(folder, "ranks.py", "run", f"master_port={port}")
    assert taken.returncode == 2 and f"master_port={port} cannot be used" in taken.stderr


def test_a_failing_rank_ends_the_job_with_its_own_code_and_words(folder: Path) -> None:
    (folder / "ranks.py").write_text(
        "import os, sys, time\n"
        "from megatron.errors import NumericsError, run_cli\n"
        "def main():\n"
        "    if os.environ['RANK'] == '2': raise NumericsError('loss is nan at step 3')\n"
        "    time.sleep(60)\n"
        "run_cli(main)\n"
    )
    start = time.monotonic()
    done = deepy(folder, "ranks.py", "run", "model_parallel_size=2", "pipe_parallel_size=2", "save=ckpt")
    assert done.returncode == 4
    assert time.monotonic() - start < 45  # the others would have slept for 60
    assert done.stderr.rstrip().endswith("NumericsError: loss is nan at step 3")
    assert "rank 2 of 4 failed" in done.stderr
    assert (folder / "ckpt/logs/rank_2.log").read_text().rstrip().endswith("NumericsError: loss is nan at step 3")


def test_ctrl_c_lets_the_ranks_save_and_ends_with_code_3(folder: Path) -> None:
    (folder / "ranks.py").write_text(
        "import os, signal, sys, time\n"
        "def stop(*_):\n"
        "    open('saved' + os.environ['RANK'], 'w').close(); sys.exit(3)\n"
        "signal.signal(signal.SIGINT, stop)\n"  # what the trainer listens to, besides others
        "open('up' + os.environ['RANK'], 'w').close()\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, DEEPY, "ranks.py", "run", "num_gpus=2"]
    process = subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not all((folder / f"up{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 3 and "Traceback" not in err
    assert (folder / "saved0").exists() and (folder / "saved1").exists()


def test_missing_files_are_refused_before_any_rank_starts(folder: Path) -> None:
    (folder / "train.py").write_text("print('ranks ran')\n")
    (folder / "generate.py").write_text("print('ranks ran')\n")
    char = ("tokenizer_type=CharLevelTokenizer",)
    for argv, message in [
        (("train.py", "run", *char), "set data_path"),
        (("train.py", "run", *char, "data_path=/nowhere/data"), "/nowhere/data"),
        (("train.py", "run", "tokenizer_type=HFTokenizer", "vocab_file=/nowhere.json", "data_path=x"), "x"),
        (("generate.py", "run", *char), "load is not set"),
        (("generate.py", "run", *char, "load=/nowhere"), "/nowhere"),
    ]:
        done = deepy(folder, *argv)
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert "ranks ran" not in done.stdout

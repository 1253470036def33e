"""`--prepare`: what it builds is what the run looks for, whatever the run's size; what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.tokens.indexed import HEADER
from megatron.errors import UserError
from megatron.neox_arguments import NeoXArgs
from megatron.plan.prepare import prepare

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]


def deepy(*arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DLTS_HOSTFILE")
    env = {name: value for name, value in os.environ.items() if name not in drop and not name.startswith("SLURM")}
    return subprocess.run(
        [sys.executable, str(ROOT / "deepy.py"), str(ROOT / "train.py"), *map(str, arguments)],
        env=env | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def prepared(config: Path, *overrides: str, ranks: int | None = None) -> str:
    return prepare(NeoXArgs.from_files([str(config)], list(overrides)), ranks, "train.py")


def entries(folder: Path) -> dict[str, int]:
    """Every file of a cache with the time it was written."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_run_builds_nothing_any_more(run_config: Path, tmp_path: Path) -> None:
    options = [f"data_cache_path={tmp_path / 'cache'}", "train_iters=2", "eval_interval=1", "log_interval=1"]
    done = deepy(run_config, *options, "--prepare")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stderr.count("building ") == 3
    assert done.stdout.count("built ") == 3 and done.stdout.rstrip().endswith("builds nothing.")
    made = entries(tmp_path / "cache")
    assert len([name for name in made if name.endswith("meta.json")]) == 3
    done = deepy(run_config, *options)
    assert done.returncode == 0, done.stderr
    assert entries(tmp_path / "cache") == made
    again = deepy(run_config, *options, "--prepare")
    assert again.returncode == 0 and again.stdout.count("found ") == 3 and "built " not in again.stdout


@pytest.mark.slow
def test_a_resumed_run_is_prepared_from_where_it_resumes(run_config: Path, tmp_path: Path) -> None:
    """Longer than its data were planned for: the past is kept, what is added is built ahead."""
    options = [
        f"data_cache_path={tmp_path / 'cache'}",
        f"save={tmp_path / 'save'}",
        "eval_iters=0",
        "train_batch_size=4",
    ]
    assert deepy(run_config, *options, "train_iters=2").returncode == 0
    first = entries(tmp_path / "cache")
    longer = [*options, "train_iters=2000", "override_lr_scheduler=true"]
    done = deepy(run_config, *longer, "--prepare")
    assert done.returncode == 0, done.stderr
    assert "global_step2" in done.stdout and done.stdout.count("found ") == 1 and done.stdout.count("built ") == 1
    second = entries(tmp_path / "cache")
    assert first.items() <= second.items() and len(second) == 2 * len(first)
    done = deepy(run_config, *longer, "exit_interval=1")
    assert done.returncode == 0, done.stderr
    assert "training ends at iteration 3" in done.stderr
    assert entries(tmp_path / "cache") == second


def test_nothing_heavy_is_imported() -> None:
    check = (
        "import sys, megatron.plan.prepare; sys.exit(bool({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_ranks_that_are_not_here(run_config: Path) -> None:
    given = run_config.read_text().replace("train_batch_size: 16\n", "")
    run_config.write_text(given)
    text = prepared(run_config, "global_num_gpus=64", "model_parallel_size=2", "pipe_parallel_size=2")
    assert "train_batch_size 32 on 64 ranks, 100 steps" in text  # micro 2 x dp 16
    assert "train_batch_size 64 on 128 ranks" in prepared(
        run_config, "num_gpus=8", "num_nodes=16", "model_parallel_size=4"
    )
    assert "train_batch_size 8 on 4 ranks" in prepared(run_config, ranks=4)


def test_an_unknown_number_of_ranks_is_reported(run_config: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared(run_config)
    assert "global_num_gpus" not in caplog.text  # the batch size is in the config
    run_config.write_text(run_config.read_text().replace("train_batch_size: 16\n", ""))
    prepared(run_config)
    assert "set global_num_gpus or train_batch_size" in caplog.text


def test_a_cache_per_node_is_reported(run_config: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = prepared(run_config, f"data_cache_path={tmp_path / 'cache'}", "use_shared_fs=false")
    assert f"prepares {os.uname().nodename} alone" in caplog.text
    assert f"{tmp_path}/cache.{os.uname().nodename}/" in text


def test_epochs_become_steps(run_config: Path) -> None:
    run_config.write_text(run_config.read_text().replace("train_iters: 100", "train_epochs: 2"))
    # 80 documents of 200 tokens, twice, in samples of 16: 1999; batches of 16: 124 steps
    assert ", 124 steps," in prepared(run_config)


def test_npy_data(run_config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "olmo"
    folder.mkdir()
    for part in range(2):
        documents = np.tile(np.asarray([*range(1, 50), 0], "<u2"), 100)  # CharLevelTokenizer ends documents with 0
        documents.tofile(folder / f"part-{part}.npy")
    files = f"data_path={folder}/part-*.npy"
    text = prepared(run_config, files, "npy_dtype=uint16")
    assert text.count("part-*.npy-packed-") == 3 and "part-0-documents-" in text
    assert len([line for line in text.splitlines() if line.startswith("  built")]) == 5
    assert [row.split()[2] for row in text.splitlines() if row.startswith("  train ")] == ["160"]
    assert "built " not in prepared(run_config, files)  # the type is found out too


def test_what_is_wrong_is_one_message(run_config: Path, tokens: Callable[..., str], tmp_path: Path) -> None:
    prefix = tmp_path / "bad"
    for suffix in (".bin", ".idx"):
        prefix.with_suffix(suffix).write_bytes(Path(tokens(100, 200) + suffix).read_bytes())
    with prefix.with_suffix(".idx").open("r+b") as file:
        file.seek(HEADER.size + 4 * 100 + 8)
        file.write((7).to_bytes(8, "little"))
    done = deepy(run_config, f"data_path={prefix}", "--prepare")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "item 1 begins at byte 7" in done.stderr
    assert not list(tmp_path.glob("index_cache/*"))
    assert deepy(run_config, "data_path=/no/such/data", "--prepare").returncode == 2
    with pytest.raises(UserError, match="eval.py does not use"):
        prepare(NeoXArgs.from_files([str(run_config)], []), None, "eval.py")


def test_a_cache_that_cannot_be_kept_is_no_success(run_config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="data_cache_path"):
        prepared(run_config, f"data_cache_path={tmp_path / 'file' / 'cache'}")

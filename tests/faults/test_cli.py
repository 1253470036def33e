"""Wrong input on the command line: exit code 2, one message, no traceback, nothing written; a dry run says the same.

Most of it is refused before any rank starts, so a case costs two short processes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint.lock import SaveLock
from megatron.tokenizer import create_tokenizer
from tests.checkpoint.test_find import put
from tests.faults.commands import CONFIG, ROOT, deepy, deepy_here, environment, files, make_folder

pytestmark = pytest.mark.cpu

Change = Callable[[Path], object]


def replace(old: str, new: str) -> Change:
    """Write the config with a line changed."""
    assert old in CONFIG

    def change(folder: Path) -> None:
        (folder / "run.yml").write_text(CONFIG.replace(old, new), encoding="utf-8")

    return change


def cut(name: str, count: int) -> Change:
    """Take bytes off the end of a file."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - count)


def foreign_tokenizer(folder: Path) -> None:
    """Data whose manifest says that another tokenizer made it."""
    from megatron.data.tokens.builder import IndexedDatasetBuilder
    from megatron.data.tokens.manifest import finalize_with_manifest

    with IndexedDatasetBuilder(folder / "data/x", "uint16") as builder:
        builder.add_document([65] * 40)
        finalize_with_manifest(builder, tokenizer=create_tokenizer("bytes").fingerprint(), source="test")


def swapped_pointers(folder: Path) -> None:
    """The index says that items 1 and 2 are where the other is."""
    raw = bytearray((folder / "data/x.idx").read_bytes())
    at = 34 + 4 * 20 + 8
    raw[at : at + 16] = raw[at + 8 : at + 16] + raw[at : at + 8]
    (folder / "data/x.idx").write_bytes(raw)


def one_bit(folder: Path) -> None:
    """Data with a manifest, damaged after it was written."""
    from megatron.data.tokens.builder import IndexedDatasetBuilder
    from megatron.data.tokens.manifest import finalize_with_manifest

    with IndexedDatasetBuilder(folder / "data/x", "uint16") as builder:
        for _ in range(20):
            builder.add_document([65] * 40)
        finalize_with_manifest(builder, tokenizer=None, source="test")
    raw = bytearray((folder / "data/x.bin").read_bytes())
    raw[100] ^= 1
    (folder / "data/x.bin").write_bytes(raw)


def hugging_face_folder(folder: Path) -> None:
    (folder / "hf").mkdir()
    (folder / "hf/config.json").write_text("{}")


def other_architecture(folder: Path) -> None:
    put(folder / "ckpt", 4, hidden_size=32, num_layers=2)


def nothing(folder: Path) -> None:
    """The files are as they should be; the arguments are wrong."""


CASES: dict[str, tuple[tuple[str, ...], Change, str]] = {
    # 65: keys and types
    "unknown key": ((), replace("num-layers", "num-layer"), r"run\.yml:1: unknown key .*Did you mean 'num_layers'"),
    "wrong type": (("hidden_size=wide",), nothing, r"hidden_size: expected a whole number, got 'wide'"),
    "key twice": ((), replace("seq_length: 8\n", "seq_length: 8\nseq-length: 9\n"), r"run\.yml:5: .*run\.yml:4"),
    "learning rate twice": (
        (),
        replace("lr: 1.0e-3", "lr: 1.0e-3, lr: 2.0e-3"),
        r"run\.yml:10: optimizer\.params\.lr is already set at",
    ),
    "name of a back-end": (("attention_backend=trch",), nothing, r"attention_backend.*Did you mean 'torch'"),
    "not available": (("use_bnb_optimizer=true",), nothing, r"use_bnb_optimizer.*not available"),
    # 58, 63: data
    "no such data": (("data_path=data/y",), nothing, r"no dataset 'data/y'.*Datasets in data: data/x"),
    "no data here": (("data_path=y",), nothing, r"Datasets below the working directory: data/x"),
    "comma": (("data_path=data/x,data/x",), nothing, r"did you mean a list\?"),
    "index cut short": ((), cut("data/x.idx", 8), r"data/x\.idx.* 442 bytes, but the file has 434"),
    "tokens cut short": ((), cut("data/x.bin", 1), r"data/x\.bin.* 1600 bytes of tokens, but the file has 1599"),
    "index with swapped pointers": ((), swapped_pointers, r"data/x\.idx: item 1 begins at byte 160, .* end at 80"),
    "one bit of the tokens": (
        (),
        one_bit,
        r"data/x\.bin: bin_sample_crc32 is \d+, but data/x\.manifest\.json says \d+",
    ),
    "nothing to train on": (("split=0,50,50",), nothing, r"gives train none of the 20 documents of data/x"),
    "too few tokens": (
        ("seq_length=900", "max_position_embeddings=900"),
        nothing,
        r"data/x \(train, 20 documents\): 800 tokens are too few; .* needs at least 901 tokens",
    ),
    "no tokens": ((), lambda folder: (folder / "data/x.bin").unlink(), r"data/x\.bin is missing"),
    # 77: tokenizer
    "other tokenizer": ((), foreign_tokenizer, r"data/x was made with another tokenizer than this run's CharLevel"),
    "no vocabulary": (
        ("tokenizer_type=HFTokenizer", "vocab_file=nowhere.json"),
        nothing,
        r"vocab_file: no such file: nowhere\.json",
    ),
    # 64, 44: batches and layouts
    "batch": (
        ("num_gpus=4", "model_parallel_size=2", "train_batch_size=12", "train_micro_batch_size_per_gpu=4"),
        nothing,
        r"12 is not a multiple of micro 4 x dp 2 = 8; nearest 8 or 16",
    ),
    "no batch": (
        (),
        replace("train_micro_batch_size_per_gpu: 1\n", ""),
        r"train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps",
    ),
    "ranks": (("num_gpus=3", "model_parallel_size=2"), nothing, r"3 ranks .*model_parallel_size 2.*nearest 2 or 4"),
    "heads over ranks": (("model_parallel_size=4",), nothing, r"num_attention_heads 2 cannot be split over 4"),
    "key/value heads over ranks": (
        ("model_parallel_size=2", "num_kv_heads=1"),
        nothing,
        r"num_kv_heads 1 cannot be split over 2",
    ),
    "2 layers over 4 stages": (("pipe_parallel_size=4",), nothing, r"4 stages cannot share 2 layers"),
    # 20, 38: checkpoints
    "load of an empty folder": (
        ("load=empty",),
        lambda folder: (folder / "empty").mkdir(),
        r"load: no checkpoint in empty: .*it is empty",
    ),
    "load of nothing": (("load=nowhere",), nothing, r"load: folder nowhere does not exist"),
    "load of a Hugging Face folder without weights": (("load=hf",), hugging_face_folder, r"load: hf holds no weights"),
    "iteration that is not there": (
        ("load=ckpt", "iteration=3"),
        lambda folder: [put(folder / "ckpt", step) for step in (2, 4)],
        r"no complete checkpoint of iteration 3 in ckpt: complete steps: \[2, 4\]",
    ),
    "the only checkpoint is cut short": (
        ("save=ckpt",),
        lambda folder: (put(folder / "ckpt", 4), cut("ckpt/global_step4/mp_rank_00_model_states.pt", 9)(folder)),
        r"save: ckpt holds .*global_step4 \(mp_rank_00_model_states\.pt has \d+ bytes.*restart_if_damaged=true",
    ),
    "another architecture": (
        ("save=ckpt",),
        other_architecture,
        r"architecture: hidden_size: 32 in the checkpoint, now 16",
    ),
    "another learning rate": (
        ("save=ckpt",),
        lambda folder: put(folder / "ckpt", 4, lr=2e-3),
        r"lr: 0\.002 in the checkpoint, now 0\.001.*override_lr_scheduler",
    ),
    "save is a file": (("save=run.yml",), nothing, r"save: run\.yml is not a folder"),
    "save below a file": (("save=run.yml/ckpt",), nothing, r"save: run\.yml/ckpt cannot be made: run\.yml is not"),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_input_is_refused_by_run_and_dry_run_alike(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    argv, change, message = CASES[case]
    change(make_folder(tmp_path))
    before = files(tmp_path)
    said = []
    for extra in ((), ("--dry-run",)):
        code, out, err = deepy_here(monkeypatch, capfd, tmp_path, *argv, *extra)
        assert code == 2, err
        assert "Traceback" not in err
        assert not out or (extra and "the run would not start" in out)  # a plan of the rest, where there can be one
        assert len(re.findall(r"^error: ", err, re.MULTILINE)) == 1, err
        said.append(err[err.index("error: ") :])
        assert re.search(message, said[-1], re.DOTALL), err
        assert files(tmp_path) == before
    assert said[0] == said[1]


@pytest.mark.parametrize("extra", [(), ("--dry-run",)])
def test_a_folder_that_another_job_writes(
    tmp_path: Path, extra: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path)
    monkeypatch.setattr("megatron.checkpoint.lock.WATCH_SECONDS", 0.5)
    with SaveLock(tmp_path / "ckpt"):
        before = files(tmp_path)
        code, out, err = deepy_here(monkeypatch, capfd, tmp_path, "save=ckpt", *extra)
        assert code == 2 and ("the run would not start" in out if extra else not out), err
        assert re.search(rf"error: ckpt .*process {os.getpid()} on .*`save`", err)
        assert ("waiting up to" in err) == (not extra)  # a plan is not kept waiting
        assert "Traceback" not in err and files(tmp_path) == before


def test_the_dry_run_prints_a_warning_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path)
    code, _, err = deepy_here(monkeypatch, capfd, tmp_path, "eval_iters=2", "split=999,1", "--dry-run")
    assert code == 0 and err.count("no valid loss") == 1


@pytest.mark.parametrize("given", ["precision=fp16", "attention_backend=flex"])
def test_what_a_cpu_cannot_do_is_refused_before_a_rank_starts(
    tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """84: a plan for another machine may still be made here, and says so."""
    before = files(make_folder(tmp_path))
    code, out, err = deepy_here(monkeypatch, capfd, tmp_path, given)
    assert (code, out) == (2, "") and f"error: {given.replace('=', ': ')} " in err
    assert "rank 0" not in err
    code, out, _ = deepy_here(monkeypatch, capfd, tmp_path, given, "--dry-run")
    assert code == 0 and f"no GPU\n  {given.replace('=', ': ')} " in out
    assert files(tmp_path) == before


@pytest.mark.parametrize("argv", [("load=empty",), ("load=hf",), ("load=nowhere",), ()], ids=str)
def test_generation_never_starts_from_random_weights(
    tmp_path: Path, argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """20: an empty folder, one of Hugging Face without weights, none at all."""
    make_folder(tmp_path)
    (tmp_path / "empty").mkdir()
    hugging_face_folder(tmp_path)
    before = files(tmp_path)
    for script in ("generate.py", "eval.py"):
        for extra in ((), ("--dry-run",)):
            given = (*argv, "eval_tasks=[lambada_openai]", *extra)
            code, out, err = deepy_here(monkeypatch, capfd, tmp_path, *given, script=script)
            planned = extra and argv != ("load=hf",)  # without what the model's files say there is nothing to plan
            assert code == 2 and ("the run would not start" in out if planned else not out) and "Traceback" not in err
            looked_for = argv[0].removeprefix("load=") if argv else "is not set"
            assert re.search(rf"^error: load.*{looked_for}", err, re.MULTILINE), err
    assert files(tmp_path) == before


def test_a_rank_of_another_launcher_shows_all_that_is_wrong_and_missing(tmp_path: Path) -> None:
    """`train.py` itself, as torchrun and srun start it: nobody has checked the config before."""
    make_folder(tmp_path)
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        "run.yml",
        "train_iters=",
        "data_path=",
        "hidden_size=x",
        "lr=-1",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stderr[done.stderr.index("error: ") :].splitlines()
    assert done.returncode == 2 and "4" in lines[0] and len(lines) == 5, done.stderr
    for said in ("hidden_size: ", "lr: .*-1", "set train_iters", "set data_path"):
        assert [line for line in lines if re.search(said, line)], said


@pytest.mark.slow
def test_a_rank_that_raises_in_a_step_ends_the_job_within_seconds(tmp_path: Path) -> None:
    """One of two ranks fails; the other waits for it in a collective and must not wait for long."""
    make_folder(tmp_path)
    (tmp_path / "train.py").write_text(
        "import os\n"
        "from megatron.errors import run_cli\n"
        "from megatron.training.engine_deepspeed import DeepSpeedEngine\n"
        "from train_of_deepy import main\n"
        "step = DeepSpeedEngine.train_batch\n"
        "def broken(self, batch, lr):\n"
        "    if batch.step == 1 and os.environ['RANK'] == '1':\n"
        "        open('raised', 'w').close()\n"
        "        raise RuntimeError('rank 1 has had enough')\n"
        "    return step(self, batch, lr)\n"
        "DeepSpeedEngine.train_batch = broken\n"
        "run_cli(main)\n"
    )
    (tmp_path / "train_of_deepy.py").write_text((ROOT / "train.py").read_text(encoding="utf-8"), encoding="utf-8")
    done = deepy(tmp_path, "num_gpus=2", "train_iters=5", "save=ckpt", script=str(tmp_path / "train.py"))
    ended = time.time()
    assert done.returncode == 1
    assert ended - (tmp_path / "raised").stat().st_mtime < 10
    assert "RuntimeError: rank 1 has had enough" in done.stderr
    assert re.search(r"^rank 1 of 2 failed: exit code 1", done.stderr, re.MULTILINE)
    status = json.loads((tmp_path / "ckpt/status.json").read_text())
    assert status["state"] != "ended" and not (tmp_path / "ckpt/latest").exists()

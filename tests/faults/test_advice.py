"""What a message advises is done as it says: each row brings the message, types its advice, and is then accepted.

Of starting and resuming, and of where it is done.
"""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron.callbacks.skipped_steps import SkippedSteps
from megatron.errors import NumericsError, UserError
from megatron.mpu.topology import ranks_from_environment
from megatron.neox_arguments.derive import check_device
from megatron.training.engine import StepOut
from tests.callbacks.fakes import trainer_of
from tests.faults.advice import NEW, Row, Typist
from tests.neox_args.helpers import derived
from tests.training.runs import corpus, run

pytestmark = pytest.mark.cpu

INIT_FROM = r"(init_from=\{[^}]*\})"
FROM_HERE = rf"another `save`, and {INIT_FROM}"
RESUMING = [
    Row("seed", "seed=99", rf"data order: seed: 1234 .* 99\n.*{FROM_HERE}", NEW + " | {0}"),
    Row("seq_length", "seq_length=8", rf"seq_length: 16 .* 8\n.*{FROM_HERE}", NEW + " | {0}"),
    Row("split", "split=70,20,10", rf"split: .*\n.*{FROM_HERE}", NEW + " | {0}"),
    Row("pack_impl", "pack_impl=unpacked", rf"pack_impl: .*\n.*{FROM_HERE}", NEW + " | {0}"),
    Row("two", "seed=9 | optimizer.type=sgd", rf"optimizer_type: .*seed: .*{FROM_HERE}", NEW + " | {0}"),
    Row("with load", "seed=9 | load=ckpt | save=x", rf"(load=null), and {INIT_FROM}", NEW + " | {0} | {1}"),
    Row("optimizer", "optimizer.type=sgd", r"optimizer_type: .*\n.*set (no_load_optim=true)", "{0}"),
    Row("of init_from", "save=x | init_from.path=ckpt | optimizer.type=sgd", rf"\n.*{FROM_HERE}", "{0}"),
    Row("width", "hidden_size=64", r"hidden_size: 32 .* 64\n.*another `save`\.", NEW),
    Row(
        "depth",
        "num_layers=3 | load=ckpt | save=x",
        rf"num_layers: .*(load=null), and {INIT_FROM}",
        NEW + " | {0} | {1}",
    ),
    Row("epsilon", "rms_norm_epsilon=1e-3", r"rms_norm_epsilon: .*set (allow_config_changes=true)", "{0}"),
    Row("schedule kept", "min_lr=2e-5", r"min_lr.*Set (use_checkpoint_lr_scheduler): (true)", "{0}={1}"),
    Row("schedule changed", "min_lr=2e-5", r"min_lr.*or (override_lr_scheduler): (true)", "{0}={1}"),
]


@pytest.mark.parametrize("row", RESUMING, ids=lambda row: row.name)
def test_advice_when_resuming(typist: Typist, row: Row) -> None:
    typist.follow(row)


def lock(folder: Path) -> None:
    held = {"host": socket.gethostname(), "pid": os.getpid(), "token": "x"}
    (folder / "ckpt/lock.json").write_text(json.dumps(held))


def neox(folder: Path) -> None:
    """As much of a checkpoint of GPT-NeoX as is looked at before a rank starts."""
    (folder / "theirs/global_step5").mkdir(parents=True)
    torch.save({"module": {}}, folder / "theirs/global_step5/mp_rank_00_model_states.pt")


def no_manifests(folder: Path) -> None:
    for path in (folder / "ckpt").glob("*/manifest.json"):
        path.unlink()


def other_letters(folder: Path) -> None:
    """A tokenizer of as many tokens as that of the run, 512, which mean something else."""
    tokens = {f"t{i}": i for i in range(511)} | {"<|endoftext|>": 511}
    Tokenizer(WordLevel(tokens, unk_token="t0")).save(str(folder / "other.json"))


def without_optimizer(folder: Path) -> None:
    path = folder / "ckpt/global_step3/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "optimizer": False}))


OTHER_TOKENIZER = "tokenizer_type=HFTokenizer | vocab_file=other.json"
SAVING = [
    Row("all damaged", "", r"set another `save`", NEW, no_manifests),
    Row("all damaged, from zero", "", r"set\s(restart_if_damaged=true)", "{0}", no_manifests),
    Row(
        "lock is a folder",
        "",
        r"(lock\.json) is a folder.* remove it",
        "",
        lambda folder: (folder / "ckpt/lock.json").mkdir(),
        lambda folder: (folder / "ckpt/lock.json").rmdir(),
    ),
    Row("tokenizer", OTHER_TOKENIZER, r"tokenizer_type: .*set (allow_config_changes=true)", "{0}", other_letters),
    Row(
        "tokenizer of init_from",
        f"save=x | init_from.path=ckpt | {OTHER_TOKENIZER}",
        r"tokenizer.*set (allow_config_changes=true)",
        "{0}",
        other_letters,
    ),
    Row(
        "tokenizer of finetune",
        f"save=x | load=ckpt | finetune=true | {OTHER_TOKENIZER}",
        r"tokenizer.*set (allow_config_changes): (true)",
        "{0}={1}",
        other_letters,
    ),
    Row(
        "init_from in save", "save=ckpt/global_step1 | init_from.path=ckpt/global_step1", r"save: is the folder of", NEW
    ),
    Row("held", "", r"choose another `save`", NEW, lock),
    Row(
        "held by nobody", "", r"delete (ckpt/lock\.json)", "", lock, lambda folder: (folder / "ckpt/lock.json").unlink()
    ),
    Row(
        "other data",
        "data_path=more/text_document",
        rf"more/text_document: .*{FROM_HERE}",
        NEW + " | {0}",
        lambda folder: corpus(folder / "more", 8),
    ),
    Row(
        "other data with load",
        "data_path=more/text_document | load=ckpt | save=x",
        rf"more/text_document: .*(load=null), and {INIT_FROM}",
        NEW + " | {0} | {1}",
        lambda folder: corpus(folder / "more", 8),
    ),
    Row(
        "GPT-NeoX's folder",
        "save=theirs",
        r"name another folder in `(save)`",
        "{0}=x",
        neox,
    ),
    Row("GPT-NeoX's weights", "save=x | load=theirs", r"set (finetune): (true)", "{0}={1}", neox),
    Row(
        "GPT-NeoX's step, reset",
        "save=x | init_from.path=theirs",
        r"set (init_from\.\w+=restart) and, .* (init_from\.\w+=reset)",
        "{0} | {1}",
        neox,
    ),
    Row("no optimizer", "save=x | init_from.path=ckpt", r"set (init_from\.optimizer=reset)", "{0}", without_optimizer),
]


@pytest.mark.parametrize("row", SAVING, ids=lambda row: row.name)
def test_advice_about_folders(typist: Typist, row: Row) -> None:
    typist.monkeypatch.setattr("megatron.checkpoint.lock.WATCH_SECONDS", 0.0)
    typist.follow(row)


@pytest.mark.parametrize(
    ("left_out", "says"),
    [
        ("no_save_optim", r"set (no_load_optim): (true)"),
        ("no_save_optim", r"\(init_from\.(optimizer)=(reset)\)"),
        ("no_save_rng", r"set (no_load_rng): (true)"),
    ],
)
def test_advice_for_a_checkpoint_without_something(tmp_path: Path, started: Path, left_out: str, says: str) -> None:
    """This is found by the ranks, which read it."""
    keys = {"data_path": str(started / "data/text_document"), "save": str(tmp_path / "a"), left_out: True}
    assert run({**keys, "exit_interval": 3})[0].exit_code == 0
    (refused,) = run(keys)
    found = re.search(says, refused.error)
    assert refused.exit_code == 2 and found, refused.error
    advice = {found[1]: True}
    if "init_from" in says:
        advice = {"save": str(tmp_path / "b"), "init_from": {"path": str(tmp_path / "a"), found[1]: found[2]}}
    (followed,) = run({**keys, **advice})
    assert followed.exit_code == 0 and followed.steps == [4, 5, 6], followed.error


@pytest.mark.parametrize(
    "says", [r"(precision=bfloat16)", r"(optimizer\.params\.lr=\.\.\. override_lr_scheduler=true)"]
)
def test_advice_when_the_numbers_went_bad(typist: Typist, says: str) -> None:
    bad = StepOut(torch.tensor(torch.nan), torch.tensor(torch.nan), True, 32)
    with pytest.raises(NumericsError) as error:
        trainer_of([SkippedSteps(1)], [bad]).run()
    found = re.search(says, str(error.value))
    assert found
    code, out, err = typist.type(found[1].replace("...", "1e-5").split(), Row("", "", ""))
    assert code == 0 and "step 3" in out, err


@pytest.mark.parametrize(
    ("env", "says", "change"),
    [
        ({"RANK": "1"}, r"set (RANK), (LOCAL_RANK) and (WORLD_SIZE), or unset RANK", {1: "1", 2: "1", 3: "2"}),
        ({"RANK": "1"}, r"set .*, or unset (RANK)", {1: None}),
        ({"OMPI_COMM_WORLD_RANK": "0"}, r"or unset (\w+)", {1: None}),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, r"none of (SLURM_NTASKS), ", {1: "1"}),
        ({"SLURM_PROCID": "0"}, r"but (SLURM_LOCALID) is not; start the processes with srun", {1: "0"}),
    ],
)
def test_advice_about_a_launcher_s_variables(env: dict[str, str], says: str, change: dict[int, str | None]) -> None:
    with pytest.raises(UserError) as error:
        ranks_from_environment(env)
    found = re.search(says, str(error.value))
    assert found, error.value
    changed = {**env, **{found[group]: value for group, value in change.items()}, "SLURM_NTASKS": "1"}
    assert ranks_from_environment({name: value for name, value in changed.items() if value is not None})


def test_advice_of_a_back_end_that_cannot_train_here(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        check_device(derived(tmp_path, attention_backend="flex"), on_gpu=False)
    found = re.search(r"use (attention_backend)=(auto)", str(error.value))
    assert found
    check_device(derived(tmp_path, **{found[1]: found[2]}), on_gpu=False)

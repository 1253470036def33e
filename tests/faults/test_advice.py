"""What a message advises is done as it says: each row brings the message, types its advice, and is then accepted.

Groups of `says` are what the message tells to type. The dry run refuses what the run refuses (test_cli).
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from megatron.callbacks.skipped_steps import SkippedSteps
from megatron.data.tokens.manifest import manifest_path
from megatron.errors import NumericsError, UserError
from megatron.mpu.topology import ranks_from_environment
from megatron.training.engine import StepOut
from tests.callbacks.fakes import trainer_of
from tests.faults.commands import ROOT, deepy_here, environment
from tests.training.runs import KEYS, corpus, run
from tests.training.tiny import Layout

pytestmark = pytest.mark.cpu

NEW = "save=new"  # "another `save`"


@dataclass(frozen=True)
class Row:
    """Overrides `given` (divided by |) bring a message that matches `says`; then those of `typed`, with its groups,
    replace them or are added; `-key` leaves one out. `prepare` and `then` do in the folder what is no override."""

    name: str
    given: str
    says: str
    typed: str = ""
    prepare: Callable[[Path], object] = lambda folder: None
    then: Callable[[Path], object] = lambda folder: None
    script: str = "train.py"
    flag: str = "--dry-run"


@dataclass
class Typist:
    """Types commands in a folder."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    capfd: pytest.CaptureFixture[str]

    def type(self, given: list[str], row: Row) -> tuple[int, str, str]:
        return deepy_here(self.monkeypatch, self.capfd, self.folder, *given, row.flag, script=row.script)

    def follow(self, row: Row, *always: str) -> None:
        row.prepare(self.folder)
        given = [*always, *_list(row.given.format())]
        code, _, err = self.type(given, row)
        found = re.search(row.says, err[err.find("error: ") :], re.DOTALL)
        assert code == 2 and found, f"{code} {err}"
        typed = _list(row.typed.format(*found.groups()))
        replaced = {one.partition("=")[0].removeprefix("-") for one in typed}
        again = [one for one in given if one.partition("=")[0] not in replaced]
        again += [one for one in typed if not one.startswith("-")]
        row.then(self.folder)
        code, out, err = self.type(again, row)
        assert code == 0 and out, f"{again}: {err}"


def _list(text: str) -> list[str]:
    return text.split(" | ") if text else []


@pytest.fixture
def typist(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], started: Path, tmp_path: Path) -> Typist:
    shutil.copytree(started, tmp_path / "run")
    return Typist(tmp_path / "run", monkeypatch, capfd)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run.yml`, and in `ckpt` the checkpoints of steps 1 to 3 of its 6."""
    folder = tmp_path_factory.mktemp("started")
    data = corpus(folder / "data")
    keys = {**KEYS, "checkpoint_factor": 1, "lr_decay_style": "cosine", "min_lr": 1e-5}
    (folder / "run.yml").write_text(yaml.safe_dump({**keys, "data_path": "data/text_document", "save": "ckpt"}))
    (report,) = run({**keys, "data_path": data, "save": str(folder / "ckpt"), "exit_interval": 3}, Layout())
    assert report.exit_code == 0, report.error
    return folder


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
    Row("depth", "num_layers=3 | load=ckpt | save=x", r"num_layers: .*another `save`, (load=null)", NEW + " | {0}"),
    Row("epsilon", "rms_norm_epsilon=1e-3", r"rms_norm_epsilon: .*set (allow_config_changes=true)", "{0}"),
    Row("schedule kept", "min_lr=2e-5", r"min_lr.*Set (use_checkpoint_lr_scheduler): (true)", "{0}={1}"),
    Row("schedule changed", "min_lr=2e-5", r"min_lr.*or (override_lr_scheduler): (true)", "{0}={1}"),
]


@pytest.mark.parametrize("row", RESUMING, ids=lambda row: row.name)
def test_advice_when_resuming(typist: Typist, row: Row) -> None:
    typist.follow(row)


def hosts(folder: Path) -> None:
    (folder / "hosts").write_text("a slots=1\nb slots=1\n")


def second_file(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "run2.yml").write_text(text + "\n")


CONFIG = [
    Row("no length", "train_iters=null", r"set (train_iters) \(or (train_epochs)\)", "{0}=5"),
    Row("no length, epochs", "train_iters=null", r"set (train_iters) \(or (train_epochs)\)", "{1}=1"),
    Row("no data", "data_path=null", r"set (data_path), train_data_paths", "{0}=data/text_document"),
    Row("no data, a list", "data_path=null", r"data_path, (train_data_paths)", "{0}=[data/text_document]"),
    Row("no batch", "train_batch_size=null", r"set (train_micro_batch_size_per_gpu) or", "{0}=2"),
    Row("no batch, total", "train_batch_size=null", r"set .* or (train_batch_size)\b", "{0}=8"),
    Row("batch", "train_batch_size=8 | train_micro_batch_size_per_gpu=3", r"nearest (\d+)", "train_batch_size={0}"),
    Row(
        "name of a key", "hidden_sise=32", r"unknown key 'hidden_sise'\. Did you mean '(\w+)'", "-hidden_sise | {0}=32"
    ),
    Row("name of a value", "norm=rmsnrom", r"Did you mean '(\w+)'", "norm={0}"),
    Row("kv heads", "num_kv_heads=3", r"num_kv_heads: 3 .*use (\d)", "num_kv_heads={0}"),
    Row("heads", "num_attention_heads=5", r"nearest width (\d+)", "hidden_size={0} | num_kv_heads=5 | head_dim=null"),
    Row("stages", "pipe_parallel_size=3", r"use at most (\d) stages", "pipe_parallel_size={0}"),
    Row(
        "stages and ZeRO",
        "pipe_parallel_size=2 | zero_optimization={{stage: 2}}",
        r"use stage (1)",
        "zero_optimization={{stage: {0}}}",
    ),
    Row(
        "kv heads over ranks",
        "model_parallel_size=4",
        r"num_kv_heads 2 .*\((1 or 2|[\d, ]+)\)",
        "model_parallel_size=2",
    ),
    Row(
        "sequence parallel",
        "sequence_parallel=true | model_parallel_size=2 | seq_length=15",
        r"nearest .*?(\d+)",
        "seq_length={0}",
    ),
    Row("width over ranks", "model_parallel_size=2 | intermediate_size=49", r"(mlp_multiple_of): (2)", "{0}={1}"),
    Row("tied blocks", "gpt_j_tied=true", r"gpt_j_tied: needs (gpt_j_residual): (true)", "{0}={1}"),
    Row("placement", "norm_placement=olmo3 | gpt_j_residual=true", r"set (gpt_j_residual): (false)", "{0}={1}"),
    Row("norms of q and k", "use_separate_qk_norms=true | use_qk_layernorm=true", r"keep one", "-use_qk_layernorm"),
    Row("norms per head", "qk_norm_per_head=true", r"needs (use_separate_qk_norms): (true)", "{0}={1}"),
    Row("local layers", "attention_config=[[[local], all]]", r"need (sliding_window_width)", "{0}=4"),
    Row(
        "checkpoint policy",
        "checkpoint_policy=full | checkpoint_activations=false",
        r"checkpoint_activations is false; keep one",
        "-checkpoint_policy",
    ),
    Row("muP", "use_mup=true", r"set (mup_base_hidden_size)", "{0}=16"),
    Row("bias of the head", "use_bias_in_head=true", r"set (no_weight_tying): (true)", "{0}={1}"),
    Row(
        "unit offset",
        "norm=rmsnorm_unit_offset | use_separate_qk_norms=true",
        r"needs (qk_norm_per_head): (true)",
        "{0}={1}",
    ),
    Row("local base", "rotary_emb_base_local=70", r"set (sliding_window_width) or leave", "{0}=4"),
    Row("local base, without", "rotary_emb_base_local=70", r"or leave it out", "-rotary_emb_base_local"),
    Row("caps", "attn_logit_softcapping=2 | attention_backend=torch", r"use (auto)", "attention_backend={0}"),
    Row(
        "scale of queries",
        "query_pre_attn_scalar=4 | use_mup=true | mup_base_hidden_size=16",
        r"set (use_mup): (false)",
        "{0}={1}",
    ),
    Row("experts", "moe_num_experts=4 | moe_top_k=8", r"8 experts per token.* are (4)", "moe_top_k={0}"),
    Row("no experts", "moe_z_loss_coeff=0.1", r"set (moe_num_experts) above 1", "{0}=4"),
    Row("no experts, without", "moe_z_loss_coeff=0.1", r"or leave it out", "-moe_z_loss_coeff"),
    Row("expert ranks", "expert_parallel_size=2 | num_gpus=2", r"use (1)", "expert_parallel_size={0}"),
    Row(
        "sinkhorn",
        "moe_num_experts=4 | moe_router_type=sinkhorn | moe_aux_loss_coeff=0.1",
        r"use (topk)",
        "moe_router_type={0}",
    ),
    Row("learning rates", "run2.yml", r"keep one of the two", "-run2.yml", second_file("lr: 0.1")),
    Row("one key twice", "run2.yml", r"put `(extends): (run.yml)` into", "-run2.yml", second_file("hidden_size: 64")),
    Row("precisions", "fp16.enabled=true | bf16.enabled=true", r"enable one of the two", "-fp16.enabled"),
    Row("stages of ZeRO", "zero_stage=1 | zero_optimization={{stage: 2}}", r"keep one of the two", "-zero_stage"),
    Row(
        "two lengths",
        "run2.yml",
        r"train_iters is set too .*keep one",
        "train_iters=null",
        second_file("train_epochs: 1"),
    ),
    Row(
        "schedulers",
        "override_lr_scheduler=true | use_checkpoint_lr_scheduler=true",
        r"keep one",
        "-override_lr_scheduler",
    ),
    Row("no training", "do_train=false", r"set (train_iters): (0)", "{0}={1} | load=ckpt"),
    Row(
        "profiler",
        "flops_profiler={{enabled: true}} | pipe_parallel_size=2",
        r"\((pipe_parallel_size): (0)\)",
        "{0}={1}",
    ),
    Row("position length", "max_position_embeddings=8", r"8 is below seq_length (16)", "max_position_embeddings={0}"),
    Row(
        "comma",
        "data_path=data/text_document,data/text_document",
        r"(train_data_paths): (\[.*?\])",
        "data_path=null | {0}={1}",
    ),
    Row(
        "paths and data_path",
        "run2.yml",
        r"(data_path): (null) undoes",
        "{0}={1}",
        second_file("train_data_paths: [data/text_document]"),
    ),
    Row(
        "weights",
        "data_path=null | train_data_paths=[data/text_document] | train_data_weights=[1, 2]",
        r"2 weights for (1)",
        "train_data_weights=[1]",
    ),
    Row("init_from and load", "init_from.path=ckpt | load=ckpt", r"keep one of the two", "-load"),
    Row(
        "init_from and finetune",
        "init_from.path=ckpt | finetune=true",
        r"(init_from): (\{.*?\}) takes",
        "-finetune | {0}={1} | init_from.path=ckpt",
    ),
    Row(
        "init_from and no_load_optim",
        "init_from.path=ckpt | no_load_optim=true",
        r"(init_from\.optimizer=reset)",
        "-no_load_optim | {0}",
    ),
    Row("init_from, its length", "init_from.path=ckpt | train_iters=3", r"or (init_from\.step=restart)", "{0}"),
    Row("init_from, longer", "init_from.path=ckpt | train_iters=3", r"Set a larger (train_iters)", "{0}=4"),
    Row(
        "init_from, its schedule",
        "init_from.path=ckpt | use_checkpoint_lr_scheduler=true",
        r"remove it",
        "-use_checkpoint_lr_scheduler",
    ),
    Row(
        "init_from, load instead",
        "init_from.path=ckpt | use_checkpoint_lr_scheduler=true",
        r"use `load` instead",
        "-init_from.path | load=ckpt",
    ),
    Row("hostfile", "hostfile=nowhere", r"no such file\. Leave it unset", "-hostfile"),
    Row("nodes", "num_nodes=2", r"give (hostfile)=PATH", "{0}=hosts", hosts),
    Row("filters", "hostfile=hosts | include=a | exclude=b", r"give one of them", "-exclude", hosts),
    Row("host", "hostfile=hosts | include=aa", r"Hosts: (\w+), ", "include={0}", hosts),
    Row("launcher", "launcher=plurm", r"Did you mean '(\w+)'", "launcher={0}"),
    Row("plugins", "plugins.0=x.py", r"write the whole list: (plugins=)", "-plugins.0 | {0}[]"),
    Row("folder", "load=run.yml", r"give a global_step<N> folder or a save folder", "load=ckpt"),
    Row("folder of a step", "load=run.yml", r"give a global_step<N> folder or a save folder", "load=ckpt/global_step2"),
    Row("iteration", "load=ckpt | iteration=7", r"complete steps: \[1, (2), 3\]", "iteration={0}"),
    Row(
        "partition",
        "pipe_parallel_size=2 | pipe_partition_method=foo",
        r"(type:transformer)",
        "pipe_partition_method={0}",
    ),
    Row(
        "blocks per stage",
        "pipe_parallel_size=2 | pipe_partition_method=explicit:3",
        r"pipe_parallel_size=2 and num_layers=2",
        "pipe_partition_method=explicit:1,1",
    ),
]


@pytest.mark.parametrize("row", CONFIG, ids=lambda row: row.name)
def test_advice_for_a_config(typist: Typist, row: Row) -> None:
    typist.follow(row, "save=null")


def part_of_data(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / f"data/text_document{name}").unlink()


def write_again(folder: Path) -> None:
    corpus(folder / "data")


def npy(folder: Path) -> None:
    """Raw ids, all below 15, which nothing says the width of; documents of 15 that end with 0."""
    (np.arange(1000) % 15).astype(np.uint16).tofile(folder / "ids.npy")


def borders(folder: Path) -> None:
    npy(folder)
    with gzip.open(folder / "ids.csv.gz", "wt") as file:
        file.write("0,20\n20,999\n")


def another_tokenizer(folder: Path) -> None:
    """Data whose manifest has the fingerprint of a tokenizer in letters.json; the config has another."""
    letters = Tokenizer(WordLevel({chr(97 + i): i for i in range(26)} | {"<|endoftext|>": 26}, unk_token="a"))
    letters.pre_tokenizer = Whitespace()
    letters.save(str(folder / "letters.json"))
    (folder / "text.jsonl").write_text('{"text": "a b c d e f g h i j k l m n o p q r s t"}\n' * 40)
    tokenise = ["--input", "text.jsonl", "--output-prefix", "data/letters", "--tokenizer-type", "HFTokenizer"]
    command = [sys.executable, str(ROOT / "tools/datasets/preprocess_data.py"), *tokenise]
    subprocess.run(
        [*command, "--vocab-file", "letters.json", "--append-eod"], cwd=folder, env=environment(), check=True
    )


NPY = "data_path=null | train_data_paths=[ids.npy]"
DATA = [
    Row(
        "no .bin", "", r"text_document\.bin is missing .*write the dataset again", "", part_of_data(".bin"), write_again
    ),
    Row(
        "no .idx", "", r"text_document\.idx is missing .*write the dataset again", "", part_of_data(".idx"), write_again
    ),
    Row(
        "short .bin",
        "",
        r"text_document\.bin.*incomplete",
        "",
        lambda folder: os.truncate(folder / "data/text_document.bin", 100),
        write_again,
    ),
    Row(
        "short .idx",
        "",
        r"text_document\.idx.*write the dataset again",
        "",
        lambda folder: os.truncate(folder / "data/text_document.idx", 300),
        write_again,
    ),
    Row(
        "manifest",
        "",
        r"(text_document\.\w+\.json).*Remove it or tokenise",
        "",
        lambda folder: manifest_path(folder / "data/text_document").write_text("{}"),
        lambda folder: manifest_path(folder / "data/text_document").unlink(),
    ),
    Row("name", "data_path=data/text_documnt", r"(data/text_document)\b", "data_path={0}"),
    Row("nothing to train on", "split=0,1,0", r"Raise its share", "split=1,1,0"),
    Row("too few tokens", "seq_length=9000 | max_position_embeddings=9000", r"a shorter (seq_length)", "{0}=16"),
    Row("width of ids", NPY + " | npy_eod=0", r"Set (npy_dtype) \((uint16)", "{0}={1}", npy, flag="--prepare"),
    Row(
        "borders",
        NPY + " | npy_dtype=uint16",
        r"ids\.csv\.gz does not .* ends at 999\. Remove it to .* (npy_eod)",
        "{0}=0",
        borders,
        lambda folder: (folder / "ids.csv.gz").unlink(),
    ),
    Row(
        "another tokenizer",
        "data_path=data/letters_text_document",
        r"Set (tokenizer_type)/(vocab_file)",
        "{0}=HFTokenizer | {1}=letters.json",
        another_tokenizer,
    ),
    Row("no checkpoint", "", r"load is not set: .* (load)=checkpoints", "{0}=ckpt", script="generate.py"),
    Row("no task", "load=ckpt", r"--(eval_tasks) (lambada_openai)", "{0}=[{1}]", script="eval.py"),
    Row("prompts", "load=ckpt | prompt_end=''", r"for instance ('\\n')", "prompt_end={0}", script="generate.py"),
    Row("samples", "load=ckpt | sample_output_file=data", r"name a file", "sample_output_file=x", script="generate.py"),
]


@pytest.mark.parametrize("row", DATA, ids=lambda row: row.name)
def test_advice_about_data_and_generation(typist: Typist, row: Row) -> None:
    typist.follow(row, "save=null")


def lock(folder: Path) -> None:
    held = {"host": socket.gethostname(), "pid": os.getpid(), "token": "x"}
    (folder / "ckpt/lock.json").write_text(json.dumps(held))


def neox(folder: Path) -> None:
    """As much of a checkpoint of GPT-NeoX as is looked at before a rank starts."""
    (folder / "theirs/global_step5").mkdir(parents=True)
    torch.save({"module": {}}, folder / "theirs/global_step5/mp_rank_00_model_states.pt")


def without_optimizer(folder: Path) -> None:
    path = folder / "ckpt/global_step3/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "optimizer": False}))


OTHERS = r"(init_from)=\{path: <this run's save>, (data: restart)\}"
SAVING = [
    Row("held", "", r"choose another `save`", NEW, lock),
    Row(
        "held by nobody", "", r"delete (ckpt/lock\.json)", "", lock, lambda folder: (folder / "ckpt/lock.json").unlink()
    ),
    Row(
        "other data",
        "data_path=more/text_document",
        OTHERS,
        NEW + " | {0}={{path: ckpt, {1}}}",
        lambda folder: corpus(folder / "more", 8),
    ),
    Row(
        "GPT-NeoX's folder",
        "save=theirs",
        r"set (finetune): (true).* in `(load)`, and another one in `(save)`",
        "{0}={1} | {2}=theirs | {3}=x",
        neox,
    ),
    Row("GPT-NeoX's weights", "save=x | load=theirs", r"set (finetune): (true)", "{0}={1}", neox),
    Row("GPT-NeoX's step", "save=x | load=theirs", r"replace load by (init_from): (\{.*?\})", "-load | {0}={1}", neox),
    Row(
        "GPT-NeoX's step, reset",
        "save=x | init_from.path=theirs",
        r"set (init_from\.\w+=reset) and (init_from\.\w+=restart)",
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

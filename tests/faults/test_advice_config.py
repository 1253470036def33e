"""What a message advises is done as it says: each row brings the message, types its advice, and is then accepted.

Of a configuration, its data, and what is generated.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from megatron.data.tokens.manifest import manifest_path
from megatron.data.tokens.partial import PARTIAL
from tests.faults.advice import Row, Typist
from tests.faults.commands import ROOT, environment
from tests.training.runs import corpus

pytestmark = pytest.mark.cpu


def hosts(folder: Path) -> None:
    (folder / "hosts").write_text("a slots=1\nb slots=1\n")


def second_file(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "run2.yml").write_text(text + "\n")


CONFIG = [
    Row("no length", "train_iters=null", r"set (train_iters) \(or (train_epochs),", "{0}=5"),
    Row("no length, epochs", "train_iters=null", r"set (train_iters) \(or (train_epochs),", "{1}=1"),
    Row("no data", "data_path=null", r"set (data_path), train_data_paths", "{0}=data/text_document"),
    Row("no data, a list", "data_path=null", r"data_path, (train_data_paths)", "{0}=[data/text_document]"),
    Row("no batch", "train_batch_size=null", r"(train_micro_batch_size_per_gpu): must be set, or", "{0}=2"),
    Row("no batch, total", "train_batch_size=null", r"must be set, or (train_batch_size)\b", "{0}=8"),
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
    Row(
        "norms of q and k",
        "use_separate_qk_norms=true | use_qk_layernorm=true | norm=layernorm",
        r"Set norm: (rmsnorm) or",
        "norm={0}",
    ),
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
        "norm=rmsnorm_unit_offset | use_qk_layernorm=true | use_separate_qk_norms=true",
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

MOE = "moe_num_experts=4 | num_gpus=2"
MUP = "use_mup=true | mup_base_hidden_size=16"
CONFIG += [
    Row(
        "expert ranks over data",
        f"{MOE} | expert_parallel_size=4",
        r"does not divide .*; use .*(2)",
        "expert_parallel_size={0}",
    ),
    Row(
        "too few experts",
        "moe_num_experts=3 | num_gpus=2 | expert_parallel_size=2",
        r"split over .*; use (1)",
        "expert_parallel_size={0}",
    ),
    Row(
        "experts and fp16",
        f"{MOE} | expert_parallel_size=2 | precision=fp16",
        r"use (precision): (bfloat16)",
        "{0}={1}",
    ),
    Row(
        "experts and fp16, one",
        f"{MOE} | expert_parallel_size=2 | precision=fp16",
        r"or (expert_parallel_size): (1)",
        "{0}={1} | precision=fp32",
    ),
    Row(
        "experts and ZeRO",
        f"{MOE} | expert_parallel_size=2 | zero_optimization.stage=2",
        r"use stage (0)",
        "zero_optimization.stage={0}",
    ),
    Row("shared expert", "moe_num_experts=4 | moe_shared_expert_gate=true", r"set (moe_shared_expert_size)", "{0}=16"),
    Row(
        "balancing",
        "moe_num_experts=4 | moe_router_type=topk | moe_bias_balancing_rate=0.1 | zero_optimization.stage=3",
        r"use stage (2)",
        "zero_optimization.stage={0}",
    ),
    Row(
        "kind of layer",
        "moe_num_experts=4 | moe_layers=[dens, moe]",
        r"Did you mean '(dense)'",
        "moe_layers=[{0}, moe]",
    ),
    Row("mamba under muP", f"{MUP} | attention_config=[[[mamba], all]]", r"set (it) to (false)", "use_mup=false"),
    Row(
        "rwkv under muP",
        f"{MUP} | head_size=16 | attention_config=[[[rwkv], all]]",
        r"set (it) to (false)",
        "use_mup=false",
    ),
    Row(
        "scaled embedding",
        f"{MUP} | scale_embedding=true",
        r"set (mup_embedding_mult) instead",
        "-scale_embedding | {0}=4",
    ),
    Row("ranks", "global_num_gpus=3 | num_gpus=2", r"leave it out", "-global_num_gpus"),
    Row(
        "predivide",
        "prescale_gradients=true | zero_optimization.stage=2",
        r"use stage (1)",
        "zero_optimization.stage={0}",
    ),
    Row(
        "predivide, off",
        "prescale_gradients=true | zero_optimization.stage=2",
        r"leave it at (False)",
        "prescale_gradients={0}",
    ),
    Row(
        "padded vocabulary",
        "padded_vocab_size=100",
        r"leave it out and set (make_vocab_size_divisible_by)",
        "-padded_vocab_size | {0}=100",
    ),
    Row("no host left", "hostfile=hosts | exclude=a@b", r"leave no host", "-exclude", hosts),
    Row("a slot twice", "hostfile=hosts | include=a:0,0", r"slot 0 of a is named twice", "include=a:0", hosts),
    Row("a file", "run22.yml", r"Did you mean '(run2.yml)'", "-run22.yml | {0}", second_file("num_workers: 0")),
    Row(
        "names of data",
        "data_path=null | train_data_paths=[data/text_document] | train_data_names=[a, b]",
        r"2 names for (1)",
        "train_data_names=[a]",
    ),
    Row(
        "values per source",
        "data_path=null | train_data_paths=[data/text_document] | train_data_max_epochs=[1, 2]",
        r"for (1) sources .*give one for each",
        "train_data_max_epochs=[9]",
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
    (np.arange(1001) % 15).astype(np.uint16).tofile(folder / "ids.npy")


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


def unfinished(folder: Path) -> None:
    for end in (".bin", ".idx"):
        path = folder / f"data/text_document{end}"
        path.rename(f"{path}{PARTIAL}")


def damaged_cache(folder: Path) -> None:
    """That of the run; it is named by what it is made from, wherever the data lies."""
    metas = list((folder / "data").rglob("meta.json"))
    assert metas
    for meta in metas:
        meta.write_text("{}")


def no_cache(folder: Path) -> None:
    for meta in list((folder / "data").rglob("meta.json")):
        shutil.rmtree(meta.parent)


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
        "other width of ids",
        NPY + " | npy_dtype=uint32",
        r"or (npy_dtype) is wrong",
        "{0}=uint16",
        npy,
        flag="--prepare",
    ),
    Row("unfinished", "", r"is not finished .*run that again", "", unfinished, write_again),
    Row(
        "index cache",
        "",
        r"(index_cache\S+) .*Remove that folder; it will be built",
        "",
        damaged_cache,
        no_cache,
        flag="--prepare",
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

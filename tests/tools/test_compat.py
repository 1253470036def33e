"""The sweep over config files: what loads, what trains, what is refused and why; fragments and their partners."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive
from megatron.neox_arguments.formulas import parameter_count
from megatron.plan.partners import ConfigFiles
from megatron.plan.shrink import as_overrides, shrink_overrides
from tests.documented import ROOT
from tests.warm_python import WarmPython

pytestmark = pytest.mark.cpu

MODEL = "num_layers: 12\nhidden_size: 768\nnum_attention_heads: 12\nseq_length: 2048\nno_weight_tying: true\n"
TRAINING = (
    "train_micro_batch_size_per_gpu: 4\ntrain_iters: 1000\nlr_decay_iters: 1000\nprecision: fp16\n"
    "optimizer: {type: Adam, params: {lr: 6.0e-4}}\n"
)
PATHS = "train_data_paths: [/no/a]\nvalid_data_paths: [/no/b]\ntest_data_paths: [/no/c]\nvocab_file: /no/t.json\n"
# As in the configs of the fork.
UNLEARNING = (
    "te_mha: true\nte_layernorm_mlp: true\nga_dataset: /no/f\nga_dataset_impl: mmap\nga_mode: interleaved\n"
    "ga_interleave_ratio: 128\ngd_mode: true\ngd_retain_dataset: /no/r\ngd_retain_weight: 40\n"
    "eval_tasks: [wmdp_bio_aisi_robust, mmlu_bio]\n"
)
FILES = {
    "whole.yml": MODEL + TRAINING + "model_parallel_size: 2\nextra_save_iters: [1]\nuse_wandb: true\n",
    "family/big.yml": MODEL + "hostfile: /mock\nsliding_window_width: 99\nattention_config: [[[flash, local], 6]]\n",
    "family/train_config.yml": TRAINING + "save: /no/save\nload: /no/save\neval_tasks: [lambada_openai]\n",
    "local_setup.yml": PATHS + "log_dir: /no/logs\n",
    "unlearning.yml": MODEL + TRAINING + PATHS + UNLEARNING,
    "refused.yml": MODEL + TRAINING + "hiden_dropout: 0.1\nnorm: nrom\n",
    "workflow.yml": "on: push\njobs: {}\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / "yaml" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "yaml" / name).write_text(text)
    return tmp_path


def test_a_sweep(folder: Path, warm_python: WarmPython) -> None:
    """Each file is loaded, planned and trained; the table, its exit code and its files say what became of it."""
    command = f"python {ROOT}/tools/compat.py yaml --jobs 2 --json rows.json"
    done = warm_python.run(f"{command} --csv rows.csv --logs logs", folder)
    assert done.returncode == 2, done.stderr
    rows = {row["file"]: row for row in json.loads((folder / "rows.json").read_text())}
    assert {name: (row["loads"], row["trains"]) for name, row in rows.items()} == {
        "whole.yml": (True, True),
        "family/big.yml": (True, True),
        "family/train_config.yml": (True, True),
        "local_setup.yml": (True, True),
        "unlearning.yml": (True, True),
        "refused.yml": (False, None),
    }
    assert rows["whole.yml"]["partners"] == "local_setup.yml"
    assert set(rows["family/big.yml"]["partners"].split()) == {"family/train_config.yml", "local_setup.yml"}
    unknown, wrong = rows["refused.yml"]["why"]  # both that are wrong, each for itself
    assert "refused.yml:11: " in unknown and "hidden_dropout" in unknown
    assert "refused.yml:12: " in wrong and "norm" in wrong
    assert [row["file"] for row in csv.DictReader((folder / "rows.csv").open())] == sorted(rows)
    assert "6 files: 5 load, 5 train two steps" in done.stdout and "1 further YAML" in done.stdout
    log = (folder / "logs/family/big.yml.log").read_text()
    assert "iteration        2/       2" in log

    (folder / "yaml/refused.yml").write_text(FILES["whole.yml"])
    again = warm_python.run(f"{command} --resume", folder)  # what is known is kept: only a new file would be tried
    assert again.returncode == 2 and "6 files: 5 load" in again.stdout
    late = warm_python.run(f"python {ROOT}/tools/compat.py yaml --timeout 0 --no-train --jobs 3", folder)
    assert late.returncode == 1, late.stderr
    assert late.stdout.count("took more than 0 s") == 6 + 1  # and in the summary
    assert "6 files: 0 load\n" in late.stdout  # nothing about training, which was not asked for


def test_what_is_not_a_folder_of_configs(folder: Path, warm_python: WarmPython) -> None:
    for arguments, text in (
        ("nowhere", "no such folder"),
        ("yaml --resume", "--json"),
        ("logs", "no YAML file"),
    ):
        (folder / "logs").mkdir(exist_ok=True)
        done = warm_python.run(f"python {ROOT}/tools/compat.py {arguments}", folder)
        assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr


def test_partners_are_the_nearest_that_agree(folder: Path) -> None:
    files = ConfigFiles(folder / "yaml")
    assert [path.name for path in files.others] == ["workflow.yml"]
    ways = files.whole(folder / "yaml/local_setup.yml")
    assert all(sum("num_layers" in path.read_text() for path in way) == 1 for way in ways)
    (folder / "yaml/family/train_config.yml").write_text(TRAINING + "seq_length: 4096\n")  # big.yml says 2048
    ways = ConfigFiles(folder / "yaml").whole(folder / "yaml/family/big.yml")
    assert [[path.name for path in way] for way in ways] == [["big.yml", "local_setup.yml"]]


@pytest.mark.parametrize("name", ["llama/llama3-70B", "olmo3/7B", "qwen3-moe/30B-A3B", "mamba2/1.3B", "rwkv/3B"])
def test_a_shrunk_config_is_small_and_of_the_same_kind(name: str) -> None:
    """Same kinds of layers, heads that share keys where they did, widths in proportion, few parameters."""
    path = str(ROOT / "configs" / f"{name}.yml")
    args = derive(NeoXArgs.from_files([path]))
    small = derive(NeoXArgs.from_files([path], as_overrides(shrink_overrides(args))), Facts(vocab_size=512))
    assert parameter_count(small.model, 512).total < 500_000
    assert set(small.model.attention_config) == set(args.model.attention_config)
    assert set(small.model.layer_mlps) == set(args.model.layer_mlps)
    assert (small.model.num_kv_heads < small.model.num_attention_heads) == (
        args.model.num_kv_heads < args.model.num_attention_heads
    )
    for key in ("norm", "norm_placement", "pos_emb", "activation", "use_bias_in_mlp", "gpt_j_residual"):
        assert small.get(key) == args.get(key)

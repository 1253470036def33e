"""The documented Python API, run as it is written, in a fresh process and another folder than the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.api import generate, train
from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.errors import UserError
from megatron.neox_arguments.groups import all_keys
from tests.tokenizer.vocabularies import byte_level

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """\
num_layers: 2
hidden_size: 32
num_attention_heads: 4
seq_length: 32
pos_emb: rotary
optimizer: {type: adam, params: {lr: 1.0e-3}}
train_micro_batch_size_per_gpu: 2
eval_iters: 0
tokenizer_type: HFTokenizer
vocab_file: tokenizer.json
data_path: tokens
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yml").write_text(CONFIG)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with IndexedDatasetBuilder(tmp_path / "tokens", np.uint16) as builder:
        for _ in range(50):
            builder.add_document(np.random.default_rng(0).integers(0, 200, size=40))
        builder.finalize()
    return tmp_path


def blocks(text: str) -> str:
    """The Python blocks of a document."""
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert found
    return "\n".join(found)


def run(code: str, folder: Path) -> str:
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in drop}
    env |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_readme_from_any_folder(folder: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert run(blocks(readme.partition("## From Python")[2].partition("\n## ")[0]), folder).rstrip().endswith(" 32")
    assert (folder / "checkpoints/global_step20").is_dir() and (folder / "hf/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_guide(folder: Path) -> None:
    out = run(blocks((ROOT / "documentation/python_api.md").read_text(encoding="utf-8")), folder)
    assert (folder / "checkpoints/latest").read_text().strip() == "global_step30"
    architecture, difference, config = out.splitlines()[-1].split()
    assert architecture == "GPTNeoXForCausalLM" and float(difference) < 1e-4 and (folder / config).is_file()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_errors_of_ranks_are_errors_here(folder: Path) -> None:
    code = """
import deepy
from megatron.errors import UserError
try:
    deepy.train("run.yml", train_iters=2, num_gpus=2, attention_backend="nonsense")
except UserError as error:
    print("before:", error)
try:
    deepy.train("run.yml", train_iters=2, num_gpus=2, data_path="damaged")
except UserError as error:
    print("in a rank:", error)
"""
    (folder / "damaged.idx").write_bytes((folder / "tokens.idx").read_bytes())
    (folder / "damaged.bin").write_bytes((folder / "tokens.bin").read_bytes()[:100])
    before, after = run(code, folder).splitlines()
    assert before.startswith("before:") and "attention_backend" in before
    assert after.startswith("in a rank:")


def test_importing_it_is_light(folder: Path) -> None:
    code = "import deepy, sys; print(sorted({'torch', 'deepspeed', 'transformers', 'numpy'} & set(sys.modules)))"
    code += "\nprint(deepy.load_config('run.yml', train_iters=3).train_batch_size)"
    heavy, batch = run(code, folder).splitlines()
    assert "torch" not in heavy and "deepspeed" not in heavy and "transformers" not in heavy
    assert batch == "2"


def test_wrong_input_is_refused_before_a_rank_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=r"train_itres.*'train_iters'"):
        train("run.yml", train_itres=3)
    with pytest.raises(UserError, match=r"nowhere\.yml"):
        train(["run.yml", Path("nowhere.yml")])
    with pytest.raises(UserError, match=r"prompts\[1\]"):
        generate("run.yml", ["a", " "])
    with pytest.raises(UserError, match="load"):
        generate("run.yml", ["a"])


def test_no_key_has_the_name_of_a_parameter() -> None:
    assert not {"files", "prompts", "tasks"} & set(all_keys())

"""One new file is all that a new kind needs: each is put into a copy of the tree, planned and trained with.

A kind is added to this test by a file and its keys in `ADDED`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from megatron.data.tokens.builder import IndexedDatasetBuilder
from megatron.tables import size
from tests.plugins.helpers import save_starcoder2, write_family

pytestmark = [pytest.mark.cpu, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Added:
    """A file of the library, and the keys of a run that uses it."""

    path: str
    source: str
    keys: dict[str, Any] = field(default_factory=dict)


ADDED = (
    Added(
        "layers/norms/peak.py",
        """
from megatron.layers.norms import NORMS, Norm
from megatron.mpu import sharding


@NORMS.register("peak", vectors=1, numbers=1)
class PeakNorm(Norm):
    def __init__(self, width, *, eps, state, region="sequence"):
        super().__init__(width, eps=eps, state=state, region=region)
        self.scale = self._vector(width, sharding.ones)
        self.shift = self._vector(1, sharding.zeros)

    def forward(self, x):
        peak = x.abs().amax(-1, keepdim=True) + self.eps
        return x / peak * self._shared(self.scale) + self._shared(self.shift)
""",
        {"norm": "peak"},
    ),
    Added(
        "layers/activations/sine.py",
        """
import torch

from megatron.layers.activations import ACTIVATIONS

ACTIVATIONS.register("sine_gate", gated=True)(torch.sin)
""",
        {"activation": "sine_gate", "intermediate_size": 48, "gated_width_rule": "final"},
    ),
    Added(
        "layers/positions/ramp.py",
        """
from torch import nn

from megatron.layers.positions import POSITIONS, PositionScheme
from megatron.mpu import sharding
from megatron.mpu.collectives import split_sequence, sum_gradient
from megatron.mpu.sharding import ParamSpec


class Ramp(nn.Module):
    def __init__(self, model, state):
        super().__init__()
        self.state = state
        spec = ParamSpec(shape=(3, model.hidden_size), init=sharding.zeros, sequence_reduced=True)
        self.directions = sharding.parameter(spec, state)

    def forward(self, positions):
        mine = split_sequence(positions.reshape(-1), self.state)
        return mine.unsqueeze(1) / 100 * sum_gradient(self.directions, self.state).sum(0)


POSITIONS.register("ramp", table=(3, "hidden_size"))(PositionScheme(at_embedding=Ramp))
""",
        {"pos_emb": "ramp"},
    ),
    Added(
        "layers/init/positive.py",
        """
from megatron.layers.init import INITS


@INITS.register("positive")
def positive(scale, hidden_matrix):
    return lambda full, generator: full.normal_(0.0, scale.std, generator=generator).abs_()
""",
        {"init_method": "positive"},
    ),
    Added(
        "optim/optimizers/three.py",
        """
import torch

from megatron.optim.optimizers import OPTIMIZERS


@OPTIMIZERS.register("three", moments=3, params={"betas": (0.5, 0.25), "rho": 0.125, "steps": 4})
class Three(torch.optim.Optimizer):
    def __init__(self, groups, lr, params):
        assert params == {"betas": (0.5, 0.25), "rho": 0.75, "steps": 4}, params
        super().__init__(groups, {"lr": lr, "rho": params["rho"]})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                for name in ("one", "two", "three"):
                    self.state[p].setdefault(name, torch.zeros_like(p))
                p.sub_(p.grad.sign(), alpha=group["lr"] * group["rho"])
""",
        {"optimizer": {"type": "Three", "params": {"lr": 0.01, "rho": 0.75}}},
    ),
    Added(
        "optim/schedules/half.py",
        """
from megatron.optim.schedules import LR_DECAY_STYLES


@LR_DECAY_STYLES.register("half")
def half(p, lr, min_lr):
    return lr / 2
""",
        {"lr_decay_style": "half", "warmup": 0.0},
    ),
    Added(
        "objectives/fixed.py",
        """
from megatron.objectives import OBJECTIVES, Objective


@OBJECTIVES.register("seven")
class Fixed(Objective):
    def loss(self, out, labels):
        losses = out.token_loss(labels.targets)
        return out.with_balance(((losses * 0 + 7) * labels.mask.reshape(-1)).sum() * labels.weights[0])
""",
        {"train_impl": "seven"},
    ),
    Added(
        "data/packing/sparse.py",
        """
from megatron.data.packing import PACKINGS
from megatron.data.packing.packed import Packed


@PACKINGS.register("sparse")
class Sparse(Packed):
    \"\"\"Half of the samples of an epoch, so that more epochs are needed.\"\"\"

    def samples_per_epoch(self, epochs=1):
        return super().samples_per_epoch(epochs) // 2
""",
        {"pack_impl": "sparse"},
    ),
    Added(
        "callbacks/steps_seen.py",
        """
from megatron.callbacks import CALLBACKS
from megatron.training.callback import Callback


@CALLBACKS.register("steps_seen", settings={"unit": 1.0}, console=("mine/steps",))
class StepsSeen(Callback):
    \"\"\"Counts steps.\"\"\"

    def __init__(self, unit):
        self.unit = unit

    def after_step(self, trainer, out):
        trainer.metrics["mine/steps"] = trainer.step * self.unit
""",
        {"callbacks": {"steps_seen": {"unit": 10}}},
    ),
)
LAYERS, WIDTH, HEADS, FFN, LENGTH, VOCABULARY = 2, 32, 4, 48, 16, 512
RUN = {
    "num_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "seq_length": LENGTH,
    "use_bias_in_mlp": False,
    "use_bias_in_attn_linear": False,
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 2,
    "train_iters": 2,
    "eval_iters": 0,
    "log_interval": 1,
    "tokenizer_type": "CharLevelTokenizer",
    "data_path": "tokens",
    "save": "run",
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the library with one more file of each kind, a config that names them all, and data."""
    folder = tmp_path_factory.mktemp("house")
    for part in ("megatron", "huggingface", "tools"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ("deepy.py", "train.py"):
        shutil.copy(ROOT / script, folder)
    keys: dict[str, Any] = dict(RUN)
    for added in ADDED:
        path = folder / "megatron" / added.path
        assert not path.exists()
        path.write_text(added.source)
        keys |= added.keys
    (folder / "run.yml").write_text(yaml.safe_dump(keys))
    with IndexedDatasetBuilder(folder / "tokens", np.uint16) as builder:
        for _ in range(20):
            builder.add_document(np.arange(40, 100))
        builder.finalize()
    return folder


def deepy(house: Path, *argv: str, code: int = 0) -> str:
    return python(house, "deepy.py", "train.py", "run.yml", *argv, code=code)


def python(house: Path, *argv: str, code: int = 0) -> str:
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    env = {k: v for k, v in os.environ.items() if k not in drop} | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(house)}
    done = subprocess.run([sys.executable, *argv], cwd=house, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_new_kinds_are_planned_with_their_sizes(house: Path) -> None:
    text = deepy(house, "--dry-run")
    norm = WIDTH + 1
    block = 2 * norm + 4 * WIDTH * WIDTH + 3 * WIDTH * FFN  # two norms, attention, a gated feed-forward
    total = VOCABULARY * WIDTH + 3 * WIDTH + LAYERS * block + norm
    assert f"  parameters {total:,} (" in text, text
    # fp32: weights, gradients, and three tensors of the optimizer
    sizes = [size(4 * total), size(4 * total), size(12 * total)]
    assert re.search(r"^\s+0\s+" + r"\s+".join(map(re.escape, sizes)), text, re.MULTILINE), text
    assert re.search(r"^\s+betas\s+\[0\.5, 0\.25\] ", text, re.MULTILINE), text
    assert re.search(r"^\s+steps_seen\s+measure\s+unit=10\.0$", text, re.MULTILINE), text


def test_a_misspelt_name_lists_the_new_one(house: Path) -> None:
    misspelt = (("norm", "peek", "peak"), ("optimizer.type", "thre", "three"), ("callbacks", "steps_sen", "steps_seen"))
    for key, name, nearest in misspelt:
        text = deepy(house, "--dry-run", f"{key}={name}", code=2)
        assert f"Did you mean {nearest!r}?" in text and name in text, text


def test_new_kinds_train(house: Path) -> None:
    deepy(house)
    records = [json.loads(line) for line in (house / "run/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "train/lm_loss" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert [record["train/lm_loss"] for record in steps] == [pytest.approx(7.0)] * 2
    assert [record["train/learning_rate"] for record in steps] == [pytest.approx(0.005)] * 2
    assert [record["mine/steps"] for record in steps] == [10, 20]


def test_a_new_family_converts_both_ways(house: Path) -> None:
    """The guide's, as a file among Deepy's own; every command is a process of its own."""
    write_family(house / "megatron/convert/families")
    save_starcoder2(house / "theirs")
    python(house, "huggingface/convert_hf_to_neox.py", "--hf-model", "theirs", "--output-dir", "ours")
    flags = ("--input_dir", "ours", "--output_dir", "again", "--no_save_tokenizer")
    assert "Starcoder2ForCausalLM" in python(house, "tools/ckpts/convert_neox_to_hf.py", *flags)
    before, after = (load_file(house / name / "model.safetensors") for name in ("theirs", "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    compared = python(house, "tools/ckpts/inspect_checkpoints.py", "theirs", "--diff", "ours")
    fused = 2 * 2 * 2  # of two layers, q, k and v are one weight and one bias
    assert "(starcoder2)" in compared and f"{len(after) - fused} parameters are equal" in compared

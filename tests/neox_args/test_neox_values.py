"""Values that GPT-NeoX's NeoXArgs derives on 8 devices with 50257 tokens, by configs of its sizes (numbers alone)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.neox_arguments.derive import Facts
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu

HALF = {"fp16": {"enabled": True, "fp16": True, "loss_scale": 0, "initial_scale_power": 12}}
# layers, hidden_size, heads; pipe and tensor sizes; micro-batch and accumulation; learning rate and floor; the rest.
# Then train_batch_size, accumulation, precision, ZeRO stage, rows of the vocabulary, first mixer.
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]] = {
    "125M": ((12, 768, 12, 1, 1, 4, None, 6e-4, 6e-5), HALF | {"zero": 1}, (32, 1, "fp16", 1, 50304, "global")),
    "20B": ((44, 6144, 64, 4, 2, 4, 32, 9.7e-5, 9.7e-6), HALF | {"zero": 1}, (128, 32, "fp16", 1, 50432, "global")),
    "pythia 12B": (
        (36, 5120, 40, 1, 4, 8, 2, 1.2e-4, 1.2e-5),
        HALF | {"zero": 1, "attention_config": [[["flash"], 36]]},
        (32, 2, "fp16", 1, 50688, "flash"),
    ),
    "llama 7B": (
        (32, 4096, 32, 1, 1, 4, None, 2e-4, 2e-5),
        HALF | {"zero": 1, "make_vocab_size_divisible_by": 1},
        (32, 1, "fp16", 1, 50257, "global"),
    ),
    "mamba 130M": (
        (24, 768, 12, 0, 1, 4, None, 6e-4, 6e-5),
        HALF | {"zero": 1, "attention_config": [[["mamba"], 24]]},
        (32, 1, "fp16", 1, 50304, "mamba"),
    ),
    # GPT-NeoX keeps stage 0 in these two: in DIFFERENCES.md
    "slurm 125M": ((12, 768, 12, 1, 1, 4, None, 6e-4, 0.0), HALF | {"zero": 0}, (32, 1, "fp16", 1, 50304, "global")),
    "bf16 125M": (
        (12, 768, 12, 1, 1, 4, None, 6e-4, 0.0),
        {"precision": "bfloat16", "zero": 0},
        (32, 1, "bfloat16", 1, 50304, "global"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_derived_values_are_those_of_gpt_neox(case: str, tmp_path: Path) -> None:
    sizes, rest, expected = CASES[case]
    layers, hidden, heads, pipe, tensor, micro, gas, lr, floor = sizes
    keys = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "pipe_parallel_size": pipe,
        "model_parallel_size": tensor,
        "train_micro_batch_size_per_gpu": micro,
        "seq_length": 2048,
        "train_iters": 320000,
        "lr_decay_style": "cosine",
        "warmup": 0.01,
        "min_lr": floor,
        "optimizer": {"type": "Adam", "params": {"lr": lr, "betas": [0.9, 0.95], "eps": 1e-8}},
        "zero_optimization": {"stage": rest["zero"]},
        **({} if gas is None else {"gradient_accumulation_steps": gas}),
        **{key: value for key, value in rest.items() if key != "zero"},
    }
    args = derived(tmp_path, facts=Facts(vocab_size=50257, num_devices=8), **keys)
    assert expected == (
        args.get("train_batch_size"),
        args.get("gradient_accumulation_steps"),
        args.get("precision"),
        args.get("zero_stage"),
        args.get("padded_vocab_size"),
        args.model.attention_config[0],
    )
    assert (args.get("lr"), args.get("min_lr"), args.get("warmup"), args.get("lr_decay_iters")) == (
        lr,
        floor,
        0.01,
        320000,
    )
    noted = any("ZeRO stage 1" in note for note in args.notes)
    assert noted is (rest["zero"] == 0)

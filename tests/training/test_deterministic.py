"""`deterministic: true`: what it switches, what it refuses, and that every model trains with it to the same numbers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron.errors import UserError
from megatron.training import setup
from megatron.training.setup_deterministic import make_deterministic
from tests.distributed import run_distributed
from tests.neox_args.helpers import derived
from tests.training.models import MODELS, RWKV
from tests.training.tiny import Layout, build, step_batch

pytestmark = pytest.mark.cpu

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")


def switched(rank: int, world: int, config: str, environment: dict[str, str]) -> Any:
    """What is set once a process has started."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    try:
        setup.start_process([config], [], None)
    except UserError as error:
        return str(error)
    from torch._inductor import config as inductor

    cudnn = torch.backends.cudnn
    flags = (torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, inductor.deterministic)
    return flags, [os.environ.get(name) for name in VARIABLES]


@pytest.mark.parametrize(
    ("value", "environment", "expected"),
    [
        (False, {}, ((False,) * 3, [None] * 3)),
        (True, {}, ((True,) * 3, [":4096:8", "0", "0"])),
        (True, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, ((True,) * 3, [":16:8", "0", "0"])),
        (True, {"NCCL_NVLS_ENABLE": "1"}, "NCCL_NVLS_ENABLE=1"),
    ],
)
def test_what_it_switches(tmp_path: Path, value: bool, environment: dict[str, str], expected: Any) -> None:
    keys = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 1,
        "seq_length": 8,
        "train_iters": 1,
        "max_position_embeddings": 8,
        "train_micro_batch_size_per_gpu": 1,
        "data_path": "x",
        "tokenizer_type": "CharLevelTokenizer",
        "deterministic": value,
    }
    (tmp_path / "run.yml").write_text(yaml.safe_dump(keys))
    (found,) = run_distributed(switched, 1, str(tmp_path / "run.yml"), environment, backend=None)
    if isinstance(expected, str):
        assert "deterministic" in found and expected in found
    else:
        assert found == expected


def test_kernels_that_are_not_repeatable_are_left_out_or_refused(tmp_path: Path) -> None:
    mamba = {"attention_config": [[["mamba"], "all"]], "pos_emb": "none", "deterministic": True}
    model = derived(tmp_path, **mamba).model
    fused = ("mamba_selective_scan_fusion", "mamba_causal_conv_fusion", "mamba_inner_func_fusion")
    assert [getattr(model, name) for name in fused] == [False] * 3
    for name in fused:
        with pytest.raises(UserError, match=f"deterministic: .*{name}"):
            derived(tmp_path, **mamba, **{name: True})


def curves(rank: int, world: int, models: dict[str, dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Losses and norms of two steps of each model, before and after the switch."""
    found: dict[str, list[list[float]]] = {name: [] for name in models}
    for switch in (lambda: None, make_deterministic):
        switch()
        for name, keys in models.items():
            engine, args, learning_rate = build(rank, keys, Layout())
            outs = [engine.train_batch(step_batch(s, args, engine.state), learning_rate(s)) for s in range(2)]
            found[name].append([float(x) for out in outs for x in (out.loss, out.grad_norm)])
    return found


def test_every_model_trains_with_it_to_the_same_numbers() -> None:
    models = {name: MODELS[name] for name in ("neox", "llama-bf16", "gemma3", "moe", "moe-all")} | {"rwkv": RWKV}
    (found,) = run_distributed(curves, 1, models, timeout=110)
    assert all(before == after for before, after in found.values()), found

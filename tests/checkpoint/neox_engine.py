"""Checkpoints that DeepSpeed itself writes, of a model with GPT-NeoX's names: what its optimizers leave on disk.

A model here is its parameters alone. Its loss is their product with fixed numbers, so every step has a gradient that is
known, and what the optimizer keeps is asked of DeepSpeed by parameter, before it saves.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

from megatron.training.setup_deepspeed import init_deepspeed

BATCH = 8
MOMENTS = ("exp_avg", "exp_avg_sq")
Shard = dict[str, Tensor]


class Parameters(nn.Module):
    """Parameters under dotted names, as `sequential.2.mlp.linear1.weight`."""

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        for name, tensor in shard.items():
            *path, last = f"sequential.{name}".split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = dict(module.named_children())[part]
            module.register_parameter(last, nn.Parameter(tensor.clone()))

    def forward(self, scale: Tensor) -> Tensor:
        parts = [(p.float() * direction(p, i)).sum() for i, p in enumerate(self.parameters())]
        return torch.stack(parts).sum() * scale


def direction(like: Tensor, number: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(number))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """As GPT-NeoX makes them: weights and embeddings decay, norms and biases do not."""
    named = list(model.named_parameters())
    still = [p for name, p in named if name.endswith("bias") or "norm" in name.split(".")[-2]]
    decayed = [p for _, p in named if all(p is not other for other in still)]
    return [{"params": decayed, "name": "weight_decay_params"}, {"params": still, "weight_decay": 0.0, "name": "none"}]


def save(rank: int, world: int, folder: Path, shards: list[Shard], kind: str, steps: int, state: dict[str, Any]) -> Any:
    """Train `steps` and let DeepSpeed save. `kind`: `zero 0`, `zero 1`, `zero 2`, `bf16 zero 1`; a shard per rank.

    Returns (tensor-parallel rank, {name: {moment or `weight`: value}}).
    """
    init_deepspeed(torch.device("cpu"))
    tp, dp = len(shards), world // len(shards)
    model = Parameters(shards[rank % tp])
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // dp,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": int(kind[-1])},
        "bf16": {"enabled": kind.startswith("bf16")},
        "zero_allow_untested_optimizer": True,
    }
    with redirect_stdout(io.StringIO()):
        grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=1, num_mp=tp, num_dp=dp))
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False, mpu=grid
        )
        for step in range(steps):
            engine.backward(engine(torch.tensor(1.0 + step + rank // tp)))
            engine.step()
        if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
            # DeepSpeed does it once, in the step of the first group, when the moments of the second do not exist yet.
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        kept = {name: _kept(engine, p) for name, p in engine.module.named_parameters()}
        engine.save_checkpoint(str(folder.parent), tag=folder.name, client_state={"iteration": steps, **state})
    return rank % tp, {name.removeprefix("sequential."): values for name, values in kept.items()}


def _kept(engine: Any, p: nn.Parameter) -> dict[str, Tensor]:
    if hasattr(p, "_hp_mapping"):
        values = {"weight": safe_get_full_fp32_param(p)}
        values |= {key: safe_get_full_optimizer_state(p, key) for key in MOMENTS}
    else:
        values = {"weight": p, **{key: engine.optimizer.state[p][key] for key in MOMENTS}}
    return {key: value.detach().float().clone().view(p.shape) for key, value in values.items()}

"""torch.compile of the blocks, one by one and in place: one small graph serves every layer of a kind."""

from __future__ import annotations

import torch
from torch import nn

from megatron.errors import UserError
from megatron.log import get_logger
from megatron.model.block import TransformerBlock

logger = get_logger(__name__)


def wants_compile(torch_compile: bool | None, device: torch.device, zero_stage: int) -> bool:
    """What `torch_compile` means here. Unset: on a GPU, where it pays; on a CPU it was measured to gain nothing (1.04x
    at best, 0.8x on a busy machine) and costs minutes of C++ compilation at the first start.

    Raises `UserError` for true under ZeRO-3, which gathers each module's weights in hooks that no graph can hold.
    """
    if zero_stage == 3:
        if torch_compile:
            raise UserError("torch_compile: true does not go with zero_optimization.stage 3; use stage 2, or leave it")
        return False
    return device.type == "cuda" if torch_compile is None else torch_compile


def compile_blocks(model: nn.Module, backend: str = "inductor") -> int:
    """Have every block of `model` compiled at its first call, whole (`fullgraph`). Returns how many there are.

    Call it after the engine is built: the engine's hooks must not become part of the graphs.
    """
    blocks = [module for module in model.modules() if isinstance(module, TransformerBlock)]
    for block in blocks:
        block.compile(fullgraph=True, backend=backend)
    logger.info(f"torch.compile: {len(blocks)} blocks")
    return len(blocks)

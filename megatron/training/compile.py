"""torch.compile of the blocks, one by one and in place: one small graph serves every layer of a kind."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch import nn

from megatron.errors import UserError
from megatron.log import get_logger
from megatron.model.block import Block, TransformerBlock
from megatron.model.head import OutputMatrix
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.schema_model import ModelConfig

logger = get_logger(__name__)


def wants_compile(model: ModelConfig, state: ParallelState, zero_stage: int) -> bool:
    """What `torch_compile` means here. Unset: on a GPU, where it pays; on a CPU it was measured to gain nothing (1.04x
    at best, 0.8x on a busy machine) and costs minutes of C++ compilation at the first start.

    Raises `UserError` for true where a block cannot become one graph.
    """
    obstacle = _obstacle(model, state, zero_stage)
    if obstacle is not None:
        if model.torch_compile:
            raise UserError(f"torch_compile: true does not go with {obstacle}")
        return False
    return state.device.type == "cuda" if model.torch_compile is None else model.torch_compile


def _obstacle(model: ModelConfig, state: ParallelState, zero_stage: int) -> str | None:
    """Why a block of this model is not one graph, with what to do about it; None when it is."""
    if zero_stage == 3:
        # ZeRO-3 gathers each module's weights in hooks that no graph can hold.
        return "zero_optimization.stage 3; use stage 2, or leave it"
    if state.tp_size > 1 and (model.hidden_dropout > 0 or model.attention_dropout > 0):
        # Every tensor-parallel rank seeds its own masks, which leaves the graph (mpu/random).
        return "dropout under model_parallel_size > 1; set hidden_dropout and attention_dropout to 0, or leave it"
    if model.attention_backend == "flash" and model.intra_document_masking:
        # Document borders become lengths that depend on the data.
        return "attention_backend flash and intra_document_masking; use another back-end, or leave it"
    return None


def compile_blocks(model: nn.Module, backend: str = "inductor") -> int:
    """Have every block of `model` compiled at its first call, whole (`fullgraph`). Returns how many there are.

    A block with a part that is no graph (a mixture of experts) is compiled around that part, and not at all when it is
    recomputed in the backward pass: what is recomputed is one graph or none. On a GPU the element-wise part of the
    loss is compiled as well.

    Call it after the engine is built: the engine's hooks must not become part of the graphs.
    """
    whole = [module for module in model.modules() if isinstance(module, Block) and module.one_graph]
    parts = [module for module in model.modules() if isinstance(module, TransformerBlock) and not module.one_graph]
    blocks = whole + [block for block in parts if block.recompute == "none" and not block.chunking.active]
    for part in (part for block in parts for part in (block.attention, block.mlp) if not part.one_graph):
        # Not by a decorator on the class: naming it imports the compiler, a second of every command.
        part.forward = torch.compiler.disable(part.forward)  # type: ignore[method-assign]
    for block in blocks:
        block.compile(fullgraph=block.one_graph, backend=backend)
    for module in model.modules():
        if isinstance(module, OutputMatrix):
            module.projection = replace(module.projection, compiled=module.weight.is_cuda)
    logger.info(f"torch.compile: {len(blocks)} blocks")
    return len(blocks)


def without_compile(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Inside, compiled blocks run as they are written: for texts of every length, each of which would be compiled."""
    if not any(module._compiled_call_impl for module in model.modules()):
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")

"""torch.compile of the blocks, one by one and in place: a small graph, or a few, serve every layer of a kind."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from megatron.log import get_logger
from megatron.model.block import Block
from megatron.model.head import OutputMatrix
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.schema_model import ModelConfig

logger = get_logger(__name__)


class Compiled(NamedTuple):
    """How many blocks are compiled: whole, around what is no graph, their element-wise functions alone."""

    whole: int
    around: int
    functions: int


def wants_compile(model: ModelConfig, state: ParallelState) -> bool:
    """What `torch_compile` means here. Unset: on a GPU, where it pays; on a CPU it was measured to gain nothing (1.04x
    at best, 0.8x on a busy machine) and costs minutes of C++ compilation at the first start.
    """
    return state.device.type == "cuda" if model.torch_compile is None else model.torch_compile


def compile_blocks(model: nn.Module, zero_stage: int = 0, backend: str = "inductor") -> Compiled:
    """Have every block of `model` compiled at its first call: as much of it as one graph, or a few, can hold.

    * whole, where no part names functions that are `uncompiled`;
    * else around those (the experts' exchange, a scan, a kernel of another package, masks of tensor-parallel ranks),
      with the `elementwise` functions of parts that are left out whole;
    * of a block that keeps matrix products and recomputes the rest ("selective") around a break, and of all blocks
      under ZeRO-3, whose hooks gather each module's weights, the `elementwise` functions alone.

    On a GPU the element-wise part of the loss is compiled as well.

    Call it after the engine is built: the engine's hooks must not become part of the graphs.
    """
    counts = [0, 0, 0]
    names: set[str] = set()
    done: set[tuple[int, str]] = set()

    def compile_functions(part: nn.Module) -> None:
        for name in getattr(part, "elementwise", ()):
            if (id(part), name) not in done:  # layers share their rotary table
                setattr(part, name, torch.compile(getattr(part, name), fullgraph=True, backend=backend))
                done.add((id(part), name))

    for block in (module for module in model.modules() if isinstance(module, Block)):
        parts = list(block.modules())
        left = [(part, name) for part in parts for name in getattr(part, "uncompiled", ()) if getattr(part, name)]
        if zero_stage == 3 or (left and block.chunking.policy == "selective"):
            counts[2] += 1
            for part in parts:
                compile_functions(part)
        elif left:
            counts[1] += 1
            names.update(f"{type(part).__name__}.{name}" for part, name in left)
            for part, name in left:
                # Not by a decorator on the class: naming it imports the compiler, a second of every command.
                setattr(part, name, torch.compiler.disable(getattr(part, name)))
                for inner in part.modules() if name == "forward" else ():
                    compile_functions(inner)
            # What is recomputed as one graph has no breaks, so the graphs are inside of what is recomputed.
            block.residual = torch.compile(block.residual, backend=backend)  # type: ignore[method-assign]
        else:
            counts[0] += 1
            block.compile(fullgraph=True, backend=backend)
    for module in model.modules():
        if isinstance(module, OutputMatrix):
            module.projection = replace(module.projection, compiled=module.weight.is_cuda)
    model.compiled = compiled = Compiled(*counts)  # type: ignore[assignment]
    hows = ("whole", f"around {', '.join(sorted(names))}", "in their element-wise functions")
    said = ", ".join(f"{count} {how}" for count, how in zip(counts, hows, strict=True) if count)
    logger.info(f"torch.compile: {said or 'no'} blocks")
    return compiled


def without_compile(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Inside, compiled blocks run as they are written: for texts of every length, each of which would be compiled."""
    if not hasattr(model, "compiled"):
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")

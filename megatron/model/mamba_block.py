"""A residual block of Mamba: x + mixer(norm(x)), without a feed-forward.

Parameter names are GPT-NeoX's: `norm.*`, `mixer.*`. It is compiled around its scan, which may be a loop over
the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megatron.layers import mamba, mamba2
from megatron.layers.carry import Context
from megatron.layers.kv_cache import CacheEntry
from megatron.layers.norms import build_norm
from megatron.layers.parts import MIXERS, BlockSpec
from megatron.model.block import BLOCKS, Block
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

PROVIDERS = (mamba, mamba2)  # importing them is what fills the registry of mixers


@BLOCKS.register("mamba", "mamba2")
class MambaBlock(Block):
    """Mamba needs no positions and sees everything: of the spec it reads the kind."""

    def __init__(self, model: ModelConfig, state: ParallelState, spec: BlockSpec) -> None:
        super().__init__(model, state)
        self.norm = build_norm(model, state)
        self.mixer = MIXERS[spec.kind](model, state, spec)

    def new_cache(self, capacity: int, start: Tensor | None) -> CacheEntry:
        return self.mixer.new_cache(capacity, start)

    def residual(self, x: Tensor, context: Context) -> tuple[Tensor, None]:
        return x + self._drop(self.mixer(self.norm(x), context)), None

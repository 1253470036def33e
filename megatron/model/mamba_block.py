"""A residual block of Mamba: x + mixer(norm(x)), without a feed-forward.

Parameter names are GPT-NeoX's: `norm.*`, `mixer.*`. It is not compiled: its scan is a loop over the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.layers import mamba, mamba2
from megatron.layers.attention import MIXERS
from megatron.layers.documents import Documents
from megatron.layers.kv_cache import CacheEntry, StateCache
from megatron.layers.norms import build_norm
from megatron.model.block import BLOCKS, Block
from megatron.mpu.state import ParallelState

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

PROVIDERS = (mamba, mamba2)  # importing them is what fills the registry of mixers


@BLOCKS.register("mamba", "mamba2")
class MambaBlock(Block):
    """`mlp`, `window` and `rotary` are for blocks of other kinds: Mamba needs no positions and sees everything."""

    one_graph = False

    def __init__(
        self,
        model: ModelConfig,
        state: ParallelState,
        *,
        kind: str,
        mlp: str,
        window: int | None,
        rotary: nn.Module | None,
    ) -> None:
        super().__init__(model, state)
        self.norm = build_norm(model, state)
        self.mixer = MIXERS[kind](model, state)

    def new_cache(self, capacity: int, start: Tensor | None) -> CacheEntry:
        return StateCache(start)

    def residual(
        self, x: Tensor, positions: Tensor, documents: Documents | Tensor | None, cache: CacheEntry | None = None
    ) -> Tensor:
        return x + self._drop(self.mixer(self.norm(x), positions, documents, cache))

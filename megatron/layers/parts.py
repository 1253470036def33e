"""What a block is made of: a mixer, which lets tokens see earlier ones, and a feed-forward, which does not.

Legend: b batch, s sequence, t = b·s (batch outermost), h hidden, /tp = this rank's part.

Every parameter is made by `mpu.sharding.parameter` or a layer of `mpu.layers`, with its full shape, so that it starts,
is saved and is read at any layout; a part is built on torch's meta device too, where its parameters are counted. A
static method `size(model) -> block_sizes.Size` replaces that count.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.errors import UserError
from megatron.layers.carry import Context
from megatron.layers.documents import Need
from megatron.layers.kv_cache import CacheEntry, LayerCache
from megatron.layers.measure import size_of
from megatron.layers.norms import Norm
from megatron.log import get_logger
from megatron.mpu.state import ParallelState
from megatron.registry import Registry

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

logger = get_logger(__name__)


@dataclass(frozen=True)
class BlockSpec:
    """One block's entries in the configuration.

    * `layer`: its number, from 0. `kind`, `mlp`, `window`: its entries of attention_config, layer_mlps and
      layer_windows (how many earlier tokens are visible; None: all).
    * `rotary`: the position module that layers share, without parameters.
    * `vocabulary`: of a layer with value embeddings, how many tokens they are of; 0: it has none.
    """

    layer: int = 0
    kind: str = "global"
    mlp: str = "dense"
    window: int | None = None
    rotary: nn.Module | None = None
    vocabulary: int = 0


class Part(nn.Module):
    """A mixer or a feed-forward: `forward` gets x [t, h] ([t/tp, h] under sequence parallelism) and keeps its shape.

    `entered` and `reduce` are for the parallel forms of a block alone (gpt_j_residual): with `entered` x has entered
    the tensor-parallel region already; without `reduce` the result is the rank's partial sum without its bias, which
    `add_bias` adds after the reduction.
    """

    uncompiled: tuple[str, ...] = ()  # names of its functions that torch.compile leaves as they are
    elementwise: tuple[str, ...] = ()  # of those that fuse well and touch no parameter: compiled where nothing more is

    def add_bias(self, total: Tensor) -> Tensor:
        """`total` [t, h] and what `reduce=False` leaves out."""
        raise UserError(f"gpt_j_residual: {type(self).__name__} has no add_bias; give it one, or set the key to false")


class Mixer(Part):
    """A kind of mixer, made as `kind(model, state, spec)` with a `BlockSpec`.

    * Causal: a token's output depends on no later one, and with `context.documents` on no other document (`.ids` [b, s]
      are equal inside one).
    * Generation: `context.cache` is what `new_cache` made, x the new columns alone, the result that of the whole text.
      Columns before `start` are padding and must not count.
    * A static method `flops(model)`: the training FLOPs per token that are not products with weights.
    """

    def forward(self, x: Tensor, context: Context, *, entered: bool = False, reduce: bool = True) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no forward")

    def new_cache(self, capacity: int, start: Tensor | None) -> CacheEntry:
        """What it keeps of up to `capacity` tokens of rows that start at `start` [b] (None: nothing is padded)."""
        return LayerCache(capacity, start)

    def document_need(self) -> Need | None:
        """The form of packed documents that it reads besides their numbers; layers with equal needs share it."""
        return None

    def describe(self) -> tuple[str, str] | None:
        """(what, which code is in use), for the log."""
        return None


class FeedForward(Part):
    """A kind of feed-forward, made as `kind(model, state)`. A token's output depends on that token alone.

    `forward` returns (the output, what is added to the loss: 0-dim fp32, or None). An added loss is a mean over the
    micro-batch's tokens, equal on all tensor-parallel ranks; training averages it over micro-batches.
    """

    def forward(
        self, x: Tensor, context: Context, *, entered: bool = False, reduce: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        raise TypeError(f"{type(self).__name__} has no forward")

    def take_norm(self, norm: Norm) -> bool:
        """Whether `forward` wants x before this norm, the block's, and applies it itself (in one kernel)."""
        return False

    @staticmethod
    def adds_loss(model: ModelConfig) -> bool:
        """Whether it may add to the loss under this configuration."""
        return False


MIXERS: Registry[type[Mixer]] = Registry(
    "attention_config",
    measure=lambda name, model: size_of(lambda state: MIXERS[name](model, state, BlockSpec(kind=name))),
    wants="a subclass of megatron.layers.parts.Mixer",
    fits=lambda entry: isinstance(entry, type) and issubclass(entry, Mixer),
)
MLPS: Registry[type[FeedForward]] = Registry(
    "mlp_config",
    measure=lambda name, model: size_of(lambda state: MLPS[name](model, state)),
    wants="a subclass of megatron.layers.parts.FeedForward",
    fits=lambda entry: isinstance(entry, type) and issubclass(entry, FeedForward),
)


def adds_loss(model: ModelConfig) -> bool:
    """Whether any feed-forward of the model may add to the loss."""
    return any(MLPS[kind].adds_loss(model) for kind in set(model.layer_mlps) - {"none"})


def build_mlp(model: ModelConfig, state: ParallelState, kind: str) -> FeedForward:
    """The feed-forward of this kind; a dense one as one module of Transformer Engine with te_layernorm_mlp."""
    return MLPS["te_layernorm_mlp" if kind == "dense" and model.te_layernorm_mlp else kind](model, state)


def log_backends(module: nn.Module, state: ParallelState) -> None:
    """Rank 0 logs which code its parts use: attention back-ends, Mamba's kernels, Transformer Engine."""
    if state.rank != 0:
        return
    found = {part.describe() for part in module.modules() if hasattr(part, "describe")} - {None}
    for what, rows in groupby(sorted(found), key=itemgetter(0)):
        logger.info(f"{what}: {', '.join(name for _, name in rows)}")

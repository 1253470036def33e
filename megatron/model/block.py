"""One residual block.

Legend: b batch, s sequence, t = b·s, h hidden, /tp = this rank's part.

| form           | what is computed                                             | config                             |
|----------------|--------------------------------------------------------------|------------------------------------|
| sequential     | x = x + A(n1 x); x = x + M(n2 x)                             | default                            |
| parallel       | x + A(n1 x) + M(n2 x)                                        | gpt_j_residual                     |
| parallel, tied | x + A(n1 x) + M(n1 x)                                        | gpt_j_residual, gpt_j_tied         |
| OLMo 2/3       | x = x + n2(A(x)); x = x + n3(M(x))                           | norm_placement: olmo3              |
| sandwich       | x = x + n2(A(n1 x)); x = x + n4(M(n3 x))                     | norm_placement: sandwich           |

The parallel forms add the partial sums of A and M before the one reduction over tensor-parallel ranks, and both biases
once after it (GPT-NeoX adds each rank's copy, hence tp times the bias); dropout acts on that sum.

M is dense or a mixture of experts (layer_mlps), which may add to the loss too.

forward reads no attribute that differs from layer to layer, so torch.compile makes one graph for all blocks of a kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megatron.errors import UserError
from megatron.layers.attention import MIXERS, SelfAttention
from megatron.layers.documents import Documents, Need
from megatron.layers.dropout import hidden_dropout
from megatron.layers.kv_cache import CacheEntry, LayerCache
from megatron.layers.measure import size_of
from megatron.layers.mlp import MLPS
from megatron.layers.moe import MixtureOfExperts
from megatron.layers.norms import build_norm
from megatron.model.carry import Carry, documents_of, passed_on
from megatron.model.recompute import Recompute, recomputed
from megatron.mpu.collectives import enter_tensor_parallel, leave_tensor_parallel
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.block_sizes import BLOCK
from megatron.registry import Registry

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


class Block(nn.Module):
    """What blocks of every kind have in common: the way of the carry, recomputation, dropout.

    A kind of block is a subclass with `residual`, made as `kind(model, state, kind=, mlp=, window=, rotary=)`:

    * `kind`, `mlp`, `window`: its layer's entries of attention_config, layer_mlps and layer_windows;
    * `rotary`: the position module that the layers of a stage share.
    """

    uses_cache = True
    one_graph = True  # whether torch.compile can take it whole
    takes_layer = False  # whether it is made with `layer=` too: its number, from 0 (its default)

    def __init__(self, model: ModelConfig, state: ParallelState) -> None:
        super().__init__()
        self.state = state
        self.dropout = model.hidden_dropout
        self.chunking = Recompute.of(model)
        # Chunks of several blocks are recomputed by whoever runs the list (sequential.run_layers).
        self.recompute = self.chunking.policy if self.chunking.every == 1 else "none"

    def forward(self, carry: Carry, cache: CacheEntry | None = None) -> Carry:
        """The carry (model/carry.py) -> the same, hidden changed, the balance loss added to by a mixture of experts.

        `cache`: what `new_cache` gave, with the earlier tokens (inference); it takes s more.
        """
        hidden, positions, documents = *carry[:2], documents_of(carry)
        if cache is not None:
            made = self.residual(hidden, positions, documents, cache)
        else:
            made = recomputed(self.residual, self.recompute, hidden, positions, documents)
        return passed_on(carry, *made) if isinstance(made, tuple) else passed_on(carry, made)

    def residual(
        self, x: Tensor, positions: Tensor, documents: Documents | Tensor | None, cache: LayerCache | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """The block's function on the hidden states alone; with what it adds to the loss, if there may be any."""
        raise TypeError(f"{type(self).__name__} has no residual")

    def new_cache(self, capacity: int, start: Tensor | None) -> CacheEntry:
        """What it keeps of up to `capacity` tokens of rows that start at `start` [b] (None: nothing is padded)."""
        return LayerCache(capacity, start)

    def document_needs(self) -> set[Need]:
        """What its parts read of packed documents (`Documents.of`)."""
        return set()

    def _drop(self, x: Tensor) -> Tensor:
        return hidden_dropout(x, self.dropout, self.training, self.state)


BLOCKS: Registry[type[Block]] = Registry(
    BLOCK,
    wants="a subclass of megatron.model.block.Block",
    fits=lambda entry: isinstance(entry, type) and issubclass(entry, Block),
    measure=lambda name, model, mlp: size_of(
        lambda state: BLOCKS[name](model, state, kind=name, mlp=mlp, window=None, rotary=None)
    ),
)
"""Classes of blocks, for kinds of attention_config that are not a mixer in a `TransformerBlock`. An entry is a subclass
of `Block`, see there; `has_mlp = False` if it has no feed-forward.
"""


class TransformerBlock(Block):
    """A mixer ("attention") and an MLP around the residual stream; parameter names as in GPT-NeoX's new style."""

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
        self.form = _form(model)
        if self.form != "olmo":
            self.input_layernorm = build_norm(model, state)
        self.attention = MIXERS[kind](model, state, kind=kind, window=window, rotary=rotary)
        if self.form != "tied":
            self.post_attention_layernorm = build_norm(model, state)
        if self.form == "sandwich":
            self.pre_feedforward_layernorm = build_norm(model, state)
        self.mlp = MLPS[mlp](model, state)
        self.one_graph = not isinstance(self.mlp, MixtureOfExperts) and getattr(self.attention, "one_graph", True)
        if self.form in ("olmo", "sandwich"):
            self.post_feedforward_layernorm = build_norm(model, state)

    def new_cache(self, capacity: int, start: Tensor | None) -> CacheEntry:
        make = getattr(self.attention, "new_cache", super().new_cache)
        return make(capacity, start)

    def document_needs(self) -> set[Need]:
        return {self.attention.document_need()} if isinstance(self.attention, SelfAttention) else set()

    def residual(
        self, x: Tensor, positions: Tensor, documents: Documents | Tensor | None, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        where = (positions, documents, cache)
        if self.form in ("parallel", "tied"):
            change, loss = self._parallel(x, where)
            return x + self._drop(change), loss
        if self.form == "olmo":
            x = x + self._drop(self.post_attention_layernorm(self.attention(x, *where)))
            change, loss = self._feed(x, where)
            return x + self._drop(self.post_feedforward_layernorm(change)), loss
        if self.form == "sandwich":
            x = x + self._drop(self.post_attention_layernorm(self.attention(self.input_layernorm(x), *where)))
            change, loss = self._feed(self.pre_feedforward_layernorm(x), where)
            return x + self._drop(self.post_feedforward_layernorm(change)), loss
        x = x + self._drop(self.attention(self.input_layernorm(x), *where))
        change, loss = self._feed(self.post_attention_layernorm(x), where)
        return x + self._drop(change), loss

    def _parallel(self, x: Tensor, where: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
        normed = self.input_layernorm(x)
        if self.form == "tied":
            # One input for both: enter the tensor-parallel region once.
            normed = enter_tensor_parallel(normed, self.state)
            partial = self.attention(normed, *where, entered=True, reduce=False)
            change, loss = self._feed(normed, where, entered=True, reduce=False)
        else:
            partial = self.attention(normed, *where, reduce=False)
            change, loss = self._feed(self.post_attention_layernorm(x), where, reduce=False)
        total = leave_tensor_parallel(partial + change, self.state)
        return self.mlp.add_bias(self.attention.dense.add_bias(total)), loss

    def _feed(self, x: Tensor, where: tuple[Any, ...], **crossing: bool) -> tuple[Tensor, Tensor | None]:
        """The feed-forward, and what it adds to the loss; `crossing`: `entered` and `reduce` of it."""
        if isinstance(self.mlp, MixtureOfExperts):
            positions, documents, _ = where
            return self.mlp(x, positions.shape[0], documents, **crossing)
        return self.mlp(x, **crossing), None


def _form(model: ModelConfig) -> str:
    if model.norm_placement in ("olmo3", "sandwich"):
        if model.gpt_j_residual:
            raise UserError(
                f"norm_placement: {model.norm_placement} is a sequential block; set gpt_j_residual to false"
            )
        return model.norm_placement.rstrip("3")
    if model.norm_placement != "pre":
        raise UserError(f"norm_placement: {model.norm_placement!r} is not available; use pre, olmo3 or sandwich")
    if not model.gpt_j_residual:
        if model.gpt_j_tied:
            raise UserError("gpt_j_tied: true needs gpt_j_residual: true, or set it to false")
        return "sequential"
    return "tied" if model.gpt_j_tied else "parallel"

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

M may add to the loss too (a mixture of experts' balance loss).

forward reads no attribute that differs from layer to layer, so torch.compile makes one graph for all blocks of a kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.errors import UserError
from megatron.layers import attention, mlp, moe
from megatron.layers.carry import Carry, Context
from megatron.layers.documents import Need
from megatron.layers.dropout import hidden_dropout
from megatron.layers.kv_cache import CacheEntry, LayerCache
from megatron.layers.measure import size_of
from megatron.layers.norms import build_norm
from megatron.layers.parts import MIXERS, BlockSpec, adds_loss, build_mlp
from megatron.layers.positions import POSITIONS
from megatron.layers.transformer_engine import feed_forward
from megatron.layers.transformer_engine.precision import Precision
from megatron.model.recompute import Recompute, recompute_in_backward
from megatron.mpu.collectives import enter_tensor_parallel, leave_tensor_parallel
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.block_sizes import BLOCK
from megatron.registry import Registry

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig

PROVIDERS = (attention, feed_forward, mlp, moe)  # importing them fills the registries of mixers and feed-forwards


class Block(nn.Module):
    """What blocks of every kind have in common: the way of the carry, recomputation, dropout.

    A kind of block is a subclass with `residual`, made as `kind(model, state, spec)` with a `BlockSpec`.
    """

    uses_cache = True
    uncompiled: tuple[str, ...] = ()  # as in `Part`

    def __init__(self, model: ModelConfig, state: ParallelState) -> None:
        super().__init__()
        self.state = state
        self.dropout = model.hidden_dropout
        if self.dropout > 0 and state.tp_size > 1:
            self.uncompiled = ("_drop",)  # tensor-parallel ranks agree on masks by generators that no graph can hold
        self.chunking = Recompute.of(model)
        self.fp8 = Precision(model, state)
        # Chunks of several blocks are recomputed by whoever runs the list (sequential.run_layers).
        self.recompute = self.chunking.policy if self.chunking.every == 1 else "none"
        documents, balance = ["documents"] * model.intra_document_masking, ["balance"] * adds_loss(model)
        shared = ["shared"] * (POSITIONS[model.pos_emb].shared is not None)
        tokens = ["tokens"] * (model.value_embedding_interval > 0)
        self.carried: tuple[str, ...] = ("hidden", "positions", *documents, *balance, *shared, *tokens)
        # What travels to it from the stage before; `model.gpt` adds `inner`.
        self.is_inner = False

    def forward(self, carry: Carry, cache: CacheEntry | None = None) -> Carry:
        """`cache`: what `new_cache` gave, with the earlier tokens (inference); it takes s more."""
        context = Context(carry.positions, carry.documents, cache, carry.shared, carry.tokens)
        policy = self.recompute if cache is None else "none"
        hidden, loss = recompute_in_backward(self.residual, policy, carry.hidden, context)
        if self.training and loss is not None and carry.balance is None:
            raise UserError("mlp_config: a feed-forward returned a loss that its adds_loss(model) does not announce")
        return carry.replace_hidden(hidden, loss)

    def residual(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """The block's function: (hidden states in the shape of x, what it adds to the loss or None)."""
        raise TypeError(f"{type(self).__name__} has no residual")

    def new_cache(self, capacity: int, start: Tensor | None) -> CacheEntry:
        """As `Mixer.new_cache`."""
        return LayerCache(capacity, start)

    def document_needs(self) -> set[Need]:
        """What its parts read of packed documents (`Documents.prepare`)."""
        return set()

    def _drop(self, x: Tensor) -> Tensor:
        return hidden_dropout(x, self.dropout, self.training, self.state)


BLOCKS: Registry[type[Block]] = Registry(
    BLOCK,
    wants="a subclass of megatron.model.block.Block",
    fits=lambda entry: isinstance(entry, type) and issubclass(entry, Block),
    measure=lambda name, model, mlp: size_of(lambda state: BLOCKS[name](model, state, BlockSpec(kind=name, mlp=mlp))),
)
"""Classes of blocks, for kinds of attention_config that are not a mixer in a `TransformerBlock`. An entry is a subclass
of `Block`, see there; `has_mlp = False` if it has no feed-forward.
"""

# By form: the norms before and after A, before and after M.
_NORMS: dict[str, tuple[str | None, ...]] = {
    "sequential": ("input_layernorm", None, "post_attention_layernorm", None),
    "parallel": ("input_layernorm", None, "post_attention_layernorm", None),
    "tied": ("input_layernorm", None, None, None),
    "olmo": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


class TransformerBlock(Block):
    """A mixer ("attention") and an MLP around the residual stream; parameter names as in GPT-NeoX's new style."""

    def __init__(self, model: ModelConfig, state: ParallelState, spec: BlockSpec) -> None:
        super().__init__(model, state)
        self.form = _form(model)
        self.norms = _NORMS[self.form]

        def add_norm(name: str) -> None:
            if name in self.norms:
                eps = model.mlp_norm_epsilon if name == self.norms[2] else None
                self.add_module(name, build_norm(model, state, eps=eps))

        # The order of the parameters is that of sums over them.
        add_norm("input_layernorm")
        self.attention = MIXERS[spec.kind](model, state, spec)
        add_norm("post_attention_layernorm")
        add_norm("pre_feedforward_layernorm")
        self.mlp = build_mlp(model, state, spec.mlp)
        add_norm("post_feedforward_layernorm")
        if self.norms[2] is not None and self.mlp.take_norm(getattr(self, self.norms[2])):
            self.norms = (*self.norms[:2], None, self.norms[3])

    def new_cache(self, capacity: int, start: Tensor | None) -> CacheEntry:
        return self.attention.new_cache(capacity, start)

    def document_needs(self) -> set[Need]:
        need = self.attention.document_need()
        return set() if need is None else {need}

    def residual(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        if self.form in ("parallel", "tied"):
            return self._parallel(x, context)
        before_a, after_a, before_m, after_m = self.norms
        x = x + self._drop(self._norm(after_a, self.attention(self._norm(before_a, x), context)))
        change, loss = self.mlp(self._norm(before_m, x), context)
        return x + self._drop(self._norm(after_m, change)), loss

    def _parallel(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        tied, normed = self.form == "tied", self.input_layernorm(x)
        if tied:
            normed = enter_tensor_parallel(normed, self.state)  # once: A and M have the same input
        partial = self.attention(normed, context, entered=tied, reduce=False)
        other = normed if tied else self._norm(self.norms[2], x)
        change, loss = self.mlp(other, context, entered=tied, reduce=False)
        total = leave_tensor_parallel(partial + change, self.state)
        return x + self._drop(self.mlp.add_bias(self.attention.add_bias(total))), loss

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else getattr(self, name)(x)


def _form(model: ModelConfig) -> str:
    """A row of the table above; the rules of the configuration refuse what is none."""
    if model.norm_placement in ("olmo3", "sandwich"):
        return model.norm_placement.rstrip("3")
    return ("tied" if model.gpt_j_tied else "parallel") if model.gpt_j_residual else "sequential"

"""Causal self-attention with a fused projection, split over heads.

Legend: b batch, s sequence, t = b·s, h hidden, n query heads, n_kv key/value heads, d head dim, /tp = this rank's part.

The fused weight `query_key_value` has the rows [Q of all heads | K | V], each part split over ranks by itself, so a
rank holds [Q/tp | K/tp | V/tp]. On disk it is in GPT-NeoX's order; the checkpoint code permutes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.layers.attention_backends import choose_backend
from megatron.layers.attention_contract import Call, Task
from megatron.layers.carry import Context
from megatron.layers.documents import Need
from megatron.layers.dropout import sharded_rng
from megatron.layers.init import build_init
from megatron.layers.norms import build_norm, build_rms_norm
from megatron.layers.norms.split import SplitRMSNorm
from megatron.layers.parts import MIXERS, BlockSpec, Mixer
from megatron.layers.positions import POSITIONS
from megatron.layers.transformer_engine.linear import engine_recipes
from megatron.layers.value_embeddings import ValueEmbeddings
from megatron.mpu.collectives import enter_tensor_parallel
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.block_sizes import ATTENTION

if TYPE_CHECKING:
    from megatron.neox_arguments.schema_model import ModelConfig


@MIXERS.register(*ATTENTION)
class SelfAttention(Mixer):
    """x -> dense(attention(q, k, v)); submodules `query_key_value`, `dense`, the optional query/key norms and value
    embeddings.

    The kind "flash" prefers flash-attn. `choice`: the attention back-end in use and why.
    """

    def __init__(self, model: ModelConfig, state: ParallelState, spec: BlockSpec) -> None:
        super().__init__()
        heads, kv_heads, d = model.num_attention_heads, model.num_kv_heads, model.head_dim
        for key, count in (("num_attention_heads", heads), ("num_kv_heads", kv_heads)):
            if count % state.tp_size:
                raise UserError(f"{key}: {count} cannot be split over model_parallel_size={state.tp_size}")
        if heads % kv_heads:
            raise UserError(f"num_kv_heads: {kv_heads} does not divide num_attention_heads={heads}")
        self.state = state
        self.heads, self.kv_heads, self.d = heads // state.tp_size, kv_heads // state.tp_size, d
        self.window = spec.window
        # muP: scores of wide heads grow with d, not sqrt(d), once queries and keys correlate (Tensor Programs V).
        self.scale = 1.0 / d if model.use_mup else (model.query_pre_attn_scalar or d) ** -0.5
        self.dropout, self.softcap = model.attention_dropout, model.attn_logit_softcapping
        bias = model.use_bias_in_attn_linear
        column, row = engine_recipes(model, state.device, both=model.te_mha)
        self.query_key_value = ColumnParallelLinear(
            model.hidden_size,
            (heads + 2 * kv_heads) * d,
            state=state,
            init=build_init(model),
            bias=bias,
            blocks=(heads * d, kv_heads * d, kv_heads * d),
            heads=(heads, kv_heads, kv_heads),
            recipe=column,
        )
        self.dense = RowParallelLinear(
            heads * d,
            model.hidden_size,
            state=state,
            init=build_init(model, residual=True),
            bias=bias and model.use_bias_in_attn_output,
            recipe=row,
        )
        self._build_qk_norms(model)
        self.value_embeddings = ValueEmbeddings(model, state, spec.vocabulary) if spec.vocabulary else None
        self.rotary = spec.rotary
        slopes, score_bias = POSITIONS[model.pos_emb].slopes, POSITIONS[model.pos_emb].score_bias
        self.score_bias = None if score_bias is None else partial(score_bias, model)
        self.slopes: Tensor | None = None
        if slopes is not None:
            mine = slopes(model)[state.tp_rank * self.heads : (state.tp_rank + 1) * self.heads]
            self.slopes = mine.to(state.device)  # not a buffer: it stays fp32 when an engine casts the model
        task = Task(
            state.device,
            spec.kind,
            documents=model.intra_document_masking,
            window=spec.window is not None,
            alibi=slopes is not None,
            bias=score_bias is not None,
            dropout=model.attention_dropout > 0,
            softcap=self.softcap is not None,
            head_dim=d,
        )
        self.choice = choose_backend(task, model.attention_backend, prefer=("transformer_engine",) * model.te_mha)
        self.attend = self.choice.backend.attend
        # Every tensor-parallel rank draws masks for its own heads, by a generator that no graph can hold.
        own_masks = self.dropout > 0 and state.tp_size > 1
        if own_masks or not self.choice.backend.one_graph(task):
            self.uncompiled = ("_attend",)

    def _build_qk_norms(self, model: ModelConfig) -> None:
        self.qk_layernorm: nn.Module | None = None
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.norm_per_head = model.qk_norm_per_head
        if self.norm_per_head:
            self.q_norm, self.k_norm = (build_rms_norm(model, self.state, width=self.d, region="tensor") for _ in "qk")
        elif model.use_separate_qk_norms:
            tp, eps = self.state.tp_size, model.rms_norm_epsilon
            self.q_norm = SplitRMSNorm(self.heads * tp * self.d, eps=eps, state=self.state)
            self.k_norm = SplitRMSNorm(self.kv_heads * tp * self.d, eps=eps, state=self.state)
        elif model.use_qk_layernorm:
            # Over d, one weight for all heads: GPT-NeoX's runs over [heads/tp, d], which depends on the layout.
            self.qk_layernorm = build_norm(model, self.state, width=self.d, region="tensor")

    def document_need(self) -> Need:
        return self.choice.backend.form_for(self.query_key_value.weight), self.window

    def describe(self) -> tuple[str, str]:
        return "attention back-end", str(self.choice)

    def forward(self, x: Tensor, context: Context, *, entered: bool = False, reduce: bool = True) -> Tensor:
        positions, documents, cache, shared, tokens = context
        if self.value_embeddings is not None and not entered:
            x, entered = enter_tensor_parallel(x, self.state), True  # once: their gates read it too
        q, k, v = self._project(x, positions, entered)
        if self.value_embeddings is not None:
            if tokens is None:
                raise RuntimeError("attention adds value embeddings, but was given no `Carry.tokens`")
            v = v + self.value_embeddings(tokens, x)
        start = None
        if cache is not None:
            k, v = cache.append(k, v)
            start, documents = cache.start, None  # a row of generation is one document
        bias = None
        if self.score_bias is not None:
            if shared is None:
                raise RuntimeError("attention adds a bias of positions to its scores, but was given no `Carry.shared`")
            bias = self.score_bias(shared, q.shape[1], k.shape[1])
        dropout = self.dropout if self.training else 0.0
        call = Call(self.scale, True, self.window, documents, start, self.slopes, dropout, self.softcap, bias)
        out = self._attend(q, k, v, call)
        return self.dense(out.reshape(-1, self.heads * self.d), reduce=reduce)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        with sharded_rng(call.dropout, self.state):
            return self.attend(q, k, v, call)

    def add_bias(self, total: Tensor) -> Tensor:
        return self.dense.add_bias(total)

    def _project(self, x: Tensor, positions: Tensor, entered: bool) -> tuple[Tensor, Tensor, Tensor]:
        """q [b, s, n/tp, d], k and v [b, s, n_kv/tp, d], normalised and rotated."""
        b, s = positions.shape
        fused = self.query_key_value(x, entered=entered)
        qk, v = fused.split(((self.heads + self.kv_heads) * self.d, self.kv_heads * self.d), dim=-1)
        if self.q_norm is not None and not self.norm_per_head:
            q, k = qk.split((self.heads * self.d, self.kv_heads * self.d), dim=-1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-1)
        qk = qk.view(b, s, self.heads + self.kv_heads, self.d)
        if self.norm_per_head:
            q, k = qk.split((self.heads, self.kv_heads), dim=2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        if self.qk_layernorm is not None:
            qk = self.qk_layernorm(qk)
        if self.rotary is not None:
            qk = self.rotary(qk, positions)
        q, k = qk.split((self.heads, self.kv_heads), dim=2)
        return q, k, v.view(b, s, self.kv_heads, self.d)

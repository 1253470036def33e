"""The models and rows of the GPU benchmark, most wanted first, and published figures to hold beside them.

A row is a list of words: who trains (`plain` torch or `deepy`) and what is switched on; `WORDS` says which keys each
sets. Every row fits a GPU of 80 GB (tests/tools/test_bench_gpu.py adds up): the batch of a step is cut into `pieces`
micro-batches, the same for all rows of a model.

`published`: a figure of the same or the full model, with the convention of its authors, converted to the full count of
attention where they count the causal half and give no other. None of them states its memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Model:
    """A model, the batch of a step and how it is cut.

    Attributes:
        keys: of its YAML.
        batch: sequences of a step; `pieces`: its micro-batches.
        published: a row's name -> what others report, for all their layers.
    """

    keys: dict[str, Any]
    vocab: int
    batch: int
    pieces: int = 1
    published: dict[str, str] = field(default_factory=dict)


def pythia(layers: int, hidden: int, heads: int, sequence: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "seq_length": sequence,
        "max_position_embeddings": sequence,
        "rotary_pct": 0.25,
        "gpt_j_residual": True,
        "activation": "gelu",
        "bias_gelu_fusion": True,
    }


def llama(layers: int, hidden: int, heads: int, kv_heads: int, wide: int, sequence: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "seq_length": sequence,
        "max_position_embeddings": sequence,
        "rotary_emb_base": 500000,
        "norm": "rmsnorm",
        "rms_norm_epsilon": 1e-5,
        "activation": "swiglu",
        "intermediate_size": wide,
        "gated_width_rule": "final",
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
    }


MODELS = {
    "1.4B": Model(
        pythia(24, 2048, 16, 2048),
        vocab=50304,
        batch=8,
        pieces=2,
        published={"deepy compiled": "54 147 tok/s, 49.7 % full count, 8 x 2048 in one piece, one H200 (this library)"},
    ),
    "8B, 8 of 32 layers": Model(
        llama(8, 4096, 32, 8, 14336, 4096),
        vocab=128256,
        batch=2,
        pieces=2,
        published={
            "deepy compiled": "10 456 tok/s, 550.6 TF, 55.7 % full count, 16 H100 (Megatron Bridge, Qwen3-8B)",
            "deepy compiled fp8": "14 451 tok/s @8192, 837 TF full count (744 half), 8 H100 (Megatron Bridge, Llama-3)",
            "deepy eager": "5 762 tok/s @8192, 33.7 % full count, selective, 8 H100 (torchtitan, eager)",
            "deepy compiled selective": "6 667 tok/s @8192, 39 % full count, 8 H100 (torchtitan, compiled)",
            "deepy compiled full": "388 TF full count, 7B @2048, 4 GH200 (GPT-NeoX's fork)",
        },
    ),
    "1.3B": Model(
        {**pythia(24, 2048, 16, 2048), "rotary_pct": 1.0, "gpt_j_residual": False},
        vocab=50304,
        batch=8,
        pieces=2,
        published={"deepy compiled": "45 455 tok/s, 41.8 % full count, 8 H100 (llm-foundry, MPT 1B)"},
    ),
    "30B-A3B, 4 of 48 layers": Model(
        {
            **llama(4, 2048, 32, 4, 6144, 4096),
            "head_dim": 128,
            "moe_num_experts": 128,
            "moe_top_k": 8,
            "moe_router_type": "topk",
            "moe_normalize_topk": True,
            "moe_intermediate_size": 768,
            "moe_aux_loss_coeff": 0.001,
        },
        vocab=32768,
        batch=2,
        published={"deepy compiled": "13 011 tok/s, 299 TF half count, 16 H100 (Megatron Bridge, Qwen3-30B-A3B)"},
    ),
    "1.2B@8192": Model(
        llama(16, 2048, 32, 8, 8192, 8192),
        vocab=128256,
        batch=2,
        pieces=2,
        published={"deepy compiled": "44 342 tok/s, 2 x 8192 in one piece, one H200 (this library)"},
    ),
    "160M": Model(pythia(12, 768, 12, 2048), vocab=50304, batch=16, pieces=2),
}

PROFILED = ("1.4B", "deepy compiled")  # its kernels are listed as well

ROWS: tuple[tuple[str, str], ...] = (
    ("1.4B", "deepy compiled"),
    ("1.4B", "plain"),
    ("8B, 8 of 32 layers", "deepy compiled"),
    ("1.4B", "deepy compiled native"),
    ("30B-A3B, 4 of 48 layers", "deepy compiled"),
    ("8B, 8 of 32 layers", "deepy compiled native"),
    ("1.4B", "deepy compiled packed"),
    ("1.4B", "deepy eager"),
    ("8B, 8 of 32 layers", "deepy compiled fp8"),
    ("1.3B", "deepy compiled"),
    ("30B-A3B, 4 of 48 layers", "deepy compiled full"),
    ("160M", "deepy compiled"),
    ("160M", "deepy compiled loader"),
    ("160M", "plain"),
    ("1.4B", "deepy compiled selective"),
    ("1.4B", "deepy compiled full"),
    ("1.4B", "deepy compiled cudnn"),
    ("1.2B@8192", "deepy compiled packed"),
    ("1.2B@8192", "deepy compiled"),
    ("1.4B", "deepy compiled loader"),
    ("1.4B", "deepy compiled zero2"),
    ("1.4B", "deepy eager zero3"),
    ("1.4B", "deepy eager packed"),
    ("8B, 8 of 32 layers", "deepy compiled selective"),
    ("8B, 8 of 32 layers", "deepy compiled full"),
    ("8B, 8 of 32 layers", "deepy eager"),
    ("30B-A3B, 4 of 48 layers", "deepy compiled native"),
    ("160M", "deepy compiled native"),
    ("1.4B", "deepy compiled packed native"),
    ("1.3B", "deepy compiled native"),
    ("1.4B", "deepy eager native"),
    ("1.4B", "deepy compiled full native"),
    ("8B, 8 of 32 layers", "deepy compiled selective native"),
    ("1.2B@8192", "deepy compiled packed native"),
    ("160M", "deepy eager"),
    ("1.2B@8192", "deepy compiled cudnn"),
    ("1.2B@8192", "deepy compiled packed flex"),
    ("1.3B", "deepy compiled full"),
    ("1.4B", "deepy compiled packed torch"),
    ("1.4B", "deepy compiled zero1"),
    ("1.4B", "deepy compiled chunk512"),
    ("1.4B", "plain compiled"),
)

WORDS: dict[str, dict[str, Any]] = {
    "compiled": {"torch_compile": True},
    "eager": {"torch_compile": False},
    "packed": {"intra_document_masking": True},
    "full": {"checkpoint_policy": "full"},
    "selective": {"checkpoint_policy": "selective"},
    "fp8": {"te_mha": True, "te_layernorm_mlp": True, "te_fp8_mha": True},
    "native": {"engine": "native"},
    "chunk512": {"loss_chunk_size": 512},
    "loader": {},  # every step reads its batch from a file, ahead in threads; otherwise all steps take the same batch
    **{name: {"attention_backend": name} for name in ("torch", "cudnn", "varlen", "flex", "flash")},
    **{f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in (1, 2, 3)},
}


def keys_of(model: Model, words: Iterable[str]) -> dict[str, Any]:
    """The configuration of a row of `deepy`."""
    keys = {
        **model.keys,
        "pos_emb": "rotary",
        "no_weight_tying": True,
        "make_vocab_size_divisible_by": 128,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "weight_decay": 0.1,
        "gradient_clipping": 1.0,
        "precision": "bfloat16",
        "train_batch_size": model.batch,
        "train_micro_batch_size_per_gpu": model.batch // model.pieces,
        "train_iters": 200,
    }
    for word in words:
        keys.update(WORDS[word])
    return keys


def shrunk(model: Model) -> Model:
    """The same with tiny sizes, for a trial on any device."""
    small = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "seq_length": 64,
        "max_position_embeddings": 64,
        "intermediate_size": 256,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_intermediate_size": 64,
    }
    keys = {**model.keys, **{name: value for name, value in small.items() if name in model.keys}}
    return Model(keys, 512, model.pieces, model.pieces, model.published)

"""The keys of the network: `args.model`."""

# ruff: noqa: RUF009  (key() returns a dataclass field)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys import key
from megatron.neox_arguments.schema_mamba import MambaConfig

_Backend = Literal["auto", "torch", "cudnn", "varlen", "flash", "flex", "transformer_engine", "manual"]
_MUP_FILES = "base-shape files are not used; set mup_base_hidden_size to the width the learning rate was tuned at"


@dataclass(frozen=True)
class ModelConfig(MambaConfig):
    """Shape, layers, initialisation, recomputation and muP of the network."""

    # shape
    num_layers: int | None = key(None, "Number of transformer blocks. Required.", most=100_000)
    hidden_size: int | None = key(None, "Width of the residual stream. Required.")
    num_attention_heads: int | None = key(None, "Number of query heads. Required.")
    num_kv_heads: int | None = key(
        None, "Number of key/value heads; fewer than the query heads is grouped-query attention. Default: all."
    )
    head_dim: int | None = key(None, "Width of one head (default: hidden_size / num_attention_heads).", new=True)
    seq_length: int | None = key(None, "Tokens per training sample. Required.")
    max_position_embeddings: int | None = key(
        None,
        "Longest sequence the model can take (rows of the learned position table). Default: seq_length, plus"
        " opt_pos_emb_offset.",
        differs="may be left out",
    )
    intermediate_size: int | None = key(
        None,
        "Width of the feed-forward layer. With a gated activation, `gated_width_rule` decides what it means.",
        differs="may be the final width with gated activations, where upstream GPT-NeoX always takes a third of it",
    )
    expansion_factor: float | None = key(None, "Feed-forward width as a multiple of hidden_size (default 4).")
    mlp_multiple_of: int = key(
        1,
        "Round the feed-forward width up to a multiple of this.",
        differs="works with plain activations too, where GPT-NeoX builds layers that do not fit",
    )
    gated_width_rule: Literal["final", "two_thirds"] | None = key(
        None,
        "What the feed-forward width means with a gated activation. `final`: it is the width used. `two_thirds`:"
        " GPT-NeoX's rule, two thirds of it shared by the up and gate halves (32768 gives 11008 with mlp_multiple_of"
        " 256). Default: what the shapes of the checkpoint show that the run starts from; else `final` when that is at"
        " most 6 x hidden_size, `two_thirds` when that gives at least 2.4 x hidden_size (geglu: refused), anything"
        " between is refused; without intermediate_size `two_thirds` of 4 x hidden_size, as GPT-NeoX.",
        new=True,
    )
    ffn_width: int | None = key(None, "Feed-forward width actually built, after all rules.", derived="check", new=True)
    activation: str = key("gelu", "Feed-forward activation, plain or of a gate.", registry="activation")
    bias_gelu_fusion: bool = key(
        False, "Use the tanh approximation of GELU. A 'fusion' in GPT-NeoX that changes the numbers, so it is kept."
    )
    use_bias_in_attn_linear: bool = key(True, "Biases in the QKV and attention output projections.")
    use_bias_in_attn_output: bool = key(
        True, "With use_bias_in_attn_linear: a bias in the attention output projection too (Qwen2 has none).", new=True
    )
    use_bias_in_mlp: bool = key(
        True,
        "Biases in the feed-forward projections.",
        differs="false works with every activation and with gpt_j_residual",
    )
    no_weight_tying: bool = key(False, "Give the output head its own matrix instead of sharing the word embeddings.")
    use_bias_in_head: bool = key(False, "A bias in the output head (with no_weight_tying).", new=True)
    output_head: Literal["vocabulary", "reward"] = key(
        "vocabulary",
        "What the last layer gives for each token: logits of the vocabulary, or one number (train_impl: rm).",
        derived="check",
        new=True,
    )
    final_logit_softcapping: float | None = key(
        None, "Bound logits smoothly: c * tanh(logits / c), in training as in generation (Gemma 2: 30).", new=True
    )
    z_loss_weight: float = key(
        0.0,
        "Add this times the squared logsumexp of each trained token's logits to the loss, which keeps logits from"
        " drifting: its gradient counts, the reported loss is without it, train/z_loss has it.",
        new=True,
    )
    scale_embedding: bool = key(
        False, "Multiply word embeddings by sqrt(hidden_size), rounded to the model's precision (Gemma).", new=True
    )
    output_layer_parallelism: Literal["column"] = key("column", "How the output head is split over tensor parallel.")

    # normalisation
    norm: str = key(
        "layernorm",
        "Normalisation layer. rmsnorm_unit_offset multiplies by 1 + weight, which starts at 0 (Gemma); norms of queries"
        " and keys are then of that kind too. te_layernorm and te_rmsnorm are layernorm and rmsnorm with te_norm.",
        registry="norm",
    )
    te_norm: bool = key(
        False, "Run the norms by Transformer Engine where it is installed; norm: te_layernorm sets it.", new=True
    )
    norm_placement: Literal["pre", "post", "olmo3", "sandwich"] = key(
        "pre",
        "Where the norms of a block are: pre, olmo3 (after attention and feed-forward, inside the residual), or"
        " sandwich (before and after each, Gemma 2 and 3).",
        unavailable={
            "post": "GPT-NeoX builds pre-norm blocks for it; use norm_placement: pre",
        },
    )
    use_qk_layernorm: bool = key(
        False,
        "Normalise queries and keys of each head before attention, with one norm for all heads.",
        differs="over the head dimension; GPT-NeoX normalises [heads per rank, head], which depends on the layout",
    )
    use_separate_qk_norms: bool = key(
        False,
        "With use_qk_layernorm: an RMSNorm over all query heads together and one over all key heads instead.",
        differs="over the whole width on any layout, where the GPT-NeoX fork normalises each rank's part",
    )
    qk_norm_per_head: bool = key(
        False,
        "With use_separate_qk_norms: each head is normalised by itself, with one weight for all query heads and one for"
        " all key heads (Qwen3), instead of all heads together.",
        new=True,
    )
    layernorm_epsilon: float = key(1e-5, "Epsilon of layernorm and non_parametric_layernorm.")
    rms_norm_epsilon: float = key(1e-8, "Epsilon of rmsnorm and rmsnorm_unit_offset, inside the root.")
    mlp_norm_epsilon: float | None = key(
        None,
        "Epsilon of the norm before the feed-forward, where it is not that of the other norms; te_layernorm_mlp sets"
        " it.",
        new=True,
    )
    scalenorm_epsilon: float = key(1e-8, "Smallest norm that scalenorm divides by.")

    # residual form
    gpt_j_residual: bool = key(False, "Attention and feed-forward in parallel: x + attn(norm(x)) + mlp(norm'(x)).")
    gpt_j_tied: bool = key(False, "With gpt_j_residual: one norm for both branches.")

    # positions
    pos_emb: str = key(
        "learned",
        "How positions enter the network.",
        registry="pos_emb",
    )
    rpe_num_buckets: int = key(
        32, "Buckets of distances of pos_emb: rpe, half of them for one distance each.", most=65536
    )
    rpe_max_distance: int = key(128, "Distance from which on all are in the last bucket of pos_emb: rpe.")
    opt_pos_emb_offset: int = key(0, "Constant added to learned positions (OPT models use 2).")
    rotary_pct: float = key(1.0, "Fraction of each head's dimensions that are rotated.")
    rotary_emb_base: float = key(10000.0, "Base (theta) of the rotary frequencies.")
    rotary_emb_base_local: float | None = key(
        None,
        "Base of the rotary frequencies in layers with a sliding window, where they are not scaled either (Gemma 3)."
        " Default: as in all other layers.",
        new=True,
    )
    rope_scaling: dict[str, Any] | None = key(
        None,
        "Stretches rotary positions, as in Hugging Face's config.json: {rope_type: linear, factor: F}, {rope_type:"
        " llama3, factor, low_freq_factor, high_freq_factor, original_max_position_embeddings}, or {rope_type: yarn,"
        " factor, original_max_position_embeddings}, with attention_factor, beta_fast, beta_slow, mscale,"
        " mscale_all_dim, truncate if wanted. {rope_type: dynamic, factor} changes nothing up to"
        " max_position_embeddings. {rope_type: longrope, short_factor, long_factor, original_max_position_embeddings}"
        " has a factor per rotated pair, others in texts longer than the original length.",
        new=True,
    )

    # attention
    attention_config: tuple[Any, ...] | None = key(
        None,
        "Kind of attention per layer: [[[kinds...], n or 'all'], ...] repeats the kinds n times; or a flat list of"
        " num_layers kinds. 'global' and 'flash' are full causal attention, 'local' is a sliding window, 'mamba' and"
        " 'mamba2' are state spaces (blocks without feed-forward), 'rwkv4' is RWKV-4, 'rwkv' RWKV-6, 'gmlp' and"
        " 'amlp' are gMLP's blocks without and with attention. Resolved to one kind per layer.",
    )
    attention_backend: _Backend = key(
        "auto",
        "Attention implementation: auto picks the best exact one for the device and the task; the one used is logged."
        " varlen runs packed documents one by one (intra_document_masking), cudnn is torch's with cuDNN's kernel"
        " first.",
        registry="attention_backend",
        new=True,
    )
    query_pre_attn_scalar: float | None = key(
        None, "Attention scores are divided by the square root of this. Default: head_dim.", new=True
    )
    attn_logit_softcapping: float | None = key(
        None,
        "Bound attention scores smoothly: c * tanh(scores / c), before the mask (Gemma 2: 50). Needs a back-end that"
        " can (flash, flex or manual; auto takes one).",
        new=True,
    )
    sliding_window_width: int | None = key(
        None, "Each token sees itself and this many tokens before it (Hugging Face counts one less). All layers."
    )
    layer_windows: tuple[int | None, ...] | None = key(
        None,
        "Sliding window of each layer (None: full attention). Only 'local' layers have it when there are any.",
        derived="check",
        new=True,
    )
    mlp_config: tuple[Any, ...] | None = key(
        None,
        "Kind of feed-forward per layer, written as attention_config, or one name for all layers: 'dense', or what a"
        " plugin registers. Layers that are a mixture of experts (moe_num_experts) stay so. Default: dense.",
        new=True,
    )
    layer_mlps: tuple[str, ...] | None = key(
        None, "Feed-forward of each layer: dense, moe, or none (in blocks that have none).", derived="check", new=True
    )
    sparsity_config: dict[str, Any] | None = key(
        None, "Options of block-sparse attention.", unavailable="use attention_config 'global' or sliding_window_width"
    )
    value_embedding_interval: int = key(
        0,
        "Value embeddings: every n-th layer, counted from the last, adds a learned vector of each token, times a gate"
        " per key/value head, to the values of attention. They cost vocabulary x num_kv_heads x head_dim parameters a"
        " layer, and no products of matrices. 0: none.",
        new=True,
    )
    intra_document_masking: bool = key(
        False,
        "Stop attention at the boundaries of packed documents and restart positions in each.",
        new=True,
    )

    plugin_options: dict[str, Any] | None = key(
        None, "Options of plugins, for instance {my_mixer: {width: 3}}; Deepy reads none of it.", new=True
    )

    # dropout
    attention_dropout: float = key(0.0, "Dropout on attention probabilities.")
    embedding_dropout: float | None = key(None, "Dropout on embeddings. Default: hidden_dropout.", new=True)
    hidden_dropout: float = key(0.0, "Dropout on embeddings and on what each block adds to the residual stream.")

    # initialisation
    init_method: str = key(
        "normal",
        "Initialisation of weights other than the output projections.",
        registry="init_method",
        differs="orthogonal works",
    )
    output_layer_init_method: str = key(
        "scaled_normal",
        "Initialisation of the attention output and second feed-forward projections.",
        registry="init_method",
    )
    init_method_std: float = key(0.02, "Standard deviation of the normal initialisations.")

    # memory and speed
    checkpoint_activations: bool = key(False, "Recompute blocks in the backward pass instead of keeping activations.")
    checkpoint_num_layers: int = key(1, "Blocks per recomputed chunk.")
    checkpoint_policy: Literal["none", "full", "selective"] | None = key(
        None,
        "What is recomputed: none, full (everything in a block) or selective (all but matrix products and attention)."
        " Default: full with checkpoint_activations, else none.",
        new=True,
    )
    torch_compile: bool | None = key(
        None,
        "Compile each block with torch.compile, around what cannot be compiled. Default: on for GPUs, off on CPUs (no "
        "gain).",
        new=True,
    )
    loss_chunk_size: int | None = key(
        None,
        "Tokens per chunk of the fused output head and loss (default: 512 on a CPU, 4096 on a GPU); bounds their "
        "memory, not the result.",
        new=True,
    )

    # mixture of experts
    moe_num_experts: int = key(1, "Experts of a mixture-of-experts layer; 1: all layers are dense.")
    moe_expert_interval: int = key(
        1, "Every n-th layer, from the first, is a mixture of experts (with moe_num_experts > 1), the others are dense."
    )
    moe_layers: tuple[Any, ...] | None = key(
        None,
        "Which layers are mixtures of experts, instead of moe_expert_interval: their numbers from 0, or 'dense' and"
        " 'moe' for every layer, or patterns as in attention_config, such as [[[dense], 1], [[moe], 15]].",
        new=True,
    )
    moe_top_k: int = key(1, "Experts per token.")
    moe_router_type: Literal["sinkhorn", "topk"] = key(
        "sinkhorn",
        "How experts are chosen: topk takes the largest scores; sinkhorn balances a micro-batch's scores first, in"
        " training, and weighs by sigmoid (moe_top_k 1) or softmax.",
        differs="always three rounds of sinkhorn; the GPT-NeoX fork's test ends it after the first",
    )
    moe_router_score: Literal["softmax", "sigmoid"] = key(
        "softmax", "Scores of topk: softmax over all experts, or a sigmoid of each.", new=True
    )
    moe_normalize_topk: bool = key(False, "Divide the weights of a token's experts by their sum (topk).", new=True)
    moe_routed_scaling: float = key(1.0, "Multiplies the weights of a token's experts (topk).", new=True)
    moe_jitter_eps: float | None = key(
        None,
        "In training, multiply router inputs by uniform noise from 1 - eps to 1 + eps (topk).",
        differs="works; raises an error in the GPT-NeoX fork",
    )
    moe_capacity_factor: float | None = key(
        None,
        "In training, an expert takes at most this times seq_length x moe_top_k / moe_num_experts tokens of a sequence,"
        " rounded up, first come first served; others skip it. With intra_document_masking the same of each document"
        " and its length. Default: none is dropped.",
        new=True,
    )
    moe_intermediate_size: int | None = key(
        None, "Feed-forward width of one expert, as built. Default: that of a dense layer.", new=True
    )
    moe_expert_bias: bool = key(False, "Biases in experts (use_bias_in_mlp is for dense layers).", new=True)
    moe_shared_expert_size: int = key(
        0, "Width of a shared expert that every token goes through besides its own; 0: none.", new=True
    )
    moe_shared_expert_gate: bool = key(
        False, "Multiply the shared expert's output by a sigmoid gate of the token (Qwen2-MoE).", new=True
    )
    moe_aux_loss_coeff: float = key(
        0.0,
        "Coefficient of the balance loss: of each layer and sequence, moe_num_experts x the sum over experts of (share"
        " of the tokens x mean score), which is moe_top_k when balanced. Its gradient counts, the reported loss is"
        " without it.",
        new=True,
    )
    moe_z_loss_coeff: float = key(
        0.0, "Coefficient of the mean squared log-sum-exp of router logits, treated alike.", new=True
    )
    moe_bias_balancing_rate: float = key(
        0.0,
        "Balance without a loss: after each step the bias of every expert, added to its score where experts are chosen,"
        " moves by this towards an equal load (topk; 0: off).",
        new=True,
    )

    # muP
    use_mup: bool = key(False, "Scale initialisation, attention, output and learning rates by width (muP).")
    mup_base_hidden_size: int | None = key(
        None, "hidden_size at which the learning rate was tuned; required by use_mup.", new=True
    )
    mup_width_mult: float = key(1.0, "hidden_size / mup_base_hidden_size (1 without muP).", derived="check", new=True)
    mup_init_scale: float = key(1.0, "Multiplies initial weights under muP.")
    mup_embedding_mult: float = key(1.0, "Multiplies the word embeddings under muP.")
    mup_rp_embedding_mult: float = key(
        1.0, "Multiplies position embeddings under muP.", differs="only under muP; GPT-NeoX applies it always"
    )
    coord_check: bool = key(False, "Write muP coordinate plots.", unavailable="compare widths with two short runs")
    save_base_shapes: bool = key(False, "Write muP base-shape files.", unavailable=_MUP_FILES)
    base_shapes_file: str | None = key(None, "muP base-shape file.", unavailable=_MUP_FILES)
    mup_width_scale: int = key(2, "Width factor of muP's delta model.", unavailable=_MUP_FILES)

    # RWKV
    dim_att: int | None = key(
        None, "Channels of RWKV layers' time mixing (default: hidden_size).", differs="may be left out"
    )
    head_size: int | None = key(
        None, "Width of one head of rwkv (RWKV-6) layers (default: 64).", differs="may be left out"
    )
    ffn_dim: int | None = key(
        None,
        "Width of RWKV layers' channel mixing (default: 4 x hidden_size for rwkv4; for rwkv 3.5 x hidden_size, rounded"
        " down to a multiple of 32).",
        differs="may be left out",
    )

    # gMLP
    gmlp_attn_dim: int = key(64, "Width of the one head of attention in amlp layers.")

    # Transformer Engine: its modules where the package and a GPU are there, the same numbers without
    # (rules_transformer_engine.py has what each key builds)
    te_layernorm_mlp: bool = key(
        False,
        "Norm and feed-forward in one module of Transformer Engine. GELU is then its tanh form, the norm's epsilon 1e-5"
        " (layernorm) or 1e-8 (rmsnorm), and both projections have biases, with the package as without.",
    )
    te_mha: bool = key(
        False,
        "Attention by Transformer Engine. All its projections have biases then, and queries and keys no norms, with the"
        " package as without.",
    )
    te_columnparallel: bool = key(
        False, "QKV and first feed-forward projection by Transformer Engine; the output head is not."
    )
    te_rowparallel: bool = key(False, "Attention output and second feed-forward projection by Transformer Engine.")
    te_fp8_mha: bool = key(
        False,
        "Transformer Engine's attention (te_mha), and every layer that it runs in FP8 with delayed scaling. Without the"
        " package, or on a GPU without FP8, the run's precision.",
        differs="works, where GPT-NeoX stops with an AttributeError",
    )
    te_fp8_format: Literal["e4m3", "hybrid"] = key("hybrid", "FP8 format; hybrid has e5m2 gradients.")
    te_fp8_margin: int = key(0, "FP8: powers of two between the largest value seen and the largest of the format.")
    te_fp8_wgrad: bool = key(True, "FP8: weight gradients too, where Transformer Engine has a switch for them.")
    te_fp8_amax_history_len: int = key(1, "FP8: steps whose largest values decide the scale.")
    te_fp8_amax_compute_algo: Literal["most_recent", "max"] = key(
        "most_recent", "FP8: the newest of these values decides, or the largest."
    )

    # known, not available
    soft_prompt_tuning: dict[str, Any] | None = key(
        None, "Soft prompt tuning.", unavailable="fine-tune the whole model with finetune: true"
    )

    @property
    def ties_head(self) -> bool:
        """Whether the output matrix is the word embedding's; a head of rewards never is."""
        return not self.no_weight_tying and self.output_head == "vocabulary"

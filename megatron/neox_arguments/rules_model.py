"""Rules about the shape of the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.errors import nearest
from megatron.neox_arguments.block_sizes import BLOCK, GMLP, HEADLESS, is_gated
from megatron.neox_arguments.draft import Draft, nearest_multiples
from megatron.neox_arguments.formulas import round_up
from megatron.neox_arguments.rope_kinds import rope_problem
from megatron.neox_arguments.rules_parallel import stages
from megatron.registry import added

_ATTENTION = ("global", "local", "flash")
KINDS = (*_ATTENTION, *HEADLESS)
# Kinds of mixer whose blocks have no feed-forward, or one of their own.
WITHOUT_MLP: tuple[str, ...] = HEADLESS
_UNAVAILABLE_KINDS = {
    "sparse_fixed": "use 'local' with sliding_window_width",
    "sparse_variable": "use 'local' with sliding_window_width",
    "bigbird": "use 'local' with sliding_window_width",
    "bslongformer": "use 'local' with sliding_window_width",
}


def check_required(draft: Draft) -> None:
    """The keys without which there is no model, and the ranges of sizes and fractions."""
    for name in ("num_layers", "hidden_size", "seq_length"):
        draft.require(name)
    draft.positive(
        "num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "head_dim", "seq_length",
        "max_position_embeddings", "intermediate_size", "expansion_factor", "mlp_multiple_of",
        "make_vocab_size_divisible_by", "rotary_emb_base",
        "sliding_window_width", "init_method_std", "checkpoint_num_layers", "loss_chunk_size",
        "mup_base_hidden_size", "mup_init_scale", "mup_embedding_mult", "mup_rp_embedding_mult",
        "peak_theoretical_tflops",
    )  # fmt: skip
    draft.not_negative("layernorm_epsilon", "rms_norm_epsilon", "scalenorm_epsilon", "opt_pos_emb_offset")
    draft.check(lambda value: 0 <= value < 1, "must be in [0, 1)", "attention_dropout", "hidden_dropout")
    draft.check(lambda value: 0 < value <= 1, "must be in (0, 1]", "rotary_pct")


def heads(draft: Draft) -> None:
    """head_dim and num_kv_heads; both head counts must divide, also over tensor-parallel ranks."""
    if set(draft["attention_config"]) <= set(HEADLESS):
        _no_heads(draft)
        return
    draft.require("num_attention_heads")
    hidden, queries = draft["hidden_size"], draft["num_attention_heads"]
    width = draft.get_given("head_dim")
    if width is None and hidden % queries:
        near = nearest_multiples(hidden, queries)
        draft.fail("num_attention_heads", f"{queries} heads do not divide hidden_size {hidden}; nearest width {near}")
    keys = draft.get_given("num_kv_heads") or queries
    if queries % keys:
        fitting = [str(count) for count in range(1, queries + 1) if queries % count == 0]
        draft.fail("num_kv_heads", f"{keys} does not divide num_attention_heads {queries}; use {' or '.join(fitting)}")
    draft.set("head_dim", width or hidden // queries, f"hidden_size {hidden} / num_attention_heads {queries}")
    draft.set("num_kv_heads", keys, "num_attention_heads")
    with draft.part():
        rotated = int(draft["head_dim"] * draft["rotary_pct"])
        if draft["pos_emb"] == "rotary" and (rotated < 2 or rotated % 2):
            draft.fail(
                "rotary_pct", f"{rotated} of {draft['head_dim']} dimensions would be rotated; it must be even and > 0"
            )
    tensor = draft["model_parallel_size"]
    for name, count in (("num_attention_heads", queries), ("num_kv_heads", keys)):
        if count % tensor:
            draft.fail(
                "model_parallel_size",
                f"{name} {count} cannot be split over {tensor} tensor-parallel ranks;"
                f" use a model_parallel_size that divides it ({_divisors(count)})",
            )


def _no_heads(draft: Draft) -> None:
    """Without a layer of attention its keys mean nothing; they get values that other rules can use."""
    queries = draft.get_given("num_attention_heads") or 1
    draft.set("num_attention_heads", queries, "no layer of attention")
    draft.set("num_kv_heads", draft.get_given("num_kv_heads") or queries, "no layer of attention")
    draft.set(
        "head_dim", draft.get_given("head_dim") or max(1, draft["hidden_size"] // queries), "no layer of attention"
    )


def _divisors(number: int) -> str:
    return ", ".join(str(count) for count in range(1, number + 1) if number % count == 0)


def positions(draft: Draft) -> None:
    """max_position_embeddings holds seq_length and, with a position table, the constant offset."""
    offset = draft["opt_pos_emb_offset"] if draft["pos_emb"] == "learned" else 0
    needed = draft["seq_length"] + offset
    longest = draft.get_given("max_position_embeddings")
    if longest is not None and longest < needed:
        plus = f" plus opt_pos_emb_offset {offset}" if offset else ""
        draft.fail("max_position_embeddings", f"{longest} is below seq_length {draft['seq_length']}{plus}")
    draft.set("max_position_embeddings", longest or needed, "seq_length")


def gating_layers(draft: Draft) -> None:
    """What gmlp and amlp layers need: a plain activation, and no muP."""
    draft.positive("gmlp_attn_dim")
    if not set(GMLP) & set(draft["attention_config"]):
        return
    if is_gated(draft["activation"]):
        draft.fail(
            "activation", f"gmlp and amlp layers gate by themselves; {draft['activation']} is no plain activation"
        )
    if draft["use_mup"]:
        draft.fail("use_mup", "muP has no rule for gmlp and amlp layers; set it to false")


def relative_positions(draft: Draft) -> None:
    """Buckets of pos_emb: rpe. Its table travels through all stages, and each must use it."""
    draft.positive("rpe_num_buckets", "rpe_max_distance")
    if draft["pos_emb"] != "rpe":
        return
    buckets, reach = draft["rpe_num_buckets"], draft["rpe_max_distance"]
    if buckets < 2:
        draft.fail("rpe_num_buckets", f"must be at least 2, is {buckets}")
    if reach <= buckets // 2:
        draft.fail("rpe_max_distance", f"must be above rpe_num_buckets / 2 = {buckets // 2}, is {reach}")
    others = sorted(set(draft["attention_config"]) - set(_ATTENTION))
    if others and (stages(draft) > 1 or not set(draft["attention_config"]) & set(_ATTENTION)):
        draft.fail(
            "pos_emb",
            f"rpe acts in attention, and not every pipeline stage has it ({' and '.join(others)} layers); use pos_emb:"
            " none or pipe_parallel_size: 0",
        )


def rope_scaling(draft: Draft) -> None:
    """A known kind of rotary scaling with exactly its numbers."""
    scaling = draft["rope_scaling"]
    if scaling is None:
        return
    if draft["pos_emb"] != "rotary":
        draft.fail("rope_scaling", f"pos_emb is {draft['pos_emb']}; it needs rotary")
    if problem := rope_problem(scaling, int(draft["head_dim"] * draft["rotary_pct"]) // 2):
        draft.fail("rope_scaling", problem)


def residual_form(draft: Draft) -> None:
    """Combinations of residual form and norm placement that exist."""
    with draft.part():
        if draft["gpt_j_tied"] and not draft["gpt_j_residual"]:
            draft.fail("gpt_j_tied", "needs gpt_j_residual: true")
        if draft["norm_placement"] in ("olmo3", "sandwich") and draft["gpt_j_residual"]:
            draft.fail("norm_placement", f"{draft['norm_placement']} blocks are sequential; set gpt_j_residual: false")
    _query_key_norms(draft)


def _query_key_norms(draft: Draft) -> None:
    """use_separate_qk_norms says which norms use_qk_layernorm means, as in GPT-NeoX's fork; alone it asks for none."""
    together, separate, per_head = draft["use_qk_layernorm"], draft["use_separate_qk_norms"], draft["qk_norm_per_head"]
    if per_head and not separate:
        draft.fail("qk_norm_per_head", "needs use_separate_qk_norms: true")
    if separate and not (together or per_head):
        draft.note(
            f"{draft.source('use_separate_qk_norms')}: use_separate_qk_norms has no effect without use_qk_layernorm:"
            " true, as in GPT-NeoX's fork: queries and keys are not normalised"
        )
        draft.set("use_separate_qk_norms", False, "use_qk_layernorm")
    elif separate and not per_head and "rmsnorm" not in draft["norm"]:
        draft.fail(
            "use_separate_qk_norms",
            f"norms over all heads are RMSNorms; GPT-NeoX's fork builds norms of the kind norm: {draft['norm']} here."
            " Set norm: rmsnorm or qk_norm_per_head: true",
        )


def attention(draft: Draft) -> None:
    """attention_config as one kind per layer, and the window of each layer."""
    layers = draft["num_layers"]
    kinds = _expand_attention(draft, draft.get_given("attention_config"), layers)
    if len(kinds) != layers:
        draft.fail("attention_config", f"describes {len(kinds)} layers, num_layers is {layers}")
    draft.set("attention_config", kinds, "'global' for every layer")
    window = draft["sliding_window_width"]
    if "local" in kinds and window is None:
        draft.fail("attention_config", "'local' layers need sliding_window_width")
    only_local = "local" in kinds
    windows = tuple(None if only_local and kind != "local" else window for kind in kinds)
    draft.set("layer_windows", windows, "sliding_window_width and attention_config")


def _expand_attention(draft: Draft, config: tuple[Any, ...] | None, layers: int) -> tuple[str, ...]:
    if config is None:
        return ("global",) * layers
    return expand(draft, "attention_config", config, layers, lambda kind: _kind(draft, kind))


def expand(draft: Draft, key: str, config: tuple[Any, ...], layers: int, kind: Callable[[Any], str]) -> tuple[str, ...]:
    """One kind per layer from a flat list of kinds or from [[kinds...], n or 'all'] items; `kind` checks one."""
    if all(isinstance(item, str) for item in config):
        return tuple(kind(item) for item in config)
    kinds: list[str] = []
    for item in config:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], tuple)):
            draft.fail(key, f"{item!r} is not [[kinds...], n]")
        pattern = [kind(one) for one in item[0]]
        times = item[1]
        if isinstance(times, str) and times.lower() == "all":
            if not pattern or layers % len(pattern):
                draft.fail(key, f"a pattern of {len(pattern)} kinds does not divide {layers} layers")
            return (*kinds, *(pattern * (layers // len(pattern))))
        if not isinstance(times, int) or isinstance(times, bool) or times < 0:
            draft.fail(key, f"{times!r} is not a number of repetitions or 'all'")
        kinds += pattern * times
    return tuple(kinds)


def without_mlp(kind: str) -> bool:
    """Whether blocks of this kind of mixer have no feed-forward."""
    return kind in WITHOUT_MLP or not getattr(added(BLOCK).get(kind), "has_mlp", True)


def _kind(draft: Draft, kind: Any) -> str:
    plugged = {name.lower(): name for name in (*added("attention_config"), *added(BLOCK))}
    name = str(kind).lower()
    if name in plugged:
        return plugged[name]
    if name in _UNAVAILABLE_KINDS:
        draft.fail("attention_config", f"{name!r} layers are not available: {_UNAVAILABLE_KINDS[name]}")
    if name not in KINDS:
        choices = [*KINDS, *plugged.values()]
        hint = nearest(name, [*choices, *_UNAVAILABLE_KINDS])
        draft.fail("attention_config", f"{kind!r} is not a kind of attention.{hint} Choices: {', '.join(choices)}")
    return name


def width_split(draft: Draft) -> None:
    """hidden_size must be divisible by the tensor-parallel ranks."""
    tensor = draft["model_parallel_size"]
    if draft["hidden_size"] % tensor:
        draft.fail("model_parallel_size", f"hidden_size {draft['hidden_size']} cannot be split over {tensor} ranks")


def recomputation(draft: Draft) -> None:
    """checkpoint_policy from checkpoint_activations when it is not set itself."""
    policy = draft.get_given("checkpoint_policy")
    if policy is not None and policy != "none" and draft.is_set("checkpoint_activations"):
        if not draft["checkpoint_activations"]:
            draft.fail("checkpoint_policy", f"is {policy}, but checkpoint_activations is false; keep one of the two")
    policy = policy or ("full" if draft["checkpoint_activations"] else "none")
    draft.set("checkpoint_policy", policy, "checkpoint_activations")
    draft.set("checkpoint_activations", policy != "none", "checkpoint_policy")


def mup(draft: Draft) -> None:
    """muP's width multiplier."""
    base = draft["mup_base_hidden_size"]
    if draft["use_mup"] and base is None:
        draft.fail("use_mup", "set mup_base_hidden_size: the hidden_size at which the learning rate was tuned")
    multiplier = draft["hidden_size"] / base if draft["use_mup"] else 1.0
    draft.set("mup_width_mult", multiplier, "hidden_size / mup_base_hidden_size")


def vocabulary(draft: Draft) -> None:
    """padded_vocab_size, once the tokenizer is known."""
    vocab = draft.facts.vocab_size
    given = draft.get_given("padded_vocab_size")
    if vocab is None:
        if given is None:
            draft.set("padded_vocab_size", None, "not known without the tokenizer")
        return
    unit = draft["make_vocab_size_divisible_by"] * draft["model_parallel_size"]
    rows = round_up(vocab, unit)
    if given not in (None, rows):
        draft.fail(
            "padded_vocab_size",
            f"it is computed: {rows}, which is {vocab} rounded up to a multiple of {unit}, not {given}; leave it out"
            " and set make_vocab_size_divisible_by",
        )
    draft.set("padded_vocab_size", rows, f"{vocab} rounded up to a multiple of {unit}")

"""Derived shape of the network, against GPT-NeoX's formulas worked out by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.errors import UserError
from megatron.neox_arguments.derive import Facts, derive
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("key", ["num_layers", "hidden_size", "num_attention_heads", "seq_length"])
def test_required(key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^{key}: must be set"):
        derived(tmp_path, **{key: None})


def test_defaults_are_resolved(tmp_path: Path) -> None:
    model = derived(tmp_path).model
    assert (model.head_dim, model.num_kv_heads, model.ffn_width, model.max_position_embeddings) == (8, 8, 256, 32)
    assert model.attention_config == ("global",) * 4 and model.layer_windows == (None,) * 4
    assert model.checkpoint_policy == "none" and model.mup_width_mult == 1.0


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({"activation": "gelu"}, 256),
        ({"activation": "gelu", "expansion_factor": 2.5}, 160),
        ({"activation": "gelu", "intermediate_size": 100}, 100),
        ({"activation": "gelu", "intermediate_size": 100, "mlp_multiple_of": 64}, 128),
        # upstream: T = int(F·2/3), half = T // 2, rounded up
        ({"activation": "swiglu"}, 85),  # F = 256 -> T = 170 -> 85
        ({"activation": "swiglu", "mlp_multiple_of": 16}, 96),
        (
            {
                "activation": "geglu",
                "intermediate_size": 32768,
                "gated_width_rule": "two_thirds",
                "mlp_multiple_of": 256,
            },
            11008,
        ),
        ({"activation": "reglu", "intermediate_size": 11008, "gated_width_rule": "final"}, 11008),
        ({"activation": "glu", "gated_width_rule": "final"}, 256),
    ],
)
def test_feed_forward_width(changes: dict, width: int, tmp_path: Path) -> None:
    assert derived(tmp_path, **changes).model.ffn_width == width


@pytest.mark.parametrize(
    ("config", "window", "kinds", "windows"),
    [
        ([[["flash"], 4]], None, "flash flash flash flash", [None] * 4),
        ([[["Flash"], "all"]], 7, "flash flash flash flash", [7] * 4),
        ([[["local", "global"], 2]], 7, "local global local global", [7, None, 7, None]),
        ([[["local"], 3], [["global"], 1]], 7, "local local local global", [7, 7, 7, None]),
        ([[["global"], 2], [["local", "global"], "all"]], 7, None, None),
        (["global", "local", "global", "local"], 5, "global local global local", [None, 5, None, 5]),
        (None, 5, "global global global global", [5] * 4),
    ],
)
def test_attention_per_layer(config: list, window: int, kinds: str, windows: list, tmp_path: Path) -> None:
    if kinds is None:
        with pytest.raises(UserError, match="describes 6 layers, num_layers is 4"):
            derived(tmp_path, attention_config=config, sliding_window_width=window)
        return
    model = derived(tmp_path, attention_config=config, sliding_window_width=window).model
    assert model.attention_config == tuple(kinds.split())
    assert model.layer_windows == tuple(windows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_config": [[["globl"], 4]]}, "'globl' .*'global'"),
        ({"attention_config": [[["sparse_fixed"], 4]]}, "'sparse_fixed' .*'local'"),
        ({"attention_config": [[["bigbird"], 4]]}, "'bigbird' .*'local'"),
        ({"attention_config": [[["global"], 3]]}, "describes 3 layers, num_layers is 4"),
        ({"attention_config": [["global", 4]]}, r"is not \[\[kinds\.\.\.\], n\]"),
        ({"attention_config": [[["global"], "some"]]}, "'some' .*'all'"),
        ({"attention_config": [[["global"] * 3, "all"]]}, r"\b3 kinds .*\b4 layers"),
        ({"attention_config": [[["local"], 4]]}, "'local' layers need sliding_window_width"),
        ({"num_attention_heads": 7}, r"\b7 heads .*hidden_size 64; .*63 or 70"),
        ({"num_kv_heads": 3}, "num_kv_heads: 3 .*num_attention_heads 8; .*1 or 2 or 4 or 8"),
        ({"num_kv_heads": 2, "model_parallel_size": 4}, "num_kv_heads 2 .*4 tensor-parallel"),
        ({"model_parallel_size": 3}, r"hidden_size 64 .*\b3 ranks"),
        (
            {"intermediate_size": 90, "model_parallel_size": 4},
            r"\b90 .*\b4 tensor-parallel.*mlp_multiple_of: 4 .* 92\b",
        ),
        ({"max_position_embeddings": 16}, "16 is below seq_length 32"),
        (
            {"max_position_embeddings": 32, "opt_pos_emb_offset": 2},
            "32 is below seq_length 32 plus opt_pos_emb_offset 2",
        ),
        ({"pos_emb": "rotary", "rotary_pct": 0.125}, "rotary_pct: 1 of 8 dimensions"),
        ({"rotary_pct": 0}, r"must be in \(0, 1\], is 0\.0"),
        ({"hidden_dropout": 1.0}, r"must be in \[0, 1\), is 1\.0"),
        ({"use_mup": True}, "set mup_base_hidden_size"),
        ({"gpt_j_tied": True}, "needs gpt_j_residual: true"),
        ({"norm_placement": "olmo3", "gpt_j_residual": True}, "olmo3 blocks are sequential"),
        ({"use_qk_layernorm": True, "use_separate_qk_norms": True, "norm": "layernorm"}, "Set norm: rmsnorm"),
        ({"checkpoint_policy": "full", "checkpoint_activations": False}, "checkpoint_activations is false"),
        ({"head_dim": 0}, "head_dim: must be above 0, is 0"),
        ({"qk_norm_per_head": True}, "needs use_separate_qk_norms: true"),
        ({"pos_emb": "rpe", "rpe_num_buckets": 1}, "rpe_num_buckets: must be at least 2, is 1"),
        ({"pos_emb": "rpe", "rpe_max_distance": 16}, r"rpe_max_distance: .*\b16, is 16"),
        ({"pos_emb": "rpe", "attention_config": [[["gmlp"], 4]]}, "pos_emb: rpe .*gmlp"),
        ({"attention_config": [[["amlp"], 4]], "activation": "swiglu"}, "activation: .*swiglu"),
        ({"value_embedding_interval": -1}, "value_embedding_interval: must be 0 or more"),
        (
            {"value_embedding_interval": 2, "attention_config": [[["global", "mamba"], 2]], "num_layers": 4},
            "value_embedding_interval: 2 takes in layers of kind mamba,",
        ),
        ({"num_layers": 0}, "num_layers: must be above 0, is 0"),
    ],
)
def test_mistakes(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        derived(tmp_path, **changes)
    assert re.search(message, str(error.value))
    assert "a.yml:" in str(error.value)


def test_norms_of_queries_and_keys_as_in_the_fork(tmp_path: Path) -> None:
    """use_separate_qk_norms acts with use_qk_layernorm only, and one line says so."""
    args = derived(tmp_path, use_separate_qk_norms=True)
    assert not args.model.use_separate_qk_norms
    assert [note for note in args.notes if re.search(r"a\.yml:\d+: use_separate_qk_norms .* use_qk_layernorm", note)]
    args = derived(tmp_path, use_separate_qk_norms=True, use_qk_layernorm=True, norm="rmsnorm")
    assert args.model.use_separate_qk_norms and not args.notes


def test_padded_vocabulary_waits_for_the_tokenizer(tmp_path: Path) -> None:
    """Known fault 31: 259 -> 384, 512, 512 at tensor 1, 2, 4; 50257 -> 50304, 50432, 50688, 51200 at 1, 2, 4, 8."""
    for vocab, tensor, padded in [(259, 1, 384), (259, 2, 512), (259, 4, 512), (50257, 1, 50304), (50257, 2, 50432),
                                  (50257, 4, 50688), (50257, 8, 51200)]:  # fmt: skip
        first = derived(tmp_path, model_parallel_size=tensor)
        assert first.tokenizer.padded_vocab_size is None
        assert derive(first, Facts(vocab_size=vocab)).tokenizer.padded_vocab_size == padded


def test_policies(tmp_path: Path) -> None:
    assert derived(tmp_path, checkpoint_activations=True).model.checkpoint_policy == "full"
    selective = derived(tmp_path, checkpoint_policy="selective").model
    assert selective.checkpoint_policy == "selective" and selective.checkpoint_activations


def test_mup_multiplier(tmp_path: Path) -> None:
    assert derived(tmp_path, use_mup=True, mup_base_hidden_size=16).model.mup_width_mult == 4.0


def test_names_of_registries_are_checked_in_phase_two(tmp_path: Path) -> None:
    args = derived(tmp_path, norm="rmsnorm")
    with pytest.raises(UserError, match=r"a\.yml:\d+: norm: 'rmsnorm' .*'rmsnorm_1p'"):
        derive(args, Facts(registries={"norm": ["layernorm", "rmsnorm_1p"]}))
    derive(args, Facts(registries={"norm": ["rmsnorm"], "attention_backend": ["torch"]}))  # "auto" names none

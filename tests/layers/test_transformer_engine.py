"""The keys te_*: the model they mean, by closed formulas without Transformer Engine, through a stand-in with it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.compare import check_config
from megatron.checkpoint.find import Checkpoint
from megatron.checkpoint.init_from import InitFrom
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.neox_names import sources
from megatron.checkpoint.start import Start
from megatron.convert.families import FAMILIES
from megatron.convert.parts.family import TokenIds
from megatron.errors import UserError
from megatron.layers.carry import Context
from megatron.mpu.sharding import named_parameters, unshard
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import derive
from megatron.run.start import resume_config
from tests.distributed import run_distributed
from tests.layers import stand_in_transformer_engine as stand_in
from tests.model.networks import NEOX, TINY, VOCAB, batch, build, logits, tiny
from tests.neox_args.helpers import derived

pytestmark = pytest.mark.cpu

TE: dict[str, Any] = {"te_mha": True, "te_layernorm_mlp": True}
# What the fork's configs set.
FORK: dict[str, Any] = {
    **NEOX,
    **TE,
    "norm": "layernorm",
    "activation": "gelu",
    "te_columnparallel": False,
    "te_rowparallel": False,
    "te_fp8_format": "hybrid",
    "te_fp8_wgrad": False,
    "te_fp8_amax_history_len": 1,
    "te_fp8_amax_compute_algo": "most_recent",
    "te_fp8_margin": 0,
    "te_fp8_mha": False,
}


# ---- the model that the keys mean


@pytest.mark.parametrize(
    ("keys", "meant", "said"),
    [
        (FORK, {"activation": "gelu", "bias_gelu_fusion": True, "mlp_norm_epsilon": None}, "bias_gelu_fusion true"),
        ({**TE, "layernorm_epsilon": 1e-3}, {"mlp_norm_epsilon": 1e-5}, "mlp_norm_epsilon 1e-05, 0.001 in the other"),
        (
            {**TE, "norm": "rmsnorm", "rms_norm_epsilon": 1e-6, "activation": "relu"},
            {"mlp_norm_epsilon": 1e-8, "bias_gelu_fusion": False},
            "mlp_norm_epsilon 1e-08",
        ),
        ({**TE, "activation": "geglu"}, {"activation": "geglu_tanh", "ffn_width": 256}, "geglu_tanh instead of geglu"),
        ({**TE, "activation": "swiglu", "intermediate_size": 48, "mlp_multiple_of": 32}, {"ffn_width": 48}, "multiple"),
        ({"te_layernorm_mlp": True, "use_bias_in_mlp": False}, {"use_bias_in_mlp": True}, "instead of false"),
        ({"te_layernorm_mlp": True, **NEOX, "gpt_j_tied": True}, {"gpt_j_tied": False}, "gpt_j_tied false"),
        (
            {"te_mha": True, "use_bias_in_attn_linear": False, "use_qk_layernorm": True},
            {"use_bias_in_attn_linear": True, "use_qk_layernorm": False, "bias_gelu_fusion": False},
            "use_qk_layernorm false",
        ),
        ({"te_fp8_mha": True, "use_bias_in_attn_linear": False}, {"use_bias_in_attn_linear": True}, "te_mha"),
        ({"norm": "te_rmsnorm", "rms_norm_epsilon": 1e-4}, {"norm": "rmsnorm", "te_norm": True}, None),
        ({"norm": "te_layernorm"}, {"norm": "layernorm", "te_norm": True, "mlp_norm_epsilon": None}, None),
        ({"te_columnparallel": True, "te_rowparallel": True}, {"activation": "gelu", "bias_gelu_fusion": False}, None),
    ],
)
def test_the_model_is_the_one_that_gpt_neox_builds(keys, meant, said, tmp_path: Path) -> None:
    args = derived(tmp_path, **keys)
    assert {name: args.get(name) for name in meant} == meant
    notes = [note for note in args.notes if "Transformer Engine" in note]
    assert len(notes) == (said is not None) and all(said in note for note in notes)
    assert not [note for note in args.notes if "gated_width_rule" in note]
    again = derive(args)
    assert again.to_dict() == args.to_dict() and again.notes == args.notes
    saved = derive(NeoXArgs.from_saved(args.to_dict()))
    assert saved.to_dict() == args.to_dict() and not [note for note in saved.notes if "Transformer" in note]


def test_a_norm_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"a\.yml:\d+: te_norm: .*norm: scalenorm"):
        derived(tmp_path, te_norm=True, norm="scalenorm")
    with pytest.raises(Exception, match=r"a\.yml:\d+: mlp_norm_epsilon: .*gpt_j_tied"):
        derived(tmp_path, mlp_norm_epsilon=1e-3, gpt_j_residual=True, gpt_j_tied=True)


def test_a_rule_for_the_width_that_it_does_not_follow_is_refused(tmp_path: Path) -> None:
    keys = {**TE, "gated_width_rule": "two_thirds", "intermediate_size": 48}
    with pytest.raises(UserError, match=r"a\.yml:\d+: gated_width_rule: .*te_layernorm_mlp \(.*a\.yml:\d+\)"):
        derived(tmp_path, **keys, activation="swiglu")
    assert derived(tmp_path, **{**keys, "gated_width_rule": "final"}, activation="swiglu").model.ffn_width == 48
    assert derived(tmp_path, **keys, activation="gelu").model.ffn_width == 48  # the rule is of gated ones only


BUILT_IN = {"bias_gelu_fusion": False, "mlp_norm_epsilon": None, "norm": "layernorm", "te_layernorm_mlp": False}
ENGINE = {**BUILT_IN, "bias_gelu_fusion": True, "mlp_norm_epsilon": 1e-5, "te_layernorm_mlp": True}


def test_a_new_run_takes_a_checkpoint_of_the_built_in_layers_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    """The fork trains Pythia, whose gelu is exact, under these keys."""
    other = {"path": "p", "data": "restart", "optimizer": "reset", "step": "restart"}
    keys = {**TINY, "te_layernorm_mlp": True, "norm": "layernorm", "layernorm_epsilon": 1e-3, "init_from": other}
    args = derive(NeoXArgs.from_saved(keys))
    saved = {**args.to_dict(), **BUILT_IN}
    found = Checkpoint(Path("p/global_step0"), replace(Manifest.empty(0), config=saved))
    for kind, init in (("finetune", None), ("init", InitFrom(**other))):
        caplog.clear()
        with caplog.at_level("WARNING", logger="deepy"):
            resume_config(args, Start(kind, found, 0, "", init))
        for change in ("bias_gelu_fusion: False .*now True", "mlp_norm_epsilon: None .*now 1e-05"):
            assert re.search(f"te_layernorm_mlp .*{change}", caplog.text), (kind, caplog.text)
    with pytest.raises(UserError, match=r"architecture: bias_gelu_fusion: False(.|\n)*mlp_norm_epsilon: None"):
        resume_config(args, Start("resume", found, 0, ""))


@pytest.mark.parametrize(("saved", "now"), [(BUILT_IN, ENGINE), (ENGINE, BUILT_IN)])
def test_the_same_run_evaluation_and_generation_keep_the_function(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Another GELU and epsilon are another model, whichever key brought them; the key alone is not."""
    for use in ({}, {"trains": False}):
        with pytest.raises(UserError, match=r"architecture: bias_gelu_fusion(.|\n)*architecture: mlp_norm_epsilon"):
            check_config(saved, now, path=Path("p"), **use)
        assert check_config(saved, {**saved, "te_layernorm_mlp": now["te_layernorm_mlp"]}, path=Path("p"), **use)
    if saved is ENGINE:
        with pytest.raises(UserError, match="bias_gelu_fusion"):
            check_config(saved, now, path=Path("p"), new_run=True, finetune=True)


def test_names_of_norms_in_files() -> None:
    wanted = ["input_layernorm.weight", "input_layernorm.bias", "norm.scale"]
    stored = ["input_layernorm.norm.weight", "input_layernorm.norm.bias", "norm.norm.weight", "norm._extra_state"]
    found, left_over = sources(stored, wanted)
    assert left_over == []
    assert found == {name: (old,) for name, old in zip(wanted, stored, strict=False)}


def test_exports_name_the_function_and_the_epsilon() -> None:
    neox = FAMILIES["neox"]
    model = tiny(**{**FORK, "num_kv_heads": 4})
    written = neox.config(model, VOCAB, TokenIds())
    assert written["hidden_act"] == "gelu_pytorch_tanh" and written["layer_norm_eps"] == 1e-5
    assert neox.unsupported(model) == []
    (reason,) = neox.unsupported(tiny(**{**FORK, "num_kv_heads": 4, "layernorm_epsilon": 1e-3}))
    assert "mlp_norm_epsilon: 1e-05" in reason and "0.001" in reason


# ---- numbers without Transformer Engine


def _formula(mlp: Any, norm: Any, x: Tensor, kind: str, epsilon: float) -> Tensor:
    """Transformer Engine's LayerNormMLP in fp64: gelu(norm(x) W1ᵀ + b1) W2ᵀ + b2."""
    x = x.double()
    if kind == "layernorm":
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + epsilon).sqrt()
        x = x * norm.weight.double() + norm.bias.double()
    else:
        x = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * norm.scale.double()
    wide = stand_in.gelu_of_the_kernels(x @ mlp.linear1.weight.double().T + mlp.linear1.bias.double())
    return wide @ mlp.linear2.weight.double().T + mlp.linear2.bias.double()


@pytest.mark.parametrize(("kind", "epsilon"), [("layernorm", 1e-5), ("rmsnorm", 1e-8)])
@torch.no_grad()
def test_the_built_in_feed_forward_is_that_of_the_formula(kind: str, epsilon: float) -> None:
    """Inputs of the size of the epsilon show which one is used."""
    model = tiny(**TE, norm=kind, layernorm_epsilon=1e-3, rms_norm_epsilon=1e-3, use_bias_in_mlp=False)
    block = build(model).sequential[1]
    x = 1e-2 * torch.randn(2 * 16, 32, generator=torch.Generator().manual_seed(3))
    mine = block.mlp(block.post_attention_layernorm(x))[0]
    wanted = _formula(block.mlp, block.post_attention_layernorm, x, kind, epsilon)
    assert (mine - wanted).abs().max() < 1e-6 * wanted.abs().max()
    others = [_formula(block.mlp, block.post_attention_layernorm, x, kind, one) for one in (1e-3, 10 * epsilon)]
    assert all((other - wanted).abs().max() > 1e-5 * wanted.abs().max() for other in others[: 2 - (epsilon < 1e-6)])
    assert block.input_layernorm.eps == 1e-3


def test_the_log_says_what_runs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def lines() -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO", logger="deepy"):
            build(tiny(**FORK, te_norm=True))
        return [record.getMessage() for record in caplog.records if "ransformer" in record.getMessage()]

    built_in = lines()
    assert len(built_in) == 2  # the modules, and attention with its back-end
    assert any("built-in, the same numbers (Transformer Engine needs a GPU)" in line for line in built_in)
    monkeypatch.setattr("megatron.layers.transformer_engine.DEVICES", ("cpu",))
    monkeypatch.setitem(__import__("sys").modules, "transformer_engine.pytorch", None)
    assert any("requirements/requirements-transformerengine.txt" in line for line in lines())
    stand_in.install(monkeypatch)
    assert lines() == ["Transformer Engine: transformer-engine", "attention back-end: transformer_engine"]


# ---- through Transformer Engine's interface

# Changes, and how often each module runs in one forward pass of two blocks.
FORMS: list[tuple[dict[str, Any], dict[str, int]]] = [
    (FORK, {"LayerNormMLP": 2, "Linear": 4, "DotProductAttention": 2}),
    ({**TE, "norm": "te_layernorm"}, {"LayerNorm": 3, "LayerNormMLP": 2, "Linear": 4, "DotProductAttention": 2}),
    (
        {"norm": "te_rmsnorm", "te_layernorm_mlp": True, "activation": "relu2", "rms_norm_epsilon": 1e-3},
        {"RMSNorm": 3, "LayerNormMLP": 2},
    ),
    ({**TE, "activation": "geglu", "intermediate_size": 48}, {"Linear": 8, "DotProductAttention": 2}),
    ({"te_columnparallel": True, "use_bias_in_mlp": False}, {"Linear": 4}),
    ({"te_rowparallel": True, **NEOX, "gpt_j_tied": True}, {"Linear": 4}),
    ({"te_mha": True, "sliding_window_width": 4, "norm_placement": "olmo3"}, {"Linear": 4, "DotProductAttention": 2}),
    (
        {**TE, "norm": "rmsnorm", "checkpoint_policy": "full"},
        {"LayerNormMLP": 4, "Linear": 8, "DotProductAttention": 4},
    ),
]

Outcome = tuple[float, Tensor, dict[str, Tensor], Counter[str]]


def _step(changes: dict[str, Any], state: ParallelState) -> Outcome:
    network = build(tiny(init_method_std=0.2, **changes), state, padding=80)
    tokens, positions, targets = batch()
    stand_in.CALLS.clear()
    loss, _ = network((tokens, positions), (targets, (positions % 3 > 0).float(), torch.tensor([0.05])))
    loss.backward()
    calls = Counter(stand_in.CALLS)
    with torch.no_grad():
        out = logits(network, tokens, positions)
    return loss.item(), out, {name: p.grad for name, p in named_parameters(network)}, calls


def _ranks(rank: int, world: int, sequence_parallel: bool) -> list[Outcome]:
    stand_in.install()
    topology = Topology({"pipe": 1, "data": 1, "model": world})
    state = ParallelState.build(topology, rank, torch.device("cpu"), sequence_parallel)
    return [_step(changes, state) for changes, _ in FORMS]


def _check(ranks: list[list[Outcome]]) -> None:
    """Each rank's outcomes are those of the built-in layers on one rank, and the modules ran."""
    for i, (changes, modules) in enumerate(FORMS):
        loss, out, gradients, none = _step(changes, ParallelState.single())
        assert not none
        specs = {name: p.spec for name, p in named_parameters(build(tiny(**changes), padding=80))}
        for rank in ranks:
            assert rank[i][3] == modules, changes
            assert rank[i][0] == pytest.approx(loss, rel=1e-5), changes
            assert (rank[i][1] - out).abs().max() < 1e-5 * out.abs().max().clamp(min=1), changes
            assert set(rank[i][2]) == set(gradients), changes
        for name, expected in gradients.items():
            whole = unshard([rank[i][2][name] for rank in ranks], specs[name])
            expected = expected.narrow(0, 0, specs[name].shape[0])
            assert (whole - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1), (changes, name)


def test_its_modules_compute_what_the_built_in_layers_compute() -> None:
    with pytest.MonkeyPatch.context() as patch:
        stand_in.install(patch)
        one = [_step(changes, ParallelState.single()) for changes, _ in FORMS]
    _check([one])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_at_two_tensor_parallel_ranks(sequence_parallel: bool) -> None:
    _check(run_distributed(_ranks, 2, sequence_parallel, timeout=90))


def test_generation_and_packed_documents_leave_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called with whole rows only; a cache and masked documents go to the back-ends that have them."""
    stand_in.install(monkeypatch)
    network = build(tiny(**TE))
    attention = network.sequential[1].attention
    cache = attention.new_cache(16, None)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(16)[None]
    with torch.no_grad():
        whole = attention(x, Context(positions, None, None))
        stand_in.CALLS.clear()
        first = attention(x[:10], Context(positions[:, :10], None, cache))
        rest = attention(x[10:], Context(positions[:, 10:], None, cache))
    assert (torch.cat((first, rest)) - whole).abs().max() < 1e-5
    assert Counter(stand_in.CALLS) == {"Linear": 4, "DotProductAttention": 1}
    packed = build(tiny(**TE, intra_document_masking=True)).sequential[1].attention
    assert packed.choice.name == "varlen" and "intra_document_masking" in str(packed.choice)


# ---- FP8


FP8: dict[str, Any] = {
    "te_fp8_mha": True,
    "te_layernorm_mlp": True,
    "te_fp8_format": "e4m3",
    "te_fp8_margin": 2,
    "te_fp8_wgrad": False,
    "te_fp8_amax_history_len": 7,
    "te_fp8_amax_compute_algo": "max",
}


def test_fp8_is_one_region_around_a_training_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch)
    network = build(tiny(**FP8))
    tokens, positions, targets = batch()
    labels = (targets, torch.ones(targets.shape), torch.tensor([1.0]))
    for _ in range(2):
        network((tokens, positions), labels)[0].backward()
    recipe = stand_in.DelayedScaling(2, stand_in.Format.E4M3, 7, "max", (False, False, True), fp8_dpa=True)
    expected = {"enabled": True, "recipe": recipe, "group": None}
    assert len(stand_in.REGIONS) == 2 and all(region == expected for region in stand_in.REGIONS)
    with torch.no_grad():
        network((tokens, positions), labels)
    network.eval()
    logits(network, tokens, positions)
    assert len(stand_in.REGIONS) == 2  # evaluation and generation are in the run's precision


@pytest.mark.parametrize(
    ("changes", "available", "why"),
    [
        ({"checkpoint_policy": "full"}, True, "checkpoint_policy"),
        ({"seq_length": 24, "max_position_embeddings": 24}, True, "seq_length 24"),
        ({}, False, "compute capability 8.9"),
        ({}, None, "needs a GPU"),
    ],
)
def test_where_fp8_stays_off(changes, available, why, monkeypatch, caplog) -> None:
    if available is not None:
        stand_in.install(monkeypatch)
        stand_in.FP8["available"] = available
    with caplog.at_level("INFO", logger="deepy"):
        network = build(tiny(**FP8, **changes))
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("FP8")]
    assert line.startswith("FP8: off, ") and why in line
    tokens, positions, targets = batch()
    network((tokens, positions), (targets, torch.ones(targets.shape), torch.tensor([1.0])))[0].backward()
    assert available is None or stand_in.REGIONS == []

"""Mixtures of experts in a network: against transformers, in every form of block, recomputed, compiled, generating."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron.layers.carry import Carry
from megatron.layers.kv_cache import KVCache
from megatron.layers.moe import MixtureOfExperts, experts, grouped_linear
from megatron.layers.moe.balancing import moe_layers
from megatron.model.sequential import SequentialModel
from megatron.mpu.owned import count_parameters
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.formulas import parameter_count
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.training.compile import compile_blocks
from tests.model.networks import LLAMA, VOCAB, batch, build, logits, tiny

pytestmark = pytest.mark.cpu

MOE: dict[str, Any] = {
    **LLAMA,
    "init_method_std": 0.2,
    "moe_num_experts": 4,
    "moe_router_type": "topk",
    "moe_top_k": 2,
    "moe_intermediate_size": 24,
}
FAMILIES: dict[str, tuple[type, type, dict[str, Any], dict[str, Any]]] = {
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"moe_normalize_topk": True}, {"num_local_experts": 4}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"moe_normalize_topk": True, "use_separate_qk_norms": True, "qk_norm_per_head": True, "moe_layers": [1]},
        {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "olmoe": (
        OlmoeConfig,
        OlmoeForCausalLM,
        {"use_qk_layernorm": True, "use_separate_qk_norms": True},
        {"num_experts": 4, "norm_topk_prob": False},
    ),
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {
            "moe_shared_expert_size": 16, "moe_shared_expert_gate": True,
            "use_bias_in_attn_linear": True, "use_bias_in_attn_output": False,
        },
        {
            "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16,
            "norm_topk_prob": False, "decoder_sparse_step": 1,
        },
    ),
}  # fmt: skip


def _reference(name: str, model: ModelConfig) -> torch.nn.Module:
    config, network, _, keys = FAMILIES[name]
    dense = {"mixtral": model.moe_intermediate_size, "olmoe": model.moe_intermediate_size}.get(name, model.ffn_width)
    made = config(
        vocab_size=VOCAB,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        intermediate_size=dense,
        rms_norm_eps=model.rms_norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=16,
        num_experts_per_tok=model.moe_top_k,
        tie_word_embeddings=False,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        attn_implementation="eager",
        **keys,
    )
    return network(made)


def _theirs(name: str, value: Tensor, model: ModelConfig) -> dict[str, Tensor]:
    """One of our tensors (or its gradient) under transformers' names and row orders."""
    index, _, local = name.partition(".")
    outside = {
        "word_embeddings.weight": "model.embed_tokens.weight",
        "norm.scale": "model.norm.weight",
        "final_linear.weight": "lm_head.weight",
    }
    if local in outside:
        return {outside[local]: value}
    prefix = f"model.layers.{int(index) - 2}"
    if local.startswith("attention.query_key_value"):
        q, kv = model.num_attention_heads * model.head_dim, model.num_kv_heads * model.head_dim
        leaf = local.rpartition(".")[2]
        parts = value.split((q, kv, kv))
        return {f"{prefix}.self_attn.{x}_proj.{leaf}": rows for x, rows in zip("qkv", parts, strict=True)}
    if local == "mlp.experts.linear1":  # transformers' rows are [gate ; up]
        up, gate = value.chunk(2, dim=1)
        return {f"{prefix}.mlp.experts.gate_up_proj": torch.cat((gate, up), 1)}
    for ours, stem in (("mlp.linear1", "mlp"), ("mlp.shared_expert.linear1", "mlp.shared_expert")):
        if local == f"{ours}.weight":
            up, gate = value.chunk(2)
            return {f"{prefix}.{stem}.up_proj.weight": up, f"{prefix}.{stem}.gate_proj.weight": gate}
    names = {
        "input_layernorm.scale": "input_layernorm.weight",
        "post_attention_layernorm.scale": "post_attention_layernorm.weight",
        "attention.dense.weight": "self_attn.o_proj.weight",
        "attention.q_norm.scale": "self_attn.q_norm.weight",
        "attention.k_norm.scale": "self_attn.k_norm.weight",
        "mlp.linear2.weight": "mlp.down_proj.weight",
        "mlp.experts.linear2": "mlp.experts.down_proj",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.shared_expert.linear2.weight": "mlp.shared_expert.down_proj.weight",
        "mlp.shared_expert_gate.weight": "mlp.shared_expert_gate.weight",
    }
    return {f"{prefix}.{names[local]}": value}


def _all_theirs(tensors: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    return {k: v for name, value in tensors.items() for k, v in _theirs(name, value, model).items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_transformers(name: str) -> None:
    """One sequence and one layer of experts: then the balance loss is transformers' too."""
    model = tiny(**{**MOE, "moe_layers": [1], "moe_aux_loss_coeff": 0.1, **FAMILIES[name][2]})
    if name != "qwen3_moe":
        model = tiny(**{**MOE, "num_layers": 1, "moe_aux_loss_coeff": 0.1, **FAMILIES[name][2]})
    network, reference = build(model), _reference(name, model)
    weights = {n: p.detach()[: p.spec.shape[0]] for n, p in named_parameters(network)}
    missing, unexpected = reference.load_state_dict(_all_theirs(weights, model), strict=False)
    assert not unexpected and not missing
    tokens, positions, targets = batch(rows=1)
    theirs = reference(tokens, position_ids=positions, output_router_logits=True, labels=tokens)
    assert (logits(network, tokens, positions) - theirs.logits).abs().max() < 1e-5

    mask = torch.rand(targets.shape, generator=torch.Generator().manual_seed(3))
    loss, _ = network((tokens, positions), (targets, mask, torch.tensor([0.1])))
    loss.backward()
    losses = torch.nn.functional.cross_entropy(theirs.logits.flatten(0, 1), targets.flatten(), reduction="none")
    language = (losses * mask.flatten() * 0.1).sum()
    assert loss.item() == pytest.approx(language.item(), rel=1e-5)  # without the balance loss
    (language + 0.1 * theirs.aux_loss).backward()
    gradients = _all_theirs({n: p.grad[: p.spec.shape[0]] for n, p in named_parameters(network)}, model)
    expected = dict(reference.named_parameters())
    assert set(gradients) == set(expected)
    for key, gradient in gradients.items():
        assert (gradient - expected[key].grad).abs().max() < 1e-5 * max(1.0, gradient.abs().max().item()), key


FORMS: list[dict[str, Any]] = [
    {},
    {"gpt_j_residual": True},
    {"gpt_j_residual": True, "gpt_j_tied": True},
    {"norm_placement": "olmo3"},
    {"norm_placement": "sandwich"},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_experts_that_are_all_alike_are_a_dense_network(form: dict[str, Any]) -> None:
    """In every form of block: E copies of a dense feed-forward give its numbers, as weights sum to 1."""
    keys = {k: v for k, v in MOE.items() if not k.startswith("moe")} | {"intermediate_size": 24} | form
    dense = build(tiny(**keys))
    routed = build(tiny(**keys, moe_num_experts=4, moe_router_type="topk", moe_top_k=2, moe_normalize_topk=True))
    source = {n: p.detach() for n, p in named_parameters(dense)}
    with torch.no_grad():
        for name, parameter in named_parameters(routed):
            if ".experts." in name:
                parameter.copy_(source[name.replace("experts.", "") + ".weight"].expand_as(parameter))
            elif ".router." not in name:
                parameter.copy_(source[name])
    tokens, positions, _ = batch()
    torch.testing.assert_close(logits(routed, tokens, positions), logits(dense, tokens, positions))


@pytest.mark.parametrize(
    ("keys", "kinds"),
    [
        ({"moe_expert_interval": 1}, "MMMMM"),
        ({"moe_expert_interval": 2}, "MDMDM"),
        ({"moe_expert_interval": 3}, "MDDMD"),
        ({"moe_layers": [1, 4]}, "DMDDM"),
        ({"moe_layers": ["dense", "moe", "moe", "moe", "dense"]}, "DMMMD"),
        ({"moe_layers": [[["dense"], 1], [["moe"], 4]]}, "DMMMM"),
        ({"moe_num_experts": 1}, "DDDDD"),
    ],
    ids=str,
)
def test_which_layers_are_mixtures(keys: dict[str, Any], kinds: str) -> None:
    base = LLAMA if keys.get("moe_num_experts") == 1 else MOE
    network = build(tiny(**{**base, "num_layers": 5, **keys}))
    blocks = network.sequential[1:6]
    assert "".join("M" if isinstance(block.mlp, MixtureOfExperts) else "D" for block in blocks) == kinds
    assert list(moe_layers(network)) == [i for i, kind in enumerate(kinds) if kind == "M"]


EVERYTHING: dict[str, Any] = {
    **MOE,
    "num_layers": 3,
    "moe_layers": [0, 2],
    "moe_expert_bias": True,
    "moe_shared_expert_size": 16,
    "moe_shared_expert_gate": True,
    "moe_aux_loss_coeff": 0.05,
    "moe_z_loss_coeff": 0.01,
    "moe_bias_balancing_rate": 0.01,
}


@pytest.mark.parametrize("changes", [{}, {"activation": "gelu"}, {"moe_shared_expert_gate": False}], ids=str)
def test_parameters_are_counted_as_built(changes: dict[str, Any]) -> None:
    model = tiny(**{**EVERYTHING, **changes})
    network = build(model)
    count = parameter_count(model, VOCAB)
    assert count_parameters(network, ParallelState.single()) == count.total
    blocks = [sum(p.numel() for p in block.parameters()) for block in network.sequential[1:4]]
    assert [block.total for block in count.blocks] == blocks
    expert = sum(p[0].numel() for p in network.sequential[1].mlp.experts.parameters())
    assert count.total - count.active == 2 * (4 - 2) * expert


def _step(network: SequentialModel) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    tokens, positions, targets = batch()
    torch.manual_seed(9)
    loss, _ = network((tokens, positions), (targets, torch.ones(targets.shape), torch.tensor([0.1])))
    loss.backward()
    gradients = {n: p.grad for n, p in named_parameters(network) if p.requires_grad}
    return loss.detach(), gradients, [layer.load.take() for layer in moe_layers(network).values()]


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint_policy": "full"},
        {"checkpoint_policy": "selective"},
        {"checkpoint_policy": "full", "checkpoint_num_layers": 2},
        {"checkpoint_policy": "selective", "checkpoint_num_layers": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("router", [{}, {"moe_jitter_eps": 0.2, "moe_capacity_factor": 1.0}], ids=str)
def test_recomputation_changes_no_bit_and_counts_once(changes: dict[str, Any], router: dict[str, Any]) -> None:
    keys = {**EVERYTHING, "hidden_dropout": 0.2, **router}
    loss, gradients, loads = _step(build(tiny(**keys)))
    again, others, counted = _step(build(tiny(**{**keys, **changes})))
    assert torch.equal(again, loss)
    assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())
    assert all(torch.equal(a, b) for a, b in zip(counted, loads, strict=True))
    assert all(float(load[:4].sum()) == 2 * 32 and float(load[-1]) == 1 for load in loads)


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Layers are built as on a GPU where torch's grouped product was not asked for yet. Counts who asks and uses it."""
    calls: Counter[str] = Counter()
    probe, product = grouped_linear.works_grouped.__wrapped__, grouped_linear._torch_grouped()

    def works(dtype: torch.dtype, device: torch.device) -> bool:
        calls["asked"] += 1
        return probe(dtype, device)

    def multiply(*args: Any, **options: Any) -> Tensor:
        calls["used"] += 1
        return product(*args, **options)

    asked = cache(works)
    monkeypatch.setattr(grouped_linear, "works_grouped", asked)
    monkeypatch.setattr(grouped_linear, "_torch_grouped", lambda: multiply)
    on_gpu = lambda device: frozenset(t for t in (torch.float32,) if grouped_linear.works_grouped(t, device))  # noqa: E731
    monkeypatch.setattr(experts, "grouped_types", on_gpu)
    return calls


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_grouped_products_are_tried_before_any_forward(policy: str, grouped: Counter[str]) -> None:
    """Trying them is a backward pass: inside a block that is recomputed, its tensors would be counted as the block's,
    and be missing when it runs again."""
    loops = build(tiny(**EVERYTHING))
    for layer in moe_layers(loops).values():
        layer.experts.grouped = frozenset()
    expected, theirs, _ = _step(loops)
    network = build(tiny(**EVERYTHING, checkpoint_policy=policy))
    before = Counter(grouped)
    loss, gradients, _ = _step(network)
    assert before["asked"] == grouped["asked"] == 1 and grouped["used"] > before["used"]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, theirs)


def test_grouped_products_are_used_in_inference_mode(grouped: Counter[str]) -> None:
    """No backward pass runs there; a probe that fails for that alone would leave one product per expert for good."""
    tokens, positions, _ = batch()
    with torch.inference_mode():
        network = build(tiny(**EVERYTHING)).eval()
        assert grouped == {"asked": 1, "used": 1}
        logits(network, tokens, positions)
    assert grouped["used"] == 1 + 2 * len(moe_layers(network))


def test_balance_and_z_loss_reach_every_layer_before_them() -> None:
    plain = _step(build(tiny(**{**EVERYTHING, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0})))
    for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        off = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0}
        loss, gradients, _ = _step(build(tiny(**{**EVERYTHING, **off, key: 0.5})))
        assert torch.equal(loss, plain[0])
        changed = {name for name, gradient in gradients.items() if not torch.equal(gradient, plain[1][name])}
        # All before the last layer's router; nothing behind it.
        assert {n for n in gradients if n[0] in "023" or "attention" in n or "router" in n} <= changed
        assert not {n for n in changed if n.startswith(("6.", "7.", "4.mlp.experts"))}


def test_evaluation_carries_the_balance_loss_and_counts_nothing() -> None:
    network = build(tiny(**EVERYTHING)).eval()
    tokens, positions, targets = batch()
    with torch.no_grad():
        loss, _ = network((tokens, positions), (targets, torch.ones(targets.shape), torch.tensor([0.1])))
    assert loss.isfinite() and not any(layer.load.take().any() for layer in moe_layers(network).values())


@pytest.mark.parametrize(
    "form", [{}, {"gpt_j_residual": True}, {"moe_router_type": "sinkhorn", "moe_top_k": 1}], ids=str
)
def test_generation_with_a_cache_is_generation_without(form: dict[str, Any]) -> None:
    keys = {k: v for k, v in EVERYTHING.items() if k not in ("moe_aux_loss_coeff", "moe_bias_balancing_rate")}
    network = build(tiny(**{**keys, "moe_capacity_factor": 0.5, **form})).eval()
    tokens, positions, _ = batch()
    with torch.inference_mode():
        whole = logits(network, tokens, positions)
        cache = KVCache(network.sequential, capacity=16)
        parts = [
            network((tokens[:, a:b], positions[:, a:b]), cache=cache, then=lambda out: out.logits())
            for a, b in ((0, 7), *((i, i + 1) for i in range(7, 16)))
        ]
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-5


def test_inference_behind_the_first_stage_has_no_balance_loss() -> None:
    """Its stages pass on hidden states alone."""
    network = build(tiny(**EVERYTHING)).eval()
    tokens, positions, _ = batch()
    with torch.inference_mode():
        carry: Any = network.sequential[0](Carry(tokens, positions))
        assert carry.balance is not None
        for layer in network.sequential[1:]:
            carry = layer(Carry(carry.hidden, positions))
        assert torch.equal(carry.logits(), logits(network, tokens, positions))


def test_packed_documents_do_not_see_each_other() -> None:
    network = build(tiny(**EVERYTHING, intra_document_masking=True)).eval()
    tokens, _, _ = batch()
    documents = (torch.arange(16) >= 7).long().expand(2, 16).contiguous()
    positions = torch.cat((torch.arange(7), torch.arange(9))).expand(2, 16).contiguous()
    with torch.no_grad():
        before = logits(network, tokens, positions, documents)
        changed = tokens.clone()
        changed[:, :7] = (changed[:, :7] + 1) % VOCAB
        after = logits(network, changed, positions, documents)
    # Not bit by bit: how many rows an expert has decides in which order a processor adds a row up.
    torch.testing.assert_close(after[:, 7:], before[:, 7:], rtol=0, atol=1e-5)
    assert (after[:, :7] - before[:, :7]).abs().max() > 0.1


@pytest.mark.parametrize("form", [{}, {"gpt_j_residual": True}, {"norm_placement": "sandwich"}], ids=str)
def test_a_full_expert_drops_tokens_of_its_own_document_alone(form: dict[str, Any]) -> None:
    """In training with a capacity: what one document sends to an expert leaves the room of the others as it is."""
    keys = {**EVERYTHING, "moe_capacity_factor": 0.6, **form}
    network = build(tiny(**keys, intra_document_masking=True))
    tokens, _, _ = batch()
    documents = (torch.arange(16) >= 7).long().expand(2, 16).contiguous()
    positions = torch.cat((torch.arange(7), torch.arange(9))).expand(2, 16).contiguous()
    changed = tokens.clone()
    changed[:, :7] = (changed[:, :7] + 1) % VOCAB
    with torch.no_grad():
        before, after = (logits(network, given, positions, documents)[:, 7:] for given in (tokens, changed))
        alone = logits(network, tokens[:, 7:], positions[:, 7:], documents[:, 7:])
        kept = logits(network.eval(), tokens, positions, documents)[:, 7:]
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    torch.testing.assert_close(alone, before, rtol=0, atol=1e-5)
    assert (kept - before).abs().max() > 0.1


@pytest.mark.parametrize("form", [{}, {"gpt_j_residual": True}, {"checkpoint_policy": "full"}], ids=str)
def test_compiled_around_the_experts(form: dict[str, Any]) -> None:
    """The same numbers with graphs that end at the experts, and no more of them in the second step."""
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = build(tiny(**EVERYTHING, **form)), build(tiny(**EVERYTHING, **form))
    assert compile_blocks(compiled, backend="aot_eager") == (1, 2, 0)
    graphs = []
    for _ in range(2):
        (loss, gradients, loads), (again, others, counted) = _step(plain), _step(compiled)
        graphs.append(counters["stats"]["unique_graphs"])
        torch.testing.assert_close(again, loss)
        for name, gradient in gradients.items():
            assert (others[name] - gradient).abs().max() < 1e-5 * max(1.0, gradient.abs().max().item()), name
        assert all(torch.equal(a, b) for a, b in zip(counted, loads, strict=True))
    assert graphs[0] == graphs[1]
    assert counters["graph_break"]

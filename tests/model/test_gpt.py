"""The list of layers, residual forms and names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.errors import UserError
from megatron.layers.carry import Carry, Context
from megatron.model.gpt import build_layer, gpt_layers
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from tests.model.networks import GEMMA2, GEMMA3, LLAMA, PHI, SEED, VOCAB, batch, build, logits, tiny

pytestmark = pytest.mark.cpu

STATE = ParallelState.single()


def test_numbers_and_kinds_of_layers() -> None:
    layers = gpt_layers(tiny(num_layers=3), vocab_size=VOCAB, padded_vocab_size=128, state=STATE)
    assert [(layer.index, layer.name) for layer in layers] == [
        (0, "Embedding"),
        (2, "TransformerBlock"),
        (3, "TransformerBlock"),
        (4, "TransformerBlock"),
        (6, "FinalNorm"),
        (7, "Head"),
    ]
    assert all(type(layer.build()).__name__ == layer.name for layer in layers)
    assert [layer.tied for layer in layers] == [None] * 5 + ["0.word_embeddings.weight"]


def test_names_of_a_llama_checkpoint() -> None:
    block = [
        "input_layernorm.scale",
        "attention.query_key_value.weight",
        "attention.dense.weight",
        "post_attention_layernorm.scale",
        "mlp.linear1.weight",
        "mlp.linear2.weight",
    ]
    expected = ["0.word_embeddings.weight", *(f"{i}.{name}" for i in (2, 3) for name in block)]
    names = [name for name, _ in named_parameters(build(tiny(**LLAMA)))]
    assert names == [*expected, "5.norm.scale", "6.final_linear.weight"]


def test_windows_are_per_layer() -> None:
    network = build(tiny(num_layers=4, sliding_window_width=3, attention_config=[[["local", "global"], "all"]]))
    assert [network.sequential[i].attention.window for i in range(1, 5)] == [3, None, 3, None]
    network = build(tiny(num_layers=2, sliding_window_width=3))
    assert [network.sequential[i].attention.window for i in (1, 2)] == [3, 3]


def test_blocks_share_one_rotary_table() -> None:
    network = build(tiny(num_layers=3))
    assert len({id(network.sequential[i].attention.rotary) for i in (1, 2, 3)}) == 1


def test_layers_with_a_window_may_have_positions_of_their_own() -> None:
    network = build(tiny(num_layers=4, **GEMMA3))
    local, full, *others = (block.attention.rotary for block in network.sequential[1:5])
    assert others == [local, full] and local is not full
    # At position 4: the fastest pair turns 4 (local), or 1 (full, stretched 4 times); the next by its own base.
    angles = [torch.atan2(table.sin[4], table.cos[4]) for table in (local, full)]
    powers = torch.arange(0, 12, 2) / 12
    for mine, angle in zip(angles, (4 / 70.0**powers, 1 / 10000.0**powers), strict=True):
        assert torch.allclose(torch.remainder(mine, 2 * torch.pi), torch.remainder(angle, 2 * torch.pi), atol=1e-6)


@pytest.mark.parametrize("changes", [GEMMA3, PHI], ids=["gemma3", "phi"])
def test_norms_around_one_and_biases_start_at_zero_and_do_not_decay(changes: dict[str, Any]) -> None:
    layers = gpt_layers(tiny(**changes), vocab_size=VOCAB, padded_vocab_size=80, state=STATE)
    seen = set()
    for layer in layers:
        for name, parameter in named_parameters(build_layer(layer, SEED, STATE)):
            if parameter.spec.kind == "vector":
                seen.add(name.partition(".")[2])
                starts_at = 1.0 if changes is PHI and name.endswith("norm.weight") else 0.0
                assert (parameter == starts_at).all() and parameter.spec.decay is False, name
    expected = (
        {"attention.q_norm.scale", "pre_feedforward_layernorm.scale"} if changes is GEMMA3 else {"final_linear.bias"}
    )
    assert expected <= seen


def test_tied_weights_are_one_parameter() -> None:
    network = build(tiny())
    embedding, head = network.sequential[0], network.sequential[-1]
    assert head.word_embeddings.weight is embedding.word_embeddings.weight
    tokens, positions, targets = batch()
    network((tokens, positions), (targets, torch.ones(targets.shape), torch.tensor([1.0])))[0].backward()
    both = embedding.word_embeddings.weight.grad
    # Every real row gets the softmax's gradient (the head's share), whether its token occurs or not.
    assert both[:VOCAB].abs().amin(dim=0).max() > 0
    assert both[VOCAB:].abs().max() == 0


def test_a_tied_copy_elsewhere_starts_equal() -> None:
    layers = gpt_layers(tiny(), vocab_size=VOCAB, padded_vocab_size=128, state=STATE)
    first, last = (build_layer(layer, SEED, STATE) for layer in (layers[0], layers[-1]))
    assert torch.equal(first.word_embeddings.weight, last.word_embeddings.weight)
    assert [name for name, _ in named_parameters(last)] == ["0.word_embeddings.weight"]
    untied = gpt_layers(tiny(no_weight_tying=True), vocab_size=VOCAB, padded_vocab_size=128, state=STATE)
    assert not torch.equal(build_layer(untied[-1], SEED, STATE).final_linear.weight, first.word_embeddings.weight)


def _norm(x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
    return F.layer_norm(x, (32,), norm.weight, norm.bias, 1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gpt_j_residual": True},
        {"gpt_j_residual": True, "use_bias_in_mlp": False},
        {"gpt_j_residual": True, "gpt_j_tied": True},
        {"norm_placement": "olmo3"},
        {"norm_placement": "sandwich"},
    ],
    ids=str,
)
def test_residual_forms(changes: dict[str, Any]) -> None:
    block = build(tiny(**changes)).sequential[1]
    x, positions = torch.randn(32, 32), torch.arange(16).expand(2, 16)

    def attend(y: torch.Tensor) -> torch.Tensor:
        return block.attention(y, Context(positions))

    if changes.get("norm_placement") == "sandwich":
        y = x + _norm(attend(_norm(x, block.input_layernorm)), block.post_attention_layernorm)
        expected = y + _norm(block.mlp(_norm(y, block.pre_feedforward_layernorm))[0], block.post_feedforward_layernorm)
    elif changes.get("norm_placement"):
        y = x + _norm(attend(x), block.post_attention_layernorm)
        expected = y + _norm(block.mlp(y)[0], block.post_feedforward_layernorm)
    elif changes.get("gpt_j_tied"):
        y = _norm(x, block.input_layernorm)
        expected = x + attend(y) + block.mlp(y)[0]
    elif changes.get("gpt_j_residual"):
        expected = x + attend(_norm(x, block.input_layernorm)) + block.mlp(_norm(x, block.post_attention_layernorm))[0]
    else:
        y = x + attend(_norm(x, block.input_layernorm))
        expected = y + block.mlp(_norm(y, block.post_attention_layernorm))[0]
    out = block(Carry(x, positions))
    assert (out[0] - expected).abs().max() < 1e-5
    assert out[1] is positions


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"gpt_j_tied": True}, "gpt_j_tied"),
        ({"norm_placement": "olmo3", "gpt_j_residual": True}, "norm_placement"),
        ({"norm_placement": "sandwich", "gpt_j_residual": True}, "norm_placement"),
    ],
)
def test_forms_that_contradict_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=key):
        build(tiny(**changes))


def test_position_schemes_do_something_different_each() -> None:
    tokens, positions, _ = batch()
    seen = [
        logits(build(tiny(pos_emb=name, init_method_std=0.2)), tokens, positions)
        for name in ("none", "rotary", "learned", "sinusoidal", "alibi")
    ]
    for i, first in enumerate(seen):
        assert all((first - second).abs().max() > 1e-3 for second in seen[i + 1 :])


def test_padding_of_the_vocabulary_changes_nothing() -> None:
    tokens, positions, targets = batch()
    labels = (targets, torch.ones(targets.shape), torch.tensor([1 / targets.numel()]))
    for changes in ({}, {"no_weight_tying": True}):
        results = []
        for padding in (1, 8, 128):
            network = build(tiny(**changes), padding=padding)
            loss, _ = network((tokens, positions), labels)
            results.append((loss.item(), logits(network, tokens, positions)))
        assert results[0][1].shape == (2, 16, VOCAB)
        for loss, out in results[1:]:
            assert loss == pytest.approx(results[0][0], rel=1e-6)
            assert torch.allclose(out, results[0][1], atol=1e-6)


@pytest.mark.parametrize(
    "changes", [LLAMA, {"pos_emb": "alibi", "use_qk_layernorm": True}, {"pos_emb": "sinusoidal"}, GEMMA2, GEMMA3, PHI]
)
def test_a_bf16_model_computes_in_bf16_and_comes_close(changes: dict[str, Any]) -> None:
    tokens, positions, targets = batch()
    labels = (targets, torch.ones(targets.shape), torch.tensor([1 / targets.numel()]))
    exact = build(tiny(**changes))
    network = build(tiny(**changes)).bfloat16()
    carry: Any = Carry(tokens, positions)
    for layer in network.sequential[:-1]:
        carry = layer(carry)
        assert carry.hidden.dtype == torch.bfloat16
    loss, _ = network((tokens, positions), labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact((tokens, positions), labels)[0].item(), rel=0.01)
    loss.backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in network.parameters())


def test_golden_loss() -> None:
    """Numbers of a fixed seed; a refactor must not move them."""
    tokens, positions, targets = batch()
    labels = (targets, torch.ones(targets.shape), torch.tensor([1 / targets.numel()]))
    losses = {}
    for name, changes in GOLDEN_FORMS.items():
        network = build(tiny(**changes))
        loss, _ = network((tokens, positions), labels)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in network.parameters()]).norm()
        losses[name] = (loss.item(), norm.item())
    assert losses == {name: pytest.approx(numbers, rel=2e-5) for name, numbers in GOLDEN.items()}


GOLDEN_FORMS: dict[str, dict[str, Any]] = {
    "neox": {"gpt_j_residual": True, "rotary_pct": 0.25, "no_weight_tying": True},
    "llama": LLAMA,
    "gpt2": {"pos_emb": "learned"},
    "alibi": {"pos_emb": "alibi", "norm": "scalenorm", "activation": "geglu"},
}
GOLDEN = {
    "neox": (4.171849250793457, 1.256487488746643),
    "llama": (4.2526044845581055, 1.60855233669281),
    "gpt2": (4.221948146820068, 1.2847117185592651),
    "alibi": (4.203746318817139, 0.15565259754657745),
}

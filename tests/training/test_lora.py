"""Adapters beside frozen weights: the same curve at every layout, and against PEFT."""

from __future__ import annotations

import functools
from typing import Any

import peft
import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from megatron.errors import UserError
from tests.distributed import run_distributed
from tests.distributed.client import RankFailure
from tests.training.tiny import LLAMA, NEOX, SEQUENCE, VOCAB, Layout, build, step_batch, train

pytestmark = pytest.mark.cpu

STEPS = 4
LORA: dict[str, Any] = {"lora_r": 3, "lora_alpha": 6.0}
DORA = {**LORA, "use_dora": True, "use_rslora": True}


@functools.cache
def _alone(dora: bool, neox: bool) -> dict[str, list[float]]:
    keys = {**(NEOX if neox else LLAMA), **(DORA if dora else LORA)}
    return run_distributed(train, 1, keys, Layout(), STEPS)[0]


@pytest.mark.parametrize(
    ("layout", "dora", "neox"),
    [
        (Layout(tp=2, sequence_parallel=True), True, False),
        (Layout(pp=2, tp=2), True, True),
        (Layout(pp=2, dp=2, zero=1, micro=1), False, False),
        (Layout(dp=2, zero=2), True, False),
        (Layout(tp=2, dp=2, zero=3), True, True),
        (Layout(tp=2, dp=2, engine="native"), True, False),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_curve_is_the_same_at_every_layout(layout: Layout, dora: bool, neox: bool) -> None:
    alone = _alone(dora, neox)
    keys = {**(NEOX if neox else LLAMA), **(DORA if dora else LORA)}
    for curve in run_distributed(train, layout.world, keys, layout, STEPS, timeout=150):
        for name in alone:
            assert curve[name] == pytest.approx(alone[name], rel=1e-5), name


def _base_alone(rank: int, world: int, keys: dict[str, Any], layout: Layout) -> tuple[list[float], set[str], set[str]]:
    """Loss of one batch: before training, behind it, and then without adapters; what was trained, what has moments."""
    engine, args, lr = build(rank, keys, layout)
    batch = step_batch(99, args, engine.state)
    losses = [float(engine.eval_batch(batch).sums[0])]
    for step in range(2):
        engine.train_batch(step_batch(step, args, engine.state), lr(step) * 10)
    losses.append(float(engine.eval_batch(batch).sums[0]))
    with engine.without_adapters():
        losses.append(float(engine.eval_batch(batch).sums[0]))
    losses.append(float(engine.eval_batch(batch).sums[0]))
    trained = {name for name, p in engine.params().items() if p.requires_grad}
    kept = {name for name in engine.params() if set(engine.read_share(name)) > {"weight"}}
    return losses, trained, kept


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp=2, zero=3), Layout(engine="native")], ids=lambda x: x.name)
def test_the_base_is_frozen_and_can_be_asked_alone(layout: Layout) -> None:
    unfrozen = [{"match": "*.norm.scale", "freeze": False}]
    keys = {**LLAMA, **LORA, "lora_target_modules": ["query_key_value", "3.mlp.*"], "parameter_groups": unfrozen}
    found = run_distributed(_base_alone, layout.world, keys, layout)
    before, behind, without, again = found[0][0]
    assert behind != before and again == behind
    assert without == pytest.approx(before, rel=1e-3)  # only the last norm has moved
    trained = set().union(*(one[1] for one in found))
    layers = ("2.attention.query_key_value", "3.attention.query_key_value", "3.mlp.linear1", "3.mlp.linear2")
    assert trained == {"5.norm.scale", *(f"{layer}.lora.{part}" for layer in layers for part in "AB")}
    assert trained == set().union(*(one[2] for one in found))


def test_a_name_that_is_no_layer_is_refused_with_those_that_are() -> None:
    keys = {**LLAMA, **LORA, "lora_target_modules": ["q_proj"]}
    with pytest.raises((UserError, RankFailure), match="'q_proj' is no linear layer.*attention.query_key_value"):
        run_distributed(train, 1, keys, Layout(), 1)


def test_a_stage_with_nothing_to_train_is_refused() -> None:
    keys = {**LLAMA, **LORA, "lora_target_modules": ["3.mlp.*"]}
    with pytest.raises((UserError, RankFailure), match="nothing is trained on pipeline stage 0"):
        run_distributed(train, 2, keys, Layout(pp=2), 1)


# The layers of a GPT-NeoX block, ours and theirs.
LAYERS = {
    "attention.query_key_value": "attention.query_key_value",
    "attention.dense": "attention.dense",
    "mlp.linear1": "mlp.dense_h_to_4h",
    "mlp.linear2": "mlp.dense_4h_to_h",
}
OUTSIDE = {
    "0.word_embeddings.weight": "gpt_neox.embed_in.weight",
    "5.norm.weight": "gpt_neox.final_layer_norm.weight",
    "5.norm.bias": "gpt_neox.final_layer_norm.bias",
    "6.final_linear.weight": "lm_head.weight",
}
PARTS = {
    "A": "lora_A.default.weight",
    "B": "lora_B.default.weight",
    "magnitude": "lora_magnitude_vector.default.weight",
}


def _theirs(name: str, value: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Their name and row order of one of our parameters, or of its gradient, in a model with PEFT's adapters."""
    prefix = "base_model.model."
    if name in OUTSIDE:
        return prefix + OUTSIDE[name], value[:VOCAB]  # without padding
    index, _, local = name.partition(".")
    layer, adapter, part = local.rpartition(".lora.")
    layer, _, leaf = (layer, "", PARTS[part]) if adapter else local.rpartition(".")
    leaf = f"base_layer.{leaf}" if layer in LAYERS and not adapter else leaf
    if layer == "attention.query_key_value" and not name.endswith("lora.A"):  # for each head q, k, v
        value = value.view(3, 4, 8, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
    return f"{prefix}gpt_neox.layers.{int(index) - 2}.{LAYERS.get(layer, layer)}.{leaf}", value


def _peft_model(keys: dict[str, Any]) -> peft.PeftModel:
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_act="gelu",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        max_position_embeddings=SEQUENCE,
        use_parallel_residual=True,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    lora = peft.LoraConfig(
        r=keys["lora_r"],
        lora_alpha=keys["lora_alpha"],
        use_rslora=keys["use_rslora"],
        use_dora=keys["use_dora"],
        lora_dropout=keys["lora_dropout"],
        target_modules=list(LAYERS.values()),
    )
    return peft.get_peft_model(GPTNeoXForCausalLM(config), lora)


def _beside_peft(
    rank: int, world: int, keys: dict[str, Any], layout: Layout
) -> list[tuple[float, float, dict[str, float]]]:
    """Of each step our loss, theirs, and the largest difference of each gradient, relative to its largest entry."""
    engine, args, lr = build(rank, keys, layout)
    with torch.no_grad():
        for name, p in engine.params().items():  # the test's own random vectors are no lengths of rows
            if name.endswith("magnitude"):
                p.copy_(torch.linalg.vector_norm(engine.params()[name.replace("lora.magnitude", "weight")], dim=1))
    theirs = _peft_model(keys)
    own = dict(theirs.named_parameters())
    with torch.no_grad():
        for ours in engine.params().items():
            name, value = _theirs(*ours)
            own[name].copy_(value)
    trained = {name: p for name, p in own.items() if p.requires_grad}
    decays = [p for name, p in trained.items() if "magnitude" not in name]
    others = [p for name, p in trained.items() if "magnitude" in name]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95), eps=1e-8)
    found: list[tuple[float, float, dict[str, float]]] = []
    for step in range(5):
        gradients: dict[str, torch.Tensor] = {}
        engine.before_update = lambda kept=gradients: kept.update({n: g.clone() for n, g in engine.grads().items()})
        batch = step_batch(step, args, engine.state)
        torch.manual_seed(step)  # both draw the same masks, layer by layer
        loss = float(engine.train_batch(batch, lr(step)).loss)
        tokens, targets, mask = (part.flatten(0, 1) for part in (batch.tokens, batch.targets, batch.mask))
        torch.manual_seed(step)
        each = torch.nn.functional.cross_entropy(
            theirs(tokens).logits.flatten(0, 1), targets.flatten().clamp(min=0), reduction="none"
        )
        their_loss = (each * mask.flatten()).sum() / mask.sum()
        optimizer.zero_grad()
        their_loss.backward()
        assert {_theirs(name, g)[0] for name, g in gradients.items()} == trained.keys()
        apart = {}
        for ours in gradients.items():
            name, gradient = _theirs(*ours)
            largest = trained[name].grad.abs().max()
            apart[name] = float((gradient - trained[name].grad).abs().max() / largest) if largest > 0 else 0.0
        found.append((loss, float(their_loss), apart))
        for group in optimizer.param_groups:
            group["lr"] = lr(step)
        optimizer.step()
    return found


@pytest.mark.parametrize(
    ("rslora", "dora", "dropout"), [(False, False, 0.0), (True, False, 0.3), (False, True, 0.0), (False, True, 0.3)]
)
def test_five_steps_are_those_of_peft(rslora: bool, dora: bool, dropout: float) -> None:
    rate = {"optimizer": {"type": "Adam", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "eps": 1e-8}}}
    kind = {"use_rslora": rslora, "use_dora": dora, "lora_dropout": dropout}
    keys = {**NEOX, **LORA, **rate, "num_kv_heads": 4, "gradient_clipping": 0.0, **kind}
    for loss, their_loss, gradients in run_distributed(_beside_peft, 1, keys, Layout(micro=8))[0]:
        assert loss == pytest.approx(their_loss, rel=1e-5)
        assert max(gradients.values()) < 1e-5, gradients

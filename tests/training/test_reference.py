"""One rank of our engine against a loop written in plain torch: loss, norm, clip, schedule and AdamW, in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron.mpu.sharding import named_parameters
from tests.distributed import run_distributed
from tests.training.models import ADAM, LLAMA, NEOX
from tests.training.tiny import Layout, build, global_batch, step_batch

pytestmark = pytest.mark.cpu

STEPS = 8


def lr_at(step):
    """Warm-up over 4 of 20 steps, cosine to 1e-4 as in GPT-NeoX."""
    if step <= 4:
        return 1e-3 * max(1, step) / 4
    return 1e-4 + (1e-3 - 1e-4) / 2 * (1 + math.cos(math.pi * (step - 4) / 16))


def hf_twin(kind):
    """The same architecture in transformers, fp64."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

    shared = {
        "vocab_size": 67,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "use_cache": False,
        "attn_implementation": "eager",
    }
    if kind == "neox":
        config = GPTNeoXConfig(
            **shared,
            intermediate_size=128,
            rotary_pct=0.5,
            use_parallel_residual=True,
            tie_word_embeddings=False,
            hidden_act="gelu",
            layer_norm_eps=1e-5,
        )
        return GPTNeoXForCausalLM(config).double()
    config = LlamaConfig(
        **shared,
        num_key_value_heads=2,
        intermediate_size=48,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    )
    return LlamaForCausalLM(config).double()


def qkv_to_neox(x):
    """[Q | K | V] rows (ours, in memory) to GPT-NeoX's per-head q, k, v."""
    return x.reshape(3, 4, 8, *x.shape[1:]).transpose(0, 1).reshape(96, *x.shape[1:])


def neox_weights(ours):
    renamed = {
        "0.word_embeddings.weight": "gpt_neox.embed_in.weight",
        "5.norm.weight": "gpt_neox.final_layer_norm.weight",
        "5.norm.bias": "gpt_neox.final_layer_norm.bias",
        "6.final_linear.weight": "lm_head.weight",
    }
    out = {}
    for name, value in ours.items():
        if name in renamed:
            out[renamed[name]] = value
            continue
        index, rest = name.split(".", 1)
        if "query_key_value" in rest:
            value = qkv_to_neox(value)
        rest = rest.replace("mlp.linear1", "mlp.dense_h_to_4h").replace("mlp.linear2", "mlp.dense_4h_to_h")
        out[f"gpt_neox.layers.{int(index) - 2}.{rest}"] = value
    return out


def llama_weights(ours):
    out = {}
    for name, value in ours.items():
        index, rest = name.split(".", 1)
        prefix = f"model.layers.{int(index) - 2}."
        kind = rest.rsplit(".", 1)[-1]
        if name == "0.word_embeddings.weight":
            out["model.embed_tokens.weight"] = out["lm_head.weight"] = value
        elif rest == "norm.scale":
            out["model.norm.weight"] = value
        elif "query_key_value" in rest:
            for part, rows in zip("qkv", value.split([32, 16, 16]), strict=True):
                out[f"{prefix}self_attn.{part}_proj.{kind}"] = rows
        elif rest.startswith("attention.dense"):
            out[f"{prefix}self_attn.o_proj.{kind}"] = value
        elif rest.startswith("mlp.linear1"):
            out[f"{prefix}mlp.up_proj.{kind}"], out[f"{prefix}mlp.gate_proj.{kind}"] = value.chunk(2)
        elif rest.startswith("mlp.linear2"):
            out[f"{prefix}mlp.down_proj.{kind}"] = value
        else:
            out[f"{prefix}{rest.replace('.scale', '.weight')}"] = value
    return out


def ours(rank, world, keys):
    """Start weights, curve and end weights of our engine on one rank with four micro-batches."""
    engine, args, lr = build(rank, keys, Layout(micro=2))
    start = {n: p.detach().clone().double() for n, p in named_parameters(engine.module)}
    losses, norms = [], []
    for step in range(STEPS):
        out = engine.train_batch(step_batch(step, args, engine.state), lr(step))
        losses.append(float(out.loss))
        norms.append(float(out.grad_norm))
    end = {n: p.detach().clone().double() for n, p in named_parameters(engine.module)}
    return start, losses, norms, end


def unpad(name, value):
    return value[:67] if value.shape[:1] == (68,) and ("embed" in name or "lm_head" in name) else value


@pytest.mark.parametrize("kind", ["neox", "llama"])
def test_training_equals_plain_torch(kind):
    keys = {**({**NEOX, "num_kv_heads": 4} if kind == "neox" else LLAMA), **ADAM}
    rename = neox_weights if kind == "neox" else llama_weights
    start, losses, norms, end = run_distributed(ours, 1, keys, timeout=120)[0]
    model = hf_twin(kind)
    missing, unexpected = model.load_state_dict({n: unpad(n, v) for n, v in rename(start).items()}, strict=False)
    assert not unexpected
    assert all("inv_freq" in m or "rotary" in m or "bias" in m and "attention" in m for m in missing), missing

    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-4)
    for step in range(STEPS):
        tokens, mask = global_batch(step)
        tokens, mask = torch.from_numpy(tokens), torch.from_numpy(mask).double()
        logits = model(tokens[:, :-1]).logits
        token_loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        loss = (token_loss * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        optimizer.step()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-5)
        assert norms[step] == pytest.approx(norm.item(), rel=1e-4)
    for name, value in rename(end).items():
        reference = dict(model.named_parameters()).get(name)
        if reference is not None:
            np.testing.assert_allclose(unpad(name, value), reference.detach(), atol=1e-6, err_msg=name)

"""Raw LLaMA folders from a Hugging Face model's tensors, by transformers' own documented permutation; no code of ours.

In transformers' converter from these files the rows of a head of wq and wk, as a table [d/2, 2], are read column by
column. `interleaved` is its inverse. `logits_64` is the published network in fp64 with complex rotation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def interleaved(rows: Tensor, heads: int) -> Tensor:
    d = rows.shape[0] // heads
    return torch.stack(
        [rows[head * d + i + half * (d // 2)] for head in range(heads) for i in range(d // 2) for half in (0, 1)]
    )


def raw_tensors(theirs: dict[str, Tensor], heads: int, kv_heads: int) -> dict[str, Tensor]:
    """Whole raw tensors by name."""
    made = {"tok_embeddings.weight": theirs["model.embed_tokens.weight"], "norm.weight": theirs["model.norm.weight"]}
    made["output.weight"] = theirs.get("lm_head.weight", theirs["model.embed_tokens.weight"])
    layers = {int(name.split(".")[2]) for name in theirs if name.startswith("model.layers.")}
    for layer in layers:
        old = {n.removeprefix(f"model.layers.{layer}."): t for n, t in theirs.items() if f".layers.{layer}." in n}
        made |= {
            f"layers.{layer}.attention.wq.weight": interleaved(old["self_attn.q_proj.weight"], heads),
            f"layers.{layer}.attention.wk.weight": interleaved(old["self_attn.k_proj.weight"], kv_heads),
            f"layers.{layer}.attention.wv.weight": old["self_attn.v_proj.weight"],
            f"layers.{layer}.attention.wo.weight": old["self_attn.o_proj.weight"],
            f"layers.{layer}.feed_forward.w1.weight": old["mlp.gate_proj.weight"],
            f"layers.{layer}.feed_forward.w3.weight": old["mlp.up_proj.weight"],
            f"layers.{layer}.feed_forward.w2.weight": old["mlp.down_proj.weight"],
            f"layers.{layer}.attention_norm.weight": old["input_layernorm.weight"],
            f"layers.{layer}.ffn_norm.weight": old["post_attention_layernorm.weight"],
        }
    return made


def write_raw(
    folder: Path, tensors: dict[str, Tensor], params: dict[str, Any], shards: int = 1, embedding_dim: int = 1
) -> Path:
    """params.json and consolidated.XX.pth, with the table of rotations that such files hold."""
    folder.mkdir(parents=True)
    (folder / "params.json").write_text(json.dumps(params))
    for rank in range(shards):
        part = {}
        for name, tensor in tensors.items():
            last = name.split(".")[-2]
            dim = {"wo": 1, "w2": 1, "tok_embeddings": embedding_dim}.get(last, 0)
            whole = "norm" in last
            part[name] = tensor.clone() if whole else tensor.chunk(shards, dim)[rank].clone()
        part["rope.freqs"] = torch.ones(4)
        torch.save(part, folder / f"consolidated.{rank:02d}.pth")
    return folder


def logits_64(tensors: dict[str, Tensor], params: dict[str, Any], tokens: Tensor) -> Tensor:
    """[b, s, v] fp64, token by token over explicit loops of positions."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    heads, kv = params["n_heads"], params.get("n_kv_heads", params["n_heads"])
    d = params.get("head_dim", params["dim"] // heads)
    window = params.get("sliding_window") or 10**9
    s = tokens.shape[1]
    speed = torch.tensor([params.get("rope_theta", 10000.0) ** (-2 * i / d) for i in range(d // 2)]).double()
    turn = torch.exp(1j * torch.arange(s).double()[:, None] * speed[None, :])

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + params["norm_eps"]).sqrt() * scale

    def turned(x: Tensor) -> Tensor:
        as_complex = torch.complex(x[..., 0::2], x[..., 1::2]) * turn[None, :, None, :]
        out = torch.empty_like(x)
        out[..., 0::2], out[..., 1::2] = as_complex.real, as_complex.imag
        return out

    x = w["tok_embeddings.weight"][tokens]
    for layer in range(params["n_layers"]):
        at = {name.removeprefix(f"layers.{layer}."): t for name, t in w.items() if name.startswith(f"layers.{layer}.")}
        y = norm(x, at["attention_norm.weight"])
        q = turned((y @ at["attention.wq.weight"].T).unflatten(-1, (heads, d)))
        k = turned((y @ at["attention.wk.weight"].T).unflatten(-1, (kv, d)))
        v = (y @ at["attention.wv.weight"].T).unflatten(-1, (kv, d))
        mixed = torch.zeros_like(q)
        for head in range(heads):
            for position in range(s):
                first = max(0, position - window + 1)
                other = head // (heads // kv)
                score = (k[:, first : position + 1, other] * q[:, position, head, None]).sum(-1) / d**0.5
                weight = score.softmax(-1)[..., None]
                mixed[:, position, head] = (weight * v[:, first : position + 1, other]).sum(1)
        x = x + mixed.flatten(2) @ at["attention.wo.weight"].T
        y = norm(x, at["ffn_norm.weight"])
        gate = y @ at["feed_forward.w1.weight"].T
        x = x + (gate * gate.sigmoid() * (y @ at["feed_forward.w3.weight"].T)) @ at["feed_forward.w2.weight"].T
    return norm(x, w["norm.weight"]) @ w["output.weight"].T

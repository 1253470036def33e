"""Folders as GPT-NeoX writes them, from a Hugging Face model's tensors and the description of the format alone.

Nothing here uses our checkpoint code, so that reading them back is a test. What GPT-NeoX puts into its files besides
weights is there too: states of NumPy's generator, objects of classes nobody has, tables, norms without use, and padding
rows that are far from zero.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

MULTIPLE = 8  # make_vocab_size_divisible_by
TE_NAMES = {
    "attention.query_key_value.": "attention.qkv.",
    "attention.dense.": "attention.proj.",
    "mlp.linear1.": "mlp.fc1_",
    "mlp.linear2.": "mlp.fc2_",
    "post_attention_layernorm.": "mlp.layer_norm_",
}
LEGACY_NAMES = {"mlp.linear1.": "mlp.dense_h_to_4h.", "mlp.linear2.": "mlp.dense_4h_to_h."}


class Bomb:
    """An object whose unpickling makes a folder: proof that something in a file was run."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def blocks_of_neox(theirs: dict[str, Tensor], tp: int, layers: int, parallel: bool) -> list[list[dict[str, Tensor]]]:
    """[layer][rank] -> {name: local tensor} from the tensors of a GPTNeoXForCausalLM."""
    made = []
    for i in range(layers):
        old = {k.removeprefix(f"gpt_neox.layers.{i}."): v for k, v in theirs.items() if f".layers.{i}." in k}
        ranks: list[dict[str, Tensor]] = [{} for _ in range(tp)]
        for r, local in enumerate(ranks):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                local |= {f"{norm}.{kind}": old[f"{norm}.{kind}"] for kind in ("weight", "bias")}
            for ours, name in (
                ("attention.query_key_value", "attention.query_key_value"),
                ("mlp.linear1", "mlp.dense_h_to_4h"),
            ):
                for kind in ("weight", "bias"):
                    local[f"{ours}.{kind}"] = old[f"{name}.{kind}"].chunk(tp, 0)[r]
            for ours, name in (("attention.dense", "attention.dense"), ("mlp.linear2", "mlp.dense_4h_to_h")):
                local[f"{ours}.weight"] = old[f"{name}.weight"].chunk(tp, 1)[r]
                local[f"{ours}.bias"] = old[f"{name}.bias"] * (_share(r, tp) if parallel else 1.0)
        made.append(ranks)
    return made


def blocks_of_llama(
    theirs: dict[str, Tensor], tp: int, layers: int, heads: int, grouped: bool
) -> list[list[dict[str, Tensor]]]:
    """The same of a Llama or OLMo 2 without biases: norms are called `scale`, linear1 is each rank's [up ; gate]."""
    made = []
    for i in range(layers):
        old = {k.removeprefix(f"model.layers.{i}."): v for k, v in theirs.items() if f".layers.{i}." in k}
        q, k, v = (old[f"self_attn.{n}_proj.weight"] for n in "qkv")
        ranks = []
        for r in range(tp):
            parts = [t.chunk(tp, 0)[r] for t in (q, k, v)]
            if not grouped:  # head by head: q, k, v of the first, q, k, v of the second, ...
                n = heads // tp
                per_head = [part.chunk(n, 0) for part in parts]
                parts = [per_head[j][head] for head in range(n) for j in range(3)]
            norms = ("input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
            # OLMo's block owns a first norm that it never uses.
            local = {f"{norm}.scale": old.get(f"{norm}.weight", torch.zeros(7)) for norm in norms[:2]}
            if f"{norms[2]}.weight" in old:
                local[f"{norms[2]}.scale"] = old[f"{norms[2]}.weight"]
                local |= {f"attention.{n}_norm.scale": old[f"self_attn.{n}_norm.weight"].chunk(tp)[r] for n in "qk"}
            up, gate = (old[f"mlp.{n}_proj.weight"].chunk(tp, 0)[r] for n in ("up", "gate"))
            ranks.append(
                {
                    **local,
                    "attention.query_key_value.weight": torch.cat(parts),
                    "attention.dense.weight": old["self_attn.o_proj.weight"].chunk(tp, 1)[r],
                    "mlp.linear1.weight": torch.cat((up, gate)),
                    "mlp.linear2.weight": old["mlp.down_proj.weight"].chunk(tp, 1)[r],
                }
            )
        made.append(ranks)
    return made


def blocks_of_mamba(theirs: dict[str, Tensor], tp: int, layers: int) -> list[list[dict[str, Tensor]]]:
    """The same of a MambaForCausalLM: channels cut over ranks, in_proj is each rank's [x | z]."""
    made = []
    for i in range(layers):
        old = {k.removeprefix(f"backbone.layers.{i}."): v for k, v in theirs.items() if f".layers.{i}." in k}
        norm = old.pop("norm.weight")
        ranks: list[dict[str, Tensor]] = [{"norm.scale": norm} for _ in range(tp)]
        for name, tensor in old.items():
            for r, local in enumerate(ranks):
                if name == "mixer.in_proj.weight":
                    local[name] = torch.cat([half.chunk(tp, 0)[r] for half in tensor.chunk(2, 0)])
                else:
                    local[name] = tensor.chunk(tp, 1 if name.endswith(("x_proj.weight", "out_proj.weight")) else 0)[r]
        made.append(ranks)
    return made


def _share(rank: int, tp: int) -> float:
    """Unequal parts of 1: a reader that multiplies rank 0's by their number is wrong too."""
    return 1.0 if tp == 1 else (rank + 1) / (tp * (tp + 1) / 2)


def renamed(local: dict[str, Tensor], names: str) -> dict[str, Any]:
    """`new`, `legacy` or `te` names, with what such files hold besides."""
    made: dict[str, Any] = {}
    for name, tensor in local.items():
        for new, other in {"te": TE_NAMES, "legacy": LEGACY_NAMES}.get(names, {}).items():
            name = name.replace(new, other)
        made[name] = tensor
    if names == "te":
        made |= {"attention._extra_state": None, "mlp._extra_state": torch.zeros(3, dtype=torch.uint8)}
    if names == "legacy":
        made["attention.rotary_emb.inv_freq"] = torch.ones(4)
        if "input_layernorm.scale" in local:
            up, gate = made.pop("mlp.dense_h_to_4h.weight").chunk(2)
            made |= {"mlp.w3.weight": up.clone(), "mlp.w1.weight": gate.clone()}
            made["mlp.w2.weight"] = made.pop("mlp.dense_4h_to_h.weight")
    return made


def write_neox(
    folder: Path,
    theirs: dict[str, Tensor],
    keys: dict[str, Any],
    *,
    tp: int = 1,
    form: str = "pipe",
    names: str = "new",
    bomb: Path | None = None,
) -> Path:
    """Write `folder` and `latest` beside it.

    `form`: `pipe` (layer files), `whole` (mp_rank files) or `nested` (module in module); `keys`: the run's config.
    """
    layers = keys["num_layers"]
    heads = keys.get("num_attention_heads")
    grouped = keys.get("num_kv_heads", heads) != heads
    llama = "model.embed_tokens.weight" in theirs
    if "backbone.embeddings.weight" in theirs:
        blocks = blocks_of_mamba(theirs, tp, layers)
        names_outside = (
            "backbone.embeddings.weight",
            "lm_head.weight",
            {"norm.scale": theirs["backbone.norm_f.weight"]},
        )
    elif llama:
        blocks = blocks_of_llama(theirs, tp, layers, keys["num_attention_heads"], grouped)
        names_outside = ("model.embed_tokens.weight", "lm_head.weight", {"norm.scale": theirs["model.norm.weight"]})
    else:
        blocks = blocks_of_neox(theirs, tp, layers, keys.get("gpt_j_residual", False))
        final = {f"norm.{kind}": theirs[f"gpt_neox.final_layer_norm.{kind}"] for kind in ("weight", "bias")}
        names_outside = ("gpt_neox.embed_in.weight", "embed_out.weight", final)
    embedding, head, norm = names_outside
    vocab = theirs[embedding].shape[0]
    padded = -(-vocab // (MULTIPLE * tp)) * MULTIPLE * tp

    def cut(tensor: Tensor, rank: int) -> Tensor:
        rows = torch.full((padded - vocab, tensor.shape[1]), 50.0)
        return torch.cat((tensor, rows)).chunk(tp, 0)[rank].clone()

    def layers_of(rank: int) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {0: {"word_embeddings.weight": cut(theirs[embedding], rank)}}
        found |= {i + 2: renamed(block[rank], names) for i, block in enumerate(blocks)}
        found[layers + 3] = dict(norm)
        if head in theirs:
            found[layers + 4] = {"final_linear.weight": cut(theirs[head], rank)}
        if "score.weight" in theirs:  # split over the hidden dimension, as GPT-NeoX's row-parallel layers
            found[layers + 4] = {"rm_linear.weight": theirs["score.weight"].chunk(tp, 1)[rank]}
        return found

    args = {key: keys[key] for key in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")}
    args |= {"make_vocab_size_divisible_by": MULTIPLE, "padded_vocab_size": padded, "model_parallel_size": tp}
    state = {"iteration": 9, "args": args, "ds_version": "0.3.15", "np_rng_state": np.random.get_state()}
    state |= {"lr_scheduler": {"start_lr": 1e-3}, "optimizer": Bomb(bomb) if bomb else None}
    folder.mkdir(parents=True)
    for rank in range(tp):
        content = {
            number: {name: t.contiguous().clone() if isinstance(t, Tensor) else t for name, t in layer.items()}
            for number, layer in layers_of(rank).items()
        }
        path = folder / f"mp_rank_{rank:02d}_model_states.pt"
        if form == "pipe":
            for number, layer in content.items():
                torch.save(layer, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
            torch.save({"module": None, **state}, path)
        elif form == "whole":
            flat = {f"sequential.{n}.{name}": t for n, layer in content.items() for name, t in layer.items()}
            torch.save({"module": flat, **state}, path)
        else:
            flat = {f"{n}.{name}": t for n, layer in content.items() for name, t in layer.items()}
            torch.save({"module": {"module": flat}}, path)
    (folder.parent / "latest").write_text(folder.name)
    return folder

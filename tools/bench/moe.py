#!/usr/bin/env python
"""Forward and backward of a mixture-of-experts block and of transformers', as ratios within one run.

The block is Mixtral's with its sizes divided by eight, or one of many small experts like OLMoE's; timed are the whole
decoder block (attention, norms, mixture) and the mixture alone. transformers has several ways to compute experts: its
loop over experts ("eager", its default in training on a CPU) and "grouped_mm". Contenders take turns, so that changes
of the machine's speed affect all; the table has the median over rounds of a contender's seconds divided by those of
transformers' fastest in the same round (below 1: faster), and the same in CPU seconds.

    python tools/bench/moe.py                               # both shapes, fp32 and bf16
    python tools/bench/moe.py --shape mixtral --precision fp32 --rounds 9
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flags import positive

from megatron.errors import run_cli
from megatron.flags import Parser


@dataclass(frozen=True)
class Shape:
    """A block and its micro-batch."""

    hidden: int
    width: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    batch: int
    tokens: int


SHAPES = {
    "mixtral": Shape(hidden=512, width=1792, experts=8, top_k=2, heads=8, kv_heads=2, batch=4, tokens=256),
    "small-experts": Shape(hidden=512, width=256, experts=64, top_k=8, heads=8, kv_heads=8, batch=4, tokens=256),
}
PARTS = ("block", "mixture")
Step = Callable[[], None]


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="(default: all)")
    parser.add_argument(
        "--precision", nargs="+", choices=["fp32", "bfloat16"], default=["fp32", "bfloat16"], help="(default: both)"
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="(default: both)")
    parser.add_argument(
        "--rounds", type=positive, default=7, help="turns of each contender (default 7, after one warm-up)"
    )
    parser.add_argument("--threads", type=positive, default=2, help="of torch (default 2)")
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    torch.set_num_threads(options.threads)
    for shape in options.shape:
        for precision in options.precision:
            for part in options.part:
                report(shape, precision, part, options)


def report(shape: str, precision: str, part: str, options: argparse.Namespace) -> None:
    """Time all contenders in turn and print a table."""
    steps = contenders(SHAPES[shape], precision, part)
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            wall, work = time.perf_counter(), time.process_time()
            step()
            seconds[name].append(time.perf_counter() - wall)
            cpu[name].append(time.process_time() - work)
    s = SHAPES[shape]
    print(
        f"\n{shape} {part}, {precision}: {s.batch} x {s.tokens} tokens, hidden {s.hidden}, {s.experts} experts of "
        f"{s.width}, {s.top_k} per token, {options.threads} threads, {options.rounds} rounds"
    )
    print(f"{'':24s} {'ms':>8s} {'ratio (min-max)':>22s} {'in CPU time':>22s}")
    for name in steps:
        milliseconds = 1000 * statistics.median(seconds[name])
        print(f"{name:24s} {milliseconds:8.1f} {ratio(seconds, name):>22s} {ratio(cpu, name):>22s}")


def ratio(times: dict[str, list[float]], name: str) -> str:
    """A contender's time over transformers' fastest of the same round: median (min-max)."""
    others = [values for other, values in times.items() if other != "deepy"]
    fastest = min(others, key=statistics.median)
    ratios = [a / b for a, b in zip(times[name], fastest, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def contenders(shape: Shape, precision: str, part: str) -> dict[str, Step]:
    """What is timed, with the same weights and checked to give the same output."""
    import torch

    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    ours, run = deepy(shape, part, dtype)
    calls = {"deepy": (ours, run)}
    for way in ("eager", "grouped_mm"):
        calls[f"transformers {way}"] = transformers(shape, part, dtype, way, ours)
    x = torch.randn(shape.batch, shape.tokens, shape.hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    push = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        expected = run(x).float()
        for name, (_, call) in calls.items():
            error = float((call(x).float() - expected).norm() / expected.norm())
            # In bf16 transformers' logits are rounded before they are compared, so some tokens go elsewhere.
            if error > (0.2 if precision == "bfloat16" else 1e-4):
                raise SystemExit(f"{name} gives another result: the difference is {error:.1e}")

    def step(module: Any, call: Callable[[Any], Any]) -> Step:
        def forward_backward() -> None:
            module.zero_grad(set_to_none=True)
            call(x.clone().requires_grad_()).backward(push)

        return forward_backward

    return {name: step(*found) for name, found in calls.items()}


def deepy(shape: Shape, part: str, dtype: Any) -> tuple[Any, Callable[[Any], Any]]:
    """This library's block (module, function of x [b, s, h])."""
    import torch

    from megatron.layers.carry import Carry, Context
    from megatron.model.gpt import build_layer, gpt_layers
    from megatron.mpu.state import ParallelState
    from megatron.neox_arguments import NeoXArgs
    from megatron.neox_arguments.derive import derive

    keys = {
        "num_layers": 1, "hidden_size": shape.hidden, "num_attention_heads": shape.heads,
        "num_kv_heads": shape.kv_heads, "seq_length": shape.tokens, "pos_emb": "rotary", "norm": "rmsnorm",
        "rms_norm_epsilon": 1e-5, "activation": "swiglu", "intermediate_size": shape.width,
        "gated_width_rule": "final", "use_bias_in_attn_linear": False, "use_bias_in_mlp": False,
        "moe_num_experts": shape.experts, "moe_router_type": "topk", "moe_top_k": shape.top_k,
        "moe_normalize_topk": True, "train_micro_batch_size_per_gpu": shape.batch,
    }  # fmt: skip
    model, state = derive(NeoXArgs.from_saved(keys)).model, ParallelState.single()
    layers = gpt_layers(model, vocab_size=64, padded_vocab_size=64, state=state)
    block = build_layer(layers[1], 0, state).to(dtype)
    positions = torch.arange(shape.tokens).expand(shape.batch, shape.tokens).contiguous()

    def whole(x: Any) -> Any:
        return block(Carry(x.flatten(0, 1), positions)).hidden.view_as(x)

    def mixture(x: Any) -> Any:
        return block.mlp(x.flatten(0, 1), Context(positions))[0].view_as(x)

    return (block, whole) if part == "block" else (block.mlp, mixture)


def transformers(shape: Shape, part: str, dtype: Any, way: str, ours: Any) -> tuple[Any, Callable[[Any], Any]]:
    """MixtralDecoderLayer or its mixture with our weights."""
    import torch
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import (
        MixtralDecoderLayer,
        MixtralRotaryEmbedding,
        MixtralSparseMoeBlock,
    )

    config = MixtralConfig(
        hidden_size=shape.hidden, intermediate_size=shape.width, num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, sliding_window=None,
        attn_implementation="sdpa",
    )  # fmt: skip
    config._experts_implementation = way
    mlp = ours.mlp if part == "block" else ours
    up, gate = mlp.experts.linear1.detach().chunk(2, dim=1)
    module = MixtralDecoderLayer(config, 0) if part == "block" else MixtralSparseMoeBlock(config)
    module = module.to(dtype).train()
    theirs = module.mlp if part == "block" else module
    with torch.no_grad():
        theirs.gate.weight.copy_(mlp.router.weight)
        theirs.experts.gate_up_proj.copy_(torch.cat((gate, up), 1))
        theirs.experts.down_proj.copy_(mlp.experts.linear2)
    if part == "mixture":
        return module, module
    q, kv = shape.hidden, shape.kv_heads * (shape.hidden // shape.heads)
    with torch.no_grad():
        attention = ours.attention
        for name, rows in zip("qkv", attention.query_key_value.weight.split((q, kv, kv)), strict=True):
            getattr(module.self_attn, f"{name}_proj").weight.copy_(rows)
        module.self_attn.o_proj.weight.copy_(attention.dense.weight)
    positions = torch.arange(shape.tokens)[None].expand(shape.batch, -1)
    tables = MixtralRotaryEmbedding(config)(torch.empty(1, dtype=dtype), positions)

    def whole(x: Any) -> Any:
        return module(x, position_embeddings=tables)

    return module, whole


if __name__ == "__main__":
    run_cli(main)

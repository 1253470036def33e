#!/usr/bin/env python
"""Mamba-1 and Mamba-2 in plain torch and in transformers (its path without fused kernels), as ratios within one run.

Both have the same weights. Contenders take turns, so that changes of the machine's speed affect both; the table has the
median seconds over rounds, and the ratio of theirs to ours. `train` is a forward and backward pass with the loss of a
language model, `prefill` a forward pass without gradients that fills the cache, `decode` one more token. The largest
difference of a logit is printed too.

    python tools/bench/mamba.py                                   # 2 layers, 256 wide, 1 x 256 tokens
    python tools/bench/mamba.py --kind mamba2 --hidden 768 --tokens 1024 --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flags import positive

from megatron.errors import run_cli
from megatron.flags import Parser

VOCAB = 8192
TASKS = ("train", "prefill", "decode")


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--kind", nargs="+", choices=["mamba", "mamba2"], default=["mamba", "mamba2"], help="(default: both)"
    )
    parser.add_argument("--layers", type=positive, default=2, help="blocks of the model (default 2)")
    parser.add_argument("--hidden", type=positive, default=256, help="hidden size (default 256)")
    parser.add_argument("--batch", type=positive, default=1, help="sequences (default 1)")
    parser.add_argument("--tokens", type=positive, default=256, help="per sequence (default 256)")
    parser.add_argument(
        "--rounds", type=positive, default=3, help="turns of each contender (default 3, after one warm-up)"
    )
    parser.add_argument("--threads", type=positive, default=1, help="of torch (default 1)")
    options = parser.parse_args()
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    for kind in options.kind:
        report(kind, options)


def report(kind: str, options: argparse.Namespace) -> None:
    print(f"{kind}: {options.layers} layers, {options.hidden} wide, {options.batch} x {options.tokens} tokens, fp32")
    ours, theirs, difference = contenders(kind, options)
    print(f"  largest difference of a logit: {difference:.1e}")
    seconds: dict[str, dict[str, list[float]]] = {task: {"ours": [], "theirs": []} for task in TASKS}
    for turn in range(options.rounds + 1):
        for name, tasks in (("ours", ours), ("theirs", theirs)):
            for task in TASKS:
                took = tasks[task]()
                if turn:
                    seconds[task][name].append(took)
    for task in TASKS:
        mine, other = (statistics.median(seconds[task][name]) for name in ("ours", "theirs"))
        ratios = [b / a for a, b in zip(seconds[task]["ours"], seconds[task]["theirs"], strict=True)]
        print(f"  {task:8} ours {mine:8.4f} s  transformers {other:8.4f} s  {statistics.median(ratios):6.1f} times")


Tasks = dict[str, Callable[[], float]]


def contenders(kind: str, options: argparse.Namespace) -> tuple[Tasks, Tasks, float]:
    """What each does, and how far their logits are apart."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron.convert.families import FAMILIES
    from megatron.convert.parts.family import Rule, TokenIds
    from megatron.mpu.sharding import named_parameters

    model, network = ours_built(kind, options)
    fields = FAMILIES[kind].config(model, VOCAB, TokenIds())
    torch.manual_seed(0)
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).float()
    with torch.no_grad():
        weights = other.state_dict()
        parameters = dict(named_parameters(network))
        for rule in FAMILIES[kind].table(model):
            assert isinstance(rule, Rule)
            parameters[rule.ours].copy_(rule.transform.load([weights[name] for name in rule.theirs]))
    tokens = torch.randint(VOCAB, (options.batch, options.tokens + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(options.tokens).expand_as(inputs).contiguous()
    with torch.no_grad():
        mine = network((inputs[:1], positions[:1]), then=lambda out: out.logits())
        difference = float((mine - other(inputs[:1], use_cache=False).logits).abs().max())
    return our_tasks(network, inputs, positions, targets), their_tasks(other, inputs, targets), difference


def ours_built(kind: str, options: argparse.Namespace) -> tuple[Any, Any]:
    from megatron.model.gpt import gpt_layers
    from megatron.model.sequential import SequentialModel
    from megatron.mpu.state import ParallelState
    from megatron.neox_arguments import NeoXArgs
    from megatron.neox_arguments.derive import Facts, derive
    from megatron.objectives import OBJECTIVES

    keys = {
        "num_layers": options.layers, "hidden_size": options.hidden, "seq_length": options.tokens,
        "attention_config": [[[kind], "all"]], "pos_emb": "none", "norm": "rmsnorm", "rms_norm_epsilon": 1e-5,
        "max_position_embeddings": 2 * options.tokens, "no_weight_tying": True, "mamba_use_bias_in_x_proj": False,
        "train_micro_batch_size_per_gpu": options.batch,
    }  # fmt: skip
    model = derive(NeoXArgs.from_saved(keys), Facts(vocab_size=VOCAB)).model
    state = ParallelState.single()
    layers = gpt_layers(model, vocab_size=VOCAB, padded_vocab_size=VOCAB, state=state)
    return model, SequentialModel(layers, OBJECTIVES["normal"](), 0, state)


def our_tasks(network: Any, inputs: Any, positions: Any, targets: Any) -> Tasks:
    import torch

    from megatron.layers.kv_cache import KVCache

    count = inputs.shape[1]
    held: dict[str, Any] = {}

    def train() -> None:
        mask = torch.ones(targets.shape)
        network((inputs, positions), (targets, mask, (1 / mask.sum()).reshape(1)))[0].backward()
        network.zero_grad(set_to_none=True)

    @torch.no_grad()
    def prefill() -> None:
        held["cache"] = KVCache(network.sequential, count + 64)
        network((inputs, positions), cache=held["cache"], then=lambda out: out.last_logits())

    @torch.no_grad()
    def decode() -> None:
        after = torch.full((inputs.shape[0], 1), held["cache"].length)
        network((inputs[:, :1], after), cache=held["cache"], then=lambda out: out.last_logits())

    return {"train": timer_of(train), "prefill": timer_of(prefill), "decode": timer_of(decode, 16)}


def their_tasks(model: Any, inputs: Any, targets: Any) -> Tasks:
    import torch
    from torch.nn.functional import cross_entropy

    held: dict[str, Any] = {}

    def train() -> None:
        logits = model(inputs, use_cache=False).logits
        cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def prefill() -> None:
        held["cache"] = model(inputs, use_cache=True, logits_to_keep=1).cache

    @torch.no_grad()
    def decode() -> None:
        model(inputs[:, :1], cache=held["cache"], use_cache=True)

    return {"train": timer_of(train), "prefill": timer_of(prefill), "decode": timer_of(decode, 16)}


def timer_of(task: Callable[[], None], times: int = 1) -> Callable[[], float]:
    def run() -> float:
        begin = time.perf_counter()
        for _ in range(times):
            task()
        return (time.perf_counter() - begin) / times

    return run


if __name__ == "__main__":
    run_cli(main)

"""A tiny model that is not blind by symmetry, and the batches it trains on, at any layout.

Biases are random, there are fewer KV heads than heads, the vocabulary pads differently per tensor-parallel size, the
number of trained tokens differs per sample, some samples have none, and the clip is active.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch

from megatron.data.batch import StepBatch
from megatron.data.collate import CollateRules
from megatron.data.loader import StepLoader
from megatron.data.sample import IGNORE, Sample
from megatron.mpu.owned import own_experts
from megatron.mpu.random import stable_seed
from megatron.mpu.sharding import named_parameters, shard
from megatron.mpu.state import ParallelState
from megatron.mpu.topology import Topology
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.derive import Facts, derive
from megatron.training.setup import Process, build_engine, build_model, build_schedule
from megatron.training.setup_deepspeed import init_deepspeed
from tests.distributed import run_distributed

VOCAB = 67
SEQUENCE = 16
BATCH = 8

NEOX = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "seq_length": SEQUENCE,
    "max_position_embeddings": SEQUENCE,
    "make_vocab_size_divisible_by": 4,
    "pos_emb": "rotary",
    "rotary_pct": 0.5,
    "no_weight_tying": True,
    "gpt_j_residual": True,
    "train_batch_size": BATCH,
    "train_iters": 20,
    "lr_decay_style": "cosine",
    "lr_decay_iters": 20,
    "warmup": 0.2,
    "min_lr": 1e-4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8}},
    "weight_decay": 0.1,
    "gradient_clipping": 0.25,
    "precision": "fp32",
    "seed": 1234,
}
LLAMA = {
    **NEOX,
    "gpt_j_residual": False,
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-5,
    "rotary_pct": 1.0,
    "activation": "swiglu",
    "intermediate_size": 48,
    "gated_width_rule": "final",
    "no_weight_tying": False,
}
GEMMA3 = {
    **LLAMA,
    "norm": "rmsnorm_unit_offset",
    "norm_placement": "sandwich",
    "activation": "geglu_tanh",
    "scale_embedding": True,
    "query_pre_attn_scalar": 5,
    "use_separate_qk_norms": True,
    "qk_norm_per_head": True,
    "sliding_window_width": 4,
    "attention_config": [[["local", "global"], "all"]],
    "rotary_emb_base_local": 70.0,
}
# Both caps of Gemma 2, and the biases of Phi.
CAPPED = {
    **NEOX,
    "gpt_j_tied": True,
    "use_bias_in_head": True,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.0,
}


@dataclass(frozen=True)
class Layout:
    """How a global batch and a model are spread."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    micro: int = 2
    zero: int = 0
    sequence_parallel: bool = False
    ep: int = 1
    engine: str = "deepspeed"

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def name(self) -> str:
        more = ("-sp" if self.sequence_parallel else "") + (f"-ep{self.ep}" if self.ep > 1 else "")
        more += "-native" if self.engine == "native" else ""
        return f"pp{self.pp}dp{self.dp}tp{self.tp}-mb{self.micro}-z{self.zero}{more}"

    def keys(self) -> dict[str, Any]:
        return {
            "pipe_parallel_size": self.pp,
            "model_parallel_size": self.tp,
            "train_micro_batch_size_per_gpu": self.micro,
            "sequence_parallel": self.sequence_parallel,
            "expert_parallel_size": self.ep,
            "zero_optimization": {"stage": self.zero},
            "engine": self.engine,
        }


def tiny_args(keys: dict[str, Any], layout: Layout) -> NeoXArgs:
    """The derived configuration of a layout."""
    args = NeoXArgs.from_saved({**keys, **layout.keys()})
    return derive(args, Facts(vocab_size=VOCAB, num_devices=layout.world))


def process_of(rank: int, args: NeoXArgs, layout: Layout) -> Process:
    """What `start_process` builds, from the ranks of a distributed test."""
    init_deepspeed(torch.device("cpu"))
    topology = Topology({"pipe": layout.pp, "data": layout.dp, "model": layout.tp})
    state = ParallelState.build(topology, rank, torch.device("cpu"), layout.sequence_parallel, layout.ep)
    return Process(args, state, SimpleNamespace(vocab_size=VOCAB))  # type: ignore[arg-type]


@torch.no_grad()
def randomize_vectors(model: torch.nn.Module, state: ParallelState) -> None:
    """Norms and biases away from 1 and 0, the same at every layout."""
    for name, p in named_parameters(model):
        if p.spec.kind == "vector" and not name.endswith(("_w1", "_w2")):  # RWKV-6's small matrices
            generator = torch.Generator().manual_seed(stable_seed("vector", name))
            full = torch.randn(p.spec.shape, generator=generator) * 0.1
            full += 0.0 if name.endswith("bias") else 1.0
            with deepspeed.zero.GatheredParameters([p], modifier_rank=0, enabled=hasattr(p, "ds_id")):
                p.copy_(own_experts(shard(full, p.spec, state.tp_rank, state.tp_size), p.spec, state))


def global_batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """tokens [batch, s + 1] and the mask of targets [batch, s] of one step."""
    rng = np.random.RandomState(1000 + step)
    tokens = rng.randint(0, VOCAB, (BATCH, SEQUENCE + 1)) ** 2 // VOCAB  # low ids are likelier: something to learn
    share = np.linspace(0.05, 1.0, BATCH)[:, None]  # samples differ in how much of them is trained
    mask = (rng.rand(BATCH, SEQUENCE) < share).astype(np.float32)
    mask[step % BATCH] = 0.0  # one sample of each step trains nothing
    return tokens, mask


class Samples:
    """The samples of all steps, each of three documents with borders of its own."""

    def __getitem__(self, number: int) -> Sample:
        tokens, mask = (part[number % BATCH] for part in global_batch(number // BATCH))
        labels = np.concatenate([[IGNORE], np.where(mask > 0, tokens[1:], IGNORE)])
        return Sample(tokens, starts=np.array([0, 4 + number % 3, 12 - number % 4]), labels=labels)


def step_batch(step: int, args: NeoXArgs, state: ParallelState) -> StepBatch:
    """This data rank's share of a step, as a run reads it."""
    rules = CollateRules(SEQUENCE, intra_document_masking=args.model.intra_document_masking, vocab_size=VOCAB)
    loader = StepLoader(
        Samples(),  # type: ignore[arg-type]
        micro_batch=args.training.train_micro_batch_size_per_gpu,
        gas=args.training.gradient_accumulation_steps,
        rules=rules,
        dp_rank=state.dp_rank,
        dp_size=state.dp_size,
        plan=(plan := BatchPlan.of(args)),
    )
    return loader.read(plan.samples(step), step)


def build(rank: int, keys: dict[str, Any], layout: Layout) -> tuple[Any, NeoXArgs, Any]:
    """(engine, args, learning rate) of a rank, with vectors randomised before the engine copies them."""
    args = tiny_args(keys, layout)
    process = process_of(rank, args, layout)
    model = build_model(process, args.training.seed)
    randomize_vectors(model, process.state)
    return build_engine(process, model), args, build_schedule(args)


def whole_state(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Master weight and moments of this rank's tensor-parallel part of each parameter (with all experts), joined from
    what each data rank answers for; what is kept of the whole as it is. Collective over the data group."""
    mine = {
        name: (engine.share(name), {key: value.clone() for key, value in engine.read_share(name).items()})
        for name in engine.params()
    }
    everybody = [mine] * engine.state.dp_size
    if (group := engine.state.group("data")) is not None:
        torch.distributed.all_gather_object(everybody, mine, group=group)
    found = {}
    for name, p in engine.params().items():
        shares = (shares[name] for shares in everybody)
        pieces = sorted(((share.start, share.stop, part) for share, part in shares if share), key=lambda x: x[:2])
        assert [start for start, _, _ in pieces] == [0, *(stop for _, stop, _ in pieces[:-1])], (
            f"{name}: shares overlap"
        )
        shape = p.spec.local_shape(engine.state.tp_size)
        found[name] = {
            key: torch.cat([part[key] for _, _, part in pieces]).view(shape) if value.ndim == 1 else value
            for key, value in mine[name][1].items()
        }
    return found


def train(rank: int, world: int, keys: dict[str, Any], layout: Layout, steps: int) -> dict[str, list[float]]:
    """Train a few steps and return the curve."""
    engine, args, lr = build(rank, keys, layout)
    curve: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for step in range(steps):
        out = engine.train_batch(step_batch(step, args, engine.state), lr(step))
        curve["loss"].append(float(out.loss))
        curve["grad_norm"].append(float(out.grad_norm))
    evaluated = engine.eval_batch(step_batch(99, args, engine.state))
    curve["eval"] = [evaluated.loss]
    return curve


def check_curve(alone: dict[str, list[float]], keys: dict[str, Any], layout: Layout, steps: int) -> None:
    """The curve of one rank, `alone`, falls and clips, and this layout has the same."""
    assert alone["loss"][-1] < alone["loss"][0] and max(alone["grad_norm"]) > 0.25
    for curve in run_distributed(train, layout.world, keys, layout, steps, timeout=150):
        assert curve["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert curve["grad_norm"] == pytest.approx(alone["grad_norm"], rel=2e-4)
        assert curve["eval"] == pytest.approx(alone["eval"], rel=1e-5)

"""A small engine over plain torch: declared parameters, AdamW, gradients that are the same function at any layout.

It stands for `training.engine` where the subject is the checkpoint: sharded over tensor parallel, divided into
pipeline stages, replicated over data parallel. `read` fails loudly when data ranks do not call it in the same order.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist

from megatron.checkpoint.neox_layout import Heads
from megatron.mpu.random import stable_seed
from megatron.mpu.sharding import ParamSpec, parameter, shard
from megatron.mpu.state import ParallelState

HEADS = Heads(num_attention_heads=4, num_kv_heads=2)
HEADS_MHA = Heads(num_attention_heads=4, num_kv_heads=4)
HIDDEN, HEAD_DIM, FFN, VOCAB, LAYERS = 16, 4, 12, 37, 2


def draw(full, generator):
    full.copy_(torch.randn(full.shape, generator=generator))


def model_specs(tp_size: int, heads: Heads = HEADS, tied: bool = False) -> list[ParamSpec]:
    """The declarations of a small gated, grouped-query model; the vocabulary pads differently at every `tp_size`."""
    padded = -(-VOCAB // (8 * tp_size)) * 8 * tp_size
    q, kv = heads.num_attention_heads * HEAD_DIM, heads.num_kv_heads * HEAD_DIM
    qkv, gated = (q, kv, kv), (FFN, FFN)
    specs = [ParamSpec(name="0.word_embeddings.weight", shape=(VOCAB, HIDDEN), init=draw, split_dim=0, padded=padded)]
    for layer in range(2, 2 + LAYERS):
        for name, shape, split, blocks in (
            ("input_layernorm.scale", (HIDDEN,), None, ()),
            ("attention.query_key_value.weight", (sum(qkv), HIDDEN), 0, qkv),
            ("attention.query_key_value.bias", (sum(qkv),), 0, qkv),
            ("attention.dense.weight", (HIDDEN, q), 1, ()),
            ("attention.dense.bias", (HIDDEN,), None, ()),
            ("mlp.linear1.weight", (2 * FFN, HIDDEN), 0, gated),
            ("mlp.linear2.weight", (HIDDEN, FFN), 1, ()),
        ):
            specs.append(ParamSpec(name=f"{layer}.{name}", shape=shape, init=draw, split_dim=split, blocks=blocks))
    specs.append(ParamSpec(name=f"{LAYERS + 3}.norm.scale", shape=(HIDDEN,), init=draw))
    if not tied:
        head = ParamSpec(
            name=f"{LAYERS + 4}.final_linear.weight", shape=(VOCAB, HIDDEN), init=draw, split_dim=0, padded=padded
        )
        specs.append(head)
    return specs


def full_value(seed: int, spec: ParamSpec) -> torch.Tensor:
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(stable_seed(seed, spec.name)))


class FakeEngine:
    """Stage `pp_rank` holds one of pp_size parts of the layers; a tied embedding is on the first and the last."""

    def __init__(self, state: ParallelState, seed: int, heads: Heads = HEADS, tied: bool = False, dtype=torch.float32):
        self.state = state
        self.specs = {spec.name: spec for spec in model_specs(state.tp_size, heads, tied)}
        self._params = {}
        for name in self._names_of_stage(tied):
            spec = self.specs[name]
            local = parameter(spec, state)
            with torch.no_grad():
                local.copy_(shard(full_value(seed, spec), spec, state.tp_rank, state.tp_size))
            if dtype != torch.float32:
                local = torch.nn.Parameter(local.detach().to(dtype))
                local.spec = spec
            self._params[name] = local
        self.masters = {name: p.detach().float().clone().requires_grad_() for name, p in self._params.items()}
        self.optimizer = torch.optim.AdamW(list(self.masters.values()), lr=1e-2, weight_decay=0.1)
        self.steps = 0
        self.skipped_steps = 0

    def _names_of_stage(self, tied: bool) -> list[str]:
        names = list(self.specs)
        per_stage = -(-len(names) // self.state.pp_size)
        mine = names[self.state.pp_rank * per_stage : (self.state.pp_rank + 1) * per_stage]
        if tied and self.state.is_last_stage and names[0] not in mine:
            mine.append(names[0])
        return mine

    def step(self) -> None:
        """One update: the gradient is a function of (name, step) and of the weight itself."""
        self.steps += 1
        for name, master in self.masters.items():
            spec = self.specs[name]
            gradient = shard(full_value(self.steps, spec), spec, self.state.tp_rank, self.state.tp_size)
            master.grad = gradient + 0.5 * master.detach()
        self.optimizer.step()
        self.finish_writing()

    def params(self):
        return self._params

    def read(self, name, needed=True):
        group = self.state.group("data")
        if group is not None:
            crcs = [torch.zeros((), dtype=torch.int64) for _ in range(self.state.dp_size)]
            dist.all_gather(crcs, torch.tensor(zlib.crc32(name.encode())), group=group)
            assert len({int(crc) for crc in crcs}) == 1, "data ranks read different parameters"
        master = self.masters[name]
        moments = {k: v for k, v in self.optimizer.state[master].items() if k != "step"}
        return {"weight": master.detach(), **moments} if needed else {}

    def write(self, name, values):
        master = self.masters[name]
        with torch.no_grad():
            master.copy_(values["weight"])
        for key in ("exp_avg", "exp_avg_sq"):
            if key in values:
                state = self.optimizer.state[master]
                state.setdefault("step", torch.tensor(0.0))
                state[key] = values[key].clone()

    def write_weight(self, name, weight):
        with torch.no_grad():
            self.masters[name].copy_(weight)

    def finish_writing(self):
        with torch.no_grad():
            for name, p in self._params.items():
                p.copy_(self.masters[name])

    def scalars(self):
        return {"optimizer_steps": self.steps, "skipped_steps": self.skipped_steps, "loss_scale": None}

    def load_scalars(self, values):
        self.steps, self.skipped_steps = values["optimizer_steps"], values["skipped_steps"]
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(float(self.steps))

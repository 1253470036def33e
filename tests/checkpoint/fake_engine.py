"""A small engine over plain torch: declared parameters, AdamW, gradients that are the same function at any layout.

It stands for `training.engine` where the subject is the checkpoint: sharded over tensor parallel, divided into
pipeline stages, replicated over data parallel. Of what it has whole, a data rank answers for a part that is uneven: its
neighbour's ends within a row.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.checkpoint.neox_layout import Heads
from megatron.mpu.random import stable_seed
from megatron.mpu.sharding import ParamSpec, parameter, shard
from megatron.mpu.state import ParallelState

HEADS = Heads(num_attention_heads=4, num_kv_heads=2)
HEADS_MHA = Heads(num_attention_heads=4, num_kv_heads=4)
HIDDEN, FFN, VOCAB, LAYERS = 16, 12, 37, 2


def draw(full, generator):
    full.copy_(torch.randn(full.shape, generator=generator))


def model_specs(
    tp_size: int,
    heads: Heads = HEADS,
    tied: bool = False,
    depth: int = LAYERS,
    hidden: int = HIDDEN,
    ffn: int = FFN,
    vocab: int = VOCAB,
    reward: bool = False,
) -> list[ParamSpec]:
    """The declarations of a small gated, grouped-query model; the vocabulary pads differently at every `tp_size`."""
    padded = -(-vocab // (8 * tp_size)) * 8 * tp_size
    head_dim = hidden // HEADS.num_attention_heads
    q, kv = heads.num_attention_heads * head_dim, heads.num_kv_heads * head_dim
    qkv, gated = (q, kv, kv), (ffn, ffn)
    specs = [ParamSpec(name="0.word_embeddings.weight", shape=(vocab, hidden), init=draw, split_dim=0, padded=padded)]
    for layer in range(2, 2 + depth):
        for name, shape, split, blocks in (
            ("input_layernorm.scale", (hidden,), None, ()),
            ("attention.query_key_value.weight", (sum(qkv), hidden), 0, qkv),
            ("attention.query_key_value.bias", (sum(qkv),), 0, qkv),
            ("attention.dense.weight", (hidden, q), 1, ()),
            ("attention.dense.bias", (hidden,), None, ()),
            ("mlp.linear1.weight", (2 * ffn, hidden), 0, gated),
            ("mlp.linear2.weight", (hidden, ffn), 1, ()),
        ):
            specs.append(ParamSpec(name=f"{layer}.{name}", shape=shape, init=draw, split_dim=split, blocks=blocks))
    specs.append(ParamSpec(name=f"{depth + 3}.norm.scale", shape=(hidden,), init=draw))
    if reward:
        specs.append(ParamSpec(name=f"{depth + 4}.rm_linear.weight", shape=(1, hidden), init=draw, split_dim=1))
    elif not tied:
        head = ParamSpec(
            name=f"{depth + 4}.final_linear.weight", shape=(vocab, hidden), init=draw, split_dim=0, padded=padded
        )
        specs.append(head)
    return specs


def full_value(seed: int, spec: ParamSpec) -> torch.Tensor:
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(stable_seed(seed, spec.name)))


class FakeEngine:
    """Stage `pp_rank` holds one of pp_size parts of the layers; a tied embedding is on the first and the last."""

    def __init__(
        self, state: ParallelState, seed: int, heads: Heads = HEADS, tied: bool = False, dtype=torch.float32, **sizes
    ):
        self.state = state
        self.specs = {spec.name: spec for spec in model_specs(state.tp_size, heads, tied, **sizes)}
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
        self._round()

    def params(self):
        return self._params

    def beat(self):
        pass

    def share(self, name):
        count, rank, ranks = self._params[name].numel(), self.state.dp_rank, self.state.dp_size
        return range(count * rank**2 // ranks**2, count * (rank + 1) ** 2 // ranks**2)

    def read_share(self, name):
        master, share = self.masters[name], self.share(name)
        moments = {k: v for k, v in self.optimizer.state[master].items() if k != "step"}
        values = {"weight": master.detach(), **moments}
        return {key: value.view(-1)[share.start : share.stop] for key, value in values.items()}

    def moments(self):
        for master in self.masters.values():
            state = self.optimizer.state[master]
            for key in ("exp_avg", "exp_avg_sq"):
                state.setdefault(key, torch.zeros_like(master))
            state.setdefault("step", torch.tensor(0.0))
        return {"exp_avg", "exp_avg_sq"}

    def write_share(self, name, values):
        share, master = self.share(name), self.masters[name]
        state = {"weight": master.detach(), **self.optimizer.state[master]}
        for key, value in values.items():
            state[key].view(-1)[share.start : share.stop] = value

    def finish_writing(self):
        """Everybody gets from the ranks that answer for them what they wrote."""
        group = self.state.group("data")
        for name, master in self.masters.items() if group is not None else ():
            for value in (master.detach(), *(v for k, v in self.optimizer.state[master].items() if k != "step")):
                parts = [None] * self.state.dp_size
                share = self.share(name)
                dist.all_gather_object(parts, value.view(-1)[share.start : share.stop], group=group)
                value.view(-1).copy_(torch.cat(parts))
        self._round()

    def _round(self):
        with torch.no_grad():
            for name, p in self._params.items():
                p.copy_(self.masters[name])

    def scalars(self):
        return {"optimizer_steps": self.steps, "skipped_steps": self.skipped_steps, "loss_scale": None}

    def load_scalars(self, values):
        self.steps, self.skipped_steps = values["optimizer_steps"], values["skipped_steps"]
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(float(self.steps))

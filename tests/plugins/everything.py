"""A plugin with an entry for every registry that the guide's examples leave out."""

from __future__ import annotations

import torch
from torch import nn

from megatron.layers.attention_contract import ATTENTION_BACKENDS, Backend
from megatron.layers.attention_sdpa import manual
from megatron.layers.init import INITS, build_init
from megatron.layers.norms import build_norm
from megatron.layers.parts import MLPS, FeedForward
from megatron.layers.positions import POSITIONS, PositionScheme
from megatron.model.block import BLOCKS, Block
from megatron.mpu import sharding
from megatron.mpu.collectives import split_sequence, sum_gradient
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.sharding import ParamSpec
from megatron.neox_arguments.block_sizes import Size
from megatron.optim.optimizers import OPTIMIZERS
from megatron.optim.schedules import LR_DECAY_STYLES
from megatron.tokenizer.base import TOKENIZERS
from megatron.tokenizer.build import create_tokenizer


@INITS.register("constant")
def constant(scale, hidden_matrix):
    return lambda full, generator: full.normal_(0.0, scale.std, generator=generator).abs_()


@MLPS.register("narrow")
class Narrow(FeedForward):
    """A quarter of the width, and a bias that the last projection adds."""

    def __init__(self, model, state):
        super().__init__()
        h = model.hidden_size
        fill = build_init(model)
        self.down = ColumnParallelLinear(h, h // 4, state=state, init=fill, bias=False)
        self.up = RowParallelLinear(h // 4, h, state=state, init=fill, bias=True)

    def forward(self, x, context, *, entered=False, reduce=True):
        return self.up(torch.tanh(self.down(x, entered=entered)), reduce=reduce), None

    def add_bias(self, total):
        return self.up.add_bias(total)


class Ramp(nn.Module):
    """One learned direction, times the position."""

    def __init__(self, model, state):
        super().__init__()
        self.state = state
        spec = ParamSpec(shape=(model.hidden_size,), init=sharding.zeros, sequence_reduced=True)
        self.direction = sharding.parameter(spec, state)

    def forward(self, positions):
        mine = split_sequence(positions.reshape(-1), self.state)
        return mine.unsqueeze(1) / 100 * sum_gradient(self.direction, self.state)


POSITIONS.register("ramp")(PositionScheme(at_embedding=Ramp))


@BLOCKS.register("Halving")
class HalvingBlock(Block):
    """Without a feed-forward: x + norm(x) / 2."""

    has_mlp = False

    def __init__(self, model, state, spec):
        super().__init__(model, state)
        assert (spec.kind, spec.mlp) == ("Halving", "none")
        self.norm = build_norm(model, state)

    def residual(self, x, context):
        return x + self.norm(x) / 2, None


@ATTENTION_BACKENDS.register("by_formula")
def by_formula():
    return Backend(manual)


@OPTIMIZERS.register("SignDescent")
class SignDescent(torch.optim.Optimizer):
    """lr · sign(gradient + persistence · the one before)."""

    params = {"persistence": float}

    def __init__(self, groups, lr, params):
        super().__init__(groups, {"lr": lr, "persistence": params.get("persistence", 0.0), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                before = self.state[p].setdefault("exp_last", torch.zeros_like(p))
                step = (p.grad + group["persistence"] * before).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=-group["lr"])
                before.copy_(p.grad)


@LR_DECAY_STYLES.register("square")
def square(p, lr, min_lr):
    return lr * (1 - p) ** 2


@TOKENIZERS.register("letters")
def letters(vocab_file, merge_file):
    return create_tokenizer("CharLevelTokenizer")


@MLPS.register("counted")
class Counted(Narrow):
    """Says its size itself."""

    @staticmethod
    def size(model):
        return Size(split=12345, idle=345)

"""A model's outputs for random tokens, layer by layer: streams of (name, output) that can be compared.

Legend: b batch, s sequence, p positions that are kept, h hidden, v vocabulary.

A stream is `the embedding`, `block 0`, ..., `the final norm`, `logits`, in fp32. Only one layer of the model is in
memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.parts.family import WORD_EMBEDDINGS
from megatron.errors import UserError
from megatron.layers.carry import Carry
from megatron.model.gpt import build_layer, gpt_layers
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.schema_model import ModelConfig

Outputs = Iterable[tuple[str, Tensor]]
EMBEDDING, NORM, LOGITS = "the embedding", "the final norm", "logits"
TOLERANCE = 1e-4
TOKENS = 32
_LONGEST = 512  # of a text that shows a sliding window


def block(index: int) -> str:
    """Name of a block's output."""
    return f"block {index}"


def random_tokens(vocab_size: int, longest: int, windows: Iterable[int | None] = (), seed: int = 0) -> Tensor:
    """[2, s] ids: s is 32, and more where a sliding window needs it to have an effect; at most `longest`."""
    window = max((each for each in windows if each is not None), default=0)
    length = min(max(TOKENS, min(window + 8, _LONGEST)), longest)
    return torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))


def keep_ends(output: Tensor) -> Tensor:
    """[b, s, ...] -> [b, p, ...]: all positions of short texts, the first and the last 32 of long ones."""
    if output.shape[1] <= 2 * TOKENS:
        return output
    return torch.cat((output[:, :TOKENS], output[:, -TOKENS:]), dim=1)


@torch.no_grad()
def checkpoint_outputs(
    reader: CheckpointReader, model: ModelConfig, tokens: Tensor, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Outputs [b, p, h] of our model with the weights of a checkpoint, then the logits [b, p, v].

    `dtype`: weights are rounded to it first, as an exported copy's are; None takes them as they are.
    """
    vocab_size = reader.entry(WORD_EMBEDDINGS).shape[0]
    state = ParallelState.single()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    carry = Carry(tokens, positions)  # a row is one document
    for layer in gpt_layers(model, vocab_size=vocab_size, padded_vocab_size=vocab_size, state=state):
        module = build_layer(layer, None, state).eval()
        for name, parameter in named_parameters(module):
            stored = reader.weight(name)
            parameter.copy_(stored if dtype is None else stored.to(dtype))
        out = module(carry)
        if isinstance(out, Carry):
            carry = out
            yield _label(layer.index, model.num_layers), keep_ends(carry.hidden.view(*tokens.shape, -1))
        else:
            hidden = keep_ends(out.hidden.view(*tokens.shape, -1))
            short = replace(out, hidden=hidden.flatten(0, 1), shape=(hidden.shape[0], hidden.shape[1]))
            yield LOGITS, short.logits()


def _label(index: int, num_layers: int) -> str:
    if index == 0:
        return EMBEDDING
    return NORM if index > num_layers + 1 else block(index - 2)


@dataclass(frozen=True)
class Difference:
    """Result of a comparison.

    Attributes:
        logits: largest absolute difference of any logit.
        allowed: what it may be: `TOLERANCE`, times the logits' standard deviation where that is above 1.
        first_drift: the first part of the network whose output differs, when the logits do; else None.
    """

    logits: float
    allowed: float
    first_drift: str | None

    @property
    def ok(self) -> bool:
        return self.logits <= self.allowed  # also False for NaN

    def accept(self, copy: str) -> float:
        """`logits`. Raises `UserError` when `copy`, what was made, computes something else."""
        if not self.ok:
            raise UserError(
                f"{copy} computes something else: logits differ by {self.logits:.3g} (allowed {self.allowed:.3g}), "
                f"first after {self.first_drift}. Nothing was published."
            )
        return self.logits


def compare_outputs(a: Outputs, b: Outputs) -> Difference:
    """Compare two streams of (name, output [b, p, ...]) of two models.

    The streams are taken in turn, so of lazy ones only one output each is in memory. Raises `UserError` when they are
    of networks with other parts or sizes.
    """
    drift = None
    for (name, one), (other_name, other) in zip(a, b, strict=False):
        if name != other_name or one.shape != other.shape:
            raise UserError(
                f"these are different networks: {name} {list(one.shape)} here, {other_name} {list(other.shape)} there"
            )
        difference = float((one.float() - other.float()).abs().max())
        allowed = TOLERANCE * max(1.0, float(other.float().std()))
        if name == LOGITS:
            ok = difference <= allowed
            return Difference(difference, allowed, None if ok else drift or "the head")
        if drift is None and not difference <= allowed:
            drift = name
    raise UserError("these networks give no logits")

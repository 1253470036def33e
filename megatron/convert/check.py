"""Does the Hugging Face copy compute what our model computes?

Both run in fp32 on random tokens. Ours is run layer by layer, each built, filled from the checkpoint and dropped
again, so that only one layer of it is in memory. When the logits differ, the first hidden state that differs names
the culprit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.reader import CheckpointReader
from megatron.convert.family import WORD_EMBEDDINGS
from megatron.convert.settings import open_source
from megatron.errors import UserError
from megatron.model.gpt import build_layer, gpt_layers
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.neox_arguments.schema_model import ModelConfig

TOLERANCE = 1e-4
TOKENS = 32


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


def random_tokens(model: ModelConfig, vocab_size: int, seed: int = 0) -> Tensor:
    """[2, s] ids: s is 32, and more where a sliding window would otherwise not show."""
    windows = [window for window in model.layer_windows or () if window is not None]
    length = max(TOKENS, min(max(windows, default=0) + 8, 512))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (2, min(length, model.max_position_embeddings)), generator=generator)


@torch.no_grad()
def our_outputs(
    reader: CheckpointReader, model: ModelConfig, tokens: Tensor, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """(name, output [b, s, h]) after the embedding and each block, then (`logits`, [b, s, v]); fp32.

    `dtype`: weights are rounded to it first, as the exported copy's are.
    """
    vocab_size = reader.entry(WORD_EMBEDDINGS).shape[0]
    state = ParallelState.single()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    carry: tuple[Tensor, ...] = (tokens, positions)
    if model.intra_document_masking:
        carry = (*carry, torch.zeros_like(tokens))
    for layer in gpt_layers(model, vocab_size=vocab_size, padded_vocab_size=vocab_size, state=state):
        module = build_layer(layer, None, state).eval()
        for name, parameter in named_parameters(module):
            parameter.copy_(reader.weight(name).to(dtype))
        out = module(carry)
        if isinstance(out, tuple):
            carry = out
            yield _label(layer.index, model.num_layers), carry[0].view(*tokens.shape, -1)
        else:
            yield "logits", out.logits()


def _label(index: int, num_layers: int) -> str:
    if index == 0:
        return "the embedding"
    return "the final norm" if index > num_layers + 1 else f"block {index - 2} (layer {index})"


@torch.no_grad()
def compare(
    reader: CheckpointReader,
    model: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    tokens: Tensor | None = None,
    rounded: bool = False,
) -> Difference:
    """Load `folder` with transformers and compare. Raises `UserError` when weights are missing or left over.

    `rounded`: `folder` is the source and may be stored in a wider type than `dtype`; its weights are rounded too.
    """
    vocab_size = reader.entry(WORD_EMBEDDINGS).shape[0]
    tokens = random_tokens(model, vocab_size) if tokens is None else tokens
    theirs = _their_outputs(folder, tokens, dtype if rounded else None)
    drift = None
    logits = torch.tensor(float("nan"))
    for position, (name, output) in enumerate(our_outputs(reader, model, tokens, dtype)):
        if name == "logits":
            logits = output
        elif drift is None and position < model.num_layers:
            # Index L of their hidden states is behind the final norm, so the last block shows in the logits.
            other = theirs.hidden_states[position].float()
            difference = (output - other).abs().max()
            if not difference <= TOLERANCE * max(1.0, float(other.std())):
                drift = name
    difference = float((logits - theirs.logits.float()).abs().max())
    allowed = TOLERANCE * max(1.0, float(theirs.logits.float().std()))
    result = Difference(difference, allowed, None)
    return result if result.ok else Difference(difference, allowed, drift or "the last block, final norm or head")


def check_pair(checkpoint: str | Path, folder: str | Path, config_files: Sequence[str] = ()) -> Difference:
    """Compare a checkpoint with a Hugging Face folder that should hold the same model, whoever made it.

    Raises `UserError` when there is no such pair: no folder, another vocabulary, weights missing or left over.
    """
    folder = Path(folder)
    reader, settings = open_source(checkpoint, config_files)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--output_dir: {folder} is not a Hugging Face folder ({error})") from error
    vocab_size = reader.entry(WORD_EMBEDDINGS).shape[0]
    if config.get("vocab_size") != vocab_size:
        raise UserError(f"{folder} has vocab_size {config.get('vocab_size')}, {reader.folder} has {vocab_size} tokens")
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return compare(reader, settings.model, folder, getattr(torch, name))


def _their_outputs(folder: Path, tokens: Tensor, dtype: torch.dtype | None) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    finally:
        if bars:
            logging.enable_progress_bar()
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found := sorted(map(str, info.get(what) or ())):
            raise UserError(f"transformers reports {what.replace('_', ' ')} in {folder}: {', '.join(found[:8])}")
    if dtype is not None:
        for parameter in loaded.parameters():
            parameter.copy_(parameter.to(dtype))
    return loaded.eval()(input_ids=tokens, use_cache=False, output_hidden_states=True)

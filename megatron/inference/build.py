"""A stage of a trained model, straight from a checkpoint of any layout: no engine, one parameter at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatron.checkpoint.base import Opening, adapters_of, open_reader
from megatron.checkpoint.compare import ADAPTERS, check_config
from megatron.checkpoint.find import Checkpoint
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.tokenizer_identity import check_tokenizer
from megatron.convert.published.reader import open_published
from megatron.errors import UserError
from megatron.inference.stage import Stage
from megatron.layers.positions.rope_scaling import switch_length
from megatron.log import get_logger
from megatron.model.gpt import build_layer, gpt_layers
from megatron.model.head import TIED_NAME
from megatron.model.partition import LayerRow, partition
from megatron.mpu.owned import own_experts
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.block_sizes import GMLP
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.tokenizer import Tokenizer

logger = get_logger(__name__)

DTYPES = {"fp32": torch.float32, "bfloat16": torch.bfloat16, "fp16": torch.float16}


def build_stage(
    args: NeoXArgs, state: ParallelState, tokenizer: Tokenizer, checkpoint: Checkpoint, inner: int | None = None
) -> Stage:
    """This rank's stage with the weights of the checkpoint, in the precision of the configuration. `inner`: the block
    whose output `LMOutput.inner_hidden` gives.

    Raises:
        UserError: the checkpoint was made by another architecture or tokenizer, or lacks a weight.
    """
    if checkpoint.skipped:
        logger.warning(f"using {checkpoint.path}{checkpoint.skipped_note}")
    check_tokenizer(checkpoint, tokenizer, args.checkpoint.allow_config_changes)
    checksums = args.checkpoint.checkpoint_checksums
    how = Opening(args.model, tokenizer.vocab_size, args.post.lora_base, published=open_published)
    reader = open_reader(checkpoint, how, checksums=checksums)
    check_fits(reader, args, tokenizer)
    if args.optimizer.ema_decay is not None and args.optimizer.ema_evaluate:
        if reader.has_averages:
            reader.use_averages()
        which = (
            "the moving average (ema_decay) of the weights" if reader.has_averages else "the weights: it has no average"
        )
        logger.info(f"{checkpoint.path}: {which} is used")
    dtype = DTYPES[args.optimizer.precision or "fp32"]
    layers = gpt_layers(
        args.model,
        vocab_size=tokenizer.vocab_size,
        padded_vocab_size=args.tokenizer.padded_vocab_size,
        state=state,
        adapters=adapters_of(reader),
        inner=inner,
    )
    rows = [LayerRow(layer.index, layer.name) for layer in layers]
    sizes = [layer.parameters for layer in layers]
    bounds = partition(rows, state.pp_size, args.parallel.pipe_partition_method, sizes)
    modules: list[nn.Module] = []
    for layer in layers[bounds[state.pp_rank] : bounds[state.pp_rank + 1]]:
        shared = modules[0].word_embeddings.weight if layer.tied and state.pp_size == 1 else None
        module = build_layer(layer, None, state, weight=shared)
        if shared is None:
            fill(module, reader, state, dtype)
        modules.append(module)
    model = args.model
    return Stage(modules, state, model.hidden_size, dtype, position_limit(model), switch_length(model.rope_scaling))


def experts_over_ranks(saved: Mapping[str, Any], args: NeoXArgs) -> dict[str, int]:
    """`expert_parallel_size` of a model with the configuration `saved` that is in memory beside that of `args`: only
    experts are divided so."""
    has_experts = saved.get("moe_num_experts", 1) > 1
    return {"expert_parallel_size": args.parallel.expert_parallel_size if has_experts else 1}


@torch.no_grad()
def fill(module: nn.Module, reader: CheckpointReader, state: ParallelState, dtype: torch.dtype) -> None:
    """Give every parameter of a layer its shard of the checkpoint's value. Tables and buffers keep their own type."""
    for name, p in named_parameters(module):
        kept = torch.float32 if p.spec.keep_fp32 else dtype
        part = reader.local_weight(name, p.spec, state.tp_rank, state.tp_size)
        # A copy where it would be a view of what is not held.
        p.data = own_experts(part, p.spec, state).to(state.device, kept, copy=state.ep_size > 1)
        p.requires_grad_(False)
        del part  # before the next one is read


def position_limit(model: ModelConfig) -> int:
    """The longest sequence the model can take. OPT's offset uses up rows of a learned table; gMLP's gates have a weight
    for each position up to seq_length."""
    longest = model.max_position_embeddings or model.seq_length
    if set(GMLP) & set(model.attention_config):
        longest = min(longest, model.seq_length)
    return longest - (model.opt_pos_emb_offset if model.pos_emb == "learned" else 0)


def check_fits(reader: CheckpointReader, args: NeoXArgs, tokenizer: Tokenizer) -> None:
    """The configuration and its tokenizer are those of the checkpoint. Raises `UserError` naming what differs.

    Another tokenizer type with a vocabulary of the same size may well have the same ids (a tokenizer.json made from
    vocab.json and merges.txt), so that is a warning, not an error.
    """
    saved = reader.manifest.config
    given = {key: value for key, value in args.to_dict().items() if key not in ADAPTERS}  # the checkpoint's are used
    for message in check_config(saved, given, path=reader.folder, trains=False):
        logger.debug(message)
    trained = reader.entry(TIED_NAME).shape[0]
    origin = ", ".join(f"{key}: {saved[key]}" for key in ("tokenizer_type", "vocab_file") if saved.get(key))
    if trained != tokenizer.vocab_size:
        raise UserError(
            f"{reader.folder} was trained with {trained} tokens, {tokenizer.describe()} has {tokenizer.vocab_size}; "
            f"use the tokenizer it was trained with ({origin or 'its config does not name one'})"
        )
    if saved.get("tokenizer_type") not in (None, args.tokenizer.tokenizer_type):
        logger.warning(
            f"tokenizer_type: {args.tokenizer.tokenizer_type}, but the checkpoint was trained with {origin}: if their "
            "ids mean different tokens, the text will make no sense"
        )

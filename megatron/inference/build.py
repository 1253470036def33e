"""A stage of a trained model, straight from a checkpoint of any layout: no engine, one parameter at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from megatron.checkpoint.compare import check_config
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.reader import CheckpointReader
from megatron.errors import UserError
from megatron.inference.stage import Stage
from megatron.log import get_logger
from megatron.model.gpt import build_layer, gpt_layers
from megatron.model.partition import LayerRow, partition
from megatron.mpu.sharding import named_parameters
from megatron.mpu.state import ParallelState
from megatron.neox_arguments import NeoXArgs

logger = get_logger(__name__)

DTYPES = {"fp32": torch.float32, "bfloat16": torch.bfloat16, "fp16": torch.float16}


def checkpoint_folder(args: NeoXArgs) -> Path:
    """The checkpoint that generation and evaluation use: `iteration` or the latest of `load`, else of `save`.

    Raises:
        UserError: neither key is set, or the folder holds no such checkpoint.
    """
    options = args.checkpoint
    if options.load is None and options.save is None:
        raise UserError("load is not set: name the folder of the checkpoint to use, for instance load=checkpoints")
    key = "load" if options.load is not None else "save"
    return find_checkpoint(options.load or options.save, options.iteration, key)


def build_stage(args: NeoXArgs, state: ParallelState, vocab_size: int, folder: Path) -> Stage:
    """This rank's stage with the weights of the checkpoint `folder`, in the run's precision.

    Raises:
        UserError: the checkpoint was made by another architecture, or lacks a weight.
    """
    reader = CheckpointReader(folder)
    for message in check_config(reader.manifest.config, args.to_dict(), finetune=True):
        logger.debug(message)
    padded = args.tokenizer.padded_vocab_size
    layers = gpt_layers(args.model, vocab_size=vocab_size, padded_vocab_size=padded, state=state)
    rows = [LayerRow(layer.index, layer.name) for layer in layers]
    sizes = [layer.parameters for layer in layers]
    bounds = partition(rows, state.pp_size, args.parallel.pipe_partition_method, sizes)
    dtype = DTYPES[args.optimizer.precision]
    modules: list[nn.Module] = []
    for layer in layers[bounds[state.pp_rank] : bounds[state.pp_rank + 1]]:
        shared = modules[0].word_embeddings.weight if layer.tied and state.pp_size == 1 else None
        module = build_layer(layer, None, state, weight=shared)
        if shared is None:
            fill(module, reader, state, dtype)
        modules.append(module)
    return Stage(modules, state, args.model.hidden_size, dtype, args.model.intra_document_masking)


@torch.no_grad()
def fill(module: nn.Module, reader: CheckpointReader, state: ParallelState, dtype: torch.dtype) -> None:
    """Give every parameter of a layer its shard of the checkpoint's value. Tables and buffers keep their own type."""
    for name, p in named_parameters(module):
        p.data = reader.local_weight(name, p.spec, state.tp_rank, state.tp_size).to(state.device, dtype)
        p.requires_grad_(False)

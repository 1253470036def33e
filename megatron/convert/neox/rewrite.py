"""The weights of a checkpoint written again: for another number of tensor-parallel ranks, or in our format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint import layout
from megatron.checkpoint.find import Checkpoint, find_checkpoint, open_checkpoint
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.tokenizer_identity import kept_identity
from megatron.checkpoint.weights import save_weights
from megatron.convert.importing import specs_of
from megatron.convert.parts.family import WORD_EMBEDDINGS
from megatron.convert.precision import dtype_of
from megatron.convert.settings import read_neox_config, saved_config
from megatron.convert.tokenizer_files import open_tokenizer
from megatron.errors import UserError
from megatron.log import progress
from megatron.mpu.sharding import ParamSpec
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, derive

_TOKENIZER_OF_20B = "20B_tokenizer.json"


def rewrite(
    source: str | Path,
    output: str | Path,
    *,
    tp: int = 1,
    iteration: int | None = None,
    config_files: Sequence[str] = (),
    default_config: str | None = None,
    precision: str = "auto",
    overwrite: bool = False,
) -> Path:
    """Write the weights of `source` as `<output>/global_step<N>`, split for `tp` ranks. Returns that folder.

    Args:
        source: a `global_step<N>` folder, or a save folder (`iteration`, or its latest).
        config_files: YAML of the run, for folders of GPT-NeoX; () takes the copy they keep, else `default_config`.

    Every parameter is read back and must be equal. Raises `UserError`; then nothing is left behind.
    """
    checkpoint = find_checkpoint(source, iteration, key="--input_dir")
    output = Path(output)
    step = checkpoint.manifest.step
    if output.resolve() == checkpoint.path.parent.resolve():
        raise UserError(f"--output_dir: {output} is the folder of the checkpoint itself; choose another folder")
    if (output / layout.step_folder(step)).exists() and not overwrite:
        raise UserError(f"--output_dir: {output} holds {layout.step_folder(step)} already; give --overwrite")
    reader, args = _open(checkpoint, config_files, default_config, tp)
    vocab_size = reader.entry(WORD_EMBEDDINGS).shape[0]
    dtype = dtype_of(precision, reader.dtype(WORD_EMBEDDINGS))
    specs = specs_of(args, vocab_size, tp)
    made = save_weights(
        output,
        step,
        _tensors(reader, specs),
        tp_size=tp,
        heads=Heads.of(args.model),
        config={**args.to_dict(), "model_parallel_size": tp},
        dtype=dtype,
        row_biases_once=args.model.gpt_j_residual,
        client=kept_identity(checkpoint),
    )
    _check(reader, CheckpointReader(open_checkpoint(made)), dtype)
    return made


def _open(
    checkpoint: Checkpoint, config_files: Sequence[str], default_config: str | None, tp: int
) -> tuple[CheckpointReader, NeoXArgs]:
    """The reader, and the configuration resolved for `tp` ranks."""
    layouts = [f"model_parallel_size={tp}", "pipe_parallel_size=0", "train_micro_batch_size_per_gpu=1"]
    layouts += ["train_batch_size=null", "gradient_accumulation_steps=null"]
    folder = checkpoint.path
    if not checkpoint.by_neox:
        reader = CheckpointReader(checkpoint)
        saved = {**saved_config(reader).to_dict(), "model_parallel_size": tp, "pipe_parallel_size": 0}
        unset = ("train_batch_size", "gradient_accumulation_steps", "batch_size_schedule", "rampup_batch_size")
        batch = {**dict.fromkeys(unset), "train_micro_batch_size_per_gpu": 1}
        facts = Facts(vocab_size=reader.entry(WORD_EMBEDDINGS).shape[0])
        return reader, derive(NeoXArgs.from_saved({**saved, **batch}, source=str(folder)), facts)
    tokenizer = folder.parent / _TOKENIZER_OF_20B
    default = [default_config] if default_config else []
    args = read_neox_config(checkpoint, config_files, layouts, default)
    if args is None:
        raise UserError(f"{folder} was written by GPT-NeoX and keeps no config; give --config_file with the run's YAML")
    if args.get("vocab_file") is None and tokenizer.is_file():
        args = args.replace(vocab_file=str(tokenizer))
    vocab_size = args.get("vocab_size")
    if vocab_size is None:
        keys = (args.get(key) for key in ("tokenizer_type", "vocab_file", "merge_file"))
        vocab_size = open_tokenizer(*keys).vocab_size
    args = derive(args, Facts(vocab_size=vocab_size))
    from megatron.checkpoint.neox_reader import NeoXReader

    return NeoXReader(checkpoint, args.model, vocab_size), args


def _tensors(reader: CheckpointReader, specs: dict[str, ParamSpec]) -> Iterator[tuple[ParamSpec, Tensor]]:
    for name, spec in progress(list(specs.items()), what="writing", unit="parameters"):
        yield spec, reader.weight(name)


def _check(reader: CheckpointReader, made: CheckpointReader, dtype: torch.dtype) -> None:
    for name in progress(reader.names(), what="reading back", unit="parameters"):
        if not torch.equal(reader.weight(name).to(dtype), made.weight(name)):
            raise UserError(f"{made.folder}: {name} is not what {reader.folder} holds; is the disk sound?")

"""The mean of the weights of several checkpoints of one model, as a checkpoint of weights alone.

Averaging the last ones of a run (Izmailov et al., https://arxiv.org/abs/1803.05407) is a cheap stand-in for the decay
of its learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint import layout
from megatron.checkpoint.base import Opening, open_reader
from megatron.checkpoint.find import find_checkpoint
from megatron.checkpoint.merged import merged
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.tokenizer_identity import kept_identity
from megatron.checkpoint.weights import save_weights
from megatron.convert.parts.family import WORD_EMBEDDINGS
from megatron.convert.precision import cast, dtype_of
from megatron.convert.published.reader import open_published
from megatron.errors import UserError
from megatron.log import progress
from megatron.mpu.sharding import ParamSpec

KEY = "--output_dir"


def average(sources: Sequence[str], output: str | Path, *, precision: str = "auto", overwrite: bool = False) -> Path:
    """Write `<output>/global_step<N>`, N being the highest step of the sources. Returns that folder.

    Args:
        sources: `global_step<N>` folders, or save folders (their latest), of one architecture, at any layouts.

    The fp32 masters are averaged where a checkpoint has them, in fp64, one parameter at a time. Adapters are merged
    first: the mean of products B·A is not the product of the means of B and A. Config, division into
    files and tokenizer are those of the one with the highest step. Raises `UserError`; then nothing is left behind.
    """
    found = [find_checkpoint(source, key="CHECKPOINT") for source in sources]
    if len({checkpoint.path.resolve() for checkpoint in found}) < max(2, len(found)):
        raise UserError(f"{', '.join(sources)}: name two or more checkpoints, each once")
    newest = max(found, key=lambda checkpoint: checkpoint.manifest.step)
    step, output = newest.manifest.step, Path(output)
    if any(output.resolve() == checkpoint.path.parent.resolve() for checkpoint in found):
        raise UserError(f"{KEY}: {output} is the folder of a checkpoint to be averaged; choose another folder")
    if (output / layout.step_folder(step)).exists() and not overwrite:
        raise UserError(f"{KEY}: {output} holds {layout.step_folder(step)} already; give --overwrite")
    if published := [checkpoint.published for checkpoint in found if checkpoint.published]:
        raise UserError(f"CHECKPOINT: {published[0]} is a Hugging Face model, and no checkpoint of a run")
    readers = [merged(open_reader(checkpoint, Opening(published=open_published))) for checkpoint in found]
    reference = readers[found.index(newest)]
    for reader in readers:
        _check_same(reference, reader)
    dtype = dtype_of(precision, reference.dtype(WORD_EMBEDDINGS))
    return save_weights(
        output,
        step,
        _means(reference, readers, dtype),
        tp_size=reference.tp_size,
        heads=reference.heads,
        config=reference.manifest.config,
        dtype=dtype,
        client=kept_identity(newest),
    )


def _means(
    reference: CheckpointReader, readers: Sequence[CheckpointReader], dtype: torch.dtype
) -> Iterator[tuple[ParamSpec, Tensor]]:
    for name in progress(reference.names(), what="averaging", unit="parameters"):
        total = torch.zeros(reference.entry(name).shape, dtype=torch.float64)
        for reader in readers:
            total += reader.master(name)
        yield reference.spec(name), cast(total.div_(len(readers)), dtype, name)


def _check_same(one: CheckpointReader, other: CheckpointReader) -> None:
    """Raise `UserError` with the first parameter that is not in both with one shape."""
    for name in sorted({*one.names(), *other.names()}, key=layout.parameter_order):
        shapes = [
            list(reader.entry(name).shape) if name in reader.manifest.parameters else "none" for reader in (one, other)
        ]
        if shapes[0] != shapes[1] or one.heads != other.heads:
            raise UserError(
                f"{one.folder} and {other.folder} are not of one architecture: {name} has shape {shapes[0]} and "
                f"{shapes[1]}, heads are {one.heads} and {other.heads}"
            )

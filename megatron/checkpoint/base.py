"""Checkpoints that hold what a run trains alone (adapters) and name the checkpoint that has the frozen weights.

A reader of such a checkpoint reads from both. It is loadable as long as its base is where it was, or where `lora_base`
says that it is now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.compare import ADAPTERS
from megatron.checkpoint.find import Checkpoint, identity, open_checkpoint
from megatron.checkpoint.grown import without_output_matrix
from megatron.checkpoint.hugging_face import hub_id
from megatron.checkpoint.manifest import BaseEntry, ParameterEntry
from megatron.checkpoint.neox_reader import NeoXReader
from megatron.checkpoint.reader import WEIGHT, CheckpointReader
from megatron.errors import UserError
from megatron.layers.lora import PARTS, Adapters
from megatron.model.head import REWARD
from megatron.mpu.initial_weights import initial_value
from megatron.mpu.sharding import ParamSpec, shard
from megatron.neox_arguments.schema_model import ModelConfig
from megatron.neox_arguments.schema_post import PostConfig


def base_entry(folder: str | Path, vocab_size: int) -> BaseEntry:
    """What a manifest says of the checkpoint in `folder`, which has the frozen weights."""
    if hub_id(str(folder)) is not None:  # by its commit, it is what it was
        return BaseEntry(str(folder), vocab_size, None)
    path = Path(folder).absolute()
    return BaseEntry(str(path), vocab_size, identity(path))


def open_base(checkpoint: Checkpoint, moved: str | None = None) -> Checkpoint | None:
    """The checkpoint with the frozen weights of one that names it; None when it has all weights itself.

    Args:
        moved: where it is now (`lora_base`).

    Raises `UserError` naming both when it is not there, or is another one.
    """
    entry = checkpoint.manifest.base
    if entry is None:
        return None
    path = moved or entry.path
    advice = f"{checkpoint.path} holds adapters alone, for the weights of {entry.path}"
    try:
        found = open_checkpoint(path)
    except UserError as error:
        raise UserError(f"{advice}: {error} Put it back, or name its new place with lora_base=FOLDER.") from error
    if entry.crc32 is not None and base_entry(path, entry.vocab_size).crc32 != entry.crc32:
        raise UserError(
            f"{advice}; {path} is another checkpoint now (its checksum differs): name the one that it "
            "was with lora_base=FOLDER"
        )
    return found


def adapters_of(reader: CheckpointReader) -> Adapters | None:
    """The adapters that a checkpoint has, by the configuration in its manifest."""
    config = reader.manifest.config
    if config.get("lora_r") is None:
        return None
    known = {key: config[key] for key in ADAPTERS if key in config}
    return Adapters.of(PostConfig(**{**known, "lora_target_modules": tuple(known["lora_target_modules"])}))


Published = Callable[[Checkpoint], CheckpointReader]


@dataclass(frozen=True)
class Opening:
    """What reading a checkpoint needs besides the checkpoint.

    * `model`, `vocab_size`: of this run; only files of GPT-NeoX do not say them.
    * `lora_base`: where the frozen weights are now, if they have moved.
    * `new_head`: the model has a head of rewards, but a language model's checkpoint will do, and is read as such.
    * `published`: reads Hugging Face models: convert/published/reader.py, which is above this package.
    """

    model: ModelConfig | None = None
    vocab_size: int | None = None
    lora_base: str | None = None
    new_head: bool = False
    published: Published | None = None


def open_reader(checkpoint: Checkpoint, how: Opening = Opening(), *, checksums: bool = True) -> CheckpointReader:
    """The reader of all weights of a checkpoint, whoever wrote it and wherever they are."""
    base = open_base(checkpoint, how.lora_base)
    if base is not None:
        entry = checkpoint.manifest.base
        assert entry is not None
        of_base = replace(how, vocab_size=entry.vocab_size, lora_base=None, new_head=True)
        inner = open_reader(base, of_base, checksums=checksums)
        return BasedReader(checkpoint, inner, checksums=checksums)
    if checkpoint.published is not None and how.published is not None:
        return how.published(checkpoint)
    if checkpoint.by_neox and how.model is not None and how.vocab_size is not None:
        return NeoXReader(checkpoint, how.model, how.vocab_size, new_head=how.new_head)
    return CheckpointReader(checkpoint, checksums=checksums)


class BasedReader(CheckpointReader):
    """A checkpoint and, for what it does not hold, its base. Of the frozen weights there is no optimizer state."""

    def __init__(self, checkpoint: Checkpoint, base: CheckpointReader, *, checksums: bool = True) -> None:
        super().__init__(checkpoint, checksums=checksums)
        self.base, self._own = base, frozenset(self.manifest.parameters)
        frozen, own = base.manifest.parameters, self.manifest.parameters
        if any(name.endswith(REWARD) for name in own):
            frozen = without_output_matrix(frozen)
        self.manifest = replace(self.manifest, parameters={**frozen, **own})

    def weight(self, name: str) -> Tensor:
        return super().weight(name) if name in self._own else self.base.weight(name)

    def master(self, name: str) -> Tensor:
        return super().master(name) if name in self._own else self.base.weight(name)

    def local_weight(
        self, name: str, spec: ParamSpec, tp_rank: int, tp_size: int, share: range | None = None
    ) -> Tensor:
        reader = super() if name in self._own else self.base
        return reader.local_weight(name, spec, tp_rank, tp_size, share)

    def optimizer_keys(self, name: str) -> list[str]:
        return super().optimizer_keys(name) if name in self._own else [WEIGHT]

    def local_optimizer(
        self, name: str, spec: ParamSpec, tp_rank: int, tp_size: int, share: range | None = None
    ) -> dict[str, Tensor]:
        if name in self._own:
            return super().local_optimizer(name, spec, tp_rank, tp_size, share)
        return {WEIGHT: self.base.local_weight(name, spec, tp_rank, tp_size, share)}


class WithNewAdapters:
    """A reader that has adapters of a model as they begin, where the checkpoint has none. Reads weights only.

    Args:
        reader: of the checkpoint.
        shapes: full shapes of all parameters of the model.
        seed: of the run, which draws them.
    """

    def __init__(self, reader: CheckpointReader, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self._reader, self._seed = reader, seed
        stored = reader.manifest.parameters
        self._new = {name for name in shapes if name.endswith(PARTS) and name not in stored}
        new = {name: ParameterEntry(tuple(shapes[name]), None, (), None, "float32") for name in self._new}
        self.manifest = replace(reader.manifest, parameters={**stored, **new})

    def __getattr__(self, name: str) -> object:
        return getattr(self._reader, name)

    def local_weight(
        self, name: str, spec: ParamSpec, tp_rank: int, tp_size: int, share: range | None = None
    ) -> Tensor:
        """See `CheckpointReader`."""
        if name not in self._new:
            return self._reader.local_weight(name, spec, tp_rank, tp_size, share)
        layer, _, part = name.rpartition(".lora.")
        if part == "magnitude":
            base = f"{layer}.weight"
            weight = self._reader.local_weight(base, self._reader.spec(base), 0, 1)
            full = torch.linalg.vector_norm(weight.float(), dim=1)
        else:
            full = initial_value(spec, name, self._seed)
        local = shard(full, spec, tp_rank, tp_size)
        return local.clone() if share is None else local.reshape(-1)[share.start : share.stop]

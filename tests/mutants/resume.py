"""Mistakes in checkpoints that are read at another layout than they were written at."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.checkpoint import reader
from megatron.checkpoint.pieces import Pieces
from megatron.checkpoint.reader import CheckpointReader
from megatron.model.head import TIED_NAME
from megatron.mpu.sharding import ParamSpec, shard
from megatron.training.engine_by_name import StateByName
from tests.mutants.registry import mutant
from tests.training.tiny import Layout

TP = Layout(tp=2)


def _read(change: Any) -> Any:
    """Read something else for a parameter: `change(read, rank, size)`, `read(rank)` being what a rank should read."""
    original = CheckpointReader.local_optimizer

    def local_optimizer(
        self: CheckpointReader, name: str, spec: ParamSpec, tp_rank: int, tp_size: int, share: range | None = None
    ) -> dict[str, Tensor]:
        def read(rank: int) -> dict[str, Tensor]:
            return original(self, name, spec, rank, tp_size, share)

        return change(read, tp_rank, tp_size)

    return mock.patch.object(CheckpointReader, "local_optimizer", local_optimizer)


@mutant("neox", TP, "weight of 2.mlp.linear1.weight", "resumed")
def read_the_first_shard() -> Any:
    """Every rank reads the first rank's shard."""
    return _read(lambda read, rank, size: read(0))


@mutant("neox", TP, "update of 2.mlp.linear1.weight", "resumed")
def moments_of_the_first_shard() -> Any:
    """Every rank reads its weights, and the first rank's moments."""
    return _read(lambda read, rank, size: {**read(0), "weight": read(rank)["weight"]})


@mutant("neox", TP, "update of 2.mlp.linear1.weight", "resumed")
def moments_swapped() -> Any:
    """The first moment is read for the second."""
    return _read(lambda read, rank, size: {**read(rank), "exp_avg_sq": read(rank)["exp_avg"] ** 2})


@mutant("neox", TP, "update of 2.mlp.linear1.weight", "resumed")
def count_of_updates_lost() -> Any:
    """Adam corrects its moments as in the first step: the count of updates was not read."""
    return mock.patch.object(StateByName, "load_scalars", lambda self, values: None)


@mutant("llama", TP, "weight of 2.attention.query_key_value.weight", "resumed")
def fused_blocks_read_as_one() -> Any:
    """[Q | K | V] is cut through the middle when it is read for another number of ranks."""

    def cut(full: Tensor, spec: ParamSpec, rank: int, size: int) -> Tensor:
        return full.chunk(size)[rank] if spec.blocks else shard(full, spec, rank, size)

    return mock.patch.object(reader, "shard", cut)


@mutant("mha", TP, "weight of 2.attention.query_key_value.weight", "resumed")
def heads_read_in_the_order_of_memory() -> Any:
    """Files hold q, k and v head by head; they are read as [Q | K | V]."""
    return mock.patch.object(reader, "to_disk", lambda local, *arguments: local)


@mutant("llama", Layout(pp=2), "weight of 0.word_embeddings.weight", "resumed")
def tied_copy_not_read() -> Any:
    """The last stage's copy of a tied weight keeps its initial value."""
    original = StateByName.write_share

    def write(self: StateByName, name: str, values: dict[str, Tensor]) -> None:
        if name != TIED_NAME or self.state.is_first_stage:
            original(self, name, values)

    return mock.patch.object(StateByName, "write_share", write)


@mutant("neox", Layout(dp=2, zero=2), "update of 2.mlp.linear1.weight", "resumed")
def moments_shifted_by_padding() -> Any:
    """Moments land one element beside theirs, as when a buffer begins with padding."""
    original = StateByName.write_share

    def write(self: StateByName, name: str, values: dict[str, Tensor]) -> None:
        shifted = {key: value if key == "weight" else value.roll(1) for key, value in values.items()}
        original(self, name, shifted)

    return mock.patch.object(StateByName, "write_share", write)


@mutant("neox", Layout(dp=2, zero=3), "weight of 2.mlp.linear1.weight", "resumed")
def share_of_the_first_data_rank() -> Any:
    """Every data rank reads the first one's share."""
    original = CheckpointReader.local_optimizer

    def first(self: CheckpointReader, name: str, spec: ParamSpec, rank: int, size: int, share: range) -> Any:
        return original(self, name, spec, rank, size, range(len(share)))

    return mock.patch.object(CheckpointReader, "local_optimizer", first)


@mutant("moe", Layout(dp=2, ep=2), "weight of 3.mlp.experts.linear1", "resumed")
def experts_of_the_first_rank() -> Any:
    """Every expert-parallel rank reads the first one's experts."""
    original = CheckpointReader.local_optimizer

    def first(self: CheckpointReader, name: str, spec: ParamSpec, rank: int, size: int, share: range) -> Any:
        return original(self, name, spec, rank, size, range(len(share)) if spec.experts else share)

    return mock.patch.object(CheckpointReader, "local_optimizer", first)


# -- what data ranks send each other to write a checkpoint -------------------------------------------------------------


def _moved(change: Any) -> Any:
    """Write something else: `change(values, name)` of whole values by key."""
    original = Pieces.move

    def move(self: Pieces, turn: Any) -> Any:
        for name, values in original(self, turn):
            yield name, change(values, name)

    return mock.patch.object(Pieces, "move", move)


@mutant("neox", TP, "weight of *", "resumed")
def two_shares_of_the_same_range() -> Any:
    """Two data ranks write the first half of a parameter, and nobody writes the second."""

    def halves(values: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        return {key: torch.cat([value[: value.numel() // 2]] * 2) for key, value in values.items()}

    return _moved(halves)


@mutant("neox", TP, "weight of *", "resumed")
def shares_off_by_one() -> Any:
    """A share that is sent begins an element late."""
    original = Pieces._pieces_to_send

    def late(self: Pieces, file: Any, name: str) -> Any:
        for tag, piece in original(self, file, name):
            yield tag, piece.roll(-1)

    return mock.patch.object(Pieces, "_pieces_to_send", late)


@mutant("neox", TP, "update of *", "resumed")
def moments_sent_for_each_other() -> Any:
    """What arrives first is taken for the first moment, whichever was sent: a message without a name."""

    def swapped(values: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        if "exp_avg" not in values:
            return values
        return {**values, "exp_avg": values["exp_avg_sq"], "exp_avg_sq": values["exp_avg"] ** 2}

    return _moved(swapped)


@mutant("neox", TP, "update of 2.mlp.linear2.weight", "resumed")
def moments_of_another_parameter() -> Any:
    """A parameter is written with the moments of another one of its size."""
    kept: dict[int, dict[str, Tensor]] = {}

    def others(values: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        if "exp_avg" not in values:
            return values
        before = kept.get(values["exp_avg"].numel(), values)
        kept[values["exp_avg"].numel()] = {key: value.clone() for key, value in values.items()}
        return {**before, "weight": values["weight"]}

    return _moved(others)

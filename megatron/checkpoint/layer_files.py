"""The weight and optimizer files of a checkpoint, one of each per layer and tensor-parallel rank.

Data rank 0 writes weights; optimizer states are written layer by layer by the data ranks in turn. One parameter at a
time is gathered and written.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.checkpoint import layout
from megatron.checkpoint.agreement import gather_over_stages
from megatron.checkpoint.attempt import Attempt
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.manifest import ParameterEntry
from megatron.checkpoint.neox_layout import Heads, to_disk
from megatron.checkpoint.reader import WEIGHT
from megatron.mpu.sharding import spec_of
from megatron.mpu.state import ParallelState


class SavingEngine(Protocol):
    """What saving needs of the engine (`training.engine.Engine`)."""

    def params(self) -> Mapping[str, Parameter]: ...
    def read(self, name: str, needed: bool = True) -> dict[str, Tensor]: ...
    def scalars(self) -> dict[str, Any]: ...


def bytes_to_write(engine: SavingEngine, state: ParallelState, save_optim: bool) -> int:
    """About what this rank's share of the files takes (optimizer files are shared out over the data ranks)."""
    total = 0
    for parameter in engine.params().values():
        numel = torch.Size(spec_of(parameter).local_shape(state.tp_size)).numel()
        total += numel * parameter.element_size() if state.dp_rank == 0 else 0
        total += 12 * numel // state.dp_size if save_optim else 0
    return total


def write_parameters(
    folder: CheckpointFolder,
    attempt: Attempt,
    engine: SavingEngine,
    state: ParallelState,
    heads: Heads,
    save_optim: bool,
) -> dict[str, ParameterEntry]:
    """Write this rank's layer files; returns the entries of the whole model. Collective."""
    params = engine.params()
    entries = {name: _entry(parameter) for name, parameter in params.items()}
    by_stage = gather_over_stages(entries, state)
    earlier = {name for stage in by_stage[: state.pp_rank] for name in stage}  # copies of tied weights
    mine = sorted((name for name in params if name not in earlier), key=layout.parameter_order)
    for turn, (layer, names) in enumerate(groupby(mine, key=lambda name: layout.split_name(name)[0])):
        files = LayerFiles(
            folder,
            layer,
            state,
            weights=state.dp_rank == 0,
            optimizer=save_optim and turn % state.dp_size == state.dp_rank,
        )
        attempt.run(files.open)
        for name in names:
            values = engine.read(name, files.wanted)  # collective: also on ranks that write nothing or have failed
            attempt.run(files.add, name, params[name], values, heads)
        attempt.run(files.close)
        if attempt.error is not None:
            files.abandon(attempt.error)
    return {name: entry for stage in reversed(by_stage) for name, entry in stage.items()}


def _entry(parameter: Parameter) -> ParameterEntry:
    spec = spec_of(parameter)
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ParameterEntry(spec.shape, spec.split_dim, spec.blocks, spec.padded, dtype)


class LayerFiles:
    """The weight and optimizer files of one layer, as far as this rank writes them."""

    def __init__(
        self, folder: CheckpointFolder, layer: int, state: ParallelState, weights: bool, optimizer: bool
    ) -> None:
        self.folder, self.layer, self.state = folder, layer, state
        self._want = (weights, optimizer)
        self.wanted = weights or optimizer
        self._stack = ExitStack()
        self._weights = self._optimizer = None

    def open(self) -> None:
        weights, optimizer = self._want
        rank = self.state.tp_rank
        if weights:
            file = layout.weights_file(self.layer, rank)
            self._weights = self._stack.enter_context(self.folder.tensor_file(file))
        if optimizer:
            file = layout.optimizer_file(self.layer, rank)
            self._optimizer = self._stack.enter_context(self.folder.tensor_file(file))

    def add(self, name: str, parameter: Parameter, values: dict[str, Tensor], heads: Heads) -> None:
        spec, rank, size = spec_of(parameter), self.state.tp_rank, self.state.tp_size
        expected = spec.local_shape(size)
        if self._weights is not None:
            weight = to_disk(values[WEIGHT], spec, heads, rank, size).to(parameter.dtype)
            self._weights.add(layout.split_name(name)[1], weight)
        if self._optimizer is not None:
            for key, value in values.items():
                value = torch.as_tensor(value)
                stored = to_disk(value, spec, heads, rank, size) if tuple(value.shape) == expected else value
                self._optimizer.add(name, stored, key)

    def close(self) -> None:
        self._stack.close()

    def abandon(self, error: Exception) -> None:
        self._stack.__exit__(type(error), error, None)

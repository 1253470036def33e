"""The weight and optimizer files of a checkpoint, one of each per layer and tensor-parallel rank.

The data ranks write them at the same time, each its own, one parameter at a time (pieces.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby, zip_longest
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter

from megatron.checkpoint import layout
from megatron.checkpoint.agreement import gather_over_stages
from megatron.checkpoint.attempt import Attempt
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.manifest import ParameterEntry
from megatron.checkpoint.neox_layout import Heads, to_disk
from megatron.checkpoint.pieces import File, Pieces, SharingEngine
from megatron.checkpoint.tensor_file import TensorFileWriter
from megatron.mpu.sharding import spec_of
from megatron.mpu.state import ParallelState


class SavingEngine(SharingEngine, Protocol):
    """What saving needs of the engine (`training.engine.Engine`)."""

    def params(self) -> Mapping[str, Parameter]: ...
    def scalars(self) -> dict[str, Any]: ...


class LayerFiles:
    """The files of this rank's stage and tensor-parallel part, and who writes which. Collective.

    Attributes:
        entries: of the parameters of the whole model.
        bytes: about what this rank will write.

    `held`: which parameters are saved.
    """

    def __init__(
        self,
        engine: SavingEngine,
        state: ParallelState,
        heads: Heads,
        save_optim: bool,
        held: Callable[[Parameter], bool] = lambda parameter: True,
    ) -> None:
        self.state, self.heads = state, heads
        self._params = {name: p for name, p in engine.params().items() if held(p)}
        by_stage = gather_over_stages({name: _entry(p) for name, p in self._params.items()}, state)
        self.entries = {name: entry for stage in reversed(by_stage) for name, entry in stage.items()}
        earlier = {name for stage in by_stage[: state.pp_rank] for name in stage}  # copies of tied weights
        names = sorted((name for name in self._params if name not in earlier), key=layout.parameter_order)
        self._pieces = Pieces(engine, names, state)
        files: list[File] = []
        for layer, group in groupby(names, key=lambda name: layout.split_name(name)[0]):
            inside = tuple(group)
            types = {name: self._params[name].dtype for name in inside}
            files.append(File(layout.weights_file(layer, state.tp_rank), inside, types))
            files += [File(layout.optimizer_file(layer, state.tp_rank), inside)] if save_optim else []
        self._dealt = self._pieces.deal(files)
        self.bytes = sum(map(self._pieces.size, self._dealt[state.dp_rank]))

    def not_finite(self) -> list[str]:
        """The parameters of which what this rank has is not finite in the type that is written."""
        return self._pieces.not_finite({name: p.dtype for name, p in self._params.items()})

    def write(self, folder: CheckpointFolder, attempt: Attempt) -> None:
        """Write this rank's. Collective: also ranks that write nothing or have failed take part."""
        for turn in zip_longest(*self._dealt):
            self._write_turn(folder, attempt, turn)

    def _write_turn(self, folder: CheckpointFolder, attempt: Attempt, turn: Sequence[File | None]) -> None:
        """The file of every data rank that has one left."""
        file = turn[self.state.dp_rank]
        self.state.doing.detail = file.name if file is not None else ""
        with ExitStack() as stack:
            writer = attempt.run(stack.enter_context, folder.tensor_file(file.name)) if file is not None else None
            for name, values in self._pieces.move(turn):
                attempt.run(self._add, writer, file, name, values)
            attempt.run(stack.close)
            if attempt.error is not None:
                stack.__exit__(type(attempt.error), attempt.error, None)

    def _add(self, writer: TensorFileWriter, file: File, name: str, values: dict[str, Tensor]) -> None:
        spec, rank, size = spec_of(self._params[name]), self.state.tp_rank, self.state.tp_size
        for key, value in values.items():
            if value.ndim == 1:
                value = to_disk(value.view(spec.local_shape(size)), spec, self.heads, rank, size)
            if file.dtypes is not None:
                writer.add(layout.split_name(name)[1], value)
            else:
                writer.add(name, value, key)


def _entry(parameter: Parameter) -> ParameterEntry:
    spec = spec_of(parameter)
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ParameterEntry(spec.shape, spec.split_dim, spec.blocks, spec.padded, dtype)

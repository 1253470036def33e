"""Save a checkpoint: complete or invisible, whatever fails.

Every rank writes its files into a temporary folder; only when all have succeeded and everything is on disk does
rank 0 add the manifest and rename. Weights of a tensor-parallel rank are written by data rank 0, optimizer state
layer by layer by the data ranks in turn. One parameter at a time is gathered and written.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml
from torch import Tensor
from torch.nn import Parameter

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.agreement import agree, gather, gather_over_stages
from megatron.checkpoint.find import list_checkpoints
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.manifest import FileEntry, Manifest, ParameterEntry
from megatron.checkpoint.neox_layout import Heads, to_disk
from megatron.checkpoint.reader import WEIGHT
from megatron.checkpoint.rng import random_state
from megatron.checkpoint.state_file import write_state_file
from megatron.errors import DeepyError
from megatron.log import get_logger
from megatron.mpu.sharding import ParamSpec
from megatron.mpu.state import ParallelState

logger = get_logger(__name__)


class SaveError(DeepyError):
    """A checkpoint could not be written. Its files are removed, and earlier checkpoints are untouched."""


class SavingEngine(Protocol):
    """What saving needs of the engine (`training.engine.Engine`)."""

    def params(self) -> Mapping[str, Parameter]: ...
    def read(self, name: str, needed: bool = True) -> dict[str, Tensor]: ...
    def scalars(self) -> dict[str, Any]: ...


def save_checkpoint(
    root: str | Path,
    step: int,
    engine: SavingEngine,
    state: ParallelState,
    *,
    heads: Heads,
    consumed: int,
    client: dict[str, Any],
    config: dict[str, Any],
    config_files: Mapping[str, str] | None = None,
    save_optim: bool = True,
    save_rng: bool = True,
) -> Path:
    """Write `<root>/global_step<step>` and point `latest` at it. Collective over all ranks. Returns the folder.

    Args:
        root: the run's `save` folder, on a file system that all ranks share.
        step: optimizer steps done.
        heads: `Heads.of(args.model)`.
        consumed: samples of the global batch sequence used so far.
        client: state of the loop and its callbacks (plain values and tensors), the same on every rank.
        config: the resolved configuration, `args.to_dict()`.
        config_files: name → text of the YAML files that the run was started with.
        save_optim: False leaves out optimizer state (`no_save_optim`); such a checkpoint cannot continue a run exactly.
        save_rng: False leaves out random states (`no_save_rng`).

    Raises `SaveError` on every rank when it fails on any (disk full, ...).
    """
    _refuse_what_cannot_be_read_back({"client": client, "scalars": engine.scalars()})
    folder = CheckpointFolder(root, step)
    needed = sum(gather(_bytes_to_write(engine, state, save_optim), state))
    attempt = _Attempt()
    if state.rank == 0:
        attempt.run(folder.prepare)
        attempt.run(_check_free_space, folder, needed)
    _stop_if_failed(attempt, folder, needed, state)

    parameters = _write_parameters(folder, attempt, engine, state, heads, save_optim)
    attempt.run(_write_states, folder, engine, state, consumed, client, config, config_files or {}, save_rng)
    attempt.run(folder.sync)
    _stop_if_failed(attempt, folder, needed, state)

    files: dict[str, FileEntry] = {}
    for part in gather(folder.files, state):
        files.update(part)
    if state.rank == 0:
        attempt.run(
            folder.publish,
            Manifest(
                step=step,
                consumed=consumed,
                layout={"tp": state.tp_size, "pp": state.pp_size, "dp": state.dp_size},
                heads={"num_attention_heads": heads.num_attention_heads, "num_kv_heads": heads.num_kv_heads},
                optimizer=save_optim,
                parameters=parameters,
                files=files,
                config=config,
                git=config.get("git_hash") or manifest.git_revision(),
                versions=manifest.versions(),
                created=manifest.now(),
            ),
        )
    _stop_if_failed(attempt, folder, needed, state)
    return folder.final


class _Attempt:
    """Runs pieces of work until one fails, then none: the rank still takes part in collective calls."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def run(self, work: Any, *arguments: Any) -> Any:
        if self.error is None:
            try:
                return work(*arguments)
            except Exception as error:  # the other ranks must learn of it before anybody stops
                self.error = error
        return None


def _stop_if_failed(attempt: _Attempt, folder: CheckpointFolder, needed: int, state: ParallelState) -> None:
    failures = agree(attempt.error, state)
    if not failures:
        return
    if state.rank == 0:
        folder.discard()
    rank, error = next(iter(failures.items()))
    text = f"the checkpoint of step {folder.step} was not saved: rank {rank}: {error}."
    text += f" It needs {needed} bytes; {_free(folder.root)} bytes are free in {folder.root}."
    kept = list_checkpoints(folder.root).steps
    text += f" Complete checkpoints there: {list(kept)}." if kept else " No complete checkpoint is there."
    raise SaveError(text) from attempt.error


def _free(root: Path) -> int:
    existing = next(path for path in (root, *root.resolve().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _check_free_space(folder: CheckpointFolder, needed: int) -> None:
    if (free := _free(folder.root)) < needed:
        raise OSError(errno.ENOSPC, f"not enough space: {needed} bytes needed, {free} free", str(folder.root))


def _bytes_to_write(engine: SavingEngine, state: ParallelState, save_optim: bool) -> int:
    """About what this rank's share of the files takes (optimizer files are shared out over the data ranks)."""
    total = 0
    for parameter in engine.params().values():
        numel = torch.Size(_spec(parameter).local_shape(state.tp_size)).numel()
        total += numel * parameter.element_size() if state.dp_rank == 0 else 0
        total += 12 * numel // state.dp_size if save_optim else 0
    return total


def _spec(parameter: Parameter) -> ParamSpec:
    return parameter.spec  # type: ignore[attr-defined]


def _write_parameters(
    folder: CheckpointFolder,
    attempt: _Attempt,
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
        files = _LayerFiles(
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
    spec = _spec(parameter)
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ParameterEntry(spec.shape, spec.split_dim, spec.blocks, spec.padded, dtype)


class _LayerFiles:
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
        spec, rank, size = _spec(parameter), self.state.tp_rank, self.state.tp_size
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


def _write_states(
    folder: CheckpointFolder,
    engine: SavingEngine,
    state: ParallelState,
    consumed: int,
    client: dict[str, Any],
    config: dict[str, Any],
    config_files: Mapping[str, str],
    save_rng: bool,
) -> None:
    if save_rng:
        folder.write_object(layout.rng_file(state.rank), random_state())
    if state.dp_rank == 0:
        write_state_file(
            folder,
            state.pp_rank * state.tp_size + state.tp_rank,
            config=config,
            tp_size=state.tp_size,
            dp_size=state.dp_size,
            consumed=consumed,
            scalars=engine.scalars(),
            client=client,
        )
    if state.rank == 0:
        plain = json.loads(json.dumps(config))
        folder.write_text(f"{layout.CONFIGS}/resolved.yml", yaml.safe_dump(plain, sort_keys=True))
        for name, text in config_files.items():
            folder.write_text(f"{layout.CONFIGS}/{Path(name).name}", text)


def _refuse_what_cannot_be_read_back(value: Any, where: str = "") -> None:
    """Raise `TypeError` for anything that `torch.load(weights_only=True)` would refuse."""
    if value is None or isinstance(value, (str, bool, int, float, Tensor)):
        if type(value) not in (type(None), str, bool, int, float) and not isinstance(value, Tensor):
            raise TypeError(f"checkpoint state {where} is a {type(value).__name__}; use a plain value")
        return
    if type(value) in (list, tuple):
        for index, item in enumerate(value):
            _refuse_what_cannot_be_read_back(item, f"{where}[{index}]")
    elif type(value) is dict:
        for key, item in value.items():
            _refuse_what_cannot_be_read_back(item, f"{where}.{key}" if where else str(key))
    else:
        raise TypeError(f"checkpoint state {where} is a {type(value).__name__}; use plain values and tensors")

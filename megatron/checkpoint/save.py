"""Save a checkpoint: complete or invisible, whatever fails.

Every rank writes its files into a temporary folder; only when all have succeeded and everything is on disk does rank 0
add the manifest and rename. While the files are written training may go on, if what they hold was copied
(background.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from torch.nn import Parameter

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.agreement import gather
from megatron.checkpoint.attempt import Attempt, check_free_space
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.host_memory import CopiedEngine, HostMemory
from megatron.checkpoint.layer_files import LayerFiles, SavingEngine
from megatron.checkpoint.manifest import BaseEntry, FileEntry, Manifest, ParameterEntry
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.rng import random_state
from megatron.checkpoint.state_file import check_readable, state_bytes
from megatron.checkpoint.tensor_file import object_bytes
from megatron.errors import NumericsError
from megatron.mpu.state import ParallelState


class Save:
    """A checkpoint `<root>/global_step<step>` that is under way. Made by all ranks between the same two steps; only
    `write` communicates.

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
        temporary: it may be deleted once a later one is complete.
        base: what has the frozen weights (base.py), which are left out then.

    `write` raises `SaveError` on every rank when it fails on any (disk full, ...).
    """

    def __init__(
        self,
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
        temporary: bool = False,
        base: BaseEntry | None = None,
    ) -> None:
        scalars = engine.scalars()
        check_readable({"client": client, "scalars": scalars})
        self.folder, self.temporary = CheckpointFolder(root, step), temporary
        self._engine, self._heads, self._save_optim = engine, heads, save_optim
        self._base = base
        self._consumed, self._config, self._config_files = consumed, config, config_files or {}
        self._copied = False
        # The small states as they are now, since training may go on while they are written.
        self._small: dict[str, bytes] = {}
        if state.dp_rank == 0:
            name = layout.state_file(state.pp_rank * state.tp_size + state.tp_rank)
            sizes = {"tp_size": state.tp_size, "dp_size": state.dp_size}
            self._small[name] = state_bytes(
                step, config=config, consumed=consumed, scalars=scalars, client=client, **sizes
            )
        if save_rng:
            self._small[layout.rng_file(state.rank)] = object_bytes(random_state())

    def copy(self, memory: HostMemory, beat: Callable[[], None]) -> None:
        """Copy what this rank has to `memory`: from here on the engine may go on.

        `beat` is called in `write` at every sign of progress. What was copied and is not finite is not written:
        `NumericsError`.
        """
        self._engine = CopiedEngine(self._engine, memory, beat, self._held)
        self._copied = True

    def write(self, state: ParallelState) -> Path:
        """Write the checkpoint and point `latest` at it; returns its folder. Collective over `state.host`, which may be
        a group of its own, used on a thread of its own, on every rank."""
        folder, attempt = self.folder, Attempt()
        layers = LayerFiles(self._engine, state, self._heads, self._save_optim, self._held)
        needed = sum(gather(layers.bytes, state))
        if state.rank == 0:
            attempt.run(folder.prepare)
            attempt.run(check_free_space, folder, needed)
        attempt.stop_if_failed(folder, needed, state)
        with state.doing.now(f"writing the checkpoint of step {folder.step}"):
            if self._copied:
                attempt.run(check_finite, layers.not_finite(), folder.step, state)
                attempt.stop_if_failed(folder, needed, state)
            layers.write(folder, attempt)
            attempt.run(self._write_small, state)
            attempt.run(folder.sync)
        attempt.stop_if_failed(folder, needed, state)
        files: dict[str, FileEntry] = {}
        for part in gather(folder.files, state):
            files.update(part)
        if state.rank == 0:
            attempt.run(self._publish, files, layers.entries, state)
        attempt.stop_if_failed(folder, needed, state)
        return folder.final

    def _held(self, parameter: Parameter) -> bool:
        """Whether the checkpoint holds it."""
        return self._base is None or not getattr(parameter, "frozen", False)

    def _write_small(self, state: ParallelState) -> None:
        for name, data in self._small.items():
            self.folder.write_bytes(name, data)
        if state.rank == 0:
            plain = json.loads(json.dumps(self._config))
            self.folder.write_text(f"{layout.CONFIGS}/{layout.RESOLVED}", yaml.safe_dump(plain, sort_keys=True))
            for name, text in self._config_files.items():
                self.folder.write_text(f"{layout.CONFIGS}/{Path(name).name}", text)

    def _publish(
        self, files: dict[str, FileEntry], parameters: dict[str, ParameterEntry], state: ParallelState
    ) -> None:
        self.folder.publish(
            Manifest(
                step=self.folder.step,
                consumed=self._consumed,
                layout={"tp": state.tp_size, "pp": state.pp_size, "dp": state.dp_size},
                heads={
                    "num_attention_heads": self._heads.num_attention_heads,
                    "num_kv_heads": self._heads.num_kv_heads,
                },
                optimizer=self._save_optim,
                parameters=parameters,
                files=files,
                config=self._config,
                git=self._config.get("git_hash") or manifest.git_revision(),
                versions=manifest.versions(),
                created=manifest.now(),
                temporary=self.temporary,
                base=self._base,
            )
        )


def save_checkpoint(root: str | Path, step: int, engine: SavingEngine, state: ParallelState, **content: Any) -> Path:
    """Write a checkpoint while nothing else happens; returns its folder. Collective over all ranks. See `Save`."""
    return Save(root, step, engine, state, **content).write(state)


def check_finite(found: Collection[str], step: int, state: ParallelState) -> None:
    """Raise `NumericsError` on every rank when any `found` parameters with weights that are not finite. Collective."""
    names = sorted({name for part in gather(found, state) for name in part})
    if names:
        raise NumericsError(
            f"weights of {len(names)} parameters are not finite at iteration {step}, the first of {names[0]}; they are "
            "not saved"
        )

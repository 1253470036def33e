"""Save a checkpoint: complete or invisible, whatever fails.

Every rank writes its files into a temporary folder; only when all have succeeded and everything is on disk does rank 0
add the manifest and rename.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.agreement import gather
from megatron.checkpoint.attempt import Attempt, check_free_space
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.layer_files import SavingEngine, bytes_to_write, write_parameters
from megatron.checkpoint.manifest import FileEntry, Manifest
from megatron.checkpoint.neox_layout import Heads
from megatron.checkpoint.rng import random_state
from megatron.checkpoint.state_file import check_readable, write_state_file
from megatron.mpu.state import ParallelState


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
    check_readable({"client": client, "scalars": engine.scalars()})
    folder = CheckpointFolder(root, step)
    needed = sum(gather(bytes_to_write(engine, state, save_optim), state))
    attempt = Attempt()
    if state.rank == 0:
        attempt.run(folder.prepare)
        attempt.run(check_free_space, folder, needed)
    attempt.stop_if_failed(folder, needed, state)

    parameters = write_parameters(folder, attempt, engine, state, heads, save_optim)
    attempt.run(_write_states, folder, engine, state, consumed, client, config, config_files or {}, save_rng)
    attempt.run(folder.sync)
    attempt.stop_if_failed(folder, needed, state)

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
    attempt.stop_if_failed(folder, needed, state)
    return folder.final


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
        folder.write_text(f"{layout.CONFIGS}/{layout.RESOLVED}", yaml.safe_dump(plain, sort_keys=True))
        for name, text in config_files.items():
            folder.write_text(f"{layout.CONFIGS}/{Path(name).name}", text)

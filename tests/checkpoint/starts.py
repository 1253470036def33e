"""Checkpoints without tensors, and where a run starts from them."""

from pathlib import Path
from typing import Any

from megatron.checkpoint.find import list_checkpoints
from megatron.checkpoint.folder import CheckpointFolder, write_latest
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.start import Start, decide_start
from megatron.checkpoint.state_file import write_state_file
from megatron.neox_arguments.schema_train import CheckpointConfig


def put(
    root: Path, step: int, latest: bool = True, optimizer: bool = True, consumed: int | None = None, **config: Any
) -> Manifest:
    """A complete checkpoint without tensors, by default of a run that took 10 samples a step."""
    consumed = 10 * step if consumed is None else consumed
    folder = CheckpointFolder(root, step, durable=False)
    folder.prepare()
    write_state_file(folder, 0, config=config, tp_size=1, consumed=consumed)
    manifest = Manifest(
        step=step,
        consumed=consumed,
        layout={"tp": 1, "pp": 1, "dp": 1},
        heads={},
        optimizer=optimizer,
        parameters={},
        files=folder.files,
        config=config,
    )
    before = list_checkpoints(root).latest
    folder.publish(manifest)
    if not latest and before is not None:
        write_latest(root, before)
    return manifest


def decide(
    save: Path | None,
    load: Path | None = None,
    iteration: int | None = None,
    finetune: bool = False,
    init_from: dict[str, Any] | None = None,
) -> Start:
    """`decide_start` for these keys of a config."""
    names = {"save": save and str(save), "load": load and str(load)}
    return decide_start(CheckpointConfig(**names, iteration=iteration, finetune=finetune, init_from=init_from))

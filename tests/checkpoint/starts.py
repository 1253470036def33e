"""Checkpoints without tensors, and where a run starts from them."""

from pathlib import Path
from typing import Any

from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.start import Start, decide_start
from megatron.neox_arguments.schema_train import CheckpointConfig


def put(root: Path, step: int, latest: bool = True, optimizer: bool = True, **config: Any) -> Manifest:
    """A complete checkpoint without tensors, of a run that took 10 samples a step."""
    folder = root / f"global_step{step}"
    folder.mkdir(parents=True)
    manifest = Manifest(
        step=step,
        consumed=10 * step,
        layout={"tp": 1},
        heads={},
        optimizer=optimizer,
        parameters={},
        files={},
        config=config,
    )
    manifest.write(folder)
    if latest:
        (root / "latest").write_text(folder.name)
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

"""How far a run of GPT-NeoX has come, and its schedule, from the state file of a checkpoint. Imports no torch.

| what       | entry of `mp_rank_00_model_states.pt`                                             |
|------------|-----------------------------------------------------------------------------------|
| step       | `iteration`, in old ones `total_iters`                                            |
| samples    | the step times `ds_config.train_batch_size`, as GPT-NeoX finds its place; in old  |
|            | ones, which lack that, `global_samples`                                           |
| schedule   | `lr_scheduler`: start_lr, min_lr, decay_style, end_iter, warmup_iter (a count)   |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.checkpoint import layout
from megatron.checkpoint.find import Checkpoint
from megatron.checkpoint.neox_folder import NeoXFiles
from megatron.checkpoint.plain import read_plain
from megatron.errors import UserError


def with_counters(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint of GPT-NeoX whose manifest knows the run's step, samples and schedule.

    Raises `UserError` when its state file does not say how far the run has come.
    """
    path = checkpoint.path / layout.state_file(0)
    state = read_plain(path, foreign=True)
    step = state.get("iteration", state.get("total_iters"))
    settings = state.get("ds_config")
    batch_size = settings.get("train_batch_size") if isinstance(settings, Mapping) else None
    samples = step * batch_size if isinstance(step, int) and batch_size else state.get("global_samples")
    if not (isinstance(step, int) and isinstance(samples, int)):
        raise UserError(
            f"{path} does not say how far its run has come (iteration {step}, samples {samples}). A folder that a "
            "converter wrote holds weights only: set finetune: true to start with them at step 0"
        )
    scheduler = state.get("lr_scheduler")
    keys = _schedule(scheduler) if isinstance(scheduler, Mapping) else {}
    optimizer = bool(NeoXFiles.of(checkpoint.path).optimizer) or isinstance(state.get("optimizer"), Mapping)
    if batch_size:
        keys["train_batch_size"] = batch_size
    known = replace(checkpoint.manifest, step=step, consumed=samples, optimizer=optimizer, config=keys)
    return replace(checkpoint, manifest=known)


def _schedule(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The flat keys of a schedule, from the state of GPT-NeoX's."""
    names = {"start_lr": "lr", "min_lr": "min_lr", "decay_style": "lr_decay_style", "end_iter": "lr_decay_iters"}
    found = {ours: saved[theirs] for theirs, ours in names.items() if theirs in saved}
    if saved.get("end_iter") and "warmup_iter" in saved:
        # They keep warmup * end_iter; the digits dropped are those of that product's rounding.
        found["warmup"] = round(saved["warmup_iter"] / saved["end_iter"], 12)
    return found

"""`init_from`: a new run that starts from a checkpoint of another, with what it inherits named key by key.

It is for the first start only. From its first checkpoint on the run is resumed like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.manifest import Manifest
from megatron.errors import UserError

OF_EACH_BLOCK = ("attention_config", "layer_mlps")
# What differs between models that differ in depth alone.
DEPTH = ("num_layers", "attention_config", "mlp_config", "layer_mlps", "layer_windows", "moe_layers")
NEW_REWARD_MODEL = (
    "a new reward model on the weights of a language model set finetune: true beside `load` (or init_from with "
    "optimizer: reset)"
)


@dataclass(frozen=True)
class InitFrom:
    """The keys of `init_from`.

    Attributes:
        path: a folder of checkpoints, or one of the checkpoints in it.
        iteration: which of them; None: the latest.
        data: `continue` the order of the samples after those consumed, or `restart` with an order of its own.
        optimizer: `keep` moments, update count and loss scale, or `reset` them.
        step: `continue` to count the steps, or `restart` at 0. The learning rate follows them.
        vocab: `keep` its size, or `resize` it to the tokenizer's.
        layer_map: for each block the number, from 0, of the checkpoint's block that it takes; None: its own.
    """

    path: str
    iteration: int | None = None
    data: str = "continue"
    optimizer: str = "keep"
    step: str = "continue"
    vocab: str = "keep"
    layer_map: tuple[int, ...] | None = None

    @staticmethod
    def of(mapping: Mapping[str, Any] | None) -> InitFrom | None:
        """From the configuration's mapping."""
        if mapping is None:
            return None
        layer_map = mapping.get("layer_map")
        return InitFrom(**{**mapping, "layer_map": None if layer_map is None else tuple(layer_map)})

    @property
    def grows(self) -> bool:
        """Whether the model may have other shapes than the checkpoint."""
        return self.vocab == "resize" or self.layer_map is not None

    def grown(self, saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
        """The checkpoint's configuration with the depth of this run's, to be compared with it.

        Raises `UserError` when `layer_map` does not fit the checkpoint, or a block would take one of another kind.
        """
        if self.layer_map is None:
            return dict(saved)
        layers = saved["num_layers"]
        if unknown := sorted({old for old in self.layer_map if old >= layers}):
            raise UserError(
                f"init_from.layer_map: {unknown} are no blocks of {self.path}, which has {layers}, numbered 0 to "
                f"{layers - 1}"
            )
        if left := sorted(set(range(layers)) - set(self.layer_map)):
            raise UserError(
                f"init_from.layer_map: none of the {len(self.layer_map)} blocks takes {left} of the {layers} of "
                f"{self.path}; a model grows with all of them"
            )
        for key in OF_EACH_BLOCK:
            for new, old in enumerate(self.layer_map) if saved.get(key) else ():
                if (before := saved[key][old]) != (now := current[key][new]):
                    raise UserError(
                        f"init_from.layer_map: block {new} takes block {old}, whose {key} is {before!r}; in this config"
                        f" it is {now!r}"
                    )
        return {**saved, **{key: current[key] for key in DEPTH if key in saved}}

    def first_step(self, manifest: Manifest) -> int:
        """The step at which the run starts."""
        return manifest.step if self.step == "continue" else 0

    def consumed(self, manifest: Manifest) -> int:
        """Samples of the run's order that are consumed before it."""
        return manifest.consumed if self.data == "continue" else 0

    def describe(self, manifest: Manifest) -> str:
        """What is inherited and what is not, in one line."""
        first = self.first_step(manifest)
        continued, kept = self.data == "continue", self.optimizer == "keep"
        parts = [
            "weights loaded",
            f"data continued after {manifest.consumed:,} samples" if continued else "data new, from sample 0",
            "optimizer kept (moments, update count, loss scale)" if kept else "optimizer new",
            f"steps and random states continued at step {first}" if first else "steps count from 0, random states new",
            f"learning-rate schedule of this config, at its step {first} (override_lr_scheduler is not needed)",
        ]
        parts += ["vocabulary resized to the tokenizer's"] if self.vocab == "resize" else []
        parts += [f"blocks taken by layer_map {list(self.layer_map)}"] if self.layer_map is not None else []
        return "; ".join(parts)


def stretch(before: int, now: int) -> list[int]:
    """A `layer_map` to more blocks: each is repeated about as often as the others."""
    return [new * before // now for new in range(now)]


def advise_new_run(path: Path, keys: Sequence[str], load: str | None) -> str:
    """How to start a new run from the checkpoint in `path`, as it is typed, for an error message.

    Args:
        keys: of `init_from` besides the path, as `data: restart`.
        load: this run's key, which may not be set with `init_from`.
    """
    without_load, init_from = ", load=null" if load else "", ", ".join([f"path: {path}", *keys])
    return f"start a new run from this checkpoint: another `save`{without_load}, and init_from={{{init_from}}}"


def check_init(
    init: InitFrom, manifest: Manifest, *, train_iters: int | None, use_checkpoint_lr_scheduler: bool
) -> None:
    """Refuse what the checkpoint does not hold, and a run without a step to take. Raises `UserError`."""
    if use_checkpoint_lr_scheduler:
        raise UserError(
            "init_from: the learning-rate schedule is this config's, but use_checkpoint_lr_scheduler: true asks for "
            "the checkpoint's; remove it (or use `load` instead of init_from, which keeps that schedule)"
        )
    if init.optimizer == "keep" and not manifest.optimizer:
        raise UserError(
            f"init_from: the checkpoint of step {manifest.step} in {init.path} was saved without optimizer state; "
            "set init_from.optimizer=reset"
        )
    first = init.first_step(manifest)
    if train_iters and train_iters <= first:
        raise UserError(
            f"train_iters: {train_iters} is not beyond step {first}, where the run starts: with init_from.step: "
            f"continue, steps are counted from the start of the earlier run. Set a larger train_iters, or "
            "init_from.step=restart"
        )

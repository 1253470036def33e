"""Keys of which an override replaces others that files set, because both say the same or only one can hold."""

from __future__ import annotations

SAME_FACT = {
    "lr": ("optimizer.params.lr",),
    "optimizer_type": ("optimizer.type",),
    "zero_stage": ("zero_optimization.stage",),
    "precision": ("fp16.enabled", "bf16.enabled", "fp16.type", "bf16.type"),
}
"""Flat keys and the places inside mappings that say the same; an override of one removes the others."""

_LISTS = tuple(
    f"{role}_{kind}"
    for kind in ("data_paths", "data_weights", "label_data_paths")
    for role in ("train", "valid", "test")
)
_SOURCES = ("train_data_paths", "train_data_weights", "train_label_data_paths", "train_data_names")
_CAPS = ("train_data_max_epochs", "train_data_max_tokens")
_RUN_LENGTHS = ("train_iters", "train_epochs", "train_tokens", "train_flops")
WINS_OVER: dict[str, tuple[str, ...]] = {
    "data_path": (*_LISTS, "train_data_names", "mixture"),
    "train_data_paths": ("data_path", "mixture"),
    "pos_train_data_paths": ("data_path", "mixture", "train_data_paths"),
    "mixture": ("data_path", *_SOURCES, *_CAPS, "train_data_holdout"),
    "train_data_weights": ("weight_by_num_documents",),
    "weight_by_num_documents": ("train_data_weights",),
    "target_budget": _CAPS,
    **dict.fromkeys(_CAPS, ("target_budget",)),
    **{one: tuple(other for other in _RUN_LENGTHS if other != one) for one in _RUN_LENGTHS},
    "lr_decay_fraction": ("lr_decay_iters",),
    "min_lr": ("min_lr_ratio",),
    "min_lr_ratio": ("min_lr",),
    "override_lr_scheduler": ("use_checkpoint_lr_scheduler",),
    "use_checkpoint_lr_scheduler": ("override_lr_scheduler",),
    "init_from": ("load", "s3_load", "finetune", "iteration", "no_load_optim"),
    "load": ("init_from", "s3_load"),
    "checkpoint_policy": ("checkpoint_activations",),
    "checkpoint_activations": ("checkpoint_policy",),
    "communication_data_type": ("fp32_allreduce",),
    "fp32_allreduce": ("communication_data_type",),
    "moe_layers": ("moe_expert_interval",),
    "moe_expert_interval": ("moe_layers",),
    "include": ("exclude",),
    "exclude": ("include",),
}
"""Keys that exclude others: an override of one removes the others that only files set."""

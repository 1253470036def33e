"""Rules about what is trained (`train_impl`): the head that it needs, the data, the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.neox_arguments.batch_plan import BatchPlan
from megatron.neox_arguments.draft import Draft
from megatron.neox_arguments.groups import all_keys
from megatron.neox_arguments.rules_reference import exchanges
from megatron.rows import row

if TYPE_CHECKING:
    from megatron.neox_arguments.arguments import NeoXArgs
    from megatron.neox_arguments.schema_data import DataConfig

_READERS = {
    "dpo_": ("dpo",),
    "kto_": ("kto",),
    "rm_": ("rm",),
    "distill_": ("distill",),
    "grpo_": ("grpo", "rloo"),
    "reinforce_": ("reinforce",),
}
"""The objectives that read the keys which begin so; those of plugins may read any."""
_IN_FP32 = ("dpo_fp32", "kto_fp32", "fp32_reinforce")
_SMOOTHED = ("sigmoid", "cdpo", "robust", "sigmoid_norm", "simpo")


def output_head(draft: Draft) -> None:
    """The objective says what the last layer gives, and whether its loss has a z-loss; rewards are no words."""
    objective = draft["train_impl"]
    facts = row("train_impl", objective)
    head = facts.get("head", "vocabulary")
    draft.set("output_head", head, f"train_impl {objective}")
    if draft["z_loss_weight"] and not facts.get("z_loss"):
        instead = "; z_loss holds its rewards near 0" if head == "reward" else ""
        draft.report("z_loss_weight", f"is not for the loss of train_impl: {objective}; leave it out{instead}")
    if head == "vocabulary":
        return
    for name in ("eval_tasks", "eval_suite", "sample_every"):
        if draft[name]:
            draft.report(name, f"train_impl: {objective} gives a number for a text and no words; leave it out")
    if draft["eod_mask_loss"]:
        draft.report(
            "eod_mask_loss", f"train_impl: {objective} reads the reward at an end of text, which it masks; set it false"
        )


def strengths(draft: Draft) -> None:
    """Factors of losses are not negative."""
    draft.positive("kto_beta")
    draft.not_negative("kto_desirable_weight", "kto_undesirable_weight", "z_loss", "rm_center_coefficient")


def read_by_others(draft: Draft) -> None:
    """Keys that change nothing are said."""
    objective = draft["train_impl"]
    known = {name for readers in _READERS.values() for name in readers} | {"normal", "unlearn"}
    for name in all_keys() if objective in known else ():
        readers = next((readers for prefix, readers in _READERS.items() if name.startswith(prefix)), (objective,))
        if name not in _IN_FP32 and objective not in readers and draft.is_changed(name):
            draft.note(f"{draft.source(name)}: {name} has no effect with train_impl: {objective}")
    for name in _IN_FP32:
        if draft.is_changed(name):
            draft.note(f"{draft.source(name)}: {name} has no effect: log-probabilities are always in fp32")


def preferences(draft: Draft) -> None:
    """The keys of `train_impl: dpo`, and what they mean together."""
    if draft["train_impl"] != "dpo":
        return
    kind, smoothing = draft["dpo_loss_type"], draft["dpo_label_smoothing"]
    draft.positive("dpo_beta")
    draft.not_negative("dpo_sft_loss_weight", "dpo_simpo_gamma")
    draft.check(lambda share: 0 <= share < 0.5, "must be 0 or more and less than 0.5", "dpo_label_smoothing")
    if smoothing and kind not in _SMOOTHED:
        draft.report("dpo_label_smoothing", f"is for {', '.join(_SMOOTHED)}; dpo_loss_type is {kind}")
    if kind in ("cdpo", "robust") and not smoothing:
        draft.report("dpo_label_smoothing", f"must be above 0 for dpo_loss_type {kind}: the share of flipped pairs")
    if kind != "simpo" and draft.is_changed("dpo_simpo_gamma"):
        draft.report("dpo_simpo_gamma", f"is the target margin of simpo; dpo_loss_type is {kind}")


def data_problem(args: NeoXArgs) -> str | None:
    """What to set, where the objective cannot learn from the data that are configured."""
    data, objective = args.data, args.training.train_impl
    needs = row("train_impl", objective).get("data")
    if needs == "rollouts":
        return None
    pairs = data.dataset_impl == "pairwise"
    if needs == "pairs" and not (pairs and data.train_data_paths):
        return (
            f"train_impl: {objective} learns from pairs: set dataset_impl: pairwise, pos_train_data_paths and "
            "neg_train_data_paths"
        )
    if pairs and needs not in ("pairs", "rewards"):
        return (
            f"train_impl: {objective} does not compare the texts of dataset_impl: pairwise; set train_impl: dpo or rm"
        )
    if needs == "rewards" and (pairs or data.train_reward_data_paths is None):
        return (
            f"train_impl: {objective} learns from texts with a reward each: set train_data_paths, "
            "train_label_data_paths and train_reward_data_paths (dataset_impl: gpt2)"
        )
    if needs == "rewards" and (lacking := _without_rewards(data)):
        return f"{lacking} has none: train_impl: {objective} needs the rewards of every source and set; set them"
    if data.data_path is None and data.train_data_paths is None:
        return "set data_path, train_data_paths or mixture: what to train on"
    return _exchange_problem(args) if exchanges(args.get) else None


def _without_rewards(data: DataConfig) -> str | None:
    """The key and the source of the first data without rewards: ranks read different samples, and each would miss them
    in a step of its own."""
    for role in ("train", "valid", "test"):
        key, paths = f"{role}_reward_data_paths", getattr(data, f"{role}_data_paths") or ()
        rewards = getattr(data, key) or (None,) * len(paths)
        for n, (path, one) in enumerate(zip(paths, rewards, strict=False)):  # as many: rules_pairs
            if one is None:
                named = role == "train" and data.train_data_names is not None
                return f"{key}: {data.train_data_names[n] if named else path}"
    sets = (name for name, one in (data.valid_sets or {}).items() if "rewards" not in one)
    return next((f"valid_sets.{name}.rewards: it" for name in sets), None)


def _exchange_problem(args: NeoXArgs) -> str | None:
    """KTO's z0 is of prompts with the answers to others in the global batch: a text a row, two or more of them."""
    if args.data.train_label_data_paths is None:
        wrong = "without labels prompts are answers, too; set train_label_data_paths"
    elif args.data.precompute_model_name is not None:
        wrong = "precompute_model_name has no log-probabilities of exchanged ones; leave it out"
    elif args.data.pack_impl != "unpacked":
        wrong = f"pack_impl: {args.data.pack_impl} puts several into a row; set pack_impl: unpacked"
    elif min(size for _, size in BatchPlan.of(args).stages) < 2:
        wrong = "train_batch_size: 1 has none to exchange; set 2 or more"
    else:
        return None
    return f"kto exchanges answers within a batch, and {wrong}, or kto_loss_type: apo_zero_unpaired, which does not"

"""The deliberate differences from GPT-NeoX (unlearning: from its fork) that concern post-training."""

from __future__ import annotations

from functools import partial

from megatron.neox_arguments.arguments import NeoXArgs
from megatron.neox_arguments.difference import Difference as _Difference
from megatron.neox_arguments.rules_reference import exchanges, reads_reference

Difference = partial(_Difference, section="Post-training")


def _unlearns(args: NeoXArgs) -> bool:
    return args.get("ga_dataset") is not None


def _compares(args: NeoXArgs) -> bool:
    return args.training.train_impl in ("dpo", "kto") and reads_reference(args.get)


def _rewards(args: NeoXArgs) -> bool:
    return args.model.output_head == "reward"


def _kto(args: NeoXArgs) -> bool:
    return args.training.train_impl == "kto"


POST: tuple[_Difference, ...] = (
    Difference(
        "train_impl: rm on a language model's checkpoint",
        "any parameter may be missing in the checkpoint, and is silently new",
        "the head alone may, of a new run (finetune, or init_from without the optimizer); it is drawn by seed and name",
        _rewards,
    ),
    Difference(
        "train_impl: rm with tied embeddings, or with train_micro_batch_size_per_gpu: 1",
        "fails",
        "works",
        _rewards,
    ),
    Difference(
        "which token a reward is read at",
        "where labels are set; with another number of them than one in a row, rewards of other answers are compared",
        "the one token of an answer that has a label; another number is an error that names the document",
        _rewards,
    ),
    Difference(
        "loss of train_impl: rm and kto",
        "mean over ranks and micro-batches of each one's mean",
        "mean over all pairs, or answers with a reward, of the global batch",
        lambda args: _rewards(args) or _kto(args),
    ),
    Difference(
        "KTO's estimate of how far the model is from its reference",
        "one half of the micro-batch gives that of the other: answers to their own prompts, each clamped at 0, another "
        "number at each micro-batch",
        "prompts with the answers to the next prompts of the global batch (the last one with the first's), clamped "
        "after the mean, in a pass before the step; the same at every layout. A batch of one is refused",
        lambda args: exchanges(args.get),
        keys=("kto_loss_type",),
    ),
    Difference(
        "kto_beta, kto_desirable_weight, kto_undesirable_weight",
        "beta is scaled by the share of a row that is no padding; the weights are averaged over half a micro-batch "
        "first; answers with the reward 0 count in the mean",
        "beta and weights are those of each answer, and answers with the reward 0 are left out",
        _kto,
    ),
    Difference(
        "reference model of dpo and kto",
        "a second engine in memory, loaded from `load`: after a resume the checkpoint of the run itself",
        "the weights that the run began with, in a pass before the first step whose results are kept",
        _compares,
    ),
    Difference(
        "precompute_model_name",
        "only with pack_impl: unpacked",
        "in every packing of whole documents; a run without it computes and keeps the log-probabilities itself",
        lambda args: args.data.precompute_model_name is not None,
    ),
    Difference(
        "train_impl: dpo",
        "fails at HEAD (an undefined name); with tensor parallelism the softmax is that of a rank's part of the "
        "vocabulary; no pipeline; a mean of the micro-batches' means",
        "works at every layout: the mean over the pairs of the global batch",
        lambda args: args.training.train_impl == "dpo",
    ),
    Difference(
        "ga_mode interval",
        "at every ga_interval-th iteration ga_iters ascent steps replace the descent step; they move the schedule, and "
        "train_iters counts them as one",
        "ga_interval ordinary steps, then ga_iters that forget, and again; each is a step of train_iters, of the "
        "schedule and of the log, as with interleaved",
        lambda args: _unlearns(args) and args.get("ga_mode") == "interval",
        keys=("ga_interval", "ga_iters"),
    ),
    Difference(
        "ga_loss_threshold",
        "steps are counted as skipped once the forget loss is below it, after they were taken; most check modes skip "
        "none",
        "a step is left out while the forget loss is above it, decided before the step in all three modes; it counts, "
        "and its samples do",
        lambda args: _unlearns(args) and args.get("ga_loss_threshold") is not None,
        keys=("ga_threshold_check_mode", "ga_threshold_skip_forward"),
    ),
    Difference(
        "ga_lr_scale",
        "holds for the first step of a burst, and the step after it may have the rate of the one before",
        "holds for every step that forgets",
        lambda args: _unlearns(args) and args.get("ga_lr_scale") != 1.0,
    ),
    Difference(
        "gd_mode",
        "plain ascent with pipeline stages, descent on the forget data without them",
        "gd_retain_weight x retain loss - forget loss in one step, a batch of either, each a mean over its own tokens",
        lambda args: bool(args.get("gd_mode")),
        keys=("gd_retain_weight", "gd_retain_dataset"),
    ),
    Difference(
        "ga_dataset, gd_retain_dataset",
        "one shuffled epoch again and again, from its beginning after every start",
        "each pass shuffled anew, pack_impl as for the training data, and read on from where the checkpoint left off",
        _unlearns,
    ),
    Difference(
        "log of runs that unlearn",
        "lm_loss is that of any step, or missing",
        "lm_loss is the mean over the ordinary steps since the last log; losses of the others have names of their own",
        _unlearns,
    ),
)

"""A training run's configuration as evaluation and generation use it."""

from __future__ import annotations

import os

from megatron.neox_arguments.arguments import NeoXArgs
from megatron.neox_arguments.bucket_places import copy_folder, place_of_save
from megatron.neox_arguments.draft import SET_BY_PROGRAM
from megatron.neox_arguments.groups import GROUPS
from megatron.neox_arguments.keys import group_keys
from megatron.neox_arguments.overrides import COMMAND_LINE, PYTHON_CALL

# Groups about which only training cares, and the few of their keys that describe the trained model or this start.
_OF_TRAINING = ("data", "optimizer", "schedule", "training", "post", "checkpoint", "deepspeed")
_KEPT = {"precision", "fp16", "bf16", "seed", "train_micro_batch_size_per_gpu"}
_KEPT |= {"ema_decay", "ema_evaluate", "use_rslora", "use_dora"}
_KEPT |= {name for name in group_keys(GROUPS["post"], "post") if name.startswith("lora_")}
_KEPT |= {"load", "s3_load", "s3_chunk_size", "iteration", "checkpoint_checksums", "allow_config_changes"}
# The number of ranks was the training job's, a single token cannot be split, the run's folder is not ours to write,
# and its jobs are the run's to submit.
_OTHERS = {"global_num_gpus", "sequence_parallel", "log_dir", "eval_jobs"}
# What text_gen_type: precompute reads besides: texts, and how they are stored.
_TEXTS = {"precompute_model_name", "dataset_impl", "data_path", "data_root", "mixture", "valid_sets", "ga_dataset"}
_TEXTS |= {
    "pack_impl",
    "intra_document_masking",
    "npy_eod",
    "npy_dtype",
    "data_cache_path",
    "use_shared_fs",
    "gd_retain_dataset",
    "ga_mode",
    "ga_interval",
    "ga_iters",
}
_TEXTS |= {f"{side}{name}_data_paths" for side in ("", "pos_", "neg_") for name in ("train", "valid", "test")}
DEFAULT_BATCH = 8
_BY_CALL = (COMMAND_LINE, PYTHON_CALL)


def for_inference(args: NeoXArgs) -> NeoXArgs:
    """The same configuration without what only training needs, so that nothing about it can be missing or wrong.

    The number of ranks is whatever runs, `load` is the run's `save` folder (its copy in a bucket where there is no such
    folder) unless it is given, and
    `train_micro_batch_size_per_gpu` is the number of texts a copy of the model works on at a time (8 if the config
    does not say). Prompts given on the command line (-i, --prompt) are used whatever `text_gen_type` a file sets. Doing
    it twice changes nothing.
    """
    values, sources = args.values(), dict(args.sources)
    if values["load"] is None and values["save"] is not None:
        values["load"], sources["load"] = values["save"], sources.get("save", SET_BY_PROGRAM)
    save, given = values["save"], values["s3_load"]
    if None not in (save, values["s3_path"]) and given is None and values["load"] == save and not os.path.isdir(save):
        # On a machine that has not got the run's folder: from where its checkpoints are sent to.
        values["s3_load"], sources["s3_load"] = place_of_save(values), sources.get("s3_path", SET_BY_PROGRAM)
        values["load"] = copy_folder(values["s3_load"], save)
    of_training = {name for group in _OF_TRAINING for name in group_keys(GROUPS[group], group)}
    dropped = _OTHERS | (of_training - _KEPT - (_TEXTS if values["text_gen_type"] == "precompute" else set()))
    for name in dropped:
        del values[name]
    sources = {name: source for name, source in sources.items() if name.split(".")[0] not in dropped}
    derived = sources.get("train_micro_batch_size_per_gpu", "derived").startswith("derived")
    asked = [name for name in ("sample_input_file", "prompt") if sources.get(name, "").startswith(_BY_CALL)]
    if asked and not sources.get("text_gen_type", "").startswith(_BY_CALL):
        values["text_gen_type"], sources["text_gen_type"] = "input-file", sources[asked[0]]
    if derived:
        values["train_micro_batch_size_per_gpu"] = DEFAULT_BATCH
        sources["train_micro_batch_size_per_gpu"] = SET_BY_PROGRAM
    return NeoXArgs.from_values(values, sources)

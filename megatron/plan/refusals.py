"""Errors that training would raise after its ranks have started, found without them: damaged or foreign data, a
checkpoint of another model. Opens files and reads headers; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.checkpoint.compare import check_config
from megatron.checkpoint.find import Checkpoint, find_checkpoint
from megatron.checkpoint.init_from import check_init
from megatron.checkpoint.schedule import resume_schedule
from megatron.checkpoint.start import Start, check_folder
from megatron.data.order.data_plan import DataPlan
from megatron.data.tokens.indexed import IndexedDataset
from megatron.data.tokens.manifest import check_tokenizer, read_manifest, verify
from megatron.data.tokens.token_files import find_files
from megatron.log import get_logger, only_errors
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.parameter_rules import check_matches, parse_rules
from megatron.neox_arguments.problems import collector
from megatron.plan.stages import Held, freezes, parameters
from megatron.run.data import check_saved_tokenizer, open_data, resume_order
from megatron.tokenizer import Tokenizer

logger = get_logger(__name__)

_QUICKLY_COUNTED = 100_000_000  # documents: their lengths are summed and hashed at about 1 GB/s


def check_data(args: NeoXArgs, paths: Iterable[str], tokenizer: Tokenizer, start: Start) -> None:
    """Every pair of files is whole and, where it has a manifest, was made with this tokenizer (else the run scans the
    ids); the data is enough, and is what the checkpoint to resume was trained on. The last two are not checked where
    counting would take seconds (.npy files)."""
    documents = 0
    check_saved_tokenizer(start, tokenizer, args.checkpoint.allow_config_changes)
    with only_errors():
        for path in (found for given in paths for found in find_files(given)):
            if path.endswith(".npy"):
                documents += _QUICKLY_COUNTED
                continue
            data = IndexedDataset(path)
            documents += len(data)
            if (verify if documents < _QUICKLY_COUNTED else read_manifest)(data.prefix) is not None:
                check_tokenizer(data, tokenizer)
        # A number of epochs is turned into steps by the run, which counts the data for it.
        if args.training.train_iters is not None and documents < _QUICKLY_COUNTED:
            open_data(args, tokenizer, *resume_order(start, args.checkpoint.load))


def check_folders(args: NeoXArgs) -> None:
    """The folders besides `save` that training writes into can be written. Raises one `UserError`."""
    with collector() as found:
        for key in ("log_dir", "tensorboard_dir", "data_cache_path"):
            if args.get(key) is not None:
                with found.collect():
                    check_folder(key, Path(args.get(key)))


def check_fit(args: NeoXArgs, start: Start) -> None:
    """Configuration and schedule fit the checkpoint that training starts from."""
    if start.checkpoint is None:
        return
    options = args.checkpoint
    manifest = start.checkpoint.manifest
    saved, load_optim = manifest.config, start.load_optim and not options.no_load_optim
    check_config(
        saved if start.init is None else start.init.grown(saved, args.to_dict()),
        args.to_dict(),
        path=start.checkpoint.path,
        allow=options.allow_config_changes,
        finetune=start.kind == "finetune",
        new_run=not start.resumes,
        load_optim=load_optim,
        load_data=start.load_data,
    )
    if start.init is not None:
        check_init(
            start.init,
            manifest,
            train_iters=args.training.train_iters,
            use_checkpoint_lr_scheduler=args.schedule.use_checkpoint_lr_scheduler,
        )
    # Without train_iters the length is not known yet, or there is nothing to train.
    if start.resumes and load_optim and args.training.train_iters:
        resume_schedule(
            saved,
            args.to_dict(),
            override=args.schedule.override_lr_scheduler,
            use_checkpoint=args.schedule.use_checkpoint_lr_scheduler,
        )


def open_other(args: NeoXArgs, key: str) -> Checkpoint:
    """The model beside the run's own that `key` names, with what is known of a Hugging Face one. Raises `UserError`."""
    found = find_checkpoint(args.get(key) or "", key=key)
    if found.published is None:
        return found
    from megatron.convert.hf.run_config import described  # needs torch, and only here

    return described(found)


def check_trained(args: NeoXArgs, vocab_size: int, held: Sequence[Held]) -> None:
    """`lora_target_modules` and `parameter_groups` speak of what the model has, and they and `ga_rmu_layers` leave
    something to train on every pipeline stage, whose ranks hold `held`. Raises `UserError`."""
    rules = parse_rules(args.optimizer.parameter_groups)
    if not rules and not freezes(args):
        return
    from megatron.layers.lora import Adapters  # these need torch, and only here
    from megatron.model.specs import check_targets
    from megatron.optim.groups import check_stages

    if (adapters := Adapters.of(args.post)) is not None:
        check_targets(args.model, adapters, f"{args.source('lora_target_modules')}: ")
    check_matches(rules, [name for name, *_ in parameters(args, vocab_size)], f"{args.source('parameter_groups')}: ")
    check_stages([stage for stage, one in enumerate(held) if one.trained is not None and not one.trained.parameters])


def warn_of_unknown_ranks(args: NeoXArgs, ranks: int | None, decides: str) -> None:
    """Warn when neither a loaded config nor a hostfile (`ranks`) sets the number of ranks, and with it the batch size,
    which decides what `decides` names."""
    sizes = ("global_num_gpus", "num_gpus", "train_batch_size")
    if ranks is None and not any(args.is_set(name) for name in sizes):
        logger.warning(
            f"the config does not set how many ranks the run has, which decides its batch size and with it {decides}"
            ": set global_num_gpus or train_batch_size"
        )


def check_data_plan(args: NeoXArgs, tokenizer: Tokenizer, start: Start) -> DataPlan:
    """The data plan of a derived config, for a run with this start.

    Raises `UserError` for missing, foreign or too little data, and for a tokenizer or data of past steps that changed.
    """
    check_saved_tokenizer(start, tokenizer, args.checkpoint.allow_config_changes)
    plan = open_data(args, tokenizer, *resume_order(start, args.checkpoint.load))
    plan.check_tokenizer(tokenizer)
    return plan

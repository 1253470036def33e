"""The data plan of a run that may be somewhere else: from its configuration and its checkpoint."""

from __future__ import annotations

from megatron.checkpoint.start import Start
from megatron.data.order.datasets import DataPlan
from megatron.log import get_logger
from megatron.neox_arguments import NeoXArgs
from megatron.run.data import check_saved_tokenizer, open_data, resume_order
from megatron.tokenizer.base import Tokenizer

LOGGER = get_logger(__name__)


def warn_of_unknown_ranks(args: NeoXArgs, ranks: int | None, decides: str) -> None:
    """Warn when neither a loaded config nor a hostfile (`ranks`) says how many ranks the run has, and with that its
    batch size, which `decides` something."""
    sizes = ("global_num_gpus", "num_gpus", "train_batch_size")
    if ranks is None and not any(args.is_set(name) for name in sizes):
        LOGGER.warning(
            f"nothing in the config says how many ranks the run has, which decides its batch size and with it {decides}"
            ": set global_num_gpus or train_batch_size"
        )


def checked_plan(args: NeoXArgs, tokenizer: Tokenizer, start: Start) -> DataPlan:
    """The data plan of a derived config, for a run that starts so.

    Raises `UserError` for missing, foreign or too little data, and for data or a tokenizer that changed where the run
    has been.
    """
    check_saved_tokenizer(start, tokenizer, args.checkpoint.allow_config_changes)
    plan = open_data(args, tokenizer, *resume_order(start))
    plan.check_tokenizer(tokenizer)
    return plan

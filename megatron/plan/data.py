"""Tokens, samples and epochs per data source, for training, validation and test."""

from __future__ import annotations

from megatron.callbacks.data_plan import check_tokenizer_of, continued, data_plan
from megatron.checkpoint.find import Start
from megatron.data.build import DataPlan
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer.base import Tokenizer


def checked_plan(args: NeoXArgs, tokenizer: Tokenizer, start: Start) -> DataPlan:
    """The data plan of a derived config, for a run that starts so.

    Raises `UserError` for missing, foreign or too little data, and for data or a tokenizer that changed where the run
    has been.
    """
    check_tokenizer_of(start, tokenizer, args.checkpoint.allow_config_changes)
    plan = data_plan(args, tokenizer, *continued(start))
    plan.check_tokenizer(tokenizer)
    return plan

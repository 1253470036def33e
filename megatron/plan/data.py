"""Tokens, samples and epochs per data source, for training, validation and test."""

from __future__ import annotations

from megatron.callbacks.data_plan import data_plan
from megatron.data.build import SourceRow
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer.base import Tokenizer


def data_table(args: NeoXArgs, tokenizer: Tokenizer) -> list[SourceRow]:
    """One row per role and source of a derived config. Raises `UserError` for missing, foreign or too little data."""
    plan = data_plan(args, tokenizer)
    plan.check_tokenizer(tokenizer)
    return plan.table()

"""Tokens, samples and epochs per data source, for training, validation and test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.callbacks.data_plan import data_plan, frozen_order
from megatron.checkpoint.find import Start
from megatron.checkpoint.manifest import Manifest
from megatron.data.build import DataPlan
from megatron.neox_arguments import NeoXArgs
from megatron.tokenizer.base import Tokenizer


def checked_plan(args: NeoXArgs, tokenizer: Tokenizer, start: Start) -> DataPlan:
    """The data plan of a derived config, for a run that starts so.

    Raises `UserError` for missing, foreign or too little data, and for data that changed where the run has been.
    """
    plan = data_plan(args, tokenizer, *continued(start))
    plan.check_tokenizer(tokenizer)
    return plan


def continued(start: Start) -> tuple[Mapping[str, Any] | None, tuple[int, int]]:
    """The sample order of the run that goes on, with the steps and samples that it has behind it.

    That order lies in the checkpoint, so only a run that goes on from one imports torch here.
    """
    if start.path is None or not start.load_optim:
        return None, (0, 0)
    saved = Manifest.read(start.path)
    return frozen_order(start), (saved.step, saved.consumed)

"""Evaluation and generation with a checkpoint that is still in a bucket."""

from __future__ import annotations

from megatron.hub.s3_load import fetch_load
from megatron.inference.team import Control
from megatron.training.setup import Process


def fetch_requested(process: Process) -> None:
    """Rank 0 fetches what `load` lacks of `s3_load`, however long it takes. Collective.

    Raises `UserError` on every rank when it does not arrive.
    """
    if process.args.checkpoint.s3_load is not None:
        Control(process.state).on_rank_zero(lambda: fetch_load(process.args.checkpoint))

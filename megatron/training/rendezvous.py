"""How the ranks of a job find each other and agree on one configuration.

Rank 0 reads the YAML files (or the file that the launcher resolved) and publishes the result, by value, in the
rendezvous store; the others read it there. A rank that was given files itself (torchrun, srun) compares its own reading
with rank 0's, so that two nodes with different files stop before they train.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch.distributed as dist

from megatron.errors import LostRankError, UserError
from megatron.neox_arguments import NeoXArgs

_KEY = "deepy/config"


def share_config(store: dist.Store, rank: int, world_size: int, read: Callable[[], str], own_files: bool) -> str:
    """One configuration for all ranks, as the text of `NeoXArgs.to_resolved`.

    Args:
        store: the rendezvous store of the job.
        read: reads this rank's own configuration.
        own_files: every rank was given the files, so each reads and compares.

    Raises:
        UserError: the configuration is wrong (on every rank, with rank 0's message), or differs between ranks.
    """
    if world_size == 1:
        return read()
    if rank == 0:
        try:
            config = read()
        except UserError as error:
            store.set(_KEY, json.dumps({"error": str(error)}))
            raise
        store.set(_KEY, json.dumps({"config": config}))
        return config
    message = json.loads(store.get(_KEY))
    if "error" in message:
        raise UserError(message["error"])
    if own_files and (keys := _compare_configs(read(), message["config"])):
        raise UserError(
            f"rank {rank} reads another configuration than rank 0; different: {', '.join(keys)}. "
            "Give every node the same files and overrides."
        )
    return message["config"]


def _compare_configs(mine: str, theirs: str) -> list[str]:
    """Keys whose values differ between two resolved configurations (where they came from may differ)."""
    ours, others = NeoXArgs.from_resolved(mine).to_dict(), NeoXArgs.from_resolved(theirs).to_dict()
    return sorted(key for key in ours if ours[key] != others[key])


# Parts of the errors of gloo and NCCL when a peer does not answer in time, or is gone; most are a bare RuntimeError.
_SIGNS_OF_A_LIMIT = ("Timed out waiting", "Watchdog caught collective operation timeout")
_SIGNS_OF_LOSS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited or there was a network error",
)


def lost_rank(error: BaseException) -> LostRankError | None:
    """The `LostRankError` that a failed communication means, None for any other error."""
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    first = text.splitlines()[0] if text else repr(error)
    if any(sign in text for sign in _SIGNS_OF_A_LIMIT):
        return LostRankError(
            "another rank did not answer within collective_timeout, or in the first steps and on the host "
            f"distributed_timeout; the other ranks' logs show which one stands still: {first}"
        )
    if isinstance(error, dist.DistNetworkError) or any(sign in text for sign in _SIGNS_OF_LOSS):
        return LostRankError(f"another rank is gone: {first}")
    return None

"""With which tokenizer a checkpoint was trained. It is saved with the state of the run, and compared wherever token ids
meet the weights: when training starts from them, in generation, evaluation, export and comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.find import Checkpoint
from megatron.errors import UserError
from megatron.log import get_logger
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.fingerprint import Fingerprint

logger = get_logger(__name__)

NAME = "TokenizerIdentity"  # of the callback that saves it
ALLOW = "set allow_config_changes: true"  # the way out for whoever knows better


def client_state(tokenizer: Tokenizer) -> dict[str, Any]:
    """The state of a checkpoint that no run saved, made for a model of this tokenizer."""
    return {"callbacks": {NAME: tokenizer.fingerprint().to_dict()}}


def kept_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """The same for a copy of a checkpoint's weights: what that one recorded."""
    saved = checkpoint.callbacks.get(NAME)
    return {} if saved is None else {"callbacks": {NAME: saved}}


def check_tokenizer(checkpoint: Checkpoint, tokenizer: Tokenizer, allow: bool = False, way_out: str = ALLOW) -> None:
    """`check_identity` for a checkpoint; GPT-NeoX's record nothing. `allow` (allow_config_changes): only a warning."""
    saved, where, config = checkpoint.callbacks.get(NAME), str(checkpoint.path), checkpoint.manifest.config
    try:
        check_identity(saved, tokenizer, where, config, way_out)
    except UserError as error:
        if not allow:
            raise
        logger.warning(f"allow_config_changes: {error}")


def check_identity(
    saved: Mapping[str, Any] | None,
    tokenizer: Tokenizer,
    where: str,
    config: Mapping[str, Any] | None = None,
    way_out: str = ALLOW,
) -> None:
    """Raise `UserError` when the token ids of a checkpoint, or what was put around its texts, are not `tokenizer`'s.

    Args:
        saved: what the checkpoint recorded; None: nothing, and nothing is compared.
        where: the checkpoint, for the message.
        config: its configuration, which may name its tokenizer.
        way_out: what else than its own tokenizer would do, for the message.
    """
    if saved is None:
        return
    try:
        fingerprint = Fingerprint.from_dict(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: the record of its tokenizer cannot be read ({error!r})") from error
    if conflict := tokenizer.conflict(fingerprint):
        keys = ("tokenizer_type", "vocab_file", "merge_file")
        origin = ", ".join(f"{key}: {config[key]}" for key in keys if config and config.get(key))
        raise UserError(
            f"{where} was trained with another tokenizer than {tokenizer.describe()} ({conflict}). Use the tokenizer "
            f"of its run{f' ({origin})' if origin else ''}, or {way_out}."
        )

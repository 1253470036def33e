"""Mending broken Unicode in texts before they are tokenised."""

from __future__ import annotations

from collections.abc import Callable

from megatron.errors import UserError


def text_mender() -> Callable[[str], str]:
    """ftfy's `fix_text`. Raises `UserError` when it is not installed."""
    try:
        from ftfy import fix_text
    except ImportError as error:
        raise UserError("--ftfy needs ftfy: pip install -r requirements/requirements.txt") from error
    return fix_text

"""A module whose import starts a thread, as some libraries do."""

from __future__ import annotations

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()


def nothing(rank: int, world_size: int) -> None:
    """What a test would run."""

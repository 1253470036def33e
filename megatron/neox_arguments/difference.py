"""One deliberate difference from GPT-NeoX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.neox_arguments.arguments import NeoXArgs


def never(args: NeoXArgs) -> bool:
    """For a difference that concerns no run, only tools or bugs that users may rely on."""
    return False


@dataclass(frozen=True)
class Difference:
    """One difference. `line` is printed at start when `applies(args)` (a derived config) holds."""

    topic: str
    neox: str
    here: str
    applies: Callable[[NeoXArgs], bool] = never
    section: str = "Numbers"

    @property
    def line(self) -> str:
        return f"{self.topic}: {self.here} (GPT-NeoX: {self.neox})"

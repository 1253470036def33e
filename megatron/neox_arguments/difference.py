"""One deliberate difference from GPT-NeoX."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from megatron.neox_arguments.arguments import NeoXArgs


def never(args: NeoXArgs) -> bool:
    """For a difference that concerns no run, only tools or bugs that users may rely on."""
    return False


@dataclass(frozen=True)
class Difference:
    """One difference, which matters when `applies(args)` (a derived config) holds. `keys`: those whose meaning is not
    GPT-NeoX's; the ones that `topic` names need not be in it."""

    topic: str
    neox: str
    here: str
    applies: Callable[[NeoXArgs], bool] = never
    section: str = "Numbers"
    keys: tuple[str, ...] = ()

    def concerns(self, args: NeoXArgs) -> bool:
        """Whether the user of a config has set a key that means something else in GPT-NeoX."""
        named = (*self.keys, *re.findall(r"\w+", self.topic))
        return any(args.is_set(name) for name in named)

    @property
    def line(self) -> str:
        return f"{self.topic}: {self.here} (GPT-NeoX: {self.neox})"

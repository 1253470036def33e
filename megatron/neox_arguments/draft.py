"""The working copy that the derivation rules fill in, and the facts that only the run knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.errors import UserError
from megatron.neox_arguments.groups import all_keys

if TYPE_CHECKING:
    from megatron.neox_arguments.arguments import NeoXArgs

SET_BY_PROGRAM = "set by the program"


@dataclass(frozen=True)
class Facts:
    """What the config alone does not show. None means not known yet."""

    vocab_size: int | None = None
    """Size of the tokenizer's vocabulary including added tokens (largest id + 1)."""
    num_devices: int | None = None
    """Ranks that run, over all nodes."""
    epoch_samples: int | None = None
    """Samples of seq_length tokens in one pass over the training data; needed by train_epochs."""
    registries: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names that the code behind a key knows, e.g. {"attention_backend": [...]}."""


class Draft:
    """Mutable values of a derivation. Rules read `draft["key"]` or `draft.get_given("key")` and write with `set`."""

    def __init__(self, args: NeoXArgs, facts: Facts | None) -> None:
        self.facts = facts or Facts()
        self.values = args.values()
        self.sources = dict(args.sources)
        self.notes = list(args.notes)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def is_set(self, name: str) -> bool:
        """True when the user gave this key (it is not at its default and was not derived)."""
        return name in self.sources and not self.sources[name].startswith("derived")

    def get_given(self, name: str) -> Any:
        """The value the user gave, else None: what an earlier derivation computed does not count."""
        return self.values[name] if self.is_set(name) else None

    def source(self, name: str) -> str:
        return self.sources.get(name) or self.sources.get(name.split(".")[0]) or "default"

    def set(self, name: str, value: Any, why: str) -> None:
        """Write a derived value. A user's value of a purely derived key must agree."""
        info = all_keys()[name]
        if info.derived == "check" and self.is_set(name) and self.values[name] != value:
            self.fail(name, f"it is computed: {value} ({why}), not {self.values[name]}; leave it out")
        if info.derived == "recompute" and self.get_given(name) not in (None, value):
            self.note(f"{self.source(name)}: {name} {self[name]} is not used; it is computed: {value} ({why})")
        if info.derived == "recompute" or not self.is_set(name):
            self.sources[name] = f"derived: {why}"
        self.values[name] = value

    def note(self, message: str) -> None:
        if message not in self.notes:
            self.notes.append(message)

    def fail(self, name: str, message: str) -> NoReturn:
        """Raise a `UserError` that names the place where the key was set."""
        source = self.source(name)
        where = "" if source == "default" or source.startswith("derived") else f"{source}: "
        raise UserError(f"{where}{name}: {message}")

    def positive(self, *names: str) -> None:
        """Fail unless each of these keys is None or above zero."""
        for name in names:
            if self[name] is not None and self[name] <= 0:
                self.fail(name, f"must be above 0, is {self[name]}")


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` around `value`: `8 or 16`."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)

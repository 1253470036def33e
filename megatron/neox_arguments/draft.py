"""The working copy that the derivation rules fill in, and the facts that only the run knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.errors import UserError
from megatron.neox_arguments.groups import all_keys
from megatron.neox_arguments.problems import Problems

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


class _Unusable(Exception):
    """A rule reads a key that has no usable value, because of a problem that is reported already."""


@dataclass(frozen=True)
class Rule:
    """One step of a derivation: `check` reads, compares and computes the keys named in `fills`."""

    check: Callable[[Draft], None]
    fills: tuple[str, ...] = ()


class Draft:
    """Mutable values of a derivation. Rules read `draft["key"]` or `draft.get_given("key")` and write with `set`.

    What is wrong goes to `problems`: `fail` ends the rule, `report` does not, `part` is a part of a rule that the rest
    does not depend on. A rule also ends, silently, where it reads a key of `problems.keys`; what it has not filled in
    by then is one of them too.
    """

    def __init__(self, args: NeoXArgs, facts: Facts | None, problems: Problems) -> None:
        self.facts = facts or Facts()
        self.values = args.values()
        self.sources = dict(args.sources)
        self.notes = list(args.notes)
        self.problems = problems
        self._unfilled: set[str] = set()
        self._ended = False

    def apply(self, rule: Rule) -> None:
        """Run one rule. The keys it fills are unusable when it, or a part of it, ended before it did."""
        self._unfilled, self._ended = set(rule.fills), False
        with self.part():
            rule.check(self)
        if self._ended:
            self.problems.keys.update(self._unfilled)

    @contextmanager
    def part(self) -> Iterator[None]:
        """A part of a rule: a problem in it does not keep the rule from what follows."""
        try:
            yield
        except UserError as problem:
            self.problems.add(problem)
            self._ended = True
        except _Unusable:
            self._ended = True

    def _check_usable(self, name: str) -> None:
        if name in self.problems.keys:
            raise _Unusable

    def __getitem__(self, name: str) -> Any:
        self._check_usable(name)
        return self.values[name]

    def is_set(self, name: str) -> bool:
        """True when the user gave this key (it is not at its default and was not derived)."""
        self._check_usable(name)
        return name in self.sources and not self.sources[name].startswith("derived")

    def is_changed(self, name: str) -> bool:
        """Whether the user wants something else than the default; a resolved config names every key."""
        return self.is_set(name) and self.values[name] != all_keys()[name].default

    def get_given(self, name: str) -> Any:
        """The value the user gave, else None: what an earlier derivation computed does not count."""
        return self.values[name] if self.is_set(name) else None

    def source(self, name: str) -> str:
        return self.sources.get(name) or self.sources.get(name.split(".")[0]) or "default"

    def set(self, name: str, value: Any, why: str) -> None:
        """Write a derived value. A user's value of a purely derived key must agree."""
        if name not in self._unfilled:
            raise TypeError(f"a rule sets {name} twice, or its row in derive.RULES does not name it")
        info = all_keys()[name]
        if info.derived == "check" and self.get_given(name) not in (None, value):
            self.fail(name, f"it is computed: {value} ({why}), not {self.values[name]}; leave it out")
        if info.derived == "recompute" and self.get_given(name) not in (None, value):
            self.note(f"{self.source(name)}: {name} {self[name]} is not used; it is computed: {value} ({why})")
        if info.derived == "recompute" or not self.is_set(name):
            self.sources[name] = f"derived: {why}"
        self.values[name] = value
        self._unfilled.discard(name)

    def imply(self, name: str, value: Any, because: str) -> None:
        """Write a value over any other, as if it stood where the user set the key `because`, which means it."""
        if name not in self._unfilled:
            raise TypeError(f"a rule means {name}, which its row in derive.RULES does not name")
        self.values[name] = value
        self.sources[name] = f"{self.source(because)} ({because})" if because != name else self.source(because)

    def note(self, message: str) -> None:
        if message not in self.notes:
            self.notes.append(message)

    def report(self, name: str, message: str) -> None:
        """Collect a problem, naming the place where the key was set. The key cannot be used from here on."""
        source = self.source(name)
        where = "" if source == "default" or source.startswith("derived") else f"{source}: "
        self.problems.add(f"{where}{name}: {message}", name.split(".")[0])
        self._ended = True

    def fail(self, name: str, message: str) -> NoReturn:
        """`report`, and end the rule, or the part of it."""
        self.report(name, message)
        raise _Unusable

    def require(self, name: str) -> None:
        """Report the key when it has no value."""
        if name not in self.problems.keys and self.values[name] is None:
            self.report(name, "must be set")

    def check(self, fits: Callable[[Any], bool], complaint: str, *names: str) -> None:
        """Report each of these keys whose value is not None and does not fit."""
        for name in names:
            value = self.values[name]
            if name not in self.problems.keys and value is not None and not fits(value):
                self.report(name, f"{complaint}, is {value}")

    def positive(self, *names: str) -> None:
        """Report each of these keys that is set and not above zero."""
        self.check(lambda value: value > 0, "must be above 0", *names)

    def not_negative(self, *names: str, zero: str = "") -> None:
        """Report each of these keys that is set and below zero; `zero` says what 0 means."""
        self.check(lambda value: value >= 0, f"must be 0{zero} or more", *names)


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` around `value`: `8 or 16`."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)

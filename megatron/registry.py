"""The one plug-in mechanism: tables from a YAML name to the code behind it.

The library fills them; code outside it (plugins.py, a script, a test) may add names in the same way. What is added is
remembered with its place, because the configuration accepts such names wherever it accepts its own, without importing
the code behind either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megatron.errors import UserError, nearest

T = TypeVar("T")


def _anything(entry: Any) -> bool:
    return True


class Registry(Generic[T]):
    """Maps the names users write in YAML to implementations.

    >>> NORMS: Registry[type] = Registry("norm")
    >>> @NORMS.register("rmsnorm")
    ... class RMSNorm: ...
    >>> NORMS["rmsnorm"]

    What an entry has to keep stands in the text under each registry.
    """

    def __init__(
        self,
        kind: str,
        *,
        wants: str = "",
        fits: Callable[[Any], bool] = _anything,
        measure: Callable[..., Any] | None = None,
    ) -> None:
        """`kind` is the YAML key that picks an entry; error messages use it.

        `fits` says whether an object can be an entry at all, and `wants` what one is, in words. `measure(name, ...)`
        builds an entry without memory and gives its size: for names whose size no formula knows.
        """
        self.kind = kind
        self.measure = measure
        self._wants, self._fits = wants, fits
        self._entries: dict[str, T] = {}
        self._places: dict[str, str] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator that files an implementation under one or more names.

        Raises `UserError` for a name that is taken, naming both places, and for an object that is no such entry.
        """
        caller = sys._getframe(1)
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        module = str(caller.f_globals.get("__name__", ""))
        ours = module.split(".")[0] == "megatron"

        def add(entry: T) -> T:
            for name in names:
                if name in self._entries:
                    first = self._places[name]
                    raise UserError(f"{self.kind}: {name!r} is registered twice: at {first} and at {place}")
                if not self._fits(entry):
                    kind = entry.__name__ if isinstance(entry, type) else type(entry).__name__
                    raise UserError(f"{place}: {self.kind} {name!r}: {self._wants} is wanted, this is a {kind}")
                self._entries[name], self._places[name] = entry, place
                if not ours:
                    ADDITIONS.append(Addition(self, name, place))
            return entry

        return add

    def withdraw(self, name: str) -> None:
        """Take a name out again."""
        del self._entries[name], self._places[name]

    def __getitem__(self, name: str) -> T:
        """The entry called `name`. Raises `UserError` listing the choices and the nearest name."""
        if name not in self._entries:
            hint = nearest(name, list(self._entries))
            raise UserError(f"{self.kind}: {name!r} is not known.{hint} Choices: {', '.join(sorted(self._entries))}")
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)


@dataclass(frozen=True)
class Addition:
    """A name that code outside the library registered, and where (`file:line`)."""

    registry: Registry[Any]
    name: str
    place: str

    @property
    def entry(self) -> Any:
        return self.registry[self.name]

    def __str__(self) -> str:
        return f"{self.registry.kind}: {self.name}"


ADDITIONS: list[Addition] = []
"""In the order in which they were made."""


def added(kind: str) -> dict[str, Any]:
    """The names that code outside the library gave the registry of a YAML key, with their entries."""
    return {addition.name: addition.entry for addition in ADDITIONS if addition.registry.kind == kind}


def measure(kind: str, name: str, *context: Any) -> Any:
    """The size of an added entry, by building it without memory (see the `measure` of its registry).

    Raises `UserError` when it cannot be built so, and `KeyError` when nobody added it.
    """
    addition = {one.name: one for one in ADDITIONS if one.registry.kind == kind}[name]
    if addition.registry.measure is None:
        raise TypeError(f"the registry of {kind} has no measure")
    try:
        return addition.registry.measure(name, *context)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{kind}: {name!r} ({addition.place}) cannot be built on torch's meta device, where its parameters are "
            f"counted ({type(error).__name__}: {error}); give it a static method `size`, see documentation/plugins.md"
        ) from error


def withdraw(kept: int) -> None:
    """Take back all additions but the first `kept`."""
    while len(ADDITIONS) > kept:
        addition = ADDITIONS.pop()
        addition.registry.withdraw(addition.name)

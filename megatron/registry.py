"""The one plug-in mechanism: tables from a YAML name to the code behind it.

The library fills them; code outside it (plugins.py, a script, a test) may add names in the same way. What is added is
remembered with its place, because the configuration accepts such names wherever it accepts its own.

The keywords of a registration are its row: what the configuration and the planner need to know of an entry (sizes,
defaults) without running its code. Rows of the library's own entries are read from their source, see rows.py.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megatron.errors import UserError, nearest

T = TypeVar("T")


def _anything(entry: Any) -> bool:
    return True


class Registry(Generic[T]):
    """Maps the names users write in YAML to implementations.

    >>> NORMS: Registry[type] = Registry("norm", fields=("vectors",))
    >>> @NORMS.register("rmsnorm", vectors=1)
    ... class RMSNorm: ...
    >>> NORMS["rmsnorm"], NORMS.row("rmsnorm")

    What an entry must do is written under each registry.
    """

    def __init__(
        self,
        kind: str,
        *,
        wants: str = "",
        fits: Callable[[Any], bool] = _anything,
        fields: tuple[str, ...] = (),
        measure: Callable[..., Any] | None = None,
    ) -> None:
        """`kind` is the YAML key that picks an entry; error messages use it.

        `fits` checks whether an object can be an entry, and `wants` describes one, for messages. `fields`: the keywords
        that a registration may have. `measure(name, ...)` builds an entry without memory and gives its size: for
        entries whose row does not give it.
        """
        self.kind = kind
        self.fields = fields
        self.measure = measure
        self._wants, self._fits = wants, fits
        self._entries: dict[str, T] = {}
        self._places: dict[str, str] = {}
        self._rows: dict[str, dict[str, Any]] = {}

    def register(self, *names: str, **row: Any) -> Callable[[T], T]:
        """Decorator that registers an implementation under one or more names, with its row.

        Raises `UserError` for a name that is taken, naming both places, for an object that cannot be an entry, and for
        a keyword that the registry does not know.
        """
        caller = sys._getframe(1)
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        module = str(caller.f_globals.get("__name__", ""))
        ours = module.split(".")[0] == "megatron"
        for field in row:
            if field not in (known := ("doc", *self.fields)):
                hint = nearest(field, list(known))
                raise UserError(f"{place}: {self.kind}: unknown keyword {field!r}.{hint} Known: {', '.join(known)}")

        def add(entry: T) -> T:
            for name in names:
                if name in self._entries:
                    first = self._places[name]
                    raise UserError(f"{self.kind}: {name!r} is registered twice: at {first} and at {place}")
                if not self._fits(entry):
                    kind = entry.__name__ if isinstance(entry, type) else type(entry).__name__
                    raise UserError(f"{place}: {self.kind} {name!r}: expected {self._wants}, got a {kind}")
                self._entries[name], self._places[name], self._rows[name] = entry, place, row
                if not ours:
                    ADDITIONS.append(Addition(self, name, place))
            return entry

        return add

    def withdraw(self, name: str) -> None:
        """Remove a name."""
        del self._entries[name], self._places[name], self._rows[name]

    def row(self, name: str) -> Mapping[str, Any]:
        """The keywords of a registration; a field that it leaves out may be an attribute of the entry."""
        entry = self[name]
        own = {field: getattr(entry, field) for field in self.fields if hasattr(entry, field)}
        return {**own, **self._rows[name]}

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


def import_entries(package: str, folders: Iterable[str]) -> None:
    """Import all modules of a package (its `__name__` and `__path__`), so that each registers what it has."""
    for module in pkgutil.iter_modules(folders):
        importlib.import_module(f"{package}.{module.name}")


def added(kind: str) -> dict[str, Any]:
    """The names that code outside the library added to the registry of a YAML key, with their entries."""
    return {addition.name: addition.entry for addition in ADDITIONS if addition.registry.kind == kind}


def measure(kind: str, name: str, *context: Any) -> Any:
    """The size of an added entry, by building it without memory (see the `measure` of its registry).

    Raises `UserError` when it cannot be built in this way, and `KeyError` when it is not an addition.
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
    """Remove all additions but the first `kept`."""
    while len(ADDITIONS) > kept:
        addition = ADDITIONS.pop()
        addition.registry.withdraw(addition.name)

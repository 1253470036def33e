"""The one plug-in mechanism: a table from a YAML name to the code behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from megatron.errors import UserError, nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps the names users write in YAML to implementations.

    >>> NORMS: Registry[type] = Registry("norm")
    >>> @NORMS.register("rmsnorm")
    ... class RMSNorm: ...
    >>> NORMS["rmsnorm"]
    """

    def __init__(self, kind: str) -> None:
        """`kind` is the YAML key that picks an entry; error messages use it."""
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator that files an implementation under one or more names. A name may be taken once."""

        def add(entry: T) -> T:
            for name in names:
                if name in self._entries:
                    raise ValueError(f"{self.kind} {name!r} is registered twice")
                self._entries[name] = entry
            return entry

        return add

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

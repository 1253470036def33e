"""How one configuration key is declared: a dataclass field with its meaning, class and limits as metadata.

Every key belongs to exactly one of three classes:

* live: something observable changes with it;
* known, not available: it loads, but asking for it (a value other than the default) is an error naming the alternative;
* retired: not a field at all, see `retired.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron.registry import added


def key(
    default: Any,
    doc: str,
    *,
    unavailable: str | dict[Any, str] | None = None,
    derived: str | None = None,
    differs: str | None = None,
    spellings: dict[str, str] | None = None,
    registry: str | None = None,
    brought_by: tuple[str, str] | None = None,
    new: bool = False,
) -> Any:
    """Declare a configuration key as a dataclass field.

    `unavailable`: what to use instead when any value but the default is asked for, or a table from the unavailable
    values to that advice. `derived`: the field is computed (`"check"`: a value given by the user must agree with the
    computed one; `"recompute"`: it depends on the layout and is computed afresh). `differs`: what is not as in
    GPT-NeoX. `spellings`: other spellings of values. `registry`: the kind of the registry behind the choices; the names
    that plugins added to it are choices too. `brought_by`: (registry, name) with which a plugin makes the key
    available; it then reads it. `new`: not a GPT-NeoX key.
    """
    metadata = {
        "doc": doc,
        "unavailable": unavailable,
        "derived": derived,
        "differs": differs,
        "spellings": spellings or {},
        "registry": registry,
        "brought_by": brought_by,
        "new": new,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class KeyInfo:
    """All that is known about one key; `type` is the resolved annotation, `group` the attribute of `NeoXArgs`."""

    name: str
    group: str
    type: Any
    default: Any
    doc: str
    unavailable: str | dict[Any, str] | None
    derived: str | None
    differs: str | None
    spellings: dict[str, str]
    registry: str | None
    brought_by: tuple[str, str] | None
    new: bool

    @property
    def available(self) -> bool:
        """False when no value but the default can be used."""
        return not isinstance(self.unavailable, str)

    @property
    def brought(self) -> bool:
        """Whether a plugin is there that makes the key available."""
        return self.brought_by is not None and self.brought_by[1] in added(self.brought_by[0])

    @property
    def choices(self) -> list[Any]:
        """The values of a `Literal` type, without None, and the names of plugins; empty for other types."""
        ours = [value for member in union_members(self.type) if _is_literal(member) for value in get_args(member)]
        return [*ours, *(name for name in self.added if name not in ours)]

    @property
    def added(self) -> list[str]:
        """The names that plugins registered for this key."""
        return list(added(self.registry)) if self.registry is not None else []

    @property
    def accepts(self) -> Any:
        """`type`, its choices with the names of plugins."""
        names = self.added
        if not names:
            return self.type
        accepted: Any = None
        for member in union_members(self.type):
            one = Literal[tuple(self.choices)] if _is_literal(member) else member  # type: ignore[valid-type]
            accepted = one if accepted is None else accepted | one
        return accepted

    def refusal(self, value: Any) -> str | None:
        """What to use instead of a value that is known but not available; None when it is (a plugin may bring it)."""
        if not isinstance(self.unavailable, dict) or isinstance(value, (dict, list, tuple)) or value in self.added:
            return None
        return self.unavailable.get(value)


def union_members(annotation: Any) -> list[Any]:
    """`int | None` -> [int, NoneType]; a plain type -> [itself]; Literals are kept whole."""
    if _is_literal(annotation) or get_origin(annotation) in (tuple, dict, list):
        return [annotation]
    return list(get_args(annotation)) or [annotation]


def _is_literal(annotation: Any) -> bool:
    return get_origin(annotation) is Literal


@cache
def group_keys(group_class: type, group: str) -> dict[str, KeyInfo]:
    """The keys declared by one group dataclass, in the order of declaration."""
    hints = get_type_hints(group_class)
    keys = {}
    for field in dataclasses.fields(group_class):
        if field.default is MISSING:
            raise TypeError(f"{group_class.__name__}.{field.name} is not declared with key()")
        keys[field.name] = KeyInfo(field.name, group, hints[field.name], field.default, **field.metadata)
    return keys

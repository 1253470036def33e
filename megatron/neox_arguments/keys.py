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
from megatron.rows import FOLDERS, rows

LARGEST = 2**63 - 1  # what a 64-bit integer holds: no count or size of a run is larger


def key(
    default: Any,
    doc: str,
    *,
    unavailable: str | dict[Any, str] | None = None,
    derived: str | None = None,
    differs: str | None = None,
    spellings: dict[str, str] | None = None,
    registry: str | None = None,
    path: bool = False,
    most: int = LARGEST,
    new: bool = False,
) -> Any:
    """Declare a configuration key as a dataclass field.

    `unavailable`: what to use instead when any value but the default is asked for, or a table from the unavailable
    values to that advice. `derived`: the field is computed (`"check"`: a value given by the user must agree with the
    computed one; `"recompute"`: it depends on the layout and is computed again). `differs`: what is not as in
    GPT-NeoX. `spellings`: other spellings of values. `registry`: the kind of the registry behind the choices: the names
    of its entries (where rows.py knows it), those that plugins added, and those that `unavailable` lists.
    `path`: its texts name
    files or folders. `most`: the largest whole number it takes, far above what is sensible. `new`: not a GPT-NeoX key.
    """
    metadata = {
        "doc": doc,
        "unavailable": unavailable,
        "derived": derived,
        "differs": differs,
        "spellings": spellings or {},
        "registry": registry,
        "path": path,
        "most": most,
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
    path: bool
    most: int
    new: bool

    @property
    def available(self) -> bool:
        """False when no value but the default can be used."""
        return not isinstance(self.unavailable, str)

    @property
    def own_choices(self) -> list[Any]:
        """The values of a `Literal` type without None, or the names of the library's entries; empty for other types."""
        if self.registry in FOLDERS:
            return [*rows(self.registry), *(self.unavailable if isinstance(self.unavailable, dict) else ())]
        return [value for member in union_members(self.type) if _is_literal(member) for value in get_args(member)]

    @property
    def choices(self) -> list[Any]:
        """`own_choices` and the names of plugins."""
        ours = self.own_choices
        return [*ours, *(name for name in self.added if name not in ours)]

    @property
    def added(self) -> list[str]:
        """The names that plugins registered for this key."""
        return list(added(self.registry)) if self.registry is not None else []

    def accepts(self, choices: list[Any]) -> Any:
        """`type` with these choices."""
        if not choices:
            return self.type
        accepted: Any = None
        for member in union_members(self.type):
            named = _is_literal(member) or (member is str and self.registry in FOLDERS)
            one = Literal[tuple(choices)] if named else member  # type: ignore[valid-type]
            accepted = one if accepted is None else accepted | one
        return accepted

    def refusal(self, value: Any) -> str | None:
        """What to use instead of a value that is known but not available; None when it is (also by a plugin)."""
        if not isinstance(self.unavailable, dict) or isinstance(value, (dict, list, tuple)) or value in self.added:
            return None
        return self.unavailable.get(value)


@dataclass(frozen=True)
class Entry:
    """A value as written, and where: `file:line`, also of the keys inside a mapping."""

    value: Any
    where: str
    inside: dict[str, str] = dataclasses.field(default_factory=dict)


def union_members(annotation: Any) -> list[Any]:
    """`int | None` -> [int, NoneType]; a plain type -> [itself]; Literals are kept whole."""
    if _is_literal(annotation) or get_origin(annotation) in (tuple, dict, list):
        return [annotation]
    return list(get_args(annotation)) or [annotation]


def _is_literal(annotation: Any) -> bool:
    return get_origin(annotation) is Literal


@cache
def group_keys(group_class: type, group: str) -> dict[str, KeyInfo]:
    """The keys declared by one group dataclass, in the order of declaration; those of its bases, a family's, last."""
    hints = get_type_hints(group_class)
    keys = {}
    own = group_class.__annotations__
    for field in sorted(dataclasses.fields(group_class), key=lambda field: field.name not in own):
        if field.default is MISSING:
            raise TypeError(f"{group_class.__name__}.{field.name} is not declared with key()")
        metadata = dict(field.metadata)
        if isinstance(metadata["unavailable"], dict) and metadata["registry"] in FOLDERS:
            there = rows(metadata["registry"])
            metadata["unavailable"] = {name: to for name, to in metadata["unavailable"].items() if name not in there}
        keys[field.name] = KeyInfo(field.name, group, hints[field.name], field.default, **metadata)
    return keys

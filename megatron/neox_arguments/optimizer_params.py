"""Parameters of an optimizer's own (`optimizer.params` without lr and weight_decay): their types and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.registry import added
from megatron.rows import row, rows

KIND = "optimizer.type"


def param_types(optimizer: str) -> dict[str, Any]:
    """Key -> type of what `optimizer.params` may hold: what any of our optimizers knows, and what a plugin's does.

    A parameter of another optimizer is no error, so that a config can switch between them.
    """
    known = [found.values for found in rows(KIND).values()]
    plugged = next((name for name in added(KIND) if name.lower() == optimizer.lower()), None)
    if plugged is not None:
        known.append(row(KIND, plugged))
    own = {name: _type(default) for values in known for name, default in values.get("params", {}).items()}
    return {"lr": float, "weight_decay": float, **own}


def optimizer_params(optimizer: str, mapping: Mapping[str, Any] | None) -> dict[str, Any]:
    """What an optimizer is built with: the defaults of its row, and over them `params` of the key `optimizer`."""
    declared = row(KIND, optimizer).get("params", {})
    given = dict((mapping or {}).get("params") or {})
    defaults = {name: value for name, value in declared.items() if not isinstance(value, type)}
    taken = {name: value for name, value in given.items() if name in declared or optimizer in added(KIND)}
    return {**defaults, **{name: value for name, value in taken.items() if name not in ("lr", "weight_decay")}}


def _type(default: Any) -> Any:
    if isinstance(default, (list, tuple)):
        return tuple[tuple(float for _ in default)]  # type: ignore[misc]
    return default if isinstance(default, type) else type(default)

"""Parameters of an optimizer's own (`optimizer.params` without lr and weight_decay): their types and defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.errors import UserError, nearest
from megatron.neox_arguments.coerce import thaw
from megatron.registry import added
from megatron.rows import row, rows

if TYPE_CHECKING:
    from megatron.neox_arguments.arguments import NeoXArgs

KIND = "optimizer.type"
PARAMS = "optimizer.params."


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


def explain_param(args: NeoXArgs, name: str) -> str:
    """What `--explain optimizer.params.NAME` prints: value and source, and the default of each optimizer that has it.

    Raises `UserError` for a parameter that no optimizer has.
    """
    param, own = name.removeprefix(PARAMS), args.optimizer.optimizer_type
    if param in ("lr", "weight_decay"):
        return args.explain(param)
    declared = {kind: row(KIND, kind).get("params", {}) for kind in (*rows(KIND), *added(KIND))}
    defaults = {kind: params[param] for kind, params in declared.items() if param in params}
    if not defaults:
        known = sorted({one for params in declared.values() for one in params})
        raise UserError(f"{name}: no optimizer has this parameter.{nearest(param, known)} Known: {', '.join(known)}")
    given = (args.optimizer.optimizer or {}).get("params") or {}
    shown = {kind: "none" if isinstance(one, type) else json.dumps(one) for kind, one in defaults.items()}
    value = json.dumps(thaw(given[param])) if param in given else shown.get(own)
    return "\n".join(
        [
            f"{name} = {value if own in defaults else f'not read by {own}'}",
            f"  source:  {args.source(name) if param in given else 'default'}",
            f"  default: {', '.join(f'{one} ({kind})' for kind, one in shown.items())}",
            "  meaning: a parameter of these optimizers (documentation/runs.md)",
        ]
    )


def _type(default: Any) -> Any:
    if isinstance(default, (list, tuple)):
        return tuple[tuple(float for _ in default)]  # type: ignore[misc]
    return default if isinstance(default, type) else type(default)

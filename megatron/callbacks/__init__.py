"""Callbacks and metrics, one file each. Every file in this folder is imported and registers what it has."""

from __future__ import annotations

from megatron.callbacks.context import RunContext
from megatron.errors import UserError
from megatron.neox_arguments.callback_key import FIELDS, KIND, choose_callbacks
from megatron.registry import Registry, import_entries
from megatron.training.callback import Callback

CALLBACKS: Registry[type[Callback]] = Registry(
    KIND,
    wants="a subclass of megatron.training.callback.Callback",
    fits=lambda entry: isinstance(entry, type) and issubclass(entry, Callback),
    fields=FIELDS,
)
"""Classes of callbacks. An entry is a subclass of `Callback`:

* it is built as `entry.build(context, **settings)`, which is `entry(**settings)` unless it needs the `RunContext`;
* its row is described in neox_arguments/callback_key.
"""


def build_callbacks(context: RunContext, kind: type[Callback] = Callback) -> list[Callback]:
    """The callbacks of a run that are a `kind`, in the order in which their hooks run. The same on every rank, except
    for those that write."""
    built: dict[str, Callback] = {}
    for chosen in choose_callbacks(context.args):
        entry = CALLBACKS[chosen.name]
        callback = entry.build(context, **chosen.settings) if issubclass(entry, kind) else None
        if callback is None:
            continue
        if (other := type(callback).__name__) in built:
            raise UserError(f"callbacks.{chosen.name}: another callback of this run has a class {other}; rename one")
        built[other] = callback
    return list(built.values())


import_entries(__name__, __path__)

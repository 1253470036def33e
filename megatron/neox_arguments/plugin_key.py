"""The `plugins` key before anything else is checked: which modules and files, named where; imported; whose source.

Names that a plugin registers may stand in any other key, so plugins are imported first, at one moment in every process:
when it reads a configuration that names them, from YAML files (`load`) or resolved (`NeoXArgs.from_dict`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron.errors import UserError
from megatron.plugins import Plugin, absolute, load_plugins, loaded, sources

KEY = "plugins"


def items(value: Any) -> list[str] | None:
    """The value of the key as a list; None for what is not one text or several (its type is refused later)."""
    found = [] if value is None else [value] if isinstance(value, str) else value
    return list(found) if isinstance(found, (list, tuple)) and all(isinstance(one, str) for one in found) else None


def located(value: Any, where: str, folder: str | None, lines: Mapping[str, str]) -> tuple[Any, str, dict[str, str]]:
    """The value as written in a file of `folder` (None: on the command line) with absolute paths, `where`, and where
    each plugin is named.

    A relative path is searched beside the config file, then in the working directory. `lines`: item → `file:line`.
    Raises `UserError` when a file is not there.
    """
    written = items(value)
    if written is None:
        return value, where, {}
    folders = [os.getcwd()] if folder is None else [folder, os.getcwd()]
    found = {absolute(one, folders, lines.get(one, where)): lines.get(one, where) for one in written}
    return list(found), where, found


def joined(below: Any, above: Any) -> Any:
    """The plugins of two files: each may bring what it needs, and what both name is one."""
    first, second = items(below), items(above)
    if first is None or second is None:
        return above
    return list(dict.fromkeys([*first, *second]))


def import_plugins(value: Any, where: Callable[[str], str]) -> list[str]:
    """Import what the key names; returns what is worth saying. Raises `UserError` (see `plugins.load_plugins`)."""
    idle = [plugin.name for plugin in load_plugins(items(value) or [], where) if not plugin.registered]
    return [f"{where(name)}: plugin {name} registers nothing" for name in idle]


def import_named(names: Sequence[str], where: str) -> list[str]:
    """Import plugins that a command line names, files from the working directory; returns their resolved names."""
    found, _, _ = located(list(names), where, None, {})
    load_plugins(found, lambda name: where)
    return list(found)


def describe(names: Iterable[str]) -> list[tuple[str, str, str]]:
    """(plugin, first digits of its SHA-256, what it registered) of imported plugins, for people."""
    return [(plugin.name, plugin.sha256[:12], _registered(plugin)) for plugin in loaded(names)]


def _registered(plugin: Plugin) -> str:
    return ", ".join(map(str, plugin.registered)) or "nothing"


def check_sources(names: Sequence[str], recorded: Mapping[str, str] | None) -> None:
    """The plugins of this process have the source that another process of the job recorded. Raises `UserError`."""
    own = sources(names)
    for name, digest in (recorded or {}).items():
        if own.get(name, digest) != digest:
            raise UserError(
                f"plugins: {name} on this machine is another than the job was started with (sha256 {own[name][:12]}, "
                f"expected {digest[:12]}); all nodes need the same file, and it may not change while a job starts"
            )

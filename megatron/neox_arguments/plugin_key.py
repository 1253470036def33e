"""The `plugins` key, which is read before all others: where each plugin is named, its import, its source.

Any other key may hold a name that a plugin registers, so plugins are imported first, at one moment in every process:
when it reads a configuration that names them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron.errors import UserError
from megatron.neox_arguments.keys import Entry
from megatron.plugins import Plugin, absolute, find_loaded, find_moved, load_plugins, sources

KEY = "plugins"


def items(value: Any) -> list[str] | None:
    """The value of the key as a list; None for what is not one text or several (its type is refused later)."""
    found = [] if value is None else [value] if isinstance(value, str) else value
    return list(found) if isinstance(found, (list, tuple)) and all(isinstance(one, str) for one in found) else None


def locate(entry: Entry, folder: str | None) -> Entry:
    """The key's entry in a file of `folder` (None: on the command line), with absolute paths.

    `inside` is item → `file:line`, before and after. A relative path is searched in the config file's folder, then in
    the working directory. Raises `UserError` for a missing file.
    """
    written = items(entry.value)
    if written is None:
        return entry
    folders = [os.getcwd()] if folder is None else [folder, os.getcwd()]
    lines = {one: entry.inside.get(one, entry.where) for one in written}
    found = {absolute(one, folders, where): where for one, where in lines.items()}
    return Entry(list(found), entry.where, found)


def take_loaded(entry: Entry) -> Entry:
    """The key's entry in a config that only a checkpoint holds: by the names under which the user had them imported.

    Raises `UserError` for a plugin that the user has named nowhere: code is not run because data names it.
    """
    written = items(entry.value)
    if written is None:
        return entry
    found: dict[str, str] = {}
    for name in written:
        where, plugin = entry.inside.get(name, entry.where), find_moved(name)
        if plugin is None:
            near = os.path.join(os.path.dirname(where.rpartition(":")[0]), name)  # where its own config looks first
            path = near if os.path.isfile(near) else name
            raise UserError(
                f"{where}: plugins: {name} is code, and is not run only because a checkpoint names it; if you trust "
                f"it, give --plugins {path}, or --config_file with a config that has plugins: [{path}]"
            )
        found[plugin.name] = where
    return Entry(list(found), entry.where, found)


def join(below: Entry, above: Entry) -> Entry:
    """The key's entries in two files: all plugins of both, each once."""
    first, second = items(below.value), items(above.value)
    if first is None or second is None:
        return above
    return Entry(list(dict.fromkeys([*first, *second])), above.where, below.inside | above.inside)


def import_plugins(value: Any, where: Callable[[str], str]) -> list[str]:
    """Import what the key names; returns notes for the start of the run. Raises `UserError` as `load_plugins` does."""
    idle = [plugin.name for plugin in load_plugins(items(value) or [], where) if not plugin.registered]
    return [f"{where(name)}: plugin {name} registers nothing" for name in idle]


def import_named(names: Sequence[str], where: str) -> list[str]:
    """Import plugins that a command line names, files from the working directory; returns their resolved names."""
    found = list(locate(Entry(list(names), where), None).value)
    load_plugins(found, lambda name: where)
    return found


def describe(names: Iterable[str]) -> list[tuple[str, str, str]]:
    """(plugin, first digits of its SHA-256, what it registered) of imported plugins, for people."""
    return [(plugin.name, plugin.sha256[:12], _list_registered(plugin)) for plugin in find_loaded(names)]


def _list_registered(plugin: Plugin) -> str:
    return ", ".join(map(str, plugin.registered)) or "nothing"


def check_sources(names: Sequence[str], recorded: Mapping[str, str] | None) -> None:
    """The plugins of this process have the source that another process of the job recorded. Raises `UserError`."""
    own = sources(names)
    for name, digest in (recorded or {}).items():
        if own.get(name, digest) != digest:
            raise UserError(
                f"plugins: {name} on this machine is not the one of the start of the job (sha256 {own[name][:12]}, "
                f"expected {digest[:12]}); all nodes need the same file, and it may not change while a job starts"
            )

"""`key=value` over what config files say: of a command line or a Python call, also inside the mapping of a key."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from megatron.errors import UserError
from megatron.neox_arguments import plugin_key
from megatron.neox_arguments.exclusive_keys import SAME_FACT, WINS_OVER
from megatron.neox_arguments.keys import Entry
from megatron.neox_arguments.problems import Problems
from megatron.neox_arguments.yaml_files import normalise, parse_value
from megatron.secrets import find_secrets

COMMAND_LINE = "command line"
PYTHON_CALL = "Python call"

Overrides = Sequence[str] | Mapping[str, Any]
"""`key=value` texts of a command line, or key → value from Python; a key may reach inside (`optimizer.params.lr`)."""


def split_overrides(overrides: Overrides, problems: Problems) -> list[tuple[str, Any, str]]:
    """(key as written, value, where) of each override. Adds to `problems` what is none."""
    if isinstance(overrides, Mapping):
        place, texts = PYTHON_CALL, [f"{key}={value!r}" for key, value in overrides.items()]
    else:
        place, texts = COMMAND_LINE, list(overrides)
    for text in texts:
        for secret in find_secrets(text):
            raise UserError(secret.refusal(f"{place}: {text.partition('=')[0]}"))
    if isinstance(overrides, Mapping):
        return [(key, value, f"{PYTHON_CALL}: {key}={value!r}") for key, value in overrides.items()]
    found = []
    for override in overrides:
        written, equals, text = override.partition("=")
        written, where = written.strip().removeprefix("--"), f"{COMMAND_LINE}: {override}"
        if not equals or not written:
            problems.add(f"{COMMAND_LINE}: {override!r}: overrides are written key=value")
            continue
        try:
            found.append((written, parse_value(text), where))
        except yaml.YAMLError as error:
            fault = getattr(error, "problem", error)
            problems.add(f"{where}: the value is not valid YAML: {fault}", normalise(written.split(".")[0]))
    return found


def apply_override(entries: dict[str, Entry], written: str, value: Any, where: str) -> None:
    """Put one value over what the files say; `written` may reach inside (`a.b.c`). Raises `UserError`."""
    first, *inner = written.split(".")
    name, inner = normalise(first), [part.replace("-", "_") for part in inner]
    if name == plugin_key.KEY:
        if inner:
            raise UserError(f"{where}: write the whole list: plugins=[my_module,path/to/file.py]")
        entries[name] = plugin_key.locate(Entry(value, where), None)
    elif inner:
        _set_inside(entries, name, inner, value, where)
    else:
        entries[name] = Entry(value, where)
    dotted = ".".join([name, *inner])
    for flat, places in SAME_FACT.items():
        if dotted == flat:
            for place in places:
                _remove_inside(entries, *place.split("."))
        elif dotted in places and not dotted.endswith("16.type"):
            entries.pop(flat, None)


def _set_inside(entries: dict[str, Entry], name: str, inner: list[str], value: Any, where: str) -> None:
    """Set one value inside the mapping of a key; mappings on the way are made."""
    under = entries.get(name, Entry(None, where))
    root = {name: copy.deepcopy(under.value)}
    node, key = root, name
    for part in inner:
        below = {} if node.get(key) is None else node[key]
        if not isinstance(below, dict):
            raise UserError(f"{where}: {key} is not a mapping")
        node[key] = below
        node, key = below, part
    node[key] = value
    entries[name] = Entry(root[name], under.where, {**under.inside, ".".join([name, *inner]): where})


def _remove_inside(entries: dict[str, Entry], name: str, *inner: str) -> None:
    """Remove one value inside the mapping of a key, if there is one."""
    under = entries.get(name, Entry(None, ""))
    root = node = copy.deepcopy(under.value)
    for part in inner[:-1]:
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict) and node.pop(inner[-1], None) is not None:
        entries[name] = Entry(root, under.where, under.inside)


def remove_excluded(entries: dict[str, Entry], overridden: Mapping[str, str]) -> list[str]:
    """Remove what files set and an override (key -> where) excludes; returns a note for each such override."""
    notes = []
    for name, where in overridden.items():
        if name not in entries or is_off(entries[name].value):
            continue
        losers = [key for key in WINS_OVER.get(name, ()) if key in entries and key not in overridden]
        removed = {key: entries.pop(key) for key in losers}
        if shown := [f"{key} ({entry.where})" for key, entry in removed.items() if not is_off(entry.value)]:
            notes.append(f"{source_of(where)}: {name} wins over {', '.join(shown)}")
    return notes


def is_off(value: Any) -> bool:
    """Whether a value asks for nothing."""
    return value in (None, False, (), {}, "") or (isinstance(value, dict) and value.get("enabled") is False)


def source_of(where: str) -> str:
    """`where` as `NeoXArgs.source` reports it: the text of an override is left out."""
    return next((origin for origin in (COMMAND_LINE, PYTHON_CALL) if where.startswith(f"{origin}:")), where)

"""From config files and overrides to flat, typed values, each with the place where it was written."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from megatron.errors import UserError, nearest
from megatron.neox_arguments import mixture_files, plugin_key
from megatron.neox_arguments.coerce import WrongValue, coerce, thaw
from megatron.neox_arguments.exclusive_keys import SAME_FACT, WINS_OVER
from megatron.neox_arguments.groups import all_keys
from megatron.neox_arguments.keys import Entry, KeyInfo
from megatron.neox_arguments.nested import check_nested
from megatron.neox_arguments.retired import ALIASES, NEVER_DEFAULT, OTHER_VERSIONS, RETIRED
from megatron.neox_arguments.yaml_files import config_path, normalise, parse_value, read_config

COMMAND_LINE = "command line"
PYTHON_CALL = "Python call"

Overrides = Sequence[str] | Mapping[str, Any]
"""`key=value` texts of a command line, or key → value from Python; a key may reach inside (`optimizer.params.lr`)."""


class FlatValues(NamedTuple):
    """Typed values of the keys that were given, where each was written, and notes for the start of the run."""

    values: dict[str, Any]
    sources: dict[str, str]
    notes: tuple[str, ...]


def merge(
    paths: Sequence[str], overrides: Overrides = (), conf_dir: str | None = None, *, stored: bool = False
) -> FlatValues:
    """Merge config files, left to right, and overrides.

    A key in two files is an error unless the values are equal. `stored`: of `read_config`. Raises `UserError` naming
    file and line for everything that is wrong with the files, the keys or the types of the values.
    """
    entries = _merge_files([config_path(path, conf_dir) for path in paths], stored)
    _replace_mixture(entries, conf_dir, mixture_files.read_named)
    overridden: dict[str, str] = {}
    for written, value, where in _split_overrides(overrides):
        _apply_override(entries, written, value, where)
        overridden[normalise(written.split(".")[0])] = where
        if written == "mixture":  # a name, inside of which others may change something
            _replace_mixture(entries, conf_dir, mixture_files.read_named)
    return _check(entries, conf_dir, _remove_excluded(entries, overridden))


def _remove_excluded(entries: dict[str, Entry], overridden: Mapping[str, str]) -> list[str]:
    """Remove what files set and an override (key -> where) excludes; returns a note for each such override."""
    notes = []
    for name, where in overridden.items():
        if name not in entries or _is_off(entries[name].value):
            continue
        losers = [key for key in WINS_OVER.get(name, ()) if key in entries and key not in overridden]
        removed = {key: entries.pop(key) for key in losers}
        if shown := [f"{key} ({entry.where})" for key, entry in removed.items() if not _is_off(entry.value)]:
            notes.append(f"{_source(where)}: {name} wins over {', '.join(shown)}")
    return notes


def merge_values(given: Mapping[str, Any]) -> FlatValues:
    """The same for keys and values that a Python program has, as a config file would hold them."""
    entries: dict[str, Entry] = {}
    for written, value in given.items():
        name = normalise(written)
        if name in entries:
            raise UserError(f"{PYTHON_CALL}: {written}: {name} is already set; keep one of the two")
        entries[name] = Entry(value, f"{PYTHON_CALL}: {written}")
        if name == plugin_key.KEY:
            entries[name] = plugin_key.locate(entries[name], None)
    _replace_mixture(entries, None, mixture_files.read_named)
    return _check(entries, None, [])


def _merge_files(paths: list[str], stored: bool) -> dict[str, Entry]:
    merged: dict[str, Entry] = {}
    read: set[str] = set()
    for path in paths:
        if os.path.realpath(path) in read:
            raise UserError(f"{path}: this config file is given twice")
        read.add(os.path.realpath(path))
        for name, entry in read_config(path, stored=stored).items():
            if name in merged and name == plugin_key.KEY:
                merged[name] = plugin_key.join(merged[name], entry)
            elif name in merged and merged[name].value != entry.value:
                raise UserError(
                    f"{entry.where}: {name} is {entry.value!r} here and {merged[name].value!r} at {merged[name].where};"
                    f" keep one of the two, or put `extends: {os.path.basename(paths[0])}` into the one that should win"
                )
            merged.setdefault(name, entry)
    return merged


def _replace_mixture(
    entries: dict[str, Entry], conf_dir: str | None, read: Callable[[Entry, str | None], Entry]
) -> None:
    """Put what the files of mixtures hold in the place of their names."""
    if "mixture" in entries and entries["mixture"].value is not None:
        entries["mixture"] = read(entries["mixture"], conf_dir)


def _split_overrides(overrides: Overrides) -> list[tuple[str, Any, str]]:
    """(key as written, value, where) of each override."""
    if isinstance(overrides, Mapping):
        return [(key, value, f"{PYTHON_CALL}: {key}={value!r}") for key, value in overrides.items()]
    found = []
    for override in overrides:
        written, equals, text = override.partition("=")
        written, where = written.strip().removeprefix("--"), f"{COMMAND_LINE}: {override}"
        if not equals or not written:
            raise UserError(f"{COMMAND_LINE}: {override!r}: overrides are written key=value")
        try:
            found.append((written, parse_value(text), where))
        except yaml.YAMLError as error:
            raise UserError(f"{where}: the value is not valid YAML: {getattr(error, 'problem', error)}") from error
    return found


def _apply_override(entries: dict[str, Entry], written: str, value: Any, where: str) -> None:
    """Put one value over what the files say; `written` may reach inside (`a.b.c`)."""
    first, *inner = written.split(".")
    name, inner = normalise(first), [part.replace("-", "_") for part in inner]
    if name not in all_keys() and name not in RETIRED:
        raise UserError(f"{where}: {_unknown(name)}")
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


def _unknown(name: str) -> str:
    if name in OTHER_VERSIONS:
        return f"unknown key {name!r}: {OTHER_VERSIONS[name]}"
    known = [name for name, info in all_keys().items() if info.derived is None]
    return f"unknown key {name!r}.{nearest(name, [*known, *RETIRED, *ALIASES])}"


def _check(entries: dict[str, Entry], conf_dir: str | None, notes: list[str]) -> FlatValues:
    """The values in their types; plugins are imported first, because other keys may hold names that they register.
    Adds to `notes` what is to be logged at the start."""
    _replace_mixture(entries, conf_dir, mixture_files.resolve)
    flat = FlatValues({}, {}, ())
    silent: list[str] = []
    if (plugins := entries.get(plugin_key.KEY)) is not None:
        notes += plugin_key.import_plugins(plugins.value, lambda name: plugins.inside.get(name, plugins.where))
        entries[plugin_key.KEY] = Entry(plugins.value, plugins.where)
    _lift_extra_args(entries)
    for name, entry in entries.items():
        if name in RETIRED:
            _note_retired(name, entry, notes, silent)
            continue
        if name not in all_keys():
            raise UserError(f"{entry.where}: {_unknown(name)}")
        flat.values[name] = _coerce(all_keys()[name], entry, notes)
        flat.sources[name] = _source(entry.where)
        flat.sources.update({dotted.replace("-", "_"): _source(where) for dotted, where in entry.inside.items()})
    if silent:
        notes.append(f"these keys have no effect and are at GPT-NeoX's defaults: {', '.join(silent)}")
    return flat._replace(notes=tuple(notes))


def _lift_extra_args(entries: dict[str, Entry]) -> None:
    """Keys inside deepspeed_extra_args that are keys of their own are moved out, unless they are set there too."""
    extra = entries.get("deepspeed_extra_args")
    if extra is None or not isinstance(extra.value, dict):
        return
    left = {}
    for written, value in extra.value.items():
        name = normalise(str(written))
        if name not in all_keys():
            left[written] = value
            continue
        where = extra.inside.get(f"deepspeed_extra_args.{written}", extra.where)
        own = entries.setdefault(name, Entry(value, where))
        if own.value != value:
            raise UserError(f"{where}: {written} is set at {own.where} too; keep one of the two")
    entries["deepspeed_extra_args"] = Entry(left, extra.where, extra.inside)


def _source(where: str) -> str:
    """`where` as `NeoXArgs.source` reports it: the text of an override is left out."""
    return next((origin for origin in (COMMAND_LINE, PYTHON_CALL) if where.startswith(f"{origin}:")), where)


def _coerce(info: KeyInfo, entry: Entry, notes: list[str]) -> Any:
    """The value in the type of its key. Raises `UserError` also for what is known but not available."""
    try:
        value = coerce(entry.value, info)
    except WrongValue as error:
        raise UserError(f"{entry.where}: {info.name}: {error}") from error
    if isinstance(value, dict):
        value = thaw(check_nested(info.name, value, lambda dotted: entry.inside.get(dotted, entry.where), notes.append))
    if isinstance(info.unavailable, dict):
        if (advice := info.refusal(value)) is not None:
            raise UserError(f"{entry.where}: {info.name}: {value} is not available: {advice}")
    elif info.unavailable is not None and value != info.default and not _is_off(value):
        raise UserError(f"{entry.where}: {info.name} is not available: {info.unavailable}")
    return value


def _is_off(value: Any) -> bool:
    return value in (None, False, (), {}, "") or (isinstance(value, dict) and value.get("enabled") is False)


def _note_retired(name: str, entry: Entry, notes: list[str], silent: list[str]) -> None:
    retired = RETIRED[name]
    if retired.default is not NEVER_DEFAULT and (entry.value == retired.default or entry.value is None):
        silent.append(name)
    else:
        notes.append(f"{entry.where}: {name} has no effect: {retired.instead}")

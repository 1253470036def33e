"""Read and merge config files and command-line overrides into a `NeoXArgs`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from megatron.errors import UserError, nearest
from megatron.neox_arguments import mixture_files, plugin_key
from megatron.neox_arguments.arguments import NeoXArgs, all_keys
from megatron.neox_arguments.coerce import WrongValue, coerce, thaw
from megatron.neox_arguments.keys import KeyInfo
from megatron.neox_arguments.nested import check_nested
from megatron.neox_arguments.retired import ALIASES, NEVER_DEFAULT, OTHER_VERSIONS, RETIRED
from megatron.neox_arguments.yaml_files import Entry, config_path, joined_plugins, normalise, read_config

COMMAND_LINE = "command line"

_SAME_FACT = {
    "lr": "optimizer.params.lr",
    "optimizer_type": "optimizer.type",
    "zero_stage": "zero_optimization.stage",
}
"""Flat keys and the place inside a mapping that says the same; an override of one silences the other."""


def load(paths: Sequence[str], overrides: Sequence[str] = (), conf_dir: str | None = None) -> NeoXArgs:
    """Merge config files, left to right, and `key=value` overrides. The result still has to go through `derive`.

    A key in two files is an error unless the values are equal. Raises `UserError` naming file and line for everything
    that is wrong with the files, the keys or the types of the values.
    """
    entries = _merge([config_path(path, conf_dir) for path in paths])
    _in_mixture(entries, conf_dir, mixture_files.read_named)
    for override in overrides:
        _apply_override(entries, override)
        if override.startswith(("mixture=", "--mixture=")):  # a name, inside of which others may change something
            _in_mixture(entries, conf_dir, mixture_files.read_named)
    _in_mixture(entries, conf_dir, mixture_files.resolve)
    return _build(entries)


def _in_mixture(entries: dict[str, Entry], conf_dir: str | None, read: Callable[[Entry, str | None], Entry]) -> None:
    """Put what the files of mixtures hold in the place of their names."""
    if "mixture" in entries and entries["mixture"].value is not None:
        entries["mixture"] = read(entries["mixture"], conf_dir)


def _merge(paths: list[str]) -> dict[str, Entry]:
    merged: dict[str, Entry] = {}
    read: set[str] = set()
    for path in paths:
        if os.path.realpath(path) in read:
            raise UserError(f"{path}: this config file is given twice")
        read.add(os.path.realpath(path))
        for name, entry in read_config(path).items():
            if name in merged and name == plugin_key.KEY:
                merged[name] = joined_plugins(merged[name], entry)
            elif name in merged and merged[name].value != entry.value:
                raise UserError(
                    f"{entry.where}: {name} is {entry.value!r} here and {merged[name].value!r} at {merged[name].where};"
                    f" keep one of the two, or put `extends: {os.path.basename(paths[0])}` into the one that should win"
                )
            merged.setdefault(name, entry)
    return merged


def _apply_override(entries: dict[str, Entry], override: str) -> None:
    """Put one `key=value` (or `--key=value`, `a.b.c=value`) over what the files say."""
    written, equals, text = override.partition("=")
    written = written.strip().removeprefix("--")
    if not equals or not written:
        raise UserError(f"{COMMAND_LINE}: {override!r}: overrides are written key=value")
    first, *inner = written.split(".")
    name = normalise(first)
    where = f"{COMMAND_LINE}: {override}"
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{where}: the value is not valid YAML: {getattr(error, 'problem', error)}") from error
    if name not in all_keys() and name not in RETIRED:
        raise UserError(f"{where}: {_unknown(name)}")
    if not inner and name == plugin_key.KEY:
        entries[name] = Entry(*plugin_key.located(value, where, None, {}))
    elif not inner:
        entries[name] = Entry(value, where, {})
    if not inner:
        _silence(entries, name)
        return
    inner = [part.replace("-", "_") for part in inner]
    if name == plugin_key.KEY:
        raise UserError(f"{where}: write the whole list: plugins=[my_module,path/to/file.py]")
    under = entries.get(name, Entry({}, where, {}))
    if under.value is not None and not isinstance(under.value, dict):
        raise UserError(f"{where}: {name} is not a mapping")
    dotted = ".".join([name, *inner])
    inside = {**under.inside, dotted: where}
    entries[name] = Entry(_with_inner(under.value or {}, inner, value, where), under.where, inside)
    for flat, place in _SAME_FACT.items():
        if place == dotted:
            entries.pop(flat, None)
    if dotted in ("fp16.enabled", "bf16.enabled"):
        entries.pop("precision", None)


def _silence(entries: dict[str, Entry], name: str) -> None:
    """An override of `name` wins over the mappings that say the same thing."""
    if name == "precision":
        for other in ("fp16", "bf16"):
            under = entries.get(other)
            if under is not None and isinstance(under.value, dict):
                kept = {inner: value for inner, value in under.value.items() if inner not in ("enabled", "type")}
                entries[other] = Entry(kept, under.where, under.inside)
    if name in _SAME_FACT:
        first, *inner = _SAME_FACT[name].split(".")
        under = entries.get(first)
        if under is not None and isinstance(under.value, dict):
            entries[first] = Entry(_without_inner(under.value, inner), under.where, under.inside)


def _with_inner(mapping: dict[str, Any], inner: list[str], value: Any, where: str) -> dict[str, Any]:
    changed = dict(mapping)
    if len(inner) == 1:
        changed[inner[0]] = value
        return changed
    below = changed.get(inner[0]) or {}
    if not isinstance(below, dict):
        raise UserError(f"{where}: {inner[0]} is not a mapping")
    changed[inner[0]] = _with_inner(below, inner[1:], value, where)
    return changed


def _without_inner(mapping: dict[str, Any], inner: list[str]) -> dict[str, Any]:
    changed = dict(mapping)
    if len(inner) == 1:
        changed.pop(inner[0], None)
    elif isinstance(changed.get(inner[0]), dict):
        changed[inner[0]] = _without_inner(changed[inner[0]], inner[1:])
    return changed


def _unknown(name: str) -> str:
    if name in OTHER_VERSIONS:
        return f"unknown key {name!r}: {OTHER_VERSIONS[name]}"
    known = [name for name, info in all_keys().items() if info.derived is None]
    return f"unknown key {name!r}.{nearest(name, [*known, *RETIRED, *ALIASES])}"


def _build(entries: dict[str, Entry]) -> NeoXArgs:
    keys = all_keys()
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    notes: list[str] = []
    silent: list[str] = []
    if plugin_key.KEY in entries:  # first: other keys may hold names that they register
        entries[plugin_key.KEY] = _import_plugins(entries[plugin_key.KEY], notes)
    _lift_extra_args(entries)
    for name, entry in entries.items():
        if name in RETIRED:
            _note_retired(name, entry, notes, silent)
            continue
        if name not in keys:
            raise UserError(f"{entry.where}: {_unknown(name)}")
        values[name] = _value(keys[name], entry, notes)
        sources[name] = _source(entry.where)
        for dotted, where in entry.inside.items():
            sources[dotted.replace("-", "_")] = _source(where)
    if silent:
        notes.append(f"these keys have no effect and are at GPT-NeoX's defaults: {', '.join(silent)}")
    return NeoXArgs.from_values(values, sources, tuple(notes))


def _import_plugins(entry: Entry, notes: list[str]) -> Entry:
    notes += plugin_key.import_plugins(entry.value, lambda name: entry.inside.get(name, entry.where))
    return Entry(entry.value, entry.where, {})


def _lift_extra_args(entries: dict[str, Entry]) -> None:
    """Keys inside deepspeed_extra_args that are keys of their own are moved out, unless they are set there too."""
    extra = entries.get("deepspeed_extra_args")
    if extra is None or not isinstance(extra.value, dict):
        return
    left = {}
    for name, value in extra.value.items():
        if normalise(str(name)) not in all_keys():
            left[name] = value
            continue
        where = extra.inside.get(f"deepspeed_extra_args.{name}", extra.where)
        own = entries.get(normalise(str(name)))
        if own is not None and own.value != value:
            raise UserError(f"{where}: {name} is set at {own.where} too; keep one of the two")
        entries[normalise(str(name))] = Entry(value, where, {})
    entries["deepspeed_extra_args"] = Entry(left, extra.where, extra.inside)


def _source(where: str) -> str:
    return COMMAND_LINE if where.startswith(COMMAND_LINE) else where


def _value(info: KeyInfo, entry: Entry, notes: list[str]) -> Any:
    try:
        value = coerce(entry.value, info)
    except WrongValue as error:
        raise UserError(f"{entry.where}: {info.name}: {error}") from error
    if isinstance(value, dict):

        def where(dotted: str) -> str:
            return entry.inside.get(dotted, entry.where)

        value = thaw(check_nested(info.name, value, where, notes.append))
    _check_available(info, value, entry.where)
    return value


def _check_available(info: KeyInfo, value: Any, where: str) -> None:
    """Refuse keys and values of the class 'known, not available', naming the alternative."""
    if isinstance(info.unavailable, dict):
        if (advice := info.refusal(value)) is not None:
            raise UserError(f"{where}: {info.name}: {value} is not available: {advice}")
    elif info.unavailable is not None and value != info.default and not _switched_off(value) and not info.brought:
        raise UserError(f"{where}: {info.name} is not available: {info.unavailable}")


def _switched_off(value: Any) -> bool:
    return value in (None, False, (), {}, "") or (isinstance(value, dict) and value.get("enabled") is False)


def _note_retired(name: str, entry: Entry, notes: list[str], silent: list[str]) -> None:
    retired = RETIRED[name]
    if retired.default is not NEVER_DEFAULT and (entry.value == retired.default or entry.value is None):
        silent.append(name)
    else:
        notes.append(f"{entry.where}: {name} has no effect: {retired.instead}")

"""From config files and overrides to flat, typed values, each with the place where it was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.errors import UserError
from megatron.neox_arguments import mixture_files, plugin_key
from megatron.neox_arguments.bucket_places import tell_no_copies, to_local_places
from megatron.neox_arguments.coerce import WrongValue, coerce, thaw
from megatron.neox_arguments.groups import all_keys, describe_unknown
from megatron.neox_arguments.keys import Entry, KeyInfo
from megatron.neox_arguments.nested import check_nested
from megatron.neox_arguments.overrides import (
    PYTHON_CALL,
    Overrides,
    apply_override,
    is_off,
    remove_excluded,
    source_of,
    split_overrides,
)
from megatron.neox_arguments.problems import Problems, collector
from megatron.neox_arguments.retired import NEVER_DEFAULT, RETIRED
from megatron.neox_arguments.yaml_files import config_path, normalise, read_config
from megatron.secrets import find_secrets


class FlatValues(NamedTuple):
    """Typed values of the keys that were given, where each was written, and notes for the start of the run."""

    values: dict[str, Any]
    sources: dict[str, str]
    notes: tuple[str, ...]


def merge(
    paths: Sequence[str],
    overrides: Overrides = (),
    conf_dir: str | None = None,
    *,
    stored: bool = False,
    problems: Problems | None = None,
) -> FlatValues:
    """Merge config files, left to right, and overrides.

    A key in two files is an error unless the values are equal. `stored`: of `read_config`. Raises one `UserError`
    naming file and line for everything that is wrong with the files, the keys or the types of the values. With
    `problems` it is added to that, and the keys are left out; only files that cannot be read are an error still.
    """
    with collector(problems) as found:
        entries, all_read = _merge_files(paths, conf_dir, stored, found)
        _replace_mixture(entries, conf_dir, mixture_files.read_named, found)
        overridden: dict[str, str] = {}
        saved = entries.get("save")
        for written, value, where in split_overrides(overrides, found):
            name = normalise(written.split(".")[0])
            overridden[name] = where
            if found.usable(name) and _is_known(name, where, entries, found):
                with found.collect(name):
                    apply_override(entries, written, value, where)
            if written == "mixture":  # a name, inside of which others may change something
                _replace_mixture(entries, conf_dir, mixture_files.read_named, found)
        notes = [*remove_excluded(entries, overridden), *tell_no_copies(saved, entries)]
        flat = _check(entries, conf_dir, notes, found)
        if not all_read:
            found.raise_all()  # nobody knows what else is set
        return flat


def merge_values(given: Mapping[str, Any], problems: Problems | None = None) -> FlatValues:
    """The same for keys and values that a Python program has, as a config file would hold them."""
    entries: dict[str, Entry] = {}
    with collector(problems) as found:
        for written, value in given.items():
            name, where = normalise(written), f"{PYTHON_CALL}: {written}"
            for secret in find_secrets(f"{written}={value!r}"):
                raise UserError(secret.refusal(where))
            if name in entries:
                found.add(f"{where}: {name} is already set; keep one of the two", name)
                continue
            entries[name] = Entry(value, where)
            if name == plugin_key.KEY:
                entries[name] = plugin_key.locate(entries[name], None)
        _replace_mixture(entries, None, mixture_files.read_named, found)
        return _check(entries, None, [], found)


def _merge_files(
    paths: Sequence[str], conf_dir: str | None, stored: bool, found: Problems
) -> tuple[dict[str, Entry], bool]:
    """The entries of all files, and whether every file could be read."""
    merged: dict[str, Entry] = {}
    read: set[str] = set()
    all_read = True
    for name in paths:
        try:
            path = config_path(name, conf_dir)
            entries = read_config(path, stored=stored, problems=found)
        except UserError as problem:
            found.add(problem)
            all_read = False
            continue
        if os.path.realpath(path) in read:
            found.add(f"{path}: this config file is given twice")
        read.add(os.path.realpath(path))
        for key, entry in entries.items():
            if key in merged and key == plugin_key.KEY:
                merged[key] = plugin_key.join(merged[key], entry)
            elif key in merged and merged[key].value != entry.value:
                found.add(
                    f"{entry.where}: {key} is {entry.value!r} here and {merged[key].value!r} at {merged[key].where};"
                    f" keep one of the two, or put `extends: {os.path.basename(paths[0])}` into the one that is to win",
                    key,
                )
            merged.setdefault(key, entry)
    return merged, all_read


def _replace_mixture(
    entries: dict[str, Entry], conf_dir: str | None, read: Callable[[Entry, str | None], Entry], found: Problems
) -> None:
    """Put what the files of mixtures hold in the place of their names."""
    if "mixture" in entries and entries["mixture"].value is not None and found.usable("mixture"):
        with found.collect("mixture"):
            entries["mixture"] = read(entries["mixture"], conf_dir)


def _is_known(name: str, where: str, entries: Mapping[str, Entry], found: Problems) -> bool:
    """Whether there is a key of this name; if not, that is also why the key that was meant is not set."""
    if name in all_keys() or name in RETIRED:
        return True
    problem, meant = describe_unknown(name)
    found.add(f"{where}: {problem}", *({meant} - entries.keys() - {None}))
    return False


def _check(entries: dict[str, Entry], conf_dir: str | None, notes: list[str], found: Problems) -> FlatValues:
    """The values in their types; plugins are imported first, because other keys may hold names that they register.
    Adds to `notes` what is to be logged at the start, and to `found` what is wrong."""
    _replace_mixture(entries, conf_dir, mixture_files.resolve, found)
    flat = FlatValues({}, {}, ())
    silent: list[str] = []
    refused: dict[str, dict[str, str]] = {}
    if (plugins := entries.get(plugin_key.KEY)) is not None:
        notes += plugin_key.import_plugins(plugins.value, lambda name: plugins.inside.get(name, plugins.where))
        entries[plugin_key.KEY] = Entry(plugins.value, plugins.where)
    _lift_extra_args(entries, found)
    for name, entry in entries.items():
        if name in RETIRED:
            _note_retired(name, entry, notes, silent)
            continue
        if not found.usable(name) or not _is_known(name, entry.where, entries, found):
            continue
        with found.collect(name):
            value = _coerce(all_keys()[name], entry, notes, found)
            if (refusal := _refusal(all_keys()[name], value)) is None:
                flat.values[name] = value
            else:
                shown, advice = refusal
                refused.setdefault(advice, {})[shown] = entry.where
        flat.sources[name] = source_of(entry.where)
        flat.sources.update({dotted.replace("-", "_"): source_of(where) for dotted, where in entry.inside.items()})
    for advice, asked in refused.items():
        (first, where), *others = asked.items()
        file, _, line = where.rpartition(":")
        here = f"{file}:" if line.isdigit() else where
        also = "".join(f", {shown} ({place.replace(here, 'line ')})" for shown, place in others)
        are = f"{first}{also} {'are' if others else 'is'}"
        found.add(f"{where}: {are} not available: {advice}", *(shown.partition(":")[0] for shown in asked))
    notes += to_local_places(flat.values, flat.sources, found)
    if silent:
        notes.append(f"these keys have no effect and are at GPT-NeoX's defaults: {', '.join(silent)}")
    return flat._replace(notes=tuple(notes))


def _lift_extra_args(entries: dict[str, Entry], found: Problems) -> None:
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
            found.add(f"{where}: {written} is set at {own.where} too; keep one of the two", name)
    entries["deepspeed_extra_args"] = Entry(left, extra.where, extra.inside)


def _coerce(info: KeyInfo, entry: Entry, notes: list[str], found: Problems) -> Any:
    """The value in the type of its key. Raises `UserError`, or adds what is wrong inside a mapping to `found`."""
    try:
        value = coerce(entry.value, info)
    except WrongValue as error:
        raise UserError(f"{entry.where}: {info.name}: {error}") from error
    if isinstance(value, dict):
        places = lambda dotted: entry.inside.get(dotted, entry.where)  # noqa: E731
        value = thaw(check_nested(info.name, value, places, notes.append, found))
    return value


def _refusal(info: KeyInfo, value: Any) -> tuple[str, str] | None:
    """(what is known but not available, what to do instead), of a key or its value; None when it can be used."""
    if (advice := info.refusal(value)) is not None:
        return f"{info.name}: {value}", advice
    if not isinstance(info.unavailable, str) or value == info.default or is_off(value):
        return None
    return info.name, info.unavailable


def _note_retired(name: str, entry: Entry, notes: list[str], silent: list[str]) -> None:
    retired = RETIRED[name]
    if retired.default is not NEVER_DEFAULT and (entry.value == retired.default or entry.value is None):
        silent.append(name)
    else:
        notes.append(f"{entry.where}: {name} has no effect: {retired.instead}")

"""`mixture: name` and `mixture: {interpolate: {name: share}}` in a config, replaced by what the named files hold.

A mixture file is a config file with the one key `mixture`, so it can as well be merged or extended as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megatron.errors import UserError
from megatron.home import HOME
from megatron.neox_arguments.coerce import WrongValue, coerce_type, describe
from megatron.neox_arguments.keys import Entry
from megatron.neox_arguments.mixtures import MixtureFault, NamedMixture, interpolate, parse
from megatron.neox_arguments.yaml_files import read_config

_SUFFIXES = (".yml", ".yaml", ".json")
_SHIPPED = os.path.join("configs", "mixtures")


def read_named(entry: Entry, conf_dir: str | None = None) -> Entry:
    """An entry whose value is the name of a mixture file, as the entry in that file; others unchanged.

    Sources and sets are written out as mappings, so that an override can reach into each. Raises `UserError`.
    """
    if isinstance(entry.value, str):
        entry = _read(entry.value, entry.where, conf_dir, ())
    if not isinstance(entry.value, Mapping) or "interpolate" in entry.value:
        return entry
    return Entry(parse_entry(entry).to_value(), entry.where, entry.inside)


def resolve(entry: Entry, conf_dir: str | None = None) -> Entry:
    """An entry with `interpolate`, as the mixture that results; others unchanged."""
    return _resolve(entry, conf_dir, ())


def _read(name: str, where: str, conf_dir: str | None, below: tuple[str, ...]) -> Entry:
    path = find_mixture(name, where, conf_dir)
    if os.path.realpath(path) in below:
        raise UserError(f"{where}: {name} leads back to itself")
    entries = read_config(path)
    others = [key for key in entries if key != "mixture"]
    if others or "mixture" not in entries:
        raise UserError(f"{path}: a mixture file has the one key `mixture`; there is {', '.join(others) or 'none'}")
    below = (*below, os.path.realpath(path))
    entry = entries["mixture"]
    if isinstance(entry.value, str):
        return _read(entry.value, entry.where, conf_dir, below)
    return _resolve(entry, conf_dir, below)


def _resolve(entry: Entry, conf_dir: str | None, below: tuple[str, ...]) -> Entry:
    if not isinstance(entry.value, Mapping) or "interpolate" not in entry.value:
        return entry
    where = entry.inside.get("mixture.interpolate", entry.where)
    shares = entry.value["interpolate"]
    if len(entry.value) > 1:
        others = [str(key) for key in entry.value if key != "interpolate"]
        raise UserError(f"{where}: mixture: interpolate is used alone; remove {', '.join(others)}")
    if not isinstance(shares, Mapping) or not shares:
        raise UserError(f"{where}: mixture.interpolate: expected {{mixture: share}}, got {describe(shares)}")
    parts = []
    for name, share in shares.items():
        try:
            number = coerce_type(share, float)
        except WrongValue as error:
            raise UserError(f"{where}: mixture.interpolate.{name}: {error}") from error
        parts.append((parse_entry(_read(str(name), where, conf_dir, below)), number))
    try:
        return Entry(interpolate(parts).to_value(), where, {})
    except MixtureFault as fault:
        raise UserError(f"{where}: mixture.interpolate: {fault}") from fault


def parse_entry(entry: Entry) -> NamedMixture:
    """The mixture of an entry. Raises `UserError` naming file and line."""
    try:
        return parse(entry.value)
    except MixtureFault as fault:
        raise UserError(fault_at(fault, entry.inside, entry.where)) from fault


def fault_at(fault: MixtureFault, inside: Mapping[str, Any], where: str) -> str:
    """The message for a fault, with the line of the innermost key that is known."""
    dotted = f"mixture.{fault.place}" if fault.place else "mixture"
    place = dotted
    while place and place not in inside:
        place = place.rpartition(".")[0]
    return f"{inside.get(place, where)}: {dotted}: {fault}"


def find_mixture(name: str, where: str, conf_dir: str | None) -> str:
    """The file of a mixture: next to the file that names it, in `mixtures` there, or among those that are shipped."""
    folder = os.path.dirname(where.rpartition(":")[0]) if ".y" in where or ".json" in where else ""
    folders = [folder, conf_dir or "", ""]
    tried = []
    for folder in [
        *folders,
        *(os.path.join(folder, "mixtures") for folder in folders),
        _SHIPPED,
        str(HOME / _SHIPPED),
    ]:
        for suffix in ("",) if name.endswith(_SUFFIXES) else _SUFFIXES:
            path = os.path.join(folder, name + suffix)
            if os.path.isfile(path):
                return path
            tried.append(path)
    shown = ", ".join(dict.fromkeys(path for path in tried if path.endswith((".yml", name))))
    raise UserError(f"{where}: mixture: there is no file for {name!r}; looked for {shown}")

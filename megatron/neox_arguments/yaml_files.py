"""Read config files: YAML (or JSON) with the line of every key, duplicates refused, `extends` resolved."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import yaml

from megatron.errors import UserError
from megatron.neox_arguments import plugin_key
from megatron.neox_arguments.keys import Entry
from megatron.neox_arguments.problems import Problems, collector
from megatron.neox_arguments.retired import ALIASES
from megatron.secrets import find_secrets

_MOST_VALUES = 100_000  # that aliases may expand a text to
_DEEPEST = 100


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader, whose errors are all YAML errors with a line: `!!float x` is a ValueError of Python's."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if type(value) is int and value.bit_length() > 1024:
                raise OverflowError("larger than any floating-point number; Python would not even print it")
            return value
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            what = f"{str(node.value)[:40]!r} is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from error


_SUFFIXES = (".yml", ".yaml", ".json")
# In a value: the folder of the file that it is written in, so that a folder with a config can be moved.
CONFIG_DIR = "${CONFIG_DIR}"


def config_path(name: str, conf_dir: str | None) -> str:
    """`name` inside `conf_dir`, with `.yml` added when it has none of .yml, .yaml and .json. Must exist."""
    path = os.path.join(conf_dir, name) if conf_dir else name
    if not path.endswith(_SUFFIXES):
        path += ".yml"
    if not os.path.isfile(path):
        folder = os.path.dirname(path) or "."
        near = sorted(file for file in os.listdir(folder) if file.endswith(_SUFFIXES)) if os.path.isdir(folder) else []
        there = f" In {folder} there are: {', '.join(near)}." if near else ""
        raise UserError(f"{path}: there is no such config file.{there}")
    return path


def normalise(name: str) -> str:
    """The one name of a top-level key: `-` is `_`, aliases are resolved."""
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


def read_config(
    path: str, _below: tuple[str, ...] = (), *, stored: bool = False, problems: Problems | None = None
) -> dict[str, Entry]:
    """Top-level keys of one file, over those of the files that it extends. Raises `UserError` naming file and line.

    `stored`: a checkpoint brought the file: it may name plugins that the user has named, and no other files.
    `problems`: takes keys that are there twice, which keep their first value.
    """
    with collector(problems) as found:
        return _read_extending(path, _below, stored, found)


def _read_extending(path: str, _below: tuple[str, ...], stored: bool, found: Problems) -> dict[str, Entry]:
    if os.path.realpath(path) in _below:
        raise UserError(f"{path}: the files that it extends lead back to itself")
    entries = read_entries(path, found)
    if stored:
        _refuse_other_files(entries, path)
    if (plugins := entries.get(plugin_key.KEY)) is not None:
        folder = os.path.dirname(os.path.abspath(path))
        entries[plugin_key.KEY] = plugin_key.take_loaded(plugins) if stored else plugin_key.locate(plugins, folder)
    extends = entries.pop("extends", Entry([], path))
    merged: dict[str, Entry] = {}
    for base in extends.value if isinstance(extends.value, list) else [extends.value]:
        if not isinstance(base, str):
            raise UserError(f"{extends.where}: extends: expected the name of a file, got {base!r}")
        folder = None if os.path.isabs(base) else os.path.dirname(path) or None
        inherit(merged, _read_extending(config_path(base, folder), (*_below, os.path.realpath(path)), False, found))
    inherit(merged, entries)
    return merged


def _refuse_other_files(entries: dict[str, Entry], path: str) -> None:
    """Raise `UserError` when a config of a checkpoint would be completed from files that it names."""
    for key in ("extends", "mixture"):
        value = entries[key].value if key in entries else None
        if isinstance(value, (str, list)) or (isinstance(value, dict) and "interpolate" in value):
            raise UserError(
                f"{entries[key].where}: {key} names other files, which are not read only because a checkpoint says so; "
                f"if you trust it, give --config_file {path}"
            )


def inherit(base: dict[str, Entry], child: dict[str, Entry]) -> None:
    """Put `child` over `base`: its values win; mappings are merged, so that a child can change one inner value."""
    for name, entry in child.items():
        under = base.get(name)
        if under is not None and name == plugin_key.KEY:
            entry = plugin_key.join(under, entry)
        elif under is not None and isinstance(under.value, dict) and isinstance(entry.value, dict):
            entry = Entry(_deep_merge(under.value, entry.value), entry.where, under.inside | entry.inside)
        base[name] = entry


def _deep_merge(base: Any, child: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(child, dict):
        return child
    return base | {name: _deep_merge(base.get(name), value) for name, value in child.items()}


def read_entries(path: str, found: Problems) -> dict[str, Entry]:
    """The top-level keys of this file alone, with their lines and those inside; `found` takes what is there twice."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    for secret in find_secrets(text):  # in a comment too: checkpoints get the file as it is
        raise UserError(secret.refusal(f"{path}:{secret.line}"))
    if path.endswith(".json"):
        text = text.replace("\t", "    ")  # JSON may be indented with tabs, YAML not
    try:
        with _compose(text) as (root, loader):
            if root is None:
                return {}
            if not isinstance(root, yaml.MappingNode):
                raise UserError(f"{path}:{root.start_mark.line + 1}: expected a mapping of keys to values")
            return _entries(root, path, loader, found)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise UserError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error


def parse_value(text: str) -> Any:
    """The value of a YAML text. Raises `yaml.YAMLError` with a `problem` for everything that is wrong with it."""
    with _compose(text) as (root, loader):
        return None if root is None else loader.construct_document(root)


@contextlib.contextmanager
def _compose(text: str) -> Iterator[tuple[yaml.Node | None, Any]]:
    """The nodes of a text, checked to be a tree of bounded size, and the loader that makes values of them."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is not None:
            _measure(root, {})
        yield root, loader
    except RecursionError as error:
        raise yaml.MarkedYAMLError(problem="it is nested too deeply") from error
    finally:
        loader.dispose()


def _measure(node: yaml.Node, seen: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """(values in a node once its aliases are expanded, their depth). `seen` holds the same of the nodes looked at, by
    id, so that each is looked at once; None: `node` is inside it. Raises `yaml.YAMLError` for what is too much."""
    if id(node) not in seen:
        seen[id(node)] = None
        parts = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        measured = [_measure(part, seen) for part in parts]
        size, depth = 1 + sum(one for one, _ in measured), 1 + max((one for _, one in measured), default=0)
        if size > max(_MOST_VALUES, len(seen)):
            raise _wrong(node, f"its aliases expand {len(seen)} values to {size}")
        if depth > _DEEPEST:
            raise _wrong(node, f"it is nested more than {_DEEPEST} deep")
        seen[id(node)] = size, depth
    found = seen[id(node)]
    if found is None:
        raise _wrong(node, "the value contains itself")
    return found


def _wrong(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _entries(root: yaml.MappingNode, path: str, loader: Any, found: Problems) -> dict[str, Entry]:
    folder = os.path.dirname(os.path.abspath(path))
    entries: dict[str, Entry] = {}
    for key_node, value_node in root.value:
        where = _line(key_node, path)
        if not isinstance(key_node, yaml.ScalarNode):
            found.add(f"{where}: a key must be a single word")
            continue
        written = str(key_node.value)
        name = normalise(written)
        inside: dict[str, str] = {}
        _check_inside(value_node, name, path, inside, found)
        if name in entries:
            other = "" if name == written else f" (as {written!r})"
            found.add(f"{where}: {name}{other} is already set at {entries[name].where}; keep one of the two", name)
            continue
        value = _with_folder(loader.construct_object(value_node, deep=True), folder)
        entries[name] = Entry(value, where, inside)
        if name == plugin_key.KEY:
            items = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            entries[name] = Entry(value, where, {str(item.value): _line(item, path) for item in items})
    return entries


def _line(node: yaml.Node, path: str) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _with_folder(value: Any, folder: str) -> Any:
    """`value` with `folder` in the place of `CONFIG_DIR`."""
    if isinstance(value, str):
        return value.replace(CONFIG_DIR, folder)
    if isinstance(value, list):
        return [_with_folder(item, folder) for item in value]
    if isinstance(value, dict):
        return {key: _with_folder(item, folder) for key, item in value.items()}
    return value


def _check_inside(node: yaml.Node, prefix: str, path: str, lines: dict[str, str], found: Problems) -> None:
    """Record the lines of the keys inside a mapping, and report a key that is there twice."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_inside(item, prefix, path, {}, found)
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        name = f"{prefix}.{key_node.value}"
        where = _line(key_node, path)
        if name in lines:
            found.add(f"{where}: {name} is already set at {lines[name]}; keep one of the two", prefix.split(".")[0])
        lines[name] = where
        _check_inside(value_node, name, path, lines, found)

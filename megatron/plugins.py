"""Code of the user's own that registers names: the `plugins` key of a configuration.

A plugin is a Python module or file. It is imported once in every process that reads a configuration of the user's which
names it (launcher, ranks, tools), at that moment: before the other keys are checked, because they may hold names that
the plugin registers. A plugin is code and runs with all rights of the user: a configuration that only a checkpoint
holds imports nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from megatron.errors import UserError
from megatron.registry import ADDITIONS, Addition, withdraw


@dataclass(frozen=True)
class Plugin:
    """A plugin that was imported.

    Attributes:
        name: as in the resolved configuration: a module's name, or the absolute path of a file.
        folder: for a package its folder, else None: registrations from there count as its own.
        file: the file that was imported.
        sha256: of its source (of all Python files of a package).
    """

    name: str
    file: str
    folder: str | None
    sha256: str
    _own: tuple[Addition, ...]

    @property
    def registered(self) -> list[Addition]:
        """What it registered, or a module of it that was imported earlier."""
        inside = [
            addition
            for addition in ADDITIONS
            if addition not in self._own and _belongs(addition.place.rpartition(":")[0], self.file, self.folder)
        ]
        return [*self._own, *inside]


_LOADED: dict[str, Plugin] = {}
"""By the real path of the file, so that a module and its file are one plugin."""


def is_file(name: str) -> bool:
    """Whether an item of `plugins` is meant as a file, not as a module."""
    return name.endswith(".py") or "/" in name or os.sep in name


def absolute(name: str, folders: Iterable[str], where: str) -> str:
    """An item of `plugins` as it is resolved: a file as an absolute path, searched in `folders`; a module as it is.

    Raises `UserError` naming `where` it was written and where it was looked for.
    """
    if not name.strip():
        raise UserError(f"{where}: plugins: an empty name; write a module's name or path/to/file.py")
    if not is_file(name):
        return name
    expanded = os.path.expanduser(name)
    tried = list(dict.fromkeys(os.path.abspath(os.path.join(folder, expanded)) for folder in folders))
    for path in tried:
        if os.path.isfile(path):
            return path
    raise UserError(f"{where}: plugins: there is no file {name}; looked for {' and '.join(tried)}")


def load_plugins(names: Sequence[str], where: Callable[[str], str]) -> list[Plugin]:
    """Import the plugins that are not imported yet. `where(name)`: the place where a configuration names it.

    Raises `UserError` when one is not found or fails; its registrations are removed.
    """
    return [_load(name, where(name)) for name in names]


def find_loaded(names: Iterable[str]) -> list[Plugin]:
    """The plugins of these names that were imported, without repetition."""
    found = {id(plugin): plugin for name in names if (plugin := _LOADED.get(_key(name))) is not None}
    return list(found.values())


def find_moved(name: str) -> Plugin | None:
    """The plugin of this name that was imported, or one whose name differs in the folder or package alone."""
    exact = _LOADED.get(_key(name))
    return exact or next((plugin for plugin in _LOADED.values() if _stem(plugin.name) == _stem(name)), None)


def sources(names: Iterable[str]) -> dict[str, str]:
    """Name -> SHA-256 of the source of each of these plugins that was imported."""
    return {plugin.name: plugin.sha256 for plugin in find_loaded(names)}


def source_changes(before: Mapping[str, str] | None, now: Mapping[str, str] | None) -> list[str]:
    """What differs between the plugins of a checkpoint and of this run (`sources` of both), one line each.

    A file that moved is the same plugin.
    """
    before, now = _by_stem(before or {}), _by_stem(now or {})
    lines = [f"plugin {name} is new" for stem, (name, _) in now.items() if stem not in before]
    for stem, (name, digest) in before.items():
        if stem not in now:
            lines.append(f"plugin {name} was loaded in the checkpoint's run, not in this one")
        elif now[stem][1] != digest:
            lines.append(f"plugin {now[stem][0]} has another source (sha256 {digest[:12]}, now {now[stem][1][:12]})")
    return lines


def _stem(name: str) -> str:
    """The name of a plugin without its folder or package."""
    return Path(name).stem if is_file(name) else name.rpartition(".")[2]


def _by_stem(digests: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {_stem(name): (name, digest) for name, digest in digests.items()}


def _key(name: str) -> str:
    if is_file(name):
        return os.path.realpath(name)
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    return os.path.realpath(file) if file else name


def _load(name: str, where: str) -> Plugin:
    if (known := _LOADED.get(_key(name))) is not None:
        return known
    file = name if is_file(name) else _find_module(name, where)
    if not os.path.isfile(file):
        raise UserError(f"{where}: plugins: there is no file {file} on this machine")
    if (known := _LOADED.get(os.path.realpath(file))) is not None:
        return known
    before, modules = len(ADDITIONS), set(sys.modules)
    try:
        _import_file(file) if is_file(name) else importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Half of its registrations would make the next attempt fail for another reason.
        withdraw(before)
        for module in set(sys.modules) - modules:
            if _inside(sys.modules[module], file):
                del sys.modules[module]
        raise _failure(name, where, error) from error
    folder = os.path.dirname(file) if os.path.basename(file) == "__init__.py" else None
    plugin = Plugin(name, file, folder, _digest(file, folder), tuple(ADDITIONS[before:]))
    _LOADED[os.path.realpath(file)] = plugin
    return plugin


def _import_file(file: str) -> ModuleType:
    """Import a file under a name that no other module has."""
    real = os.path.realpath(file)
    name = f"deepy_plugin_{Path(file).stem}_{hashlib.sha256(real.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError("it is not a Python file (name.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up
    spec.loader.exec_module(module)
    return module


def _find_module(name: str, where: str) -> str:
    """The file of a module. Importing its parent packages is how Python finds it."""
    parent = name.rpartition(".")[0]
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise _failure(name, where, error) from error
        spec = None
    except (ImportError, ValueError) as error:
        raise _failure(name, where, error) from error
    except Exception as error:  # of the parent package's own code
        raise _failure(parent or name, where, error) from error
    if spec is None:
        raise UserError(f"{where}: plugins: there is no module {name!r}; {_describe_search(name, where)}")
    if spec.origin is None or not os.path.isfile(spec.origin) or not spec.origin.endswith(".py"):
        raise UserError(f"{where}: plugins: {name!r} is not a module of Python source ({spec.origin})")
    return spec.origin


def _describe_search(name: str, where: str) -> str:
    folders = [path or os.getcwd() for path in sys.path if os.path.isdir(path or ".")]
    own = [folder for folder in folders if not folder.startswith((sys.prefix, sys.base_prefix))]
    text = f"looked for in {', '.join([*dict.fromkeys(own), 'the installed packages'])}"
    near = os.path.dirname(where.rpartition(":")[0])
    for folder in dict.fromkeys((near, os.getcwd())):
        file = os.path.join(folder, *name.split(".")) + ".py"
        if os.path.isfile(file):
            named = f"{name.replace('.', '/')}.py"
            return f"{text}. There is {file}: name the file ({named}), or put its folder on PYTHONPATH"
    return f"{text}. Put its folder on PYTHONPATH, or name a file: path/to/{name.rpartition('.')[2]}.py"


def _failure(name: str, where: str, error: BaseException) -> UserError:
    """The error of a plugin's own code, with its traceback from the plugin on."""
    if isinstance(error, UserError):
        return UserError(f"{where}: plugins: {name}: {error}")
    trace = error.__traceback__
    while trace is not None and _is_machinery(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return UserError(f"{where}: plugins: {name} failed while it was imported:\n{text}")


def _is_machinery(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen importlib") or os.sep + "importlib" + os.sep in file


def _belongs(place: str, file: str, folder: str | None) -> bool:
    return place == file or (folder is not None and place.startswith(folder + os.sep))


def _inside(module: ModuleType | None, file: str) -> bool:
    folder = os.path.dirname(file) if os.path.basename(file) == "__init__.py" else None
    return _belongs(str(getattr(module, "__file__", None) or ""), file, folder)


def _digest(file: str, folder: str | None) -> str:
    """SHA-256 of the source: the file's bytes, or names and bytes of all Python files of a package."""
    if folder is None:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    whole = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*.py")):
        whole.update(f"{path.relative_to(folder)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()

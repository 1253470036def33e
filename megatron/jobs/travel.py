"""Config files and profiles that are not in the tree at the commit: they are sent with the job."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.cluster.profile import ClusterProfile
from megatron.errors import UserError
from megatron.jobs.tree import Tree
from megatron.neox_arguments import plugin_key
from megatron.neox_arguments.keys import Entry
from megatron.neox_arguments.mixture_files import find_mixture
from megatron.neox_arguments.problems import collector
from megatron.neox_arguments.yaml_files import config_path, read_entries
from megatron.plugins import absolute, is_file

CLUSTERS = "clusters"  # the folder of profiles, for DEEPY_CLUSTERS


@dataclass(frozen=True)
class Luggage:
    """What goes along with a job. `configs`: for each config file, where it will be: relative to the tree (`in_tree`)
    or to the folder of the submission. `files`: what lies in that folder -> the file here."""

    configs: tuple[tuple[bool, str], ...]
    files: dict[str, Path]

    def write(self, folder: Path) -> None:
        """Copy the files into the folder of the submission."""
        for name, source in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)


def pack(paths: Sequence[str], tree: Tree, profiles: Sequence[ClusterProfile], to_here: bool) -> Luggage:
    """What the config files need that `tree` does not hold, and the profiles that do not come with Deepy.

    Files that a config extends, its mixtures and its plugins lie to each other as they do here. Raises `UserError` for
    a file that would not be found on another machine (`to_here`: it is this one).
    """
    configs, own = [Path(os.path.abspath(config_path(name, None))) for name in paths], set[Path]()
    for config in configs:
        needed = {config, *_needs(config, tree, to_here)}
        if not all(map(tree.has, needed)):
            own |= needed
    files = {}
    if own:
        common = Path(os.path.commonpath([path.parent for path in own]))
        files = {f"configs/{path.relative_to(common).as_posix()}": path for path in sorted(own)}
    for profile in profiles:
        if not tree.has(profile.path):
            files[f"{CLUSTERS}/{profile.path.name}"] = profile.path
    where = {path: name for name, path in files.items()}
    root = tree.root.resolve()
    placed = (
        (False, where[path]) if path in where else (True, path.resolve().relative_to(root).as_posix())
        for path in configs
    )
    return Luggage(tuple(placed), files)


def _needs(config: Path, tree: Tree, to_here: bool) -> Iterator[Path]:
    """The files that a config names in `extends`, `mixture` and `plugins`, and those that they name."""
    with collector() as found:
        entries = read_entries(str(config), found)
    for key, name in _named(entries):
        if os.path.isabs(name):
            if not to_here:
                raise UserError(
                    f"{entries[key].where}: {key}: {name} is only on this machine; name it by a relative path"
                )
            continue
        if key == "extends":
            path = Path(os.path.abspath(config_path(name, str(config.parent))))
        elif key == "mixture":
            path = Path(os.path.abspath(find_mixture(name, entries[key].where, None)))
        else:
            path = Path(absolute(name, [str(config.parent), os.getcwd()], entries[key].where))
        if key != "extends" and path.parent not in (config.parent, config.parent / "mixtures") and not tree.has(path):
            raise UserError(
                f"{entries[key].where}: {key}: {path} would not be found by the job; put it next to {config}"
            )
        yield path
        if key != plugin_key.KEY:
            yield from _needs(path, tree, to_here)


def _named(entries: Mapping[str, Entry]) -> Iterator[tuple[str, str]]:
    """(key, name) of the other files that a config names."""
    for key in ("extends", "mixture", plugin_key.KEY):
        value = entries[key].value if key in entries else None
        if key == "mixture" and isinstance(value, Mapping):
            value = list(value.get("interpolate") or ())
        for name in plugin_key.items(value) or []:
            if key != plugin_key.KEY or is_file(name):
                yield key, name

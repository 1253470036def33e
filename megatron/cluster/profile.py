"""Cluster profiles: what a site's machines are like, as data in `slurm/clusters/NAME.yml`.

A profile of a name is looked for in the folders of `DEEPY_CLUSTERS` (separated by `:`), in `~/.config/deepy/clusters`,
and among those that come with Deepy; the first wins. `slurm/README.md` explains every key.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from megatron.errors import UserError, nearest
from megatron.home import HOME
from megatron.neox_arguments.keys import Entry
from megatron.neox_arguments.problems import Problems, collector
from megatron.neox_arguments.yaml_files import inherit, read_entries
from megatron.secrets import is_secret_variable

SHIPPED = HOME / "slurm" / "clusters"
FOLDERS = ("logs", "checkpoints", "data", "tokenizers", "tmp", "repo")
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}'\"`$\\]*))?\}")
"""`${VAR}` or `${VAR:-default}` in a value of a profile."""


@dataclass(frozen=True)
class Detect:
    """How to know that we are on this cluster: any of these matches. Names are shell patterns."""

    hostname: tuple[str, ...] = ()
    partition: tuple[str, ...] = ()
    file: tuple[str, ...] = ()


@dataclass(frozen=True)
class Modules:
    """Environment modules of a job: `module purge` first, then these are loaded in order."""

    purge: bool = False
    load: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preflight:
    """What a job checks before it trains: the version of NCCL (`>=2.26`), a part of the name of NCCL's network, the
    all-reduce bandwidth between two nodes in GB/s; `allow_tcp`: a job without that network may train over TCP."""

    nccl: str | None = None
    plugin: str | None = None
    bandwidth_gb_s: float | None = None
    allow_tcp: bool = False


@dataclass(frozen=True)
class ClusterProfile:
    """One cluster. `path`: the file; `lines`: key -> `file:line`, also of keys inside (`folders.logs`)."""

    name: str
    path: Path
    provider: str | None = None
    ssh: str | None = None
    submit_command: str = "sbatch"
    priority: int = 100
    detect: Detect = Detect()
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    max_nodes: int | None = None
    exclude_nodes: tuple[str, ...] = ()
    gpu: str | None = None
    gpus_per_node: int | None = None
    nodes: Mapping[str, int] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)
    remap: Mapping[str, str] = field(default_factory=dict)
    only_on_nodes: tuple[str, ...] = ()
    modules: Modules = Modules()
    environment: Mapping[str, str] = field(default_factory=dict)
    hub_offline: bool = False
    nccl: Literal["system", "wheel"] | None = None
    grad_accumulation_multiplier: int = 1
    preflight: Preflight = Preflight()
    lines: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def folder(self, kind: str, env: Mapping[str, str]) -> str | None:
        """The folder of that kind with the variables of `env` in it; None where the profile names none.

        Raises `UserError` for a variable that is not set.
        """
        if kind not in self.folders:
            return None
        where = f"{self.lines.get(f'folders.{kind}', self.path)}: folders.{kind}"
        text = self.folders[kind]
        return expand("${HOME}" + text[1:] if text.startswith("~") else text, env, where)


def expand(text: str, env: Mapping[str, str], where: str) -> str:
    """`text` with `${VAR}` and `${VAR:-default}` replaced from `env`. Raises `UserError` for one that is not set."""

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        if env.get(name) or default is not None:
            return env.get(name) or default
        raise UserError(f"{where}: {text}: the variable {name} is not set. Set it, or write ${{{name}:-DEFAULT}}")

    return VARIABLE.sub(value, text)


def sbatch_flags(profile: ClusterProfile, kind: str | None = None) -> list[str]:
    """The flags for sbatch that the profile knows: partition, account, qos, time, nodes to avoid, and the number of
    nodes for this kind of job. Raises `UserError` for a kind that the profile does not have."""
    if kind is not None and kind not in profile.nodes:
        kinds = ", ".join(profile.nodes) or "none"
        raise UserError(f"{profile.path}: nodes has no {kind!r}.{nearest(kind, list(profile.nodes))} It has: {kinds}")
    given = {name: getattr(profile, name) for name in ("partition", "account", "qos", "time")}
    given["exclude"] = ",".join(profile.exclude_nodes)
    given["nodes"] = profile.nodes[kind] if kind else None
    return [f"--{name}={value}" for name, value in given.items() if value]


def checkpoints_folder(env: Mapping[str, str], cluster: str | None = None) -> str | None:
    """Where checkpoints lie on this machine: DEEPY_CHECKPOINTS, else the folder of the profile; None without either."""
    return env.get("DEEPY_CHECKPOINTS") or find_profile(env, cluster).folder("checkpoints", env)


# ---- finding and reading


def load_profile(name: str, env: Mapping[str, str] | None = None) -> ClusterProfile:
    """The profile of that name, or in that file (`PATH.yml`). Raises `UserError` listing the known ones."""
    folders = profile_folders(os.environ if env is None else env)
    if name.endswith(".yml"):
        folder = Path(name).absolute().parent
        return _read(folder / Path(name).name, folders if folder in folders else [folder, *folders])
    return _read(_find(name, folders, f"cluster {name!r}"), folders)


def list_profiles(env: Mapping[str, str] | None = None) -> list[ClusterProfile]:
    """All profiles, by priority (the smallest first) and name."""
    folders = profile_folders(os.environ if env is None else env)
    names = {path.stem for folder in folders for path in folder.glob("*.yml")}
    profiles = [_read(_find(name, folders, name), folders) for name in names]
    return sorted(profiles, key=lambda profile: (profile.priority, profile.name))


def find_profile(env: Mapping[str, str], name: str | None = None, hostname: str | None = None) -> ClusterProfile:
    """The profile in force: `name` (`--cluster`), else `DEEPY_CLUSTER`, else the first that recognises this machine,
    else `generic` inside a SLURM job and `local` outside."""
    if name or env.get("DEEPY_CLUSTER"):
        return load_profile(name or env["DEEPY_CLUSTER"], env)
    hosts = {hostname or socket.gethostname(), env.get("SLURMD_NODENAME", "")} - {""}
    hosts |= {host.partition(".")[0] for host in hosts}
    for profile in list_profiles(env):
        if _is_here(profile.detect, hosts, env.get("SLURM_JOB_PARTITION")):
            return profile
    return load_profile("generic" if "SLURM_JOB_ID" in env else "local", env)


def profile_folders(env: Mapping[str, str]) -> list[Path]:
    """Where profiles are looked for, in this order."""
    named = [Path(part).expanduser() for part in env.get("DEEPY_CLUSTERS", "").split(os.pathsep) if part]
    if missing := [folder for folder in named if not folder.is_dir()]:
        raise UserError(f"DEEPY_CLUSTERS: {missing[0]} is not a folder")
    config = Path(env.get("XDG_CONFIG_HOME") or Path(env.get("HOME") or Path.home()) / ".config")
    return [*named, config / "deepy" / "clusters", SHIPPED]


def _is_here(detect: Detect, hosts: set[str], partition: str | None) -> bool:
    return (
        any(fnmatchcase(host, pattern) for host in hosts for pattern in detect.hostname)
        or any(fnmatchcase(partition or "", pattern) for pattern in detect.partition)
        or any(os.path.exists(path) for path in detect.file)
    )


def _find(name: str, folders: Sequence[Path], asked: str) -> Path:
    for folder in folders:
        if (folder / f"{name}.yml").is_file():
            return folder / f"{name}.yml"
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yml")})
    raise UserError(
        f"{asked}: there is no profile {name}.yml.{nearest(name, known)} There are: {', '.join(known)}. "
        f"Looked in: {', '.join(map(str, folders))}"
    )


def _read(path: Path, folders: Sequence[Path]) -> ClusterProfile:
    with collector() as found:
        entries = _read_extending(path, folders, found, ())
        found.raise_all()
        return _profile(path, entries, found)


def _read_extending(path: Path, folders: Sequence[Path], found: Problems, below: tuple[Path, ...]) -> dict[str, Entry]:
    """The entries of a file over those of the profile that it `extends`: one of its own name lies in a later folder."""
    if path in below:
        raise UserError(f"{path}: the profiles that it extends lead back to itself")
    entries = read_entries(str(path), found)
    base = entries.pop("extends", None)
    if base is None:
        return entries
    if not isinstance(base.value, str):
        raise UserError(f"{base.where}: extends: expected the name of a profile, got {base.value!r}")
    later = list(folders)
    if base.value == path.stem and path.parent in later:
        later = later[later.index(path.parent) + 1 :]
    merged = _read_extending(_find(base.value, later, f"{base.where}: extends"), folders, found, (*below, path))
    merged.pop("detect", None)  # a cluster like that one is not that one
    inherit(merged, entries)
    return merged


def _profile(path: Path, entries: Mapping[str, Entry], found: Problems) -> ClusterProfile:
    hints = get_type_hints(ClusterProfile)
    known = [name for name in hints if name not in ("name", "path", "lines")]
    lines = {name: entry.where for name, entry in entries.items()}
    for entry in entries.values():
        lines |= entry.inside
    values = {}
    for name, entry in entries.items():
        if name not in known:
            found.add(f"{entry.where}: {name} is not a key of a cluster profile.{nearest(name, known)}")
        elif entry.value is not None:
            with found.collect():
                values[name] = _typed(entry.value, hints[name], name, lines)
    profile = ClusterProfile(name=path.stem, path=path, lines=lines, **values)
    _check(profile, found)
    return profile


def _check(profile: ClusterProfile, found: Problems) -> None:
    """What the types do not say."""
    for kind in profile.folders:
        if kind not in FOLDERS:
            where = profile.lines[f"folders.{kind}"]
            found.add(f"{where}: folders has no {kind}.{nearest(kind, list(FOLDERS))} It has: {', '.join(FOLDERS)}")
    for name, value in profile.environment.items():
        where = f"{profile.lines[f'environment.{name}']}: environment.{name}"
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            found.add(f"{where}: this is not the name of a variable")
        if is_secret_variable(name, value):
            found.add(f"{where}: a secret does not belong in a file. Set it where the job is submitted")
    for kind in ("environment", "folders"):
        for name, text in getattr(profile, kind).items():
            if "${" in VARIABLE.sub("", text):
                known = "only ${VAR} and ${VAR:-DEFAULT} are known, DEFAULT without quotes, $ and backslash"
                found.add(f"{profile.lines[f'{kind}.{name}']}: {kind}.{name}: {text}: {known}")
    words: list[str] = []
    with suppress(ValueError):  # a quote that is not closed
        words = shlex.split(profile.submit_command)
    if not words:
        found.add(f"{profile.lines['submit_command']}: submit_command: {profile.submit_command!r} is no command")
    for old, new in profile.remap.items():
        if not old.startswith("/") or not new.startswith("/") or old.rstrip("/") == "":
            found.add(f"{profile.lines[f'remap.{old}']}: remap: {old}: {new}: both have to be absolute paths, not /")
    numbers = {name: getattr(profile, name) for name in ("max_nodes", "gpus_per_node", "grad_accumulation_multiplier")}
    numbers |= {f"nodes.{kind}": number for kind, number in profile.nodes.items()}
    for name, number in numbers.items():
        if number is not None and number < (0 if name == "gpus_per_node" else 1):
            found.add(f"{profile.lines[name]}: {name}: {number} is too small")
    wanted = profile.preflight.nccl
    if wanted is not None and not re.fullmatch(r">=\d+(\.\d+)*", wanted):
        found.add(f"{profile.lines['preflight.nccl']}: preflight.nccl: expected a version such as '>=2.26': {wanted!r}")


def _typed(value: Any, wanted: Any, name: str, lines: Mapping[str, str]) -> Any:
    """`value` as the type of its field. Raises `UserError` with the line of `name`."""
    where, origin, inner = f"{lines[name]}: {name}", get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        return _typed(value, next(one for one in inner if one is not NoneType), name, lines)
    if origin is Literal:
        if value not in inner:
            raise UserError(f"{where}: {value!r} is not one of {', '.join(inner)}")
        return value
    if is_dataclass(wanted) and isinstance(value, dict):
        kind, hints = cast(Any, wanted), get_type_hints(wanted)
        for key in value:
            if key not in hints:
                raise UserError(f"{lines[f'{name}.{key}']}: {name} has no key {key}.{nearest(str(key), list(hints))}")
        given = {key: one for key, one in value.items() if one is not None}
        return kind(**{key: _typed(one, hints[key], f"{name}.{key}", lines) for key, one in given.items()})
    if origin is tuple and isinstance(value, (list, str)):
        items = [value] if isinstance(value, str) else value
        return tuple(_typed(item, inner[0], name, lines) for item in items)
    if origin is not None and origin is not tuple and isinstance(value, dict):
        present = {str(key): one for key, one in value.items() if one is not None}  # null: not the inherited one
        return {key: _typed(one, inner[1], f"{name}.{key}", lines) for key, one in present.items()}
    if wanted is float and type(value) is int:
        return float(value)
    if wanted is str and type(value) is int and name.startswith("environment."):
        return str(value)
    if wanted in (str, int, float, bool) and type(value) is wanted:
        return value
    raise UserError(f"{where}: expected {_words(wanted)}, got {value!r}{_quotes(wanted, value)}")


def _words(wanted: Any) -> str:
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    if wanted in words:
        return words[wanted]
    return "a list" if get_origin(wanted) is tuple else "a mapping"


def _quotes(wanted: Any, value: Any) -> str:
    """YAML reads 24:00:00 as a number of seconds, 9.0 as a number, no as false."""
    return ". Write it in quotes, as you mean it" if wanted is str and not isinstance(value, (dict, list)) else ""

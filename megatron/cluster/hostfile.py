"""Which hosts, and which slots on each: hostfile, include/exclude filters, num_nodes and num_gpus."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron.errors import UserError, nearest
from megatron.log import get_logger

logger = get_logger(__name__)

DEFAULT_HOSTFILE = "/job/hostfile"  # DeepSpeed's fall-back; used only if it exists

_LINE = re.compile(r"^(?P<host>\S+)\s+slots=(?P<slots>\d+)$")

Resources = dict[str, list[int]]
"""Host -> slot numbers in use on it, in the order of the ranks."""


def find_hostfile(
    key: str | None, env: Mapping[str, str], default: str = DEFAULT_HOSTFILE, written_in: str | None = None
) -> Path | None:
    """The hostfile in force: the config key, else `$DLTS_HOSTFILE`, else DeepSpeed's default if it exists.

    A missing one that a command line or the environment names is a `UserError`: to run on one machine instead would be
    a quiet surprise. One that a config file names (`written_in`: its file and line) is warned of and left out, as in
    DeepSpeed: three of GPT-NeoX's own configs have `hostfile: /mock_path`.
    """
    for source, name in (("hostfile", key), ("DLTS_HOSTFILE", env.get("DLTS_HOSTFILE"))):
        if name and Path(name).is_file():
            return Path(name)
        if name and source == "hostfile" and written_in is not None:
            logger.warning(f"{written_in}: hostfile: {name} does not exist, so there is no other machine in this run")
            return None
        if name:
            raise UserError(f"{source}={name}: no such file. Leave it unset to run on this machine only.")
    return Path(default) if Path(default).is_file() else None


def parse_hostfile(path: str | Path) -> Resources:
    """Read `host slots=N` lines (`#` comments, blank lines, CRLF and `user@host` allowed), in order.

    Raises `UserError` with line number and text for anything else, a repeated host, or no host at all.
    """
    resources: Resources = {}
    first_seen: dict[str, int] = {}
    for number, raw in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        match = _LINE.match(line)
        if match is None or int(match["slots"]) < 1:
            raise UserError(f"{path}:{number}: {raw.strip()!r} is not a line of the form `host slots=N` with N >= 1")
        host = match["host"]
        if host in resources:
            raise UserError(f"{path}:{number}: host {host!r} is already on line {first_seen[host]}")
        first_seen[host] = number
        resources[host] = list(range(int(match["slots"])))
    if not resources:
        raise UserError(f"{path}: holds no host. One line per host: `host slots=N`")
    return resources


def select(
    resources: Resources,
    *,
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: int = -1,
    num_gpus: int | None = None,
    where: Callable[[str], str] = lambda key: "",
) -> Resources:
    """Apply the filters of GPT-NeoX in its order: include or exclude, then the first `num_nodes`, then `num_gpus` each.

    `where(key)` is put in front of a message about that filter: `file:line: `, or nothing.

    Filters read `host[:slot,slot]@host[:slot]`; hosts stay in the hostfile's order, so that ranks do. Raises
    `UserError` for unknown hosts or slots and for filters that leave nothing.
    """
    if include and exclude:
        raise UserError(f"{where('include')}include and exclude cannot both be set: give one of them")
    if include:
        chosen = _parse_filter("include", include, resources, where)
        resources = {host: chosen[host] for host in resources if host in chosen}
    elif exclude:
        gone = _parse_filter("exclude", exclude, resources, where)
        kept = {host: [slot for slot in slots if slot not in gone.get(host, [])] for host, slots in resources.items()}
        resources = {host: slots for host, slots in kept.items() if slots}
    if num_gpus and (include or exclude):
        logger.warning(f"num_gpus={num_gpus} is not used: include/exclude already name the slots")
        num_gpus = None
    if num_nodes is not None and num_nodes > 0:
        if num_nodes > len(resources):
            left = f"only {len(resources)} hosts are left: {', '.join(resources)}"
            raise UserError(f"{where('num_nodes')}num_nodes={num_nodes}, but {left}")
        resources = dict(list(resources.items())[:num_nodes])
    if num_gpus is not None and num_gpus > 0:
        for host, slots in resources.items():
            if len(slots) < num_gpus:
                raise UserError(f"{where('num_gpus')}num_gpus={num_gpus}, but host {host} has {len(slots)} slots")
        resources = {host: slots[:num_gpus] for host, slots in resources.items()}
    if not resources:
        raise UserError("the include/exclude filters leave no host to run on")
    return resources


def _parse_filter(key: str, text: str, resources: Resources, where: Callable[[str], str]) -> Resources:
    """`host:0,2@other` -> {host: [0, 2], other: all its slots}."""
    shown = f"{where(key)}{key}={text}"
    chosen: Resources = {}
    for part in _filter_parts(text, resources):
        host, colon, slots = part.partition(":")
        if host not in resources:
            raise UserError(
                f"{shown}: there is no host {host!r}.{nearest(host, list(resources))} Hosts: {', '.join(resources)}"
            )
        if host in chosen:
            raise UserError(f"{shown}: host {host!r} is named twice")
        if not colon:
            chosen[host] = resources[host]
            continue
        try:
            numbers = [int(slot) for slot in slots.split(",")]
        except ValueError:
            raise UserError(f"{shown}: slots after {host}: are numbers, as in {host}:0,2") from None
        have = ", ".join(map(str, resources[host]))
        if absent := [slot for slot in numbers if slot not in resources[host]]:
            raise UserError(f"{shown}: {host} has no slot {absent[0]}, only {have} (they count from 0)")
        if twice := [slot for slot in numbers if numbers.count(slot) > 1]:
            raise UserError(f"{shown}: slot {twice[0]} of {host} is named twice")
        chosen[host] = sorted(numbers)
    return chosen


def _filter_parts(text: str, resources: Resources) -> list[str]:
    """Split at `@`, except inside a `user@host` of the hostfile."""
    parts: list[str] = []
    for piece in text.split("@"):
        if parts and f"{parts[-1]}@{piece.partition(':')[0]}" in resources:
            parts[-1] += f"@{piece}"
        else:
            parts.append(piece.strip())
    return parts

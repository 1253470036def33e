"""Paths that mean another cluster's folders, rewritten to the same folders here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.cluster.profile import ClusterProfile, expand
from megatron.errors import UserError
from megatron.neox_arguments import plugin_key
from megatron.neox_arguments.coerce import thaw
from megatron.neox_arguments.merge import FlatValues


@dataclass(frozen=True)
class Rule:
    """Paths in `old` lie in `new` here; `origin` says whose rule that is. With `old` = `new`: they stay."""

    old: str
    new: str
    origin: str


@dataclass(frozen=True)
class Rewrite:
    """One path of a configuration, before and after."""

    key: str
    old: str
    new: str
    origin: str


def rules_for(profile: ClusterProfile, others: Iterable[ClusterProfile], env: Mapping[str, str]) -> list[Rule]:
    """The rules that hold on the cluster of `profile`, longest prefix first.

    Its own `remap` comes before what follows from folders of one kind (`data`, `checkpoints`, ...) in two profiles. A
    path below one of its own folders stays. `${NAME}` is taken from `env`; in another cluster's folders only `${USER}`,
    since other variables have that cluster's values there. Folders with variables that are not set are left out.
    """
    own = {kind: expanded for kind, path in profile.folders.items() if (expanded := _expand(path, env))}
    rules = [
        Rule(_clean(old), _clean(new), f"remap of {profile.name}")
        for written, target in profile.remap.items()
        if (old := _expand(written, env)) and (new := _expand(target, env))
    ]
    rules += [Rule(_clean(path), _clean(path), profile.name) for path in own.values()]
    user = {name: value for name, value in env.items() if name == "USER"}
    for other in others:
        if other.name == profile.name:
            continue
        for kind, path in other.folders.items():
            if kind in own and (old := _expand(path, user)):
                rules.append(Rule(_clean(old), _clean(own[kind]), f"{kind} of {other.name}"))
    return sorted(rules, key=lambda rule: -len(rule.old))  # stable: earlier rules win among equal prefixes


def remap_values(merged: FlatValues, rules: list[Rule]) -> tuple[dict[str, Any], list[Rewrite]]:
    """The keys whose values change, with their new values, and every path that was rewritten.

    Raises `UserError` where two folders of other clusters have one path and mean different folders here.
    """
    changed, rewrites = {}, []
    for key, value in merged.values.items():
        if key == plugin_key.KEY:  # code, which is looked for where the configuration lies
            continue
        found: list[Rewrite] = []
        new = _remap(key, thaw(value), rules, merged.sources.get(key, key), found)
        if found:
            changed[key] = new
            rewrites += found
    return changed, rewrites


def _remap(key: str, value: Any, rules: list[Rule], where: str, found: list[Rewrite]) -> Any:
    if isinstance(value, str):
        return _remap_path(key, value, rules, where, found)
    if isinstance(value, list):
        return [_remap(key, item, rules, where, found) for item in value]
    if isinstance(value, dict):
        return {name: _remap(f"{key}.{name}", item, rules, where, found) for name, item in value.items()}
    return value


def _remap_path(key: str, path: str, rules: list[Rule], where: str, found: list[Rewrite]) -> str:
    fitting = [rule for rule in rules if path == rule.old or path.startswith(rule.old + "/")]
    if not fitting or fitting[0].new == fitting[0].old:
        return path
    rule = fitting[0]
    others = [one for one in fitting if one.old == rule.old and one.new != rule.new]
    if others and not rule.origin.startswith("remap "):
        raise UserError(
            f"{where}: {key}: {path} may be {rule.new} ({rule.origin}) or {others[0].new} ({others[0].origin}) on this"
            f" cluster; write the path as it is there, or `remap: {{{rule.old}: ...}}` into the cluster's profile"
        )
    new = rule.new + path[len(rule.old) :]
    found.append(Rewrite(key, path, new, rule.origin))
    return new


def _expand(path: str, env: Mapping[str, str]) -> str | None:
    """`path` with the variables of `env`; None when one is not set, or the path is not absolute."""
    try:
        expanded = expand("${HOME}" + path[1:] if path.startswith("~") else path, env, "")
    except UserError:
        return None
    return expanded if expanded.startswith("/") and expanded.strip("/") else None


def _clean(path: str) -> str:
    return path.rstrip("/")

"""What a cluster changes in a run's configuration, as `key=value` after the user's own; his files stay as they are.

`submit.py` shows it before a job is submitted, and the job does it (`job_overrides`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from megatron.cluster.profile import ClusterProfile, list_profiles
from megatron.jobs.batch_rule import split_micro_batches
from megatron.jobs.identity import tracker_values
from megatron.jobs.remap import remap_values, rules_for
from megatron.log import get_logger
from megatron.neox_arguments.merge import FlatValues, merge

logger = get_logger(__name__)


@dataclass(frozen=True)
class Adapted:
    """A configuration for one cluster: as merged, the keys that the cluster changes, and a line on each for people."""

    merged: FlatValues
    values: dict[str, Any]
    changes: list[str]

    @property
    def overrides(self) -> list[str]:
        """What changes, as `key=value`."""
        return [_override(key, value) for key, value in self.values.items()]


def adapt(
    paths: Sequence[str],
    overrides: Sequence[str],
    profile: ClusterProfile,
    env: Mapping[str, str],
    others: Sequence[ClusterProfile] | None = None,
) -> Adapted:
    """Paths and batches of a run for the cluster of `profile`.

    `others`: the profiles whose folders may be named in the files; by default all known ones. Raises `UserError` for a
    configuration that cannot be read or a global batch that cannot be kept.
    """
    merged = merge(paths, overrides)
    values, rewrites = remap_values(merged, rules_for(profile, list_profiles(env) if others is None else others, env))
    changes = [f"{one.key}: {one.old} -> {one.new} ({one.origin})" for one in rewrites]
    rule = f"grad_accumulation_multiplier of the cluster {profile.name}"
    for key, number in split_micro_batches(merged, profile.grad_accumulation_multiplier, rule).items():
        values[key] = number
        changes.append(f"{key}: {merged.values.get(key, 'not set')} -> {number} ({rule})")
    return Adapted(merged, values, changes)


def job_overrides(
    paths: Sequence[str],
    overrides: Sequence[str],
    profile: ClusterProfile,
    env: Mapping[str, str],
    *,
    first_job: str | None = None,
) -> list[str]:
    """What a job adds to the user's overrides: `adapt`, with a line in its log on each change, and names and tags for
    trackers. `first_job`: the number of the first job of its chain; None: this is the first."""
    adapted = adapt(paths, overrides, profile, env)
    for change in adapted.changes:
        logger.info(f"on {profile.name}: {change}")
    adapted.values.update(tracker_values({**adapted.merged.values, **adapted.values}, profile, env, first_job))
    return adapted.overrides


def _override(key: str, value: Any) -> str:
    """`key=value` that reads back as `value`."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False)
    return f"{key}={text.removesuffix('...' + chr(10)).rstrip(chr(10))}"

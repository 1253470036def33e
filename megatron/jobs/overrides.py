"""What a cluster changes in a run's configuration, as `key=value` after the user's own; his files stay as they are.

`adapt` says it before a job is submitted, `job_overrides` does it in the job.
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
from megatron.neox_arguments.merge import merge

logger = get_logger(__name__)


@dataclass(frozen=True)
class Adapted:
    """The overrides for one cluster, and a line on each change for people."""

    overrides: list[str]
    changes: list[str]


def adapt(
    paths: Sequence[str],
    overrides: Sequence[str],
    profile: ClusterProfile,
    env: Mapping[str, str],
    *,
    first_job: str | None = None,
    others: Sequence[ClusterProfile] | None = None,
) -> Adapted:
    """Paths, batches and tracker names of a run for the cluster of `profile`.

    `others`: the profiles whose folders may be named in the files; by default all known ones. Raises `UserError` for a
    configuration that cannot be read or a global batch that cannot be kept.
    """
    merged = merge(paths, overrides)
    values, rewrites = remap_values(merged, rules_for(profile, list_profiles() if others is None else others, env))
    changes = [f"{one.key}: {one.old} -> {one.new} ({one.origin})" for one in rewrites]
    rule = f"grad_accumulation_multiplier of the cluster {profile.name}"
    for key, number in split_micro_batches(merged, profile.grad_accumulation_multiplier, rule).items():
        values[key] = number
        changes.append(f"{key}: {merged.values.get(key, 'not set')} -> {number} ({rule})")
    values |= tracker_values(merged, profile, env, first_job)
    return Adapted([_override(key, value) for key, value in values.items()], changes)


def job_overrides(
    paths: Sequence[str],
    overrides: Sequence[str],
    profile: ClusterProfile,
    env: Mapping[str, str],
    *,
    first_job: str | None = None,
) -> list[str]:
    """`adapt` inside a job: the overrides to put after the user's; each rewritten path and number is logged."""
    adapted = adapt(paths, overrides, profile, env, first_job=first_job)
    for change in adapted.changes:
        logger.info(f"for this cluster: {change}")
    return adapted.overrides


def _override(key: str, value: Any) -> str:
    """`key=value` that reads back as `value`."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False)
    return f"{key}={text.removesuffix('...' + chr(10)).rstrip(chr(10))}"

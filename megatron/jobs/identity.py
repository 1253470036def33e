"""How a run is called in its trackers: the same names and tags on every cluster, kept by all jobs of a chain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint import layout
from megatron.cluster.profile import ClusterProfile


def experiment_of(config: Mapping[str, Any], env: Mapping[str, str]) -> str | None:
    """The name of the experiment: `DEEPY_EXPERIMENT` (`submit.py -e`), else that of the folder `save`."""
    save = config.get("save")
    return env.get("DEEPY_EXPERIMENT") or (layout.run_name(Path(save)) if save else None)


def job_of(env: Mapping[str, str]) -> str | None:
    """The number of this job; of an array's task, the array's number and the task's, as squeue shows them."""
    if array := env.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{env.get('SLURM_ARRAY_TASK_ID', '0')}"
    return env.get("SLURM_JOB_ID")


def tracker_values(
    config: Mapping[str, Any], profile: ClusterProfile, env: Mapping[str, str], first_job: str | None
) -> dict[str, Any]:
    """Name, group and tags for the trackers that the configuration turns on, where it does not set them itself.

    `first_job`: the number of the first job of the chain, so that all of its jobs have one name; None: this is it.
    """
    experiment, job = experiment_of(config, env), first_job or job_of(env)
    if experiment is None:
        return {}
    name = "_".join(part for part in (experiment, profile.name, job) if part)
    job_tag = f"job_{job}" if job else None
    words = (profile.provider, profile.name, profile.gpu, experiment, job_tag)
    tags = list(dict.fromkeys(word[:64] for word in words if word))  # W&B takes no longer ones
    values: dict[str, Any] = {}
    if config.get("use_wandb"):
        values |= {"wandb_run_name": name, "wandb_group": f"{experiment}/{profile.name}", "wandb_tags": tags}
    if config.get("use_comet"):
        values |= {"comet_experiment_name": name, "comet_tags": tags}
    return {key: value for key, value in values.items() if config.get(key) is None}

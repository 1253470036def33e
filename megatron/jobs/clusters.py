"""Which cluster takes a job: the first, in order of priority, with enough idle nodes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from megatron.cluster.profile import ClusterProfile, find_profile, load_profile
from megatron.cluster.slurm import SlurmError
from megatron.errors import UserError
from megatron.jobs.heads import Head, ask, count_idle

DEFAULT_KIND = "pretrain"
_VARIABLE = re.compile(r"\$\{(\w+)")


@dataclass(frozen=True)
class Wanted:
    """What the flags for sbatch ask for; None is the profile's business."""

    nodes: int | None
    partition: str | None
    exclude: str | None
    has_tasks: bool

    @classmethod
    def from_flags(cls, flags: Sequence[str]) -> Wanted:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for names in (("-N", "--nodes"), ("-p", "--partition"), ("-x", "--exclude"), ("-n", "--ntasks")):
            parser.add_argument(*names)
        for name in ("--ntasks-per-node", "--gpus-per-node", "--gres", "--gpus"):
            parser.add_argument(name)
        known, _ = parser.parse_known_args([flag for flag in flags if flag != "--"])
        nodes = re.match(r"\d+", known.nodes or "")  # of MIN-MAX the smaller
        tasks = any(getattr(known, name) for name in ("ntasks", "ntasks_per_node", "gpus_per_node", "gres", "gpus"))
        return cls(int(nodes[0]) if nodes else None, known.partition, known.exclude, tasks)


@dataclass(frozen=True)
class Candidate:
    """A cluster, what a job needs there, and what its head node answered."""

    profile: ClusterProfile
    head: Head
    nodes: int
    idle: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None

    @property
    def too_small(self) -> bool:
        """Whether no job there may have that many nodes."""
        return self.profile.max_nodes is not None and self.nodes > self.profile.max_nodes

    @property
    def state(self) -> str:
        """unreachable, idle (enough nodes are) or busy."""
        if self.problem is not None:
            return "unreachable"
        return "idle" if self.idle >= self.nodes and not self.too_small else "busy"

    def row(self, width: int, selected: bool) -> str:
        """One line of the table."""
        why = f" (at most {self.profile.max_nodes} nodes a job)" if self.too_small else ""
        if 0 < self.idle < self.nodes:
            why = f" ({self.nodes} needed){why}"
        row = f"{self.profile.name:<{width}}  {self.idle} {self.state}{why}"
        return f"{row}  <-- SELECTED" if selected else row


def find_candidates(
    profiles: Sequence[ClusterProfile],
    env: Mapping[str, str],
    name: str | None,
    ssh_config: str | None,
    kind: str | None,
    wanted: Wanted,
) -> list[Candidate]:
    """The clusters that may take the job, the preferred first: the one of that `name` (else of `DEEPY_CLUSTER`), else
    all with an `ssh` alias and the one whose machine this is. Raises `UserError`."""
    # As inside of the job: `generic` where no profile recognises this machine.
    here = find_profile({**{key: value for key, value in env.items() if key != "DEEPY_CLUSTER"}, "SLURM_JOB_ID": ""})
    if forced := name or env.get("DEEPY_CLUSTER"):
        chosen = [load_profile(forced, env)]
    else:
        known = here.detect.hostname or here.detect.partition or here.detect.file  # not only what is left
        chosen = [profile for profile in profiles if profile.ssh or (known and profile.name == here.name)] or [here]
    found = []
    for profile in chosen:
        alias = None if profile.name == here.name else profile.ssh
        default = profile.nodes.get(kind or DEFAULT_KIND, 1)
        found.append(Candidate(profile, Head(alias, ssh_config), wanted.nodes or default))
    return found


def ask_all(candidates: Sequence[Candidate], wanted: Wanted) -> list[Candidate]:
    """The same with what their head nodes answer, all at the same time."""

    def asked(candidate: Candidate) -> Candidate:
        profile = candidate.profile
        texts = [*profile.folders.values(), *profile.remap, *profile.remap.values()]
        names = sorted({"HOME", "USER", *(name for text in texts for name in _VARIABLE.findall(text))})
        partition = wanted.partition or profile.partition
        excluded = profile.exclude_nodes if wanted.exclude is None else (wanted.exclude,)
        try:
            variables, rows = ask(candidate.head, names, partition)
            return replace(candidate, idle=count_idle(rows, partition, excluded), variables=variables)
        except (SlurmError, UserError) as error:
            return replace(candidate, problem=str(error))

    with ThreadPoolExecutor(max_workers=16) as pool:
        return list(pool.map(asked, candidates))


def choose(asked: Sequence[Candidate]) -> Candidate:
    """The first with enough idle nodes; else the first that answers and is not too small for the job. Raises
    `SlurmError` when there is none."""
    answering = [candidate for candidate in asked if candidate.problem is None]
    if not answering:
        problems = "".join(f"\n  {one.profile.name}: {one.problem}" for one in asked)
        advice = "A cluster is reached by the `ssh` alias in its profile (slurm/README.md)"
        raise SlurmError(f"no cluster can be reached:{problems}\n{advice}")
    large = [candidate for candidate in answering if not candidate.too_small]
    if not large:
        shown = ", ".join(f"{one.profile.name} {one.profile.max_nodes} (asked for {one.nodes})" for one in answering)
        raise UserError(f"no cluster gives a job that many nodes; max_nodes: {shown}. Ask for fewer: -- --nodes=N")
    return next((candidate for candidate in large if candidate.state == "idle"), large[0])

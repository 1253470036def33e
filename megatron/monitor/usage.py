"""Who uses the cluster: now (`sinfo`, `squeue`), and over a time (`sreport`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.cluster.slurm import WRONG_TIME, Slurm, SlurmError, count_gpus, parse_rows
from megatron.errors import UserError
from megatron.monitor.slurm_jobs import ENDED

_DOWN = ("down", "drain", "fail", "maint", "reboot", "unk", "powered", "powering", "inval", "no_respond", "future")


@dataclass
class Share:
    """Nodes and GPUs; `jobs` where it is somebody's."""

    nodes: int = 0
    gpus: int = 0
    jobs: int = 0

    def add(self, nodes: int, gpus: int, jobs: int = 0) -> None:
        self.nodes, self.gpus, self.jobs = self.nodes + nodes, self.gpus + gpus, self.jobs + jobs


@dataclass
class Pool:
    """Nodes by what they do; those that are partly used are `mixed`, and their GPUs allocated or idle one by one."""

    total: Share = field(default_factory=Share)
    idle: Share = field(default_factory=Share)
    mixed: Share = field(default_factory=Share)
    allocated: Share = field(default_factory=Share)
    down: Share = field(default_factory=Share)

    def add(self, state: str, gpus: int, used: int) -> None:
        """One node."""
        self.total.add(1, gpus)
        if any(word in state for word in _DOWN):
            self.allocated.add(0, used)  # what a draining node still runs
            self.down.add(1, gpus - used)
        elif "mix" in state:
            self.mixed.add(1, 0)
            self.allocated.add(0, used)
            self.idle.add(0, gpus - used)
        elif "idle" in state:
            self.idle.add(1, gpus)
        else:
            self.allocated.add(1, gpus)


@dataclass
class ClusterUse:
    """The cluster at one moment. `jobs`: those of `user`."""

    user: str
    nodes: Pool
    partitions: dict[str, Pool]
    running: dict[str, Share]
    pending: dict[str, Share]
    by_partition: dict[str, dict[str, Share]]
    jobs: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """As it stands in `--json`."""
        return asdict(self)


def read_cluster(slurm: Slurm, user: str) -> ClusterUse:
    """What is idle, and what everybody runs and waits for. Raises `SlurmError`."""
    whole, partitions = Pool(), defaultdict[str, Pool](Pool)
    seen: set[str] = set()
    for row in slurm.nodes():
        node = (row["state"].lower(), count_gpus(row["gres"]), count_gpus(row["gres_used"]))
        partitions[row["partition"].rstrip("*")].add(*node)
        if row["node"] not in seen:  # it has a row for each of its partitions
            seen.add(row["node"])
            whole.add(*node)
    running, pending = defaultdict[str, Share](Share), defaultdict[str, Share](Share)
    by_partition: dict[str, dict[str, Share]] = defaultdict(lambda: defaultdict(Share))
    jobs = []
    for row in slurm.queue():
        if row["state"] in ENDED:
            continue
        nodes, gpus = int(row["nodes"]) if row["nodes"].isdigit() else 0, count_gpus(row["tres"])
        waits = row["state"] == "PENDING"
        (pending if waits else running)[row["user"]].add(nodes, gpus, 1)
        if not waits:
            by_partition[row["partition"]][row["user"]].add(nodes, gpus, 1)
        if row["user"] == user:
            names = ("job_id", "name", "partition", "state", "reason", "time", "time_left")
            jobs.append({**{name: row[name] for name in names}, "nodes": nodes, "gpus": gpus})
    return ClusterUse(
        user,
        whole,
        dict(partitions),
        _largest(running),
        _largest(pending),
        {name: _largest(users) for name, users in by_partition.items()},
        sorted(jobs, key=lambda job: (job["state"] == "PENDING", str(job["job_id"]))),
    )


def _largest(shares: Mapping[str, Share]) -> dict[str, Share]:
    return dict(sorted(shares.items(), key=lambda item: (-item[1].gpus, -item[1].nodes, item[0])))


@dataclass
class Usage:
    """GPU hours from `start` to `end`. `utilization`: of all GPUs, by state (allocated, idle, down, reported)."""

    start: str
    end: str
    user: str
    users: dict[str, float]
    accounts: dict[str, float]
    utilization: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """As it stands in `--json`."""
        return asdict(self)


def read_usage(slurm: Slurm, user: str, start: str, end: str) -> Usage:
    """GPU hours by user and account, the largest first. Raises `UserError` for times that SLURM does not understand,
    `SlurmError` when it does not answer or has no accounting.

    SLURM adds up its hours when they are over: the present one is not in it.
    """
    period = (f"start={start}", f"end={end}", "--tres=gres/gpu", "-t", "hours", "--noheader", "--parsable2")
    users, accounts = defaultdict[str, float](float), defaultdict[str, float](float)
    fields = ["account", "login", "used"]
    try:
        text = slurm.run("sreport", "cluster", "AccountUtilizationByUser", *period, "format=account,login,used")
    except SlurmError as error:
        if WRONG_TIME not in str(error):
            raise
        raise UserError(
            f"--usage {start} {end}: SLURM does not understand one of these times; use 2026-06-01, now or now-7days"
        ) from error
    for row in _rows(text, fields):
        if row["login"]:  # a row without one is the sum of an account and those below it
            users[row["login"]] += float(row["used"])
            accounts[row["account"]] += float(row["used"])
    # Its own columns, since their names differ between versions.
    states = ["allocated", "down", "planned_down", "idle", "planned", "reported"]
    text = slurm.run("sreport", "cluster", "Utilization", *period)
    rows = list(_rows(text, ["cluster", "tres", *states]))
    utilization = {name: sum(float(row[name] or 0) for row in rows) for name in states}
    return Usage(start, end, user, _most(users), _most(accounts), utilization)


def _rows(text: str, fields: list[str]) -> Iterable[dict[str, str]]:
    try:
        return parse_rows(text, fields, "|")
    except SlurmError as error:
        raise SlurmError(f"sreport: {error}") from error


def _most(hours: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(hours.items(), key=lambda item: (-item[1], item[0])))

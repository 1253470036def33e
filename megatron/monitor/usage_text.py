"""Reports on the use of a cluster, as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from megatron.monitor.table import plain_lines
from megatron.monitor.usage import ClusterUse, Pool, Share, Usage

_STATES = ("idle", "mixed", "allocated", "down", "total")
_LARGEST = 20  # rows of a list of users


def cluster_lines(use: ClusterUse) -> list[str]:
    """Nodes and GPUs by state, of each partition; everybody's jobs; those of the user and his share."""
    mine, total = use.running.get(use.user, Share()), use.nodes.total.gpus
    allocated = use.nodes.allocated.gpus
    lines = ["nodes", *_pool_lines(use.nodes)]
    pools = [
        [name, *(f"{getattr(pool, state).nodes}/{getattr(pool, state).gpus}" for state in _STATES), _users(use, name)]
        for name, pool in sorted(use.partitions.items())
    ]
    lines += ["", "partitions, nodes/GPUs", *_table(["partition", *_STATES, "most GPUs"], pools)]
    names = dict.fromkeys([*use.running, *use.pending])
    rows = []
    for name in names:
        run, wait = use.running.get(name, Share()), use.pending.get(name, Share())
        share = _percent(run.gpus, total)
        rows.append([name, run.jobs, run.nodes, run.gpus, share, wait.jobs, wait.nodes, wait.gpus])
    titles = ["user", "running", "nodes", "GPUs", "of all", "pending", "nodes", "GPUs"]
    lines += ["", "users", *(_table(titles, rows) if rows else ["no jobs"])]
    jobs = [
        [
            *(job[name] for name in ("job_id", "name", "partition", "state")),
            job["nodes"],
            job["gpus"],
            job["time"],
            _why(job),
        ]
        for job in use.jobs
    ]
    titles = ["job", "name", "partition", "state", "nodes", "GPUs", "time", "reason or time left"]
    lines += ["", f"jobs of {use.user}", *(_table(titles, jobs) if jobs else ["none"])]
    share = f"{_percent(mine.gpus, total)} of the cluster, {_percent(mine.gpus, allocated)} of what is allocated"
    return [*lines, "", f"{use.user} runs on {mine.gpus} of {total} GPUs ({share})"]


def _pool_lines(pool: Pool) -> list[str]:
    rows = [
        [state, share.nodes, share.gpus, _percent(share.gpus, pool.total.gpus)]
        for state in _STATES
        for share in [getattr(pool, state)]
    ]
    return _table(["state", "nodes", "GPUs", "of all"], rows)


def _users(use: ClusterUse, partition: str) -> str:
    users = use.by_partition.get(partition, {})
    return ", ".join(f"{name} {share.gpus}" for name, share in list(users.items())[:3] if share.gpus)


def _why(job: Mapping[str, object]) -> str:
    return str(job["reason"] if job["state"] == "PENDING" else job["time_left"])


def usage_lines(usage: Usage) -> list[str]:
    """GPU hours by user and account, the user's own place, and how the GPUs were used."""
    lines = [f"GPU hours from {usage.start} to {usage.end}"]
    for title, hours in (("user", usage.users), ("account", usage.accounts)):
        total = sum(hours.values())
        rows = [
            [place, name, f"{value:,.0f}", f"{value / 24:,.1f}", _percent(value, total)]
            for place, (name, value) in enumerate(list(hours.items())[:_LARGEST], start=1)
        ]
        lines += [
            "",
            *(_table(["", title, "GPU hours", "GPU days", "of all"], rows) if rows else [f"no {title} has any"]),
        ]
    if usage.user in usage.users:
        mine, place = usage.users[usage.user], list(usage.users).index(usage.user) + 1
        lines += [
            "",
            f"{usage.user}: {mine:,.0f} GPU hours ({mine / 24:,.1f} days), place {place} of {len(usage.users)}",
        ]
    reported = usage.utilization.get("reported", 0.0)
    if reported:
        rows = [
            [name.replace("_", " "), f"{value:,.0f}", _percent(value, reported)]
            for name, value in usage.utilization.items()
        ]
        lines += ["", *_table(["GPUs were", "hours", "of all"], rows)]
    return lines


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(titles):
        numeric = number > 0 and all(str(row[number])[:1].isdigit() and "/" not in str(row[number]) for row in rows)
        table.add_column(title, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(str(one)) for one in row))
    return plain_lines(table)

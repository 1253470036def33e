r"""The agent that pdsh starts on each host: starts this host's ranks, ends with the launcher.

python slurm/run_module.py megatron.cluster.node --node_rank=1 --resources=... --master_addr=... --master_port=... \
    --config=... train.py
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron import log
from megatron.cluster.config_file import config_file
from megatron.cluster.devices import count_cores, count_gpus
from megatron.cluster.hostfile import Resources
from megatron.cluster.launchers import decode, parse_environment_file
from megatron.cluster.local import LocalJob, rank_environment, run_local
from megatron.cluster.status import stop_limits
from megatron.errors import UserError, run_cli
from megatron.flags import Parser
from megatron.home import LIBRARY
from megatron.secrets import is_secret_variable


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks of this host and return their exit code."""
    parser = Parser(prog="megatron.cluster.node", allow_abbrev=False, description=__doc__)
    parser.add_argument("--node_rank", type=int, required=True, help="this host's place in --resources")
    parser.add_argument("--resources", required=True, help="encoded {host: slots}")
    parser.add_argument("--master_addr", required=True, help="host of rank 0")
    parser.add_argument("--master_port", type=int, required=True, help="rendezvous port on that host")
    parser.add_argument("--config", required=True, help="encoded text of the resolved config")
    parser.add_argument("--log_folder", help="folder for rank_N.log")
    parser.add_argument("user_script", help="what every rank runs")
    given = parser.parse_args(argv)
    log.configure()
    resources, text = decode(given.resources), decode(given.config)
    if not isinstance(resources, dict) or not isinstance(text, str) or given.node_rank >= len(resources):
        raise UserError(f"--resources or --config does not fit --node_rank={given.node_rank}")
    for name, value in read_environment_files().items():  # the others came on the command line
        if is_secret_variable(name, value):
            os.environ.setdefault(name, value)
    with config_file(text) as resolved:
        job = node_job(
            resources,
            given.node_rank,
            [sys.executable, "-u", given.user_script, "--resolved", str(resolved)],
            master_addr=given.master_addr,
            master_port=given.master_port,
            log_folder=Path(given.log_folder) if given.log_folder else None,
            launcher_fd=2,
        )
        return run_local(replace(job, **stop_limits(json.loads(text)["values"]))).code


def node_job(
    resources: Resources,
    node_rank: int,
    command: Sequence[str],
    *,
    master_addr: str,
    master_port: int,
    log_folder: Path | None,
    launcher_fd: int | None = None,
) -> LocalJob:
    """The ranks of host number `node_rank`: numbered after those of the hosts before it."""
    sizes = [len(slots) for slots in resources.values()]
    slots = list(resources.values())[node_rank]
    first, world = sum(sizes[:node_rank]), sum(sizes)
    base = with_library_on_path(os.environ)
    gpus, cores = count_gpus(base), count_cores()
    picked = slots if slots != list(range(len(slots))) else None
    environments = [
        rank_environment(
            base,
            rank=first + local_rank,
            local_rank=local_rank,
            world_size=world,
            local_world_size=len(slots),
            master_addr=master_addr,
            master_port=master_port,
            cores=cores,
            gpus=gpus,
            devices=picked,
        )
        for local_rank in range(len(slots))
    ]
    return LocalJob(
        command, environments, first_rank=first, world_size=world, log_folder=log_folder, launcher_fd=launcher_fd
    )


def read_environment_files() -> dict[str, str]:
    """DeepSpeed's file for more variables, `.deepspeed_env`, at home and in the current folder; the nearer one wins."""
    found: dict[str, str] = {}
    for path in (Path.home() / ".deepspeed_env", Path.cwd() / ".deepspeed_env"):
        if path.is_file():
            found.update(parse_environment_file(path.read_text(encoding="utf-8"), str(path)))
    return found


def with_library_on_path(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with this library's folder at the end of PYTHONPATH, so that scripts may be anywhere."""
    root = str(LIBRARY)
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**env, "PYTHONPATH": os.pathsep.join([*paths, root] if root not in paths else paths)}


if __name__ == "__main__":
    run_cli(main, is_run=True)

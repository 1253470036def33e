"""A job on its way to a cluster: what has to be there first, and the command that submits it."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import secrets
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.cluster.profile import ClusterProfile, profile_folders
from megatron.cluster.slurm import SlurmError, parse_fields, submission, submitted_job
from megatron.jobs.clusters import Candidate
from megatron.jobs.travel import CLUSTERS, Luggage, pack
from megatron.jobs.tree import EXCLUDED, Tree
from megatron.log import get_logger, result

logger = get_logger(__name__)

SCRIPT = "pretrain_neox.sbatch"


@dataclass(frozen=True)
class Plan:
    """What is run on the head node, and what has to be there first. `folder`: where the job starts."""

    folder: str
    command: list[str]
    exports: dict[str, str]
    forwarded: dict[str, str]
    home: str
    tree: Tree | None = None
    luggage: Luggage | None = None
    submission: str = ""

    @property
    def command_line(self) -> str:
        """As in a shell, without the values of forwarded variables."""
        assigned = [f"{name}={shlex.quote(value)}" for name, value in self.exports.items()]
        return " ".join([*assigned, *(f"{name}=..." for name in self.forwarded), shlex.join(self.command)])


@dataclass(frozen=True)
class Job:
    """One submission to a cluster: `flags` for sbatch, `extra` overrides of the config."""

    chosen: Candidate
    experiment: str
    flags: list[str]
    extra: list[str]
    forwarded: dict[str, str] = field(repr=False)

    def in_place(self, root: Path, configs: Sequence[str], env: Mapping[str, str]) -> Plan:
        """From this machine and this folder, with the code as it lies here."""
        exports = self._exports(str(root))
        if self.chosen.profile.path.parent not in profile_folders(env):
            exports["DEEPY_CLUSTER"] = str(self.chosen.profile.path.resolve())
        if env.get("DEEPY_CLUSTERS"):
            exports["DEEPY_CLUSTERS"] = env["DEEPY_CLUSTERS"]
        return Plan(os.getcwd(), self._command(str(root / SCRIPT), configs), exports, self.forwarded, str(root))

    def shipped(self, repo: str, tree: Tree, configs: Sequence[str], profiles: Sequence[ClusterProfile]) -> Plan:
        """From the tree at a commit in `repo` of the cluster."""
        luggage = pack(configs, tree, profiles, to_here=self.chosen.head.alias is None)
        home = f"{repo}/commits/{tree.name}"
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        submission = f"{repo}/submissions/{self.experiment}-{now}-{secrets.token_hex(2)}"
        placed = [f"{home if in_tree else submission}/{name}" for in_tree, name in luggage.configs]
        exports = self._exports(home)
        if any(name.startswith(f"{CLUSTERS}/") for name in luggage.files):
            exports["DEEPY_CLUSTERS"] = f"{submission}/{CLUSTERS}"
        command = self._command(f"{home}/{SCRIPT}", placed)
        return Plan(repo, command, exports, self.forwarded, home, tree, luggage, submission)

    def _exports(self, home: str) -> dict[str, str]:
        profile = self.chosen.profile
        return {"DEEPY_HOME": home, "DEEPY_CLUSTER": profile.name, "DEEPY_EXPERIMENT": self.experiment}

    def _command(self, script: str, configs: Sequence[str]) -> list[str]:
        return [*submission(self.chosen.profile.submit_command), *self.flags, script, *configs, *self.extra]


def send(chosen: Candidate, plan: Plan, tree: Tree, luggage: Luggage) -> None:
    """Bring the tree, unless it is there, and the files of this submission to the cluster."""
    head, home = chosen.head, shlex.quote(plan.home)
    answer = head.run(
        f"""set -eu
mkdir -p {shlex.quote(plan.folder)}/commits {shlex.quote(plan.folder)}/submissions
find {shlex.quote(plan.folder)}/commits -maxdepth 1 -name '.incoming-*' -mtime +1 -exec rm -rf {{}} +
if [ -d {home} ]; then echo there; else mktemp -d {shlex.quote(plan.folder)}/commits/.incoming-XXXXXX; fi
"""
    ).strip()
    with tempfile.TemporaryDirectory(prefix="deepy-") as name:
        if answer != "there":
            folder = Path(name, "tree")
            folder.mkdir()
            tree.write(folder)
            logger.info(f"sending the code at {tree.commit} to {chosen.profile.name}:{plan.home}")
            head.send(folder, answer, *(f"--exclude={one}" for one in EXCLUDED))
            # Whole or not at all; somebody else may have been faster.
            head.run(f"mv -T {shlex.quote(answer)} {home} || {{ [ -d {home} ] && rm -rf {shlex.quote(answer)}; }}")
        if luggage.files:
            folder = Path(name, "submission")
            folder.mkdir()
            luggage.write(folder)
            head.send(folder, plan.submission)


def submit(chosen: Candidate, plan: Plan) -> None:
    """Submit, and print the number of the job and how to watch it."""
    lines = ["set -eu", f"cd {shlex.quote(plan.folder)}"]
    if plan.tree is not None:
        lines.append(_PREPARE.format(home=shlex.quote(plan.home)))
    output = next((flag for flag in plan.command if flag.startswith("--output=/")), None)
    if output is not None:
        lines.append(f"mkdir -p {shlex.quote(os.path.dirname(output.removeprefix('--output=')))}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in {**plan.exports, **plan.forwarded}.items()]
    lines.append(f"{shlex.join(plan.command)} </dev/null")
    answer = chosen.head.run("\n".join(lines) + "\n", seconds=120.0)
    for note in re.findall(r"^note: (.*)$", answer, re.MULTILINE):
        logger.warning(f"{chosen.profile.name}: {note}")
    job, fields = submitted_job(answer, f"{plan.command[0]} on {chosen.profile.name}"), {}
    with contextlib.suppress(SlurmError):
        fields = parse_fields(chosen.head.run(f"scontrol --oneliner show job {job} </dev/null"))
    result(f"submitted job {job} to {chosen.profile.name}")
    state, log = f"squeue --jobs={job}", f"tail -F {shlex.quote(fields.get('StdOut', ''))}"
    if chosen.head.alias is not None:
        state = f'bash -lc "{state}"'
    result(f"  state: {_typed_here(chosen, state)}")
    if "StdOut" in fields:
        result(f"  log:   {_typed_here(chosen, log)}")


# The environment and the compiled parts are those of the folder of the clusters' checkouts.
_PREPARE = """home={home}
if [ ! -e "$home/.venv" ]; then
    if [ -e .venv ]; then ln -s ../../.venv "$home/.venv"
    else echo "note: no environment in $PWD/.venv or $home/.venv; the job takes the python3 that it finds"; fi
fi
builders=megatron/data/index_builders
for source in "$home/$builders"/*.cpp; do
    name=$(basename "$source" .cpp)
    if cmp -s "$source" "$builders/$name.cpp"; then
        cp -n "$builders/_$name".*.so "$home/$builders/" 2>/dev/null || true
    fi
done"""


def _typed_here(chosen: Candidate, command: str) -> str:
    """A command of the head node as the user types it on this machine."""
    config = ["-F", chosen.head.ssh_config] if chosen.head.ssh_config else []
    return command if chosen.head.alias is None else shlex.join(["ssh", *config, chosen.head.alias, command])

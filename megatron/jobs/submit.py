"""Submit a training job from this machine to the first cluster that has idle nodes for it.

python slurm/submit.py -c configs/pythia/1B.yml run.yml -e my-run                the first idle cluster
python slurm/submit.py -c run.yml -e my-run -x "train_iters=100 seed=2" -n       what would be done, and nothing more
python slurm/submit.py -c run.yml -e my-run --cluster NAME --kind debug -- --nodes=2 --time=1:00:00

The clusters are those whose profile (slurm/README.md) has an `ssh` alias of your own ssh config; on a machine of a
cluster, that cluster takes jobs without ssh. The code is sent as it is at the last commit, once per commit: what a
waiting job will run does not change. Relative paths in a config are relative to `folders.repo` of the profile.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.cluster.profile import list_profiles, sbatch_flags
from megatron.data.order.sources import named_paths
from megatron.errors import UserError
from megatron.flags import Parser
from megatron.home import HOME
from megatron.jobs.clusters import DEFAULT_KIND, Candidate, Wanted, ask_all, choose, find_candidates
from megatron.jobs.overrides import adapt
from megatron.jobs.sending import Job, send, submit
from megatron.jobs.tree import Tree, read_tree
from megatron.log import configure, get_logger, result
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.derive import Facts, check_trainable, derive
from megatron.neox_arguments.problems import collector
from megatron.secrets import find_secrets

logger = get_logger(__name__)

_NAME = re.compile(r"\w[\w.+-]*")


def main(argv: Sequence[str], env: Mapping[str, str], root: Path = HOME) -> int:
    """The command line: returns 0, or raises `UserError` and `SlurmError`."""
    configure()
    given, flags = _parse(argv, env)
    extra = [word for text in given.extra for word in _words(text)]
    if missing := [name for name in given.forward if not env.get(name)]:
        raise UserError(f"--forward {missing[0]}: this variable is not set here")
    for secret in find_secrets("\n".join(flags)):
        raise UserError(
            f"the flags for sbatch hold {secret.kind}, and everybody on the machine can see a command line; --forward"
            " sends a variable that is set here"
        )
    NeoXArgs.from_files(given.config, extra)  # what is wrong with it is said before anybody is asked
    wanted, profiles = Wanted.from_flags(flags), list_profiles(env)
    candidates = find_candidates(profiles, env, given.cluster, given.ssh_config, given.kind, wanted)
    asked = ask_all(candidates, wanted)
    chosen = _choose(asked)
    profile = chosen.profile
    adapted = adapt(given.config, extra, profile, chosen.variables, others=profiles)
    for change in adapted.changes:
        result(f"on {profile.name}: {change}")
    args = _check_config(given.config, [*extra, *adapted.overrides], chosen, wanted)
    repo = profile.folder("repo", chosen.variables)
    _check_paths(args, chosen, repo or os.getcwd(), given.dry_run)
    forwarded = {name: env[name] for name in given.forward}
    job = Job(chosen, given.experiment, _flags(chosen, given.kind, flags), extra, forwarded)
    if repo is None and chosen.head.alias is not None:
        raise UserError(f"{profile.path}: folders.repo is missing: where the code goes on the cluster {profile.name}")
    if repo is not None and not repo.startswith("/"):
        raise UserError(f"{profile.path}: folders.repo: {repo} has to be an absolute path, or begin with ~")
    if repo is None:
        plan = job.in_place(root, given.config, env)
    else:
        known = [profile, *(one for one in profiles if one.name != profile.name)]
        plan = job.shipped(repo, _tree(root, given.allow_dirty, given.dry_run), given.config, known)
    if given.dry_run:
        result(f"in {plan.folder}: {plan.command_line}")
        return 0
    if plan.tree is not None and plan.luggage is not None:
        send(chosen, plan, plan.tree, plan.luggage)
    submit(chosen, plan)
    return 0


def parser() -> Parser:
    """The command's own flags, without those for sbatch."""
    flags = Parser(description=__doc__)
    flags.usage = "%(prog)s -c CONFIG [CONFIG ...] -e EXPERIMENT [flags] [-- sbatch flags]"
    add = flags.add_argument
    add("-c", "--config", nargs="+", required=True, metavar="CONFIG", help="config files, merged from left to right")
    add("-e", "--experiment", required=True, help="a name for the run: letters, digits, `.`, `_`, `+`, `-`")
    add("-x", "--extra", action="append", default=[], metavar="'KEY=VALUE ...'", help="values over those of the files")
    add("--cluster", metavar="NAME", help="take this one, idle or not (default: $DEEPY_CLUSTER, else the first idle)")
    kinds = f"the profile's number of nodes for this kind of job (default: {DEFAULT_KIND}; one node where it has none)"
    add("--kind", choices=("pretrain", "posttrain", "debug"), help=kinds)
    add("-n", "--dry-run", action="store_true", help="print the choice and the command; send and submit nothing")
    add("--allow-dirty", action="store_true", help="also send changes that are not committed, and keep them as a patch")
    forward = "set this variable for the job as it is here, such as WANDB_API_KEY (default: none; may be repeated)"
    add("--forward", action="append", default=[], metavar="VARIABLE", help=forward)
    ssh = "ssh config to read instead of your own (default: $DEEPY_SSH_CONFIG)"
    add("--ssh-config", metavar="FILE", help=ssh)
    return flags


def _parse(arguments: Sequence[str], env: Mapping[str, str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and what comes after `--`: flags for sbatch."""
    own, flags = list(arguments), []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    given = parser().parse_args(own)
    given.ssh_config = given.ssh_config or env.get("DEEPY_SSH_CONFIG")
    if not _NAME.fullmatch(given.experiment):
        raise UserError(f"-e {given.experiment!r}: a name has letters, digits, `.`, `_`, `+` and `-` only")
    return given, flags


def _words(text: str) -> list[str]:
    """The words of `-x`, as a shell would split them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"-x {text!r}: {error}") from error


def _choose(asked: Sequence[Candidate]) -> Candidate:
    """The cluster to take; prints the table of all, and warns when the job will wait."""
    chosen: Candidate | None = None
    try:
        chosen = choose(asked)
    finally:  # also where it raises: the table says why
        width = max(len(one.profile.name) for one in asked)
        for one in asked:
            result(one.row(width, one is chosen))
    if chosen.state != "idle":
        what = f"{chosen.idle} of the {chosen.nodes} nodes that the job needs are idle"
        logger.warning(f"{chosen.profile.name}: {what}{'' if len(asked) == 1 else ', as nowhere else'}; it will wait")
    for one in asked:
        if one.problem is not None:
            logger.warning(f"{one.profile.name}: {one.problem}")
    return chosen


def _check_config(paths: Sequence[str], overrides: Sequence[str], chosen: Candidate, wanted: Wanted) -> NeoXArgs:
    """Raise `UserError` for what the job would refuse after hours in the queue, as far as the config alone shows it."""
    per_node = None if wanted.has_tasks else chosen.profile.gpus_per_node
    with collector() as found:
        args = NeoXArgs.from_files(paths, overrides, problems=found)
        args = derive(args, Facts(chosen.nodes * per_node) if per_node else None, found)
        check_trainable(args, found)
    return args


def _check_paths(args: NeoXArgs, chosen: Candidate, folder: str, dry_run: bool) -> None:
    """Raise `UserError` (a dry run: warn) for data and tokenizer files that the head node does not see either."""
    profile, tokenizer = chosen.profile, args.tokenizer
    named = [*named_paths(args.data, ["train"]), tokenizer.vocab_file, tokenizer.merge_file]
    paths = [os.path.join(folder, path) for path in dict.fromkeys(named) if path]
    seen = [
        path for path in paths if not any(f"{path}/".startswith(f"{p.rstrip('/')}/") for p in profile.only_on_nodes)
    ]
    lines = [f"[ -e {p} ] || [ -e {p}.bin ] || echo {p}" for p in map(shlex.quote, seen)]
    missing = chosen.head.run("\n".join([*lines, ":"])).splitlines()
    if missing:
        prefix = os.path.dirname(missing[0])
        problem = UserError(
            f"{', '.join(missing)}: not there on the head node of {profile.name}. Copy it there, or, if only compute"
            f" nodes see it, write `only_on_nodes: [{prefix}]` into {profile.path}"
        )
        if not dry_run:
            raise problem
        logger.warning(f"{problem}")


def _flags(chosen: Candidate, kind: str | None, flags: Sequence[str]) -> list[str]:
    """The profile's flags for sbatch, then the user's, which win."""
    profile = chosen.profile
    own = sbatch_flags(profile, kind or (DEFAULT_KIND if DEFAULT_KIND in profile.nodes else None))
    if profile.gpus_per_node is not None:
        own.append(f"--gpus-per-node={profile.gpus_per_node}")
    if logs := profile.folder("logs", chosen.variables):
        own.append(f"--output={logs}/%x-%j.out")
    return [*own, *flags]


def _tree(root: Path, allow_dirty: bool, dry_run: bool) -> Tree:
    try:
        return read_tree(root, allow_dirty)
    except UserError as problem:
        if not dry_run:
            raise
        logger.warning(f"{problem}")
        return read_tree(root, allow_dirty=True)

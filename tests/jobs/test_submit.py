"""From a machine to a cluster: which one is chosen, what is sent, what is run there. ssh, rsync and SLURM's commands
are programs that note how they were called; each host of the fake ssh has a folder and a login shell of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.checkpoint.manifest import COMMIT_FILE, git_revision
from megatron.cluster.slurm import SlurmError
from megatron.errors import UserError
from megatron.jobs.heads import count_idle
from megatron.jobs.submit import main

SECRET = "hf_" + "Q7" * 17
PROGRAMS = {
    "ssh": """
while [ "${1#-}" != "$1" ]; do case $1 in --) shift; break;; -F|-o) shift 2;; *) shift;; esac; done
host=$1; shift
[ -d "$FAKE/hosts/$host" ] || { echo "ssh: connect to host $host: Connection refused" >&2; exit 255; }
tee -a "$FAKE/stdin" | env -i FAKE="$FAKE" HOME="$FAKE/hosts/$host" USER=ada PATH=/usr/bin:/bin bash -c "$*"
""",
    "rsync": """
set -- "${@: -2}"
[ "${2#*:}" = "$2" ] || set -- "$1" "${2#*:}"
mkdir -p "$2"; cp -a "$1." "$2"
""",
}
ON_HEADS = {
    "sinfo": """
[ ! -e "$HOME/sleep" ] || exec sleep 30
cat "$HOME/sinfo"
""",
    "sbatch": """
[ ! -e "$HOME/sbatch-fails" ] || { echo "sbatch: error: invalid account" >&2; exit 1; }
{ pwd; env | grep -E '^(DEEPY|HF)_'; } > "$HOME/job"
echo "note of the site's wrapper"
echo "4711;cluster"
""",
    "scontrol": 'echo "JobId=4711 JobName=neox-training StdOut=$HOME/logs/neox-training-4711.out"',
}
IDLE = "4|idle|up|main*|n[1-4]\n"
CONFIG = """num_layers: 2
hidden_size: 8
num_attention_heads: 2
seq_length: 8
max_position_embeddings: 8
train_micro_batch_size_per_gpu: 4
train_iters: 10
data_path: {data}/x
"""


def program(path: Path, name: str, text: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_text(f'#!/bin/bash\necho "{name} $*" >> "$FAKE/calls"\n{text.strip()}\n')
    (path / name).chmod(0o755)


class Site:
    """A machine with clusters behind ssh."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.clusters, self.root = folder, folder / "clusters", folder / "deepy"
        self.clusters.mkdir()
        (folder / "calls").write_text("")
        (folder / "stdin").write_text("")
        for name, text in PROGRAMS.items():
            program(folder / "bin", name, text)
        for name, text in ON_HEADS.items():
            program(folder / "slurm-bin", name, text)
        self.env = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": str(folder / "home"), "FAKE": str(folder)}
        self.env |= {"DEEPY_CLUSTERS": str(self.clusters)}
        for name in ("DEEPY_CLUSTER", "SLURM_JOB_ID", "DEEPY_SSH_CONFIG"):
            monkeypatch.delenv(name, raising=False)
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        (self.root / "configs").mkdir(parents=True)
        (folder / "data").mkdir()
        (folder / "data/x.bin").touch()
        self.text = CONFIG.format(data=folder / "data")
        (self.root / "configs/base.yml").write_text(self.text)
        (self.root / "pretrain_neox.sbatch").write_text("#!/bin/bash\n")
        self.git("init", "-q")
        self.commit()
        self.config = str(self.root / "configs/base.yml")

    def git(self, *command: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(
            ["git", "-C", str(self.root), *identity, *command], check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "x", "--allow-empty")
        return self.git("rev-parse", "HEAD")

    def cluster(self, name: str, priority: int, rows: str | None, **keys: object) -> Path:
        """A cluster and its head's folder; `rows`: what sinfo prints there, None: no such host."""
        host = self.folder / "hosts" / f"head-{name}"
        profile = {"ssh": f"head-{name}", "priority": priority, "folders": {"repo": "~/my deepy"}, **keys}
        (self.clusters / f"{name}.yml").write_text(yaml.safe_dump(profile))
        if rows is not None:
            host.mkdir(parents=True)
            (host / "sinfo").write_text(rows)
            # Only a login shell finds SLURM, and it greets.
            (host / ".bash_profile").write_text(f'echo "Welcome!"\nexport PATH={self.folder}/slurm-bin:$PATH\n')
        return host

    def calls(self, name: str) -> list[str]:
        return [line for line in (self.folder / "calls").read_text().splitlines() if line.startswith(f"{name} ")]

    def submit(self, *arguments: str, config: str | None = None) -> None:
        assert main(["-c", config or self.config, "-e", "exp1", *arguments], dict(os.environ), self.root) == 0


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def table(text: str) -> list[str]:
    """Name, count and state of each row, and which is selected."""
    return [re.sub(r"\s+", " ", line) for line in text.splitlines() if re.search(r" (idle|busy|unreachable)\b", line)]


@pytest.mark.parametrize(
    ("rows", "partition", "excluded", "idle"),
    [
        ("4|idle|up|main*|n[1-4]\n1|idle|up|main*|m7\n", None, (), 5),  # rows are summed
        ("2|idle|up|main*|n[1-2]\n2|idle|up|high|n[1-2]\n", "main,high", (), 2),  # in two partitions: once
        ("2|idle|up|main*|n[1-2]\n9|idle|up|other|o[1-9]\n", None, (), 2),  # the default partition
        ("2|idle|up|a|n[1-2]\n2|idle|up|b|n[2-3]\n", None, (), 3),  # there is no default partition
        ("2|idle*|up|main|n[1-2]\n1|drain|up|main|n3\n1|down|up|main|n4\n1|idle~|up|main|n5\n", "main", (), 1),
        ("1|plnd|up|main|n1\n1|resv|up|main|n2\n1|maint|up|main|n3\n1|idle|drain|main|n4\n", "main", (), 0),
        ("4|idle|up|main*|n[01-04]\n", None, ("n02,n[03-09]",), 1),
        ("3\n4\n", None, (), 7),  # sinfo of a site that takes no other format
        ("", "main", (), 0),
    ],
)
def test_idle_nodes(rows, partition, excluded, idle):
    assert count_idle(rows, partition, excluded) == idle


def test_the_first_with_enough_idle_nodes_is_taken(site, capsys):
    site.cluster("down", 1, None)
    site.cluster("full", 3, "")
    site.cluster("small", 4, "1|idle|up|main*|n1\n", nodes={"pretrain": 2})
    idle = site.cluster("free", 5, IDLE, nodes={"pretrain": 2})
    site.cluster("later", 6, IDLE)
    site.submit()
    printed = capsys.readouterr()
    rows = table(printed.out)
    assert rows == [
        "down 0 unreachable",
        "full 0 busy",
        "small 1 busy (2 needed)",
        "free 4 idle <-- SELECTED",
        "later 4 idle",
    ]
    assert "submitted job 4711 to free" in printed.out and f"{idle}/logs/neox-training-4711.out" in printed.out
    assert "Connection refused" in printed.err
    assert len(site.calls("sbatch")) == 1


def test_heads_are_asked_at_the_same_time_and_not_for_ever(site, capsys, monkeypatch):
    monkeypatch.setattr("megatron.jobs.heads.SECONDS", 3.0)
    for number in range(4):
        (site.cluster(f"hangs{number}", number, "") / "sleep").touch()
    site.cluster("free", 9, IDLE)
    before = os.times().elapsed
    site.submit("--dry-run")
    assert os.times().elapsed - before < 10  # one after the other: 12
    assert table(capsys.readouterr().out)[-1] == "free 4 idle <-- SELECTED"


def test_none_idle_is_a_warning_and_the_first_that_answers(site, capsys):
    site.cluster("down", 1, None)
    site.cluster("full", 2, "")
    site.cluster("small", 3, "1|idle|up|main*|n1\n", nodes={"pretrain": 8})
    site.submit("-n")
    printed = capsys.readouterr()
    assert table(printed.out) == ["down 0 unreachable", "full 0 busy <-- SELECTED", "small 1 busy (8 needed)"]
    assert "full: 0 of the 1 nodes" in printed.err


def test_a_chosen_cluster_that_is_busy_gets_the_job_with_a_warning(site, capsys, monkeypatch):
    site.cluster("free", 1, IDLE)
    host = site.cluster("full", 2, "")
    site.submit("--cluster", "full")
    printed = capsys.readouterr()
    assert table(printed.out) == ["full 0 busy <-- SELECTED"] and "full: 0 of the 1 nodes" in printed.err
    assert (host / "job").exists()
    monkeypatch.setenv("DEEPY_CLUSTER", "full")
    site.submit("-n")
    assert table(capsys.readouterr().out) == ["full 0 busy <-- SELECTED"]


def test_no_cluster_that_answers_is_a_failure(site, capsys):
    site.cluster("down", 1, None)
    with pytest.raises(SlurmError, match="down: .*Connection refused") as error:
        site.submit("-n")
    assert error.value.exit_code == 1 and table(capsys.readouterr().out) == ["down 0 unreachable"]
    with pytest.raises(SlurmError):
        site.submit("--cluster", "down")


def test_more_nodes_than_a_cluster_gives_a_job(site, capsys):
    site.cluster("small", 1, IDLE, max_nodes=2)
    site.cluster("large", 2, IDLE, max_nodes=4)
    site.submit("-n", "--", "-N", "3")
    assert table(capsys.readouterr().out) == ["small 4 busy (at most 2 nodes a job)", "large 4 idle <-- SELECTED"]
    with pytest.raises(UserError, match="small 2 .*large 4"):
        site.submit("-n", "--", "--nodes=5")


def test_a_site_s_own_command_instead_of_sbatch(site, capsys):
    site.cluster("free", 1, IDLE, submit_command="site_sbatch --check")
    program(site.folder / "slurm-bin", "site_sbatch", 'echo "checked: 100 ok"\necho "Submitted batch job 4712"')
    site.submit()
    assert "submitted job 4712 to free" in capsys.readouterr().out
    assert site.calls("site_sbatch")[0].startswith("site_sbatch --check --parsable ")
    program(site.folder / "slurm-bin", "site_sbatch", "echo no")
    with pytest.raises(SlurmError, match=r"site_sbatch on free answered 'no"):
        site.submit()


def test_what_is_run_on_the_head(site, capsys):
    keys = {"partition": "main", "account": "a1", "gpus_per_node": 4, "nodes": {"debug": 2}, "exclude_nodes": ["n1"]}
    keys["folders"] = {"repo": "${HOME}/my deepy", "logs": "${HOME}/logs"}
    host = site.cluster("free", 1, IDLE, submit_command="sbatch", **keys)
    commit = site.git("rev-parse", "HEAD")
    flags = ["--time=1:00:00", "--comment=two words"]
    site.submit("--kind", "debug", "-x", "train_iters=5 'save=A B'", "-x", "seed=2", "--", *flags)
    home = f"{host}/my deepy/commits/{commit}"
    (call,) = site.calls("sbatch")
    own = "--parsable --partition=main --account=a1 --exclude=n1 --nodes=2 --gpus-per-node=4"
    assert call == (
        f"sbatch {own} --output={host}/logs/%x-%j.out --time=1:00:00 --comment=two words {home}/pretrain_neox.sbatch"
        f" {home}/configs/base.yml train_iters=5 save=A B seed=2"
    )
    cwd, *variables = (host / "job").read_text().splitlines()
    assert cwd == f"{host}/my deepy" and (host / "logs").is_dir()
    (clusters,) = (host / "my deepy/submissions").glob("exp1-*/clusters")
    assert sorted(variables) == [
        "DEEPY_CLUSTER=free",
        f"DEEPY_CLUSTERS={clusters}",
        "DEEPY_EXPERIMENT=exp1",
        f"DEEPY_HOME={home}",
    ]
    assert any("-p main" in line for line in site.calls("sinfo"))
    assert yaml.safe_load((clusters / "free.yml").read_text())["account"] == "a1"
    assert "note of the site" not in capsys.readouterr().out


def test_a_dry_run_shows_the_command_and_leaves_nothing(site, capsys):
    host = site.cluster("free", 1, IDLE, grad_accumulation_multiplier=2, remap={str(site.folder / "data"): "/near"})
    site.submit("-n", "--forward", "PATH")
    out = capsys.readouterr().out
    assert f"on free: data_path: {site.folder}/data/x -> /near/x" in out
    assert "on free: train_micro_batch_size_per_gpu: 4 -> 2" in out
    assert "on free: gradient_accumulation_steps: not set -> 2" in out
    line = next(line for line in out.splitlines() if " sbatch " in line)
    assert f"in {host}/my deepy: " in line and "DEEPY_EXPERIMENT=exp1" in line and "PATH=... " in line
    assert not site.calls("rsync") and not site.calls("sbatch") and not (host / "my deepy").exists()


def test_the_tree_is_that_of_the_commit_and_sent_once(site, capsys):
    host = site.cluster("free", 1, IDLE)
    (site.root / "untracked.py").write_text("x")
    (site.root / ".gitignore").write_text("secret*\n")
    (site.root / "secret.env").write_text(SECRET)
    site.git("add", ".gitignore")
    site.git("commit", "-q", "-m", "y")
    first = site.git("rev-parse", "HEAD")
    builders = "megatron/data/index_builders"
    for folder, same in ((site.root, "1"), (host / "my deepy", "2")):
        (folder / builders).mkdir(parents=True)
        (folder / builders / "a.cpp").write_text("the same")
        (folder / builders / "b.cpp").write_text(same)
    for name in ("_a.x.so", "_b.x.so"):
        (host / "my deepy" / builders / name).write_text("compiled")
    site.git("add", builders)
    site.git("commit", "-q", "-m", "z")
    first = site.git("rev-parse", "HEAD")
    (host / "my deepy/.venv/bin").mkdir(parents=True)
    site.submit()
    trees = host / "my deepy/commits"
    assert sorted(path.name for path in trees.iterdir()) == [first]
    files = {path.relative_to(trees / first).as_posix() for path in (trees / first).rglob("*") if path.is_file()}
    own = {f"{builders}/{name}" for name in ("a.cpp", "b.cpp", "_a.x.so")}  # what was compiled from the same source
    assert files == {".commit", ".gitignore", "configs/base.yml", "pretrain_neox.sbatch"} | own
    assert (trees / first / ".commit").read_text().strip() == first and (trees / first / ".venv/bin").is_dir()
    sent = len(site.calls("rsync"))
    site.submit()
    assert len(site.calls("rsync")) == sent + 1  # only the profile and its folder
    (site.root / "pretrain_neox.sbatch").write_text("#!/bin/bash\n# new\n")
    second = site.commit()
    site.submit()
    assert (trees / first / "pretrain_neox.sbatch").read_text() == "#!/bin/bash\n"
    assert (trees / second / "pretrain_neox.sbatch").read_text() == "#!/bin/bash\n# new\n"
    assert not list(trees.glob(".incoming*"))


def test_a_run_from_such_a_tree_knows_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.checkpoint.manifest.LIBRARY", tmp_path)
    (tmp_path / COMMIT_FILE).write_text("abc-dirty\n")
    assert git_revision() == "abc-dirty"


def test_a_transfer_that_was_cut_short_is_no_tree(site):
    host = site.cluster("free", 1, IDLE)
    program(site.folder / "bin", "rsync", 'mkdir -p "${@: -1}"; echo "connection lost" >&2; exit 12')
    with pytest.raises(SlurmError, match="connection lost"):
        site.submit()
    assert not site.calls("sbatch") and not (host / "my deepy/commits" / site.git("rev-parse", "HEAD")).exists()
    program(site.folder / "bin", "rsync", PROGRAMS["rsync"])
    site.submit()
    assert (host / "my deepy/commits" / site.git("rev-parse", "HEAD") / "configs/base.yml").is_file()


def test_changes_are_refused_or_kept_as_a_patch(site):
    host = site.cluster("free", 1, IDLE)
    commit = site.git("rev-parse", "HEAD")
    (site.root / "pretrain_neox.sbatch").write_text("#!/bin/bash\n# changed\n")
    with pytest.raises(UserError, match=r"pretrain_neox\.sbatch.*--allow-dirty"):
        site.submit()
    assert not site.calls("sbatch")
    site.submit("-n")  # warns
    site.submit("--allow-dirty")
    (tree,) = (host / "my deepy/commits").iterdir()
    assert tree.name.startswith(f"{commit}-") and (tree / ".commit").read_text().strip() == f"{commit}-dirty"
    assert "# changed" in (tree / "pretrain_neox.sbatch").read_text()
    site.git("checkout", "-q", "pretrain_neox.sbatch")
    site.git("apply", str(tree / "uncommitted.patch"))
    assert (site.root / "pretrain_neox.sbatch").read_text() == "#!/bin/bash\n# changed\n"
    assert site.git("diff", "--cached", "--name-only") == ""  # the index is the user's


def test_configs_that_are_not_in_the_commit_travel_with_what_they_name(site, tmp_path):
    host = site.cluster("free", 1, IDLE)
    outside = tmp_path / "mine"
    (outside / "runs/mixtures").mkdir(parents=True)
    (outside / "base.yml").write_text(site.text.partition("data_path")[0])
    (outside / "runs/run.yml").write_text("extends: ../base.yml\nmixture: web\nplugins: [mine.py]\n")
    (outside / "runs/mixtures/web.yml").write_text(
        "mixture:\n  sources: {a: %s}\n  weights: {a: 1}\n" % (site.folder / "data/x")
    )
    (outside / "runs/mine.py").write_text("")
    site.submit(config=str(outside / "runs/run.yml"))
    (folder,) = (host / "my deepy/submissions").iterdir()
    names = {path.relative_to(folder / "configs").as_posix() for path in (folder / "configs").rglob("*.*")}
    assert names == {"base.yml", "runs/run.yml", "runs/mixtures/web.yml", "runs/mine.py"}
    assert f"{folder}/configs/runs/run.yml" in site.calls("sbatch")[0]
    (outside / "runs/run.yml").write_text(f"extends: {outside}/base.yml\ndata_path: {site.folder}/data/x\n")
    with pytest.raises(UserError, match=rf"run\.yml:1: extends: {outside}/base\.yml"):
        site.submit(config=str(outside / "runs/run.yml"))
    (site.root / "configs/new.yml").write_text(site.text)  # in the repository, and git does not know it
    site.submit(config=str(site.root / "configs/new.yml"))
    assert re.search(r"submissions/exp1-\S+/configs/new\.yml", site.calls("sbatch")[-1])


def test_a_forwarded_secret_is_in_no_command_and_no_file(site, monkeypatch, capsys):
    host = site.cluster("free", 1, IDLE)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("HF_OTHER", "not named")
    site.submit("--forward", "HF_TOKEN")
    printed = capsys.readouterr()
    job = (host / "job").read_text()
    assert f"HF_TOKEN={SECRET}" in job and "HF_OTHER" not in job
    (host / "job").unlink()
    assert SECRET in (site.folder / "stdin").read_text() and SECRET not in (site.folder / "calls").read_text()
    assert SECRET not in printed.out + printed.err
    for path in host.rglob("*"):
        assert not path.is_file() or SECRET not in path.read_text(), path
    with pytest.raises(UserError, match="NO_SUCH"):
        site.submit("--forward", "NO_SUCH")


def test_a_secret_in_flags_or_in_a_change_is_refused_without_being_shown(site):
    site.cluster("free", 1, IDLE)
    with pytest.raises(UserError, match="--forward") as error:
        site.submit("--", f"--export=ALL,HF_TOKEN={SECRET}")
    assert SECRET not in str(error.value)
    (site.root / "pretrain_neox.sbatch").write_text(f"#!/bin/bash\nexport HF_TOKEN={SECRET}\n")
    with pytest.raises(UserError, match="HF_TOKEN") as error:
        site.submit("--allow-dirty")
    assert SECRET not in str(error.value) and not site.calls("sbatch") and not site.calls("rsync")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["-x", "hiden_size=4"], "hidden_size"),
        (["-x", "train_batch_size=7"], "7 is not a multiple of"),
        (["-x", "save='a b"], "closing quotation"),
        (["--cluster", "fre"], "free"),
        (["--kind", "posttrain"], "posttrain"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(site, arguments, match):
    site.cluster("free", 1, IDLE)
    with pytest.raises(UserError, match=match):
        site.submit(*arguments)
    assert not site.calls("rsync") and not site.calls("sbatch")


def test_data_that_the_head_node_does_not_see(site, capsys):
    site.cluster("free", 1, IDLE)
    extra = ["-x", f"data_path={site.folder}/data/y vocab_file=tok.json"]
    with pytest.raises(UserError) as error:
        site.submit(*extra)
    for word in (f"{site.folder}/data/y", "my deepy/tok.json", "only_on_nodes", "free.yml"):
        assert word in str(error.value)
    assert not site.calls("sbatch")
    site.submit(*extra, "-n")
    assert f"{site.folder}/data/y" in capsys.readouterr().err
    site.cluster("free", 1, None, only_on_nodes=[str(site.folder)])
    site.submit(*extra)


def test_sbatch_s_refusal_is_shown(site):
    (site.cluster("free", 1, IDLE) / "sbatch-fails").touch()
    with pytest.raises(SlurmError, match="invalid account"):
        site.submit()


def test_a_cluster_without_ssh_gets_the_job_from_here(site, monkeypatch, capsys, tmp_path):
    (site.clusters / "here.yml").write_text(yaml.safe_dump({"detect": {"file": [str(site.root)]}}))
    monkeypatch.setenv("PATH", f"{site.folder}/slurm-bin:{os.environ['PATH']}")
    (site.folder / "home").mkdir()
    (site.folder / "home/sinfo").write_text(IDLE)
    monkeypatch.chdir(tmp_path)
    site.submit()
    assert not site.calls("ssh") and not site.calls("rsync")
    assert site.calls("sbatch") == [f"sbatch --parsable {site.root}/pretrain_neox.sbatch {site.config}"]
    cwd, *variables = (site.folder / "home/job").read_text().splitlines()
    assert cwd == str(tmp_path) and "DEEPY_CLUSTER=here" in variables
    (site.clusters / "here.yml").rename(tmp_path / "one.yml")
    site.submit("--cluster", str(tmp_path / "one.yml"))
    assert f"DEEPY_CLUSTER={tmp_path}/one.yml" in (site.folder / "home/job").read_text()
    (tmp_path / "two.yml").write_text(yaml.safe_dump({"folders": {"repo": str(tmp_path / "repo")}}))
    site.submit("--cluster", str(tmp_path / "two.yml"))
    tree = tmp_path / "repo/commits" / site.git("rev-parse", "HEAD")
    assert site.calls("sbatch")[-1] == f"sbatch --parsable {tree}/pretrain_neox.sbatch {tree}/configs/base.yml"
    assert (tree / ".commit").is_file() and list((tmp_path / "repo/submissions").glob("*/clusters/two.yml"))
    (tmp_path / "two.yml").write_text(yaml.safe_dump({"folders": {"repo": "repo"}}))
    with pytest.raises(UserError, match=r"two\.yml: folders\.repo: repo"):
        site.submit("--cluster", str(tmp_path / "two.yml"))
    site.submit()  # no profile is for this machine
    assert "DEEPY_CLUSTER=generic" in (site.folder / "home/job").read_text()


def test_the_command_line_as_a_user_types_it(site, tmp_path):
    """A fresh process, from another folder, in a clone of this repository's own entry point."""
    site.cluster("free", 1, IDLE)
    entry = Path(__file__).resolve().parents[2] / "slurm/submit.py"
    done = subprocess.run(
        [sys.executable, str(entry), "-c", site.config, "-e", "exp1", "-n"],
        cwd=tmp_path,
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert table(done.stdout) == ["free 4 idle <-- SELECTED"]
    wrong = subprocess.run([sys.executable, str(entry), "-c", site.config], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2 and "-e" in wrong.stderr

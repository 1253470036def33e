"""A real SLURM on this machine: munged, slurmdbd on a mariadb, slurmctld, one slurmd per virtual node, and sshd heads.

Everything lies below one folder and listens on ports of its own, so that several test runs do not meet. A `Keeper` ends
it all with the test run. SLURM's daemons change users and make device files, so they need root.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.real.keeper import Keeper, is_alive

PACKAGES = (
    "slurmctld slurmd slurmdbd slurm-client slurm-wlm-basic-plugins slurm-wlm-mysql-plugin munge mariadb-server "
    "openssh-server rsync"
)
_PROGRAMS = ("slurmctld", "slurmd", "slurmdbd", "sbatch", "munged", "mariadbd", "mariadb-install-db", "sshd", "rsync")
# the python3 of a job is that of the tests
_PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
_STARTUP = 40.0  # seconds a daemon may take on a loaded machine
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")
GPUS = 4
CORES = 8
TESTS_PROFILE = """\
partition: main
gpus_per_node: {gpus}
max_nodes: {nodes}
environment: {{GLOO_SOCKET_IFNAME: lo, TP_SOCKET_IFNAME: lo, MASTER_ADDR: 127.0.0.1, OMP_NUM_THREADS: "1"}}
"""


def find_obstacle() -> str | None:
    """Why SLURM cannot be started here; None when it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install --no-install-recommends {PACKAGES}"
    if os.geteuid() != 0:
        return "munged, slurmd and sshd of the tests need root here (they change users and make device files)"
    with tempfile.TemporaryDirectory() as folder:
        try:
            _make_device(Path(folder) / "null")
        except OSError as error:
            return f"cannot make device files, which stand for the GPUs of the nodes: mknod: {error.strerror}"
    return None


def _make_device(path: Path) -> None:
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null


def find_ports(count: int) -> list[int]:
    """`count` neighbouring TCP ports that are free, below those the system gives to clients."""
    while True:
        first = random.SystemRandom().randrange(10_000, 28_000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return list(range(first, first + count))


def await_true(check: Callable[[], bool], what: str, seconds: float, *, pid: int | None = None, log: Path) -> None:
    """Return when `check()` is true; fail with the end of `log` after `seconds`, or when the daemon `pid` has ended."""
    deadline = time.monotonic() + seconds
    while not check():
        if pid is not None and not is_alive(pid):
            raise AssertionError(f"{what}: the process ended. {log}:\n{read_tail(log)}")
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:g} s. {log}:\n{read_tail(log)}")
        time.sleep(0.05)


def read_tail(file: Path, lines: int = 30) -> str:
    """The last lines of a file, a note when there is none."""
    if not file.is_file():
        return "(no such file)"
    return "\n".join(file.read_text(errors="replace").splitlines()[-lines:])


def _run(
    argv: Sequence[str], environment: Mapping[str, str], timeout: float = 10.0
) -> subprocess.CompletedProcess[str]:
    """Run to the end; a command that hangs counts as failed with code 124."""
    try:
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as expired:
        return subprocess.CompletedProcess(argv, 124, "", f"not within {expired.timeout:g} s")


def _clean_environment() -> dict[str, str]:
    """Ours, without what a surrounding job or launcher set."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "PYTEST_"))}
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        ours.pop(name, None)
    return {**ours, "PATH": _PATH}


class Munge:
    """The daemon by which SLURM's parts know each other."""

    def __init__(self, keeper: Keeper, folder: Path) -> None:
        folder.mkdir(mode=0o755)
        self.socket, key, log = folder / "socket", folder / "key", folder / "log"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = [f"--key-file={key}", f"--socket={self.socket}", f"--pid-file={folder / 'pid'}"]
        files += [f"--seed-file={folder / 'seed'}", f"--log-file={log}"]
        pid = keeper.start(["munged", "--foreground", "--force", *files], _clean_environment(), folder / "output")
        await_true(self.socket.exists, "munged", _STARTUP, pid=pid, log=folder / "output")


class Accounting:
    """slurmdbd and its data base."""

    def __init__(self, keeper: Keeper, folder: Path, munge: Munge) -> None:
        folder.mkdir()
        self._keeper, self._folder, self._environment = keeper, folder, _clean_environment()
        self.port, database_port = find_ports(2)
        self._start_database(database_port)
        configuration = folder / "slurmdbd.conf"
        configuration.write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={munge.socket}\nDbdHost=localhost\nDbdAddr=127.0.0.1\n"
            f"DbdPort={self.port}\nSlurmUser=root\nLogFile={folder}/slurmdbd.log\nPidFile={folder}/slurmdbd.pid\n"
            f"StorageType=accounting_storage/mysql\nStorageHost=127.0.0.1\nStoragePort={database_port}\n"
            "StorageUser=slurm\nStoragePass=x\nStorageLoc=slurm_acct\n"
        )
        configuration.chmod(0o600)
        environment = {**self._environment, "SLURM_CONF": str(folder / "slurm.conf")}  # its own file lies next to it
        pid = keeper.start(["slurmdbd", "-D"], environment, folder / "slurmdbd.output")
        await_true(lambda: _listens(self.port), "slurmdbd", _STARTUP, pid=pid, log=folder / "slurmdbd.log")

    def _start_database(self, port: int) -> None:
        data, log, path = self._folder / "data", self._folder / "mariadb.log", self._folder / "socket"
        sizes = ["--innodb-log-file-size=8M", "--innodb-buffer-pool-size=64M"]
        install = ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root", *sizes]
        made = _run([*install, "--auth-root-authentication-method=normal", "--skip-test-db"], self._environment, 60)
        assert made.returncode == 0, f"mariadb-install-db: {made.stdout[-2000:]}{made.stderr[-2000:]}"
        server = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={path}", *sizes]
        server += [f"--port={port}", "--bind-address=127.0.0.1", f"--pid-file={self._folder / 'pid'}"]
        server += ["--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900", "--skip-log-bin"]
        pid = self._keeper.start(server, self._environment, log)
        client = ["mariadb", "--no-defaults", "-uroot", "-S", str(path), "-e"]
        await_true(
            lambda: path.exists() and _run([*client, "select 1"], self._environment).returncode == 0,
            *("mariadbd", _STARTUP),
            pid=pid,
            log=log,
        )
        statements = ["create database slurm_acct"]
        for host in ("localhost", "127.0.0.1"):
            statements += [
                f"create user slurm@'{host}' identified by 'x'",
                f"grant all on slurm_acct.* to slurm@'{host}'",
            ]
        granted = _run([*client, "; ".join(statements)], self._environment)
        assert granted.returncode == 0, granted.stderr


def _listens(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1.0)
        return client.connect_ex(("127.0.0.1", port)) == 0


@dataclass
class Cluster:
    """slurmctld and a slurmd for each of `nodes`. Times in seconds."""

    name: str
    nodes: list[str]
    folder: Path
    keeper: Keeper
    munge: Munge
    accounting: Accounting
    environment: dict[str, str] = field(default_factory=_clean_environment)
    _daemons: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in ("state", "spool", "log", "run", "dev", "clusters"):
            (self.folder / part).mkdir(parents=True)
        for number in range(GPUS):
            _make_device(self.folder / f"dev/nvidia{number}")
        self.profile = self.folder / f"clusters/{self.name}.yml"
        self.profile.write_text(TESTS_PROFILE.format(gpus=GPUS, nodes=len(self.nodes)))
        self.configuration = self.folder / "slurm.conf"
        self.environment |= {"SLURM_CONF": str(self.configuration)}
        self.environment |= {"DEEPY_CLUSTERS": str(self.profile.parent), "DEEPY_CLUSTER": self.name}
        self._write_configuration()
        self.run("sacctmgr", "-i", "add", "cluster", self.name)
        self._start()

    def _write_configuration(self) -> None:
        control, *ports = find_ports(1 + len(self.nodes))
        here, folder = socket.gethostname().partition(".")[0], self.folder
        address = f"NodeHostname={here} NodeAddr=127.0.0.1"
        has = f"CPUs={CORES} RealMemory=4000 Gres=gpu:{GPUS} State=UNKNOWN"
        lines = [f"NodeName={node} {address} Port={port} {has}" for node, port in zip(self.nodes, ports)]
        (folder / "gres.conf").write_text(f"NodeName={','.join(self.nodes)} Name=gpu File={folder}/dev/nvidia[0-3]\n")
        (folder / "slurm.conf").write_text(f"""\
ClusterName={self.name}
SlurmctldHost={here}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self.munge.socket}
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
FirstJobId={random.SystemRandom().randrange(1000, 60_000)}
KillWait=3
MinJobAge=3600
MessageTimeout=5
SlurmctldTimeout=30
SlurmdTimeout=9
InactiveLimit=0
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={self.accounting.port}
AccountingStoragePass={self.munge.socket}
AccountingStorageTRES=gres/gpu
{chr(10).join(lines)}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=3
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
""")

    def _start(self) -> None:
        log = self.folder / "log/slurmctld.log"
        control = self.keeper.start(["slurmctld", "-D"], self.environment, self.folder / "log/slurmctld.output")
        for node in self.nodes:
            self.start_node(node, wait=False)
        await_true(lambda: self._idle() == set(self.nodes), "slurmctld and its nodes", _STARTUP, pid=control, log=log)

    def _idle(self) -> set[str]:
        listed = _run(["sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N %T"], self.environment, 3)
        return {line.split()[0] for line in listed.stdout.splitlines() if line.endswith(" idle")}

    # what tests use

    def run(self, *argv: str, timeout: float = 30.0, folder: Path | None = None, **variables: str) -> str:
        """The stdout of a command that must succeed, run on the head of this cluster."""
        done = self.execute(*argv, timeout=timeout, folder=folder, **variables)
        assert done.returncode == 0, f"{' '.join(argv)}: code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def execute(
        self, *argv: str, timeout: float = 60.0, folder: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the head of this cluster, whatever comes of it."""
        environment = {**self.environment, **variables}
        return subprocess.run(
            argv, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False
        )

    def submit(self, *argv: str, folder: Path | None = None, **variables: str) -> str:
        """`sbatch ARGV` from `folder`; returns the job's id."""
        answer = self.run("sbatch", "--parsable", *argv, folder=folder, **variables)
        return answer.strip().partition(";")[0]

    def job(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job` (JobState, ExitCode, Reason, StdOut, Restarts, BatchHost, ...)."""
        text = self.run("scontrol", "show", "job", "-o", job).splitlines()[0]
        return dict(re.findall(r"(\S+?)=(.*?)(?= \S+?=|$)", text))

    def accounted(self, job: str, *fields: str, every_run: bool = False) -> list[dict[str, str]]:
        """Rows of sacct for the job itself, at least State and ExitCode; with `every_run` one for each start.

        Waits until accounting, which is a second or two late, knows the job's present state.
        """
        names = ["State", "ExitCode", *fields]
        options = ["-X", "-P", "-n", "-o", ",".join(names), "-j", job, *(["-D"] if every_run else [])]
        deadline = time.monotonic() + 20
        while True:
            rows = [dict(zip(names, row.split("|"))) for row in self.run("sacct", *options).splitlines()]
            if rows and rows[-1]["State"].split()[0] == self.job(job)["JobState"]:
                return rows
            assert time.monotonic() < deadline, f"sacct: {rows}; slurmctld: {self.job(job)['JobState']}"
            time.sleep(0.2)

    def wait(self, job: str, *states: str, timeout: float = 60.0) -> dict[str, str]:
        """Wait until the job is in one of `states` (none given: ended); returns its fields.

        A job that ends otherwise fails the test at once, with what it wrote.
        """
        wanted, deadline = states or ENDED, time.monotonic() + timeout
        while True:
            facts = self.job(job)
            if facts["JobState"] in wanted:
                return facts
            if time.monotonic() > deadline or facts["JobState"] in ENDED:
                raise AssertionError(f"job {job} is not {' or '.join(wanted)}:\n{self.explain(facts)}")
            time.sleep(0.1)

    def explain(self, facts: Mapping[str, str]) -> str:
        """The state of a job, the end of its output and of slurmctld's log, for a failure."""
        keys = ("JobState", "Reason", "ExitCode", "RunTime", "Restarts", "NodeList", "Command", "StdOut")
        output = read_tail(Path(facts.get("StdOut", "/nowhere")), 60)
        shown = " ".join(f"{key}={facts.get(key)}" for key in keys)
        return f"{shown}\n{output}\nslurmctld:\n{read_tail(self.folder / 'log/slurmctld.log', 8)}"

    def start_now(self, job: str, timeout: float = 30.0) -> None:
        """Start a requeued job without the two minutes that SLURM lets it wait."""
        self.wait(job, "PENDING", timeout=timeout)
        time.sleep(2.0)  # slurmd refuses a start in the second in which it ended the last one ("credential revoked")
        deadline = time.monotonic() + timeout
        while self.job(job)["JobState"] == "PENDING":
            assert time.monotonic() < deadline, self.explain(self.job(job))
            # refused while the last processes of the job end
            self.execute("scontrol", "update", f"JobId={job}", "StartTime=now")
            time.sleep(0.2)

    def cancel_all(self) -> None:
        """End every job and wait until all nodes are idle again; nodes that a test killed come back."""
        self.execute("scancel", "--full", "--signal=KILL", "--state=RUNNING", "-u", "root")
        self.execute("scancel", "-u", "root")
        for node in self.nodes:
            if not is_alive(self._daemons[node]):
                self.start_node(node, wait=False)
        down = [node for node in self.nodes if node not in self._idle()]
        if down:
            self.execute("scontrol", "update", f"NodeName={','.join(down)}", "State=RESUME")
        log = self.folder / "log/slurmctld.log"
        await_true(lambda: self._idle() == set(self.nodes), f"idle nodes of {self.name}", 40, log=log)

    def ranks(self, job: str) -> dict[int, int]:
        """Process ids of the running ranks of a job by their number."""
        ranks = {}
        for pid, variables in self._processes(SLURM_JOB_ID=job):
            if "SLURM_STEP_ID" in variables and _parent(pid)[1] == "slurmstepd":
                ranks[int(variables["SLURM_PROCID"])] = pid
        return ranks

    def kill_node(self, node: str) -> None:
        """SIGKILL for all that runs on a node, its slurmd first: as if its power failed."""
        doomed = {self._daemons[node]: None}
        for pid, _ in self._processes(SLURMD_NODENAME=node):
            doomed[pid] = None
            parent, program = _parent(pid)
            if program == "slurmstepd":
                doomed[parent] = None
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start_node(self, node: str, wait: bool = True) -> None:
        """Start the slurmd of a node (again)."""
        log = self.folder / f"log/{node}.output"
        self._daemons[node] = self.keeper.start(["slurmd", "-D", "-N", node], self.environment, log)
        if wait:
            await_true(lambda: node in self._idle(), f"{node} idle", _STARTUP, pid=self._daemons[node], log=log)

    def _processes(self, **wanted: str) -> list[tuple[int, dict[str, str]]]:
        """(process id, environment) of the processes of this cluster's jobs whose environment holds `wanted`."""
        wanted["SLURM_CONF"] = str(self.configuration)
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit():
                    entries = (folder / "environ").read_text(errors="replace").split("\0")
                    variables = dict(entry.split("=", 1) for entry in entries if "=" in entry)
                    if wanted.items() <= variables.items():
                        found.append((int(folder.name), variables))
        return found


def _parent(pid: int) -> tuple[int, str]:
    """(process id, program) of the parent; (0, "") when it is gone."""
    with contextlib.suppress(OSError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return parent, Path(f"/proc/{parent}/comm").read_text().strip()
    return 0, ""


class SshHeads:
    """sshd servers, one per cluster, each the head of its cluster, and an ssh config that names them all."""

    def __init__(self, keeper: Keeper, folder: Path, heads: Mapping[str, Cluster | None]) -> None:
        """`heads`: alias -> cluster, or None for a head on which nothing listens."""
        folder.mkdir()
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # compiled into sshd
        for key in ("host_key", "user_key"):
            made = _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], _clean_environment())
            assert made.returncode == 0, made.stderr
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        self.config = folder / "ssh_config"
        ports = find_ports(len(heads))
        self.config.write_text(
            "".join(f"Host {alias}\n  Port {port}\n" for alias, port in zip(heads, ports))
            + f"Host {' '.join(heads)}\n  HostName 127.0.0.1\n  User root\n  IdentityFile {folder}/user_key\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
            "  StrictHostKeyChecking accept-new\n  BatchMode yes\n  ConnectTimeout 5\n"
        )
        for (alias, cluster), port in zip(heads.items(), ports):
            if cluster is not None:
                self._start(keeper, folder / alias, port, cluster)

    def _start(self, keeper: Keeper, folder: Path, port: int, cluster: Cluster) -> None:
        (folder / "home").mkdir(parents=True)
        keys = folder.parent
        variables = {"SLURM_CONF": str(cluster.configuration), "HOME": str(folder / "home")}
        variables |= {name: cluster.environment[name] for name in ("DEEPY_CLUSTERS", "DEEPY_CLUSTER")}
        (folder / "sshd_config").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {keys}/host_key\nPidFile {folder}/pid\n"
            f"AuthorizedKeysFile {keys}/authorized_keys\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            "UsePAM no\nPermitRootLogin prohibit-password\nStrictModes no\nSubsystem sftp internal-sftp\n"
            f"SetEnv {' '.join(f'{name}={value}' for name, value in variables.items())}\n"
        )
        sshd, log = str(shutil.which("sshd", path=_PATH)), folder / "log"  # it wants its absolute path
        pid = keeper.start([sshd, "-D", "-e", "-f", str(folder / "sshd_config")], _clean_environment(), log)
        await_true(lambda: _listens(port), "sshd", _STARTUP, pid=pid, log=log)

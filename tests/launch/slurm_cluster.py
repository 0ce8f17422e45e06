"""A real Slurm of two nodes on this machine, for the time of the tests.

Needs root and Debian's packages slurm-wlm and munge.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.free_ports import free_port
from tests.patience import PATIENCE_S

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmctldPort={ports[0]}
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
# Without it nodes that have fewer cores than is said here take no work, and srun waits for ever.
SlurmdParameters=config_overrides
KillWait=5
# A node that does not answer for so long is down.
SlurmdTimeout=5
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 GraceTime=30 MaxTime=60
PartitionName=high Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF MaxTime=60
"""

NODES = ("n1", "n2")


def why_not() -> str:
    """Why there can be no Slurm here; empty where it can."""
    if os.geteuid() != 0:
        return "a Slurm of its own needs root"
    missing = [name for name in ("slurmctld", "slurmd", "munged") if shutil.which(name) is None]
    return f"there is no {', '.join(missing)}: apt-get install slurm-wlm munge" if missing else ""


@dataclass(frozen=True, slots=True)
class Slurm:
    """A running Slurm."""

    folder: Path
    environment: dict[str, str]

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def state_of(self, number: str) -> dict[str, str]:
        """What `scontrol show job` tells of a job."""
        words = self.ask("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_state(self, number: str, *states: str) -> dict[str, str]:
        """Until a job is in one of these states."""
        deadline_s = time.monotonic() + PATIENCE_S
        while (told := self.state_of(number))["JobState"] not in states:
            assert time.monotonic() < deadline_s, f"{told['JobState']}: {self.logs()}"
            time.sleep(0.2)  # Slurm tells of no change
        return told

    def lose(self, node: str) -> None:
        """Kill what runs on a node: its daemon, the steps of jobs, and their processes."""
        pid_file = self.folder / f"slurmd-{node}.pid"
        psutil.Process(int(pid_file.read_text())).kill()
        for each in _processes_of(node):
            step = each.parent()
            if step is not None and step.name() == "slurmstepd":
                step.kill()
            each.kill()

    def start_again(self, node: str) -> None:
        """Start a node that was lost."""
        _start(["slurmd", "-N", node], self.environment)
        _wait_for_nodes(self)

    def logs(self) -> str:
        """What everybody has logged."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in files)


def _processes_of(node: str) -> list[psutil.Process]:
    """Processes of jobs on a node, which Slurm tells where they are."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.environ().get("SLURMD_NODENAME") == node and each.name() != "slurmstepd":
                found.append(each)
    return found


@contextmanager
def slurm_in(folder: Path) -> Iterator[Slurm]:
    """Start munge, the controller and two nodes; end them, and all their jobs, afterwards."""
    host = os.uname().nodename.partition(".")[0]
    ports = [free_port() for _ in range(3)]
    text = CONFIGURATION.format(host=host, folder=folder, ports=ports)
    configuration = folder / "slurm.conf"
    configuration.write_text(text)
    (folder / "state").mkdir()
    environment = os.environ | {"SLURM_CONF": str(configuration)}
    slurm = Slurm(folder, environment)
    try:
        _start_munge(folder)
        _start(["slurmctld"], environment)
        for node in NODES:
            _start(["slurmd", "-N", node], environment)
        _wait_for_nodes(slurm)
        yield slurm
    finally:
        _end(folder, environment)


def _start_munge(folder: Path) -> None:
    """munged of its own, with a key of its own, at a socket of its own."""
    own = folder / "munge"
    own.mkdir(mode=0o755)
    key = own / "key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    named = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid"}
    files = [f"--{option}={own / name}" for option, name in {**named, "seed-file": "seed"}.items()]
    _start(["munged", "--force", *files], dict(os.environ))


def _start(command: list[str], environment: dict[str, str]) -> None:
    """Run a command that leaves a daemon behind."""
    subprocess.run(command, env=environment, timeout=PATIENCE_S, check=True, capture_output=True)


def _wait_for_nodes(slurm: Slurm) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while slurm.ask("sinfo", "--noheader", "--Node", "--format=%t").split() != ["idle"] * 4:
        assert time.monotonic() < deadline_s, slurm.logs()
        time.sleep(0.2)


def _end(folder: Path, environment: dict[str, str]) -> None:
    """End all daemons by their files, the jobs first."""
    cancel = ["scancel", "--signal=KILL", "--user=root"]
    subprocess.run(cancel, env=environment, timeout=PATIENCE_S, check=False, capture_output=True)
    files = [*(folder / f"slurmd-{node}.pid" for node in NODES), folder / "slurmctld.pid"]
    for file in [*files, folder / "munge" / "pid"]:
        try:
            pid = int(file.read_text())
        except (FileNotFoundError, ValueError):
            continue
        try:
            os.kill(pid, signal.SIGTERM)
            psutil.Process(pid).wait(PATIENCE_S)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue

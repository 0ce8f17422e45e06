"""Run a whole cluster on this machine: a coordinator and a few workers as child processes.

    with LocalCluster(workers=2) as cluster, cluster.client() as client:
        result = client.submit("job.yaml").result()

This module decides which commands run in which folders; supervisor.py keeps them alive. A restarted
coordinator has the same port and a restarted worker the same name, so a killed process only delays
the run. Everything listens on loopback only.
"""

import fcntl
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from stratagem.client.local.supervisor import Command, ProcessSupervisor, ProcessView, read_address
from stratagem.common.base.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    WrongStateError,
)
from stratagem.common.base.text import split_address
from stratagem.common.process.cpu_threads import ThreadChoice, bound_cores, threads_told
from stratagem.common.process.process import OwnFolder, remove_temporary, temporary_folder

if TYPE_CHECKING:
    from stratagem.client.sdk.blocking import Client

# ---- Cluster ----

COORDINATOR: Final = "coordinator"
READY_TIMEOUT_S: Final = 120.0

Argv = Callable[[Mapping[str, str]], list[str]]


def local_names(num_workers: int) -> tuple[str, ...]:
    """Return the names of the workers of a local cluster."""
    return tuple(f"worker-{number}" for number in range(num_workers))


def threads_each(asked: int | None, environ: Mapping[str, str] = os.environ) -> ThreadChoice:
    """Return the number of threads per worker of a local cluster: the requested number, else that
    of the environment, else one. The bits of a run depend on this number, and one suits every
    machine and number of workers; more threads do not speed up the steps of a small model."""
    if asked is not None:
        return ThreadChoice(asked)
    return threads_told(environ) or ThreadChoice(1, "--threads T for a large model")


@dataclass(slots=True, kw_only=True)
class LocalCluster:
    """A coordinator and workers as child processes; a context manager that starts and ends them."""

    workers: int = 2
    data_dir: Path | None = None
    """The folder for journal, states and logs; None for a temporary folder, removed at the end."""
    allow: Sequence[str] = ("*:*",)
    """The entry points (`module:name`, with wildcards) that jobs may name."""
    allow_code: str = "any"
    """The policy for code that jobs bring along, as for `stratagem worker --allow-code`."""
    import_path: Sequence[Path] = ()
    """The folders from which the workers import the user's modules."""
    data_root: Sequence[Path] = (Path("/"),)
    """The folders from which jobs may read `data.path`; any, as the jobs are the caller's own."""
    threads: int | None = None
    """The number of threads per worker; None for the default of `threads_each`."""
    listen: str = "127.0.0.1:0"
    failpoints: bool = False
    """Let tests kill each process at named places in its code ("failpoints"), by files in the
    folder data_dir/failpoints/<process name>."""
    environment: Mapping[str, str] = field(default_factory=dict)
    worker_arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Further command-line arguments, keyed by worker name, such as {"worker-0": ["--tags",
    "site-a"]}."""
    programs: Mapping[str, Sequence[str]] = field(
        default_factory=lambda: {
            "coordinator": [sys.executable, "-m", "stratagem.coordinator"],
            "worker": [sys.executable, "-m", "stratagem.worker"],
        }
    )
    _supervisor: ProcessSupervisor | None = field(init=False, default=None)
    _folder: Path = field(init=False, default_factory=Path)
    _lock: int = field(init=False, default=-1)
    _temporary: OwnFolder | None = field(init=False, default=None)
    """The temporary data folder, if no data_dir is given."""
    _owner: int = field(init=False, default=0)
    """The id of the process that started the cluster, as a fork of it must not end the cluster."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise InvalidInputError.at("workers", f"{self.workers} is not 0 or more")
        try:
            split_address(self.listen)
        except ValueError as error:
            raise InvalidInputError.at("listen", str(error)) from None

    # ---- life ----

    def start(self) -> Self:
        """Start all processes and wait until they are ready."""
        if self._supervisor is not None:
            return self
        self._folder, self._owner = self._make_folder(), os.getpid()
        self._check_listen()
        self._supervisor = ProcessSupervisor(
            [self._coordinator(), *map(self._worker, self.worker_names)]
        )
        self._supervisor.start()
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End all processes by SIGTERM, and by SIGKILL after a grace period. Idempotent; does
        nothing in a fork."""
        if self._supervisor is None or self._owner != os.getpid():
            return
        self._supervisor.close()
        self._supervisor = None
        self._leave_folder()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- use ----

    @property
    def address(self) -> str:
        """Return the host:port of the coordinator."""
        return self.processes[COORDINATOR].address

    @property
    def folder(self) -> Path:
        """Return the folder that holds the journal, states and logs."""
        return self._folder

    @property
    def worker_names(self) -> tuple[str, ...]:
        return local_names(self.workers)

    @property
    def processes(self) -> dict[str, ProcessView]:
        """Return the current state of all processes, keyed by name."""
        return {view.name: view for view in self._running().views()}

    def client(self) -> "Client":
        """Return a blocking client of this cluster."""
        from stratagem.client.sdk.blocking import Client

        return Client(self.address)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until every process is ready."""
        self._running().wait_ready(timeout_s)

    def wait_restarted(
        self, name: str, num_starts: int, timeout_s: float = READY_TIMEOUT_S
    ) -> None:
        """Wait until a process has been started more than num_starts times and is ready again."""
        self._running().wait_restarted(name, num_starts, timeout_s)

    def kill(self, name: str, signum: int = signal.SIGKILL) -> None:
        """Send a signal to a process; if it dies, it is restarted."""
        self._running().kill(name, signum)

    def failpoint_file(self, process: str, failpoint: str) -> Path:
        """Return the file that arms a failpoint of a process; it says how many hits to let pass."""
        return self._folder / "failpoints" / process / failpoint

    def log_tail(self, process: str) -> str:
        """Return the whole text that a process has written to its log."""
        return (self._folder / "logs" / f"{process}.log").read_text(errors="replace")

    # ---- how the processes are run ----

    def _running(self) -> ProcessSupervisor:
        if self._supervisor is None:
            raise NotFoundError("this local cluster is not running; call start()")
        if self._owner != os.getpid():
            raise WrongStateError(
                f"this local cluster belongs to process {self._owner}, "
                "and this process is a fork of it"
            )
        return self._supervisor

    def _make_folder(self) -> Path:
        """Create the data folder and its subfolders, lock it for this cluster, and return it."""
        if self.data_dir is None:
            self._temporary = temporary_folder("cluster")
            folder = self._temporary.path
        else:
            folder = Path(self.data_dir).absolute()
        names = [COORDINATOR, *self.worker_names]
        parts = ["logs", "ready", *names]
        if self.failpoints:
            parts += [f"failpoints/{name}" for name in names]
        for part in parts:
            (folder / part).mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / "cluster.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            address = read_address(folder / "ready" / COORDINATOR)
            where = f" {address}" if address else ""  # empty while it is starting
            raise ConflictError(
                f"another local cluster uses {folder}; talk to it with --coordinator{where}, "
                "or name another folder with --data-dir"
            ) from None
        return folder

    def _leave_folder(self) -> None:
        shutil.rmtree(self._folder / "ready", ignore_errors=True)  # no process serves now
        os.close(self._lock)
        if self._temporary is not None:
            self._temporary.remove()
            self._temporary = None
        remove_temporary()  # folders of killed processes

    def _check_listen(self) -> None:
        """Raise InvalidInputError if the coordinator cannot listen at its address; its own log
        would explain it less clearly."""
        host, port = split_address(self.listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            socket.create_server((host.strip("[]"), port), family=family).close()
        except OSError as error:
            self._leave_folder()
            reason = os.strerror(error.errno) if error.errno else str(error)
            text = f"{self.listen} cannot be listened on: {reason}; name another port"
            raise InvalidInputError.at("listen", text) from None

    def _coordinator(self) -> Command:
        def argv(addresses: Mapping[str, str]) -> list[str]:
            listen = addresses.get(COORDINATOR, self.listen)
            return [
                *self.programs["coordinator"],
                *("--listen", listen, "--health-port", "0"),
                *("--data-dir", str(self._folder / COORDINATOR)),
                *("--ready-file", str(self._ready_file(COORDINATOR))),
            ]

        return self._command(COORDINATOR, argv)

    def _worker(self, name: str) -> Command:
        threads = threads_each(self.threads, {**os.environ, **self.environment})
        arguments = self.worker_arguments.get(name, ())

        def argv(addresses: Mapping[str, str]) -> list[str]:
            return [
                *self.programs["worker"],
                *("--coordinator", addresses.get(COORDINATOR, "-"), "--name", name),
                *(() if "--tunnel" in arguments else ("--listen", "127.0.0.1:0")),
                *("--data-dir", str(self._folder / name)),
                *(part for pattern in self.allow for part in ("--allow", pattern)),
                *("--allow-code", self.allow_code),
                *(part for folder in self.import_path for part in ("--import-path", str(folder))),
                *(part for root in self.data_root for part in ("--data-root", str(root))),
                *("--threads", str(threads.number), "--ready-file", str(self._ready_file(name))),
                *arguments,
            ]

        return self._command(name, argv, (COORDINATOR,), "STRATAGEM_WORKER_PREVIOUS_EXIT")

    def _command(
        self, name: str, argv: Argv, needs: tuple[str, ...] = (), exit_variable: str = ""
    ) -> Command:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self.environment}
        if importlib.util.find_spec("obstore") is not None:
            store = f"file://{self._folder}/activations"
            environment.setdefault("STRATAGEM_WORKER_ACTIVATION_STORE", store)
        if self.failpoints:
            environment["STRATAGEM_FAILPOINTS"] = str(self._folder / "failpoints" / name)
        return Command(
            name=name,
            argv=argv,
            ready_file=self._ready_file(name),
            log_file=self._folder / "logs" / f"{name}.log",
            environment=environment,
            needs=needs,
            exit_variable=exit_variable,
        )

    def _ready_file(self, name: str) -> Path:
        return self._folder / "ready" / name


# ---- Settings of a run ----
#
# The settings of a run on a local cluster are kept beside its data for `resume --local`.


@dataclass(frozen=True, slots=True)
class LocalRun:
    """The settings of a local cluster for a run, saved for `resume --local`."""

    allow: tuple[str, ...]
    import_path: tuple[str, ...]
    tags: tuple[str, ...] = ()
    allow_code: str = "none"
    threads: int | None = None
    """The number of threads per worker. It stays when the number of workers changes, because the
    bits depend on it. None: the run was begun with 0.2.0, which did not record it."""

    def save(self, data_dir: Path, run_id: str) -> None:
        path = _local_run_file(data_dir, run_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, data_dir: Path, run_id: str) -> "LocalRun":
        path = _local_run_file(data_dir, run_id)
        try:
            document = json.loads(path.read_text())
        except FileNotFoundError:
            raise NotFoundError(f"no local run {run_id} in {data_dir}") from None
        lists = {name: tuple(value) for name, value in document.items() if isinstance(value, list)}
        return cls(**{**document, **lists})

    def threads_of(self, num_workers: int) -> ThreadChoice:
        """Return the threads per worker with which a run continues. For a run of version 0.2.0 it
        is what that version used: this process's cores divided among the workers."""
        number = self.threads or max(1, bound_cores() // num_workers)
        return ThreadChoice(number, "as it began")

    def with_code_in(self, overrides: list[str]) -> "LocalRun":
        """Return settings that also allow the user code named in these overrides of the job."""
        named = re.findall(r"[\w.]+:[A-Za-z_][\w.]*", " ".join(overrides))
        return replace(self, allow=tuple(dict.fromkeys((*self.allow, *named))))


def _local_run_file(data_dir: Path, run_id: str) -> Path:
    return data_dir / "runs" / f"{run_id}.json"

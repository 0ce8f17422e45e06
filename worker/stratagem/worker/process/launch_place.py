"""Read a process's place among those of a launcher, which gives its name, device and CPU cores.

The functions are pure; the environment is an argument. Launchers start equal processes and number
them in environment variables. Nothing here waits for all of them, since a coordinator accepts
workers as they come.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Literal

from stratagem.common.base.errors import InvalidInputError

Launcher = Literal["torchrun", "slurm", "kubernetes", "mpi", "env"]
"""A launcher whose environment variables are read; "env": whichever is found."""

COORDINATOR: Final = "STRATAGEM_COORDINATOR"
COORDINATOR_PORT: Final = 7070
MAX_NAME: Final = 64


@dataclass(frozen=True, slots=True)
class Place:
    """A process's place among those that a launcher has started."""

    launcher: Launcher
    name: str
    """The worker's name: letters, digits, "_" and "-", as in certificates of pools."""
    rank: int
    local_rank: int
    """The number of the process on this host."""
    num_local: int
    """Number of processes on the host; 1 if the launcher does not set it."""


def detect(wanted: Launcher, environ: Mapping[str, str], host: str, pid: int) -> Place:
    """Return the place of this process. host, pid: used for the name if the launcher sets none.

    Raises InvalidInputError that names missing or malformed variables.
    """
    if wanted != "env":
        return _PLACES[wanted](environ, host, pid)
    for launcher, signs in _SIGNS:
        if all(sign in environ for sign in signs):
            return _PLACES[launcher](environ, host, pid)
    options = ", ".join(f"{' and '.join(signs)} ({launcher})" for launcher, signs in _SIGNS)
    raise InvalidInputError.at("--rendezvous", f"env: no launcher has set its variables: {options}")


def coordinator_of(environ: Mapping[str, str]) -> str:
    """Return the coordinator's address from the environment, or "". MASTER_PORT is not used, since
    the launcher itself listens there."""
    if address := environ.get(COORDINATOR, ""):
        return address
    master = environ.get("MASTER_ADDR", "")
    if not master:
        return ""
    return f"[{master}]:{COORDINATOR_PORT}" if ":" in master else f"{master}:{COORDINATOR_PORT}"


def device_at(place: Place, num_visible: int) -> str:
    """Return the device for a place. num_visible: number of visible CUDA devices.

    A launcher shows each process either all devices of the host or only its own.
    """
    if num_visible == 0:
        return "cpu"
    if place.local_rank < num_visible:
        return f"cuda:{place.local_rank}"
    if num_visible == 1:
        return "cuda:0"
    problem = f"process {place.local_rank} of this host has none of its {num_visible} CUDA devices"
    raise InvalidInputError.at("--device", f"{problem}; start fewer, or say --device cpu")


def cores_at(place: Place, environ: Mapping[str, str], num_cores: int) -> int:
    """Return the number of cores for a place. num_cores: number of usable cores on the host."""
    if place.launcher == "slurm":
        if "SLURM_CPUS_PER_TASK" in environ:
            return max(1, min(num_cores, _number(environ, "SLURM_CPUS_PER_TASK")))
        num_on_node = _number(environ, "SLURM_CPUS_ON_NODE", default=num_cores)
        if num_cores < num_on_node:  # Slurm has bound the task to its cores
            return num_cores
        num_cores = num_on_node
    return max(1, num_cores // place.num_local)


def _torchrun(environ: Mapping[str, str], _host: str, _pid: int) -> Place:
    rank = _rank(environ, "RANK", "WORLD_SIZE")
    run = _text(environ, "TORCHELASTIC_RUN_ID")
    if run == "none":  # the id of each run without --rdzv-id
        run = f"{environ.get('MASTER_ADDR', '')}-{environ.get('MASTER_PORT', '')}"
    restarts = _number(environ, "TORCHELASTIC_RESTART_COUNT", default=0)
    local, num_local = _local(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Place("torchrun", _name("torchrun", run, restarts, rank), rank, local, num_local)


def _slurm(environ: Mapping[str, str], _host: str, _pid: int) -> Place:
    rank = _rank(environ, "SLURM_PROCID", "SLURM_NTASKS")
    restarts = _number(environ, "SLURM_RESTART_COUNT", default=0)  # absent at the first start
    name = _name("slurm", _text(environ, "SLURM_JOB_ID"), restarts, rank)
    local, _ = _local(environ, "SLURM_LOCALID", "")
    return Place("slurm", name, rank, local, _tasks_here(environ))


def _kubernetes(environ: Mapping[str, str], host: str, _pid: int) -> Place:
    rank = _rank(environ, "JOB_COMPLETION_INDEX", "")
    return Place("kubernetes", _name(environ.get("POD_NAME") or host), rank, 0, 1)


def _mpi(environ: Mapping[str, str], host: str, pid: int) -> Place:
    if "OMPI_COMM_WORLD_RANK" in environ:
        rank = _rank(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        sizes = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    else:
        rank = _rank(environ, "PMI_RANK", "PMI_SIZE")
        sizes = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return Place("mpi", _name("mpi", host, pid), rank, *_local(environ, *sizes))


def _plain(environ: Mapping[str, str], host: str, pid: int) -> Place:
    rank = _rank(environ, "RANK", "WORLD_SIZE")
    local, num_local = _local(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Place("env", _name("env", host, pid), rank, local, num_local)


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Return a Slurm step's number of tasks on this node: "4(x2),1" is 4, 4 and 1 per node."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not tasks:
        return 1
    node, counts = _number(environ, "SLURM_NODEID", default=0), list[int]()
    for item in tasks.split(","):
        matched = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if matched is None:
            raise _wrong("SLURM_STEP_TASKS_PER_NODE", tasks, 'is not like "4(x2),1"')
        counts += [int(matched[1])] * min(int(matched[2] or 1), node + 1)
    if node >= len(counts):
        raise _wrong("SLURM_NODEID", str(node), f"has no entry in {tasks!r}")
    return max(1, counts[node])


def _local(environ: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    """Return (rank on this host, number of processes on it); missing variables count as 0 and 1."""
    if rank not in environ:
        return 0, _number(environ, size, default=1) or 1
    return _rank(environ, rank, size), _number(environ, size, default=1) or 1


def _rank(environ: Mapping[str, str], name: str, size: str) -> int:
    """Return a rank from the environment; it must be lower than the size, if that is given."""
    rank = _number(environ, name)
    if size in environ and rank >= (most := _number(environ, size)):
        raise _wrong(name, str(rank), f"is not below {size}, which is {most}")
    return rank


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    if default is not None and name not in environ:
        return default
    text = _text(environ, name)
    if re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise _wrong(name, text, "is not a whole number from 0 on")
    return int(text)


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise InvalidInputError.at("--rendezvous", f"{name} is not set in the environment")
    return environ[name]


def _wrong(name: str, value: str, problem: str) -> InvalidInputError:
    return InvalidInputError.at("--rendezvous", f"{name} is {value!r}, which {problem}")


def _name(*parts: object) -> str:
    """Return the worker's name; a long one is cut and gets a digest of the whole."""
    whole = "-".join(re.sub(r"[^A-Za-z0-9_-]+", "-", str(part)) for part in parts)
    if len(whole) <= MAX_NAME:
        return whole
    return f"{whole[: MAX_NAME - 9]}-{blake2b(whole.encode(), digest_size=4).hexdigest()}"


_SIGNS: Final[tuple[tuple[Launcher, tuple[str, ...]], ...]] = (
    ("torchrun", ("TORCHELASTIC_RUN_ID", "RANK")),
    ("slurm", ("SLURM_PROCID", "SLURM_STEP_ID")),
    ("kubernetes", ("JOB_COMPLETION_INDEX",)),
    ("mpi", ("OMPI_COMM_WORLD_RANK",)),
    ("mpi", ("PMI_RANK",)),
    ("env", ("RANK", "MASTER_ADDR")),
)
"""The variables that reveal each launcher; torchrun is first, since others may have started it."""

_PLACES: Final = {
    "torchrun": _torchrun,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "mpi": _mpi,
    "env": _plain,
}

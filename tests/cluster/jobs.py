"""Jobs, their runs on the cluster, and the comparison of bits, for all tests of this folder."""

import fcntl
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from torch import Tensor

from stratagem.client.course.views import Event, RunStatus
from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client, RunHandle
from stratagem.common.base.errors import StratagemError
from stratagem.common.job import JobSpec
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.jobs import ALLOW, job, user_data
from tests.patience import PATIENCE_S
from tests.repository import ROOT

ALLOWED = EntryPoints([ALLOW])

MOMENTUM = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"name": "adamw", "lr": 0.01, "clip_norm": 0.5, "schedule": {"name": "cosine"}}
METHODS = ("AllReduce", "ParameterServer")
APART: dict[str, dict[str, Any]] = {
    "momentum": {},
    "adamw clip cosine": {"optimizer": ADAMW, "data": user_data("classes", num_rows=55)},
    "dropout": {
        "model": "dropout_mlp",
        "optimizer": {"name": "adam", "lr": 0.01},
        "accumulation": {"steps": 2},
    },
    "batch norm": {"model": "batch_norm_mlp", "data": user_data("classes", num_rows=42)},
    "tied and frozen": {"model": "everything", "optimizer": ADAMW},
}
"""Jobs of each kind of model and optimizer, for models that are trained apart and meet.

50 rows in batches of 16: the last batch of an epoch has 2 rows, fewer than there are models, some
of which then only meet. 55 rows: the last one has 7. Batch norm refuses shards of one row.
"""


def data_parallel(num_replicas: int, method: str = "AllReduce") -> dict[str, Any]:
    return {
        "type": "DataParallel",
        "num_replicas": num_replicas,
        "aggregation": {"method": method},
    }


def gossip(num_replicas: int, topology: str = "ring") -> dict[str, Any]:
    return {
        "type": "DataParallel",
        "num_replicas": num_replicas,
        "aggregation": {"method": "Decentralized", "topology": topology},
    }


def local_steps(
    num_replicas: int, count: int, method: str = "AllReduce", **options: Any
) -> dict[str, Any]:
    return {**data_parallel(num_replicas, method), "options": {"local_steps": count, **options}}


Cut = Mapping[str, str] | Sequence[tuple[str, str]]
""" "node ids" → the worker's name, or "tag:NAME"."""


def model_parallel(
    cut: Cut, *, schedule: str | None = None, **communication: Any
) -> dict[str, Any]:
    """Direct unless changed."""
    pairs = cut.items() if isinstance(cut, Mapping) else cut
    return {
        "type": "ModelParallel",
        "partitions": [
            {
                "node_ids": ids.split(),
                "target": {"Tag": worker[4:]} if worker[:4] == "tag:" else {"WorkerId": worker},
            }
            for ids, worker in pairs
        ],
        "communication": {"protocol": "Direct", **communication},
        "options": {} if schedule is None else {"schedule": schedule},
    }


def replicated(
    num_replicas: int, inner: dict[str, Any], method: str = "AllReduce", **options: Any
) -> dict[str, Any]:
    """Data parallelism over pipelines, or over groups of replicas."""
    strategy = data_parallel(num_replicas, method)
    return {**strategy, "options": {"inner": inner, **options}}


def federated(
    model: str | dict[str, Any] = "mlp",
    *,
    num_clients: int = 4,
    rounds: int = 3,
    aggregation: Mapping[str, Any] | None = None,
    selection: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **changes: Any,
) -> JobSpec:
    """FedAvg with plain SGD unless changed."""
    strategy = {
        "type": "Federated",
        "num_clients": num_clients,
        "rounds": rounds,
        "aggregation": aggregation or {"method": "FedAvg"},
        "client_selection": selection or {"method": "All"},
        "options": options or {},
    }
    sections = {"optimizer": {"name": "sgd", "lr": 0.1}, **changes}
    return job(model, strategy=strategy, **sections)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a completed run has left."""

    run: RunHandle
    status: RunStatus
    events: list[Event]
    state: dict[str, Tensor]

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def digests(self) -> list[str]:
        """Of every commit, in order."""
        return [event.payload["digest"] for event in self.of("SegmentCommitted")]


def cluster_of(
    folder: Path,
    arguments: Sequence[Sequence[str]],
    *,
    worker: Path | None = None,
    **settings: Any,
) -> LocalCluster:
    """Of a test whose workers differ from those of all others: the arguments of each of them.

    worker: a program of the tests that they run.
    """
    if worker is not None:
        settings["programs"] = {
            "coordinator": [sys.executable, "-m", "stratagem.coordinator"],
            "worker": [sys.executable, str(worker)],
        }
    return LocalCluster(
        workers=len(arguments),
        threads=1,
        data_dir=folder / "cluster",
        worker_arguments={f"worker-{n}": [*each] for n, each in enumerate(arguments)},
        **{"import_path": [ROOT], "allow": [ALLOW], **settings},
    )


def events_of(run: RunHandle) -> list[Event]:
    """All events until the run has ended."""
    return [item for item in run.watch() if isinstance(item, Event)]


def wait_for(
    run: RunHandle, kind: str, count: int = 1, where: Callable[[Event], bool] = lambda _: True
) -> list[Event]:
    """The events of a kind (that fulfil a condition) so far, once there are `count`."""
    seen: list[Event] = []
    for item in run.watch():
        if isinstance(item, Event) and item.kind == kind and where(item):
            seen.append(item)
            if len(seen) == count:
                return seen
    raise AssertionError(f"{run.run_id} ended without {count} {kind}: {run.status().reason}")


def outcome_of(run: RunHandle) -> Outcome:
    """Wait for the end, and raise what the caller would see when it is a bad one.

    A run that is not waited for to its end, as the test's time is over, is stopped: those of other
    tests wait for its workers.
    """
    try:
        status = run.result().status
    except StratagemError:
        raise
    except BaseException:
        with suppress(StratagemError):
            run.cancel()
        raise
    return Outcome(run, status, events_of(run), run.state_dict())


def train(client: Client, spec: JobSpec, **submit: Any) -> Outcome:
    return outcome_of(client.submit(spec, **submit))


def assert_same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


class Gates:
    """Closed until opened; see userland.Gated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[str, IO[str]] = {}

    def close(self, *names: str) -> None:
        for name in names:
            (self.folder / f"{name}.reached").unlink(missing_ok=True)  # of an earlier run
            file = (self.folder / name).open("w")
            fcntl.flock(file, fcntl.LOCK_EX)
            self._held[name] = file

    def wait_reached(self, *names: str, timeout_s: float = PATIENCE_S) -> None:
        """Until somebody stands at each of the gates."""
        deadline_s = time.monotonic() + timeout_s
        pause = threading.Event()
        while not all((self.folder / f"{name}.reached").exists() for name in names):
            assert time.monotonic() < deadline_s, f"nobody stands at one of {names}"
            pause.wait(0.01)

    def open(self, *names: str) -> None:
        """All when none is named."""
        for name in names or tuple(self._held):
            self._held.pop(name).close()


@contextmanager
def gates_in(folder: Path) -> Iterator[Gates]:
    """Whatever happens, nobody is left waiting."""
    gates = Gates(folder)
    try:
        yield gates
    finally:
        gates.open()


def park(cluster: LocalCluster, lot: Gates, name: str) -> None:
    """Drain a worker and keep it away."""
    pid = cluster.processes[name].pid
    assert pid is not None
    process = psutil.Process(pid)
    lot.close(name)
    cluster.kill(name, signal.SIGTERM)
    process.wait(timeout=PATIENCE_S)


SPACE = {
    "optimizer.lr": {"low": 0.001, "high": 1.0, "scale": "log"},
    "optimizer.momentum": {"low": 0.0, "high": 0.95},
}


def population(
    size: int = 4,
    generations: int = 3,
    exploit: dict[str, Any] | None = None,
    explore: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> JobSpec:
    strategy = {
        "type": "PopulationBased",
        "population_size": size,
        "generations": generations,
        "exploit": exploit or {"method": "Truncation", "fraction": 0.5},
        "explore": explore or {"method": "Perturbation", "factor": 0.2},
        "options": options or {},
    }
    sections: dict[str, Any] = {
        "search_space": SPACE,
        "steps_per_generation": 3,
        "evaluation": {"split": "test", "metrics": ["accuracy"], "best": "loss", "mode": "min"},
        "steps": None,
        "checkpoint": None,
        **changes,
    }
    return job(strategy=strategy, **sections)

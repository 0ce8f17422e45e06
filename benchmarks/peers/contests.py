"""Who takes part in the contests of `benchmarks/race.py`, and how each of them is measured."""

import json
import math
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import federated_round, population
from benchmarks.peers import environments, flower_deployment
from benchmarks.peers.environments import ROOT, Peer
from benchmarks.peers.training import GLOBAL_BATCH, MARKS, take_marks

BESIDE = Path(sys.executable).parent
PEERS = ROOT / "benchmarks" / "peers"
MEMBERS, GENERATIONS = 4, 10
FEDERATED_MB, FEDERATED_ROUNDS, WARMUP_ROUNDS = 4, 20, 3
DEPLOYED_ROUNDS = 4
PATIENCE_S = 300.0
STEPS = {"mlp": 100, "transformer": 12}
WARMUP_STEPS = {"mlp": 20, "transformer": 3}


@dataclass(frozen=True, slots=True)
class Measure:
    """One contestant's result in one round."""

    seconds: float
    cpu_s: float
    memory: float | None = None
    """Peak of the server above what it had before, in models."""


@dataclass(slots=True)
class Contestant:
    name: str
    run: Callable[[], Measure] | None
    reason: str = ""
    """Why it cannot run."""
    target: float | None = None
    """What our time should be at most of this one's."""
    measures: list[Measure] = field(default_factory=list)


# ---- whole commands ----


@contextmanager
def marks_in(environment: dict[str, str]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        environment[MARKS] = folder
        yield Path(folder)


def command(words: list[str], environment: Mapping[str, str] = {}) -> tuple[float, Measure]:
    """When it began, and what it took from there to its end."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{words} ended with {done.returncode}: {done.stderr[-2000:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return began, Measure(took, cpu_s)


def ours(job: Mapping[str, Any], environment: Mapping[str, str] = {}) -> tuple[float, Measure]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        words = [str(BESIDE / "stratagem"), "run", str(path), "--local", "2"]
        return command([*words, "--data-dir", f"{folder}/data"], environment)


def torchrun(*arguments: str) -> list[str]:
    options = ("--standalone", "--nproc-per-node", "2")
    return [str(BESIDE / "torchrun"), *options, str(PEERS / "ddp.py"), *arguments]


def step_job(name: str, steps: int) -> dict[str, Any]:
    """Trains one segment: nothing is committed before the end."""
    return {
        "name": name,
        "model": {"entrypoint": "benchmarks.peers.training:Marked", "kwargs": {"name": name}},
        "data": {"entrypoint": "benchmarks.peers.training:load", "kwargs": {"name": name}},
        "loss": "benchmarks.peers.training:loss",
        "optimizer": {"name": "sgd", "lr": 0.001, "momentum": 0.9},
        "batch_size": GLOBAL_BATCH[name],
        "steps": steps,
        "checkpoint": {"every": f"{steps} steps"},
        "strategy": {
            "type": "DataParallel",
            "num_replicas": 2,
            "aggregation": {"method": "AllReduce"},
        },
    }


def to_first_step(run: Callable[[Mapping[str, str]], tuple[float, Measure]]) -> Measure:
    """Until the last member begins its second step; the CPU is that of the whole command."""
    environment: dict[str, str] = {}
    with marks_in(environment) as folder:
        began, whole = run(environment)
        seconds = max(marks[1][0] for marks in take_marks(folder)) - began
    return Measure(seconds, whole.cpu_s)


# ---- steps ----


def per_step(marks: list[list[tuple[float, float]]], warmup: int) -> Measure:
    """Mean seconds of a step of the slower member, and CPU seconds of both."""
    spans = [(each[-1], each[warmup], len(each) - 1 - warmup) for each in marks]
    return Measure(
        max((last[0] - first[0]) / count for last, first, count in spans),
        sum((last[1] - first[1]) / count for last, first, count in spans),
    )


def our_steps(client: Any, folder: Path, name: str) -> Measure:
    client.submit(step_job(name, STEPS[name])).result()
    return per_step(take_marks(folder), WARMUP_STEPS[name])


def torchrun_steps(name: str, *more: str) -> Measure:
    environment: dict[str, str] = {}
    with marks_in(environment) as folder:
        command(torchrun(name, str(STEPS[name]), *more), environment)
        return per_step(take_marks(folder), WARMUP_STEPS[name])


# ---- federated rounds ----


def our_rounds() -> Measure:
    median, _, _, cpu_s, models = federated_round.measure(FEDERATED_MB, 2, FEDERATED_ROUNDS)
    return Measure(median, cpu_s, models)


def floor_rounds() -> Measure:
    words = federated_round.floor(FEDERATED_MB, FEDERATED_ROUNDS).split()
    return Measure(float(words[-4]), float(words[-1]))


def flower_rounds(python: Path) -> Measure:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    script = [str(python), str(PEERS / "flower_rounds.py")]
    numbers = map(str, (FEDERATED_MB, FEDERATED_ROUNDS, 2))
    quiet: dict[str, Any] = {
        "stderr": subprocess.DEVNULL,
        "text": True,
        "env": {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"},
    }
    with ExitStack() as stack:

        def start(*words: str) -> subprocess.Popen[str]:
            process = subprocess.Popen([*script, *words], stdout=subprocess.PIPE, **quiet)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        server = start("server", address, *numbers)
        assert server.stdout is not None
        patience = threading.Timer(PATIENCE_S, server.kill)
        stack.callback(patience.cancel)
        patience.start()
        pids, ends, base, peak = [server.pid], [], 0, 0
        for line in server.stdout:
            match line.split():
                case ["begins"]:  # it serves: a client that comes before would give up
                    pids += [start("client", address).pid for _ in range(2)]
                    base = federated_round.resident_bytes(server.pid, "VmRSS")
                    federated_round.reset_peak(server.pid)
                case ["round", now_s]:
                    ends.append((float(now_s), federated_round.cpu_s(pids)))
                    peak = federated_round.resident_bytes(server.pid, "VmHWM")
    if len(ends) < FEDERATED_ROUNDS:
        raise RuntimeError(f"Flower ended after {len(ends)} rounds")
    kept = ends[WARMUP_ROUNDS:]
    seconds = statistics.median(b[0] - a[0] for a, b in pairwise(kept))
    cpu_s = (kept[-1][1] - kept[0][1]) / (len(kept) - 1)
    return Measure(seconds, cpu_s, (peak - base) / (FEDERATED_MB * 1e6))


def flower_deployed(python: Path) -> Measure:
    ends = flower_deployment.round_ends(python, FEDERATED_MB, DEPLOYED_ROUNDS)
    return Measure(statistics.median(b - a for a, b in pairwise(ends)), math.nan)


# ---- contests ----


def first_step(_peers: Path, _stack: ExitStack) -> list[Contestant]:
    job, import_torch = step_job("mlp", 3), [sys.executable, "-c", "import torch"]
    return [
        Contestant("stratagem run --local 2", lambda: to_first_step(partial(ours, job))),
        Contestant(
            f"torchrun, DDP (torch {torch.__version__})",
            lambda: to_first_step(partial(command, torchrun("mlp", "3"))),
            target=1.0,
        ),
        Contestant("floor: import of torch", lambda: command(import_torch)[1]),
    ]


def populations(peers: Path, _stack: ExitStack) -> list[Contestant]:
    job = population.job(MEMBERS, GENERATIONS)
    return [
        Contestant("stratagem run --local 2", lambda: ours(job)[1]),
        _of(environments.ray(peers), ray_population, 0.4),
        Contestant("floor: a run of one step", lambda: ours(step_job("mlp", 1))[1]),
    ]


def ray_population(python: Path) -> Measure:
    quiet = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory() as folder:
        script = [str(python), str(PEERS / "ray_population.py")]
        return command([*script, str(MEMBERS), str(GENERATIONS), folder], quiet)[1]


def federated(peers: Path, _stack: ExitStack) -> list[Contestant]:
    flower = environments.flower(peers)
    return [
        Contestant("stratagem, durable", our_rounds),
        _of(replace(flower, name=f"{flower.name}, `start_server`"), flower_rounds, 0.6),
        Contestant("floor: `federated_floor.py`", floor_rounds),
    ]


def deployed(peers: Path, _stack: ExitStack) -> list[Contestant]:
    flower = environments.flower(peers)
    return [
        Contestant("stratagem, durable", our_rounds),
        _of(replace(flower, name=f"{flower.name}, SuperLink"), flower_deployed, None),
    ]


def steps_of(name: str, target: float, _peers: Path, stack: ExitStack) -> list[Contestant]:
    from stratagem.client import LocalCluster

    environment: dict[str, str] = {}
    folder = stack.enter_context(marks_in(environment))
    cluster = stack.enter_context(
        LocalCluster(workers=2, threads=1, import_path=(ROOT,), environment=environment)
    )
    client = stack.enter_context(cluster.client())
    return [
        Contestant("stratagem, AllReduce", lambda: our_steps(client, folder, name)),
        Contestant(
            f"torchrun, DDP (torch {torch.__version__})",
            lambda: torchrun_steps(name),
            target=target,
        ),
        Contestant("floor: no exchange", lambda: torchrun_steps(name, "alone")),
    ]


def _of(peer: Peer, run: Callable[[Path], Measure], target: float | None) -> Contestant:
    if peer.python is None:
        return Contestant(peer.name, None, peer.reason, target)
    return Contestant(peer.name, partial(run, peer.python), target=target)


CONTESTS: Mapping[str, Callable[[Path, ExitStack], list[Contestant]]] = {
    "first-step": first_step,
    "population": populations,
    "federated": federated,
    "federated-default": deployed,
    "mlp": partial(steps_of, "mlp", 0.60),
    "transformer": partial(steps_of, "transformer", 0.85),
}

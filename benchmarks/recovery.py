"""How long each fault holds a run up: python benchmarks/recovery.py --trials 5 --only frozen

Real processes over gRPC: three workers and a coordinator, or two workers and two coordinators on
one PostgreSQL. A fault comes in the middle of a step (round); `next` is the time from it until a
client that follows the run sees a step (round) done that was not done before, so it has in it what
is left of the present step (or what is done again), and the client's own reconnecting. `usual` is
the median time of a step (round) of the same job when nothing happens, and `longer` what the fault
costs the run from its first step to its last one: with a worker less its steps may take longer,
until it is back. Medians of all trials. Every run's committed states are compared with those of the
undisturbed run: `bits` says whether all are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from torch import Tensor, nn  # noqa: E402

from stratagem.client import LocalCluster  # noqa: E402
from stratagem.client.course.views import Event, Phase  # noqa: E402
from stratagem.client.sdk.blocking import (  # noqa: E402
    Client,
    LoopThread,
    RunHandle,
)
from tests.crash.hands import free_address, hands  # noqa: E402
from tests.crash.jobs import PACED, Job, crash_job, data_parallel, federated  # noqa: E402
from tests.crash.pair import Pair  # noqa: E402
from tests.crash.rig import Rig, outcome_of, until  # noqa: E402
from tests.endurance.disks import cut_off  # noqa: E402
from tests.postgres import Postgres  # noqa: E402

TTL_S = 2.0
"""Of a worker's lease and of the leader's; heartbeats come five times as often."""
PACE_S = 0.05
"""What the model takes per batch."""
BATCH_SIZE = 8
NUM_STEPS = 16
STEPS_PER_COMMIT = 4
PATIENCE_S = 60.0
UNTIL_TTL = f"{TTL_S:g} s: the lease"

Digests = Any


# ---- jobs ----


class Paced(nn.Module):
    """Takes PACE_S per batch, however many micro-batches it is cut into."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(PACE_S * len(x) / BATCH_SIZE)
        return x


def build_stages() -> nn.Module:
    """For two stages of two layers, of which only the first takes its time."""
    return nn.Sequential(Paced(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))


def build_wide() -> nn.Module:
    return nn.Sequential(Paced(), nn.Linear(12, 20_000), nn.ReLU(), nn.Linear(20_000, 5))


def paced(strategy: Job) -> Job:
    document = crash_job(strategy, model=PACED, every=STEPS_PER_COMMIT, pace_s=PACE_S)
    return document if strategy["type"] == "Federated" else {**document, "steps": NUM_STEPS}


PIPELINE: Job = {
    "type": "ModelParallel",
    "partitions": [
        {"node_ids": ["0", "1"], "target": {"Tag": "first"}},
        {"node_ids": ["2", "3"], "target": {"Tag": "last"}},
    ],
    "communication": {"protocol": "Pipeline", "micro_batch_size": 3},
}


def sliced(mirror: int, state: str = "optimizer") -> Job:
    """Three blocks of the norm, so that each worker has a slice; a commit after half of the steps,
    to which those go back that have no mirror."""
    options = {"partition_state": state, "mirror": mirror}
    document = paced({**data_parallel("AllReduce"), "options": options})
    model = {"entrypoint": "benchmarks.recovery:build_wide"}
    adam = {"name": "adam", "lr": 0.001}
    every = {"every": f"{NUM_STEPS // 2} steps"}
    return {**document, "model": model, "optimizer": adam, "checkpoint": every}


JOBS: dict[str, Job] = {
    "AllReduce": paced(data_parallel("AllReduce")),
    "ParameterServer": paced(data_parallel("ParameterServer")),
    "slices": sliced(0),
    "slices with a mirror": sliced(1),
    "full": sliced(0, "full"),
    "full with a mirror": sliced(1, "full"),
    "Pipeline": {
        **paced(PIPELINE),
        "model": {"entrypoint": "benchmarks.recovery:build_stages"},
    },
    "Federated": paced(federated()),
    "Federated, 40 MB": crash_job(federated(), model="wide", width=900_000),
}


# ---- where it runs ----


@dataclass(slots=True)
class Site:
    """Processes, and a client that follows them."""

    client: Client
    settle: Callable[[], None]
    signal: Callable[[str, int], object]
    """Sends a signal to a process by name."""
    cut: Callable[[], None] = lambda: None
    """Resets all connections of the coordinator to worker-1."""
    blobs: Path = Path()


class Relay:
    """TCP from a port of its own to another one, until it is cut."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._open: list[asyncio.StreamWriter] = []
        self._loop = LoopThread()
        server = self._loop.call(asyncio.start_server(self._relay, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except ConnectionRefusedError:  # the worker is being started again
            writer.transport.abort()
            return
        self._open += [writer, far_writer]
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    def cut(self) -> None:
        """Both ends of every connection are reset."""

        async def abort() -> None:
            for writer in self._open:
                writer.transport.abort()
            self._open.clear()

        self._loop.call(abort())

    def close(self) -> None:
        self.cut()
        self._loop.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    writer.transport.abort()


@contextmanager
def one_coordinator() -> Iterator[Site]:
    """Three workers; the coordinator reaches worker-1 through a relay."""
    listen = free_address()
    relay = Relay(listen)
    cluster = LocalCluster(
        workers=3,
        threads=1,
        import_path=(ROOT,),
        environment={
            "STRATAGEM_COORDINATOR_WORKER_TTL_S": str(TTL_S),
            "STRATAGEM_COORDINATOR_HEARTBEAT_INTERVAL_S": str(TTL_S / 5),
        },
        worker_arguments={
            "worker-0": ["--tags", "first"],
            "worker-1": ["--tags", "last", "--listen", listen, "--advertise", relay.address],
            "worker-2": ["--tags", "first,last"],
        },
    )
    with cluster, cluster.client() as client:
        blobs = cluster.folder / "coordinator" / "blobs"
        yield Site(client, Rig(cluster, client).settle, cluster.kill, relay.cut, blobs)
    relay.close()


@contextmanager
def two_coordinators() -> Iterator[Site]:
    """A leader and a standby on one PostgreSQL, and two workers that know both."""
    ttl = ("--lease-ttl-s", str(TTL_S), "--worker-ttl-s", str(2 * TTL_S))
    beat = ("--heartbeat-interval-s", str(TTL_S / 5))
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        journal = stack.enter_context(Postgres()).new_schema()
        started = stack.enter_context(hands(folder, *ttl, *beat, "--journal", journal))
        a, b = free_address(), free_address()
        leader = started.coordinator("a", listen=a)
        for worker in [started.worker(f"w{n}", f"{b},{a}") for n in range(2)]:
            assert worker.address
        pair = Pair(started, journal, leader, started.coordinator("b", listen=b), a, b)
        client = stack.enter_context(Client(pair.both))

        def to_leader(_: str, signum: int) -> None:
            pair.leader.send(signum)
            if signum == signal.SIGCONT:  # it finds itself replaced
                pair.leader.popen.wait(PATIENCE_S)

        yield Site(client, pair.settle, to_leader)


SITES: dict[str, Callable[[], AbstractContextManager[Site]]] = {
    "one": one_coordinator,
    "two": two_coordinators,
}


# ---- following a run ----


@dataclass(slots=True)
class Follower:
    """Sees a run's steps (rounds) as a client does, and when."""

    run: RunHandle
    seen: list[tuple[float, int]] = field(default_factory=list)
    """Monotonic seconds, and how many steps (rounds) were done; both grow."""
    facts: list[Event] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self) -> None:
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        is_federated = self.run.status().strategy == "Federated"
        for item in self.run.watch():
            with self._changed:
                if isinstance(item, Event):
                    self.facts.append(item)
                    name = "segment" if is_federated else "step"
                    done = item.payload[name] if item.kind == "SegmentCommitted" else 0
                else:
                    done = 0 if is_federated else item.step
                if done > self.done:
                    self.seen.append((time.monotonic(), done))
                self._changed.notify_all()

    @property
    def done(self) -> int:
        return self.seen[-1][1] if self.seen else 0

    def wait(self, is_so: Callable[[Follower], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: is_so(self), PATIENCE_S), self.run.status().reason

    def usual_s(self) -> float:
        """Median time of a step (round)."""
        pairs = zip(self.seen, self.seen[1:], strict=False)
        return statistics.median((b[0] - a[0]) / (b[1] - a[1]) for a, b in pairs)

    def whole_s(self) -> float:
        """From the first step (round) to the last."""
        return self.seen[-1][0] - self.seen[0][0]

    def next_s(self, fault_s: float) -> float:
        """From a time until something is done that was not done before it."""
        return next(at_s for at_s, _ in self.seen if at_s > fault_s) - fault_s


# ---- faults ----

Fault = Callable[[Site, Follower], AbstractContextManager[float]]
"""Does harm on entering, and tells when; on leaving, the run having ended, all is as before."""


def killed(process: str) -> Fault:
    @contextmanager
    def fault(site: Site, _: Follower) -> Iterator[float]:
        fault_s = time.monotonic()
        site.signal(process, signal.SIGKILL)
        yield fault_s

    return fault


def frozen(process: str) -> Fault:
    @contextmanager
    def fault(site: Site, _: Follower) -> Iterator[float]:
        site.signal(process, signal.SIGSTOP)
        try:
            yield time.monotonic()
        finally:
            site.signal(process, signal.SIGCONT)

    return fault


@contextmanager
def cut(site: Site, _: Follower) -> Iterator[float]:
    fault_s = time.monotonic()
    site.cut()
    yield fault_s


@contextmanager
def damaged_state(site: Site, follower: Follower) -> Iterator[float]:
    """All workers die, and the state they would go on from is damaged; somebody mends it."""
    workers = [f"worker-{n}" for n in range(3)]
    for name in workers:
        site.signal(name, signal.SIGSTOP)
    with cut_off(site.blobs):
        for name in workers:
            site.signal(name, signal.SIGKILL)
        until(lambda: follower.run.status().phase is Phase.FAILED, "the damage is found")
        assert "its bytes have another digest" in follower.run.status().reason
    site.settle()
    follower.run.resume()
    resumed_s = time.monotonic()
    follower.start()  # it had ended
    yield resumed_s


# ---- cases ----


def in_mid_step(follower: Follower) -> None:
    follower.wait(lambda f: f.done > STEPS_PER_COMMIT)
    time.sleep(PACE_S)


def late(follower: Follower) -> None:
    """Half a segment before the second commit."""
    follower.wait(lambda f: f.done >= NUM_STEPS - 4)
    time.sleep(PACE_S)


def in_mid_round(follower: Follower) -> None:
    follower.wait(lambda f: sum(each.kind == "ClientsAssigned" for each in f.facts) == 2)
    time.sleep(2 * PACE_S)


def in_aggregation(follower: Follower) -> None:
    follower.wait(lambda f: any(each.kind == "RoundClosed" for each in f.facts))


@dataclass(frozen=True, slots=True)
class Case:
    fault: str
    job: str
    harm: Fault
    floor: str
    """What a recovery cannot be faster than, beside the step itself."""
    moment: Callable[[Follower], None] = in_mid_step
    site: str = "one"


CASES = (
    Case("worker killed", "AllReduce", killed("worker-0"), "none"),
    Case("worker killed", "ParameterServer", killed("worker-0"), "none"),
    Case("worker killed", "slices", killed("worker-0"), "steps since the commit", late),
    Case("worker killed", "slices with a mirror", killed("worker-0"), "none", late),
    Case("worker killed", "full", killed("worker-0"), "steps since the commit", late),
    Case("worker killed", "full with a mirror", killed("worker-0"), "none", late),
    Case("worker killed, a stage", "Pipeline", killed("worker-0"), "steps since the commit"),
    Case("worker killed, a client", "Federated", killed("worker-0"), "none", in_mid_round),
    Case("worker frozen", "AllReduce", frozen("worker-0"), UNTIL_TTL),
    Case("worker frozen", "Federated", frozen("worker-0"), UNTIL_TTL, in_mid_round),
    Case("connection cut", "AllReduce", cut, "none"),
    Case("connection cut", "ParameterServer", cut, "none"),
    Case("connection cut", "Federated", cut, "none", in_mid_round),
    Case("coordinator killed", "AllReduce", killed("coordinator"), "its start"),
    Case("coordinator killed", "ParameterServer", killed("coordinator"), "its start"),
    Case("coordinator killed", "Federated", killed("coordinator"), "its start", in_mid_round),
    Case(
        *("coordinator killed in aggregation", "Federated, 40 MB", killed("coordinator")),
        *("its start, the sums again", in_aggregation),
    ),
    Case("state damaged: once mended and resumed", "AllReduce", damaged_state, "none"),
    Case("leader frozen", "AllReduce", frozen("leader"), UNTIL_TTL, site="two"),
    Case("leader frozen", "Federated", frozen("leader"), UNTIL_TTL, in_mid_round, "two"),
)


@dataclass(frozen=True, slots=True)
class Undisturbed:
    usual_s: float
    whole_s: float
    digests: Digests


@dataclass(frozen=True, slots=True)
class Trial:
    next_s: float
    longer_s: float
    are_bits_equal: bool


@dataclass(slots=True)
class Runner:
    site: Site
    _expected: dict[str, Undisturbed] = field(default_factory=dict)

    def undisturbed(self, name: str) -> Undisturbed:
        """Medians of a few runs of a job, after one that imports what it needs."""
        if name not in self._expected:
            self.site.settle()
            outcome_of(self._submit(name).run)
            followers, digests = [], []
            for _ in range(3):
                followers.append(self._submit(name))
                digests.append(outcome_of(followers[-1].run).digests)
            assert digests[0] == digests[1] == digests[2]
            self._expected[name] = Undisturbed(
                statistics.median(each.usual_s() for each in followers),
                statistics.median(each.whole_s() for each in followers),
                digests[0],
            )
        return self._expected[name]

    def trial(self, case: Case) -> Trial:
        expected = self.undisturbed(case.job)
        self.site.settle()
        follower = self._submit(case.job)
        case.moment(follower)
        with case.harm(self.site, follower) as fault_s:
            digests = outcome_of(follower.run).digests
            follower.wait(lambda f: f.seen[-1][0] > fault_s)
        longer_s = follower.whole_s() - expected.whole_s
        return Trial(follower.next_s(fault_s), longer_s, digests == expected.digests)

    def _submit(self, name: str) -> Follower:
        follower = Follower(self.site.client.submit(JOBS[name]))
        follower.start()
        return follower


HEAD = ("fault", "strategy", "usual s", "next s", "(min to max)", "longer s", "floor", "bits")


def row(case: Case, usual_s: float, trials: Sequence[Trial]) -> str:
    times = [each.next_s for each in trials]
    longer_s = statistics.median(each.longer_s for each in trials)
    cells = (
        *(case.fault, case.job, f"{usual_s:.2f}", f"{statistics.median(times):.2f}"),
        f"{min(times):.2f} to {max(times):.2f}",
        "" if case.harm is damaged_state else f"{longer_s:.2f}",  # somebody had to mend it
        *(case.floor, "equal" if all(each.are_bits_equal for each in trials) else "OTHER"),
    )
    return f"| {' | '.join(cells)} |"


def measure(cases: Sequence[Case], num_trials: int) -> None:
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    for place, make in SITES.items():
        here = [case for case in cases if case.site == place]
        if not here:
            continue
        with make() as site:
            runner = Runner(site)
            for case in here:
                trials = [runner.trial(case) for _ in range(num_trials)]
                print(row(case, runner.undisturbed(case.job).usual_s, trials), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of faults or strategies")
    args = parser.parse_args()
    wanted = [case for case in CASES if any(w in f"{case.fault}, {case.job}" for w in args.only)]
    began_s = time.monotonic()
    measure(wanted, args.trials)
    print(f"{args.trials} trials each, {time.monotonic() - began_s:.0f} s, ttl {TTL_S:g} s")


if __name__ == "__main__":
    main()

"""Flip bits of runs that are verified while they train, and tell what becomes of them.

    python -m tests.cluster.flips --number 200 --seed 1

A flip is drawn from the seed: the job, the place, step, element and bit, the worker, and whether it
happens once or each time that the worker computes the step. All runs are on one cluster. Each flip
also hits a run that is not verified, whose loss and gradient norm are compared with thresholds.

    python -m tests.cluster.flips --healthy 300

Here nobody computes wrongly, but workers are killed and frozen while all segments are verified.
"""

import argparse
import random
import signal
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, get_args

from stratagem.client.course.views import Event, Phase, is_of_verifier
from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client, RunHandle
from stratagem.common.numerics.verification import VERIFIER
from tests.cluster.flipping_worker import Flip, Place, took_place
from tests.cluster.jobs import cluster_of
from tests.crash.jobs import GOSSIP, JOBS, PIPELINE, Job, crash_job, data_parallel
from tests.crash.rig import until
from tests.patience import PATIENCE_S
from tests.stream_jobs import streamed

PROGRAM = Path(__file__).with_name("flipping_worker.py")
NUM_WORKERS = 6
TAG = "any"
TTL_S = 6.0
"""Of the leases: a worker that is frozen for longer is lost."""
NUM_SIGMAS = 4
SERIES = ("train.loss", "train.grad_norm")

NAMES = (
    *("Local", "AllReduce", "ParameterServer", "Gossip", "Pipeline", "Pipelines"),
    *("Pipelines-server", "Slices", "Full", "Full-mirrors", "Mirrors", "Coded", "Phases"),
    *("Phases-server", "DiLoCo", "DiLoCo-streaming", "DiLoCo-server", "Turns", "Scheduled"),
    *("Frozen", "Stopped", "FedAvg", "FedAvg-coded", "FedYogi", "Median", "Fair", "Nova"),
    *("Scaffold", "Regions", "Regions-nested", "Silos", "Silo-pipelines", "Turns-clients"),
    *("Population", "Turns-population"),
)


def anywhere(job: Any) -> Any:
    """Return the job with stages that any worker takes: others replace a quarantined one."""
    if isinstance(job, Mapping):
        return {
            key: {"Tag": TAG} if key == "target" else anywhere(value) for key, value in job.items()
        }
    return [*map(anywhere, job)] if isinstance(job, list) else job


def _staged(protocol: str) -> Job:
    communication = {"protocol": protocol}
    return crash_job(anywhere({**PIPELINE, "communication": communication}))


CASES: dict[str, Job] = {
    **{name: anywhere(JOBS[name]) for name in NAMES},
    "Direct": _staged("Direct"),
    "DataStore": _staged("DataStore"),
    "Gossip-coded": crash_job(GOSSIP) | {"compression": {"codec": "ternary"}},
    "AllReduce-coded": crash_job(data_parallel("AllReduce")) | {"compression": {"codec": "int8"}},
    "Streams": crash_job(data_parallel("AllReduce")) | {"data": streamed("shards")},
}
"""Jobs of every kind that can be verified while it trains."""

EVERYBODY: Final = ("Population", "Turns-population", "Regions", "Regions-nested")
"""Those that leave no worker to spare: their members verify each other's work."""


# ---- Runs ----


@dataclass(frozen=True)
class Course:
    """What a run has journaled, and its history."""

    phase: Phase
    reason: str
    events: Sequence[Event]
    history: Mapping[str, Sequence[float]]

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    @property
    def commits(self) -> list[tuple[str, int, str]]:
        """The party, segment and digest of every state of the run, or of its verifier."""
        payloads = [event.payload for event in self.of("SegmentCommitted", "GenerationClosed")]
        return [
            (each["party"], each.get("segment", each.get("generation")), each["digest"])
            for each in payloads
            if each["party"] in ("", VERIFIER)
        ]

    @property
    def final(self) -> dict[int, str]:
        """The digests of the run's own states, the last one of each segment."""
        return {segment: digest for party, segment, digest in self.commits if not party}

    def workers(self, *, of_verifier: bool = False) -> set[str]:
        """The workers that have trained, in any party."""
        facts = [
            (event.kind, event.payload)
            for event in self.of("MembersFormed", "ClientsAssigned", "RosterFormed")
            if is_of_verifier(event) is of_verifier
        ]
        federations = {fact["party"] for kind, fact in facts if kind == "RosterFormed"}
        members = [
            member
            for kind, fact in facts
            if kind == "MembersFormed" and fact["party"] not in federations  # who evaluates
            for member in fact["members"]
        ]
        given = [
            each
            for kind, fact in facts
            if kind == "ClientsAssigned"
            for each in fact["assignments"]
        ]
        members += [each["member"] for each in given if each["member"]]
        return {member["worker_id"] for member in members}

    @property
    def num_steps(self) -> int:
        """The most steps that a party, or a client in a round, has trained."""
        updates = [int(event.payload["num_steps"]) for event in self.of("UpdateReceived")]
        steps = [int(event.payload["step"]) for event in self.of("SegmentCommitted")]
        return max(updates or steps)

    @property
    def marked(self) -> set[str]:
        return {name for event in self.of("SegmentRefuted") for name in event.payload["marked"]}


def course_of(run: RunHandle) -> Course:
    """Wait for the end of a run, whatever it is."""
    timer = threading.Timer(PATIENCE_S, run.cancel)
    timer.start()
    events = [item for item in run.watch() if isinstance(item, Event)]
    timer.cancel()
    status = run.status()
    series = run.history().items()
    history = {name: each.last.tolist() for name, each in series if name in SERIES}
    return Course(status.phase, status.reason, events, history)


def verified(job: Job, on: str) -> Job:
    return {**job, "verification": {"sample": 1.0, "on": on}}


# ---- Flips ----


@dataclass(frozen=True)
class Attempt:
    """One flip, and what has become of the run."""

    case: str
    worker: str
    flip: Flip
    num_flips: int = 0
    is_verifier: bool = False
    has_changed: bool = False
    """Any state, whoever has computed it."""
    detected: bool = False
    repaired: bool = False
    quarantined: frozenset[str] = frozenset()
    marked: frozenset[str] = frozenset()
    conclusions: tuple[str, ...] = ()
    seen: bool = False
    """By a threshold."""
    end: str = ""

    @property
    def named(self) -> bool:
        """Who was wrong once is marked with all that may have been; who was so again is
        quarantined, or the only one that is marked if its replica differs."""
        is_marked = self.worker in self.marked if self.flip.once else self.marked == {self.worker}
        return is_marked or self.worker in self.quarantined

    @property
    def false_accusations(self) -> frozenset[str]:
        return self.quarantined - {self.worker}

    @property
    def row(self) -> str:
        flip = self.flip
        kind = "once" if flip.once else "always"
        place = f"{flip.place} {flip.step}/{flip.call}/{flip.element}/{flip.bit}"
        cells = (self.case, place, kind, self.worker + ("*" if self.is_verifier else ""))
        words = [name for name in ("detected", "repaired", "named", "seen") if getattr(self, name)]
        if not self.num_flips:
            words = ["not reached"]
        elif not self.has_changed:
            words = ["masked", *words]
        further = [*self.conclusions, *(f"falsely {w}" for w in sorted(self.false_accusations))]
        return " | ".join((*cells, " ".join(words), " ".join(further), self.end))


@dataclass
class Bench:
    """A cluster whose workers flip what they are told, and undisturbed runs to compare with."""

    cluster: LocalCluster
    client: Client
    folder: Path
    known: dict[str, Course] = field(default_factory=dict)

    def plain(self, case: str, job: Job) -> Course:
        """Return the course of a job of this name when nobody verifies it and nothing happens."""
        key = f"plain {job['name']} {case}"
        if key not in self.known:
            self.known[key] = course_of(self.client.submit(job))
        return self.known[key]

    def undisturbed(self, case: str) -> Course:
        """Return the course of the job when nothing happens to it, verified by others."""
        if case not in self.known:
            plain = self.plain(case, CASES[case])
            on = "members" if case in EVERYBODY else "spare"
            course = course_of(self.client.submit(verified(CASES[case], on)))
            assert course.phase is Phase.COMPLETED, f"{case}: {course.reason}"
            assert course.final == plain.final, case
            assert not course.of("SegmentRefuted"), case
            newest = course.of("SegmentVerified")[-1].payload["segment"]
            assert newest == max(course.final), case
            self.known[case] = course
        return self.known[case]

    def attempt(self, case: str, worker: str, flip: Flip, on: str = "spare") -> Attempt:
        """Run the job with the flip."""
        right = self.undisturbed(case).final
        course, num_flips = self.disturbed(verified(CASES[case], on), worker, flip)
        quarantined = self.release()
        wrong = [
            segment for _, segment, digest in course.commits if right.get(segment, digest) != digest
        ]
        refuted = course.of("SegmentRefuted")
        returns = [event.payload for event in course.of("RunResumed")]
        is_retried = any(each["by"] == "verification" and each["reason"] for each in returns)
        is_failed = course.phase is not Phase.COMPLETED
        is_verifier = worker not in course.workers() and worker in course.workers(of_verifier=True)
        return Attempt(
            *(case, worker, flip, num_flips, is_verifier),
            has_changed=bool(wrong or refuted or is_failed),
            detected=bool(refuted) or is_retried,
            repaired=not is_failed and course.final == right,
            quarantined=quarantined,
            marked=frozenset(course.marked),
            conclusions=tuple(event.payload["conclusion"] for event in refuted),
            end=course.reason,
        )

    def compared(self, attempt: Attempt) -> Attempt:
        """Run the job of an attempt again, with the flip but without a verification, and note
        whether a threshold sees it."""
        if not attempt.has_changed or attempt.is_verifier:
            return attempt
        plain, _ = self.disturbed(CASES[attempt.case], attempt.worker, attempt.flip)
        return replace(attempt, seen=exceeds(plain, self.undisturbed(attempt.case)))

    def disturbed(self, job: Job, worker: str, flip: Flip) -> tuple[Course, int]:
        flip.write(self.folder, worker)
        try:
            course = course_of(self.client.submit(job))
        finally:
            num_flips = took_place(self.folder, worker)
        return course, num_flips

    def release(self) -> frozenset[str]:
        """Let all workers work again; return those that were quarantined."""
        names = [each.worker_id for each in self.client.workers() if each.quarantine]
        for name in names:
            self.client.release_worker(name)
        until(
            lambda: sum(each.is_alive for each in self.client.workers()) == NUM_WORKERS,
            "all workers are there",
        )
        return frozenset(names)


def exceeds(course: Course, right: Course) -> bool:
    """Return whether a threshold would have seen that a run is wrong: it has ended, or its loss or
    gradient norm is no number or far from those of the right run."""
    if course.phase is not Phase.COMPLETED:
        return True
    for name, usual in right.history.items():
        mean, sigma = statistics.fmean(usual), statistics.pstdev(usual)
        for value in course.history.get(name, ()):
            if not abs(value - mean) <= NUM_SIGMAS * sigma:
                return True
    return False


@contextmanager
def bench(folder: Path) -> Iterator[Bench]:
    flips = folder / "flips"
    flips.mkdir()
    arguments = [["--tags", TAG]] * NUM_WORKERS
    environment = {
        "TEST_FLIPS": str(flips),
        "STRATAGEM_COORDINATOR_WORKER_TTL_S": str(TTL_S),
        "STRATAGEM_COORDINATOR_HEARTBEAT_INTERVAL_S": "1",
    }
    with (
        cluster_of(folder, arguments, worker=PROGRAM, environment=environment) as cluster,
        cluster.client() as client,
    ):
        yield Bench(cluster, client, flips)


# ---- A series of flips ----

PLACES: Sequence[Place] = get_args(Place)


@dataclass
class Series:
    """Flips that are drawn from a seed."""

    bench: Bench
    random: random.Random
    cases: Sequence[str]
    absent: set[tuple[str, Place, bool]] = field(default_factory=set)
    """Places that a job does not have, or not in its verifier."""

    def next(self) -> Attempt:
        """Return the next attempt whose flip has reached its place."""
        while True:
            case = self.random.choice(self.cases)
            place = self.random.choice(PLACES)
            is_of_verifier = self.random.random() < 1 / 8
            if (case, place, is_of_verifier) in self.absent:
                continue
            attempt = self._attempt(case, place, is_of_verifier=is_of_verifier)
            if attempt.num_flips:
                return self.bench.compared(attempt)
            if attempt.flip.call == 0 and attempt.is_verifier is is_of_verifier:
                self.absent.add((case, place, is_of_verifier))

    def _attempt(self, case: str, place: Place, *, is_of_verifier: bool) -> Attempt:
        right, draw = self.bench.undisturbed(case), self.random
        flip = Flip(
            place=place,
            step=draw.randint(1, right.num_steps),
            element=draw.randrange(1 << 20),
            bit=draw.randrange(32),
            once=draw.random() < 0.5,
            call=draw.choice((0, 0, 1, 2)),
        )
        worker = draw.choice(sorted(right.workers(of_verifier=is_of_verifier)))
        on = "spare" if is_of_verifier else draw.choice(("spare", "any"))
        on = "members" if case in EVERYBODY else on
        return self.bench.attempt(case, worker, flip, on)


COLUMNS = ("flips", "masked", "detected", "repaired", "named", "false", "seen")


def table(attempts: Iterable[Attempt]) -> str:
    """Return the counts by kind of flip."""
    rows: dict[str, Counter[str]] = {}
    for each in attempts:
        place = "any, of a verifier" if each.is_verifier else each.flip.place
        for name in (f"{place}, {'once' if each.flip.once else 'always'}", "all"):
            count = rows.setdefault(name, Counter())
            count["flips"] += 1
            if not each.has_changed:
                count["masked"] += 1
                continue
            for word in ("detected", "repaired", "named", "seen"):
                count[word] += getattr(each, word)
            count["false"] += bool(each.false_accusations)
    lines = [f"| flip | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for name in sorted(rows, key=lambda name: (name == "all", name)):
        lines.append(f"| {name} | {' | '.join(str(rows[name][each]) for each in COLUMNS)} |")
    return "\n".join(lines)


# ---- A series of healthy runs ----


def longer(job: Job, num_steps: int) -> Job:
    """Return the job with three times as many steps, rounds or generations."""
    strategy = job["strategy"]
    for name in ("rounds", "generations"):
        if name in strategy:
            return {**job, "strategy": {**strategy, name: 3 * strategy[name]}}
    return {**job, "steps": 3 * num_steps}


def healthy(bench_: Bench, draw: random.Random, case: str) -> tuple[int, int, str]:
    """Run a job three times as long while a worker is killed or frozen; return how many segments
    were verified and how many not, and what is wrong, if anything is."""
    num_commits = 3 * max(bench_.undisturbed(case).final)
    job = {**longer(CASES[case], bench_.undisturbed(case).num_steps), "name": "healthy"}
    right = bench_.plain(case, job)
    on = "members" if case in EVERYBODY else draw.choice(("spare", "any", "members"))
    run = bench_.client.submit(verified(job, on))
    victims = draw.sample(bench_.cluster.worker_names, draw.randint(1, 2))
    plan = sorted((draw.randrange(1, num_commits), name) for name in victims)
    frozen: list[threading.Timer] = []
    for event in run.watch():
        if not plan or not isinstance(event, Event):
            continue
        number = event.payload.get("segment", event.payload.get("generation", 0))
        if event.kind in ("SegmentCommitted", "GenerationClosed") and number >= plan[0][0]:
            name = plan.pop(0)[1]
            if draw.random() < 0.5:
                bench_.cluster.kill(name)
                continue
            bench_.cluster.kill(name, signal.SIGSTOP)
            thaw = threading.Timer(
                draw.uniform(0.1, 2 * TTL_S), bench_.cluster.kill, (name, signal.SIGCONT)
            )
            thaw.start()
            frozen.append(thaw)
    for each in frozen:
        each.join()
    course = course_of(run)
    wrong = [event.sentence for event in course.of("SegmentRefuted")]
    if course.phase is not Phase.COMPLETED or course.final != right.final:
        wrong.append(f"{course.phase.name}: {course.reason}")
    if names := bench_.release():
        wrong.append(f"{', '.join(sorted(names))} quarantined")
    num_verified = len(course.of("SegmentVerified"))
    return num_verified, len(right.final) - num_verified, "; ".join(wrong)


# ---- Command ----


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200, help="flips that reach their place")
    parser.add_argument("--healthy", type=int, default=0, help="segments to verify, instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    options = parser.parse_args(arguments)
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, bench(Path(folder)) as bench_:
        if options.healthy:
            run_healthy(bench_, draw, options.cases, options.healthy)
            return
        series = Series(bench_, draw, options.cases)
        attempts: list[Attempt] = []
        with suppress(KeyboardInterrupt):
            while len(attempts) < options.number:
                attempts.append(series.next())
                print(attempts[-1].row, flush=True)
    print(table(attempts))


def run_healthy(bench_: Bench, draw: random.Random, cases: Sequence[str], number: int) -> None:
    """Run jobs in turn until so many segments are verified."""
    total: Counter[str] = Counter()
    while total["verified"] < number:
        case = cases[total["runs"] % len(cases)]
        num_verified, num_missed, wrong = healthy(bench_, draw, case)
        total.update(runs=1, verified=num_verified, missed=num_missed, wrong=bool(wrong))
        print(f"{case}: {num_verified} verified, {num_missed} not; {wrong or 'right'}", flush=True)
    print(dict(total))


if __name__ == "__main__":
    main(sys.argv[1:])

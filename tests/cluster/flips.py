"""Flip bits of runs that are verified while they train, and tell what becomes of them.

    python -m tests.cluster.flips --number 200 --seed 1

A flip is drawn from the seed: the job, the place, step, element and bit, the worker, and whether it
happens once or each time that the worker computes the step. All runs are on one cluster. Each flip
also hits a run that is not verified, whose loss and gradient norm are compared with thresholds.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from stratagem.client.course.views import Event, Phase
from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client, RunHandle
from stratagem.common.numerics.verification import VERIFIER
from tests.cluster.flipping_worker import Flip, Place, took_place
from tests.cluster.jobs import cluster_of
from tests.crash.jobs import GOSSIP, JOBS, PIPELINE, Job, crash_job, data_parallel, local_steps
from tests.crash.rig import until
from tests.stream_jobs import streamed

PROGRAM = Path(__file__).with_name("flipping_worker.py")
NUM_WORKERS = 6
NUM_SIGMAS = 4
SERIES = ("train.loss", "train.grad_norm")

NAMES = (
    *("Local", "AllReduce", "ParameterServer", "Gossip", "Pipeline", "Pipelines"),
    *("Pipelines-server", "Slices", "Full", "Full-mirrors", "Mirrors", "Coded", "Phases"),
    *("Phases-server", "DiLoCo", "DiLoCo-streaming", "DiLoCo-server", "Turns", "Scheduled"),
    *("Frozen", "Stopped"),
)


def _staged(protocol: str) -> Job:
    communication = {"protocol": protocol}
    return crash_job({**PIPELINE, "communication": communication})


CASES: dict[str, Job] = {
    **{name: JOBS[name] for name in NAMES},
    "Direct": _staged("Direct"),
    "DataStore": _staged("DataStore"),
    "Gossip-coded": crash_job(GOSSIP) | {"compression": {"codec": "ternary"}},
    "AllReduce-coded": crash_job(data_parallel("AllReduce")) | {"compression": {"codec": "int8"}},
    "DiLoCo-coded": crash_job(local_steps(), every=3) | {"compression": {"codec": "int8"}},
    "Streams": crash_job(data_parallel("AllReduce")) | {"data": streamed("named", num_rows=60)},
}
"""Jobs of every kind that can be verified while it trains."""


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
        """The party, segment and digest of every state that was committed."""
        payloads = [event.payload for event in self.of("SegmentCommitted")]
        return [(each["party"], each["segment"], each["digest"]) for each in payloads]

    @property
    def final(self) -> dict[int, str]:
        """The digests of the run's own states, the last one of each segment."""
        return {segment: digest for party, segment, digest in self.commits if not party}

    def workers(self, party: str = "") -> set[str]:
        formed = [event.payload for event in self.of("MembersFormed")]
        members = [each["members"] for each in formed if each["party"] == party]
        return {member["worker_id"] for each in members for member in each}

    @property
    def marked(self) -> set[str]:
        return {name for event in self.of("SegmentRefuted") for name in event.payload["marked"]}


def course_of(run: RunHandle) -> Course:
    """Wait for the end of a run, whatever it is."""
    events = [item for item in run.watch() if isinstance(item, Event)]
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
        """The second mark of a worker that was the only suspect is a quarantine."""
        return self.worker in self.quarantined or (self.flip.once and self.worker in self.marked)

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

    def undisturbed(self, case: str) -> Course:
        """Return the course of the job when nothing happens to it, verified by others."""
        if case not in self.known:
            plain = course_of(self.client.submit(CASES[case]))
            course = course_of(self.client.submit(verified(CASES[case], "spare")))
            assert course.phase is Phase.COMPLETED, course.reason
            assert course.final == plain.final, case
            assert not course.of("SegmentRefuted"), case
            self.known[case] = course
        return self.known[case]

    def attempt(self, case: str, worker: str, flip: Flip, on: str) -> Attempt:
        """Run the job with the flip, and once more without a verification."""
        right = self.undisturbed(case).final
        course, num_flips = self.disturbed(verified(CASES[case], on), worker, flip)
        quarantined = self.release()
        wrong = [
            segment for _, segment, digest in course.commits if right.get(segment, digest) != digest
        ]
        refuted = course.of("SegmentRefuted")
        is_failed = course.phase is not Phase.COMPLETED
        is_verifier = worker not in course.workers() and worker in course.workers(VERIFIER)
        attempt = Attempt(
            *(case, worker, flip, num_flips, is_verifier),
            has_changed=bool(wrong or refuted or is_failed),
            detected=bool(refuted),
            repaired=not is_failed and course.final == right,
            quarantined=quarantined,
            marked=frozenset(course.marked),
            conclusions=tuple(event.payload["conclusion"] for event in refuted),
            end=course.reason,
        )
        if not attempt.num_flips or not attempt.has_changed or is_verifier:
            return attempt
        plain, _ = self.disturbed(CASES[case], worker, flip)
        return replace(attempt, seen=exceeds(plain, self.undisturbed(case)))

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
    arguments: list[list[str]] = [[] for _ in range(NUM_WORKERS)]
    environment = {"TEST_FLIPS": str(flips)}
    with (
        cluster_of(folder, arguments, worker=PROGRAM, environment=environment) as cluster,
        cluster.client() as client,
    ):
        yield Bench(cluster, client, flips)


# ---- A series ----

PLACES: Sequence[Place] = get_args(Place)


def drawn(random_: random.Random, bench_: Bench, cases: Sequence[str]) -> tuple[Any, ...]:
    """Return a case, a worker, a flip and who verifies."""
    case = random_.choice(cases)
    right = bench_.undisturbed(case)
    num_steps = max(event.payload["step"] for event in right.of("SegmentCommitted"))
    flip = Flip(
        place=random_.choice(PLACES),
        step=random_.randint(1, num_steps),
        element=random_.randrange(1 << 20),
        bit=random_.randrange(32),
        once=random_.random() < 0.5,
        call=random_.randrange(3),
    )
    is_of_verifier = random_.random() < 0.15
    workers = right.workers(VERIFIER) if is_of_verifier else right.workers()
    worker = random_.choice(sorted(workers))
    return case, worker, flip, random_.choice(("spare", "spare", "any"))


def table(attempts: Iterable[Attempt]) -> str:
    """Return the counts by kind of flip."""
    rows: dict[str, Counter[str]] = {}
    for each in attempts:
        kind = ("verifier" if each.is_verifier else each.flip.place, each.flip.once)
        for name in (f"{kind[0]}, {'once' if kind[1] else 'always'}", "all"):
            count = rows.setdefault(name, Counter())
            count["flips"] += 1
            if not each.has_changed:
                count["masked"] += 1
                continue
            for word in ("detected", "repaired", "named", "seen"):
                count[word] += getattr(each, word)
            count["false"] += bool(each.false_accusations)
    columns = ("flips", "masked", "detected", "repaired", "named", "false", "seen")
    lines = [f"| flip | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name in sorted(rows, key=lambda name: (name == "all", name)):
        lines.append(f"| {name} | {' | '.join(str(rows[name][each]) for each in columns)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200, help="flips that reach their place")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    options = parser.parse_args(arguments)
    random_ = random.Random(options.seed)
    attempts: list[Attempt] = []
    with tempfile.TemporaryDirectory() as folder, bench(Path(folder)) as bench_:
        while len(attempts) < options.number:
            since_s = time.monotonic()
            attempt = bench_.attempt(*drawn(random_, bench_, options.cases))
            print(f"{attempt.row} | {time.monotonic() - since_s:.1f} s", flush=True)
            if attempt.num_flips:
                attempts.append(attempt)
    print(table(attempts))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Kill each process at each of its failpoints, under every strategy that comes by there.

The killed process is started again by the cluster; the run must end with the bits of an undisturbed
one, in every committed state. A case is (job, process, failpoint, hits to let pass first): a few
are tried always, the sweep meets each failpoint and each job, a worker and the coordinator in one
run, and the soak is each case alone.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest

import pytest

from stratagem.common.process.failpoints import FAILPOINTS
from tests.crash.failpoint_table import (
    AFTER_ANOTHER,
    BY_WORKERS_THEMSELVES,
    EXCHANGING,
    LATER_HITS,
    ONCE_PER_BUNDLE,
    ONLY_AT_A_SITE,
    OVER_AN_OBJECT_STORE,
    REACHED_BY,
    SOLE_COPIES,
    WITH_CLIENT_STATE,
    WITH_MERGED_METRICS,
    WITH_PHASES,
)
from tests.crash.jobs import JOBS
from tests.crash.rig import Rig

SEVERAL_COMPUTE = (
    *(*EXCHANGING, *SOLE_COPIES, *WITH_PHASES),
    *("Pipelines", "Pipelines-server", "Coded", "Evaluation", "Turns", "Mirrors", "Full-mirrors"),
)


@dataclass(frozen=True, slots=True)
class Case:
    job: str
    process: str
    failpoint: str
    num_passed: int = 0

    def __str__(self) -> str:
        return f"{self.job}-{self.process}-{self.failpoint}-{self.num_passed}"


def cases() -> list[Case]:
    """Every failpoint once under every strategy that reaches it, and at each of its hits; those of
    a job one after the other, so that few of the tests' processes run it undisturbed."""
    found = [
        Case(job, process_of(job, failpoint, num_passed), failpoint, num_passed)
        for failpoint, jobs in REACHED_BY.items()
        for job, num_passed in each_once(jobs, (0, *LATER_HITS.get(failpoint, ())))
    ]
    return sorted(found, key=lambda case: case.job)


def each_once(jobs: Sequence[str], hits: Sequence[int]) -> list[tuple[str, int]]:
    """Pairs in which every job and every hit is; silos have but the first hit.

    What a kill leaves behind depends on the kind of the job and on how far it was, and hardly on
    both at once: all pairs would be several times as many.
    """
    others = [job for job in jobs if not job.startswith("Silo")]
    silos = [(job, 0) for job in jobs if job.startswith("Silo")]
    num_pairs = max(len(others), len(hits)) if others else 0
    return silos + [(others[i % len(others)], hits[i % len(hits)]) for i in range(num_pairs)]


def process_of(job: str, failpoint: str, num_passed: int) -> str:
    """worker-0 builds, evaluates, and is the only one that Local takes, which worker-1 verifies;
    later hits are another's, where others compute too."""
    if failpoint.startswith("coordinator."):
        return "coordinator"
    if job == "Verified":
        return "worker-1"
    return "worker-2" if job in SEVERAL_COMPUTE and num_passed > 0 else "worker-0"


KINDS = (
    *("Local", "AllReduce", "ParameterServer", "FedAvg", "Population", "Silos", "Gossip"),
    *("Pipeline", "DiLoCo-streaming", "Full-mirrors", "Mirrors", "Verified"),
)
"""Jobs of a strategy or an exchange of its own: each has a kill within a commit."""
COMMITS = {
    *("coordinator.commit.pulled", "coordinator.round.folded", "worker.snapshot.taken"),
    *("coordinator.journal.before_commit", "coordinator.journal.after_commit"),
    "worker.round.trained",
}


def needs(case: Case) -> Iterator[Hashable]:
    """What is tried with a case, and once is enough of it."""
    yield case.failpoint
    if case.num_passed:
        yield case.failpoint, "later"
    yield case.job, case.process == "coordinator"
    if case.job in KINDS and case.failpoint in COMMITS:
        yield case.job, "commit"


def covering(found: Sequence[Case], chosen: Iterable[Case]) -> list[Case]:
    """The chosen cases and enough others of those found for all that they need; of cases that are
    as good, one whose job has a run in which nobody dies yet on its side."""
    left = {need for case in found for need in needs(case)}
    taken: list[Case] = []
    runs: Counter[tuple[str, bool]] = Counter()

    def take(case: Case) -> None:
        taken.append(case)
        runs[case.job, case.process == "coordinator"] += 1
        left.difference_update(needs(case))

    def worth(case: Case) -> tuple[int, int]:
        side = case.process == "coordinator"
        num_own, num_other = runs[case.job, side], runs[case.job, not side]
        return sum(need in left for need in needs(case)), min(num_other - num_own, 1)

    for case in chosen:
        take(case)
    while left:
        take(max(found, key=worth))
    return taken


def in_pairs(found: Iterable[Case]) -> list[tuple[Case, ...]]:
    """The cases of each job, of which a worker and the coordinator die in one run."""
    by_job: dict[str, tuple[list[Case], list[Case]]] = {}
    for case in found:
        by_job.setdefault(case.job, ([], []))[case.process == "coordinator"].append(case)
    return [
        tuple(case for case in pair if case is not None)
        for _, sides in sorted(by_job.items())
        for pair in zip_longest(*sides)
    ]


ALWAYS = (
    Case("ParameterServer", "coordinator", "coordinator.step.summed"),
    Case("Full-mirrors", "worker-2", "worker.parameters.updated", 5),
    Case("FedAvg", "coordinator", "coordinator.journal.before_commit", 4),
    Case("FedAvg", "worker-0", "worker.round.trained"),
)
BY_HAND = (
    Case("Pipeline", "worker-2", "worker.stages.before_apply", 5),
    Case("Population", "worker-0", "worker.segment.finished"),
    Case("Gossip", "worker-2", "worker.gossip.mixing", 9),
    Case("AllReduce", "worker-2", "worker.step.before_apply", 1),
    Case("DiLoCo-streaming", "worker-2", "worker.local_step.before_backward", 6),
    Case("DiLoCo-server", "worker-2", "worker.replicas.kept", 3),
    Case("Mirrors", "worker-2", "worker.slices.updated", 5),
    Case("Full", "worker-2", "worker.parameters.gathered", 30),
    # Between the two slots of the first round and its state.
    Case("FedYogi", "coordinator", "coordinator.blobs.after_rename", 2),
    # What has been logged of the step before is not lost.
    Case("Stopped", "worker-0", "worker.step.after_apply", 10),
    Case("Stopped", "worker-2", "worker.step.after_apply", 10),
    Case("Stopped", "coordinator", "coordinator.segment.trained", 3),
)
OF_A_STOP = (
    Case("Stopped", "worker-0", "worker.step.before_apply", 10),
    Case("Stopped", "worker-0", "worker.step.before_backward", 10),
    Case("Stopped", "worker-0", "worker.segment.finished", 3),
    Case("Stopped", "worker-0", "worker.snapshot.taken", 2),
)
"""Other places of the step with which a training that is stopped ends."""
IN_THE_SWEEP = covering(cases(), (*ALWAYS, *BY_HAND))[len(ALWAYS) :]
PAIRS = in_pairs(IN_THE_SWEEP)
ALONE = [c for c in dict.fromkeys((*cases(), *BY_HAND, *OF_A_STOP)) if c not in ALWAYS]


def test_every_failpoint_has_its_place_in_the_sweep() -> None:
    elsewhere = AFTER_ANOTHER.keys() | OVER_AN_OBJECT_STORE | ONCE_PER_BUNDLE | ONLY_AT_A_SITE
    elsewhere |= WITH_CLIENT_STATE | WITH_MERGED_METRICS | BY_WORKERS_THEMSELVES
    assert REACHED_BY.keys() | elsewhere == set(FAILPOINTS)
    found = cases()
    assert {case.failpoint for case in found} == REACHED_BY.keys()
    assert all(case.job in REACHED_BY[case.failpoint] for case in ALWAYS)
    swept = {need for case in (*ALWAYS, *IN_THE_SWEEP) for need in needs(case)}
    assert {need for case in found for need in needs(case)} <= swept
    assert len(PAIRS) < len(found) / 3


@pytest.mark.cluster
@pytest.mark.promise("A process that dies within an exchange of any kind changes no bits.")
@pytest.mark.parametrize("case", ALWAYS, ids=str)
def test_a_crash_changes_no_bits(rig: Rig, case: Case) -> None:
    _crash(rig, case)


@pytest.mark.sweep
@pytest.mark.promise("No job that comes by a failpoint has other bits when it is killed there.")
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-and-".join(map(str, pair)))
def test_no_crash_changes_any_bits(rig: Rig, pair: tuple[Case, ...]) -> None:
    _crash(rig, *pair)


@pytest.mark.soak
@pytest.mark.promise("A kill at any hit of a failpoint under any job is as any other.")
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_none_of_all_the_crashes_changes_any_bits(rig: Rig, case: Case) -> None:
    _crash(rig, case)


@pytest.mark.sweep
@pytest.mark.promise("What is done again after a crash may crash as well.")
@pytest.mark.parametrize(
    ("failpoint", "job"), [(name, job) for name, each in AFTER_ANOTHER.items() for job in each[1]]
)
def test_no_second_crash_changes_any_bits(rig: Rig, job: str, failpoint: str) -> None:
    (first_process, first, process), _ = AFTER_ANOTHER[failpoint]
    expected = rig.undisturbed(job)
    with rig.armed(first_process, first, 3), rig.armed(process, failpoint):
        outcome = rig.outcome(JOBS[job])
    assert outcome == expected
    outcome.check_whole(expected)


def _crash(rig: Rig, *cases: Case) -> None:
    """Let each process die where its case says, all of them in one run of their job."""
    job = cases[0].job
    expected = rig.undisturbed(job)
    with ExitStack() as armed:
        for case in cases:
            armed.enter_context(rig.armed(case.process, case.failpoint, case.num_passed))
        outcome = rig.outcome(JOBS[job])
    assert outcome == expected
    outcome.check_whole(expected)
    if job in (*EXCHANGING, "Local", "Pipeline"):
        assert expected.history["train.loss"]

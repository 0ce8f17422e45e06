"""Kill each process at each of its failpoints, under every strategy that comes by there.

The killed process is started again by the cluster; the run must end with the bits of an undisturbed
one, in every committed state. A case is (job, process, failpoint, hits to let pass first).
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """worker-0 builds, evaluates, and is the only one that Local takes; later hits are another's,
    where others compute too."""
    if failpoint.startswith("coordinator."):
        return "coordinator"
    return "worker-2" if job in SEVERAL_COMPUTE and num_passed > 0 else "worker-0"


SAMPLE = (
    Case("AllReduce", "worker-2", "worker.step.before_apply", 1),
    Case("AllReduce", "worker-0", "worker.rendezvous.answered"),
    Case("Turns", "worker-0", "worker.turns.after_turn"),
    Case("ParameterServer", "coordinator", "coordinator.step.summed"),
    Case("ParameterServer", "worker-2", "worker.step.after_apply", 11),
    Case("Gossip", "worker-2", "worker.gossip.mixing", 9),
    Case("DiLoCo-streaming", "worker-2", "worker.local_step.before_backward", 6),
    Case("DiLoCo-server", "worker-2", "worker.replicas.kept", 3),
    Case("DiLoCo-stopped", "coordinator", "coordinator.upload.merged"),
    Case("Evaluation", "worker-0", "worker.metrics.measured"),
    Case("Mirrors", "worker-2", "worker.slices.updated", 5),
    Case("Mirrors", "worker-2", "worker.step.after_apply", 11),
    Case("Full", "worker-2", "worker.parameters.gathered", 30),
    Case("Full-mirrors", "worker-2", "worker.parameters.updated", 5),
    Case("Pipeline", "worker-2", "worker.stages.before_apply", 5),
    Case("FedAvg", "coordinator", "coordinator.journal.before_commit", 4),
    Case("FedAvg", "worker-0", "worker.round.trained"),
    Case("FedAvg-coded", "coordinator", "coordinator.spool.after_rename", 2),
    Case("Krum", "coordinator", "coordinator.fold.after_window"),
    Case("Fair", "coordinator", "coordinator.round.judged", 1),
    Case("Regions", "coordinator", "coordinator.fold.after_window"),
    Case("Secure", "coordinator", "coordinator.secure.opened"),
    Case("Secure", "worker-0", "worker.secure.update_kept"),
    # Between the two slots of the first round and its state.
    Case("FedYogi", "coordinator", "coordinator.blobs.after_rename", 2),
)


def test_every_failpoint_has_its_place_in_the_sweep() -> None:
    elsewhere = AFTER_ANOTHER.keys() | OVER_AN_OBJECT_STORE | ONCE_PER_BUNDLE | ONLY_AT_A_SITE
    elsewhere |= WITH_CLIENT_STATE | WITH_MERGED_METRICS | BY_WORKERS_THEMSELVES
    assert REACHED_BY.keys() | elsewhere == set(FAILPOINTS)
    assert {case.failpoint for case in cases()} == REACHED_BY.keys()
    assert all(case.job in REACHED_BY[case.failpoint] for case in SAMPLE)


@pytest.mark.cluster
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_crash_changes_no_bits(rig: Rig, case: Case) -> None:
    _crash(rig, case)


@pytest.mark.sweep
@pytest.mark.parametrize("case", [c for c in cases() if c not in SAMPLE], ids=str)
def test_no_crash_changes_any_bits(rig: Rig, case: Case) -> None:
    _crash(rig, case)


@pytest.mark.sweep
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


@pytest.mark.cluster
def test_a_training_that_is_stopped_ends_with_the_same_step(rig: Rig) -> None:
    """Worker-0 ends when it has made the step that it would have been shown next. What it logged
    of the step before is not lost."""
    _crash(rig, Case("Stopped", "worker-0", "worker.step.after_apply", 10))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case",
    [
        Case("Stopped", "worker-0", "worker.step.before_apply", 10),
        Case("Stopped", "worker-0", "worker.step.before_backward", 10),
        Case("Stopped", "worker-0", "worker.segment.finished", 3),
        Case("Stopped", "worker-0", "worker.snapshot.taken", 2),
        Case("Stopped", "worker-2", "worker.step.after_apply", 10),
        Case("Stopped", "coordinator", "coordinator.segment.trained", 3),
    ],
    ids=str,
)
def test_no_crash_changes_the_step_of_a_stop(rig: Rig, case: Case) -> None:
    _crash(rig, case)


def _crash(rig: Rig, case: Case) -> None:
    expected = rig.undisturbed(case.job)
    with rig.armed(case.process, case.failpoint, case.num_passed):
        outcome = rig.outcome(JOBS[case.job])
    assert outcome == expected
    outcome.check_whole(expected)
    if case.job in (*EXCHANGING, "Local", "Pipeline"):
        assert expected.history["train.loss"]

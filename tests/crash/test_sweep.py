"""Kill each process at each of its failpoints, under every strategy that comes by there.

The killed process is started again by the cluster; the run must end with the bits of an undisturbed
one, in every committed state. A case is (job, process, failpoint, hits to let pass first).
"""

from dataclasses import dataclass

import pytest

from stratagem.common.process.failpoints import FAILPOINTS
from tests.crash.failpoint_table import (
    AFTER_ANOTHER,
    EXCHANGING,
    LATER_HITS,
    ONCE_PER_BUNDLE,
    ONLY_AT_A_SITE,
    OVER_AN_OBJECT_STORE,
    REACHED_BY,
    SOLE_COPIES,
    WITH_PHASES,
)
from tests.crash.jobs import JOBS
from tests.crash.rig import Rig


@dataclass(frozen=True, slots=True)
class Case:
    job: str
    process: str
    failpoint: str
    num_passed: int = 0

    def __str__(self) -> str:
        return f"{self.job}-{self.process}-{self.failpoint}-{self.num_passed}"


def cases() -> list[Case]:
    """Every failpoint under every strategy that reaches it."""
    found = []
    for failpoint, jobs in REACHED_BY.items():
        for job in jobs:
            later_hits = () if job.startswith("Silo") else LATER_HITS.get(failpoint, ())
            for num_passed in (0, *later_hits):
                # worker-0 builds, evaluates, and is the only one that Local takes; under an
                # exchange the later hits are another member's.
                is_other = (
                    job
                    in (
                        *EXCHANGING,
                        *SOLE_COPIES,
                        *WITH_PHASES,
                        "Pipelines",
                        "Coded",
                        "Evaluation",
                        "Turns",
                    )
                    and num_passed > 0
                )
                worker = "worker-2" if is_other else "worker-0"
                process = worker if failpoint.startswith("worker.") else "coordinator"
                if job in EXCHANGING or failpoint != "worker.execute.accepted":
                    found.append(Case(job, process, failpoint, num_passed))
                elif num_passed == 0:
                    found.append(Case(job, process, failpoint))
    return found


SAMPLE = (
    Case("AllReduce", "worker-2", "worker.step.before_backward", 1),
    Case("AllReduce", "worker-0", "worker.step.after_apply"),
    Case("AllReduce", "worker-0", "worker.rendezvous.answered"),
    Case("Turns", "worker-2", "worker.turns.after_turn", 7),
    Case("ParameterServer", "coordinator", "coordinator.step.summed", 7),
    Case("ParameterServer", "worker-0", "worker.step.before_apply"),
    Case("Gossip", "worker-2", "worker.gossip.mixing", 9),
    Case("Gossip", "coordinator", "coordinator.commit.pulled", 2),
    Case("DiLoCo", "worker-2", "worker.outer_step.before_exchange", 1),
    Case("DiLoCo", "coordinator", "coordinator.commit.pulled", 2),
    Case("DiLoCo-streaming", "worker-2", "worker.outer_step.applied", 2),
    Case("DiLoCo-server", "worker-0", "worker.outer_step.applied"),
    Case("DiLoCo-server", "coordinator", "coordinator.step.summed", 1),
    Case("Evaluation", "worker-0", "worker.metrics.measured"),
    Case("Pipeline", "worker-2", "worker.stages.before_apply", 5),
    Case("Pipelines", "worker-2", "worker.stages.before_backward", 6),
    Case("Local", "worker-0", "worker.snapshot.taken", 5),
    Case("Local", "coordinator", "coordinator.journal.before_commit", 4),
    Case("FedAvg", "coordinator", "coordinator.round.folded", 1),
    Case("FedAvg", "worker-0", "worker.round.trained"),
    Case("FedAvg-coded", "coordinator", "coordinator.spool.after_rename", 2),
    Case("Median", "coordinator", "coordinator.fold.after_window"),
    Case("Krum", "coordinator", "coordinator.round.judged", 1),
    Case("Krum", "coordinator", "coordinator.fold.after_window"),
    Case("Fair", "coordinator", "coordinator.round.judged", 1),
    # Between the two slots of the first round and its state.
    Case("FedYogi", "coordinator", "coordinator.blobs.after_rename", 2),
)


def test_every_failpoint_has_its_place_in_the_sweep() -> None:
    elsewhere = AFTER_ANOTHER.keys() | OVER_AN_OBJECT_STORE | ONCE_PER_BUNDLE | ONLY_AT_A_SITE
    assert REACHED_BY.keys() | elsewhere == set(FAILPOINTS)
    assert {case.failpoint for case in cases()} == REACHED_BY.keys()
    assert set(SAMPLE) <= set(cases())


@pytest.mark.cluster
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_crash_changes_no_bits(rig: Rig, case: Case) -> None:
    _crash(rig, case)


@pytest.mark.sweep
@pytest.mark.parametrize("case", [c for c in cases() if c not in SAMPLE], ids=str)
def test_no_crash_changes_any_bits(rig: Rig, case: Case) -> None:
    _crash(rig, case)


@pytest.mark.sweep
@pytest.mark.parametrize("failpoint", AFTER_ANOTHER)
@pytest.mark.parametrize("job", EXCHANGING)
def test_no_second_crash_changes_any_bits(rig: Rig, job: str, failpoint: str) -> None:
    first_process, first = AFTER_ANOTHER[failpoint]
    expected = rig.undisturbed(job)
    with rig.armed(first_process, first, 3), rig.armed(first_process, failpoint):
        outcome = rig.outcome(JOBS[job])
    assert outcome == expected


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
    if case.job in (*EXCHANGING, "Local", "Pipeline"):
        assert expected.history["train.loss"]

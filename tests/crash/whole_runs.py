"""What runs that went on after a loss have in common."""

from stratagem.client.sdk.blocking import RunHandle
from tests.cluster.jobs import Gates
from tests.crash.jobs import Job
from tests.crash.rig import Outcome, Rig, outcome_of
from tests.patience import PATIENCE_S


def outcome_of_held(rig: Rig, gates: Gates, job: Job, process: str) -> tuple[Outcome, RunHandle]:
    """Run a job of gated rows whose worker will die in one of its first commits. Training does not
    pass its ninth step before that: a slow disk has no commit die when all is trained."""
    survivor = "worker-2" if process == "worker-1" else "worker-1"  # has one batch in each step
    num_starts = rig.cluster.processes[process].num_starts
    gates.close(f"{survivor}-batch-9")
    with rig.running(job) as run:
        rig.cluster.wait_restarted(process, num_starts, timeout_s=PATIENCE_S)
        gates.open()
        return outcome_of(run), run


def assert_nothing_was_trained_twice(run: RunHandle) -> None:
    """The party was formed again, and has not gone back to a commit, whose segments would be
    finished again."""
    finished = [each.payload["segment"] for each in run.events() if each.kind == "SegmentFinished"]
    assert finished == sorted({*finished})
    reasons = [each.payload["reason"] for each in run.events() if each.kind == "MembersFormed"]
    assert any("each slice of the state is left with one of them" in each for each in reasons)

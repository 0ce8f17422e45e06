"""Ended runs as summaries: which can be archived, what is recalled of them, and which expire."""

from typing import Any

import pytest

from stratagem.common.base.ids import Digest, RunId
from stratagem.coordinator.app.plugins import BUILT_IN
from stratagem.coordinator.core import commands as c
from stratagem.coordinator.core import facts as f
from stratagem.coordinator.core.decide import decide, world_of
from stratagem.coordinator.core.fact_text import decode
from stratagem.coordinator.core.pending import live_blobs
from stratagem.coordinator.core.retention import expire_runs, has_brought, resting_with, runs_with
from stratagem.coordinator.core.run_view import (
    at_rest,
    num_to_recall,
    phase_of,
    put_to_rest,
    recall,
    view_of,
)
from stratagem.coordinator.core.state import CoordinatorState, EndedRun, EndedRuns
from stratagem.coordinator.core.strategy_contract import Strategies
from stratagem.coordinator.core.world import RunPhase
from tests.coordinator.core.jobs import DATA_PARALLEL, FEDERATED, LOCAL, job_text
from tests.coordinator.core.raising_strategies import raising
from tests.coordinator.core.simulation import RUN, Simulation, digest, start

pytestmark = pytest.mark.core


ALL, EVER = 1_000_000, float("-inf")
BROUGHT = {"data": {"inline": "ab" * 32}}


def archived(simulation: Simulation) -> EndedRun | None:
    """The summary of the run, where it can be archived."""
    run = simulation.record
    found = at_rest(world_of(simulation.state), run, 7.0)
    return None if found is None else found[0]


def at_peace(**changes: Any) -> tuple[Simulation, EndedRun, CoordinatorState]:
    """A run that has ended well, its summary, and the state with that alone."""
    simulation = start(job_text(LOCAL, **changes), "a", "b")
    simulation.complete()
    summary = archived(simulation)
    assert summary is not None
    return simulation, summary, put_to_rest(simulation.state, [summary])


def facts_of(simulation: Simulation, num: int) -> list[tuple[f.Fact, float]]:
    """The first facts of the run, each with the time at which it was journaled."""
    of_run = [entry for entry in simulation.journal if entry[0] == RUN]
    return [(decode(kind, 1, payload), time_s) for _, kind, payload, time_s in of_run[:num]]


@pytest.mark.parametrize("strategy", [LOCAL, DATA_PARALLEL, FEDERATED], ids=lambda s: s["type"])
def test_a_run_that_is_recalled_is_the_run_that_was_archived(strategy: dict[str, Any]) -> None:
    simulation = start(job_text(strategy, data={"inline": "ab" * 32}), "a", "b")
    simulation.step()
    simulation.tell(c.CancelRun(RUN))
    simulation.run()
    before = simulation.state
    summary = archived(simulation)
    assert summary is not None
    assert (summary.ended, summary.num_facts) == (RunPhase.CANCELLED, before.runs[RUN].num_facts)
    state = put_to_rest(before, [summary])
    assert (list(state.runs), list(state.ended)) == ([], [RUN])
    assert state.find(RUN) is summary
    assert state.all_runs() == [summary]
    assert phase_of(world_of(state), summary) is RunPhase.CANCELLED
    assert live_blobs(state) == live_blobs(before), "nothing of it is collected"
    assert num_to_recall(state, c.ResumeRun(RUN)) == (RUN, summary.num_facts)
    again = recall(state, RUN, facts_of(simulation, summary.num_facts))
    assert again == before
    simulation.state = again
    simulation.tell(c.ResumeRun(RUN))
    simulation.complete()


def test_a_run_that_goes_on_or_is_still_held_is_not_archived() -> None:
    simulation = start(job_text(LOCAL), "a")
    assert archived(simulation) is None
    simulation.step()
    simulation.tell(c.CancelRun(RUN))
    assert archived(simulation) is None, "a worker holds a session of it"
    simulation.run()
    assert archived(simulation) is not None


def test_what_another_strategy_may_read_otherwise_or_needs_without_saying_is_not_archived() -> None:
    raised = start(job_text(LOCAL), "a", strategies=raising("transition"))
    raised.run()
    assert raised.record.ended is RunPhase.FAILED
    assert archived(raised) is None
    gone, _, _ = at_peace()
    gone.strategies = Strategies({})
    gone.crash(is_twin=False)
    assert archived(gone) is None
    silent = start(job_text(LOCAL), "a", strategies=raising("own_blobs"))
    silent.report(f.RunFailed(reason="enough"))
    silent.run()
    assert (silent.record.ended, silent.record.has_raised) == (RunPhase.FAILED, False)
    assert archived(silent) is None


def test_of_an_archived_run_only_what_a_command_needs_is_recalled() -> None:
    simulation, _, state = at_peace()
    assert put_to_rest(state, []) is state
    # A completed run is not resumed; whether a job is the same is seen by its first fact.
    assert num_to_recall(state, c.ResumeRun(RUN)) is None
    assert num_to_recall(state, c.SubmitRun(RUN, job_text(LOCAL), 1.0)) == (RUN, 1)
    assert num_to_recall(state, c.CancelRun(RUN)) is None
    assert num_to_recall(state, c.ResumeRun(RunId("other"))) is None
    first = recall(state, RUN, facts_of(simulation, 1))
    assert decide(first, c.SubmitRun(RUN, job_text(LOCAL), 1.0)) == ()
    other = decide(first, c.SubmitRun(RUN, job_text(LOCAL, seed=1), 1.0))
    assert isinstance(other, c.Refusal)
    assert other.kind is c.RefusalKind.CONFLICT


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        (c.CancelRun(RUN), None),
        (c.Report(RUN, f.RunReleased()), None),
        (c.ReportTrouble(RUN, f.ROOT, 1, "cut off"), None),
        (c.ResumeRun(RUN), c.RefusalKind.PRECONDITION),
        (c.Report(RUN, f.RunFailed(reason="late")), c.RefusalKind.STALE),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_archived_run_answers_without_being_recalled(
    command: c.Command, refused: c.RefusalKind | None
) -> None:
    answer = decide(at_peace()[2], command)
    assert (answer.kind if isinstance(answer, c.Refusal) else answer) == (refused or ())


def test_the_blobs_of_an_archived_run_are_its_owners() -> None:
    simulation, _, state = at_peace(**BROUGHT)
    run = simulation.record
    blob = run.commits[-1].digest
    assert has_brought(state, run.owner, blob)
    assert not has_brought(state, "token b", blob)
    assert resting_with(state, blob) == [RUN]
    shown = {RUN: view_of(world_of(simulation.state), run, 7.0)}
    assert runs_with(state, blob, shown) == [f"{RUN}, segment {run.commits[-1].segment}"]
    assert runs_with(state, Digest("ab" * 32), shown) == [RUN]
    assert runs_with(state, blob, {}) == [RUN], "deleted in this instant"
    assert resting_with(state, digest("another")) == []
    (entry,) = decide(state, c.DeleteRun(RUN))  # type: ignore[misc]
    assert entry.run_id == RUN


# ---- which of them expire ----


def ended(name: str, at_s: float, *blobs: str, initial: str = "") -> EndedRun:
    own = tuple(sorted(map(digest, blobs)))
    began: Digest | None = digest(initial) if initial else None
    all_blobs = (*own, began) if began else own
    return EndedRun(RunId(name), RunPhase.COMPLETED, 1, 0.0, "", all_blobs, at_s, began)


def expired(command: c.ExpireRuns, *runs: EndedRun, **others: Any) -> list[str]:
    state = CoordinatorState(BUILT_IN, ended=EndedRuns.of(runs), **others)
    return [entry.run_id for entry in expire_runs(state, command)]


def expire(before_s: float = EVER, num_kept: int = ALL, limit: int = ALL) -> c.ExpireRuns:
    return c.ExpireRuns(before_s, num_kept, limit, "it is time")


def test_what_expires_is_the_oldest_by_age_and_by_number() -> None:
    runs = [ended("c", 30.0), ended("a", 10.0), ended("b", 20.0)]
    assert expired(expire(), *runs) == []
    assert expired(expire(before_s=20.0), *runs) == ["a"]
    assert expired(expire(num_kept=1), *runs) == ["a", "b"]
    assert expired(expire(before_s=40.0, num_kept=2), *runs) == ["a", "b", "c"], "first hit"
    assert expired(expire(num_kept=0, limit=2), *runs) == ["a", "b"]


def test_a_run_that_is_pinned_neither_expires_nor_counts_nor_is_deleted() -> None:
    simulation, _, _ = at_peace()
    (entry,) = simulation.tell(c.PinRun(RUN, True, "token a"))  # type: ignore[misc]
    assert entry.fact == f.RunPinned(run_id=RUN, is_pinned=True, by="token a")
    assert simulation.tell(c.PinRun(RUN, True)) == ()
    unknown = simulation.refusal(c.PinRun(RunId("nobody"), True))
    assert unknown == c.Refusal(c.RefusalKind.NOT_FOUND, "run 'nobody' is not known")
    summary = archived(simulation)
    assert summary is not None
    state = put_to_rest(simulation.state, [summary])
    reason = f"run {RUN!r} is pinned; unpin it first"
    assert decide(state, c.DeleteRun(RUN)) == c.Refusal(c.RefusalKind.PRECONDITION, reason)
    assert expire_runs(state, expire(before_s=1e9, num_kept=0)) == ()
    runs = [ended("a", 10.0), ended("b", 20.0), ended("c", 30.0)]
    assert expired(expire(num_kept=1), *runs, pinned=frozenset({RunId("c")})) == ["a"]
    simulation.tell(c.PinRun(RUN, False))
    assert not isinstance(decide(simulation.state, c.DeleteRun(RUN)), c.Refusal)


def test_a_run_that_another_one_has_begun_from_stays_as_long_as_that() -> None:
    source, other = ended("a", 1.0, "x", "y"), ended("b", 2.0, "z", initial="x")
    sibling = ended("c", 3.0, "v", initial="x")
    assert expired(expire(num_kept=0), source, other, sibling) == ["b", "c"]
    assert expired(expire(num_kept=0), source) == ["a"]
    active = start(job_text(LOCAL, initial={"digest": digest("y")})).state.runs
    assert expired(expire(num_kept=0), source, runs=active) == []


def test_a_run_that_has_expired_is_gone_with_the_reason() -> None:
    _, summary, state = at_peace()
    assert summary.is_released
    entries = decide(state, expire(num_kept=0))
    assert not isinstance(entries, c.Refusal)
    assert [entry.fact for entry in entries] == [f.RunExpired(reason="it is time")]

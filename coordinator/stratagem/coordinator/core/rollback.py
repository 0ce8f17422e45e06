"""Rollback: a run that ended continues from an earlier kept commit.

It is the same run: everything after the commit is undone and happens again. The facts stay in the
journal.
"""

from dataclasses import replace

from stratagem.coordinator.core.effects import Base
from stratagem.coordinator.core.facts import RunResumed
from stratagem.coordinator.core.state import RunRecord, retained


def resumed_from(run: RunRecord, segment: int, by: str) -> RunResumed | str:
    """Return the fact that resumes a run from a kept commit, or why that is impossible."""
    kept = {commit.segment: commit for commit in retained(run) if not commit.is_partial}
    if segment not in kept:
        known = ", ".join(map(str, sorted(kept))) or "none"
        return f"segment {segment} is no kept commit of run {run.run_id!r}; kept are {known}"
    commit = kept[segment]
    last = run.commits[-1].segment
    nesting = run.strategy.nesting
    if nesting is None:
        return (
            f"under this strategy run {run.run_id!r} goes on from its last commit ({last}) alone, "
            f"and not from segment {segment}: its others hold only a part of what it needs"
        )
    return RunResumed(
        by=by,
        from_segment=segment,
        step=commit.step,
        digest=commit.digest,
        by_policy=nesting.progress(run.value).keeps_more,
        streams=commit.streams,
        average=commit.average,
    )


def returned(run: RunRecord, fact: RunResumed) -> RunRecord:
    """Return the run as it was at the commit."""
    nesting = run.strategy.nesting
    assert nesting is not None
    assert fact.from_segment is not None
    base = Base(fact.from_segment, fact.step, fact.digest, fact.streams, fact.average)
    commits = tuple(commit for commit in run.commits if commit.segment <= base.segment)
    if nesting.returned is not None:
        value = nesting.returned(run.job, run.value, base, commits[-1].metrics)
    else:
        num_rows = nesting.progress(run.value).num_rows
        value = nesting.rebase(run.job, run.value, base, num_rows)
    return replace(
        run,
        value=value,
        commits=commits,
        metrics=commits[-1].metrics,
        num_returns=run.num_returns + 1,
        is_reproducible=run.is_reproducible and not fact.by_policy,
    )

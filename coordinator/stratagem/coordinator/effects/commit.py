"""CommitSegment: pull the snapshot of a finished segment from any of its members.

The members train on meanwhile; all of them hold the same bits, so whoever answers will do.
"""

import structlog

from stratagem.common.errors import StratagemError
from stratagem.common.failpoints import failpoint
from stratagem.coordinator.core.effects import CommitSegment
from stratagem.coordinator.core.facts import SegmentCommitted
from stratagem.coordinator.effects.env import Env
from stratagem.coordinator.effects.snapshot import pull_snapshot
from stratagem.coordinator.link import session

log = structlog.get_logger()


async def commit_segment(env: Env, effect: CommitSegment) -> None:
    """Make the segment's state durable and report SegmentCommitted."""
    session_ref = session(effect.run_id, effect.party)
    failure: StratagemError | None = None
    for member in effect.sources:
        try:
            digest, manifest = await pull_snapshot(
                env, member, session_ref, effect.membership, effect.segment
            )
        except StratagemError as error:
            log.info("no snapshot here", worker_id=member.worker_id, reason=str(error))
            failure = error
            continue
        failpoint("coordinator.commit.pulled")
        fact = SegmentCommitted(
            party=effect.party,
            segment=effect.segment,
            step=effect.step,
            digest=digest,
            size_bytes=manifest.total_bytes,
            metrics=dict(effect.metrics),
        )
        await env.report(effect.run_id, fact)
        return
    if failure is not None:
        raise failure

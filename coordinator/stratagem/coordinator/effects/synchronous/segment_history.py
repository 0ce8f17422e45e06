"""The step history of a segment: taken in while it is trained, complete when it ends.

The first member sends what all members know alike; each one sends what it alone knows, of its nodes
or stages and of itself. What is missing at the end, because it was too much to be kept, is asked
for by attaching once more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Party, RunId, child_party
from stratagem.common.history import Columns, Series, stride_of
from stratagem.common.history.recording import MAX_SERIES, pack
from stratagem.coordinator.core.effects import RunSegment
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.execute_plan import PlanListener, attend
from stratagem.coordinator.observe.live_history import (
    HistoryParts,
    PackedRows,
    SegmentTail,
    TailKey,
    merged,
)
from stratagem.coordinator.store.journal.history_rows import HistoryRow
from stratagem.v1 import worker_pb2

log = structlog.get_logger()


def stride_for(env: EffectContext, effect: RunSegment) -> int:
    """Return how many steps a row stands for; 0 where nothing is recorded: the job says so, or
    nothing is trained."""
    recording = env.job_of(effect.run_id, effect.party).recording
    is_off = recording is not None and not recording.steps
    num_steps = effect.num_rounds * effect.num_steps
    return 0 if is_off or not num_steps else stride_of(num_steps)


def number_of(effect: RunSegment) -> int:
    """Return the number of a segment in its party's history: that of a client counts rounds."""
    return effect.rounds_before + effect.segment


def take_in(
    env: EffectContext, effect: RunSegment, rank: int, part: worker_pb2.HistoryPart
) -> None:
    """Keep a part that a member has sent."""
    begun = SegmentTail(number_of(effect), stride_for(env, effect), effect.membership)
    env.history.add(TailKey(effect.run_id, effect.party, rank), begun, part)


async def finished_history(
    env: EffectContext,
    effect: RunSegment,
    request: Callable[[int], worker_pb2.ExecuteRequest],
    results: Sequence[worker_pb2.TrainResult],
) -> list[HistoryRow]:
    """Return the history of a segment that has ended: a row of the party, and one of each part of
    it that has any. What is not as a member says is left out.

    request: by rank, to attach with once more. results: by rank.
    """
    stride = stride_for(env, effect)
    if not stride:
        return []
    parts: list[PackedRows] = []
    for rank, result in enumerate(results):
        key = TailKey(effect.run_id, effect.party, rank)
        member = effect.members[rank]
        parts += await parts_of(env, key, number_of(effect), member, request(rank), result)
    step = effect.rounds_before * effect.num_steps + results[0].step
    trained = TrainedSteps(effect.run_id, effect.party, number_of(effect), stride, step)
    return await rows_of(env, trained, parts)


@dataclass(frozen=True, slots=True)
class TrainedSteps:
    """Steps that a party has trained in one segment, or round."""

    run_id: RunId
    party: Party
    segment: int
    stride: int
    to_step: int
    """The last one."""

    @property
    def ids(self) -> dict[str, object]:
        """What the log says of it."""
        return {"run_id": self.run_id, "party": self.party, "segment": self.segment}


async def parts_of(
    env: EffectContext,
    key: TailKey,
    segment: int,
    member: Member,
    request: worker_pb2.ExecuteRequest,
    result: worker_pb2.TrainResult | worker_pb2.ClientRoundResult,
) -> list[PackedRows]:
    """Return all that a member has recorded of a segment; nothing where that is not to be had."""
    if not result.num_history_parts:
        return []
    tail = env.history.tail(key)
    parts = tail.sent if tail is not None and tail.segment == segment else HistoryParts()
    if not parts.are_all(result):
        parts = HistoryParts()
        await attend(env, member, request, PlanListener(history=parts.add))
    if parts.are_all(result):
        return parts.parts
    ids = {"run_id": key.run_id, "party": key.party, "segment": segment, "rank": key.rank}
    log.error("the step history of a segment is not what its member says", **ids)
    return []


async def rows_of(
    env: EffectContext, trained: TrainedSteps, parts: Sequence[PackedRows]
) -> list[HistoryRow]:
    """Return what is stored of steps; nothing where what was sent of them cannot be read."""
    try:
        return await env.in_thread(lambda: _rows(trained, parts))
    except InvalidInputError as error:
        reason = str(error)
        log.error("the step history of a segment cannot be read", reason=reason, **trained.ids)
        return []


def _rows(trained: TrainedSteps, parts: Sequence[PackedRows]) -> list[HistoryRow]:
    return [
        _row(trained, name, rows, min(p.from_step for p in parts if p.party == name))
        for name, rows in merged(parts, trained.stride).items()
    ]


def _row(
    trained: TrainedSteps, name: str, rows: dict[Series, Columns], from_step: int
) -> HistoryRow:
    party = child_party(trained.party, name) if name else trained.party
    for series, columns in rows.items():
        if columns.step[0] <= from_step or columns.step[-1] > trained.to_step:
            raise InvalidInputError.at(
                series.name, f"has steps outside of {from_step + 1} to {trained.to_step}"
            )
    kept = dict(list(rows.items())[:MAX_SERIES])
    if len(kept) < len(rows):
        num_dropped = len(rows) - len(kept)
        log.warning("the step history leaves out series", num_dropped=num_dropped, **trained.ids)
    at = (trained.segment, trained.stride, from_step, trained.to_step)
    return HistoryRow(trained.run_id, party, *at, pack(kept))

"""The step history of a segment: taken in while it is trained, complete when it ends.

The first member sends it, since all members have recorded the same. What is missing at the end,
because it was too much to be kept, is asked for by attaching once more.
"""

import structlog

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.history import stride_of
from stratagem.common.history.packing import pack
from stratagem.coordinator.core.effects import ExchangeMethod, RunSegment
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.execute_plan import PlanListener, attend
from stratagem.coordinator.observe.live_history import HistoryParts, SegmentTail, merged
from stratagem.coordinator.store.journal.step_histories import HistoryRow
from stratagem.v1 import worker_pb2

log = structlog.get_logger()


def stride_for(env: EffectContext, effect: RunSegment) -> int:
    """Return how many steps a row stands for; 0 where nothing is recorded: the job says so, nothing
    is trained, or every node has a model, and so a loss, of its own."""
    recording = env.job_of(effect.run_id, effect.party).recording
    is_off = recording is not None and not recording.steps
    if is_off or not effect.num_steps or effect.exchange is ExchangeMethod.GOSSIP:
        return 0
    return stride_of(effect.num_steps)


def take_in(env: EffectContext, effect: RunSegment, part: worker_pb2.HistoryPart) -> None:
    """Keep a part that the first member has sent."""
    begun = SegmentTail(effect.segment, stride_for(env, effect))
    env.history.add(effect.run_id, effect.party, begun, part)


async def finished_history(
    env: EffectContext,
    effect: RunSegment,
    request: worker_pb2.ExecuteRequest,
    result: worker_pb2.TrainResult,
) -> HistoryRow | None:
    """Return the history of a segment that has ended; None where there is none, or it is not what
    the member says.

    request: of the first member, to attach with once more.
    """
    if not result.num_history_parts or not stride_for(env, effect):
        return None
    tail = env.history.tail(effect.run_id, effect.party)
    parts = tail.sent if tail is not None and tail.segment == effect.segment else HistoryParts()
    if not parts.are_all(result):
        parts = HistoryParts()
        await attend(env, effect.members[0], request, PlanListener(history=parts.add))
    ids = {"run_id": effect.run_id, "party": effect.party, "segment": effect.segment}
    if not parts.are_all(result):
        log.error("the step history of a segment is not what its member says", **ids)
        return None
    try:
        return await env.in_thread(
            lambda: _row(effect, stride_for(env, effect), parts, result.step)
        )
    except InvalidInputError as error:
        log.error("the step history of a segment cannot be read", reason=str(error), **ids)
        return None


def _row(effect: RunSegment, stride: int, parts: HistoryParts, step: int) -> HistoryRow:
    rows = merged(parts.parts, stride)
    for series, columns in rows.items():
        if columns.step[0] <= parts.from_step or columns.step[-1] > step:
            raise InvalidInputError.at(
                series.name, f"has steps outside of {parts.from_step + 1} to {step}"
            )
    return HistoryRow(
        effect.run_id, effect.party, effect.segment, stride, parts.from_step, step, pack(rows)
    )

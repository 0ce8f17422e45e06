"""Reports that a client of a federated round has failed: it is left out alone, with the reason.

The journal has cause and reason of every rejection, and of the first different exceptions of a
round what was raised; the run's log has all of them.
"""

import math
import time
from collections.abc import Mapping
from typing import Final

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.effects import CollectUpdate, SumRegion, TrainClient
from stratagem.coordinator.core.facts import SKIPPED_STEPS, ErrorRecord, UpdateRejected
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.federated.late_counts import report_update
from stratagem.coordinator.observe.run_logs import RunLogLine
from stratagem.coordinator.strategies.federated.update_rejections import cause_of, reason_of

MAX_JOURNALED_CHARS: Final = 1000
MAX_JOURNALED_TRACE: Final = 4000


async def reject(
    env: EffectContext,
    effect: TrainClient | CollectUpdate | SumRegion,
    cause: Cause,
    reason: str,
    error: ErrorRecord | None = None,
    opens_in_s: float = 0.0,
) -> None:
    """Report the rejection of a client's update."""
    fact = UpdateRejected(
        party=effect.party,
        round_num=effect.round_num,
        client=effect.client,
        reason=reason,
        cause=cause,
        error=error,
        opens_in_s=opens_in_s,
        attempt=effect.attempt if isinstance(effect, TrainClient) else 0,
    )
    await report_update(env, effect, fact)


async def reject_for_error(env: EffectContext, effect: TrainClient, error: ErrorRecord) -> None:
    """Reject the update of a client whose data or code has raised, or whose worker does not do what
    the job says."""
    log_error(env, effect.run_id, effect.client, error)
    kept = None
    if env.told.is_news(effect, error):
        message = error.message[:MAX_JOURNALED_CHARS]
        traceback = error.traceback[-MAX_JOURNALED_TRACE:]
        kept = error.model_copy(update={"message": message, "traceback": traceback})
    cause, reason = cause_of(error), reason_of(error)
    await reject(env, effect, cause, reason, kept, error.opens_in_s)


def log_error(env: EffectContext, run_id: RunId, client: int, error: ErrorRecord) -> None:
    """Write an error into the run's log, as a line of the worker; not that of a client which was
    drawn in secret: the journal has it."""
    if env.draws_in_secret(run_id):
        return
    text = f"client {client}, {error.activity}: {error.traceback or error.message}".rstrip()
    env.logs.add(run_id, RunLogLine(time.time(), error.worker_id, "ERROR", text))


def defect(loss: float, num_steps: int, metrics: Mapping[str, float]) -> tuple[Cause, str] | None:
    """Why an update that a client has made cannot count: it has learned nothing, or nothing good.

    metrics: by name, as in UpdateReceived.
    """
    num_skipped = metrics.get(SKIPPED_STEPS, 0)
    if num_steps and num_skipped >= num_steps:
        text = f"all of its {num_steps} steps were left out: no loss or no gradient was finite"
        return Cause.NOT_FINITE, text
    if not math.isfinite(loss):
        return Cause.NOT_FINITE_LOSS, f"its mean loss is {loss}"
    return None


def defect_before(q: float | None, loss: float | None) -> tuple[Cause, str] | None:
    """Why an update cannot count by the loss that its client has measured before it trained, where
    updates count by it."""
    if q is None:
        return None
    if loss is None:
        return Cause.REFUSED_BY_SITE, "its loss before training is not told, and q weighs by it"
    if not math.isfinite(loss):
        return Cause.NOT_FINITE_LOSS, f"its mean loss before training is {loss}"
    if loss < 0:
        text = f"its mean loss before training is {loss:g}, and q weighs by losses of at least 0"
        return Cause.NOT_FINITE_LOSS, text
    return None

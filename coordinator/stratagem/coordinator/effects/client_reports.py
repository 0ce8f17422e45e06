"""Report the outcome of a client's work in a federated round: its rejection, its privacy costs, its
state, or a late update.

A client that fails is left out alone, with the reason.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import NO_DIGEST, Digest, RunId, check_digest
from stratagem.common.privacy.noise import derived_key, fingerprint_of
from stratagem.coordinator.core.effects import CollectUpdate, KeptState, SumRegion, TrainClient
from stratagem.coordinator.core.facts import (
    SKIPPED_STEPS,
    ClientStateLost,
    ErrorRecord,
    RowsSpent,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.effects.context import EffectContext, LiveRuns
from stratagem.coordinator.effects.snapshot import pull_outputs
from stratagem.coordinator.observe.logs import RunLogLine
from stratagem.coordinator.runtime.links import WorkerSession
from stratagem.coordinator.store.step_history import HistoryRow
from stratagem.coordinator.strategies.federated.rejections import cause_of, reason_of
from stratagem.coordinator.strategies.federated.run import (
    Federation,
    has_simulated_states,
    spec_of,
)
from stratagem.v1 import worker_pb2

# ---- Rejections ----
#
# The journal has the cause and the reason of every rejection, and the exceptions themselves only
# for the first different ones of a round; the run's log has all of them.

MAX_JOURNALED_CHARS: Final = 1000
MAX_JOURNALED_TRACE: Final = 4000


async def reject(
    runs: LiveRuns,
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
    await report_update(runs, effect, fact)


async def reject_for_error(runs: LiveRuns, effect: TrainClient, error: ErrorRecord) -> None:
    """Reject a client's update because its data or code raised, or its worker ignores the job."""
    log_error(runs, effect.run_id, effect.client, error)
    record = None
    if runs.errors.is_new(effect, error):
        message = error.message[:MAX_JOURNALED_CHARS]
        traceback = error.traceback[-MAX_JOURNALED_TRACE:]
        record = error.model_copy(update={"message": message, "traceback": traceback})
    cause, reason = cause_of(error), reason_of(error)
    await reject(runs, effect, cause, reason, record, error.opens_in_s)


def log_error(runs: LiveRuns, run_id: RunId, client: int, error: ErrorRecord) -> None:
    """Write a client's error into the run's log, unless the run draws its clients in secret (then
    only the journal has the error)."""
    if runs.draws_in_secret(run_id):
        return
    text = f"client {client}, {error.activity}: {error.traceback or error.message}".rstrip()
    runs.logs.add(run_id, RunLogLine(time.time(), error.worker_id, "ERROR", text))


def defect(loss: float, num_steps: int, metrics: Mapping[str, float]) -> tuple[Cause, str] | None:
    """Return the cause and reason to reject an update if its client skipped all steps or its loss
    is not finite; else None.

    metrics: keyed by name, as in UpdateReceived.
    """
    num_skipped = metrics.get(SKIPPED_STEPS, 0)
    if num_steps and num_skipped >= num_steps:
        text = f"all of its {num_steps} steps were left out: no loss or no gradient was finite"
        return Cause.NOT_FINITE, text
    if not math.isfinite(loss):
        return Cause.NOT_FINITE_LOSS, f"its mean loss is {loss}"
    return None


def defect_before(q: float | None, loss: float | None) -> tuple[Cause, str] | None:
    """Return the cause and reason to reject an update whose client's loss before training is
    missing or invalid; None if it is valid, or if q, which weighs by that loss, is None."""
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


# ---- Privacy of rows ----
#
# A client whose rows are protected gets the parameters of its noise, and reports its costs.


def row_privacy(runs: LiveRuns, effect: TrainClient) -> worker_pb2.RowPrivacy:
    """Return the parameters of the noise that a client adds in its round; call this in a thread.

    A site has its own secret, which protects its rows from the coordinator, too. Otherwise the
    noise comes from the coordinator's secret, so that another worker that repeats the round draws
    the same. Raises SecretLostError, and InvalidInputError if the job allows no noise.
    """
    job, asked = runs.job_of(effect.run_id, effect.party), effect.rows
    assert job.privacy is not None
    assert asked is not None
    name = str(runs.spool_key(effect.run_id, effect.party, effect.round_num, effect.client).folder)
    privacy = worker_pb2.RowPrivacy(num_rounds=asked.num_rounds, name=name)
    if job.privacy.noise == "seeded":
        return privacy
    if job.data.worker_local is not None:
        privacy.fingerprint = asked.fingerprint
        return privacy
    secret = runs.secret.get(asked.fingerprint)
    privacy.fingerprint = fingerprint_of(secret)
    privacy.secret = derived_key(secret, ["client", name, str(effect.client)])
    return privacy


def spent_of(result: worker_pb2.ClientRoundResult) -> RowsSpent | None:
    """Return the privacy budget that a client reports to have spent; an invalid number counts as
    infinite."""
    if not result.HasField("spent"):
        return None
    spent = result.spent
    epsilon, after = (
        value if math.isfinite(value) and value >= 0 else math.inf
        for value in (spent.epsilon, spent.next_epsilon)
    )
    return RowsSpent(
        epsilon=epsilon,
        next_epsilon=after,
        fingerprint=spent.fingerprint[:64],
        accountant=spent.accountant[:200],
    )


# ---- States of clients ----
#
# These functions convert the states that clients keep to and from the messages of their workers.
#
# The states of clients with local rows stay at their workers, and only digests come here; those
# of simulated clients are in the store.

_MAX_REASON_CHARS: Final = 300


def client_state_ref(state: KeptState | None) -> worker_pb2.ClientStateRef | None:
    """Return the reference to a client's state for a plan; None if it has no state."""
    if state is None:
        return None
    return worker_pb2.ClientStateRef(round=state.round_num, digest=state.digest)


def kept_rounds(runs: LiveRuns, effect: TrainClient) -> tuple[int, ...]:
    """Return the rounds whose client states must be kept besides the state of the current round.

    The rounds are read when the plan is sent, since an evaluation made meanwhile changes no pending
    effect.
    """
    run = runs.state.runs.get(effect.run_id)
    value = None if run is None else run.value
    return value.kept_rounds(effect.client) if isinstance(value, Federation) else ()


async def report_lost_state(
    runs: LiveRuns, effect: TrainClient, result: worker_pb2.ClientRoundResult
) -> None:
    """Report that a client started afresh because its earlier state is lost."""
    if effect.state is None or not result.state_lost:
        return
    fact = ClientStateLost(
        party=effect.party,
        round_num=effect.round_num,
        client=effect.client,
        reason=result.state_lost[:_MAX_REASON_CHARS],
    )
    await runs.report(effect.run_id, fact)


def state_defect(
    runs: LiveRuns, effect: TrainClient, result: worker_pb2.ClientRoundResult
) -> tuple[Cause, str] | None:
    """Return the cause and reason to reject an update if the digest of its client state is wrong,
    or if there should be no client state; else None."""
    job = runs.job_of(effect.run_id, effect.party)
    is_there = spec_of(job).options.has_client_state and not has_simulated_states(job)
    try:
        given = check_digest(result.state_digest) if is_there else NO_DIGEST
    except InvalidInputError as error:
        return Cause.LAYOUT, f"what it keeps to itself: {error}"
    if given != result.state_digest:
        return Cause.LAYOUT, "it keeps a state, and the job says nothing of it"
    return None


async def kept_state(
    env: EffectContext, effect: TrainClient, at: WorkerSession, told: str
) -> Digest:
    """Return the digest of the client's state; first store the state of a simulated client.

    told: the digest of the state at the worker.
    """
    if not has_simulated_states(env.runs.job_of(effect.run_id, effect.party)):
        return Digest(told)
    digest, _ = await pull_outputs(env, at, effect.round_num)
    return digest


# ---- Late updates ----
#
# The updates of clients whose round was closed without them are counted here. A defect of an
# update is journaled as UpdateRejected; lateness is not, since nothing follows from it.


async def report_update(
    runs: LiveRuns,
    effect: TrainClient | CollectUpdate | SumRegion,
    fact: UpdateReceived | UpdateRejected,
    histories: Sequence[HistoryRow] = (),
) -> None:
    """Report a client's update or rejection; count it as late if its round was closed without
    it."""
    if not await runs.report(effect.run_id, fact, histories):
        count_if_late(runs, effect)


def count_if_late(runs: LiveRuns, effect: TrainClient | CollectUpdate | SumRegion) -> None:
    """Count a client's work as late if it ends without an update, unless the client continues
    elsewhere, the run is over, or this process is ending."""
    run = runs.state.runs.get(effect.run_id)
    if run is None or run.ended is not None:
        return
    update = UpdateRejected(
        party=effect.party, round_num=effect.round_num, client=effect.client, reason=""
    )
    if run.strategy.reject_reason(run.job, run.value, update):
        runs.refused[Cause.LATE] += 1

"""What clients keep to themselves, in the messages to their workers and from them.

The states of clients with rows of their own lie at their workers, and only digests come here; those
of simulated ones lie in the store.
"""

from typing import Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import NO_DIGEST, Digest, check_digest
from stratagem.coordinator.core.effects import KeptState, TrainClient
from stratagem.coordinator.core.facts import ClientStateLost
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.synchronous.snapshot import pull_outputs
from stratagem.coordinator.runtime.worker_links import WorkerSession
from stratagem.coordinator.strategies.federated.federated_run import (
    FederatedRun,
    has_simulated_states,
    spec_of,
)
from stratagem.v1 import worker_pb2

_MAX_REASON_CHARS: Final = 300


def client_state_ref(state: KeptState | None) -> worker_pb2.ClientStateRef | None:
    """Return a client's state as it is named in a plan; None where there is none."""
    if state is None:
        return None
    return worker_pb2.ClientStateRef(round=state.round_num, digest=state.digest)


def kept_rounds(env: EffectContext, effect: TrainClient) -> tuple[int, ...]:
    """Return the rounds whose states the client still needs beside the one that it makes.

    It is read when the plan is sent: an evaluation that is made meanwhile changes nothing that is
    due.
    """
    run = env.state.runs.get(effect.run_id)
    value = None if run is None else run.value
    if not isinstance(value, FederatedRun) or value.client_states is None:
        return ()
    return value.client_states.kept_rounds(effect.client)


async def report_lost_state(
    env: EffectContext, effect: TrainClient, result: worker_pb2.ClientRoundResult
) -> None:
    """Report that a client has begun anew because it no longer has what it had kept."""
    if effect.state is None or not result.state_lost:
        return
    fact = ClientStateLost(
        party=effect.party,
        round_num=effect.round_num,
        client=effect.client,
        reason=result.state_lost[:_MAX_REASON_CHARS],
    )
    await env.report(effect.run_id, fact)


def state_defect(
    env: EffectContext, effect: TrainClient, result: worker_pb2.ClientRoundResult
) -> tuple[Cause, str] | None:
    """Why an update cannot count whose client should keep something: its digest is no digest."""
    job = env.job_of(effect.run_id, effect.party)
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
    """Return the digest of what the client keeps; a simulated one's is brought into the store.

    told: the digest of what lies at the worker.
    """
    if not has_simulated_states(env.job_of(effect.run_id, effect.party)):
        return Digest(told)
    digest, _ = await pull_outputs(env, at, effect.round_num)
    return digest

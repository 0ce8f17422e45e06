"""What a client whose rows are protected is told for its noise, and what it says of its costs."""

import math

from stratagem.common.privacy.noise import derived_key, fingerprint_of
from stratagem.coordinator.core.effects import TrainClient
from stratagem.coordinator.core.facts import RowsSpent
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.v1 import worker_pb2


def row_privacy(env: EffectContext, effect: TrainClient) -> worker_pb2.RowPrivacy:
    """Return what the noise of a client's round depends on; for a thread.

    A site has a secret of its own, which protects its rows from the coordinator, too. Rows that any
    worker may read are drawn from the coordinator's secret: another worker would else do a round
    again with other noise. Raises SecretLostError, and InvalidInputError where there can be none.
    """
    job, asked = env.job_of(effect.run_id, effect.party), effect.rows
    assert job.privacy is not None
    assert asked is not None
    name = str(env.spool_key(effect.run_id, effect.party, effect.round_num, effect.client).folder)
    told = worker_pb2.RowPrivacy(num_rounds=asked.num_rounds, name=name)
    if job.privacy.noise == "seeded":
        return told
    if job.data.worker_local is not None:
        told.fingerprint = asked.fingerprint
        return told
    secret = env.secret.get(asked.fingerprint)
    told.fingerprint = fingerprint_of(secret)
    told.secret = derived_key(secret, ["client", name, str(effect.client)])
    return told


def spent_of(result: worker_pb2.ClientRoundResult) -> RowsSpent | None:
    """Return what a client says that its rows have spent; a number that is none is no budget."""
    if not result.HasField("spent"):
        return None
    told = result.spent
    epsilon, after = (
        value if math.isfinite(value) and value >= 0 else math.inf
        for value in (told.epsilon, told.next_epsilon)
    )
    return RowsSpent(
        epsilon=epsilon,
        next_epsilon=after,
        fingerprint=told.fingerprint[:64],
        accountant=told.accountant[:200],
    )

"""A client's round whose rows are protected: its noise, what it costs, and what is told of it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from stratagem.common.base.errors import InvalidInputError, RefusedBySiteError
from stratagem.common.privacy import accountant
from stratagem.common.privacy.noise import SecretLostError, fingerprint_of, seeded_secret
from stratagem.common.schema.json import JSON
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine.privacy.row_budget import RowCosts, check_budget
from stratagem.worker.engine.privacy.row_noise import RowNoise
from stratagem.worker.engine.trainers.federated_client import ClientRound
from stratagem.worker.session.context import ExecutionContext


@dataclass(frozen=True, slots=True)
class RowRound:
    """What the rows of a client get in a round, and what they pay."""

    noise: RowNoise
    epsilon: float
    next_epsilon: float
    fingerprint: str

    @property
    def costs(self) -> Mapping[str, JSON]:
        """What the audit of a site says of the round."""
        return {"epsilon": self.epsilon, "noise": self.noise.digest_of_names}

    def result(self, done: ClientRound) -> pb.ClientRoundResult:
        """Return what is told of the round: nothing that its rows decide."""
        return pb.ClientRoundResult(
            num_samples=done.num_samples,
            num_steps=done.num_steps,
            is_loss_withheld=True,
            spent=pb.RowsSpent(
                epsilon=self.epsilon,
                next_epsilon=self.next_epsilon,
                fingerprint=self.fingerprint,
                accountant=accountant.accountant_version(),
            ),
        )


def begin_rows(work: ExecutionContext, plan: pb.ClientRoundPlan, num_rows: int) -> RowRound:
    """Return the noise of a round that the client's budget allows. Raises BudgetSpentError where it
    does not, RefusedBySiteError without the secret of the rounds before, and InvalidInputError for
    a plan that says nothing of them."""
    spec = work.job.privacy
    assert spec is not None
    if not plan.HasField("rows"):
        text = "is missing, and the job protects rows (privacy.unit)"
        raise InvalidInputError.at("client_round.rows", text)
    noise, fingerprint = _noise(work, plan)
    costs, num_before = RowCosts.of(work.job, num_rows), plan.rows.num_rounds
    if work.admission is not None:  # a site counts by itself what has left it
        num_before = max(num_before, len(work.admission.noises - {noise.digest_of_names}))
    epsilon = check_budget(costs, spec.target.epsilon, num_before)
    return RowRound(noise, epsilon, costs.epsilon_after(num_before + 2), fingerprint)


def _noise(work: ExecutionContext, plan: pb.ClientRoundPlan) -> tuple[RowNoise, str]:
    """Return the noise of a round, and the fingerprint of the secret that it comes from."""
    own, client = plan.rows, str(plan.client)
    spec = work.job.privacy
    assert spec is not None
    if spec.noise == "seeded":
        of_round = (str(work.segment), client)
        return RowNoise(seeded_secret(work.job.seed), of_round, is_seeded=True), ""
    secret, fingerprint = own.secret, own.fingerprint
    if work.job.data.worker_local is not None:  # whatever the coordinator sends: rows are here
        try:
            secret = work.host.privacy_secret.get(own.fingerprint)
        except (SecretLostError, InvalidInputError) as error:
            raise RefusedBySiteError(f"{work.host.worker_id}: {error}") from None
        fingerprint = fingerprint_of(secret)
    elif not secret:
        raise InvalidInputError.at("client_round.rows.secret", "is missing")
    job = hashlib.sha256(work.request.job_json.encode()).hexdigest()
    sizes = f"{plan.num_clients} {plan.local_epochs} {plan.num_lr_reductions}"
    names = (work.key.run_id, own.name, plan.base.digest, job, sizes, client)
    return RowNoise(secret, names), fingerprint

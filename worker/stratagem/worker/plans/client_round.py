"""Run one client's round: train from the global state, and offer the update to the coordinator.

Runs in the torch thread.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError, RefusedBySiteError
from stratagem.common.base.ids import Party
from stratagem.common.compression import FloatArray, NonFiniteError
from stratagem.common.compression.table import PAYLOAD, update_codec, update_key
from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.privacy import accountant
from stratagem.common.privacy.noise import SecretLostError, fingerprint_of, seeded_secret
from stratagem.common.privacy.secrets import SecureRound
from stratagem.common.process.failpoints import failpoint
from stratagem.common.schema.json import JSON
from stratagem.common.strategy import Federated
from stratagem.common.tensors.local_files import MAX_COPY_BYTES, copy_of, is_near
from stratagem.common.tensors.manifest import WITHIN_NORM, Purpose, to_proto
from stratagem.common.tensors.stream import sent
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.federated.client_trainer import ClientRound, ClientRunner, RoundSettings
from stratagem.worker.federated.row_privacy import RowCosts, RowNoise, check_budget, clipped_change
from stratagem.worker.federated.secure_client import masked_update
from stratagem.worker.mesh.staging import to_host
from stratagem.worker.plans.client_state import (
    RoundStart,
    correction,
    is_controlled,
    keep,
    kept_state,
    own_model,
)
from stratagem.worker.plans.history import ClientHistory
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.profiling import StepRecorder
from stratagem.worker.session.states import ClientSteps, Frozen, freeze

# ---- Coded update of a client ----
#
# The coded value is the difference to the global state; see common.compression.table.


def coded_update(
    job: JobSpec,
    done: ClientRound,
    base: Mapping[str, Tensor],
    round_num: int,
    client: int,
    numerics: int = CURRENT,
) -> tuple[Frozen, dict[str, int]] | None:
    """Return (encoded update, bytes saved; see TrainResult.traffic). None if the update is not
    finite: it is then sent uncoded, and the coordinator rejects it."""
    assert job.compression is not None
    whole, _ = manifest_of(done.tensors, Purpose.UPDATE)
    coded = [
        spec for spec in whole.stored() if spec.name in done.trained and spec.dtype == "float32"
    ]
    codec, names = update_codec(job, coded, numerics)
    trained, before = _flats(done.tensors, names), _flats(base, names)
    moves = [x - y for x, y in zip(trained, before, strict=True)]
    try:
        payload, _ = codec.encode(moves, codec.initial_state(), update_key(job, round_num, client))
    except NonFiniteError:
        return None
    others = {spec.name: done.tensors[spec.name] for spec in whole.stored()}
    for name in names:
        del others[name]
    others[PAYLOAD] = torch.from_numpy(payload)
    manifest, buffers = manifest_of(
        {name: tensor.detach().cpu().contiguous() for name, tensor in others.items()},
        Purpose.UPDATE,
        weight=float(done.num_samples),
        metadata={"round": str(round_num), "client": str(client)},
    )
    traffic = {"sent_bytes": manifest.total_bytes, "uncompressed_bytes": whole.total_bytes}
    return Frozen(replace(manifest, codec=job.compression.codec), buffers), traffic


def _flats(tensors: Mapping[str, Tensor], names: Sequence[str]) -> list[FloatArray]:
    copies = [to_host(tensors[name].detach().reshape(-1)) for name in names]
    return [copy.wait().numpy() for copy in copies]  # all were started before one is read


# ---- Privacy of rows ----
#
# A round with protected rows has noise, a cost, and a limit on what the client reports.


@dataclass(frozen=True, slots=True)
class RowRound:
    """The noise for the protected rows of a client in one round, and the round's privacy cost."""

    noise: RowNoise
    epsilon: float
    next_epsilon: float
    fingerprint: str

    @property
    def costs(self) -> Mapping[str, JSON]:
        """Return the round's privacy entries for the site's audit."""
        return {"epsilon": self.epsilon, "noise": self.noise.digest_of_names}

    def result(self, done: ClientRound) -> pb.ClientRoundResult:
        """Return the result of the round to report; nothing in it depends on the rows."""
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
    """Return the noise of a round within the client's privacy budget. Raises BudgetSpentError
    beyond it, RefusedBySiteError without the secret of earlier rounds, and InvalidInputError for a
    plan without the number of earlier rounds."""
    spec = work.job.privacy
    assert spec is not None
    if not plan.HasField("rows"):
        text = "is missing, and the job protects rows (privacy.unit)"
        raise InvalidInputError.at("client_round.rows", text)
    noise, fingerprint = _noise(work, plan)
    costs, num_before = RowCosts.of(work.job, num_rows), plan.rows.num_rounds
    if work.admission is not None:  # a site itself counts the spent budget
        num_before = max(num_before, len(work.admission.noises - {noise.digest_of_names}))
    epsilon = check_budget(costs, spec.target.epsilon, num_before)
    return RowRound(noise, epsilon, costs.epsilon_after(num_before + 2), fingerprint)


def _noise(work: ExecutionContext, plan: pb.ClientRoundPlan) -> tuple[RowNoise, str]:
    """Return (noise of a round, fingerprint of its secret)."""
    rows, client = plan.rows, str(plan.client)
    spec = work.job.privacy
    assert spec is not None
    if spec.noise == "seeded":
        of_round = (str(work.segment), client)
        return RowNoise(seeded_secret(work.job.seed), of_round, is_seeded=True), ""
    secret, fingerprint = rows.secret, rows.fingerprint
    if work.job.data.worker_local is not None:  # whatever the coordinator sends, the rows are here
        try:
            secret = work.host.privacy_secret.get(rows.fingerprint)
        except (SecretLostError, InvalidInputError) as error:
            raise RefusedBySiteError(f"{work.host.worker_id}: {error}") from None
        fingerprint = fingerprint_of(secret)
    elif not secret:
        raise InvalidInputError.at("client_round.rows.secret", "is missing")
    job = hashlib.sha256(work.request.job_json.encode()).hexdigest()
    sizes = f"{plan.num_clients} {plan.local_epochs} {plan.num_lr_reductions}"
    names = (work.key.run_id, rows.name, plan.base.digest, job, sizes, client)
    return RowNoise(secret, names), fingerprint


# ---- Client round ----

NUM_UPDATES: Final = 1
"""Number of updates kept for each client."""
MAX_MANIFEST_BYTES: Final = 2**20
"""Maximum size of a manifest sent along with a result, since messages are limited."""
MAX_RUNNERS: Final = 4
"""Maximum number of jobs of one run whose models are kept for their clients."""


@dataclass(frozen=True, slots=True)
class _Trained:
    """A client's finished local training, not reported yet."""

    done: ClientRound
    own_model: Mapping[str, Tensor]
    """The client's own model; empty if clients have none."""
    rows: RowRound | None
    """Set if the client's rows are protected."""
    history: ClientHistory


def client_round(work: ExecutionContext, plan: pb.ClientRoundPlan) -> pb.ClientRoundResult:
    """Train a client from the base (a global state); the update becomes the round's snapshot."""
    started_s = time.monotonic()
    work.set_activity("training")
    federation = work.key.party.rpartition("/")[0]
    work.post(work.host.blobs.note_federation, work.key.run_id, federation)
    base, _ = work.blob(plan.base.digest)
    loss_before = _loss_before(work, base, plan)
    state = kept_state(work, plan, base)
    trained = _train(work, plan, base, state)
    work.control.check()
    done, state_digest = keep(work, trained.done, plan, trained.own_model, base, state)
    empty = _told_of_nothing(work, done, base, plan, trained.rows)
    if empty is None:
        update, traffic = _coded(work, done, base, plan.client) or (_plain(work, done, plan), {})
        result = pb.ClientRoundResult(
            num_samples=done.num_samples,
            loss=done.loss,
            seconds=time.monotonic() - started_s,
            num_steps=done.num_steps,
            metrics=done.metrics,
            traffic=traffic,
            loss_before=loss_before,
            num_applied_steps=done.num_applied if _is_normalized(work.job) else None,
        )
    else:
        update, result = empty
    if work.admission is not None:
        costs = {} if trained.rows is None else trained.rows.costs
        work.admission.update(update.manifest, update.buffers, done.num_samples, costs)
    elif is_near(plan.place):
        update = _offered(update, result)
        work.control.check()  # no copy stays open of an update that nobody waits for
    work.post(work.states.keep, work.segment, update, NUM_UPDATES)
    result.state_digest, result.state_lost = state_digest, state.lost
    result.num_history_parts, result.history_digest = trained.history.end()
    failpoint("worker.round.trained")
    return result


def _offered(update: Frozen, result: pb.ClientRoundResult) -> Frozen:
    """Add a small update to the result, so that it need not be requested."""
    manifest = to_proto(update.manifest).SerializeToString()
    if update.manifest.total_bytes > MAX_COPY_BYTES or len(manifest) > MAX_MANIFEST_BYTES:
        return update
    copy = copy_of(update.buffers)
    if copy is None:
        return update
    result.manifest = manifest
    result.file.CopyFrom(copy.offer())
    sent(Purpose.UPDATE).num_bytes += update.manifest.total_bytes
    return replace(update, copy=copy)


def _train(
    work: ExecutionContext,
    plan: pb.ClientRoundPlan,
    base: Mapping[str, Tensor],
    state: RoundStart,
) -> _Trained:
    """Train the shared model, then the client's own model. state: the client's state before."""
    with StepRecorder(work) as recorder:
        timer = ClientSteps(work.host.stats)
        runner, rows = _runner(work), None
        num_clients = plan.num_clients
        if work.job.privacy is not None and work.job.privacy.unit == "row":
            rows = begin_rows(work, plan, runner.num_rows(plan.client, num_clients))
        history = ClientHistory(work, runner.steps_in_round(plan.client, num_clients))
        settings = RoundSettings(
            plan.num_lr_reductions,
            None if rows is None else rows.noise,
            correction=correction(base, state.own) if is_controlled(work.job) else None,
        )
        done = runner.run(
            state.start,
            plan.client,
            num_clients,
            work.segment,
            _before_step(work, recorder, timer),
            after_step=history.add,
            settings=settings,
        )
        model = own_model(work, runner, plan, base, state)
        timer.end(done.num_samples * _local_epochs(work.job))
    return _Trained(done, model, rows, history)


def _before_step(
    work: ExecutionContext, recorder: StepRecorder, timer: ClientSteps
) -> Callable[[], None]:
    """Return the function to call before each step, which raises if the plan must end."""
    steps = count(1)

    def before_step() -> None:
        work.control.check()
        number = next(steps)
        recorder.begin(number, 2)
        timer.begin_step()
        work.host.last_words.step(number)

    return before_step


def _told_of_nothing(
    work: ExecutionContext,
    done: ClientRound,
    base: Mapping[str, Tensor],
    plan: pb.ClientRoundPlan,
    rows: RowRound | None,
) -> tuple[Frozen, pb.ClientRoundResult] | None:
    """Return (update, result) of a masked or protected round, whose result does not depend on the
    rows; None for other rounds."""
    if isinstance(work.job.strategy, Federated) and work.job.strategy.options.secure_aggregation:
        return _masked(work, done, base, plan), _nothing_of(done)
    if plan.clip_norm:
        return _private(done, base, plan, work.segment), _nothing_of(done)
    if rows is not None:
        return _plain(work, done, plan), rows.result(done)
    return None


def _is_normalized(job: JobSpec) -> bool:
    """Return whether the update is divided by the client's number of steps."""
    return isinstance(job.strategy, Federated) and job.strategy.options.normalize is not None


def _loss_before(
    work: ExecutionContext, base: Mapping[str, Tensor], plan: pb.ClientRoundPlan
) -> float | None:
    """Return the loss of the global state over the client's rows, if updates are weighted by it."""
    strategy = work.job.strategy
    if not isinstance(strategy, Federated) or strategy.options.q is None:
        return None
    client, num_clients = plan.client, plan.num_clients
    return _runner(work).loss_before(base, client, num_clients, work.control.check)


def _private(
    done: ClientRound, base: Mapping[str, Tensor], plan: pb.ClientRoundPlan, round_num: int
) -> Frozen:
    """Return the clipped change as the update, and whether it had to be clipped."""
    change = clipped_change(base, done.tensors, plan.clip_norm)
    metadata = {
        "round": str(round_num),
        "client": str(plan.client),
        WITHIN_NORM: str(int(change.is_within)),
    }
    return freeze(change.tensors, metadata, Purpose.UPDATE, weight=1.0)


def _masked(
    work: ExecutionContext, done: ClientRound, base: Mapping[str, Tensor], plan: pb.ClientRoundPlan
) -> Frozen:
    """Return the masked change as the update. Raises RefusedBySiteError if the client has no
    secrets for this round, or has used them for another update."""
    if not plan.HasField("secure_mask"):
        raise RefusedBySiteError("secure_aggregation: the plan asks for an update without masks")
    party = Party(work.key.party.rpartition("/")[0])
    of_round = SecureRound(work.key.run_id, party, work.segment, plan.secure_mask.attempt)
    routed = tuple(plan.secure_mask.routed)
    secure = work.host.secure
    masking = secure.masking(of_round, plan.client, work.request.job_json, routed)
    weight = masking.spec.weight(done.num_samples)
    masked = masked_update(base, done.tensors, masking, weight)
    secure.keep_update(of_round, plan.client, routed, masked.digest)
    return freeze(masked.tensors, {}, Purpose.UPDATE, weight=1.0)


def _nothing_of(done: ClientRound) -> pb.ClientRoundResult:
    """Return the result of a private or masked client: without loss, rows and time. Only divergence
    is reported, as a loss that is not finite."""
    num_skipped = done.metrics.get("skipped_steps", 0)
    has_learned = math.isfinite(done.loss) and num_skipped < done.num_steps
    loss = 0.0 if has_learned else math.nan
    return pb.ClientRoundResult(num_samples=1, loss=loss, num_steps=1, is_loss_withheld=True)


def _plain(work: ExecutionContext, done: ClientRound, plan: pb.ClientRoundPlan) -> Frozen:
    return freeze(
        {name: tensor.detach().cpu().contiguous() for name, tensor in done.tensors.items()},
        {"round": str(work.segment), "client": str(plan.client)},
        Purpose.UPDATE,
        float(done.num_samples),
    )


def _local_epochs(job: JobSpec) -> int:
    return job.strategy.options.local_epochs if isinstance(job.strategy, Federated) else 1


def _coded(
    work: ExecutionContext, done: ClientRound, base: Mapping[str, Tensor], client: int
) -> tuple[Frozen, dict[str, int]] | None:
    spec = work.job.compression
    if spec is None or spec.codec == "none":
        return None
    return coded_update(work.job, done, base, work.segment, client, work.numerics)


def _runner(work: ExecutionContext) -> ClientRunner:
    """Return the runner that trains all clients of the job on this worker. Parties of a run may
    have different jobs, such as members of a population."""
    runners, text = work.run_cache.clients, work.request.job_json + work.data_version
    if text not in runners:
        if len(runners) == MAX_RUNNERS:
            runners.popitem(last=False)
        runners[text] = ClientRunner(
            work.job, work.entrypoints, work.host.device, work.sources(), work.numerics
        )
        work.warn(runners[text].notes)
    runners.move_to_end(text)
    return runners[text]

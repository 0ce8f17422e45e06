"""EvaluateState has members evaluate one stored state: each on the batches of its shards, or one
member on a client's own rows.

Members do not communicate, so losing one delays no other. The next membership gives a lost member's
shards to the others, which answer at once for batches that they have evaluated. No user code runs
here.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Digest, Party, child_party
from stratagem.common.job import JobSpec
from stratagem.common.numerics.shards import assign_shards
from stratagem.common.process.failpoints import failpoint
from stratagem.coordinator.core.effects import EvaluateState, RunSegment
from stratagem.coordinator.core.facts import ROOT, ClientEvaluated, Evaluated, Member, PartyFailed
from stratagem.coordinator.effects.client_reports import client_state_ref, log_error
from stratagem.coordinator.effects.commit import merged
from stratagem.coordinator.effects.context import EffectContext, LiveRuns
from stratagem.coordinator.effects.execute import OnProgress, PlanListener, finish, record_of
from stratagem.coordinator.effects.party_updates import store_states, summed
from stratagem.coordinator.effects.snapshot import PartHolder, pull_part, pull_part_outputs
from stratagem.coordinator.observe.feed import Feed, SegmentProgress
from stratagem.coordinator.runtime.links import WorkerSession, state_ref
from stratagem.coordinator.runtime.supervisor import task_group
from stratagem.coordinator.store.blobs import BlobStore
from stratagem.coordinator.strategies.federated.rejections import reason_of
from stratagem.coordinator.strategies.schedule import LOGGED, WEIGHT, added, means
from stratagem.coordinator.updates.merge import ContradictionError, StatePart
from stratagem.v1 import types_pb2, worker_pb2

# ---- EvaluateState ----


async def evaluate_state(env: EffectContext, effect: EvaluateState) -> None:
    """Evaluate a state, and report Evaluated, ClientEvaluated, or the reason why the run fails."""
    job, party, segment = (
        env.runs.job_of(effect.run_id, effect.party),
        effect.party,
        effect.base.segment,
    )
    display = _Shown(env.runs.feed, effect, job)
    async with task_group() as group:
        attending = [
            group.create_task(_evaluate(env, effect, rank, display.by(rank)))
            for rank in range(len(effect.members))
        ]
    results = [task.result() for task in attending]
    finished = [result for result in results if result is not None]
    if len(finished) < len(results):
        return  # an early end has been reported
    failpoint("coordinator.evaluation.gathered")
    parts = [part for result in finished for part in result.parts]
    if effect.client is not None:
        (result,) = finished
        said = await _said(env.transfers.blobs, effect, effect.client, result)
        await env.runs.report(effect.run_id, said)
        return
    metrics, predictions = fold_parts(parts, env.runs.metrics_of(effect.run_id, party)), Digest("")
    splits, kept_in = effect.splits, child_party(party, "evaluate")
    user_metrics = await own_metrics(env, effect, kept_in, segment, splits, finished)
    if user_metrics is None:
        return
    metrics, at = {**metrics, **user_metrics}, (segment, effect.base.step)
    seen = await shown_evaluation(env, effect, kept_in, at, splits, finished, metrics)
    if seen is None:
        return
    if job.evaluation is not None and job.evaluation.predictions:
        pairs = zip(effect.members, finished, strict=True)
        try:
            predictions = await _predictions(
                env, effect, [m for m, result in pairs if result.parts]
            )
        except ContradictionError as error:
            reason = f"the outputs of the batches cannot be joined: {error}"
            await env.runs.report(effect.run_id, PartyFailed(party=party, reason=reason))
            return
    metrics |= seen.logged
    fact = Evaluated(party=party, segment=segment, metrics=metrics, predictions=predictions)
    await env.runs.report(effect.run_id, fact)


async def _predictions(env: EffectContext, effect: EvaluateState, members: list[Member]) -> Digest:
    """Store the members' predictions in row order, and return the blob's digest; "" if the split
    has no rows."""

    async def pull(member: Member) -> StatePart:
        async with env.transfers.pulls:
            return await pull_part(env, PartHolder(_session(effect, member)), effect.base.segment)

    if not members:
        return Digest("")
    digest, _ = await merged(env, [partial(pull, member) for member in members], joins_rows=True)
    return digest


def _session(effect: EvaluateState, member: Member) -> WorkerSession:
    party = child_party(effect.party, "evaluate")
    return WorkerSession(member, effect.run_id, party, effect.membership)


async def _evaluate(
    env: EffectContext, effect: EvaluateState, rank: int, on_progress: OnProgress
) -> worker_pb2.EvaluateResult | None:
    member = effect.members[rank]
    owned = assign_shards(effect.num_shards, len(effect.members))[rank]
    plan = worker_pb2.EvaluatePlan(
        base=state_ref(effect.base),
        splits=effect.splits,
        rank=owned.start,
        count=len(owned),
        size=effect.num_shards,
        client=effect.client or 0,
        client_state=client_state_ref(effect.client_state),
        wants_sums=effect.client is not None,
        lineage=effect.lineage,
    )
    at = _session(effect, member)
    request = env.workers.request(effect.party, at, effect.base.segment, evaluate=plan)
    client = effect.client
    failed = None if client is None else partial(_fail_client, env.runs, effect, client)
    result = await finish(
        env,
        effect,
        member,
        request,
        PlanListener(on_progress),
        base=effect.base.digest,
        failed=failed,
    )
    return None if result is None else result.evaluate


async def _said(
    blobs: BlobStore, effect: EvaluateState, client: int, result: worker_pb2.EvaluateResult
) -> ClientEvaluated:
    """Store the states of a client's metrics, and return the fact with its evaluation results."""
    user_metrics = result.own_metrics
    said = ClientEvaluated(
        party=effect.party,
        segment=effect.base.segment,
        client=client,
        sums=sums_of(result.parts),
        own=dict(user_metrics.metrics),
        summed=summed(user_metrics.sums),
    )
    try:
        return said.model_copy(update={"states": await store_states(blobs, user_metrics.sums)})
    except InvalidInputError as error:
        nothing = {"sums": {}, "own": {}, "summed": (), "reason": str(error)}
        return said.model_copy(update=nothing)


async def _fail_client(
    runs: LiveRuns, effect: EvaluateState, client: int, raised: types_pb2.UserError
) -> None:
    """Report that a client cannot evaluate its rows; the evaluation goes on without the client."""
    error = record_of(raised)
    log_error(runs, effect.run_id, client, error)
    fact = ClientEvaluated(
        party=effect.party,
        segment=effect.base.segment,
        client=client,
        sums={},
        reason=reason_of(error) or error.type,
    )
    await runs.report(effect.run_id, fact)


class _Shown:
    """Shows the evaluation progress: batches and rows per second of all members together."""

    def __init__(self, feed: Feed, effect: EvaluateState, job: JobSpec) -> None:
        self._feed, self._effect = feed, effect
        # Where something is trained, the progress of a run is that of its training.
        self._is_shown = effect.party == ROOT and job.only_evaluates
        self._latest: dict[int, worker_pb2.Progress] = {}

    def by(self, rank: int) -> OnProgress:
        """Return the progress handler for the member of a rank."""

        def show(progress: worker_pb2.Progress) -> None:
            self._latest[rank] = progress
            if self._is_shown:
                self._feed.set_progress(self._effect.run_id, self._sum())

        return show

    def _sum(self) -> SegmentProgress:
        latest = self._latest.values()
        return SegmentProgress(
            step=sum(progress.step for progress in latest),
            rows_per_s=sum(progress.rows_per_s for progress in latest),
        )


# ---- Sums ----
#
# The parts of an evaluation are added in order of batch, so the result does not depend on which
# member computed which part.


def sums_of(parts: Iterable[worker_pb2.EvaluationPart]) -> dict[str, float]:
    """Return the metric sums keyed by "<split>/<name>"; a batch reported twice counts once."""
    by_batch = {(part.split, part.batch): part for part in parts}
    return added(
        {f"{split}/{name}": value for name, value in {**part.sums, WEIGHT: part.weight}.items()}
        for (split, _), part in sorted(by_batch.items(), key=lambda item: item[0])
    )


def fold_parts(
    parts: Iterable[worker_pb2.EvaluationPart], metrics: Sequence[str]
) -> dict[str, float]:
    """Return the weighted mean of each metric over all parts, keyed by "<split>.<metric>"."""
    return means(sums_of(parts), metrics)


# ---- Metrics of the user ----
#
# The user's code computes each of these metrics over all rows at once, and therefore on one
# member. The other members keep the outputs of their batches; these are gathered, as tensors, and
# sent there.

Result = worker_pb2.TrainResult | worker_pb2.EvaluateResult


async def own_metrics(
    env: EffectContext,
    effect: RunSegment | EvaluateState,
    kept_in: Party,
    segment: int,
    splits: Sequence[str],
    results: Sequence[Result],
) -> Mapping[str, float] | None:
    """Compute the user's own metrics, keyed by "<split>.<metric>"; empty if the job has none.

    kept_in: the party whose sessions have evaluated the state. results: in order of the effect's
    members. Return None if the computation failed, which has then been reported.
    """
    said = [result.own_metrics for result in results if result.HasField("own_metrics")]
    measured = [metrics for metrics in said if metrics.are_measured]
    if measured or not said:
        return dict(measured[0].metrics) if measured else {}

    async def pull(member: Member) -> StatePart:
        at = WorkerSession(member, effect.run_id, kept_in, effect.membership)
        async with env.transfers.pulls:
            return await pull_part_outputs(env, at, segment)

    pairs = zip(effect.members, results, strict=True)
    pulls = [partial(pull, member) for member, result in pairs if result.HasField("own_metrics")]
    try:
        outputs, _ = await merged(env, pulls)
    except ContradictionError as error:
        reason = f"the outputs of the batches cannot be joined: {error}"
        await env.runs.report(effect.run_id, PartyFailed(party=effect.party, reason=reason))
        return None
    failpoint("coordinator.outputs.gathered")
    member = effect.members[0]
    measuring = child_party(effect.party, "measure")
    at = WorkerSession(member, effect.run_id, measuring, effect.membership)
    plan = worker_pb2.MeasurePlan(outputs=outputs, splits=splits, lineage=effect.lineage)
    request = env.workers.request(effect.party, at, segment, measure=plan)
    result = await finish(env, effect, member, request, PlanListener())
    return None if result is None else dict(result.measure.metrics)


# ---- on_evaluation ----
#
# At the end of an evaluation one member passes its numbers to the user's on_evaluation. This
# happens before the evaluation is journaled, so what the hook returns is part of that fact.


class Seen(NamedTuple):
    """The result of on_evaluation: numbers keyed by series, and the reason to end the training, if
    any."""

    logged: Mapping[str, float]
    stop_reason: str


async def shown_evaluation(
    env: EffectContext,
    effect: RunSegment | EvaluateState,
    shown_in: Party,
    at: tuple[int, int],
    splits: Sequence[str],
    results: Sequence[Result],
    metrics: Mapping[str, float],
) -> Seen | None:
    """Call the user's on_evaluation hook on the first member, and return its result.

    shown_in: the party whose sessions have evaluated the state. at: segment and step of the
    evaluated state. metrics: keyed by "<split>.<metric>". Return None if the hook failed, which has
    then been reported.
    """
    if not (splits and results and results[0].wants_evaluation):
        return Seen({}, "")
    segment, step = at
    prefix = f"{splits[0]}."
    plan = worker_pb2.ShowPlan(
        split=splits[0],
        step=step,
        metrics={name.removeprefix(prefix): value for name, value in metrics.items()},
        lineage=effect.lineage,
    )
    session = WorkerSession(effect.members[0], effect.run_id, shown_in, effect.membership)
    request = env.workers.request(effect.party, session, segment, show=plan)
    result = await finish(env, effect, effect.members[0], request, PlanListener())
    if result is None:
        return None
    logged = {f"{LOGGED}{name}": value for name, value in sorted(result.show.logged.items())}
    return Seen(logged, result.show.stop_reason)

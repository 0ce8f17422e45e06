"""RunSegment trains all members of a party up to a step, and `release` has the workers forget an
ended run.

The coordinator starts, watches and collects; under AllReduce no gradients pass through it. If a
member is lost, the fact that records the loss changes the pending effects, which cancels this task;
the next one gives the survivors their new view of the membership. Their computation goes on
undisturbed.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from stratagem.common.base.errors import InvalidInputError, SoleCopyLostError, StratagemError
from stratagem.common.base.ids import Digest, Party, RunId, child_party, is_within
from stratagem.common.history import Columns, Series, stride_of
from stratagem.common.history.recording import MAX_SERIES, pack
from stratagem.common.numerics.shards import assign_shards
from stratagem.common.numerics.verification import VERIFIER
from stratagem.common.process.failpoints import failpoint
from stratagem.common.schema.json import dump_json
from stratagem.common.strategy import partitions_state
from stratagem.coordinator.core.effects import ExchangeMethod, Release, RunSegment
from stratagem.coordinator.core.facts import (
    ROOT,
    SKIPPED_STEPS,
    Member,
    ReplicasDiffer,
    RunReleased,
    SegmentFinished,
    SoleCopiesLost,
)
from stratagem.coordinator.effects.context import EffectContext, LiveRuns, WorkerCalls
from stratagem.coordinator.effects.evaluate import fold_parts, own_metrics, shown_evaluation
from stratagem.coordinator.effects.execute import PlanListener, attend, fail_party, finish
from stratagem.coordinator.effects.parameter_server import serve_steps
from stratagem.coordinator.observe.feed import Feed, SegmentProgress
from stratagem.coordinator.observe.history import (
    HistoryParts,
    PackedRows,
    SegmentTail,
    TailKey,
    merged,
)
from stratagem.coordinator.runtime.links import WorkerSession, state_ref
from stratagem.coordinator.runtime.supervisor import task_group
from stratagem.coordinator.store.step_history import HistoryRow
from stratagem.coordinator.strategies.schedule import TRAIN_SPLIT
from stratagem.v1 import types_pb2, worker_pb2

# ---- RunSegment ----

MAX_STREAMS_CHARS: Final = 1 << 16
"""The most characters of a segment's stream positions, which are journaled."""
EXCHANGE = {
    ExchangeMethod.ALL_REDUCE: worker_pb2.EXCHANGE_METHOD_ALL_REDUCE,
    ExchangeMethod.PARAMETER_SERVER: worker_pb2.EXCHANGE_METHOD_PARAMETER_SERVER,
    ExchangeMethod.GOSSIP: worker_pb2.EXCHANGE_METHOD_GOSSIP,
}


async def run_segment(env: EffectContext, effect: RunSegment) -> None:
    """Train one segment; report SegmentFinished, or the reason why the run fails."""
    latest: dict[int, worker_pb2.Progress] = {}
    async with task_group() as group:
        servers = []
        if effect.exchange is ExchangeMethod.PARAMETER_SERVER:
            sets = effect.parts if effect.ranks else (effect.members,)
            servers = [group.create_task(serve_steps(env, effect, members)) for members in sets]
        request_of = _requests(env.workers, effect)
        attending = [
            group.create_task(
                _train(
                    env,
                    effect,
                    rank,
                    request_of(rank),
                    ShownProgress(env.runs.feed, effect, latest),
                )
            )
            for rank in range(len(effect.members))
        ]
        results = [await task for task in attending]
        for server in servers:
            server.cancel()
    finished = [result for result in results if result is not None]
    if len(finished) == len(effect.members):
        await _report(env, effect, finished)


async def _train(
    env: EffectContext,
    effect: RunSegment,
    rank: int,
    request: worker_pb2.ExecuteRequest,
    display: "ShownProgress",
) -> worker_pb2.TrainResult | None:
    listener = PlanListener(
        lambda progress: display.show(rank, progress),
        lambda part: take_in(env.runs, effect, rank, part),
    )

    async def failed(error: types_pb2.UserError) -> None:
        is_awaited = effect.kept or effect.is_mirrored
        if not is_awaited or error.type != SoleCopyLostError.__name__:
            await fail_party(env.runs, effect.run_id, effect.party, error)
            return
        segment, reason = effect.base.segment, f"{error.message} (worker {error.worker_id})"
        at = None if effect.kept else effect.membership
        lost = SoleCopiesLost(party=effect.party, segment=segment, reason=reason, membership=at)
        await env.runs.report(effect.run_id, lost)

    result = await finish(env, effect, effect.members[rank], request, listener, failed=failed)
    return None if result is None else result.train


def _requests(
    workers: WorkerCalls, effect: RunSegment
) -> Callable[[int], worker_pb2.ExecuteRequest]:
    """Return a function that makes the request to train for the member of a rank. Each request
    names all members, possibly thousands, so the members are looked up once."""
    view = worker_pb2.View(members=_members(workers, effect))
    return lambda rank: _request(workers, effect, rank, view)


def _request(
    workers: WorkerCalls, effect: RunSegment, rank: int, of_all: worker_pb2.View
) -> worker_pb2.ExecuteRequest:
    view = worker_pb2.View(rank=rank)
    view.MergeFrom(of_all)
    plan = worker_pb2.TrainPlan(
        view=view,
        base=state_ref(effect.base),
        to_step=effect.to_step,
        num_shards=effect.num_shards,
        exchange=EXCHANGE[effect.exchange],
        evaluate_splits=effect.evaluate,
        lineage=effect.lineage,
        ranks=effect.ranks,
        num_lr_reductions=effect.num_lr_reductions,
        history_stride=stride_for(workers.runs, effect),
        history_from_step=effect.rounds_before * effect.num_steps,
        kept=effect.kept[rank] if effect.kept else "",
        keeps=effect.keeps,
    )
    at = WorkerSession(effect.members[rank], effect.run_id, effect.party, effect.membership)
    return workers.request(effect.party, at, effect.segment, train=plan)


def _members(workers: WorkerCalls, effect: RunSegment) -> list[worker_pb2.Member]:
    per_replica = len(set(effect.ranks)) or 1
    shards = assign_shards(effect.num_shards, len(effect.members) // per_replica)
    return [
        worker_pb2.Member(
            worker_id=member.worker_id,
            incarnation=member.incarnation,
            address=workers.link(member).address,
            first_shard=owned.start,
            num_shards=len(owned),
        )
        for rank, member in enumerate(effect.members)
        for owned in (shards[rank // per_replica],)
    ]


@dataclass(frozen=True, slots=True)
class ShownProgress:
    """The shown progress of a segment in training. latest: the members' progress, keyed by rank."""

    feed: Feed
    effect: RunSegment
    latest: dict[int, worker_pb2.Progress]

    def show(self, rank: int, progress: worker_pb2.Progress) -> None:
        """Record a member's progress, and display that of the first member."""
        self.latest[rank] = progress
        if rank or self.effect.party != ROOT:  # parties below do not count steps of the run
            return
        latest = SegmentProgress(
            progress.step,
            progress.loss,
            progress.rows_per_s,
            progress.grad_norm,
            self.effect.num_skipped + progress.num_skipped_steps,
            progress.phase,
            of_training(progress.metrics),
            progress.lr,
            self._bubble(),
        )
        self.feed.set_progress(self.effect.run_id, latest)

    def _bubble(self) -> float | None:
        """Return the idle share of a pipeline's ranks in the latest steps; None before all
        report."""
        ranks = range(len(self.effect.members)) if self.effect.ranks else range(0)
        reports = [self.latest[rank] for rank in ranks if rank in self.latest]
        longest_s = max((report.span_s for report in reports), default=0.0)
        if not longest_s or len(reports) < len(ranks):
            return None
        busy_s = sum(report.busy_s for report in reports)
        return min(max(1.0 - busy_s / (len(reports) * longest_s), 0.0), 1.0)


def of_training(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a worker's training metrics under their names in facts, such as "train.loss"."""
    return {f"{TRAIN_SPLIT}.{name}": value for name, value in sorted(metrics.items())}


def _with_skipped(metrics: dict[str, float], num_before: int) -> dict[str, float]:
    """Return the metrics with the number of steps skipped since the run began, if workers count
    skipped steps."""
    if SKIPPED_STEPS not in metrics:
        return metrics
    return {**metrics, SKIPPED_STEPS: num_before + metrics[SKIPPED_STEPS]}


async def _report(
    env: EffectContext, effect: RunSegment, results: list[worker_pb2.TrainResult]
) -> None:
    strategy = env.runs.job_of(effect.run_id, effect.party).strategy
    if differing := _differing(effect, results, can_blame=not partitions_state(strategy)):
        await env.runs.report(effect.run_id, differing)
        return
    evaluated = await _evaluated(env, effect, results)
    if evaluated is None:
        return
    metrics, stop_reason = evaluated
    failpoint("coordinator.segment.trained")
    first = results[0]
    fact = SegmentFinished(
        party=effect.party,
        segment=effect.segment,
        step=first.step,
        membership=effect.membership,
        loss=first.loss,
        num_rows=first.num_rows,
        seconds=max(result.seconds for result in results),
        engine=first.engine,
        metrics={**_with_skipped(of_training(first.metrics), effect.num_skipped), **metrics},
        num_redone_steps=max(result.num_redone_steps for result in results),
        traffic={
            name: sum(result.traffic[name] for result in results) for name in sorted(first.traffic)
        },
        stop_reason=first.stop_reason or stop_reason,
        streams=_streams(results),
        kept=tuple(Digest(result.kept) for result in results) if effect.keeps else (),
    )
    histories = await finished_history(env, effect, _requests(env.workers, effect), results)
    await env.runs.report(effect.run_id, fact, histories)


async def _evaluated(
    env: EffectContext, effect: RunSegment, results: list[worker_pb2.TrainResult]
) -> tuple[dict[str, float], str] | None:
    """Return the metrics of the segment's evaluation, and the reason if the user's code ends the
    training. Return None if the metrics could not be computed, which has then been reported."""
    party, segment, splits = effect.party, effect.segment, effect.evaluate
    user_metrics = await own_metrics(env, effect, party, segment, splits, results)
    if user_metrics is None:
        return None
    parts = (part for result in results for part in result.parts)
    metrics = {**fold_parts(parts, env.runs.metrics_of(effect.run_id, party)), **user_metrics}
    at = (segment, results[0].step)
    seen = await shown_evaluation(env, effect, party, at, splits, results, metrics)
    return None if seen is None else ({**metrics, **seen.logged}, seen.stop_reason)


def _streams(results: list[worker_pb2.TrainResult]) -> str:
    """Return all members' stream positions as JSON; "" if they are too long to be journaled:
    streams are then read again from further back."""
    marks = {number: text for result in results for number, text in result.streams.items()}
    text = dump_json({str(number): marks[number] for number in sorted(marks)}) if marks else ""
    return text if len(text) <= MAX_STREAMS_CHARS else ""


def _differing(
    effect: RunSegment, results: list[worker_pb2.TrainResult], *, can_blame: bool
) -> ReplicasDiffer | None:
    """Return the failure of members whose state digests differ; None if all agree.

    can_blame: the members that differ from the majority are the wrong ones. This does not hold if
    members copy slices from each other: then only the member that mirrors a wrong slice may differ.
    """
    by_member = dict(zip(effect.members, (r.state_fingerprint for r in results), strict=True))
    is_replicated = effect.exchange is not ExchangeMethod.GOSSIP and not effect.ranks
    # All replicas hold the same, apart from private state, which fingerprints do not cover.
    for part in (effect.members,) if is_replicated else effect.parts:
        (commonest, count), *others = Counter(by_member[member] for member in part).most_common()
        if not others:
            continue
        names = ", ".join(f"{member.worker_id} {by_member[member]}" for member in part)
        rest = tuple(m.worker_id for m in part if by_member[m] != commonest)
        return ReplicasDiffer(
            party=effect.party,
            reason=f"the replicas differ after segment {effect.segment}: {names}",
            segment=effect.segment,
            step=effect.to_step,
            minority=rest if can_blame and 2 * count > len(part) else (),
        )
    return None


# ---- Step history ----
#
# The step history of a segment is taken in during training and is complete when the segment ends.
#
# The first member sends the values that all members share. Each member sends the values that it
# alone has, about its nodes or stages and about itself. Parts that were too large to be kept are
# missing at the end, and are requested by attaching once more.

log = structlog.get_logger()


def stride_for(runs: LiveRuns, effect: RunSegment) -> int:
    """Return the steps per row of the step history; 0 if the job records or trains nothing, or the
    segment is only verified."""
    recording = runs.job_of(effect.run_id, effect.party).recording
    is_off = is_within(effect.party, VERIFIER) or (recording is not None and not recording.steps)
    num_steps = effect.num_rounds * effect.num_steps
    return 0 if is_off or not num_steps else stride_of(num_steps)


def number_of(effect: RunSegment) -> int:
    """Return the number of a segment in its party's history; for a client, the round number."""
    return effect.rounds_before + effect.segment


def take_in(runs: LiveRuns, effect: RunSegment, rank: int, part: worker_pb2.HistoryPart) -> None:
    """Buffer a part of the step history that a member has sent."""
    begun = SegmentTail(number_of(effect), stride_for(runs, effect), effect.membership)
    runs.history.add(TailKey(effect.run_id, effect.party, rank), begun, part)


async def finished_history(
    env: EffectContext,
    effect: RunSegment,
    request: Callable[[int], worker_pb2.ExecuteRequest],
    results: Sequence[worker_pb2.TrainResult],
) -> list[HistoryRow]:
    """Return the step history of an ended segment: a row of the party, and one per part that has a
    history. Parts that differ from a member's description are left out.

    request: makes the request with which to attach to a member again, given the rank. results: the
    members' results, by rank.
    """
    stride = stride_for(env.runs, effect)
    if not stride:
        return []
    parts: list[PackedRows] = []
    for rank, result in enumerate(results):
        key = TailKey(effect.run_id, effect.party, rank)
        member = effect.members[rank]
        parts += await parts_of(env, key, number_of(effect), member, request(rank), result)
    step = effect.rounds_before * effect.num_steps + results[0].step
    trained = TrainedSteps(effect.run_id, effect.party, number_of(effect), stride, step)
    return await rows_of(trained, parts)


@dataclass(frozen=True, slots=True)
class TrainedSteps:
    """The steps that a party has trained in one segment or round."""

    run_id: RunId
    party: Party
    segment: int
    stride: int
    to_step: int
    """The last step, included."""

    @property
    def ids(self) -> dict[str, object]:
        """Return the fields that identify these steps in log entries."""
        return {"run_id": self.run_id, "party": self.party, "segment": self.segment}


async def parts_of(
    env: EffectContext,
    key: TailKey,
    segment: int,
    member: Member,
    request: worker_pb2.ExecuteRequest,
    result: worker_pb2.TrainResult | worker_pb2.ClientRoundResult,
) -> list[PackedRows]:
    """Return all history parts that a member has recorded of a segment; [] if not available."""
    if not result.num_history_parts:
        return []
    tail = env.runs.history.tail(key)
    parts = tail.sent if tail is not None and tail.segment == segment else HistoryParts()
    if not parts.are_all(result):
        parts = HistoryParts()
        await attend(env, member, request, PlanListener(history=parts.add))
    if parts.are_all(result):
        return parts.parts
    ids = {"run_id": key.run_id, "party": key.party, "segment": segment, "rank": key.rank}
    log.error("the step history of a segment is not what its member says", **ids)
    return []


async def rows_of(trained: TrainedSteps, parts: Sequence[PackedRows]) -> list[HistoryRow]:
    """Return the history rows made from the parts; [] if the parts cannot be read."""
    try:
        return await asyncio.to_thread(_rows, trained, parts)
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
    stored_rows = dict(list(rows.items())[:MAX_SERIES])
    if len(stored_rows) < len(rows):
        num_dropped = len(rows) - len(stored_rows)
        log.warning("the step history leaves out series", num_dropped=num_dropped, **trained.ids)
    at = (trained.segment, trained.stride, from_step, trained.to_step)
    return HistoryRow(trained.run_id, party, *at, pack(stored_rows))


# ---- Release ----
#
# A worker that is gone has forgotten the run already.


async def release(env: EffectContext, effect: Release) -> None:
    """Have every remaining worker close the run, and report RunReleased."""
    env.forget(effect.run_id)
    await asyncio.gather(*(_close(env, effect, member) for member in effect.members))
    failpoint("coordinator.run.released")
    await env.runs.report(effect.run_id, RunReleased())


async def _close(env: EffectContext, effect: Release, member: Member) -> None:
    try:
        await env.workers.link(member).close_session(effect.run_id)
    except StratagemError as error:
        # Its sessions end with its process, or when it next asks about the run.
        worker_id = member.worker_id
        env.runs.say("not released", effect.run_id, worker_id=worker_id, why=str(error))

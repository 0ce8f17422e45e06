"""Evaluate a federated state by the clients that have made it, each on its own rows, and compute
the metrics of rounds.

A client that cannot evaluate is left out of the evaluation alone, with the reason. States of
metrics that are sums are merged before the evaluation is entered.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from stratagem.common.base.ids import Digest
from stratagem.common.job import EvaluationSpec, JobSpec
from stratagem.common.job.fields import CLIENT_MEAN, SHARES
from stratagem.coordinator.core.courses import why, with_course
from stratagem.coordinator.core.facts import (
    SKIPPED_STEPS,
    TRAIN_LOSS,
    ClientEvaluated,
    Evaluated,
    Member,
    MetricsMerged,
    RunFailed,
    UpdateReceived,
)
from stratagem.coordinator.strategies.federated.rejections import FAIL, few, task_of_evaluator
from stratagem.coordinator.strategies.federated.run import (
    Federation,
    OwedEvaluation,
    spec_of,
    without,
)
from stratagem.coordinator.strategies.schedule import TRAIN_SPLIT, WEIGHT, added, means

# ---- Evaluation by clients ----

MAX_TRIES: Final = 3
"""The most workers that are asked to compute metrics from the same states."""


def with_answer(
    job: JobSpec, value: Federation, fact: ClientEvaluated | MetricsMerged | Evaluated
) -> Federation:
    """Return the run value with a client's answer, merged metrics, or an evaluation's end added."""
    owed = value.evaluations.get(fact.segment)
    match fact:
        case Evaluated():
            metrics = with_course(job, value.metrics, fact.metrics)
            return replace(
                value,
                evaluations=without(value.evaluations, [fact.segment]),
                metrics=value.metrics if fact.without else metrics,
            )
        case ClientEvaluated():
            assert owed is not None
            owed = replace(owed, answers={**owed.answers, fact.client: fact})
        case _:
            assert owed is not None
            owed = replace(owed, merges=(*owed.merges, fact))
    return replace(value, evaluations={**value.evaluations, fact.segment: owed})


def evaluated(job: JobSpec, value: Federation) -> Evaluated | RunFailed | None:
    """Return the fact with the metrics of a round once all its clients have answered, computed from
    those that could evaluate, or the failure of the run; None if no evaluation is complete."""
    if job.evaluation is None:
        return None
    for segment, owed in value.evaluations.items():
        if owed.clients is None:
            continue
        answers, is_done = owed.answers, not owed.left
        has_sums = any(not fact.reason for fact in answers.values())
        failed = {c: f.reason for c, f in answers.items() if f.reason and not f.has_left}
        must_fail = bool(failed) and spec_of(job).options.on_client_error == FAIL
        if is_done and answers and not has_sums and not failed:
            departed = tuple(sorted(answers))
            return Evaluated(party=value.party, segment=segment, metrics={}, without=departed)
        if must_fail or (is_done and not has_sums):
            reasons = [f"client {client}: {reason}" for client, reason in sorted(failed.items())]
            text = f"the evaluation of round {segment} has failed: {'; '.join(few(reasons))}"
            return RunFailed(reason=text)
        if is_done and merging(value, owed) is None:
            metrics = _metrics(job.evaluation, owed)
            return Evaluated(party=value.party, segment=segment, metrics=metrics)
    return None


def evaluated_without(job: JobSpec, value: Federation) -> Evaluated | None:
    """Return the fact that completes the oldest of too many evaluations, if it waits only for
    clients that are gone, with the metrics of the other clients; else None.

    Each waiting evaluation keeps its state in the store. A client is gone if it is absent and had
    no part in the newest `retention` rounds; up to `retention` evaluations go on waiting for such
    clients.
    """
    owed = _given_up(job, value)
    if job.evaluation is None or owed is None or merging(value, owed) is not None:
        return None
    metrics, segment = _metrics(job.evaluation, owed), owed.base.segment
    return Evaluated(party=value.party, segment=segment, metrics=metrics, without=tuple(owed.left))


def _given_up(job: JobSpec, value: Federation) -> OwedEvaluation | None:
    """Return the evaluation to complete without its absent clients; None if there is none."""
    if value.committed is None or len(value.evaluations) <= job.retention:
        return None
    here = {member.worker_id for member in value.helper}
    last_but_those = value.committed.segment - job.retention

    def is_gone(client: int) -> bool:
        took_part = value.took_part.get(client, 0)
        return took_part <= last_but_those and value.roster[client].worker_id not in here

    waiting = [
        owed for owed in value.evaluations.values() if owed.left and all(map(is_gone, owed.left))
    ]
    return waiting[0] if len(waiting) > job.retention else None


class Merging(NamedTuple):
    """The states of metrics to be merged, and the worker that computes the values; None while no
    worker is present."""

    states: tuple[tuple[int, Digest], ...]
    metrics: tuple[str, ...]
    member: Member | None


def to_merge(job: JobSpec, value: Federation) -> Iterator[tuple[int, Merging]]:
    """Yield (segment, merging) for every evaluation that lacks only the merged metrics."""
    given_up = _given_up(job, value)
    for segment, owed in value.evaluations.items():
        if owed is given_up or not owed.left:
            due = merging(value, owed)
            if due is not None:
                yield segment, due


def merging(value: Federation, owed: OwedEvaluation) -> Merging | None:
    """Return the metric states to merge once all clients have answered an evaluation, and the
    worker to ask; None if there are none, or if merging is done or has failed too often."""
    states, metrics = _states(owed), _mergeable(owed.answers)
    if not metrics:
        return None
    tries = _tries(owed)
    if tries and (not tries[-1].reason or not tries[-1].worker_id or len(tries) >= MAX_TRIES):
        return None
    tried = {fact.worker_id for fact in tries}
    givers = {value.roster[client].worker_id: client for client, _ in states}
    last = len(value.roster)
    able = [
        member
        for member in sorted(value.helper, key=lambda m: givers.get(m.worker_id, last))
        if member.worker_id not in tried
        and value.losses.hopeless(task_of_evaluator(member.worker_id)) is None
    ]
    if value.helper and not able:
        return None
    return Merging(states, metrics, able[0] if able else None)


def _states(owed: OwedEvaluation) -> tuple[tuple[int, Digest], ...]:
    """Return, for each client that sent states of its metrics, (client, digest of the states)."""
    return tuple((c, fact.states) for c, fact in sorted(owed.answers.items()) if fact.states)


def _tries(owed: OwedEvaluation) -> list[MetricsMerged]:
    """Return the outcomes of all attempts to merge exactly the metric states that are here now."""
    clients = tuple(client for client, _ in _states(owed))
    return [fact for fact in owed.merges if fact.clients == clients]


def _mergeable(answers: Mapping[int, ClientEvaluated]) -> tuple[str, ...]:
    """Return the metrics whose states were sent by every client that has a value for them."""
    names = sorted({name for fact in answers.values() for name in fact.summed})

    def has_state(fact: ClientEvaluated, name: str) -> bool:
        return name in fact.summed or not any(f"{key}.".startswith(f"{name}.") for key in fact.own)

    return tuple(name for name in names if all(has_state(f, name) for f in answers.values()))


def _metrics(spec: EvaluationSpec, owed: OwedEvaluation) -> dict[str, float]:
    """Return the metrics of an evaluation: the means over all clients, whose sums are added in
    order of client, and the spread over clients."""
    answers = [fact for _, fact in sorted(owed.answers.items()) if not fact.reason]
    sums = [fact.sums for fact in answers]
    over_each = over_clients(sums, [fact.own for fact in answers], spec.metrics)
    merged = [fact.metrics for fact in _tries(owed) if not fact.reason]
    return means(added(sums), spec.metrics) | over_each | dict(merged[-1] if merged else {})


def evaluation_crashed(value: Federation) -> ClientEvaluated | None:
    """Return a failed answer for a client whose evaluation kills process after process, or None."""
    for segment, owed in value.evaluations.items():
        for client in owed.left:
            task = task_of_evaluator(value.roster[client].worker_id)
            if (deaths := value.losses.hopeless(task)) is not None:
                reason = why("it", deaths)
                return ClientEvaluated(
                    party=value.party, segment=segment, client=client, sums={}, reason=reason
                )
    return None


# ---- Training metrics of a round ----
#
# They depend on the set of accepted updates only: neither on the order of arrival nor on what a
# coordinator that was killed had seen.

TRAFFIC = frozenset({f"{TRAIN_SPLIT}.sent_bytes", f"{TRAIN_SPLIT}.uncompressed_bytes"})
"""Metrics that depend on which workers are present, and are therefore not part of a commit."""
_LARGEST = f"{TRAIN_SPLIT}.max_"


def round_metrics(
    on_time: Mapping[int, UpdateReceived],
    late: Sequence[UpdateReceived] = (),
    num_skipped: float = 0.0,
) -> dict[str, float]:
    """Return the training metrics of a round, by name, from its clients and the late updates that
    it takes.

    The loss and its spread are over the clients of the round that report a loss, weighted by rows:
    late ones have trained another state. Bytes and skipped steps are summed over all clients, norms
    are maxima. num_skipped: the steps skipped in earlier rounds, which are added.
    """
    in_order = [update for _, update in sorted(on_time.items())]
    everybody = [*in_order, *late]
    metrics = {**_loss(in_order), **_of_steps(everybody), **_traffic(everybody)}
    if SKIPPED_STEPS in metrics:
        metrics[SKIPPED_STEPS] += num_skipped
    return metrics


def mean_loss(updates: Mapping[int, UpdateReceived]) -> float:
    """Return the mean loss over the rows of a round's clients; 0 if no client reports a loss."""
    in_order = [
        update
        for _, update in sorted(updates.items())
        if update.num_samples and not math.isnan(update.loss)
    ]
    return _mean(in_order) if in_order else 0.0


def _loss(updates: Sequence[UpdateReceived]) -> dict[str, float]:
    updates = [update for update in updates if not math.isnan(update.loss)]
    weights = [update.num_samples for update in updates]
    losses = [update.loss for update in updates]
    total = sum(weights)
    if not total:
        return {}
    mean = _mean(updates)
    variance = _sum(w * (loss - mean) ** 2 for w, loss in zip(weights, losses, strict=True)) / total
    return {
        TRAIN_LOSS: mean,
        f"{TRAIN_LOSS}_min": min(losses),
        f"{TRAIN_LOSS}_max": max(losses),
        f"{TRAIN_LOSS}_std": math.sqrt(variance),
    }


def _mean(updates: Sequence[UpdateReceived]) -> float:
    total = sum(update.num_samples for update in updates)
    return _sum(update.num_samples * update.loss for update in updates) / total


def _of_steps(updates: Sequence[UpdateReceived]) -> dict[str, float]:
    """Return the metrics that clients report of their steps, combined: the maximum, the sum, or the
    mean over rows."""
    metrics = {}
    for name in sorted({name for update in updates for name in update.metrics}):
        having = [update for update in updates if name in update.metrics]
        values = [update.metrics[name] for update in having]
        if name == SKIPPED_STEPS:
            # Those of updates without num_steps were counted when an earlier version received them.
            metrics[name] = _sum(update.metrics[name] for update in having if update.num_steps)
        elif name.startswith(_LARGEST):
            metrics[name] = max(values)
        else:
            weighted = _sum(update.num_samples * update.metrics[name] for update in having)
            metrics[name] = weighted / sum(update.num_samples for update in having)
    return metrics


def _traffic(updates: Sequence[UpdateReceived]) -> dict[str, float]:
    names = sorted({name for update in updates for name in update.traffic})
    return {
        f"{TRAIN_SPLIT}.{name}": float(sum(update.traffic.get(name, 0) for update in updates))
        for name in names
    }


def _sum(values: Iterable[float]) -> float:
    """Return the sum from left to right; fsum would raise if it overflows."""
    total = 0.0
    for value in values:
        total += value
    return total


# ---- Spread over clients ----
#
# Each client measures a metric on its own rows; these functions describe the spread over clients.


def spread(of_clients: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the minimum, the maximum and three values between them for each metric, over the
    clients that have the metric; each client counts once."""
    spreads: dict[str, float] = {}
    for name in sorted({name for metrics in of_clients for name in metrics}):
        values = sorted(metrics[name] for metrics in of_clients if name in metrics)
        if not any(map(math.isnan, values)):
            spreads |= {f"{name}.{last}": _at(values, share) for last, share in SHARES.items()}
    return spreads


def over_clients(
    sums: Sequence[Mapping[str, float]], own: Sequence[Mapping[str, float]], names: Sequence[str]
) -> dict[str, float]:
    """Return the spread over clients of metrics that are sums over rows, and the mean and spread of
    the user's own metrics.

    sums: the sums of each client (see schedule.py); own: each client's values of the user's
    metrics, whose mean is weighted by rows.
    """
    over_all = spread([means(of_client, names) for of_client in sums])
    for name in sorted({name for metrics in own for name in metrics}):
        weight = f"{name.partition('.')[0]}/{WEIGHT}"
        pairs = [
            (of_client.get(weight, 0.0), metrics[name])
            for of_client, metrics in zip(sums, own, strict=True)
            if name in metrics
        ]
        total = 0.0
        for rows, value in pairs:
            total += rows * value
        num_rows = math.fsum(rows for rows, _ in pairs)
        if num_rows > 0:
            over_all[f"{name}.{CLIENT_MEAN}"] = total / num_rows
    return over_all | spread(own)


def _at(values: Sequence[float], share: float) -> float:
    """Return the value at a fraction (`share`) of a sorted sequence, interpolated linearly."""
    place = share * (len(values) - 1)
    low = math.floor(place)
    before, after = values[low], values[math.ceil(place)]
    if before == after or place == low:
        return before
    return before + (place - low) * (after - before)

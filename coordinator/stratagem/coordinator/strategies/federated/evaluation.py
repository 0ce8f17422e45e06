"""Evaluate a federated state by the clients that have made it, each on its own rows, and compute
the metrics of rounds.

A client that cannot evaluate is left out of the evaluation alone, with the reason. Where the
user's own metrics are sums, their states are merged before the evaluation is entered.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

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
    Metrics,
    MetricsMerged,
    RunFailed,
    UpdateReceived,
)
from stratagem.coordinator.strategies.federated.rejections import FAIL, MAX_NAMED, task_of_evaluator
from stratagem.coordinator.strategies.federated.run import FederatedRun, spec_of
from stratagem.coordinator.strategies.schedule import TRAIN_SPLIT, WEIGHT, added, means

# ---- Evaluation by clients ----

T = TypeVar("T")
MAX_TRIES: Final = 3
"""Workers that are asked to compute metrics of the same states."""


def with_answer(
    job: JobSpec, value: FederatedRun, fact: ClientEvaluated | MetricsMerged | Evaluated
) -> FederatedRun:
    """Fold what a client has said, what came of merging, or the end of an evaluation."""
    match fact:
        case ClientEvaluated():
            known = {**value.evaluations.get(fact.segment, {}), fact.client: fact}
            return replace(value, evaluations={**value.evaluations, fact.segment: known})
        case MetricsMerged():
            merges = (*value.merges.get(fact.segment, ()), fact)
            return replace(value, merges={**value.merges, fact.segment: merges})
        case _:
            return _with_metrics(job, value, fact)


def evaluators_left(value: FederatedRun, segment: int) -> list[int]:
    done = value.evaluations.get(segment, {})
    return [client for client in value.evaluators.get(segment, ()) if client not in done]


def _with_metrics(job: JobSpec, value: FederatedRun, fact: Evaluated) -> FederatedRun:
    segment = fact.segment
    metrics = with_course(job, value.metrics, fact.metrics)
    return replace(
        value,
        client_states=value.client_states and value.client_states.evaluated(segment),
        to_evaluate=tuple(base for base in value.to_evaluate if base.segment != segment),
        evaluators={n: members for n, members in value.evaluators.items() if n != segment},
        evaluations={n: received for n, received in value.evaluations.items() if n != segment},
        merges={n: facts for n, facts in value.merges.items() if n != segment},
        metrics=value.metrics if fact.without else metrics,
    )


def with_owed(fresh: FederatedRun, before: FederatedRun, segment: int) -> FederatedRun:
    """Add the evaluations that `before` still owes to the commits up to a segment: evaluations may
    come some rounds after what they evaluate."""

    def staying(of_segments: Mapping[int, T]) -> dict[int, T]:
        return {number: entry for number, entry in of_segments.items() if number <= segment}

    return replace(
        fresh,
        client_states=before.client_states and before.client_states.returned(segment),
        to_evaluate=tuple(base for base in before.to_evaluate if base.segment <= segment),
        evaluators=staying(before.evaluators),
        evaluations=staying(before.evaluations),
        merges=staying(before.merges),
        took_part={client: min(number, segment) for client, number in before.took_part.items()},
    )


def evaluated(job: JobSpec, value: FederatedRun) -> Evaluated | RunFailed | None:
    """Return the metrics of a round that all its clients have evaluated, from those that could; or
    the failure of the run."""
    if job.evaluation is None:
        return None
    for segment, clients in value.evaluators.items():
        known = value.evaluations.get(segment, {})
        sums = _sums(value, segment)
        failed = {c: fact.reason for c, fact in known.items() if fact.reason and not fact.has_left}
        is_done = known.keys() == set(clients)
        must_fail = bool(failed) and spec_of(job).options.on_client_error == FAIL
        if is_done and known and not sums and not failed:
            left = tuple(sorted(known))
            return Evaluated(party=value.party, segment=segment, metrics={}, without=left)
        if must_fail or (is_done and not sums):
            reason = f"the evaluation of round {segment} has failed: {_said(failed)}"
            return RunFailed(reason=reason)
        if is_done and merging(value, segment) is None:
            metrics = _metrics(job.evaluation, value, segment)
            return Evaluated(party=value.party, segment=segment, metrics=metrics)
    return None


def evaluated_without(job: JobSpec, value: FederatedRun) -> Evaluated | None:
    """Enter the oldest of too many evaluations that wait for nobody but clients that are gone, from
    what the others have said.

    Each such evaluation keeps its state in the store. Gone is who is away and has had no part in
    the newest `retention` rounds; so many evaluations wait for them on.
    """
    segment = _given_up(job, value)
    if job.evaluation is None or segment is None or merging(value, segment) is not None:
        return None
    metrics = _metrics(job.evaluation, value, segment)
    without = tuple(evaluators_left(value, segment))
    return Evaluated(party=value.party, segment=segment, metrics=metrics, without=without)


def _given_up(job: JobSpec, value: FederatedRun) -> int | None:
    """Return the evaluation that is entered without those that it waits for."""
    if value.committed is None or len(value.evaluators) <= job.retention:
        return None
    here = {member.worker_id for member in value.helper}
    last_but_those = value.committed.segment - job.retention

    def is_gone(client: int) -> bool:
        took_part = value.took_part.get(client, 0)
        return took_part <= last_but_those and value.roster[client].worker_id not in here

    left = {segment: evaluators_left(value, segment) for segment in value.evaluators}
    waiting = [segment for segment in left if left[segment] and all(map(is_gone, left[segment]))]
    return min(waiting) if len(waiting) > job.retention else None


class Merging(NamedTuple):
    """The states of metrics that are to be merged, and who computes the values; nobody, while no
    worker is here."""

    states: tuple[tuple[int, Digest], ...]
    metrics: tuple[str, ...]
    member: Member | None


def to_merge(job: JobSpec, value: FederatedRun) -> Iterator[tuple[int, Merging]]:
    """Yield the evaluations that wait for nothing but the merging of their metrics."""
    given_up = _given_up(job, value)
    for segment in value.evaluators:
        if segment == given_up or not evaluators_left(value, segment):
            due = merging(value, segment)
            if due is not None:
                yield segment, due


def merging(value: FederatedRun, segment: int) -> Merging | None:
    """Return what there is to merge in a round that nobody else evaluates; None: nothing, or it is
    done, or has failed too often."""
    known = value.evaluations.get(segment, {})
    states = tuple((c, known[c].states) for c in sorted(known) if known[c].states)
    metrics = _mergeable(known)
    if not metrics:
        return None
    tries = _tries(value, segment)
    if tries and (not tries[-1].reason or not tries[-1].worker_id or len(tries) >= MAX_TRIES):
        return None
    tried = {fact.worker_id for fact in tries}
    givers = {value.roster[client].worker_id: client for client, _ in states}
    last = len(value.roster)
    able = [
        member
        for member in sorted(value.helper, key=lambda m: givers.get(m.worker_id, last))
        if member.worker_id not in tried and not _is_deadly(value, member)
    ]
    if value.helper and not able:
        return None
    return Merging(states, metrics, able[0] if able else None)


def _tries(value: FederatedRun, segment: int) -> list[MetricsMerged]:
    """Return what has come of merging the states of those that have evaluated by now."""
    known = value.evaluations.get(segment, {})
    clients = tuple(client for client in sorted(known) if known[client].states)
    return [fact for fact in value.merges.get(segment, ()) if fact.clients == clients]


def _mergeable(known: Mapping[int, ClientEvaluated]) -> tuple[str, ...]:
    """Return the metrics whose states have been told by all that have a value of them."""
    names = sorted({name for fact in known.values() for name in fact.summed})

    def is_told_by(fact: ClientEvaluated, name: str) -> bool:
        return name in fact.summed or not any(f"{own}.".startswith(f"{name}.") for own in fact.own)

    return tuple(name for name in names if all(is_told_by(f, name) for f in known.values()))


def _is_deadly(value: FederatedRun, member: Member) -> bool:
    return value.losses.of(task_of_evaluator(member.worker_id)) is not None


def _sums(value: FederatedRun, segment: int) -> dict[int, Metrics]:
    """Return the sums of the clients that have evaluated a round."""
    known = value.evaluations.get(segment, {})
    return {client: fact.sums for client, fact in known.items() if not fact.reason}


def _metrics(spec: EvaluationSpec, value: FederatedRun, segment: int) -> dict[str, float]:
    """Return the means over all clients, whose sums are added in order of client, and their
    spread."""
    known = value.evaluations.get(segment, {})
    said = [fact for _, fact in sorted(known.items()) if not fact.reason]
    sums = [fact.sums for fact in said]
    over_each = over_clients(sums, [fact.own for fact in said], spec.metrics)
    merged = [fact.metrics for fact in _tries(value, segment) if not fact.reason]
    return means(added(sums), spec.metrics) | over_each | dict(merged[-1] if merged else {})


def _said(failed: dict[int, str]) -> str:
    parts = [f"client {client}: {reason}" for client, reason in sorted(failed.items())]
    more = [f"{len(parts) - MAX_NAMED} more"] if len(parts) > MAX_NAMED else []
    return "; ".join(parts[:MAX_NAMED] + more)


def evaluation_crashed(value: FederatedRun) -> ClientEvaluated | None:
    """Give up the evaluation of a client that ends every process that tries it."""
    for segment in value.evaluators:
        for client in evaluators_left(value, segment):
            task = task_of_evaluator(value.roster[client].worker_id)
            if (deaths := value.losses.of(task)) is not None:
                reason = why("it", deaths)
                return ClientEvaluated(
                    party=value.party, segment=segment, client=client, sums={}, reason=reason
                )
    return None


# ---- Training metrics of a round ----
#
# The training metrics cover all accepted updates of a round together. They depend on the set of
# accepted updates only: neither on the order of arrival nor on what a coordinator that was killed
# had seen.

TRAFFIC = frozenset({f"{TRAIN_SPLIT}.sent_bytes", f"{TRAIN_SPLIT}.uncompressed_bytes"})
"""Metrics that depend on who was there, and so belong to no commit."""
_LARGEST = f"{TRAIN_SPLIT}.max_"


def round_metrics(
    on_time: Mapping[int, UpdateReceived],
    late: Sequence[UpdateReceived] = (),
    num_skipped: float = 0.0,
) -> dict[str, float]:
    """Return the training metrics by name, of the clients of a round and of the late ones it takes.

    The loss is the mean over rows and, with its spread over clients, that of the clients of the
    round that tell theirs: late ones have trained another state. Bytes and skipped steps are sums,
    norms the largest ones, of all. num_skipped: steps that earlier rounds have skipped, which are
    added.
    """
    in_order = [update for _, update in sorted(on_time.items())]
    everybody = [*in_order, *late]
    metrics = {**_loss(in_order), **_of_steps(everybody), **_traffic(everybody)}
    if SKIPPED_STEPS in metrics:
        metrics[SKIPPED_STEPS] += num_skipped
    return metrics


def mean_loss(updates: Mapping[int, UpdateReceived]) -> float:
    """Return the mean over rows of the losses of clients of one round; 0 where there are none."""
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
    """Combine the metrics that clients report of their steps: the largest, the sum, or the mean
    over rows."""
    metrics = {}
    for name in sorted({name for update in updates for name in update.metrics}):
        saying = [update for update in updates if name in update.metrics]
        values = [update.metrics[name] for update in saying]
        if name == SKIPPED_STEPS:
            # What an earlier version has received is counted already.
            metrics[name] = _sum(update.metrics[name] for update in saying if update.num_steps)
        elif name.startswith(_LARGEST):
            metrics[name] = max(values)
        else:
            weighted = _sum(update.num_samples * update.metrics[name] for update in saying)
            metrics[name] = weighted / sum(update.num_samples for update in saying)
    return metrics


def _traffic(updates: Sequence[UpdateReceived]) -> dict[str, float]:
    names = sorted({name for update in updates for name in update.traffic})
    return {
        f"{TRAIN_SPLIT}.{name}": float(sum(update.traffic.get(name, 0) for update in updates))
        for name in names
    }


def _sum(values: Iterable[float]) -> float:
    """Left to right: fsum refuses what overflows."""
    total = 0.0
    for value in values:
        total += value
    return total


# ---- Spread over clients ----
#
# Each client measures a metric on its own rows; these functions describe how the metric spreads
# over the clients.


def spread(of_clients: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the least, the greatest and three values between them of each metric, over the clients
    that have it; each client counts as one."""
    found: dict[str, float] = {}
    for name in sorted({name for metrics in of_clients for name in metrics}):
        values = sorted(metrics[name] for metrics in of_clients if name in metrics)
        if not any(map(math.isnan, values)):
            found |= {f"{name}.{last}": _at(values, share) for last, share in SHARES.items()}
    return found


def over_clients(
    sums: Sequence[Mapping[str, float]], own: Sequence[Mapping[str, float]], names: Sequence[str]
) -> dict[str, float]:
    """Return the spread of metrics that are sums over rows, and mean and spread of the user's own.

    sums and own: of each client; see schedule.py. Own ones are weighted by rows.
    """
    found = spread([means(each, names) for each in sums])
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
            found[f"{name}.{CLIENT_MEAN}"] = total / num_rows
    return found | spread(own)


def _at(values: Sequence[float], share: float) -> float:
    """Return the value at a share of the way through values in order, linear between two."""
    place = share * (len(values) - 1)
    low = math.floor(place)
    before, after = values[low], values[math.ceil(place)]
    if before == after or place == low:
        return before
    return before + (place - low) * (after - before)

"""Evaluation of a federated state by the clients that have made it, each on its own rows.

A client that cannot evaluate is left out of it alone, with the reason.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from stratagem.common.job import EvaluationSpec, JobSpec
from stratagem.coordinator.core.crash_loops import why
from stratagem.coordinator.core.facts import ClientEvaluated, Evaluated, Metrics, RunFailed
from stratagem.coordinator.core.metric_course import with_course
from stratagem.coordinator.strategies.evaluation.client_spread_metrics import over_clients
from stratagem.coordinator.strategies.evaluation.metric_sums import added, means
from stratagem.coordinator.strategies.federated.client_crashes import task_of_evaluator
from stratagem.coordinator.strategies.federated.federated_run import FederatedRun, spec_of
from stratagem.coordinator.strategies.federated.update_rejections import FAIL, MAX_NAMED

T = TypeVar("T")


def with_evaluation(value: FederatedRun, fact: ClientEvaluated) -> FederatedRun:
    known = {**value.evaluations.get(fact.segment, {}), fact.client: fact}
    return replace(value, evaluations={**value.evaluations, fact.segment: known})


def evaluators_left(value: FederatedRun, segment: int) -> list[int]:
    done = value.evaluations.get(segment, {})
    return [client for client in value.evaluators.get(segment, ()) if client not in done]


def with_metrics(job: JobSpec, value: FederatedRun, fact: Evaluated) -> FederatedRun:
    segment = fact.segment
    metrics = with_course(job, value.metrics, fact.metrics)
    return replace(
        value,
        client_states=value.client_states and value.client_states.evaluated(segment),
        to_evaluate=tuple(base for base in value.to_evaluate if base.segment != segment),
        evaluators={n: members for n, members in value.evaluators.items() if n != segment},
        evaluations={n: received for n, received in value.evaluations.items() if n != segment},
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
        if is_done:
            metrics = _metrics(job.evaluation, value, segment)
            return Evaluated(party=value.party, segment=segment, metrics=metrics)
    return None


def evaluated_without(job: JobSpec, value: FederatedRun) -> Evaluated | None:
    """Enter the oldest of too many evaluations that wait for nobody but clients that are gone, from
    what the others have said.

    Each such evaluation keeps its state in the store. Gone is who is away and has had no part in
    the newest `retention` rounds; so many evaluations wait for them on.
    """
    if job.evaluation is None or value.committed is None or len(value.evaluators) <= job.retention:
        return None
    here = {member.worker_id for member in value.helper}
    last_but_those = value.committed.segment - job.retention

    def is_gone(client: int) -> bool:
        took_part = value.took_part.get(client, 0)
        return took_part <= last_but_those and value.roster[client].worker_id not in here

    left = {segment: evaluators_left(value, segment) for segment in value.evaluators}
    waiting = [segment for segment in left if left[segment] and all(map(is_gone, left[segment]))]
    if len(waiting) <= job.retention:
        return None
    segment = min(waiting)
    metrics = _metrics(job.evaluation, value, segment)
    without = tuple(left[segment])
    return Evaluated(party=value.party, segment=segment, metrics=metrics, without=without)


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
    return means(added(sums), spec.metrics) | over_each


def _said(failed: dict[int, str]) -> str:
    parts = [f"client {client}: {reason}" for client, reason in sorted(failed.items())]
    more = [f"{len(parts) - MAX_NAMED} more"] if len(parts) > MAX_NAMED else []
    return "; ".join(parts[:MAX_NAMED] + more)


def evaluation_crashed(value: FederatedRun) -> ClientEvaluated | None:
    """Give up the evaluation of a client that ends every process that tries it."""
    for segment in value.evaluators:
        for client in evaluators_left(value, segment):
            deaths = value.deaths.get(task_of_evaluator(value.roster[client].worker_id))
            if deaths is not None and deaths.are_too_many:
                reason = why("it", deaths)
                return ClientEvaluated(
                    party=value.party, segment=segment, client=client, sums={}, reason=reason
                )
    return None

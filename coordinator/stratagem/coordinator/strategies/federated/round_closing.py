"""The closing of a federated round: when, with which updates, and what follows from too few.

Pure functions of the run value and of which workers there are; federated.py asks them.
"""

from collections import Counter

from stratagem.common.job import JobSpec
from stratagem.common.strategy import fewest_updates
from stratagem.coordinator.core.facts import (
    SKIPPED_STEPS,
    Accepted,
    Fact,
    RoundClosed,
    RoundRestarted,
    RoundWaits,
    RunFailed,
)
from stratagem.coordinator.core.state import WorkerRecord
from stratagem.coordinator.strategies.federated import late_updates, open_roster
from stratagem.coordinator.strategies.federated.client_selection import quorum_of
from stratagem.coordinator.strategies.federated.federated_run import FederatedRun, spec_of
from stratagem.coordinator.strategies.federated.round_decisions import worker_for
from stratagem.coordinator.strategies.federated.round_metrics import round_metrics
from stratagem.coordinator.strategies.federated.update_rejections import (
    commonest_error,
    commonest_first,
    names,
    said,
)
from stratagem.coordinator.strategies.privacy.privacy_ledger import privacy_metrics
from stratagem.coordinator.strategies.privacy.row_ledger import row_metrics
from stratagem.coordinator.strategies.secure_aggregation import secure_setup

WAIT = "wait"


def begin_again(
    job: JobSpec, value: FederatedRun, now_s: float
) -> RoundRestarted | RunFailed | None:
    """Begin a secure round again, or fail the run, when no sum of it can be unmasked any more."""
    spec = spec_of(job).options.secure_aggregation
    if spec is None:
        return None
    is_late = _is_late(value, now_s) and bool(value.secure.routed)
    left = () if is_late else value.unanswered()
    why = secure_setup.lack(spec, value.secure, {*value.updates, *left})
    if not why:
        return None
    reason = f"round {value.round_num}: of {len(value.selected)} clients {why}"
    if value.rejected:
        reason += f"; {commonest_first(job, value)}"
    if value.secure.attempt + 1 < secure_setup.MAX_ATTEMPTS and (
        len(secure_setup.cured(value.rejected)) < len(value.rejected)
    ):
        return RoundRestarted(
            party=value.party,
            round_num=value.round_num,
            attempt=value.secure.attempt + 1,
            reason=reason,
        )
    return RunFailed(reason=reason, error=commonest_error(value))


def _is_late(value: FederatedRun, now_s: float) -> bool:
    return value.deadline_s is not None and now_s >= value.deadline_s


def close(
    job: JobSpec, value: FederatedRun, workers: list[WorkerRecord], now_s: float
) -> Fact | None:
    """Close the round when all have answered, its deadline has passed, or enough updates are
    here."""
    is_secure = spec_of(job).options.secure_aggregation is not None
    if is_secure and not value.secure.routed:
        return None
    num_selected, num_updates = len(value.selected), len(value.updates)
    num_answered = num_updates + len(value.rejected) + len(value.left_unanswered())
    is_late = _is_late(value, now_s)
    suffices = value.num_needed is not None and num_updates >= value.num_needed
    if num_answered < num_selected and not is_late and not suffices:
        return None
    count = f"round {value.round_num}: {num_updates} of {num_selected} updates"
    if num_answered < num_selected:
        count += f", {value.num_needed} suffice" if suffices else ", deadline passed"
    if num_updates < num_required(job, value):
        return _missing(job, value, workers, count, now_s)
    if value.rejected:
        count += f", {len(value.rejected)} rejected ({said(job, value)})"
    if left := sorted(value.left_unanswered()):
        count += f", {len(left)} left ({names(job, value, left)})"
    late = late_updates.accepted(value)
    if late:
        clients = ", ".join(
            f"client {a.client} of round {value.round_num - a.staleness}" for a in late
        )
        count += f", {len(late)} late ({clients})"
    on_time = [
        Accepted(client=client, digest=update.digest, num_samples=update.num_samples)
        for client, update in value.updates.items()
    ]
    return RoundClosed(
        party=value.party,
        round_num=value.round_num,
        accepted=tuple(sorted([*on_time, *late], key=lambda update: update.client)),
        reason=count,
        by_policy=num_answered < num_selected
        or bool(late)
        or bool(left)
        or (is_secure and secure_setup.is_by_policy(value.rejected))
        or _is_noised_secretly(job),
        metrics=_metrics(value),
    )


def _is_noised_secretly(job: JobSpec) -> bool:
    """Return True when the run cannot be made again from its job, whose noise it has not."""
    return job.privacy is not None and job.privacy.noise == "secret"


def _metrics(value: FederatedRun) -> dict[str, float]:
    if value.ledger is not None:  # a mean over few clients would tell of each of them
        return privacy_metrics(value.ledger)
    if value.rows is not None:  # a mean loss would tell of rows
        return row_metrics(value.rows)
    num_skipped = value.trained.get(SKIPPED_STEPS, 0.0)
    return round_metrics(value.updates, late_updates.received(value), num_skipped=num_skipped)


def num_required(job: JobSpec, value: FederatedRun) -> int:
    """Return the updates without which the round cannot close: the quorum, else any one of those
    that did not fail; those that a robust rule needs; none in a private run without a quorum."""
    options = spec_of(job).options
    if value.ledger is not None and (options.quorum is None or not value.selected):
        return 0  # nobody has to take part: the sum is noise then, and counts
    of_rule = fewest_updates(options.robust)
    if options.secure_aggregation is not None:
        of_rule = secure_setup.fewest_survivors(options.secure_aggregation, value.secure)
    if options.quorum is None:
        return of_rule
    needed = value.num_needed or quorum_of(options.quorum, len(value.selected))
    return max(of_rule, needed)


def _missing(
    job: JobSpec, value: FederatedRun, workers: list[WorkerRecord], count: str, now_s: float
) -> Fact | None:
    """Go on with other clients, wait, or fail the run, when the round has too few updates."""
    needed = num_required(job, value)
    if value.rejected:
        count += f"; {commonest_first(job, value)}"
    if needed > 1 or not value.rejected:
        count += f"; {needed} are needed" if needed > 1 else "; 1 is needed"
    if 1 < needed == fewest_updates(spec_of(job).options.robust):
        count += " for options.robust"
    num_needed = None if spec_of(job).options.quorum is None else needed
    if open_roster.goes_on(job, value):
        more = open_roster.more(job, value, workers, now_s)
        return more or open_roster.wait(job, value, count, now_s, num_needed)
    if spec_of(job).options.on_missing_quorum != WAIT:
        return RunFailed(reason=count, error=commonest_error(value))
    if value.is_waiting:
        return None
    return RoundWaits(
        party=value.party,
        round_num=value.round_num,
        reason=count,
        num_needed=num_needed,
    )


def ask_again(
    job: JobSpec, value: FederatedRun, workers: list[WorkerRecord], now_s: float
) -> RoundWaits | None:
    """Ask again the failed clients of a round that waits for which there is another worker: a new
    start of their own, where their rows are on it. Those whose site has refused are asked now and
    then, too: it may have changed its file."""
    if not value.is_waiting or not value.rejected:
        return None
    is_time = value.asks_again_s is not None and now_s >= value.asks_again_s
    alive = {worker.member.worker_id: worker for worker in workers}
    again, refused = [], []
    for client in sorted(value.rejected.keys() & value.assigned.keys()):
        binding = value.roster[client]
        if is_time and value.rejected[client].cause.is_refusal and binding.worker_id in alive:
            refused.append(client)
            continue
        tried = value.tried.get(client, frozenset()) | {value.assigned[client][0]}
        if worker_for(job, binding, alive, Counter(), tried) is not None:
            again.append(client)
    if not again and not refused and not is_time:
        return None
    num_updates, num_selected = len(value.updates), len(value.selected)
    return RoundWaits(
        party=value.party,
        round_num=value.round_num,
        reason=f"round {value.round_num}: {num_updates} of {num_selected} updates",
        num_needed=value.num_needed,
        asked_again=tuple(sorted([*again, *refused])),
        refused=tuple(refused),
    )

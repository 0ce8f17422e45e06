"""The status of a federated run, for people and for the strategy around it."""

from stratagem.common.job import JobSpec
from stratagem.common.strategy import ByCapability
from stratagem.coordinator.core.facts import TRAIN_LOSS
from stratagem.coordinator.core.state import RunPhase, WorkerRecord, World
from stratagem.coordinator.core.strategy_contract import RunCounts, Status
from stratagem.coordinator.strategies.federated import open_roster
from stratagem.coordinator.strategies.federated.client_evaluation import evaluators_left
from stratagem.coordinator.strategies.federated.federated_run import FederatedRun, lacking, spec_of
from stratagem.coordinator.strategies.federated.round_metrics import mean_loss
from stratagem.coordinator.strategies.federated.update_rejections import said
from stratagem.coordinator.strategies.scheduling.fold_tree import sites_of
from stratagem.coordinator.strategies.scheduling.placement import (
    eligible,
    is_site_of,
    why_forgetful,
    why_none,
    why_outdated,
)


def status(job: JobSpec, value: FederatedRun, world: World) -> Status:
    """Return the run's status, for people."""
    strategy = spec_of(job)
    phase, strategy_phase, reason = _phase(job, value, world)
    done = value.committed.segment if value.committed else 0
    num_left = len(value.left_unanswered())
    members = value.holders | set(value.helper)
    return Status(
        phase=phase,
        strategy_phase=strategy_phase,
        reason=reason,
        step=done,
        num_steps=strategy.rounds,
        segment=done,
        num_segments=strategy.rounds,
        num_clients_done=len(value.updates) + len(value.rejected) + num_left,
        num_clients=len(value.selected),
        members=tuple(sorted(members, key=lambda m: m.worker_id)),
        counts=_counts(value),
    )


def _counts(value: FederatedRun) -> RunCounts:
    num_done = len(value.updates) + len(value.rejected)
    return RunCounts(
        unit="rounds",
        part_done=num_done / (len(value.selected) + 1),  # the last part is the aggregation
        loss=mean_loss(value.updates) or value.trained.get(TRAIN_LOSS, 0.0),
        num_clients_rejected=len(value.rejected),
        num_clients_late=len(value.late),
    )


def _phase(job: JobSpec, value: FederatedRun, world: World) -> tuple[RunPhase, str, str]:
    if value.attendance.waits_until_s is not None and not value.selected:
        phase = RunPhase.PLACING if value.committed is None else RunPhase.RECOVERING
        return phase, "WAITING", open_roster.lack(job, value, world, usable(job, value, world))
    if value.committed is None and not value.helper:
        return RunPhase.PLACING, "WAITING", _why_no_roster(job, value, world)
    if value.committed is None:
        return RunPhase.RUNNING, "BUILDING", ""
    if not value.roster and open_roster.roster_of(job) is None:
        return RunPhase.PLACING, "WAITING", _why_no_roster(job, value, world)
    if value.is_closed:
        return RunPhase.RUNNING, "AGGREGATING", ""
    if not value.is_opened:
        return RunPhase.RUNNING, "SELECTING", _why_not_evaluated(value)
    return _of_round(job, value, world)


def _of_round(job: JobSpec, value: FederatedRun, world: World) -> tuple[RunPhase, str, str]:
    """Return the phase of an open round: who has answered, and who is missing."""
    answered, left = len(value.updates) + len(value.rejected), len(value.left_unanswered())
    count = f"round {value.round_num}: {answered} of {len(value.selected)} clients have answered"
    if left:
        count += f", {left} left"
    if num_excused := sum(len(excuse.clients) for excuse in value.attendance.excused):
        count += f", {num_excused} not asked"
    if value.rejected:
        count += f", {len(value.rejected)} rejected ({said(job, value)})"
    count += "".join(f"; {closed}" for closed in open_roster.closed_sites(value))
    if value.is_waiting and not lacking(value, world.holds):
        waits_for = (
            "more clients" if open_roster.roster_of(job) else "other workers of failed clients"
        )
        count += f"; that is too few: it waits for {waits_for}"
        return RunPhase.RECOVERING, "TRAINING", count
    is_secure = spec_of(job).options.secure_aggregation is not None
    if is_secure and not value.secure.routed:
        return RunPhase.RUNNING, "SHARING", f"{count}; keys and shares are exchanged"
    if value.late:
        count += f", {len(value.late)} of earlier rounds train on"
    if lost := lacking(value, world.holds):
        names = ", ".join(f"client {c} ({value.roster[c].worker_id})" for c in lost[:4])
        return RunPhase.RECOVERING, "TRAINING", f"{count}; without a worker: {names}"
    return RunPhase.RUNNING, "TRAINING", count


def usable(job: JobSpec, value: FederatedRun, world: World) -> list[WorkerRecord]:
    """Return the workers that can be clients."""
    workers = eligible(job, world, value.fingerprint)
    if job.data.worker_local is None:
        return workers
    return [w for w in workers if is_site_of(job, w)]


def _why_not_evaluated(value: FederatedRun) -> str:
    """Return which clients an evaluation waits for, each on rows that only it has; "" where all are
    here."""
    here = {member.worker_id for member in value.helper}
    for base in value.to_evaluate:
        left = evaluators_left(value, base.segment) if base.segment in value.evaluators else ()
        away = [c for c in left if value.roster[c].worker_id not in here]
        if away:
            names = ", ".join(f"client {c} ({value.roster[c].worker_id})" for c in away[:4])
            return f"round {base.segment} waits to be evaluated by {names}, not here"
    return ""


def _why_no_roster(job: JobSpec, value: FederatedRun, world: World) -> str:
    strategy = spec_of(job)
    usable = eligible(job, world, value.fingerprint)
    if not usable:
        return why_none(job, world, value.fingerprint)
    if job.data.worker_local is not None:
        having = [w for w in usable if is_site_of(job, w)]
        needed = f"{strategy.num_clients} workers with data {job.data.worker_local!r}"
        if (sites := sites_of(strategy)) is not None:
            having = [w for w in having if w.member.worker_id in sites]
            needed += " that options.regions names"
        forgetful = why_forgetful(job, usable)
        more = "".join(f"; {why}" for why in (forgetful, why_outdated(world)) if why)
        return f"{needed} are needed, {len(having)} are here{more}"
    if isinstance(strategy.client_selection, ByCapability):
        tags = ", ".join(strategy.client_selection.required_tags)
        return f"no client has a worker with the tags {tags}"
    return why_none(job, world, value.fingerprint)

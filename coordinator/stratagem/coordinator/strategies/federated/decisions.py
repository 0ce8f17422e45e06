"""Decide the steps of a federated round, in the order of the round.

The functions are pure functions of the run value and of the present workers; strategy.py calls
them.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Final, assert_never

from stratagem.common.base.ids import Digest, WorkerId
from stratagem.common.base.text import counted
from stratagem.common.job import JobSpec
from stratagem.common.strategy import All, ByCapability, ClientSelection, Federated, num_drawn
from stratagem.common.strategy import Random as RandomSelection
from stratagem.coordinator.core.courses import (
    course_of,
    follows_evaluations,
    resumed_metrics,
    why,
    why_stopped,
)
from stratagem.coordinator.core.effects import Base
from stratagem.coordinator.core.facts import (
    Assignment,
    BuildFailed,
    ClientBenched,
    ClientBinding,
    ClientsAssigned,
    ClientsSelected,
    ErrorRecord,
    Excused,
    Member,
    MembersFormed,
    ModelBuilt,
    RosterFormed,
    RunCompleted,
    RunFailed,
    StoppedEarly,
)
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.strategy_calls import draws_in_secret
from stratagem.coordinator.core.world import WorkerRecord, World
from stratagem.coordinator.strategies.federated import ledgers
from stratagem.coordinator.strategies.federated.ledgers import PrivacyLedger, beyond_budget
from stratagem.coordinator.strategies.federated.rejections import (
    BUILD,
    FAIL,
    cause_of,
    few,
    in_all,
    in_closed_rounds,
)
from stratagem.coordinator.strategies.federated.run import (
    Federation,
    Losses,
    evaluates_at_clients,
    lacking,
    spec_of,
)
from stratagem.coordinator.strategies.placement import is_site_of, sites_of

# ---- Decisions ----


def new_helper(
    job: JobSpec, value: Federation, workers: list[WorkerRecord]
) -> MembersFormed | None:
    """Return the fact that changes the helper, the worker that builds the model and evaluates, or
    the workers of all clients if clients evaluate; None if nothing changes."""
    alive = {worker.member.worker_id: worker.member for worker in workers}
    helper = tuple(m for m in value.helper if alive.get(m.worker_id) == m)
    if evaluates_at_clients(job) and value.roster:
        names = {binding.worker_id for binding in value.roster}
        everybody = sorted((w.member for w in workers), key=lambda member: member.worker_id)
        helper = tuple(member for member in everybody if member.worker_id in names)
    elif not helper and workers:
        helper = (workers[0].member,)
    if helper == value.helper:
        return None
    fingerprint = value.fingerprint
    if helper and not fingerprint and job.execution.deterministic:
        fingerprint = workers[0].capability.numerics_fingerprint
    reason = f"{helper[0].worker_id} builds and evaluates" if helper else "no worker is left"
    if len(helper) > 1:
        reason = f"{len(helper)} clients evaluate"
    return MembersFormed(
        party=value.party,
        membership=value.membership + 1,
        members=helper,
        reason=reason,
        fingerprint=fingerprint,
    )


def form_roster(
    job: JobSpec, value: Federation, workers: list[WorkerRecord]
) -> RosterFormed | None:
    """Return the fact that binds every client to a worker; None if there are too few workers."""
    strategy = spec_of(job)
    by_name = sorted(workers, key=lambda worker: worker.member.worker_id)
    if job.data.worker_local is not None:
        by_name = [w for w in by_name if is_site_of(job, w)]
        if (sites := sites_of(strategy)) is not None:
            by_name = [w for w in by_name if w.member.worker_id in sites]
        if len(by_name) < strategy.num_clients:
            return None
    if not by_name:
        return None
    bindings = tuple(
        ClientBinding(
            client=client,
            worker_id=by_name[client % len(by_name)].member.worker_id,
            tags=by_name[client % len(by_name)].capability.tags,
        )
        for client in range(strategy.num_clients)
    )
    if not select(strategy.client_selection, bindings, job.seed, 1):
        return None
    return RosterFormed(party=value.party, clients=bindings)


def is_evaluated_first(job: JobSpec, value: Federation) -> bool:
    """Return True if the next round must wait for an evaluation that is still missing."""
    return follows_evaluations(job) and bool(value.evaluations)


def stopped_early(job: JobSpec, value: Federation) -> StoppedEarly | None:
    """Return the fact that ends the run early if its evaluations call for it; else None."""
    why = why_stopped(job, value.metrics)
    if not why:
        return None
    assert value.committed is not None
    num_rounds = value.committed.segment
    done = f"stopped early after {counted(num_rounds, 'round')}: {why}"
    return StoppedEarly(reason=_with_rejections(job, value, done), step=num_rounds)


def bench(job: JobSpec, value: Federation) -> ClientBenched | None:
    """Return the fact that benches a client which failed in too many rounds in a row, or None."""
    strikes = spec_of(job).options.strikes
    if strikes is None:
        return None
    for client, number in sorted(value.attendance.strikes.items()):
        if number >= strikes.limit:
            rounds = f"{counted(number, 'round')}{' in a row' if number > 1 else ''}"
            return ClientBenched(
                party=value.party,
                client=client,
                until_round=value.round_num + strikes.bench_rounds,
                reason=f"rejected in {rounds}: {value.rejections[client][1]}",
            )
    return None


def excused_by_bench(value: Federation) -> tuple[Excused, ...]:
    """Return the clients that the next round may not ask, as they are benched, by reason."""
    sitting: dict[int, list[int]] = {}
    for client, until in sorted(value.attendance.benched.items()):
        if until > value.round_num and client not in value.attendance.left:
            sitting.setdefault(until, []).append(client)
    return tuple(
        Excused(reason=f"benched until round {until}", clients=tuple(clients))
        for until, clients in sorted(sitting.items())
    )


def next_round(job: JobSpec, value: Federation, now_s: float) -> ClientsSelected | StoppedEarly:
    """Return the fact that opens the next round of a fixed roster, without clients that are benched
    or whose privacy budget is spent; or the fact that ends the run if no client is left."""
    attendance, number = value.attendance, value.round_num
    able = [binding for binding in value.roster if attendance.is_able(binding.client, number)]
    excused = excused_by_bench(value) if attendance.benched else ()
    if value.rows is not None:
        able, spent = ledgers.with_budget(job, value.rows, able)
        excused += spent
    opened = open_round(job, value, able, excused, now_s)
    if opened is None and value.rows is not None:
        return ledgers.budget_spent(job, value.rows, number - 1)
    assert opened is not None, "whose updates closed the round before are not on the bench"
    return opened


def private_round(
    job: JobSpec, value: Federation, ledger: PrivacyLedger, now_s: float
) -> ClientsSelected | StoppedEarly | RunFailed | None:
    """Return the fact that opens the next round of a private run with the clients sampled for it,
    or that ends the run if the round would cost too much; None until its cost is accounted."""
    if ledger.round is None:
        return None
    assert value.committed is not None
    if ended := beyond_budget(job, ledger, value.committed.segment):
        return ended
    opened = open_round(job, value, value.roster, (), now_s)
    assert opened is not None, "the roster has clients"
    return opened.model_copy(update={"clients": ledger.round.drawn})


def candidates_of(job: JobSpec, value: Federation) -> tuple[int, ...]:
    """Return the clients from which a private round is sampled: all, or, if the sampling is not
    secret, those that take part."""
    strategy, roster = spec_of(job), value.roster
    if job.privacy is not None and job.privacy.sampling_rate(strategy) < 1:
        return tuple(binding.client for binding in roster)
    return select(strategy.client_selection, roster, job.seed, value.round_num)


def next_trainers(job: JobSpec, value: Federation) -> frozenset[WorkerId]:
    """Return the workers that are expected to train clients in the round after the open one; none
    if clients are sampled in secret. The result is a guess: workers may come and go until then."""
    strategy, number = spec_of(job), value.round_num + 1
    if job.privacy is not None and job.privacy.sampling_rate(strategy) < 1:
        return frozenset()
    able = {b.client: b for b in value.roster if value.attendance.is_able(b.client, number)}
    num_extra = strategy.options.over_select
    drawn = select(strategy.client_selection, [*able.values()], job.seed, number, num_extra)
    at = {client: member.worker_id for client, (member, _) in value.clients.assigned.items()}
    return frozenset(at.get(client, able[client].worker_id) for client in drawn)


def open_round(
    job: JobSpec,
    value: Federation,
    roster: Sequence[ClientBinding],
    excused: tuple[Excused, ...],
    now_s: float,
) -> ClientsSelected | None:
    """Return the fact that opens the round with clients selected from these; None without any."""
    strategy = spec_of(job)
    deadline, num_extra = strategy.options.round_deadline_s, strategy.options.over_select
    selection, number = strategy.client_selection, value.round_num
    clients = select(selection, roster, job.seed, number, num_extra) if roster else ()
    if not clients:
        return None
    num_needed = None
    if num_extra:
        num_wanted = len(select(selection, roster, job.seed, number))
        num_needed = quorum_of(strategy.options.quorum, num_wanted, of_all=num_wanted)
    return ClientsSelected(
        party=value.party,
        round_num=value.round_num,
        clients=clients,
        deadline_s=None if deadline is None else now_s + deadline,
        num_needed=num_needed,
        excused=excused,
    )


def assign(job: JobSpec, value: Federation, workers: list[WorkerRecord]) -> ClientsAssigned | None:
    """Return the fact that assigns a worker to clients of the open round that lack one: the
    client's own worker, else the one with the fewest clients; None if nothing changes."""
    alive = {worker.member.worker_id: worker for worker in workers}
    if not lacking(value, lambda member: _is_alive(alive, member)):
        return None
    clients, waiting = value.clients, list(value.unanswered())
    current = {c: clients.assigned[c][0] for c in waiting if c in clients.assigned}
    staying = {c: m for c, m in current.items() if _is_alive(alive, m)}
    load = Counter(member.worker_id for member in staying.values())
    new = []
    for client in waiting:
        if client in staying:
            continue
        tried = clients.tried.get(client, frozenset())
        worker = worker_for(job, value.roster[client], alive, load, tried)
        if worker is not None:
            load[worker.member.worker_id] += 1
        elif client not in current:
            continue
        new.append(Assignment(client=client, member=worker.member if worker else None))
    if not new:
        return None
    return ClientsAssigned(
        party=value.party,
        round_num=value.round_num,
        membership=value.membership + 1,
        assignments=tuple(new),
    )


def has_homes(job: JobSpec) -> bool:
    """Return True if each client is trained by its own worker and by no other."""
    options = spec_of(job).options
    is_secure = options.secure_aggregation is not None  # its secrets are on its worker
    return job.data.worker_local is not None or options.open_roster is not None or is_secure


def _is_alive(alive: Mapping[WorkerId, WorkerRecord], member: Member) -> bool:
    return member.worker_id in alive and alive[member.worker_id].member == member


def worker_for(
    job: JobSpec,
    binding: ClientBinding,
    alive: Mapping[WorkerId, WorkerRecord],
    load: Counter[WorkerId],
    tried: frozenset[Member],
) -> WorkerRecord | None:
    """Return the worker to train a client: the client's own worker, else the one with the fewest
    clients, but none of `tried`; None if no worker is suitable."""
    home = alive.get(binding.worker_id)
    if home is not None and home.member not in tried:
        return home
    if has_homes(job):
        return None
    selection = spec_of(job).client_selection
    required = set(selection.required_tags) if isinstance(selection, ByCapability) else set()
    fitting = [
        worker
        for worker in alive.values()
        if required <= set(worker.capability.tags) and worker.member not in tried
    ]
    return min(fitting, key=lambda w: (load[w.member.worker_id], w.member.worker_id), default=None)


def complete(job: JobSpec, value: Federation) -> RunCompleted | None:
    if value.evaluations:
        return None
    assert value.committed is not None
    done = f"{counted(value.committed.segment, 'round')} committed"
    return RunCompleted(reason=_with_rejections(job, value, done))


def _with_rejections(job: JobSpec, value: Federation, done: str) -> str:
    rejected = () if draws_in_secret(job) else in_closed_rounds(value)
    return "; ".join(filter(None, (done, in_all(job, rejected))))


# ---- Client selection ----


def select(
    selection: ClientSelection,
    roster: Sequence[ClientBinding],
    seed: int,
    round_num: int,
    num_extra: int = 0,
) -> tuple[int, ...]:
    """Return the clients of a round, ascending, selected from the roster whichever workers are
    alive.

    Random: num_extra + max(1, floor(fraction * len(roster) + 1e-9)) without replacement, seeded by
    (run seed, round), so that a restarted coordinator selects the same.
    """
    match selection:
        case All():
            return tuple(binding.client for binding in roster)
        case RandomSelection(fraction=fraction):
            share = num_drawn(fraction, len(roster))
            count = min(share + num_extra, len(roster))
            key = hashlib.sha256(f"select/{seed}/{round_num}".encode()).digest()
            drawn = Random(int.from_bytes(key[:8])).sample([b.client for b in roster], count)
            return tuple(sorted(drawn))
        case ByCapability(required_tags=required):
            return tuple(b.client for b in roster if set(required) <= set(b.tags))
        case _:
            assert_never(selection)


def quorum_of(quorum: float | int | None, num_selected: int, of_all: int = 1) -> int:
    """Return the number of updates that a round needs; of_all: the number without a quorum."""
    if quorum is None:
        return of_all
    if isinstance(quorum, int):
        return min(quorum, num_selected)
    return max(1, math.ceil(quorum * num_selected - 1e-9))


# ---- Model building ----
#
# One worker builds the model of the federation.
#
# Where each worker has rows of its own, all are tried until one can build the model: a single site
# whose data or code raises would otherwise end the federation before its first round. Elsewhere
# another worker is tried where the first lacks a file, a package or memory.

_OF_THE_PLACE: Final = frozenset(
    {
        *("NotFoundError", "FileNotFoundError", "PermissionError", "OSError"),
        *("ImportError", "ModuleNotFoundError"),
    }
)
"""The types of errors about something, such as a file, that another worker may have."""
_UNWILLING: Final = (Cause.REFUSED_BY_SITE, Cause.OUTSIDE_WINDOW, Cause.BUDGET)


def may_move(job: JobSpec, error: ErrorRecord | None = None) -> bool:
    """Return True if a build that fails on one worker may succeed on another one; error: None if
    its process has ended."""
    if not isinstance(job.strategy, Federated):
        return False
    if job.data.worker_local is None:
        return error is not None and _is_of_the_place(error)
    return job.strategy.options.on_client_error != FAIL


def _is_of_the_place(error: ErrorRecord) -> bool:
    """Return True if the error is about something that only this worker may lack."""
    name = error.type.rpartition(".")[2]
    return name in _OF_THE_PLACE or cause_of(error) in (Cause.MEMORY, *_UNWILLING)


def build_failed(
    job: JobSpec, value: Federation, workers: list[WorkerRecord]
) -> BuildFailed | RunFailed | None:
    """Return the fact that excludes a worker from building the model because process after process
    has died on it, or that fails the run if no worker is left to build; else None."""
    deaths = value.losses.hopeless(BUILD)
    if deaths is not None and deaths.latest and may_move(job):
        reason = why("it", deaths)
        return BuildFailed(party=value.party, member=deaths.latest.member, reason=reason)
    if not value.unfit or not workers or fit(value, workers):
        return None
    in_order = sorted(value.unfit.items())
    reasons = [f"{name}: {fact.reason}" for name, fact in in_order]
    errors = [fact.error for _, fact in in_order if fact.error is not None]
    text = f"no worker can build the model: {'; '.join(few(reasons))}"
    return RunFailed(reason=text, error=errors[0] if errors else None)


def only_one_to_build(job: JobSpec, value: Federation, world: World, member: Member) -> bool:
    """Return True if no other worker can build the model, so that a closed site is waited for."""
    workers = [w for w in world.usable() if is_site_of(job, w)]
    return all(worker.member == member for worker in fit(value, workers))


def with_build(job: JobSpec, value: Federation, fact: ModelBuilt | BuildFailed) -> Federation:
    """Return the run value after a build: with the first state, or with a worker that failed."""
    if isinstance(fact, ModelBuilt):
        metrics, initial = resumed_metrics(job), job.initial
        average = Digest((initial and initial.average) or "")
        return replace(
            value,
            committed=Base(fact.segment, fact.step, fact.digest, average=average),
            num_rows=fact.num_rows,
            trained={name: n for name, n in metrics.items() if name not in course_of(metrics)},
            metrics=course_of(metrics),
            losses=Losses(),
        )
    name = fact.member.worker_id
    return replace(
        value,
        helper=tuple(member for member in value.helper if member.worker_id != name),
        unfit={**value.unfit, name: fact},
        losses=value.losses.without([BUILD]),
    )


def fit(value: Federation, workers: list[WorkerRecord]) -> list[WorkerRecord]:
    """Return the workers; while there is no model, without those that have failed to build it."""
    if value.committed is not None:
        return workers
    return [worker for worker in workers if worker.member.worker_id not in value.unfit]

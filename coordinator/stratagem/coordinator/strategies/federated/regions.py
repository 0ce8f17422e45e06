"""Run federated averaging over regions: each client is a federation of its own that reports its
sums.

While a round is open, each selected region is a party (see silos.py) whose clients train the global
state for as many rounds as `options.inner` says. After each of these rounds but the last, the
region continues from its mean. After the last it reports s = sum n_k w_k in float64 and n = sum
n_k, and the next global state is sum s / sum n over the regions. With one inner round the bits are
those of `options.regions`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from stratagem.common.base.errors import Violation
from stratagem.common.base.ids import Party, RunId, WorkerId
from stratagem.common.job import JobSpec, with_fields
from stratagem.common.job.rules import REGIONS
from stratagem.common.schema.table import found_in
from stratagem.common.strategy import Federated, dump_strategy
from stratagem.common.strategy.strategies import clients_by_region, region_names
from stratagem.coordinator.core.courses import num_lr_reductions
from stratagem.coordinator.core.effects import (
    AggregateRound,
    Base,
    Effect,
    SumRegion,
    TrainClient,
)
from stratagem.coordinator.core.facts import (
    TRAIN_LOSS,
    ClientBinding,
    Fact,
    PartyFailed,
    RosterFormed,
)
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.strategy_contract import Child, Status, Strategies
from stratagem.coordinator.core.world import RunPhase, WorkerRecord, World
from stratagem.coordinator.strategies import nested
from stratagem.coordinator.strategies.federated import due
from stratagem.coordinator.strategies.federated import strategy as federated
from stratagem.coordinator.strategies.federated.evaluation import TRAFFIC
from stratagem.coordinator.strategies.federated.run import Closed, Federation, spec_of
from stratagem.coordinator.strategies.federated.silos import (
    PartiesRun,
    PartyKind,
    party_of,
    unanswered,
)
from stratagem.coordinator.strategies.placement import sites_of

# ---- Rounds over regions ----


def check(job: JobSpec, strategies: Strategies) -> list[Violation]:
    """Return the violations of a job whose clients are regions: options without a meaning."""
    violations = [*found_in(REGIONS, job)]
    return violations or nested.check_inside(lambda: region_job(job), strategies)


def region_job(job: JobSpec) -> JobSpec:
    """Return the job of every region: the same seed and rows, and the inner rounds of the whole
    run. Clients are numbered over all regions, so that one job serves all regions."""
    inner = inside(job)
    num_clients = sum(len(members) for members in members_of_regions(job))
    rounds = spec_of(job).rounds * inner.rounds
    return with_fields(
        job,
        {
            "strategy": dump_strategy(replace(inner, num_clients=num_clients, rounds=rounds)),
            "evaluation": None,
            "weight_average": None,
            "initial": None,
        },
    )


def decide(job: JobSpec, value: PartiesRun, world: World, now_s: float) -> Fact | None:
    """Return the run's next fact; while a round is open, the next fact of one of the regions."""
    fact = federated.decide_round(
        job, value.rounds, world, now_s, lambda _: _of_regions(job, value, world, now_s)
    )
    if isinstance(fact, RosterFormed) and fact.party == value.rounds.party:
        return named(job, fact)
    return fact


def _of_regions(job: JobSpec, value: PartiesRun, world: World, now_s: float) -> Fact | None:
    if failed := KIND.failed(value):
        return failed
    for region, child in KIND.in_training(value).items():
        if not child.value.roster:
            workers = due.usable(job, value.rounds, world)
            fact: Fact | None = roster_of_region(job, child.party, region, workers)
        else:
            fact = nested.decide(child, world, now_s)
        if fact is not None:
            return fact
    return None


def _opened(job: JobSpec, value: PartiesRun, region: int) -> Child:
    """Return the party of a region whose round opens, ready to train from the global state. Its
    rounds are numbered over the whole run, so that no client trains a round twice."""
    rounds, num_inside, own_job = value.rounds, inside(job).rounds, region_job(job)
    assert rounds.committed is not None
    before = (rounds.round_num - 1) * num_inside
    base, child = Base(before, before, rounds.committed.digest), value.clients.get(region)
    if child is None:
        child = nested.begin(party_of(value, region), own_job, 0, value.strategies)
    begun = nested.rebased(child, own_job, base, rounds.num_rows, before + num_inside)
    return replace(begun, value=replace(begun.value, fingerprint=rounds.fingerprint))


def pending(
    run_id: RunId, job: JobSpec, value: PartiesRun, horizon: int | None
) -> frozenset[Effect]:
    """Return the effects that are due for the round; regions have effects of their own."""
    effects = set[Effect]()
    for effect in due.pending(run_id, job, value.rounds, horizon):
        if isinstance(effect, AggregateRound):
            effects.add(replace(effect, integers_of=_largest(job, value)))
        else:
            effects.add(effect)
    for region, child in KIND.in_training(value).items():
        effects |= {_of_all(job, value, region, effect) for effect in nested.pending(run_id, child)}
    return frozenset(effects | _sums(run_id, value))


def _of_all(job: JobSpec, value: PartiesRun, region: int, effect: Effect) -> Effect:
    """Return an effect of a region for the whole run: a TrainClient gets the client's number among
    the clients of all regions."""
    if not isinstance(effect, TrainClient):
        return effect
    members = members_of_regions(job)
    share = members[region][effect.client], sum(map(len, members))
    return replace(effect, share=share, num_lr_reductions=num_lr_reductions(value.rounds.metrics))


def _sums(run_id: RunId, value: PartiesRun) -> set[SumRegion]:
    """Return the effects that sum the updates of the regions whose last inner round is closed."""
    rounds, effects = value.rounds, set[SumRegion]()
    training = KIND.in_training(value)
    for region in unanswered(value):
        child = value.clients[region]
        inner: Federation = child.value
        if region in training or inner.committed is None:
            continue
        updates = inner.clients.updates
        metrics = {n: x for n, x in inner.trained.items() if not n.startswith(TRAIN_LOSS)}
        effects.add(
            SumRegion(
                run_id=run_id,
                party=rounds.party,
                round_num=rounds.round_num,
                client=region,
                inside=child.party,
                round_inside=inner.round_num,
                base=inner.committed,
                accepted=inner.accepted,
                num_steps=sum(updates[update.client].num_steps for update in inner.accepted),
                loss=inner.trained.get(TRAIN_LOSS, math.nan),
                metrics=tuple(sorted((n, x) for n, x in metrics.items() if n not in TRAFFIC)),
            )
        )
    return effects


def _largest(job: JobSpec, value: PartiesRun) -> int:
    """Return the index of the accepted update whose region has the client with most rows; of equal
    clients, the one with the lowest number over all regions counts."""
    members = members_of_regions(job)
    places = [
        (-update.num_samples, members[region.client][update.client], place)
        for place, region in enumerate(value.rounds.accepted)
        for update in value.clients[region.client].value.accepted
    ]
    return min(places)[2]


def _has_trained(child: Child) -> bool:
    inner: Federation = child.value
    return isinstance(inner.round, Closed) and inner.round_num == child.horizon


def status(job: JobSpec, value: PartiesRun, world: World) -> Status:
    """Return the run's status, with the workers of all regions."""
    outer = due.status(job, value.rounds, world)
    if outer.strategy_phase != "TRAINING":
        return outer
    reason, phase = KIND.answered(value, outer), RunPhase.RUNNING
    members = set(outer.members)
    for region, child in KIND.in_training(value).items():
        inner = child.strategy.status(child.job, child.value, world)
        members |= set(inner.members)
        if inner.phase is not RunPhase.RUNNING:
            phase = RunPhase.RECOVERING
            name = value.rounds.roster[region].worker_id
            reason = f"{reason}; region {name}: {inner.reason}"
    in_order = tuple(sorted(members, key=lambda member: member.worker_id))
    return replace(outer, members=in_order, phase=phase, reason=reason)


def _why_rejected(fact: PartyFailed) -> tuple[Cause, str]:
    return Cause.EXCEPTION if fact.cause is Cause.UNKNOWN else fact.cause, fact.reason


def rounds_inside(job: JobSpec, value: object, round_num: int) -> list[tuple[Party, int]]:
    """Return (party, round number) of each inner round that belongs to one round of the run; none
    without regions."""
    if not isinstance(value, PartiesRun) or not isinstance(spec_of(job).options.inner, Federated):
        return []
    last = round_num * inside(job).rounds
    numbers = range(last - inside(job).rounds + 1, last + 1)
    return [(child.party, number) for child in value.clients.values() for number in numbers]


KIND = PartyKind("region", _has_trained, _opened, _why_rejected)
STRATEGY = KIND.strategy(check, decide, pending, status)


# ---- Members of regions ----
#
# The job assigns clients to regions; the clients of a region are bound to sites or workers.


def inside(job: JobSpec) -> Federated:
    """Return the federated strategy (its options in the job) by which each region trains."""
    inner = spec_of(job).options.inner
    assert isinstance(inner, Federated), "the job was checked"
    return inner


def members_of_regions(job: JobSpec) -> tuple[tuple[int, ...], ...]:
    """Return the clients of each region, by their numbers over all regions, from 0 on."""
    return clients_by_region(spec_of(job), inside(job))


def named(job: JobSpec, fact: RosterFormed) -> RosterFormed:
    """Return the roster with each region bound to its name, in place of a worker: a region has
    several workers."""
    names = region_names(spec_of(job))
    clients = tuple(
        ClientBinding(client=region, worker_id=WorkerId(name), tags=())
        for region, name in enumerate(names)
    )
    return fact.model_copy(update={"clients": clients})


def roster_of_region(
    job: JobSpec, party: Party, region: int, workers: Sequence[WorkerRecord]
) -> RosterFormed | None:
    """Return the roster of a region: clients that are sites are bound to them, present or not, the
    others to workers in turn over all regions. None while there is no worker."""
    members, sites = members_of_regions(job)[region], sorted(sites_of(spec_of(job)) or ())
    names = sites or sorted(worker.member.worker_id for worker in workers)
    if not names:
        return None
    clients = tuple(
        ClientBinding(client=at, worker_id=WorkerId(names[number % len(names)]), tags=())
        for at, number in enumerate(members)
    )
    return RosterFormed(party=party, clients=clients)

"""Run federated averaging over silos: each client is a party of several workers that train
together.

While a round is open, each selected client is a party that trains the global state on the client's
rows under the inner strategy; its commit becomes its update. Gradients stay inside a silo, and only
models leave it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from stratagem.common.base.errors import Violation
from stratagem.common.base.ids import Party, RunId, child_party
from stratagem.common.job import (
    GroupSpec,
    JobSpec,
    OptimizerSpec,
    ScheduleSpec,
    seed_of,
    with_fields,
)
from stratagem.common.job.optimizer import UpdateRuleSpec
from stratagem.common.job.rules import SILOS
from stratagem.common.schema.json import JSON
from stratagem.common.schema.table import found_in
from stratagem.common.strategy import (
    Local,
    dump_strategy,
)
from stratagem.coordinator.core.courses import num_lr_reductions
from stratagem.coordinator.core.effects import Base, CollectUpdate, Effect, RunSegment, TrainClient
from stratagem.coordinator.core.facts import (
    TRAIN_LOSS,
    ClientsSelected,
    Fact,
    ModelBuilt,
    PartyFailed,
    RunResumed,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.strategy_contract import (
    VERSION,
    Child,
    Nesting,
    Repeating,
    Status,
    Strategies,
    Strategy,
)
from stratagem.coordinator.core.world import RunPhase, World
from stratagem.coordinator.strategies import nested
from stratagem.coordinator.strategies.federated import due
from stratagem.coordinator.strategies.federated import strategy as federated
from stratagem.coordinator.strategies.federated.rejections import cause_of, reason_of, rejection
from stratagem.coordinator.strategies.federated.run import Federation, Open, spec_of
from stratagem.coordinator.strategies.schedule import TRAIN_SPLIT

# ---- Clients that are parties ----
#
# This section is common to silos and regions (regions.py).
#
# The rounds are those of Federated (strategy.py). Between the opening of a round and its closing
# each selected client works as a party (`client0`, `client1`, ...) until it has trained; the
# result is its update. A party that fails is rejected alone.


@dataclass(frozen=True, slots=True)
class PartiesRun:
    """The run value if clients are parties: the rounds, and the parties begun so far."""

    rounds: Federation
    strategies: Strategies
    """The available strategies, of which the clients use one."""
    clients: Mapping[int, Child]
    failures: Mapping[int, PartyFailed] = field(default_factory=dict)
    """Failures in the open round, keyed by client; each becomes the client's rejection."""


@dataclass(frozen=True, slots=True)
class PartyKind:
    """The rules of one kind of clients that are parties: silos, or regions."""

    noun: str
    """The word for such a client in sentences."""
    has_trained: Callable[[Child], bool]
    """A function of (party) that returns True if the party has completed the training that the open
    round requires."""
    opened: Callable[[JobSpec, PartiesRun, int], Child]
    """A function of (job, value, client) that returns the client's party at the opening of the
    client's round."""
    why_rejected: Callable[[PartyFailed], tuple[Cause, str]]
    """A function of (fact) that returns the cause and the reason with which to reject the client
    whose party has failed."""
    folded: Callable[[JobSpec, PartiesRun, int, Child, Fact], Child] = (
        lambda _job, _value, _client, party, _fact: party
    )
    """A function of (job, value, client, party, fact) that updates a client's party after the party
    has folded in the fact."""

    def transition(self, job: JobSpec, value: PartiesRun, fact: Fact, now_s: float) -> PartiesRun:
        """Return the run value with a fact of the rounds, or of a client's party, folded in."""
        for client, child in value.clients.items():
            if nested.is_of(child, fact):
                if isinstance(fact, PartyFailed):
                    return replace(value, failures={**value.failures, client: fact})
                after = nested.transition(child, fact, now_s)
                after = self.folded(job, value, client, after, fact)
                return replace(value, clients={**value.clients, client: after})
        value = replace(value, rounds=federated.transition(job, value.rounds, fact, now_s))
        if isinstance(fact, ClientsSelected):
            opened = {n: self.opened(job, value, n) for n in value.rounds.clients.selected}
            return replace(value, clients={**value.clients, **opened}, failures={})
        if isinstance(fact, RunResumed):
            clients = {n: nested.transition(c, fact, now_s) for n, c in value.clients.items()}
            return replace(value, clients=clients, failures={})
        return value

    def reject_reason(self, job: JobSpec, value: PartiesRun, fact: Fact) -> str:
        """Return the reason why a reported fact is stale; "" if it is expected."""
        for client, child in value.clients.items():
            if nested.is_of(child, fact):
                if client not in self.in_training(value):
                    round_num = value.rounds.round_num
                    return f"{self.noun} {client} has ended its part of round {round_num}"
                return "" if isinstance(fact, PartyFailed) else nested.reject_reason(child, fact)
        return federated.reject_reason(job, value.rounds, fact)

    def failed(self, value: PartiesRun) -> UpdateRejected | None:
        """Return the rejection of the first client whose party has failed; None if no party has."""
        for client in unanswered(value):
            if (fact := value.failures.get(client)) is not None:
                cause, reason = self.why_rejected(fact)
                return rejection(value.rounds, client, cause, reason, fact.error)
        return None

    def in_training(self, value: PartiesRun) -> dict[int, Child]:
        """Return the parties of the open round that have not trained yet, keyed by client."""
        parties = {client: value.clients[client] for client in unanswered(value)}
        return {client: child for client, child in parties.items() if not self.has_trained(child)}

    def answered(self, value: PartiesRun, status: Status) -> str:
        """Return a sentence such as "round 3: 1 of 2 silos have answered", from a run's status."""
        count = f"round {value.rounds.round_num}: {status.num_clients_done} of {status.num_clients}"
        return f"{count} {self.noun}s have answered"

    def strategy(
        self,
        check: Callable[[JobSpec, Strategies], list[Violation]],
        decide: Callable[[JobSpec, PartiesRun, World, float], Fact | None],
        pending: Callable[[RunId, JobSpec, PartiesRun, int | None], frozenset[Effect]],
        status: Callable[[JobSpec, PartiesRun, World], Status],
    ) -> Strategy:
        """Return the strategy of this kind: these functions, and those that all kinds share."""
        return Strategy(
            version=VERSION,
            check=check,
            init=lambda _job, party, strategies: PartiesRun(Federation(party), strategies, {}),
            decide=decide,
            transition=self.transition,
            reject_reason=self.reject_reason,
            pending=pending,
            status=status,
            own_deadline=lambda value: federated.own_deadline(value.rounds),
            own_deaths=lambda value, member: federated.deaths(value.rounds, member),
            own_blobs=lambda value: federated.blobs(value.rounds),
            own_workers=lambda value: federated.workers(value.rounds),
            children=lambda value: value.clients.values(),
            working=lambda value: self.in_training(value).values(),
            nesting=Nesting(
                lambda value: federated.progress(value.rounds),
                rebase=lambda job, value, base, num_rows: replace(
                    value, rounds=federated.rebase(job, value.rounds, base, num_rows)
                ),
                returned=lambda job, value, base, metrics: replace(
                    value, rounds=federated.returned(job, value.rounds, base, metrics)
                ),
            ),
            repeating=Repeating(
                lambda value: value.rounds.committed,
                lambda job, value, earlier: replace(
                    value, rounds=federated.restored(job, value.rounds, earlier.rounds)
                ),
                lambda value: federated.digest(value.rounds),
            ),
        )


def unanswered(value: PartiesRun) -> list[int]:
    """Return the clients of the open round that have neither answered nor left."""
    return list(value.rounds.unanswered()) if isinstance(value.rounds.round, Open) else []


def party_of(value: PartiesRun, client: int) -> Party:
    """Return the path of the party that a client is."""
    return child_party(value.rounds.party, f"client{client}")


# ---- Silos ----


def check(job: JobSpec, strategies: Strategies) -> list[Violation]:
    """Return a job's violations: options a silo cannot have, an inner strategy that cannot run."""
    violations = [*found_in(SILOS, job)]
    return violations or nested.check_inside(lambda: client_job(job, 0, 1), strategies)


def client_job(job: JobSpec, client: int, round_num: int, num_lr_reductions: int = 0) -> JobSpec:
    """Return the job of a client in a round: its own rows and order, with a fresh optimizer.
    num_lr_reductions: how often a plateau has lowered the rates before the round."""
    spec = spec_of(job)
    epochs = spec.options.local_epochs
    partition = job.document().get("partition") or {"method": "contiguous"}
    assert isinstance(partition, dict)
    fields: dict[str, JSON] = {
        "strategy": dump_strategy(spec.options.inner or Local()),
        "partition": {
            **partition,
            "client": client,
            "num_clients": spec.num_clients,
            "seed": job.seed,
        },
        "evaluation": None,
        "weight_average": None,
        "epochs": epochs,
        "checkpoint.every": f"{epochs} epochs",
        "seed": seed_of(f"silo/{job.seed}/{client}/{round_num}"),
    }
    if job.initial is not None and job.initial.resume:
        fields["initial"] = None  # its step is the federation's, and no silo's
    if job.turns is None and job.optimizer.plateau is not None:
        fields["optimizer"] = _lowered(job.optimizer, job.optimizer.plateau, num_lr_reductions)
    return with_fields(job, fields)


def _lowered(spec: OptimizerSpec, plateau: ScheduleSpec, num_reductions: int) -> JSON:
    """Return an optimizer section with its rates lowered by a plateau, and no schedule left."""
    groups = spec.groups and tuple(
        group.with_changes(**_lower(group, plateau, num_reductions)) for group in spec.groups
    )
    lower = {**_lower(spec, plateau, num_reductions), "groups": groups, "schedule": None}
    return spec.with_changes(**lower).document()


def _lower(
    spec: UpdateRuleSpec | GroupSpec, plateau: ScheduleSpec, num_reductions: int
) -> dict[str, object]:
    """Return the learning rates of one section, as a plateau has lowered them, by field."""
    lower: dict[str, object] = {}
    if spec.lr is not None:
        lower["lr"] = plateau.reduced(spec.lr, num_reductions)
    inside = spec.optimizer if isinstance(spec, GroupSpec) else None
    if inside is not None:
        lower["optimizer"] = inside.with_changes(**_lower(inside, plateau, num_reductions))
    return lower


def decide(job: JobSpec, value: PartiesRun, world: World, now_s: float) -> Fact | None:
    """Return the run's next fact; while a round is open, the next fact of a client's party."""
    rounds = value.rounds
    if not _has_begun(rounds) and nested.decide(_sample(job, value), world, now_s) is None:
        return None  # nothing is built for silos that have no place
    return federated.decide_round(
        job, rounds, world, now_s, lambda _: _of_clients(value, world, now_s)
    )


def _has_begun(rounds: Federation) -> bool:
    return rounds.committed is not None or bool(rounds.helper)


def _sample(job: JobSpec, value: PartiesRun) -> Child:
    """Return an example silo, before its first round: all silos need the same kinds of workers."""
    return nested.begin(party_of(value, 0), client_job(job, 0, 1), 0, value.strategies)


def _of_clients(value: PartiesRun, world: World, now_s: float) -> Fact | None:
    if failed := KIND.failed(value):
        return failed
    training = KIND.in_training(value)
    for client, child in training.items():
        siblings = [other for number, other in training.items() if number != client]
        if fact := nested.decide(child, nested.world_beside(world, siblings), now_s):
            return fact
    return None


def _folded(job: JobSpec, value: PartiesRun, client: int, child: Child, fact: Fact) -> Child:
    """Return the silo after a fact; once it is built, it is given the global state to train."""
    if isinstance(fact, ModelBuilt) and fact.party == child.party:
        return _based(job, value, client, child)
    return child


def _opened(job: JobSpec, value: PartiesRun, client: int) -> Child:
    """Return a client's party as its round opens: new, or known and given the global state."""
    before = value.clients.get(client)
    if before is None:
        party = party_of(value, client)
        return nested.begin(party, client_job(job, client, 1), 0, value.strategies)
    if nested.progress(before).num_rows:
        return _based(job, value, client, before)
    return nested.again(before)  # it has failed before it knew its rows; on from its membership


def _based(job: JobSpec, value: PartiesRun, client: int, child: Child) -> Child:
    rounds = value.rounds
    assert rounds.committed is not None
    base = Base(0, 0, rounds.committed.digest)
    num_reductions = num_lr_reductions(rounds.metrics)
    of_round = client_job(job, client, rounds.round_num, num_reductions)
    return nested.rebased(child, of_round, base, nested.progress(child).num_rows, horizon=1)


def pending(
    run_id: RunId, job: JobSpec, value: PartiesRun, horizon: int | None
) -> frozenset[Effect]:
    """Return the effects that are due for the round; clients have effects of their own."""
    of_rounds = due.pending(run_id, job, value.rounds, horizon)
    effects = set[Effect](effect for effect in of_rounds if not isinstance(effect, TrainClient))
    for child in KIND.in_training(value).values():
        effects |= {_in_its_round(job, value, effect) for effect in nested.pending(run_id, child)}
    return frozenset(effects | _collecting(run_id, value))


def _in_its_round(job: JobSpec, value: PartiesRun, effect: Effect) -> Effect:
    """Return an effect of a client's party; a RunSegment is given the number of its round."""
    if not isinstance(effect, RunSegment):
        return effect
    before, num_rounds = value.rounds.round_num - 1, spec_of(job).rounds
    return replace(effect, rounds_before=before, num_rounds=num_rounds)


def _collecting(run_id: RunId, value: PartiesRun) -> set[Effect]:
    """Return the effects that copy the states of trained clients into the round's spool."""
    rounds, effects = value.rounds, set[Effect]()
    for client in unanswered(value):
        progress = nested.progress(value.clients[client])
        done = progress.committed
        if done is None or done.segment == 0 or rounds.committed is None:
            continue
        metrics = {name: n for name, n in progress.metrics.items() if name != TRAIN_LOSS}
        effects.add(
            CollectUpdate(
                run_id=run_id,
                party=rounds.party,
                round_num=rounds.round_num,
                client=client,
                digest=done.digest,
                num_samples=progress.num_rows[TRAIN_SPLIT],
                num_steps=done.step,
                loss=progress.loss,
                base=rounds.committed,
                metrics=tuple(sorted(metrics.items())),
                traffic=tuple(sorted(progress.traffic.items())),
            )
        )
    return effects


def _has_trained(child: Child) -> bool:
    """Return True if a silo has trained; a new silo must first build its model."""
    return child.horizon != 0 and nested.is_at_horizon(child)


def _why_rejected(fact: PartyFailed) -> tuple[Cause, str]:
    if fact.error is not None:
        return cause_of(fact.error), reason_of(fact.error)
    return Cause.EXCEPTION if fact.cause is Cause.UNKNOWN else fact.cause, fact.reason


def status(job: JobSpec, value: PartiesRun, world: World) -> Status:
    """Return the run's status, with the workers of all silos."""
    outer = due.status(job, value.rounds, world)
    members = nested.members(value.clients.values()) or outer.members
    if not _has_begun(value.rounds):
        reason = nested.why_waiting(_sample(job, value), world)
        return replace(outer, reason=reason)
    if outer.strategy_phase != "TRAINING":
        return replace(outer, members=members)
    reason, phase = KIND.answered(value, outer), RunPhase.RUNNING
    waiting = [n for n, child in KIND.in_training(value).items() if not nested.members([child])]
    if waiting:
        names = ", ".join(f"client {client}" for client in waiting[:4])
        why = nested.why_waiting(value.clients[waiting[0]], world)
        reason, phase = f"{reason}; without workers: {names}: {why}", RunPhase.RECOVERING
    return replace(outer, members=members, phase=phase, reason=reason)


KIND = PartyKind("client", _has_trained, _opened, _why_rejected, _folded)
STRATEGY = KIND.strategy(check, decide, pending, status)

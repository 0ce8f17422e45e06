"""A federation whose clients are parties, each run by a strategy of its own: what is alike whether
they are silos (silos.py) or regions (regional.py).

Rounds are those of Federated (federated.py). Between the opening of a round and its closing each
selected client works as a party (`client0`, `client1`, ...) until it has trained; what has become
of it is then its update. One that fails is rejected alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from stratagem.common.base.errors import Violation
from stratagem.common.base.ids import Party, RunId, child_party
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.effects import Base, Effect
from stratagem.coordinator.core.facts import (
    ClientsSelected,
    Fact,
    PartyFailed,
    RunResumed,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.core.state import World
from stratagem.coordinator.core.strategy_contract import VERSION, Child, Nesting, Status, Strategy
from stratagem.coordinator.core.strategy_table import Strategies
from stratagem.coordinator.strategies import nested
from stratagem.coordinator.strategies.federated import federated
from stratagem.coordinator.strategies.federated.federated_run import FederatedRun
from stratagem.coordinator.strategies.federated.update_rejections import rejection


@dataclass(frozen=True, slots=True)
class PartiesRun:
    """The run value: the rounds, and the parties of the clients that have taken part so far."""

    rounds: FederatedRun
    strategies: Strategies
    """The table that the clients' strategy is taken from."""
    clients: Mapping[int, Child]
    failures: Mapping[int, PartyFailed] = field(default_factory=dict)
    """Failures by client, in the open round; each becomes the rejection of its client alone."""


def _unchanged(_job: JobSpec, _value: PartiesRun, _client: int, child: Child, _fact: Fact) -> Child:
    return child


@dataclass(frozen=True, slots=True)
class PartyKind:
    """What sort of parties the clients are: what differs between one and another."""

    noun: str
    """What people call a client."""
    has_trained: Callable[[Child], bool]
    """Whether a party has done its part of the round."""
    opened: Callable[[JobSpec, PartiesRun, int], Child]
    """(job, value, client): its party at the opening of a round that it was selected for."""
    why_rejected: Callable[[PartyFailed], tuple[Cause, str]]
    """Cause and reason of the rejection of a client whose party has failed."""
    folded: Callable[[JobSpec, PartiesRun, int, Child, Fact], Child] = _unchanged
    """(job, value, client, party, fact): the party after a fact of its own, which is folded into it
    already."""

    def transition(self, job: JobSpec, value: PartiesRun, fact: Fact, now_s: float) -> PartiesRun:
        """Fold one fact: of the rounds, or of a client's party."""
        for client, child in value.clients.items():
            if nested.is_of(child, fact):
                if isinstance(fact, PartyFailed):
                    return replace(value, failures={**value.failures, client: fact})
                after = nested.transition(child, fact, now_s)
                after = self.folded(job, value, client, after, fact)
                return replace(value, clients={**value.clients, client: after})
        value = replace(value, rounds=federated.transition(job, value.rounds, fact, now_s))
        if isinstance(fact, ClientsSelected):
            opened = {n: self.opened(job, value, n) for n in value.rounds.selected}
            return replace(value, clients={**value.clients, **opened}, failures={})
        if isinstance(fact, RunResumed):
            clients = {n: nested.transition(c, fact, now_s) for n, c in value.clients.items()}
            return replace(value, clients=clients, failures={})
        return value

    def reject_reason(self, job: JobSpec, value: PartiesRun, fact: Fact) -> str:
        """Return why a reported fact is stale, as its client or the round decides; "" when it is
        welcome."""
        for client, child in value.clients.items():
            if nested.is_of(child, fact):
                if client not in self.in_training(value):
                    round_num = value.rounds.round_num
                    return f"{self.noun} {client} has ended its part of round {round_num}"
                return "" if isinstance(fact, PartyFailed) else nested.reject_reason(child, fact)
        return federated.reject_reason(job, value.rounds, fact)

    def failed(self, value: PartiesRun) -> UpdateRejected | None:
        """Return the rejection of the first client whose party has failed."""
        for client in unanswered(value):
            if (fact := value.failures.get(client)) is not None:
                cause, reason = self.why_rejected(fact)
                return rejection(value.rounds, client, cause, reason, fact.error)
        return None

    def in_training(self, value: PartiesRun) -> dict[int, Child]:
        """Return the parties of the open round that have not trained yet."""
        found = {client: value.clients[client] for client in unanswered(value)}
        return {client: child for client, child in found.items() if not self.has_trained(child)}

    def answered(self, value: PartiesRun, shown: Status) -> str:
        """Return, as a sentence, how many clients of the open round have answered."""
        count = f"round {value.rounds.round_num}: {shown.num_clients_done} of {shown.num_clients}"
        return f"{count} {self.noun}s have answered"

    def strategy(
        self,
        check: Callable[[JobSpec, Strategies], list[Violation]],
        decide: Callable[[JobSpec, PartiesRun, World, float], Fact | None],
        pending: Callable[[RunId, JobSpec, PartiesRun, int | None], frozenset[Effect]],
        status: Callable[[JobSpec, PartiesRun, World], Status],
    ) -> Strategy:
        """Return the strategy of these parties: with what is alike for all."""
        return Strategy(
            version=VERSION,
            check=check,
            init=lambda _job, party, strategies: PartiesRun(FederatedRun(party), strategies, {}),
            decide=decide,
            transition=self.transition,
            reject_reason=self.reject_reason,
            pending=pending,
            status=status,
            own_deadline=lambda value: federated.own_deadline(value.rounds),
            own_deaths=lambda value, member: federated.deaths(value.rounds, member),
            own_blobs=lambda value: federated.blobs(value.rounds),
            children=lambda value: value.clients.values(),
            working=lambda value: self.in_training(value).values(),
            nesting=Nesting(lambda value: federated.progress(value.rounds), _rebase, _returned),
        )


def unanswered(value: PartiesRun) -> list[int]:
    """Return the clients of the open round without an update."""
    return [] if value.rounds.is_closed else list(value.rounds.unanswered())


def party_of(value: PartiesRun, client: int) -> Party:
    """Return the name of a client's party."""
    return child_party(value.rounds.party, f"client{client}")


def _rebase(job: JobSpec, value: PartiesRun, base: Base, num_rows: Mapping[str, int]) -> PartiesRun:
    """Begin the next round from the given state."""
    return replace(value, rounds=federated.rebase(job, value.rounds, base, num_rows))


def _returned(
    job: JobSpec, value: PartiesRun, base: Base, metrics: Mapping[str, float]
) -> PartiesRun:
    """Return the rounds to an earlier commit."""
    return replace(value, rounds=federated.returned(job, value.rounds, base, metrics))

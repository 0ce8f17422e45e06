"""Which state each client of a federation has kept of which round: pure folds over the facts.

A client's newest state is that of its newest update that was journaled. So a round that is done
again begins from the state of the round before it, whatever the client has written meanwhile.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from stratagem.common.base.ids import Digest
from stratagem.coordinator.core.effects import KeptState
from stratagem.coordinator.core.facts import UpdateReceived


@dataclass(frozen=True, slots=True)
class ClientStates:
    """The states of all clients, which lie at their workers, or as blobs in the store."""

    are_blobs: bool = False
    newest: Mapping[int, KeptState] = field(default_factory=dict)
    """By client; without one it begins anew."""
    owed: Mapping[int, Mapping[int, KeptState]] = field(default_factory=dict)
    """By round of a commit that clients still evaluate: the state of each of them then."""
    is_incomplete: bool = False
    """Some client no longer has what its newest state is told to be, or all have begun anew from an
    earlier commit: where states add up to a common one, they do not any more."""

    @property
    def blobs(self) -> frozenset[Digest]:
        """The states that the store keeps."""
        return frozenset(state.digest for state in self.newest.values() if self.are_blobs)

    def with_update(self, fact: UpdateReceived) -> "ClientStates":
        """Note what a client keeps from the round of its update on."""
        state = KeptState(fact.round_num, fact.client_state)
        return replace(self, newest={**self.newest, fact.client: state})

    def with_loss(self) -> "ClientStates":
        """Note that a client has lost its state."""
        return replace(self, is_incomplete=True)

    def anew(self) -> "ClientStates":
        """Begin all clients anew where states are gone that add up to a common one."""
        return replace(self, newest={}, is_incomplete=False) if self.is_incomplete else self

    def with_evaluation(self, segment: int, clients: Iterable[int]) -> "ClientStates":
        """Note with which states clients will evaluate a commit, however late they do."""
        states = {client: self.newest[client] for client in clients if client in self.newest}
        return replace(self, owed={**self.owed, segment: states})

    def evaluated(self, segment: int) -> "ClientStates":
        """Forget the states of a commit that is evaluated."""
        return replace(self, owed={n: states for n, states in self.owed.items() if n != segment})

    def returned(self, segment: int) -> "ClientStates":
        """Begin all clients anew, as the run goes back to a commit; what is owed up to it stays."""
        owed = {n: states for n, states in self.owed.items() if n <= segment}
        return ClientStates(are_blobs=self.are_blobs, owed=owed, is_incomplete=True)

    def of_evaluation(self, segment: int, client: int) -> KeptState | None:
        """Return the state with which a client evaluates a commit."""
        return self.owed.get(segment, {}).get(client)

    def kept_rounds(self, client: int) -> tuple[int, ...]:
        """Return the rounds whose states a client must still have while it trains."""
        states = [of_clients.get(client) for of_clients in self.owed.values()]
        states.append(self.newest.get(client))
        return tuple(sorted({state.round_num for state in states if state is not None}))

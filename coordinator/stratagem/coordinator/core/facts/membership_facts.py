"""Facts of a federation's membership: who joins, leaves, is benched, and is not asked."""

from stratagem.common.base.ids import Party
from stratagem.coordinator.core.facts.fact_values import Value
from stratagem.coordinator.core.facts.federated_facts import ClientBinding


class ClientsJoined(Value):
    """Clients have joined an open roster, or are back under the numbers they have had before."""

    party: Party
    clients: tuple[ClientBinding, ...]


class ClientLeft(Value):
    """A client of an open roster is neither asked nor waited for until it joins again."""

    party: Party
    client: int
    reason: str


class ClientBenched(Value):
    """A client has failed in too many rounds in a row, and is not asked for some rounds."""

    party: Party
    client: int
    until_round: int
    """The first round in which it may take part again."""
    reason: str

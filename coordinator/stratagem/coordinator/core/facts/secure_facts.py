"""Facts of secure aggregation: whose keys and shares a round has, and that it begins again.

Whose updates are in the sum is fixed by RoundClosed, before a share is asked for.
"""

from stratagem.common.base.ids import Digest, Party
from stratagem.coordinator.core.facts.fact_values import Value
from stratagem.coordinator.core.facts.rejection_causes import Cause


class LeftOut(Value):
    """A client that a round goes on without, before it has trained."""

    client: int
    reason: str
    cause: Cause


class KeysPosted(Value):
    """Clients have posted public keys for an attempt of a round."""

    party: Party
    round_num: int
    attempt: int
    clients: tuple[int, ...]
    left_out: tuple[LeftOut, ...] = ()
    directory: Digest
    """Of the blob with the keys."""
    ring_seed: str
    """Random, hexadecimal: the order of the ring on which clients have neighbours."""


class SharesRouted(Value):
    """Clients have sealed shares of their secrets for their neighbours."""

    party: Party
    round_num: int
    attempt: int
    clients: tuple[int, ...]
    left_out: tuple[LeftOut, ...] = ()
    shares: Digest
    """Of the blob with the sealed shares."""


class RoundRestarted(Value):
    """An attempt cannot be unmasked, and none of its shares is opened; the round begins again with
    other keys."""

    party: Party
    round_num: int
    attempt: int
    """The new one."""
    reason: str

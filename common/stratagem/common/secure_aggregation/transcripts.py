"""The bytes that are signed, and from which keys are derived: every one says what it is for.

A text is a list of parts, each with its length before it, so that no two lists give the same bytes.
It begins with the protocol and with what the bytes are for, and names the run, the party, the
round, the attempt and the client. A signature or a key of one purpose, round or client is therefore
worth nothing for another. Pure functions; nothing here is secret.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stratagem.common.base.ids import Party

PROTOCOL: Final = b"stratagem secure aggregation 1"


@dataclass(frozen=True, slots=True)
class SecureRound:
    """One attempt of one round: keys are made for it, and are used in no other."""

    run_id: str
    party: Party
    round_num: int
    attempt: int

    def transcript(self, purpose: str, *parts: bytes | int | str) -> bytes:
        """Return the text of a purpose: this round, and then the parts."""
        return _joined(
            PROTOCOL, purpose, self.run_id, self.party, self.round_num, self.attempt, *parts
        )

    def of_keys(self, client: int, share_key: bytes, mask_key: bytes) -> bytes:
        """Return the text with which a client signs its public keys."""
        return self.transcript("keys", client, share_key, mask_key)

    def of_survivors(self, client: int, members: bytes, survivors: Iterable[int]) -> bytes:
        """Return the text with which a client signs whose updates are in the sum. members: what
        `of_members` gives."""
        return self.transcript("survivors", client, members, clients_bytes(survivors))

    def of_members(self, members: Iterable[int], ring_seed: bytes) -> bytes:
        """Return the digest of who has posted keys, and of the ring in which they are."""
        return hashlib.sha256(
            self.transcript("members", clients_bytes(members), ring_seed)
        ).digest()


def clients_bytes(clients: Iterable[int]) -> bytes:
    """Return client numbers as bytes, in increasing order."""
    return b"".join(client.to_bytes(8, "big") for client in sorted(clients))


def _joined(*parts: bytes | int | str) -> bytes:
    encoded = map(_encoded, parts)
    return b"".join(len(part).to_bytes(4, "big") + part for part in encoded)


def _encoded(part: bytes | int | str) -> bytes:
    match part:
        case bytes():
            return b"b" + part
        case int():
            return b"i" + part.to_bytes(8, "big")
        case str():
            return b"s" + part.encode()

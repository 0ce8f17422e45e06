"""Derive all secrets of one client in one attempt of a secure round from 32 random bytes.

    root                     random, made when the client posts its keys, and kept until the round
                             is over
    share key, mask key      X25519 key pairs; the public halves are posted
    self mask                32 bytes; shared among the holders, opened if the client survives
    mask key's private half  shared among the holders, opened if the client drops out
    pair mask with v         HKDF(X25519(mask key, v's mask key)): one adds it, the other subtracts

All secrets follow from the root, so a repeated call is answered with the same bytes (Bonawitz et
al. 2017, https://eprint.iacr.org/2017/281).
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Party
from stratagem.common.privacy.sharing import COEFFICIENT_BYTES, SHARE_BYTES, share

# ---- Transcripts ----
#
# A transcript is a byte string that is signed, or gives keys. It names its purpose.
#
# It is a list of parts, each with its length before it, so no two lists give the same bytes. It
# begins with the protocol and the purpose, and names the run, the party, the round, the attempt
# and the client; that of a pair also names both clients and both public keys. A signature or a
# key of one purpose, round or client is therefore worthless for another. The functions are pure;
# nothing here is secret.

PROTOCOL: Final = b"stratagem secure aggregation 1"


@dataclass(frozen=True, slots=True)
class SecureRound:
    """The identity of one attempt of a secure-aggregation round; its keys are used in no other."""

    run_id: str
    party: Party
    round_num: int
    attempt: int

    def transcript(self, purpose: str, *parts: bytes | int | str) -> bytes:
        """Return the bytes to sign or derive keys from: the purpose, this round, and the parts."""
        return _joined(
            PROTOCOL, purpose, self.run_id, self.party, self.round_num, self.attempt, *parts
        )

    def of_keys(self, client: int, share_key: bytes, mask_key: bytes) -> bytes:
        """Return the bytes that a client signs to vouch for its public keys."""
        return self.transcript("keys", client, share_key, mask_key)

    def of_survivors(self, client: int, members: bytes, survivors: Iterable[int]) -> bytes:
        """Return the bytes that a client signs to confirm which clients the sum contains. members:
        the result of `of_members`."""
        return self.transcript("survivors", client, members, clients_bytes(survivors))

    def of_members(self, members: Iterable[int], ring_seed: bytes) -> bytes:
        """Return a digest of the clients that have posted keys, and of their neighbour ring."""
        return hashlib.sha256(
            self.transcript("members", clients_bytes(members), ring_seed)
        ).digest()


def clients_bytes(clients: Iterable[int]) -> bytes:
    """Encode client numbers as bytes, sorted in ascending order."""
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


# ---- Secrets of a client ----

KEY_BYTES: Final = 32
_TAG_BYTES: Final = 16
SEALED_BYTES: Final = 2 * SHARE_BYTES + _TAG_BYTES
_NONCE: Final = bytes(12)
"""The constant nonce, since each key seals one message: from one client to another in one attempt
of a round, with one context."""


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """The public keys that a client posts: X25519, 32 bytes each."""

    share_key: bytes
    mask_key: bytes


@dataclass(frozen=True, slots=True)
class HeldShare:
    """One holder's shares of a client's self mask and mask key, of which it may reveal only one."""

    self_mask: bytes
    mask_key: bytes


class ClientSecrets:
    """All secrets of one client in one attempt of a secure-aggregation round; without repr and
    comparison, so that none leaks."""

    def __init__(self, of_round: SecureRound, client: int, root: bytes) -> None:
        if len(root) != KEY_BYTES:
            raise ValueError(f"a root has {KEY_BYTES} bytes, and not {len(root)}")
        self._round, self._client, self._root = of_round, client, root

    @cached_property
    def public(self) -> PublicKeys:
        return PublicKeys(
            self._share_key.public_key().public_bytes_raw(),
            self._mask_key.public_key().public_bytes_raw(),
        )

    @property
    def self_mask_key(self) -> bytes:
        """Return the key of the client's self mask, which is shared with no other client."""
        return self_mask_key(self._round, self._client, self._derived("self mask"))

    def pair_mask_key(self, other: int, mask_key: bytes) -> bytes:
        """Return the key of the mask that this client shares with another client."""
        return pair_mask_key(
            self._round, (self._client, self._mask_key), (other, mask_key), self.public.mask_key
        )

    def sealed_shares(
        self, share_keys: Mapping[int, bytes], threshold: int, context: bytes
    ) -> dict[int, bytes]:
        """Return the encrypted shares for each neighbour, which only that neighbour can read.
        share_keys: public keys of the neighbours. context: other input of the shares, such as the
        holders; shares of different contexts are independent."""
        shares = self._shares((*share_keys, self._client), threshold, context)
        sealed = {}
        for other, public_key in share_keys.items():
            text = self._round.transcript("share", self._client, other, context)
            key = self._common_key(text, public_key, (self.public.share_key, public_key))
            plain = shares[other].self_mask + shares[other].mask_key
            sealed[other] = AESGCM(key).encrypt(_NONCE, plain, text)
        return sealed

    def own_share(self, others: Sequence[int], threshold: int, context: bytes) -> HeldShare:
        """Return the shares of the client's secrets that the client itself holds."""
        return self._shares((*others, self._client), threshold, context)[self._client]

    def opened(self, sender: int, public_key: bytes, sealed: bytes, context: bytes) -> HeldShare:
        """Return the decrypted shares that another client sealed for this one. Raises
        InvalidInputError unless that client sealed them in this round."""
        text = self._round.transcript("share", sender, self._client, context)
        key = self._common_key(text, public_key, (public_key, self.public.share_key))
        try:
            plain = AESGCM(key).decrypt(_NONCE, sealed, text)
        except (InvalidTag, ValueError):
            why = "is not what that client has sealed for this one in this round"
            raise InvalidInputError(f"the share of client {sender} {why}") from None
        if len(plain) != 2 * SHARE_BYTES:
            raise InvalidInputError(f"the share of client {sender} has {len(plain)} bytes")
        return HeldShare(plain[:SHARE_BYTES], plain[SHARE_BYTES:])

    @cached_property
    def _share_key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self._derived("share key"))

    @cached_property
    def _mask_key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self._derived("mask key"))

    def _derived(self, what: str, *parts: bytes | int) -> bytes:
        return hkdf(self._root, self._round.transcript(f"client {what}", self._client, *parts))

    def _common_key(self, text: bytes, public_key: bytes, keys: tuple[bytes, bytes]) -> bytes:
        """Derive the encryption key of a message. keys: the sender's and receiver's public keys."""
        return hkdf(_exchanged(self._share_key, public_key), text + keys[0] + keys[1])

    def _shares(
        self, holders: tuple[int, ...], threshold: int, context: bytes
    ) -> dict[int, HeldShare]:
        places = {holder: holder + 1 for holder in sorted(holders)}
        parts = []
        for what, secret in (
            ("self mask", self._derived("self mask")),
            ("mask key", self._mask_key.private_bytes_raw()),
        ):
            key = self._derived(f"coefficients of the {what}", threshold, context)
            num_bytes = (threshold - 1) * COEFFICIENT_BYTES
            random = Cipher(AES256(key), CTR(bytes(16))).encryptor().update(bytes(num_bytes))
            parts.append(share(secret, list(places.values()), threshold, random))
        return {
            holder: HeldShare(parts[0][place], parts[1][place]) for holder, place in places.items()
        }


def self_mask_key(of_round: SecureRound, client: int, self_mask: bytes) -> bytes:
    """Derive the key of a client's self mask from the secret that was recovered from its shares."""
    return hkdf(self_mask, of_round.transcript("self mask", client))


def dropped_pair_key(
    of_round: SecureRound, dropped: int, private_key: bytes, other: int, mask_key: bytes
) -> bytes:
    """Derive the key of the pair mask between a client that dropped out and another one, from the
    former's private mask key, recovered from its shares."""
    key = X25519PrivateKey.from_private_bytes(private_key)
    own_public = key.public_key().public_bytes_raw()
    return pair_mask_key(of_round, (dropped, key), (other, mask_key), own_public)


def pair_mask_key(
    of_round: SecureRound,
    owner: tuple[int, X25519PrivateKey],
    other: tuple[int, bytes],
    own_public: bytes,
) -> bytes:
    """Derive the key of the mask that two clients share; one adds it, the other subtracts it."""
    ends = sorted([(owner[0], own_public), other])
    parts = [part for end in ends for part in end]
    return hkdf(_exchanged(owner[1], other[1]), of_round.transcript("pair mask", *parts))


def public_of(private_key: bytes) -> bytes:
    """Return the public half of a private mask key."""
    return X25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()


def hkdf(secret: bytes, info: bytes) -> bytes:
    """Derive a key of 32 bytes from a secret with HKDF-SHA256."""
    return HKDF(SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def _exchanged(private_key: X25519PrivateKey, public_key: bytes) -> bytes:
    """Return the shared secret of an X25519 key exchange. Raises InvalidInputError for a key of
    small order, with which everybody would know the secret."""
    try:
        return private_key.exchange(X25519PublicKey.from_public_bytes(public_key))
    except ValueError:
        raise InvalidInputError("a public key is not one of X25519") from None

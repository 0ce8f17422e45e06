"""Take the steps of a client in a secure round, each checked against its earlier steps.

    post keys        make secrets for this attempt, once
    share secrets    verify the neighbours' keys, seal shares of the secrets for them, once
    mask             name the masks of the update, for one update alone
    sign survivors   sign whose updates are in the sum, for one set alone
    open shares      once enough neighbours have signed the same set: of each neighbour one share,
                     of the self mask if it survives, of the mask key if it does not

A step's decision is on disk before its answer leaves. The same step again gets the same keys,
shares and consent (a signature may be a new one of the same text); another one is refused. The
client computes threshold, neighbours and modulus itself: it does not trust the coordinator.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from stratagem.common.base.errors import (
    InvalidInputError,
    KeysLostError,
    RefusedBySiteError,
    UserCodeError,
)
from stratagem.common.privacy.masks import MASKED, MaskedLayout, apply_mask
from stratagem.common.privacy.quantisation import Floats, Quantisation
from stratagem.common.privacy.secrets import (
    KEY_BYTES,
    SEALED_BYTES,
    ClientSecrets,
    HeldShare,
    SecureRound,
)
from stratagem.common.privacy.sharing import (
    MIN_CLIENTS,
    RING_SEED_BYTES,
    is_complete,
    neighbours,
    shares_needed,
)
from stratagem.common.process.failpoints import failpoint
from stratagem.common.schema.json import JSON
from stratagem.common.strategy.secure import SecureAggregation
from stratagem.common.tensors.manifest import Purpose
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.worker.federated.secure_secrets import (
    PeerKeys,
    RecordKey,
    RoundRecord,
    SecretStore,
    SignedIdentity,
    WorkerSigner,
    is_signed_by,
)
from stratagem.worker.site.file import PeerPins

# ---- Secure client ----


@dataclass(frozen=True, slots=True)
class SignedKeys:
    """A client's public keys, signed by its worker."""

    client: int
    share_key: bytes
    mask_key: bytes
    signed: SignedIdentity
    signature: bytes


@dataclass(frozen=True, slots=True)
class Masking:
    """The masks that are added to a client's update before it is sent."""

    rule: Quantisation
    spec: SecureAggregation
    masks: tuple[tuple[bytes, bool], ...]
    """The key of each mask, and whether the mask is subtracted."""


class SecureClient:
    """One client in one attempt of a secure round. Used under the store's lock."""

    def __init__(
        self, store: SecretStore, signer: WorkerSigner, of_round: SecureRound, client: int
    ) -> None:
        self._store, self._signer, self._round, self._client = store, signer, of_round, client
        self._key: RecordKey = (of_round.run_id, of_round.party, client)

    def check_new(self, job: str) -> RoundRecord | None:
        """Return the record of this attempt, None if there is none. Raises RefusedBySiteError if a
        later attempt has begun, or if this round was opened in another attempt."""
        saved, number, attempt = self._store.find(self._key), *self._place
        if saved is None:
            return None
        if saved.last_opened >= number and (saved.round_num, saved.attempt) != (number, attempt):
            raise RefusedBySiteError(
                f"client {self._client} has opened its shares of round {saved.last_opened} of this "
                f"run, and takes part in no other sum of round {number}: the difference of two "
                "sums could be one client's update; begin a new run from the last commit"
            )
        if (saved.round_num, saved.attempt) > (number, attempt):
            raise RefusedBySiteError(
                f"attempt {attempt} of round {number} is over for client {self._client}"
            )
        if (saved.round_num, saved.attempt) < (number, attempt):
            return None
        if saved.job != job:
            raise RefusedBySiteError(f"client {self._client} has posted keys for another job")
        if not saved.root:
            raise self._lost()
        return saved

    def post_keys(self, job: str, spec: SecureAggregation, audit: Mapping[str, JSON]) -> SignedKeys:
        """Return the client's signed public keys, the same again for the same attempt. job: SHA-256
        of the job's text. audit: fields common to all lines of the site's audit about the round."""
        record = self.check_new(job)
        if record is None:
            before = self._store.find(self._key)
            opened = before.last_opened if before is not None else 0
            made = os.urandom(KEY_BYTES).hex()
            record = RoundRecord(*self._key, *self._place, made, job, spec, audit, opened)
            signs_as = _digest(self._signer.identity(bytes.fromhex(made)))
            record = replace(record, identity=signs_as)
            self._store.save(record)
            failpoint("worker.secure.keys_made")
        public = self._secrets(record).public
        text = self._round.of_keys(self._client, public.share_key, public.mask_key)
        signed, signature = self._signed(record, text)
        return SignedKeys(self._client, public.share_key, public.mask_key, signed, signature)

    def share_secrets(
        self,
        members: Sequence[int],
        ring_seed: bytes,
        peers: Sequence[SignedKeys],
        pins: PeerPins | None,
    ) -> dict[int, bytes]:
        """Return the sealed shares of this client's secrets, keyed by neighbour. members: all that
        have posted keys. peers: the neighbours' keys. Raises InvalidInputError if these cannot be
        one round."""
        record = self._record()
        others = self._neighbours(record.spec, members, ring_seed, pins)
        if [peer.client for peer in peers] != list(others):
            raise InvalidInputError("the keys are not those of the client's neighbours, in order")
        keys_of = {peer.client: self._checked(peer, pins) for peer in peers}
        self._check_different(record, keys_of, pins)
        setup = self._setup(members, ring_seed, keys_of)
        if record.setup and record.setup != setup:
            raise RefusedBySiteError(
                f"client {self._client} has shared its secrets among other clients already"
            )
        if not record.setup:
            record = replace(
                record,
                setup=setup,
                members=tuple(members),
                ring_seed=ring_seed.hex(),
                neighbours=keys_of,
            )
            self._store.save(record)
        needed = shares_needed(record.spec.threshold, len(others) + 1)
        share_keys = {client: bytes.fromhex(keys.share_key) for client, keys in keys_of.items()}
        context = self._context(record, self._client)
        return self._secrets(record).sealed_shares(share_keys, needed, context)

    def masking(self, job: str, routed: Sequence[int]) -> Masking:
        """Return the masks of the update. routed: the clients that have shared their secrets."""
        record = self._shared_record()
        if record.job != job:
            raise RefusedBySiteError(f"client {self._client} has posted keys for another job")
        self._check_clients("routed", routed, record.members)
        if self._client not in routed:
            raise RefusedBySiteError(f"the shares of client {self._client} were not routed")
        self._check_enough(record, routed, "have shared their secrets")
        if record.routed and record.routed != tuple(routed):
            raise RefusedBySiteError(
                f"client {self._client} has masked its update against other clients already"
            )
        secrets, present = self._secrets(record), set(routed)
        masks = [(secrets.self_mask_key, False)]
        for other, keys in record.neighbours.items():
            if other in present:
                key = secrets.pair_mask_key(other, bytes.fromhex(keys.mask_key))
                masks.append((key, other < self._client))
        return Masking(record.spec.quantisation(len(record.members)), record.spec, tuple(masks))

    def keep_update(self, routed: Sequence[int], update: str) -> None:
        """Record the masked update that is about to be sent. update: its SHA-256.

        Raises RefusedBySiteError if a different one may have been sent: the difference of two
        inputs under one mask would reveal the difference of the updates.
        """
        record = self._shared_record()
        if record.update and (record.update, record.routed) != (update, tuple(routed)):
            raise RefusedBySiteError(
                f"client {self._client} has trained round {self._round.round_num} again and got "
                "other numbers: a second update under the same masks would show the difference"
            )
        if not record.update:
            self._store.save(replace(record, update=update, routed=tuple(routed)))
        failpoint("worker.secure.update_kept")

    def sign_survivors(self, survivors: Sequence[int]) -> bytes:
        """Sign the set of clients whose updates are in the sum; one set per round."""
        record = self._shared_record()
        if not record.update:
            raise RefusedBySiteError(f"client {self._client} has sent no update in this round")
        self._check_clients("survivors", survivors, record.routed)
        if self._client not in survivors:
            raise RefusedBySiteError(f"client {self._client} is not among the survivors")
        self._check_enough(record, survivors, "survive")
        if record.survivors and record.survivors != tuple(survivors):
            raise RefusedBySiteError(
                f"client {self._client} has signed another set of survivors in this round"
            )
        if not record.survivors:
            record = replace(record, survivors=tuple(survivors))
            self._store.save(record)
        return self._signed(record, self._of_survivors(record, None))[1]

    def open_shares(
        self,
        survivors: Sequence[int],
        signatures: Mapping[int, bytes],
        sealed: Mapping[int, bytes],
    ) -> dict[int, tuple[bool, bytes]]:
        """Return one share of a secret of each neighbour and of this client, and whether the secret
        is the mask key. signatures: the neighbours', of the same set of survivors. sealed: the
        shares sealed for this client."""
        record = self._shared_record()
        if not record.survivors or record.survivors != tuple(survivors):
            raise RefusedBySiteError(
                f"client {self._client} has not signed this set of survivors in this round"
            )
        self._check_signatures(record, signatures)
        present = [other for other in record.neighbours if other in record.routed]
        if sorted(sealed) != present or any(len(e) != SEALED_BYTES for e in sealed.values()):
            raise InvalidInputError("the shares are not those of the client's neighbours")
        secrets = self._secrets(record)
        held = {
            other: secrets.opened(
                other,
                bytes.fromhex(record.neighbours[other].share_key),
                sealed[other],
                self._context(record, other),
            )
            for other in present
        }
        needed = shares_needed(record.spec.threshold, len(record.neighbours) + 1)
        context = self._context(record, self._client)
        held[self._client] = secrets.own_share(list(record.neighbours), needed, context)
        if record.last_opened < record.round_num:
            self._store.save(replace(record, last_opened=record.round_num))
            failpoint("worker.secure.opening_kept")
        return {other: _one_of(share, other in survivors) for other, share in held.items()}

    @property
    def _place(self) -> tuple[int, int]:
        return self._round.round_num, self._round.attempt

    def _record(self) -> RoundRecord:
        record = self._store.find(self._key)
        if record is None or (record.round_num, record.attempt) != self._place or not record.root:
            raise self._lost()
        return record

    def _shared_record(self) -> RoundRecord:
        record = self._record()
        if not record.setup:
            raise RefusedBySiteError(f"client {self._client} has shared no secrets in this round")
        return record

    def _lost(self) -> KeysLostError:
        number, attempt = self._place
        return KeysLostError(
            f"the worker of client {self._client} has no keys of round {number}, attempt "
            f"{attempt}: it was restarted without a data folder, or the round is over for it"
        )

    def _signed(self, record: RoundRecord, text: bytes) -> tuple[SignedIdentity, bytes]:
        """Return a signature of the round, and the signer's identity. Raises KeysLostError if the
        worker's identity has changed since the round began."""
        signed, signature = self._signer.sign(bytes.fromhex(record.root), text)
        if _digest(signed) == record.identity:
            return signed, signature
        number, attempt = self._place
        raise KeysLostError(
            f"the certificate of client {self._client}'s worker was renewed after it had posted "
            f"keys of round {number}, attempt {attempt}"
        )

    def _secrets(self, record: RoundRecord) -> ClientSecrets:
        return ClientSecrets(self._round, self._client, bytes.fromhex(record.root))

    def _neighbours(
        self,
        spec: SecureAggregation,
        members: Sequence[int],
        ring_seed: bytes,
        pins: PeerPins | None,
    ) -> tuple[int, ...]:
        if len(ring_seed) != RING_SEED_BYTES:
            raise InvalidInputError.at("ring_seed", f"has {len(ring_seed)} bytes")
        if len(members) < MIN_CLIENTS:
            text = f"{len(members)} clients are fewer than {MIN_CLIENTS}, which hide nobody"
            raise RefusedBySiteError(text)
        if list(members) != sorted(set(members)) or self._client not in members:
            raise InvalidInputError.at("members", "is no increasing list with this client in it")
        if pins is not None and not is_complete(len(members), spec.degree):
            raise RefusedBySiteError(
                f"of {len(members)} clients each has neighbours that the coordinator draws; a site "
                "that pins its peers shares secrets with all of them: set degree, or take fewer"
            )
        return neighbours(members, spec.degree, ring_seed)[self._client]

    def _checked(self, peer: SignedKeys, pins: PeerPins | None) -> PeerKeys:
        who = f"client {peer.client}"
        self._signer.check_peer(who, peer.signed, pins)
        text = self._round.of_keys(peer.client, peer.share_key, peer.mask_key)
        if not is_signed_by(peer.signed.identity, peer.signature, text):
            raise InvalidInputError(f"{who} has not signed its keys for this round")
        return PeerKeys(peer.share_key.hex(), peer.mask_key.hex(), peer.signed.identity.hex())

    def _check_different(
        self, record: RoundRecord, keys_of: Mapping[int, PeerKeys], pins: PeerPins | None
    ) -> None:
        """Refuse duplicate keys, and with pinned peers also one worker for two clients: its owner
        could unmask clients with few other neighbours."""
        public = self._secrets(record).public
        every = [public.share_key.hex(), public.mask_key.hex()]
        every += [key for keys in keys_of.values() for key in (keys.share_key, keys.mask_key)]
        if len(set(every)) < len(every):
            raise InvalidInputError("two clients have posted the same key")
        if pins is None:
            return
        identity = self._signer.identity(bytes.fromhex(record.root)).identity.hex()
        holders = [identity, *(keys.identity for keys in keys_of.values())]
        if len(set(holders)) < len(holders):
            raise RefusedBySiteError(
                "two clients have one certificate, and the site pins its peers"
            )

    def _setup(
        self, members: Sequence[int], ring_seed: bytes, keys_of: Mapping[int, PeerKeys]
    ) -> str:
        parts = [self._round.of_members(members, ring_seed)]
        for client, keys in sorted(keys_of.items()):
            parts += [client.to_bytes(8, "big")]
            parts += [bytes.fromhex(key) for key in (keys.share_key, keys.mask_key)]
            parts += [hashlib.sha256(bytes.fromhex(keys.identity)).digest()]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def _context(self, record: RoundRecord, owner: int) -> bytes:
        """Return the bytes that bind the sealed shares to their owner and the round's members."""
        members = self._round.of_members(record.members, bytes.fromhex(record.ring_seed))
        return self._round.transcript("holders", owner, members)

    def _check_clients(self, field: str, clients: Sequence[int], allowed: Sequence[int]) -> None:
        if list(clients) != sorted(set(clients)) or not set(clients) <= set(allowed):
            raise InvalidInputError.at(field, "is no increasing list of clients of the round")

    def _check_enough(self, record: RoundRecord, clients: Sequence[int], what: str) -> None:
        """Refuse a sum over too few clients, in all or in this neighbourhood."""
        holders = {*record.neighbours, self._client}
        for group in (set(record.members), holders):
            needed = shares_needed(record.spec.threshold, len(group))
            if (num := len(group & set(clients))) < needed:
                count = f"{num} of {len(group)} clients {what}"
                raise RefusedBySiteError(f"{count}, and {needed} are needed")

    def _of_survivors(self, record: RoundRecord, other: int | None) -> bytes:
        """Return the text about the survivors that a client (this one or another) signs."""
        client = self._client if other is None else other
        members = self._round.of_members(record.members, bytes.fromhex(record.ring_seed))
        return self._round.of_survivors(client, members, record.survivors)

    def _check_signatures(self, record: RoundRecord, signatures: Mapping[int, bytes]) -> None:
        num_signed, wrong = 1, ""  # its own
        for other, signature in signatures.items():
            keys = record.neighbours.get(other)
            if keys is None or other not in record.survivors:
                raise InvalidInputError(f"the signature of client {other} is of no neighbour")
            text = self._of_survivors(record, other)
            if is_signed_by(bytes.fromhex(keys.identity), signature, text):
                num_signed += 1
            else:  # which is one site's fault, and ends no round that has enough others
                wrong = wrong or f"; client {other} has not signed this set"
        needed = shares_needed(record.spec.threshold, len(record.neighbours) + 1)
        if num_signed < needed:
            count = f"{num_signed} clients have signed the survivors"
            raise RefusedBySiteError(f"{count}, and {needed} are needed{wrong}")


def _digest(signed: SignedIdentity) -> str:
    return hashlib.sha256(signed.identity).hexdigest()


def _one_of(share: HeldShare, survives: bool) -> tuple[bool, bytes]:
    return (False, share.self_mask) if survives else (True, share.mask_key)


# ---- Masked update ----
#
# The change of a client becomes whole numbers that reveal nothing without those of the others.
#
#     Δ = w - w_global, of all floating elements; a change that is not finite is refused
#     y = rint(clip(Δ) · s) · weight + self mask + Σ pair masks     modulo 2^32 or 2^64
#
# Integers and bools of the model do not leave. Memory beside the update is a window.

_WINDOW: Final = 1 << 18
"""Number of elements quantised at once."""


@dataclass(frozen=True, slots=True)
class MaskedUpdate:
    """The masked update, a single tensor, and its SHA-256."""

    tensors: Mapping[str, Tensor]
    digest: str


def masked_update(
    base: Mapping[str, Tensor], trained: Mapping[str, Tensor], masking: Masking, weight: int
) -> MaskedUpdate:
    """Return the masked change from `base` to `trained`. Raises UserCodeError if not finite."""
    model, _ = manifest_of(trained, Purpose.UPDATE)
    layout, rule = MaskedLayout(model), masking.rule
    words = np.empty(layout.num_elements + 1, rule.word)
    words[-1] = weight
    for spec, first in layout.tensors():
        before, after = base[spec.name].flatten(), trained[spec.name].flatten()
        for start in range(0, after.numel(), _WINDOW):
            part = slice(start, min(start + _WINDOW, after.numel()))
            change = _change(spec.name, before[part], after[part])
            rule.quantise(change, weight, words[first + part.start : first + part.stop])
    for key, is_subtracted in masking.masks:
        apply_mask(key, 0, words, subtract=is_subtracted)
    signed = torch.from_numpy(words.view(f"<i{rule.word.itemsize}"))
    return MaskedUpdate({MASKED: signed}, hashlib.sha256(words.data).hexdigest())


def _change(name: str, before: Tensor, after: Tensor) -> Floats:
    """Return each element's change in float64; 0 if the bits are equal, even of NaN or infinity."""
    before, after = before.detach().cpu(), after.detach().cpu()
    difference = torch.where(after == before, 0.0, after.double() - before.double())
    if not bool(torch.isfinite(difference).all()):
        text = f"the change of {name.removeprefix('model/')!r} is not finite"
        raise UserCodeError("FloatingPointError", text, activity="masking the update")
    change: Floats = difference.numpy()
    return change

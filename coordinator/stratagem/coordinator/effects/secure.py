"""Run the coordinator's side of secure aggregation: key exchange, unmasking, and the mean of a
round whose updates are masked.

The coordinator cannot read shares of secrets: each is sealed for one client. The clients sign their
keys; the coordinator passes keys on and signs none.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

import grpc.aio
import numpy as np

from stratagem.common.base.errors import InvalidInputError, StratagemError, UnavailableError, told
from stratagem.common.base.ids import Digest, WorkerId
from stratagem.common.job import JobSpec
from stratagem.common.privacy.masks import MaskedLayout, apply_mask
from stratagem.common.privacy.quantisation import Quantisation, Words
from stratagem.common.privacy.secrets import (
    KEY_BYTES,
    SEALED_BYTES,
    SecureRound,
    dropped_pair_key,
    public_of,
    self_mask_key,
)
from stratagem.common.privacy.sharing import (
    MIN_CLIENTS,
    RING_SEED_BYTES,
    SHARE_BYTES,
    neighbours,
    reconstruct,
    shares_needed,
)
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.status_codes import from_rpc_error
from stratagem.common.strategy.secure import SecureAggregation
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.core.effects import AggregateRound, PostKeys, RouteShares, SecureParty
from stratagem.coordinator.core.facts import (
    KeysPosted,
    LeftOut,
    RoundRestarted,
    RunFailed,
    SharesRouted,
)
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.effects.context import EffectContext, WorkerCalls
from stratagem.coordinator.effects.snapshot import stored_bytes
from stratagem.coordinator.store.blobs import BlobStore
from stratagem.coordinator.strategies.federated.ledgers import MAX_ATTEMPTS, cures
from stratagem.coordinator.strategies.federated.run import spec_of
from stratagem.coordinator.updates.floats import Raw, Wide, widen
from stratagem.coordinator.updates.reading import CheckedData, Source, StateReader
from stratagem.coordinator.updates.upload import SpoolEntry
from stratagem.v1 import worker_pb2 as pb

# ---- Requests to clients ----
#
# All clients of a round are asked for a step at once; the result says which have not answered. A
# client that refuses will refuse again. A client whose worker is away or does not answer may
# answer later, since the step then consists of the same bytes.

TIMEOUT_S: Final = 60.0
MAX_AT_ONCE: Final = 32
MAX_REASON_CHARS: Final = 300
_CAUSES: Final = {
    cause.value: cause for cause in (Cause.KEYS_LOST, Cause.REFUSED_BY_SITE, Cause.OUTSIDE_WINDOW)
}

Step = Callable[[int], pb.SecureRoundRequest]
"""Makes a step's request for a client; run, round and client are filled in later."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of clients to one step of secure aggregation: given, refused, or away."""

    given: dict[int, pb.SecureRoundResponse] = field(default_factory=dict)
    refused: dict[int, LeftOut] = field(default_factory=dict)
    away: dict[int, str] = field(default_factory=dict)
    """The reason why a client has not answered yet, keyed by client."""

    def left_out(self, may_leave_out: bool, num_needed: int) -> tuple[LeftOut, ...]:
        """Return the clients that the round goes on without. Raises UnavailableError if clients
        that may not be left out are away, or too few would remain."""
        if self.away and not (may_leave_out and len(self.given) >= num_needed):
            client, reason = min(self.away.items())
            more = f" and {len(self.away) - 1} more" if len(self.away) > 1 else ""
            raise UnavailableError(f"it waits for client {client}{more}: {reason}")
        absent = [
            LeftOut(client=client, reason=reason, cause=Cause.ABSENT)
            for client, reason in self.away.items()
        ]
        everybody = [*self.refused.values(), *absent]
        return tuple(sorted(everybody, key=lambda left_out: left_out.client))


async def ask(
    workers: WorkerCalls,
    effect: PostKeys | RouteShares | AggregateRound,
    party: SecureParty,
    clients: Sequence[int],
    step: Step,
    check: Callable[[int, pb.SecureRoundResponse], None],
) -> Answers:
    """Send a step's request to all of these clients, and return their answers. check: raises
    InvalidInputError if an answer does not fit the step; its client is then left out."""
    answers, worker_ids = Answers(), dict(party.workers)
    room = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(client: int) -> None:
        async with room:
            try:
                request = step(client)
                request.run_id, request.party = effect.run_id, effect.party
                request.round_num, request.attempt = effect.round_num, party.attempt
                request.client = client
                answer = await _asked(workers, worker_ids[client], request)
                if not answer.HasField("refused"):
                    check(client, answer)
            except InvalidInputError as error:
                answers.refused[client] = _left_out(client, str(error), Cause.LAYOUT)
            except StratagemError as error:
                answers.away[client] = told(error)
            else:
                if answer.HasField("refused"):
                    cause = _CAUSES.get(answer.refused.cause, Cause.REFUSED_BY_SITE)
                    answers.refused[client] = _left_out(client, answer.refused.reason, cause)
                else:
                    answers.given[client] = answer

    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(one(client))
    return answers


async def _asked(
    workers: WorkerCalls, worker_id: WorkerId, request: pb.SecureRoundRequest
) -> pb.SecureRoundResponse:
    """Return a worker's answer to one request. Raises UnavailableError while the worker is away."""
    worker = workers.runs.state.workers.get(worker_id)
    if worker is None or not worker.is_usable:
        raise UnavailableError(f"worker {worker_id} is not here")
    link = workers.link(worker.member)
    request.fence.CopyFrom(link.fence(0))
    try:
        answer: pb.SecureRoundResponse = await link.stub.SecureRound(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return answer


def _left_out(client: int, reason: str, cause: Cause) -> LeftOut:
    line = " ".join(reason.split())[:MAX_REASON_CHARS]
    return LeftOut(client=client, reason=line, cause=cause)


def by_client(shares: Sequence[pb.SealedShare]) -> Mapping[int, bytes]:
    return {share.client: share.sealed for share in shares}


# ---- PostKeys and RouteShares ----
#
# These effects gather the keys of a secure round and the shares of its secrets, in blobs that are
# durable before a fact names them.


async def post_keys(env: EffectContext, effect: PostKeys) -> None:
    """Have all clients post their public keys; report KeysPosted with the clients that did."""
    clients = [client for client, _ in effect.clients.workers]
    step = pb.PostKeys(
        job_json=env.workers.job_json(effect.run_id, effect.party),
        submitted_by=env.workers.submitter(effect.run_id),
    )

    def check(client: int, answer: pb.SecureRoundResponse) -> None:
        keys = answer.keys
        if (keys.client, len(keys.share_key), len(keys.mask_key)) != (client, KEY_BYTES, KEY_BYTES):
            raise InvalidInputError("the answer is no key of the client")

    def request(_client: int) -> pb.SecureRoundRequest:
        return pb.SecureRoundRequest(post_keys=step)

    answers = await ask(env.workers, effect, effect.clients, clients, request, check)
    spec = secure_spec(env.runs.job_of(effect.run_id, effect.party))
    num_needed = max(MIN_CLIENTS, shares_needed(spec.threshold, len(clients)))
    left_out = answers.left_out(effect.may_leave_out, num_needed)
    keys = [answer.keys for _, answer in sorted(answers.given.items())]
    data = pb.KeyDirectory(keys=keys).SerializeToString(deterministic=True)
    directory = await stored_bytes(env.transfers.blobs, data)
    failpoint("coordinator.secure.keys_gathered")
    fact = KeysPosted(
        party=effect.party,
        round_num=effect.round_num,
        attempt=effect.clients.attempt,
        clients=tuple(key.client for key in keys),
        left_out=left_out,
        directory=directory,
        ring_seed=secrets.token_hex(RING_SEED_BYTES),
    )
    await env.runs.report(effect.run_id, fact)


async def route_shares(env: EffectContext, effect: RouteShares) -> None:
    """Have the clients that posted keys share their secrets; report SharesRouted."""
    party, blobs = effect.clients, env.transfers.blobs
    spec = secure_spec(env.runs.job_of(effect.run_id, effect.party))
    seed = bytes.fromhex(party.ring_seed)
    around = neighbours(party.members, spec.degree, seed)
    keys = await asyncio.to_thread(directory_of, blobs, party.directory)

    def request(client: int) -> pb.SecureRoundRequest:
        neighbour_keys = [keys[other] for other in around[client]]
        step = pb.ShareSecrets(members=party.members, ring_seed=seed, neighbours=neighbour_keys)
        return pb.SecureRoundRequest(share_secrets=step)

    def check(client: int, answer: pb.SecureRoundResponse) -> None:
        sent = by_client(answer.shares.shares)
        if tuple(sorted(sent)) != around[client] or any(
            len(sealed) != SEALED_BYTES for sealed in sent.values()
        ):
            raise InvalidInputError("the answer is no share for each neighbour")

    clients = [client for client, _ in party.workers]
    answers = await ask(env.workers, effect, party, clients, request, check)
    num_needed = shares_needed(spec.threshold, len(party.members))
    left_out = answers.left_out(effect.may_leave_out, num_needed)
    shares = await stored_bytes(blobs, _routed(answers))
    failpoint("coordinator.secure.shares_gathered")
    fact = SharesRouted(
        party=effect.party,
        round_num=effect.round_num,
        attempt=party.attempt,
        clients=tuple(sorted(answers.given)),
        left_out=left_out,
        shares=shares,
    )
    await env.runs.report(effect.run_id, fact)


def secure_spec(job: JobSpec) -> SecureAggregation:
    """Return the secure aggregation settings of a job; the job must have them."""
    spec = spec_of(job).options.secure_aggregation
    assert spec is not None, "its updates are masked"
    return spec


def directory_of(blobs: BlobStore, digest: Digest) -> Mapping[int, pb.PostedKeys]:
    """Return the posted public keys, keyed by client; call this in a thread."""
    with blobs.open(digest) as file:
        directory = pb.KeyDirectory.FromString(file.read())
    return {keys.client: keys for keys in directory.keys}


def shares_for_each(blobs: BlobStore, digest: Digest) -> dict[int, dict[int, bytes]]:
    """Return the sealed shares, keyed by recipient, then sender; call this in a thread."""
    with blobs.open(digest) as file:
        routed = pb.RoutedShares.FromString(file.read())
    received: dict[int, dict[int, bytes]] = {}
    for sender in routed.senders:
        for share in sender.shares:
            received.setdefault(share.client, {})[sender.client] = share.sealed
    return received


def _routed(answers: Answers) -> bytes:
    senders = [
        pb.SentShares(client=client, shares=answer.shares.shares)
        for client, answer in sorted(answers.given.items())
    ]
    return pb.RoutedShares(senders=senders).SerializeToString(deterministic=True)


# ---- Masks in the sum ----


@dataclass(frozen=True, slots=True)
class OpenedMasks:
    """The masks that remain in the sum of a round's updates, and must be removed from it."""

    num_members: int
    keys: tuple[tuple[bytes, bool], ...] = field(repr=False)
    """The key of each mask, and True if the client had subtracted the mask."""

    def rule(self, job: JobSpec) -> Quantisation:
        """Return the rule that quantizes changes to integers in the round."""
        return secure_spec(job).quantisation(self.num_members)


def masked_manifest(job: JobSpec, model: Manifest, num_members: int) -> Manifest:
    """Return the manifest that every masked update of the round must have."""
    return MaskedLayout(model).manifest(secure_spec(job).quantisation(num_members))


# ---- Unmasking ----
#
# The survivors of a round sign the set of survivors and open the masks of their sum.
#
# The journal fixes the survivors before this begins (RoundClosed), so after a crash the same set
# is asked for the same bytes. Where too few can open, because keys were lost, the round is
# restarted. A client that has opened shares refuses a restart, and the run then ends with the
# client's reason.

Around = Mapping[int, Sequence[int]]


async def opened_masks(
    env: EffectContext, effect: AggregateRound
) -> OpenedMasks | RoundRestarted | RunFailed:
    """Unmask a round: return the masks that remain in the sum, or the fact to report if that failed
    for good. Raises UnavailableError while too few clients are here, and others may come back."""
    party, blobs = effect.secure, env.transfers.blobs
    spec = secure_spec(env.runs.job_of(effect.run_id, effect.party))
    assert party is not None
    around = neighbours(party.members, spec.degree, bytes.fromhex(party.ring_seed))
    survivors = [client for client, _ in party.workers]
    signed = await _signed(env.workers, effect, party, survivors)
    failpoint("coordinator.secure.signed")
    opening = _Opening(party, around, spec.threshold, survivors)
    if failed := opening.check(signed, effect, "sign whose updates are in the sum"):
        return failed
    sealed = await asyncio.to_thread(shares_for_each, blobs, party.shares)
    opened = await _opened(env.workers, effect, opening, signed, sealed)
    if failed := opening.check(opened, effect, "open their shares"):
        return failed
    failpoint("coordinator.secure.opened")
    keys = await asyncio.to_thread(directory_of, blobs, party.directory)
    of_round = SecureRound(effect.run_id, effect.party, effect.round_num, party.attempt)
    try:
        masks = await asyncio.to_thread(opening.masks, of_round, opened, keys)
    except (ValueError, InvalidInputError) as error:
        return RunFailed(reason=f"round {effect.round_num} cannot be unmasked: {error}")
    return OpenedMasks(len(party.members), masks)


class _Opening:
    """The unmasking of one round: who holds each client's shares, and how many are needed."""

    def __init__(
        self, party: SecureParty, around: Around, threshold: float, survivors: Sequence[int]
    ) -> None:
        self.party, self.around, self.survivors = party, around, survivors
        self._threshold = threshold

    def needed(self, client: int) -> int:
        return shares_needed(self._threshold, len(self.around[client]) + 1)

    def check(
        self, answers: Answers, effect: AggregateRound, what: str
    ) -> RoundRestarted | RunFailed | None:
        """Return None if enough clients answered; else the fact to report, a restart of the round
        or the failure of the run. Raises UnavailableError if clients that are away may still
        answer."""
        lacking = self._lacking(answers.given.keys())
        if lacking is None:
            return None
        num, needed = lacking
        count = f"{num} clients {what}, and {needed} are needed"
        if self._lacking(answers.given.keys() | answers.away.keys()) is None:
            raise UnavailableError(f"{count}: {min(answers.away.items())[1]}")
        first = min(answers.refused.values(), key=lambda refusal: refusal.client)
        reason = f"round {effect.round_num} cannot be unmasked: {count}"
        reason += f" (client {first.client}: {first.reason})"
        return _after(reason, answers.refused, effect, self.party)

    def masks(
        self,
        of_round: SecureRound,
        opened: Answers,
        keys: Mapping[int, pb.PostedKeys],
    ) -> tuple[tuple[bytes, bool], ...]:
        """Reconstruct the clients' secrets, and return the masks that remain in the sum; call this
        in a thread. Raises ValueError or InvalidInputError for shares of another secret."""
        held: dict[int, dict[int, bytes]] = {client: {} for client in self.party.routed}
        alive = set(self.survivors)
        for holder, answer in opened.given.items():
            for share in answer.opened.shares:
                held[share.client][holder + 1] = share.share
        masks = []
        for client, shares in held.items():
            secret = reconstruct(shares, self.needed(client), KEY_BYTES)
            if client in alive:
                masks.append((self_mask_key(of_round, client, secret), False))
                continue
            if public_of(secret) != keys[client].mask_key:
                raise ValueError(f"the shares of client {client} are not those of its key")
            for other in self.around[client]:
                if other in alive:
                    key = dropped_pair_key(of_round, client, secret, other, keys[other].mask_key)
                    masks.append((key, client < other))
        return tuple(masks)

    def _lacking(self, present: AbstractSet[int]) -> tuple[int, int] | None:
        """Return, for the first client whose secret cannot be reconstructed, the number of share
        holders present and the number needed; None if all can be."""
        for client in self.party.routed:
            holders = {*self.around[client], client}
            if len(holders & set(present)) < self.needed(client):
                return len(holders & set(present)), self.needed(client)
        return None


def _after(
    reason: str, refused: Mapping[int, LeftOut], effect: AggregateRound, party: SecureParty
) -> RoundRestarted | RunFailed:
    attempt = party.attempt + 1
    if attempt < MAX_ATTEMPTS and any(cures(refusal.cause) for refusal in refused.values()):
        return RoundRestarted(
            party=effect.party, round_num=effect.round_num, attempt=attempt, reason=reason
        )
    return RunFailed(reason=reason)


async def _signed(
    workers: WorkerCalls, effect: AggregateRound, party: SecureParty, survivors: Sequence[int]
) -> Answers:
    step = pb.SignSurvivors(survivors=survivors)

    def check(client: int, answer: pb.SecureRoundResponse) -> None:
        if not answer.HasField("signature") or answer.signature.client != client:
            raise InvalidInputError("the answer is no signature")

    return await ask(
        *(workers, effect, party, survivors),
        lambda _client: pb.SecureRoundRequest(sign_survivors=step),
        check,
    )


async def _opened(
    workers: WorkerCalls,
    effect: AggregateRound,
    opening: _Opening,
    signed: Answers,
    sealed: Mapping[int, Mapping[int, bytes]],
) -> Answers:
    alive, routed = set(opening.survivors), set(opening.party.routed)

    def request(client: int) -> pb.SecureRoundRequest:
        others = opening.around[client]
        step = pb.OpenShares(
            survivors=opening.survivors,
            signatures=[signed.given[c].signature for c in others if c in signed.given],
            shares=[
                pb.SealedShare(client=sender, sealed=data)
                for sender, data in sorted(sealed.get(client, {}).items())
                if sender in routed
            ],
        )
        return pb.SecureRoundRequest(open_shares=step)

    def check(client: int, answer: pb.SecureRoundResponse) -> None:
        wanted = {other for other in opening.around[client] if other in routed} | {client}
        given = {share.client: share for share in answer.opened.shares}
        if given.keys() != wanted or any(
            len(share.share) != SHARE_BYTES or share.is_of_mask_key is (other in alive)
            for other, share in given.items()
        ):
            raise InvalidInputError("the answer is no share of each neighbour")

    clients = sorted(signed.given)
    return await ask(workers, effect, opening.party, clients, request, check)


# ---- Mean ----
#
# The mean change of a round whose updates are masked is added, window by window, to the base of
# the round:
#
#     sum  = Σ y_k - Σ self masks of the survivors - Σ pair masks with those that dropped out
#     next = w_global + sum / (s · Σ weights)                         in float64
#
# The sum is modulo 2^32 or 2^64, so it is exact in any order. The last element is the sum of the
# weights; it also shows whether the masks are gone. Integers and bools are those of the base.

_WINDOW_ELEMENTS: Final = 1 << 18

MaskKeys = Sequence[tuple[bytes, bool]]
"""The key of each mask that remains in the sum, and True if the client had subtracted the mask."""


class SumError(StratagemError):
    """The unmasked sum of the updates has a value that no updates of clients can have."""


class SecureMean:
    """A fold rule for secure rounds: turns the sum of masked changes into the next state."""

    def __init__(
        self,
        entries: Sequence[SpoolEntry],
        masks: MaskKeys,
        rule: Quantisation,
        model: Manifest,
        base: StateReader,
    ) -> None:
        """Unmask the sum of the weights. Raises SumError if it shows that masks remain."""
        self._updates = [CheckedData(entry) for entry in entries]
        self._masks, self._rule, self._base = masks, rule, base
        self._layout = MaskedLayout(model)
        self.window_elements = _WINDOW_ELEMENTS
        signed = self._sum(self._layout.num_elements, 1).view(f"<i{rule.word.itemsize}")
        self._sum_of_weights = int(signed[0])
        least, most = len(entries), len(entries) * rule.max_weight
        if not least <= self._sum_of_weights <= most:
            raise SumError(
                "the sum of the weights is none of these clients: masks are left in it, as a "
                "client has masked its update otherwise than it has said"
            )

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        """Fill `out` with the next state from that byte offset on; `raw` is scratch."""
        total = self._sum(self._layout.place(offset), out.size)
        try:
            change = self._rule.mean(total, self._sum_of_weights)
        except ValueError as error:
            raise SumError(f"{error}: a client has sent what no client can") from None
        raw[:] = self._base.read_raw(dtype, offset, raw.size)
        widen(dtype, raw, out)
        out += change

    def integers(self, sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        """Fill `out` with the integers or bools of the base state, unchanged."""
        out[:] = self._base.read_raw(dtype, offset, out.size)
        return ""

    def _sum(self, place: int, num: int) -> Words:
        """Return the unmasked sum of num elements, from element `place` on."""
        word = self._rule.word
        total: Words = np.zeros(num, word)
        for update in self._updates:
            total += update.read(place * word.itemsize, num, word.str)
        for key, was_subtracted in self._masks:
            apply_mask(key, place, total, subtract=not was_subtracted)
        return total

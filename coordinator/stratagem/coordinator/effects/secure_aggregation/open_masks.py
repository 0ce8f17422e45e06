"""Has the survivors of a secure round sign who they are, and open the masks of their sum.

Who survives is in the journal before this begins (RoundClosed), so after a crash the same set is
asked for the same bytes. Where too few can open, because keys were lost, the round is restarted:
a client that has opened shares refuses that, and the run ends with its sentence.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from stratagem.common.base.errors import InvalidInputError, UnavailableError
from stratagem.common.process.failpoints import failpoint
from stratagem.common.secure.secrets import (
    KEY_BYTES,
    SecureRound,
    dropped_pair_key,
    public_of,
    self_mask_key,
)
from stratagem.common.secure.sharing import SHARE_BYTES, neighbours, reconstruct, shares_needed
from stratagem.coordinator.core.effects import AggregateRound, SecureParty
from stratagem.coordinator.core.facts import LeftOut, RoundRestarted, RunFailed
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.secure_aggregation.ask_clients import Answers, ask
from stratagem.coordinator.effects.secure_aggregation.exchange_keys import (
    directory_of,
    secure_spec,
    shares_for_each,
)
from stratagem.coordinator.effects.secure_aggregation.masked_sum import OpenedMasks
from stratagem.coordinator.strategies.secure_aggregation.secure_setup import MAX_ATTEMPTS, cures
from stratagem.v1 import worker_pb2 as pb

Around = Mapping[int, Sequence[int]]


async def opened_masks(
    env: EffectContext, effect: AggregateRound
) -> OpenedMasks | RoundRestarted | RunFailed:
    """Return the masks that are left in the sum; or the fact that follows where they cannot be
    opened. Raises UnavailableError while too few are here, and may come back."""
    party, spec = effect.secure, secure_spec(env, effect)
    assert party is not None
    around = neighbours(party.members, spec.degree, bytes.fromhex(party.ring_seed))
    survivors = [client for client, _ in party.workers]
    signed = await _signed(env, effect, party, survivors)
    failpoint("coordinator.secure.signed")
    opening = _Opening(party, around, spec.threshold, survivors)
    if failed := opening.check(signed, effect, "sign whose updates are in the sum"):
        return failed
    sealed = await env.in_thread(lambda: shares_for_each(env, party.shares))
    opened = await _opened(env, effect, opening, signed, sealed)
    if failed := opening.check(opened, effect, "open their shares"):
        return failed
    failpoint("coordinator.secure.opened")
    keys = await env.in_thread(lambda: directory_of(env, party.directory))
    of_round = SecureRound(effect.run_id, effect.party, effect.round_num, party.attempt)
    try:
        masks = await env.in_thread(lambda: opening.masks(of_round, opened, keys))
    except (ValueError, InvalidInputError) as error:
        return RunFailed(reason=f"round {effect.round_num} cannot be unmasked: {error}")
    return OpenedMasks(len(party.members), masks)


class _Opening:
    """Who holds shares of whom in one round, and how many are needed."""

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
        """Return what follows where too few have answered for good; None where enough have. Raises
        UnavailableError where those that are away may still answer."""
        lacking = self._lacking(answers.given.keys())
        if lacking is None:
            return None
        num, needed = lacking
        count = f"{num} clients {what}, and {needed} are needed"
        if self._lacking(answers.given.keys() | answers.away.keys()) is None:
            raise UnavailableError(f"{count}: {min(answers.away.items())[1]}")
        first = min(answers.refused.values(), key=lambda each: each.client)
        reason = f"round {effect.round_num} cannot be unmasked: {count}"
        reason += f" (client {first.client}: {first.reason})"
        return _after(reason, answers.refused, effect, self.party)

    def masks(
        self,
        of_round: SecureRound,
        opened: Answers,
        keys: Mapping[int, pb.PostedKeys],
    ) -> tuple[tuple[bytes, bool], ...]:
        """Return the masks left in the sum; for a thread. Raises ValueError or InvalidInputError
        for shares that are of no such secret."""
        held: dict[int, dict[int, bytes]] = {client: {} for client in self.party.routed}
        alive = set(self.survivors)
        for holder, answer in opened.given.items():
            for share in answer.opened.shares:
                held[share.client][holder + 1] = share.share
        found = []
        for client, shares in held.items():
            secret = reconstruct(shares, self.needed(client), KEY_BYTES)
            if client in alive:
                found.append((self_mask_key(of_round, client, secret), False))
                continue
            if public_of(secret) != keys[client].mask_key:
                raise ValueError(f"the shares of client {client} are not those of its key")
            for other in self.around[client]:
                if other in alive:
                    key = dropped_pair_key(of_round, client, secret, other, keys[other].mask_key)
                    found.append((key, client < other))
        return tuple(found)

    def _lacking(self, present: AbstractSet[int]) -> tuple[int, int] | None:
        """Return how many holders of a secret have answered, and how many it takes, of a client
        for which they are too few."""
        for client in self.party.routed:
            holders = {*self.around[client], client}
            if len(holders & set(present)) < self.needed(client):
                return len(holders & set(present)), self.needed(client)
        return None


def _after(
    reason: str, refused: Mapping[int, LeftOut], effect: AggregateRound, party: SecureParty
) -> RoundRestarted | RunFailed:
    attempt = party.attempt + 1
    if attempt < MAX_ATTEMPTS and any(cures(each.cause) for each in refused.values()):
        return RoundRestarted(
            party=effect.party, round_num=effect.round_num, attempt=attempt, reason=reason
        )
    return RunFailed(reason=reason)


async def _signed(
    env: EffectContext, effect: AggregateRound, party: SecureParty, survivors: Sequence[int]
) -> Answers:
    step = pb.SignSurvivors(survivors=survivors)

    def check(client: int, answer: pb.SecureRoundResponse) -> None:
        if not answer.HasField("signature") or answer.signature.client != client:
            raise InvalidInputError("the answer is no signature")

    return await ask(
        *(env, effect, party, survivors),
        lambda _client: pb.SecureRoundRequest(sign_survivors=step),
        check,
    )


async def _opened(
    env: EffectContext,
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
    return await ask(env, effect, opening.party, clients, request, check)

"""PostKeys and RouteShares: gather the keys of a secure round, and the shares of its secrets.

What is gathered is a blob before the fact names it. The coordinator can read no share: each is
sealed for one client. It passes on the keys that clients have signed, and signs none.
"""

import secrets
from collections.abc import Mapping

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Digest
from stratagem.common.process.failpoints import failpoint
from stratagem.common.secure.secrets import KEY_BYTES, SEALED_BYTES
from stratagem.common.secure.sharing import MIN_CLIENTS, RING_SEED_BYTES, neighbours, shares_needed
from stratagem.common.strategy.secure import SecureAggregation
from stratagem.coordinator.core.effects import AggregateRound, PostKeys, RouteShares
from stratagem.coordinator.core.facts import KeysPosted, SharesRouted
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.effects.execution.stored_bytes import stored_bytes
from stratagem.coordinator.effects.secure_aggregation.ask_clients import Answers, ask, by_client
from stratagem.coordinator.strategies.federated.federated_run import spec_of
from stratagem.v1 import worker_pb2 as pb


async def exchange(env: EffectContext, effect: PostKeys | RouteShares) -> None:
    """Perform one of the two, and report what has come."""
    if isinstance(effect, PostKeys):
        await _post_keys(env, effect)
    else:
        await _route_shares(env, effect)


async def _post_keys(env: EffectContext, effect: PostKeys) -> None:
    """Have all clients post keys, and report KeysPosted with those that have."""
    clients = [client for client, _ in effect.clients.workers]
    step = pb.PostKeys(
        job_json=env.job_json(effect.run_id, effect.party),
        submitted_by=env.state.runs[effect.run_id].submitted_by.replace(" ", "/", 1),
    )

    def check(client: int, answer: pb.SecureRoundResponse) -> None:
        keys = answer.keys
        if (keys.client, len(keys.share_key), len(keys.mask_key)) != (client, KEY_BYTES, KEY_BYTES):
            raise InvalidInputError("the answer is no key of the client")

    def request(_client: int) -> pb.SecureRoundRequest:
        return pb.SecureRoundRequest(post_keys=step)

    answers = await ask(env, effect, effect.clients, clients, request, check)
    left_out = answers.left_out(effect.may_leave_out, _num_needed(env, effect, len(clients)))
    keys = [answer.keys for _, answer in sorted(answers.given.items())]
    data = pb.KeyDirectory(keys=keys).SerializeToString(deterministic=True)
    directory = await stored_bytes(env, data)
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
    await env.report(effect.run_id, fact)


async def _route_shares(env: EffectContext, effect: RouteShares) -> None:
    """Have all clients that have posted keys share their secrets, and report SharesRouted."""
    party, spec = effect.clients, secure_spec(env, effect)
    seed = bytes.fromhex(party.ring_seed)
    around = neighbours(party.members, spec.degree, seed)
    keys = await env.in_thread(lambda: directory_of(env, party.directory))

    def request(client: int) -> pb.SecureRoundRequest:
        own = [keys[other] for other in around[client]]
        step = pb.ShareSecrets(members=party.members, ring_seed=seed, neighbours=own)
        return pb.SecureRoundRequest(share_secrets=step)

    def check(client: int, answer: pb.SecureRoundResponse) -> None:
        sent = by_client(answer.shares.shares)
        if tuple(sorted(sent)) != around[client] or any(
            len(sealed) != SEALED_BYTES for sealed in sent.values()
        ):
            raise InvalidInputError("the answer is no share for each neighbour")

    clients = [client for client, _ in party.workers]
    answers = await ask(env, effect, party, clients, request, check)
    num_needed = shares_needed(spec.threshold, len(party.members))
    left_out = answers.left_out(effect.may_leave_out, num_needed)
    data = _routed(answers)
    shares = await stored_bytes(env, data)
    failpoint("coordinator.secure.shares_gathered")
    fact = SharesRouted(
        party=effect.party,
        round_num=effect.round_num,
        attempt=party.attempt,
        clients=tuple(sorted(answers.given)),
        left_out=left_out,
        shares=shares,
    )
    await env.report(effect.run_id, fact)


def secure_spec(
    env: EffectContext, effect: PostKeys | RouteShares | AggregateRound
) -> SecureAggregation:
    """Return the section of the effect's job."""
    spec = spec_of(env.job_of(effect.run_id, effect.party)).options.secure_aggregation
    assert spec is not None, "the effect is of a job with it"
    return spec


def directory_of(env: EffectContext, digest: Digest) -> Mapping[int, pb.PostedKeys]:
    """Return the posted keys by client; for a thread."""
    with env.blobs.open(digest) as file:
        directory = pb.KeyDirectory.FromString(file.read())
    return {keys.client: keys for keys in directory.keys}


def shares_for_each(env: EffectContext, digest: Digest) -> dict[int, dict[int, bytes]]:
    """Return the sealed shares by the client that they are for, then by sender; for a thread."""
    with env.blobs.open(digest) as file:
        routed = pb.RoutedShares.FromString(file.read())
    received: dict[int, dict[int, bytes]] = {}
    for sender in routed.senders:
        for share in sender.shares:
            received.setdefault(share.client, {})[sender.client] = share.sealed
    return received


def _num_needed(env: EffectContext, effect: PostKeys, num_clients: int) -> int:
    spec = secure_spec(env, effect)
    return max(MIN_CLIENTS, shares_needed(spec.threshold, num_clients))


def _routed(answers: Answers) -> bytes:
    senders = [
        pb.SentShares(client=client, shares=answer.shares.shares)
        for client, answer in sorted(answers.given.items())
    ]
    return pb.RoutedShares(senders=senders).SerializeToString(deterministic=True)

"""A coordinator that asks for anything, in any order: it is refused, and never learns both secrets
of a client, nor two consents."""

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Party
from stratagem.common.privacy.secrets import SEALED_BYTES, SecureRound
from stratagem.v1 import worker_pb2 as pb
from tests.worker.federated.round_of_clients import SEED, RoundOfClients

ALL = (0, 1, 2, 3)
numbers = st.lists(st.integers(0, 6) | st.integers(0, 2**32 - 1), max_size=6)
some = st.sampled_from([ALL, (0, 1, 2), (0, 1, 3), (1, 2, 3)]) | st.lists(
    st.sampled_from(ALL), max_size=5
)
texts = st.sampled_from([b"", b"\0", SEED, bytes(SEALED_BYTES)]) | st.binary(max_size=8)


def keys_of(client: int, share: bytes, mask: bytes, identity: bytes, sign: bytes) -> pb.PostedKeys:
    return pb.PostedKeys(
        client=client,
        share_key=share,
        mask_key=mask,
        identity=identity,
        issuers=[identity],
        signature=sign,
    )


clients = st.integers(0, 2**32 - 1)
keys = st.lists(st.builds(keys_of, clients, texts, texts, texts, texts), max_size=4)
signatures = st.lists(
    st.builds(lambda c, s: pb.SurvivorSignature(client=c, signature=s), clients, texts), max_size=4
)
sealed = st.lists(
    st.builds(lambda c, s: pb.SealedShare(client=c, sealed=s), clients, texts), max_size=4
)
steps = st.one_of(
    st.builds(
        lambda text: {"post_keys": pb.PostKeys(job_json=text)},
        st.sampled_from(["", "{", "[]", "null", '{"strategy": 3}']) | st.text(max_size=20),
    ),
    st.builds(
        lambda m, s, k: {"share_secrets": pb.ShareSecrets(members=m, ring_seed=s, neighbours=k)},
        numbers,
        texts,
        keys,
    ),
    st.builds(lambda s: {"sign_survivors": pb.SignSurvivors(survivors=s)}, numbers),
    st.builds(
        lambda s, g, e: {"open_shares": pb.OpenShares(survivors=s, signatures=g, shares=e)},
        numbers,
        signatures,
        sealed,
    ),
)


def answered(
    round_of: RoundOfClients, client: int, step: Mapping[str, Any]
) -> pb.SecureRoundResponse:
    """The answer to a step; an empty one for what is no request."""
    try:
        return round_of.ask(client, **step)
    except InvalidInputError:
        return pb.SecureRoundResponse()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ALL), steps), min_size=1, max_size=5))
def test_whatever_is_asked_of_a_client_that_has_shared_gets_an_answer(
    asked: list[tuple[int, dict[str, Any]]],
) -> None:
    """Neither an exception of another kind, nor a share, nor a consent: none has sent an update."""
    round_of = RoundOfClients.of()
    round_of.shares()
    for client, step in asked:
        answer = answered(round_of, client, step)
        assert not answer.HasField("opened")
        assert not answer.HasField("signature")


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ALL), some, some, st.booleans()), min_size=8, max_size=24)
)
def test_no_order_of_steps_opens_both_secrets_of_a_client(
    asked: list[tuple[int, Sequence[int], Sequence[int], bool]],
) -> None:
    """The coordinator knows all shares, and collects consents to any sets: one set is signed by
    each client, and of each client one secret is opened."""
    round_of = RoundOfClients.of(threshold=0.67)
    shares = round_of.shares()
    of_round = SecureRound("run", Party(""), 1, 0)
    job = round_of.job.canonical_json()
    for client, worker in round_of.workers.items():
        worker.masking(of_round, client, job, ALL)
        worker.keep_update(of_round, client, ALL, f"update {client}")
    consents: dict[int, dict[tuple[int, ...], pb.SurvivorSignature]] = {c: {} for c in ALL}
    secrets: dict[int, set[bool]] = {client: set() for client in ALL}
    for client, first, second, opens in asked:
        for drawn in (tuple(sorted(set(first))), tuple(sorted(set(second)))):
            step = pb.SignSurvivors(survivors=drawn)
            answer = answered(round_of, client, {"sign_survivors": step})
            if answer.HasField("signature"):
                consents[client][drawn] = answer.signature
            if not opens:
                continue
            given_ = [own[drawn] for own in consents.values() if drawn in own]
            opening = round_of.open_step(client, drawn, given_, shares)
            answer = answered(round_of, client, {"open_shares": opening})
            for share in answer.opened.shares:
                secrets[share.client].add(share.is_of_mask_key)
    assert all(len(own) <= 1 for own in consents.values())
    assert all(len(opened) <= 1 for opened in secrets.values())

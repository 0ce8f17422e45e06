"""What a client does in a secure round once, what it repeats, and what it refuses to anybody."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stratagem.common.base.errors import InvalidInputError, KeysLostError, RefusedBySiteError
from stratagem.common.base.ids import Party
from stratagem.common.privacy.secrets import SecureRound
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.federated.secure_client import masked_update
from tests.worker.federated.round_of_clients import (
    SEED,
    RoundOfClients,
    secure_job,
    worker,
)

ALL = (0, 1, 2, 3)
BASE = {"model/w": torch.zeros(3), "model/n": torch.tensor(4)}


def of_round(clients: RoundOfClients) -> SecureRound:
    return SecureRound("run", Party(""), clients.round_num, clients.attempt)


def send(clients: RoundOfClients, client: int, value: float, routed: tuple[int, ...] = ALL) -> str:
    """Mask an update of one number and have it leave."""
    rounds, own = clients.workers[client], of_round(clients)
    masking = rounds.masking(own, client, clients.job.canonical_json(), routed)
    trained = {"model/w": torch.full((3,), value), "model/n": torch.tensor(9)}
    masked = masked_update(BASE, trained, masking, 1)
    rounds.keep_update(own, client, routed, masked.digest)
    return masked.digest


def unsigned(clients: RoundOfClients) -> str:
    """Why the first client does not sign that all survive."""
    return clients.refusal(0, sign_survivors=pb.SignSurvivors(survivors=ALL))


def sent(clients: RoundOfClients) -> dict[int, dict[int, bytes]]:
    """All have shared, and have sent their update; the sealed shares."""
    shares = clients.shares()
    for client in clients.workers:
        send(clients, client, float(client))
    return shares


def test_the_masks_of_all_cancel_but_for_the_self_masks() -> None:
    clients = RoundOfClients.of()
    clients.shares()
    total, alone = np.zeros(4, "<u4"), []
    for client in ALL:
        own, text = of_round(clients), clients.job.canonical_json()
        masking = clients.workers[client].masking(own, client, text, ALL)
        trained = {"model/w": torch.full((3,), 1.0), "model/n": torch.tensor(4)}
        without_own = replace(masking, masks=masking.masks[1:])
        for masks in (masking, without_own):
            update = masked_update(BASE, trained, masks, 1).tensors["masked"].numpy().view("<u4")
            alone.append(update)
        total += alone[-1]
    one = int(np.rint(masking.rule.scale))
    assert total.tolist() == [4 * one, 4 * one, 4 * one, 4]
    assert not any(np.array_equal(each, [one, one, one, 1]) for each in alone)


@pytest.mark.parametrize("is_durable", [True, False])
def test_every_step_is_answered_with_the_same_bytes_also_after_a_restart(
    tmp_path: Path, is_durable: bool
) -> None:
    clients = RoundOfClients.of(4, tmp_path if is_durable else None)
    shares = sent(clients)
    signatures = [clients.sign(client, ALL) for client in ALL]
    step = clients.open_step(0, ALL, signatures, shares)
    before = clients.keys()[0], clients.ask(0, open_shares=step)
    if is_durable:
        clients.workers = {**clients.workers, 0: worker(0, tmp_path)}
    assert (clients.keys()[0], clients.ask(0, open_shares=step)) == before
    assert clients.shares() == shares
    assert clients.sign(0, ALL) == signatures[0]
    assert send(clients, 0, 0.0)


def test_a_worker_that_has_lost_its_keys_says_so(tmp_path: Path) -> None:
    clients = RoundOfClients.of()
    clients.shares()
    clients.workers = {**clients.workers, 0: worker(0)}
    told = unsigned(clients)
    assert told.startswith("keys_lost: the worker of client 0 has no keys of round 1, attempt 0")
    with pytest.raises(KeysLostError):
        send(clients, 0, 1.0)
    damaged = tmp_path / "secure-0"
    damaged.mkdir()
    (damaged / "a.secret").write_text("{")
    clients.workers = {**clients.workers, 0: worker(0, tmp_path)}
    assert "keys_lost" in unsigned(clients)


def test_secrets_are_on_disk_for_their_owner_alone_and_gone_with_the_run(
    tmp_path: Path,
) -> None:
    clients = RoundOfClients.of(4, tmp_path)
    clients.shares()
    (file,) = (tmp_path / "secure-0").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(json.loads(file.read_text())["root"]) == 64
    clients.workers[0].forget_run("run")
    assert json.loads(file.read_text())["root"] == ""
    assert "keys_lost" in clients.refusal(0, post_keys=clients.post_step())


def test_a_second_update_under_the_same_masks_and_one_that_is_not_finite_do_not_leave() -> None:
    clients = RoundOfClients.of()
    clients.shares()
    with pytest.raises(Exception, match="the change of 'w' is not finite"):
        send(clients, 0, float("nan"))
    assert send(clients, 0, 1.0) == send(clients, 0, 1.0)
    with pytest.raises(RefusedBySiteError, match="got other numbers"):
        send(clients, 0, 1.5)
    with pytest.raises(RefusedBySiteError, match="against other clients already"):
        send(clients, 0, 1.0, (0, 1, 2))


def test_a_round_is_opened_for_one_set_of_survivors_and_in_one_attempt() -> None:
    clients = RoundOfClients.of()
    shares = sent(clients)
    three = (0, 1, 2)
    signatures = [clients.sign(client, three) for client in three]
    told = unsigned(clients)
    assert "has signed another set of survivors" in told
    answer = clients.ask(0, open_shares=clients.open_step(0, three, signatures, shares))
    kinds = {share.client: share.is_of_mask_key for share in answer.opened.shares}
    assert kinds == {0: False, 1: False, 2: False, 3: True}
    told = clients.refusal(0, open_shares=clients.open_step(0, ALL, signatures, shares))
    assert "has not signed this set" in told
    clients.attempt = 1
    told = clients.refusal(0, post_keys=clients.post_step())
    assert "has opened its shares of round 1" in told
    assert clients.ask(3, post_keys=clients.post_step()).HasField("keys")
    clients.round_num, clients.attempt = 2, 0
    assert clients.ask(0, post_keys=clients.post_step()).HasField("keys")
    clients.round_num = 1
    assert "opened" in clients.refusal(0, post_keys=clients.post_step())


def test_shares_open_only_for_enough_right_signatures() -> None:
    clients = RoundOfClients.of()
    shares = sent(clients)
    signatures = [clients.sign(client, ALL) for client in ALL]
    forged = pb.SurvivorSignature(client=2, signature=signatures[1].signature)
    foreign = pb.SurvivorSignature(client=9, signature=b"")
    few = "2 clients have signed the survivors, and 3 are needed"
    for signed, given, said in (
        (signatures[:2], shares, few),
        ([signatures[1], forged], shares, f"{few}; client 2 has not signed"),
        ([*signatures, foreign], shares, "client 9 is of no neighbour"),
        (signatures, {0: {1: shares[0][1]}}, "not those of the client's neighbours"),
        (signatures, {0: {**shares[0], 1: shares[0][2]}}, "client 1 is not what that client has s"),
    ):
        assert said in clients.refusal(0, open_shares=clients.open_step(0, ALL, signed, given))
    one_wrong = [signatures[1], forged, signatures[3]]  # of a site that ends no round of others
    for signed in (one_wrong, signatures):
        answer = clients.ask(0, open_shares=clients.open_step(0, ALL, signed, shares))
        assert answer.HasField("opened")


def test_keys_of_others_must_be_signed_for_this_round_and_be_different() -> None:
    clients = RoundOfClients.of()
    keys, unsigned_keys = clients.keys(), "client 1 has not signed its keys for this round"
    other = pb.PostedKeys.FromString(keys[1].SerializeToString())
    other.mask_key = keys[2].mask_key
    assert unsigned_keys in unshared(clients, {**keys, 1: other})
    other.CopyFrom(keys[1])
    other.identity = b"short"
    assert "client 1 has no Ed25519 key" in unshared(clients, {**keys, 1: other})
    clients.attempt = 1
    later = {client: clients.ask(client, post_keys=clients.post_step()).keys for client in ALL}
    assert unsigned_keys in unshared(clients, {**later, 1: keys[1]})
    step = clients.share_step(0, {c: later[c] for c in (0, 1, 2)})
    step.neighbours[1].CopyFrom(later[3])
    assert "not those of the client's neighbours" in clients.refusal(0, share_secrets=step)


def unshared(clients: RoundOfClients, keys: Mapping[int, pb.PostedKeys]) -> str:
    """Why the first client shares no secrets with those that have these keys."""
    return clients.refusal(0, share_secrets=clients.share_step(0, keys))


def test_what_the_round_is_made_of_is_checked_against_the_job() -> None:
    clients = RoundOfClients.of()
    keys = clients.keys()
    assert "2 clients are fewer than 3" in unshared(clients, {c: keys[c] for c in (0, 1)})
    assert "members: is no increasing list" in unshared(clients, {c: keys[c] for c in (1, 2, 3)})
    short = clients.share_step(0, keys)
    short.ring_seed = SEED[:4]
    assert "ring_seed: has 4 bytes" in clients.refusal(0, share_secrets=short)
    assert "has shared no secrets" in unsigned(clients)
    first = clients.ask(0, share_secrets=clients.share_step(0, keys))
    assert first.HasField("shares")
    assert "among other clients already" in unshared(clients, {c: keys[c] for c in (0, 1, 2)})
    assert "has sent no update" in unsigned(clients)
    other = replace(clients, job=secure_job(5))
    assert "keys for another job" in other.refusal(0, post_keys=other.post_step())


def test_sums_of_few_are_neither_masked_for_nor_signed() -> None:
    clients = RoundOfClients.of()
    clients.shares()
    with pytest.raises(RefusedBySiteError, match="2 of 4 clients have shared their secrets"):
        send(clients, 0, 1.0, (0, 1))
    with pytest.raises(RefusedBySiteError, match="were not routed"):
        send(clients, 0, 1.0, (1, 2, 3))
    with pytest.raises(InvalidInputError, match="routed: is no increasing list"):
        send(clients, 0, 1.0, (0, 1, 1, 2))
    send(clients, 0, 1.0)
    for survivors, reason in (
        ((0, 1), "2 of 4 clients survive, and 3 are needed"),
        ((1, 2, 3), "client 0 is not among the survivors"),
        ((0, 1, 2, 7), "survivors: is no increasing list"),
    ):
        step = pb.SignSurvivors(survivors=survivors)
        assert reason in clients.refusal(0, sign_survivors=step)


def test_a_job_without_the_section_has_no_keys_to_post() -> None:
    clients = RoundOfClients.of()
    plain = clients.job.canonical_json().replace('"secure_aggregation":{}', '"quorum":2')
    told = clients.refusal(0, post_keys=pb.PostKeys(job_json=plain))
    assert "the job has no secure_aggregation" in told
    with pytest.raises(InvalidInputError, match="step: is missing"):
        clients.ask(0)
    clients.attempt = 5000
    with pytest.raises(InvalidInputError, match="attempt: 5000 is not in"):
        clients.ask(0, post_keys=clients.post_step())

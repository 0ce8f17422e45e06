"""A client's secrets follow from its root; shares open for the one they are sealed for alone."""

from dataclasses import replace
from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Party
from stratagem.common.privacy.secrets import (
    SEALED_BYTES,
    ClientSecrets,
    SecureRound,
    dropped_pair_key,
    public_of,
    self_mask_key,
)
from stratagem.common.privacy.sharing import reconstruct

ROUND = SecureRound("run", Party(""), 3, 0)
CONTEXT = b"who the holders are"


def secrets_of(client: int, of_round: SecureRound = ROUND) -> ClientSecrets:
    return ClientSecrets(of_round, client, bytes([client]) * 32)


ALL = {client: secrets_of(client) for client in range(4)}
SHARE_KEYS = {client: each.public.share_key for client, each in ALL.items()}


def sealed_by(client: int, context: bytes = CONTEXT) -> dict[int, bytes]:
    others = {other: key for other, key in SHARE_KEYS.items() if other != client}
    return ALL[client].sealed_shares(others, 3, context)


def test_two_clients_have_one_mask_in_common_and_repeat_their_bytes() -> None:
    one, two = ALL[1], ALL[2]
    key = one.pair_mask_key(2, two.public.mask_key)
    assert key == two.pair_mask_key(1, one.public.mask_key)
    assert key != one.pair_mask_key(3, ALL[3].public.mask_key)
    assert key != one.pair_mask_key(3, two.public.mask_key)
    assert secrets_of(1).public == ALL[1].public
    assert sealed_by(1) == sealed_by(1)
    assert {len(each) for each in sealed_by(1).values()} == {SEALED_BYTES}


def test_another_round_has_other_keys_from_the_same_root() -> None:
    changes: list[dict[str, Any]] = [
        *({"run_id": "other"}, {"party": Party("a")}, {"round_num": 4}, {"attempt": 1})
    ]
    for change in changes:
        here, there = ALL[1], secrets_of(1, replace(ROUND, **change))
        assert here.public.share_key != there.public.share_key
        assert here.public.mask_key != there.public.mask_key
        assert here.self_mask_key != there.self_mask_key


def test_the_holders_shares_open_the_self_mask_and_the_mask_key() -> None:
    sealed = sealed_by(0)
    shares = {
        holder: ALL[holder].opened(0, SHARE_KEYS[0], sealed[holder], CONTEXT)
        for holder in (1, 2, 3)
    }
    shares[0] = ALL[0].own_share([1, 2, 3], 3, CONTEXT)
    for left_out in range(4):
        of_mask = {h + 1: s.self_mask for h, s in shares.items() if h != left_out}
        of_key = {h + 1: s.mask_key for h, s in shares.items() if h != left_out}
        assert self_mask_key(ROUND, 0, reconstruct(of_mask, 3, 32)) == ALL[0].self_mask_key
        private = reconstruct(of_key, 3, 32)
        assert public_of(private) == ALL[0].public.mask_key
        key = dropped_pair_key(ROUND, 0, private, 2, ALL[2].public.mask_key)
        assert key == ALL[2].pair_mask_key(0, ALL[0].public.mask_key)


def test_a_share_opens_for_nobody_else_and_in_no_other_context() -> None:
    sealed = sealed_by(0)[1]
    one = ALL[1]
    one.opened(0, SHARE_KEYS[0], sealed, CONTEXT)
    damaged = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for holder, sender, data, context in (
        (ALL[2], 0, sealed, CONTEXT),
        (one, 3, sealed, CONTEXT),
        (one, 0, sealed, b"others"),
        (one, 0, damaged, CONTEXT),
        (one, 0, b"", CONTEXT),
        (secrets_of(1, replace(ROUND, attempt=1)), 0, sealed, CONTEXT),
    ):
        with pytest.raises(InvalidInputError, match=f"share of client {sender}"):
            holder.opened(sender, SHARE_KEYS[sender], data, context)
    # Another context gives independent shares.
    others = sealed_by(0, b"other holders")
    here = ALL[1].opened(0, SHARE_KEYS[0], sealed_by(0)[1], CONTEXT)
    there = ALL[1].opened(0, SHARE_KEYS[0], others[1], b"other holders")
    assert here.self_mask != there.self_mask
    assert here.mask_key != there.mask_key


def test_keys_of_small_order_and_short_roots_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="X25519"):
        ALL[1].pair_mask_key(2, bytes(32))
    with pytest.raises(InvalidInputError, match="X25519"):
        ALL[1].sealed_shares({2: b"short"}, 2, CONTEXT)
    with pytest.raises(ValueError, match="32 bytes"):
        ClientSecrets(ROUND, 1, b"short")


def test_a_text_of_one_purpose_is_none_of_another() -> None:
    texts = {
        ROUND.transcript("keys", 1, b"a", b"b"),
        ROUND.transcript("keys", 1, b"ab", b""),
        ROUND.transcript("keys", b"\0" * 7 + b"\1", b"a", b"b"),
        ROUND.of_keys(1, b"a", b"b"),
        ROUND.of_survivors(1, b"m", [1, 2]),
        ROUND.of_survivors(1, b"m", [1, 2, 3]),
        ROUND.of_survivors(2, b"m", [1, 2]),
        ROUND.of_members([1, 2], b"seed"),
    }
    assert len(texts) == 7
    assert ROUND.of_survivors(1, b"m", [2, 1]) == ROUND.of_survivors(1, b"m", [1, 2])

"""Which engine the members of a membership agree on."""

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.mesh.choice import EngineOffer, Offer, choose, decode, encode
from stratagem.worker.mesh.link import ExchangeError


def cpu(host: str = "boot/1") -> Offer:
    return {
        "shm": EngineOffer(host, b"a"),
        "gloo": EngineOffer("", b"b"),
        "grpc": EngineOffer("", b"c"),
    }


def cuda(device: str) -> Offer:
    return {"nccl": EngineOffer(device, b""), "grpc": EngineOffer("", b"d")}


@pytest.mark.parametrize(
    ("offers", "engine", "reason"),
    [
        ([cpu(), cpu(), cpu()], "shm", ""),
        ([cpu(), cpu("boot/2")], "gloo", "not shm: member 1 shares no memory with member 0"),
        ([cpu(), {"gloo": EngineOffer("", b"")}], "gloo", "not shm: member 1 does not offer it"),
        ([cuda("x"), cuda("y")], "nccl", ""),
        (
            [cuda("x"), cuda("y"), cuda("x")],
            "grpc",
            "not nccl: members 0 and 2 have the same device",
        ),
        ([cpu(), cuda("x")], "grpc", "not gloo: member 1 does not offer it"),
        ([cpu(), {"grpc": EngineOffer("", b"")}], "grpc", "not gloo: member 1 does not offer it"),
    ],
)
def test_the_best_engine_that_all_can_take(offers: list[Offer], engine: str, reason: str) -> None:
    choice = choose(offers)
    assert choice.engine == engine
    assert reason in choice.reason
    assert bool(reason) == bool(choice.reason)


def test_members_without_a_common_engine_are_told_what_each_offers() -> None:
    offers = [cpu(), {"nccl": EngineOffer("x", b"")}]
    # Not an ExchangeError: the same members would meet again, and again.
    with pytest.raises(InvalidInputError, match=r"0 offers gloo or grpc or shm, member 1 .* nccl"):
        choose(offers)
    with pytest.raises(InvalidInputError, match="member 1 offers none"):
        choose([cpu(), {}])


def test_an_offer_survives_the_wire() -> None:
    offer = {"gloo": EngineOffer("", bytes(range(256))), "shm": EngineOffer("boot/1", b"")}
    assert decode(encode(offer), 0) == offer


@pytest.mark.parametrize("words", [b"", b"gloo:abc", b"[]", b'{"shm": 1}', b'{"shm": ["x", "?"]}'])
def test_what_is_no_offer_is_refused(words: bytes) -> None:
    with pytest.raises(ExchangeError, match="member 3 offers what is not understood"):
        decode(words, 3)

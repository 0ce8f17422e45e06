"""The choice of a membership's engine: a function of what all its members offer in the rendezvous.

Every member has the same answers and so comes to the same choice, without another round. An engine
needs more than being there: shared memory one host, nccl a device for each. Pure; opens nothing.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.mesh.link import ExchangeError

PREFERENCE: Final = ("shm", "nccl", "gloo", "grpc")


@dataclass(frozen=True, slots=True)
class EngineOffer:
    """One member's readiness for one engine.

    place: shm: which host this is; nccl: which device; else nothing. address: as the engine
    wants it.
    """

    place: str
    address: bytes


Offer = Mapping[str, EngineOffer]
"""What one member can take part in, by engine."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    engine: str
    reason: str
    """Why no better one; empty when it is the best that any member offers."""


def encode(offer: Offer) -> bytes:
    return json.dumps(
        {
            name: [seat.place, base64.b64encode(seat.address).decode()]
            for name, seat in offer.items()
        }
    ).encode()


def decode(words: bytes, rank: int) -> dict[str, EngineOffer]:
    """Raises ExchangeError for anything that `encode` does not write."""
    try:
        return {
            name: EngineOffer(str(place), base64.b64decode(address, validate=True))
            for name, (place, address) in json.loads(words).items()
        }
    except (ValueError, TypeError, AttributeError, binascii.Error) as error:
        raise ExchangeError(f"member {rank} offers what is not understood: {error}") from error


def choose(offers: Sequence[Offer]) -> EngineChoice:
    """Returns the first engine of PREFERENCE that all can take; offers by rank.

    Raises InvalidInputError where there is none: to meet again would change nothing.
    """
    reasons: list[str] = []
    for name in PREFERENCE:
        objection = _objection(name, offers)
        if objection is None:
            return EngineChoice(name, "; ".join(reasons))
        if any(name in offer for offer in offers):
            reasons.append(f"not {name}: {objection}")
    raise InvalidInputError(
        "the members have no mesh engine in common that this job can use: "
        + ", ".join(
            f"member {rank} offers {' or '.join(sorted(offer)) or 'none'}"
            for rank, offer in enumerate(offers)
        )
    )


def _objection(name: str, offers: Sequence[Offer]) -> str | None:
    """Returns why the members cannot take this engine together; None where they can."""
    for rank, offer in enumerate(offers):
        if name not in offer:
            return f"member {rank} does not offer it"
    places = [offer[name].place for offer in offers]
    for rank, place in enumerate(places):
        if name == "shm" and place != places[0]:
            return f"member {rank} shares no memory with member 0"
        if name == "nccl" and place in places[:rank]:
            return f"members {places.index(place)} and {rank} have the same device"
    return None

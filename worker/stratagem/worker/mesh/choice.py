"""Choose the engine of a membership from the offers that all its members make in the rendezvous.

Every member has the same answers and so makes the same choice, without another round. An installed
engine may still be unsuitable: shared memory needs one host, nccl a device for each member.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import structlog
import torch
import torch.distributed as dist

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.mesh.grpc import connect_grpc, leave_grpc
from stratagem.worker.mesh.link import ExchangeError, Link, MessageLink, Rendezvous
from stratagem.worker.mesh.peers import Group, PeerHub
from stratagem.worker.mesh.shm import (
    SharedGroup,
    SharedListener,
    UnshareableError,
    connect,
    form_shared,
    host_identity,
)
from stratagem.worker.mesh.shm_messages import SlotLink
from stratagem.worker.mesh.torch_links import connect_nccl, form_gloo, serve_nccl

# ---- Choice of an engine ----
#
# The choice is a pure function of the offers.

PREFERENCE: Final = ("shm", "nccl", "gloo", "grpc")


@dataclass(frozen=True, slots=True)
class EngineOffer:
    """A member's offer to use one engine.

    place: the host for shm, the device for nccl, else empty. address: in the engine's form.
    """

    place: str
    address: bytes


Offer = Mapping[str, EngineOffer]
"""One member's offers, keyed by engine."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    engine: str
    reason: str
    """The reason why no better engine was chosen; empty if this is the best."""


def encode(offer: Offer) -> bytes:
    return json.dumps(
        {
            name: [seat.place, base64.b64encode(seat.address).decode()]
            for name, seat in offer.items()
        }
    ).encode()


def decode(words: bytes, rank: int) -> dict[str, EngineOffer]:
    """Decode an offer. Raises ExchangeError for invalid bytes."""
    try:
        return {
            name: EngineOffer(str(place), base64.b64decode(address, validate=True))
            for name, (place, address) in json.loads(words).items()
        }
    except (ValueError, TypeError, AttributeError, binascii.Error) as error:
        raise ExchangeError(f"member {rank} offers what is not understood: {error}") from error


def choose(offers: Sequence[Offer]) -> EngineChoice:
    """Return the first engine of PREFERENCE that all members can use. offers: by rank.

    Raises InvalidInputError if there is none, since another rendezvous would not help.
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
    """Return the reason why the members cannot use this engine together; None if they can."""
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


# ---- Agreement on an engine ----
#
# Everything that needs an address is opened before the rendezvous; the answers decide, and the
# engines that were not chosen are closed again. `MeshOffer` determines the offers of this process:
# the operator's setting, and past failures to share memory.

AUTO: Final = "auto"
MAX_SHARING_FAILURES: Final = 2
"""Number of consecutive failures before shm is given up: a dead member looks unreachable, too."""

log = structlog.get_logger(__name__)


class MeshOffer:
    """The engines that this process offers to its parties. Used by the torch thread."""

    def __init__(self, wish: str, device: torch.device) -> None:
        """wish: AUTO, or the only engine that the operator permits."""
        if wish != AUTO:
            self._engines: tuple[str, ...] = (wish,)
        elif device.type == "cuda":
            self._engines = ("nccl", "grpc")
        else:
            self._engines = ("shm", "gloo", "grpc")
        self.device = device
        self._num_failures = 0

    def engines(self, among: Sequence[str]) -> tuple[str, ...]:
        """Return those of the given engines that this process offers."""
        return tuple(name for name in self._engines if name in among)

    def sharing_works(self) -> None:
        self._num_failures = 0

    def sharing_fails(self, error: UnshareableError) -> None:
        """Count a failure of shared memory; after several in a row it is no longer offered, if
        there is another engine."""
        self._num_failures += 1
        if self._num_failures >= MAX_SHARING_FAILURES and self._engines != ("shm",):
            log.warning("no shared memory between workers from now on", reason=str(error))
            self._engines = tuple(name for name in self._engines if name != "shm")


@dataclass(frozen=True, slots=True)
class MemberAddress:
    """A member's address in the mesh: its group, hub, host and device."""

    group: Group
    hub: PeerHub
    host: str
    device: torch.device


class _Elsewhere(Exception):
    """Raised if another engine was chosen than the one being formed."""

    def __init__(self, engine: str, addresses: list[bytes]) -> None:
        self.engine, self.addresses = engine, addresses
        super().__init__(engine)


def form_agreed(
    place: MemberAddress, engines: Sequence[str], rendezvous: Rendezvous, timeout_s: float
) -> Link | SharedGroup:
    """Form the link for tensors by the engine chosen in the rendezvous; block until all members are
    connected. Raises ExchangeError, and the errors of rendezvous."""
    with ExitStack() as opened:
        forming = _Forming(place, engines, rendezvous, timeout_s, opened)
        if "gloo" not in engines:
            return forming.connect(*forming.agree())
        rank, size = place.group.rank, place.group.size
        try:  # gloo reveals its address only inside this call
            return form_gloo(rank, size, place.host, forming.agree_on_gloo, timeout_s)
        except _Elsewhere as chosen:
            return forming.connect(chosen.engine, chosen.addresses)


def form_messages(
    place: MemberAddress, engines: Sequence[str], rendezvous: Rendezvous, timeout_s: float
) -> MessageLink:
    """Form a link for messages, by shm or grpc, in the same way as `form_agreed`."""
    with ExitStack() as opened:
        forming = _Forming(place, engines, rendezvous, timeout_s, opened)
        return forming.connect_messages(*forming.agree())


class _Forming:
    """The engines opened to form the link of one membership; one of them is chosen."""

    def __init__(
        self,
        place: MemberAddress,
        engines: Sequence[str],
        rendezvous: Rendezvous,
        timeout_s: float,
        opened: ExitStack,
    ) -> None:
        self._place, self._rendezvous, self._timeout_s = place, rendezvous, timeout_s
        self._opened = opened
        self._offer: dict[str, EngineOffer] = {}
        self._chosen = ""
        for name in engines:
            self._open(name)

    def _open(self, name: str) -> None:
        place, group = self._place, self._place.group
        match name:
            case "shm":
                identity = host_identity()
                if identity is not None:
                    self._listener = SharedListener()
                    self._opened.callback(self._listener.close)
                    self._offer[name] = EngineOffer(identity, self._listener.address)
            case "nccl" if dist.is_nccl_available():
                self._store = serve_nccl(place.host, self._timeout_s) if group.rank == 0 else None
                address = f"{place.host}:{self._store.port}" if self._store else ""
                self._offer[name] = EngineOffer(_device_identity(place.device), address.encode())
            case "grpc":
                endpoint = self._endpoint = place.hub.join(group)
                self._opened.callback(
                    lambda: None if self._chosen == name else leave_grpc(place.hub, endpoint)
                )
                self._offer[name] = EngineOffer("", place.hub.address.encode())

    def agree(self) -> tuple[str, list[bytes]]:
        """Exchange offers in the rendezvous; return the chosen engine and all addresses."""
        answers = self._rendezvous(encode(self._offer))
        offers = [decode(answer, rank) for rank, answer in enumerate(answers)]
        choice: EngineChoice = choose(offers)
        self._chosen = choice.engine
        log.info(
            "mesh",
            engine=choice.engine,
            reason=choice.reason,
            membership=self._place.group.membership,
            size=self._place.group.size,
        )
        return choice.engine, [offer[choice.engine].address for offer in offers]

    def agree_on_gloo(self, address: bytes) -> list[bytes]:
        """Exchange offers that include gloo; return the members' gloo addresses. Raises _Elsewhere
        if another engine was chosen."""
        self._offer["gloo"] = EngineOffer("", address)
        engine, addresses = self.agree()
        if engine != "gloo":
            raise _Elsewhere(engine, addresses)
        return addresses

    def connect(self, name: str, addresses: list[bytes]) -> Link | SharedGroup:
        group, timeout_s = self._place.group, self._timeout_s
        rank, size = group.rank, group.size
        match name:
            case "shm":
                return form_shared(self._listener, rank, size, addresses, timeout_s)
            case "nccl":
                return connect_nccl(self._store, rank, size, addresses[0].decode(), timeout_s)
            case _:
                return connect_grpc(self._place.hub, self._endpoint, addresses, timeout_s)

    def connect_messages(self, name: str, addresses: list[bytes]) -> MessageLink:
        group, timeout_s = self._place.group, self._timeout_s
        if name == "shm":
            sockets = connect(self._listener, group.rank, group.size, addresses, timeout_s)
            return SlotLink(group.rank, group.size, sockets)
        return connect_grpc(self._place.hub, self._endpoint, addresses, timeout_s)


def _device_identity(device: torch.device) -> str:
    """Return a name that two processes share only if they use the same device."""
    return str(torch.cuda.get_device_properties(device).uuid)

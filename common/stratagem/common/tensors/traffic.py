"""Counts the bytes of tensors that this process has sent and received.

A process has one network, so there is one count of it, as plain numbers: one addition per chunk or
message, of some 50 ns. Two threads that add at the same moment may lose a message; rates, which is
what these numbers are for, do not notice. Knows nothing of who reads them.
"""

from collections.abc import Mapping
from typing import Final

from stratagem.common.tensors.manifest import Purpose

SENT: Final = "sent"
RECEIVED: Final = "received"


class Flow:
    """The byte count of one direction of one kind."""

    __slots__ = ("num_bytes",)

    def __init__(self) -> None:
        self.num_bytes = 0


_STREAMS: Final = {
    (direction, purpose): Flow() for direction in (SENT, RECEIVED) for purpose in Purpose
}
_ENGINES: Final = {
    (direction, engine): Flow()
    for direction in (SENT, RECEIVED)
    for engine in ("gloo", "nccl", "store")
}


def sent(purpose: Purpose) -> Flow:
    """Tensor streams that leave, over gRPC or for who reads them on this machine."""
    return _STREAMS[SENT, purpose]


def received(purpose: Purpose) -> Flow:
    """Tensor streams that come in, over gRPC or read on this machine."""
    return _STREAMS[RECEIVED, purpose]


def over(engine: str, direction: str) -> Flow:
    """Return the count of tensors over a mesh engine other than gRPC, counted when they are handed
    over."""
    return _ENGINES[direction, engine]


def stream_bytes() -> Mapping[tuple[str, str], int]:
    """Return the bytes of tensor streams over gRPC, by direction and kind."""
    return {
        (direction, purpose.name.lower()): flow.num_bytes
        for (direction, purpose), flow in _STREAMS.items()
    }


def engine_bytes() -> Mapping[tuple[str, str], int]:
    """Return the bytes by direction and mesh engine; shared memory sends nothing."""
    counted = {key: flow.num_bytes for key, flow in _ENGINES.items()}
    for direction in (SENT, RECEIVED):
        counted[direction, "grpc"] = _STREAMS[direction, Purpose.MESH].num_bytes
    return counted

"""Forms a link of any engine in a member process of a test."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from stratagem.common.rpc.server import bind, make_server
from stratagem.v1 import peer_pb2_grpc
from stratagem.worker.mesh import Link, form_gloo
from stratagem.worker.mesh.grpc import GrpcLink, form_grpc
from stratagem.worker.mesh.peers import Group, PeerHub, PeerServicer
from stratagem.worker.mesh.shm import SharedGroup, SharedListener, connect, form_shared
from stratagem.worker.mesh.shm_messages import SlotLink
from tests.patience import PATIENCE_S
from tests.worker.mesh.party import rendezvous_over

ENGINES = ("gloo", "shm", "grpc")
THREADS = ("exchange", "gloo-watch")
"""What an engine must not leave behind."""


class Former:
    """Forms one link after the other. A member with gRPC links has one server for all of them."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._hub: PeerHub | None = None
        self._stack = ExitStack()
        self._memberships = itertools.count(1)

    def form(self, engine: str, rank: int, size: int) -> Link | SharedGroup:
        rendezvous = rendezvous_over(self._pipe)
        match engine:
            case "shm":
                listener = SharedListener()
                addresses = rendezvous(listener.address)
                return form_shared(listener, rank, size, addresses, PATIENCE_S)
            case "grpc":
                # The same number on all members, though not all were in all groups.
                membership = max(self._agree(next(self._memberships)))
                self._memberships = itertools.count(membership + 1)
                group = Group("run", "", 1, membership, rank, size)
                return form_grpc(self.hub, group, rendezvous, PATIENCE_S)
            case _:
                return form_gloo(rank, size, "127.0.0.1", rendezvous, PATIENCE_S)

    @property
    def hub(self) -> PeerHub:
        if self._hub is None:
            self._hub = self._stack.enter_context(hub_in_a_thread())
        return self._hub

    def close(self) -> None:
        self._stack.close()

    def _agree(self, number: int) -> list[int]:
        return [int(n) for n in rendezvous_over(self._pipe)(str(number).encode())]


@contextmanager
def former(pipe: Connection) -> Iterator[Former]:
    made = Former(pipe)
    try:
        yield made
    finally:
        made.close()


def num_meetings(engine: str) -> int:
    """How often a member asks for addresses while it forms a link."""
    return 2 if engine == "grpc" else 1


@contextmanager
def slot_links(size: int, **limits: int) -> Iterator[list[SlotLink]]:
    """All members in this process."""
    listeners = [SharedListener() for _ in range(size)]
    addresses = [each.address for each in listeners]

    def form(rank: int) -> SlotLink:
        sockets = connect(listeners[rank], rank, size, addresses, PATIENCE_S)
        return SlotLink(rank, size, sockets, **limits)

    with ThreadPoolExecutor(size) as pool:
        links = list(pool.map(form, range(size)))
    try:
        yield links
    finally:
        for link in links:
            link.cut()
            link.close()


@contextmanager
def hub_in_a_thread() -> Iterator[PeerHub]:
    """A served hub, as a worker process has one, on an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> PeerHub:
        server = make_server()
        hub = PeerHub(f"127.0.0.1:{bind(server, '127.0.0.1', 0)}")
        peer_pb2_grpc.add_PeerServiceServicer_to_server(PeerServicer(hub, PATIENCE_S), server)
        await server.start()
        hub_servers.append(server)
        return hub

    hub_servers: list[object] = []
    try:
        hub = asyncio.run_coroutine_threadsafe(start(), loop).result()
        yield hub
        asyncio.run_coroutine_threadsafe(hub.stop(), loop).result()
    finally:
        for server in hub_servers:
            asyncio.run_coroutine_threadsafe(server.stop(1.0), loop).result()  # type: ignore[attr-defined]
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def links_of(engine: str, size: int) -> Iterator[list[Any]]:
    """Links of all members in this process, each formed in a thread of its own."""
    with ExitStack() as stack, ThreadPoolExecutor(size) as pool:
        meet, ranks = meeting(size), range(size)
        hub = stack.enter_context(hub_in_a_thread()) if engine == "grpc" else None

        def form(rank: int) -> Link | SharedGroup:
            if engine == "shm":
                listener = SharedListener()
                return form_shared(listener, rank, size, meet(rank)(listener.address), PATIENCE_S)
            if hub is None:
                return form_gloo(rank, size, "127.0.0.1", meet(rank), PATIENCE_S)
            return form_grpc(hub, Group("run", "", 1, 1, rank, size), meet(rank), PATIENCE_S)

        links = [*pool.map(form, ranks)]
        try:
            yield links
        finally:
            for link in links:
                link.close()


def meeting(size: int) -> Callable[[int], Callable[[bytes], list[bytes]]]:
    """A rendezvous of threads."""
    barrier = threading.Barrier(size, timeout=PATIENCE_S)
    addresses: dict[int, bytes] = {}

    def of(rank: int) -> Callable[[bytes], list[bytes]]:
        def rendezvous(address: bytes) -> list[bytes]:
            addresses[rank] = address
            barrier.wait()
            return [addresses[each] for each in range(size)]

        return rendezvous

    return of


def grpc_link_over(hub: PeerHub, pipe: Connection, rank: int, size: int) -> GrpcLink:
    return form_grpc(hub, Group("run", "", 1, 1, rank, size), rendezvous_over(pipe), PATIENCE_S)

"""A thousand connections that only stand there."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.soak import status_of
from stratagem.common.rpc.channel import open_channel
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.crash.hands import hands
from tests.crash.rig import until
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.promise("Idle connections cost little, and what they cost is given back."),
]

NUM_CONNECTIONS = 1000
MAX_KB_EACH = 100


def num_sockets(pid: int) -> int:
    """Return how many sockets a process has open; one that is closed meanwhile is not counted."""
    return sum("socket:" in _target(each) for each in Path(f"/proc/{pid}/fd").iterdir())


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:
        return ""


async def test_idle_connections_cost_little_and_are_given_back(tmp_path: Path) -> None:
    with hands(tmp_path) as started:
        process = started.coordinator("coordinator")
        address, pid = process.address, process.popen.pid
        async with open_channel(address) as own:
            stub = CoordinatorServiceStub(own)
            sockets, before_kb = num_sockets(pid), status_of(pid)["RssAnon"]
            channels = [open_channel(address, own_connection=True) for _ in range(NUM_CONNECTIONS)]
            await asyncio.gather(*(channel.channel_ready() for channel in channels))
            # The connection of who waited for the start may just have been closed.
            assert num_sockets(pid) >= NUM_CONNECTIONS
            async with asyncio.timeout(PATIENCE_S):
                await stub.ListRuns(pb.ListRunsRequest())
            each_kb = (status_of(pid)["RssAnon"] - before_kb) / NUM_CONNECTIONS
            print(f"{each_kb:.0f} KB per connection")
            assert each_kb < MAX_KB_EACH
            await asyncio.gather(*(channel.close() for channel in channels))
        what = "all connections are given back"
        await asyncio.to_thread(until, lambda: num_sockets(pid) <= sockets + 5, what)

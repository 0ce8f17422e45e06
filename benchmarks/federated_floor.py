"""What a federated round cannot be below on a machine: its transport and disk, written by hand.

    python benchmarks/federated_floor.py --mb 4 40 --rounds 30

A coordinator and two worker processes over loopback, gRPC that carries raw bytes in chunks as large
as ours, no manifests, no checks of values, no retries, nothing resumed, no journal but one line.
What a durable round does in any case is done, and all of it that can overlap does: the state goes
to each worker and an update of the same size comes back, a CRC32C at each end of both; each update
is written and synced, then noted in a line that is synced; meanwhile the updates are added in
float64, divided and cast, and the new state hashed (SHA-256), written and synced. Its line is
synced while the state is already on its way. `benchmarks/federated_round.py` measures the system
itself beside it. With --state-only nothing of an update is synced: what a round costs whose updates
are lost in a crash of the coordinator and asked for again, of workers that are still there.
"""

import argparse
import asyncio
import hashlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import numpy.typing as npt

from stratagem.common.process.process import tune_malloc
from stratagem.common.rpc.channel import CLIENT_OPTIONS, SERVER_OPTIONS
from stratagem.common.tensors.stream import CHUNK_BYTES, crc32c

State = npt.NDArray[np.uint8]
NUM_WARMUP_ROUNDS = 2
FOLD_ELEMENTS = 2**17


def pieces(state: State) -> Iterator[bytes]:
    """The bytes of a state in chunks, each with its checksum taken."""
    for start in range(0, len(state), CHUNK_BYTES):
        piece = state[start : start + CHUNK_BYTES].tobytes()
        crc32c(piece)
        yield piece


async def receive(messages: AsyncIterator[bytes], state: State, file: int | None = None) -> None:
    """Into memory, and into a file where there is one."""
    offset = 0
    async for piece in messages:
        crc32c(piece)
        state[offset : offset + len(piece)] = np.frombuffer(piece, np.uint8)
        if file is not None:
            os.write(file, piece)
        offset += len(piece)


# ---- a worker ----


async def work(num_bytes: int) -> None:
    """Takes states and gives them back as updates."""
    state = np.zeros(num_bytes, np.uint8)

    async def put(requests: AsyncIterator[bytes], context: Any) -> bytes:
        await receive(requests, state)
        return b""

    async def get(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for piece in pieces(state):
            yield piece

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers: dict[str, Any] = {
        "put": grpc.stream_unary_rpc_method_handler(put),
        "get": grpc.unary_stream_rpc_method_handler(get),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("floor", handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


# ---- the coordinator ----


def synced(path: Path, mode: int = os.O_TRUNC) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o600)


def fold(updates: list[State], folder: Path) -> State:
    """The mean of the updates, in float64 by pieces that stay in the cache, durable."""
    state = np.empty_like(updates[0])
    new, old = state.view(np.float32), [each.view(np.float32) for each in updates]
    digest, file = hashlib.sha256(), synced(folder / "state")
    for start in range(0, len(new), FOLD_ELEMENTS):
        part = slice(start, start + FOLD_ELEMENTS)
        total = old[0][part] * np.float64(1.0)
        for each in old[1:]:
            total += each[part] * np.float64(1.0)
        new[part] = total / len(old)
        digest.update(new[part].data)
        os.write(file, new[part].data)
    os.fsync(file)
    os.close(file)
    return state


class Coordinator:
    def __init__(self, ports: list[int], num_bytes: int, folder: Path, *, state_only: bool) -> None:
        self._state_only = state_only
        channels = [
            grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) for port in ports
        ]
        self._put: list[Any] = [each.stream_unary("/floor/put") for each in channels]
        self._get: list[Any] = [each.unary_stream("/floor/get") for each in channels]
        self._folder = folder
        self._journal = synced(folder / "journal", os.O_APPEND)
        self._state = np.zeros(num_bytes, np.uint8)
        self._updates = [np.zeros(num_bytes, np.uint8) for _ in ports]
        self._noted = asyncio.create_task(self._note())

    async def round(self) -> None:
        """Ends when the new state is durable; its line is synced behind that."""
        files = [synced(self._folder / f"update{index}") for index in range(len(self._put))]
        await asyncio.gather(*(self._client(index, file) for index, file in enumerate(files)))
        noting = asyncio.gather(*(self._keep(file) for file in files))
        self._state = await asyncio.to_thread(fold, self._updates, self._folder)
        await noting
        await self._noted  # the line of the round before
        self._noted = asyncio.create_task(self._note())

    async def _client(self, index: int, file: int) -> None:
        async def send() -> AsyncIterator[bytes]:
            for piece in pieces(self._state):
                yield piece

        await self._put[index](send())
        await receive(self._get[index](b""), self._updates[index], file)

    async def _keep(self, file: int) -> None:
        if not self._state_only:
            await asyncio.to_thread(os.fsync, file)
            await self._note()
        os.close(file)

    async def _note(self) -> None:
        os.write(self._journal, b"x" * 200)
        await asyncio.to_thread(os.fdatasync, self._journal)


def cpu_s(pids: list[int]) -> float:
    """User and system seconds of this process and some others."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    tasks = [each for pid in pids for each in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    others = sum(int(each.read_text().split()[0]) for each in tasks) / 1e9
    return own.ru_utime + own.ru_stime + others


async def rounds_of(
    workers: list[Any], num_bytes: int, rounds: int, *, state_only: bool
) -> list[tuple[float, float]]:
    """Seconds and CPU seconds of each round."""
    pids = [each.pid for each in workers]
    ports = [int(each.stdout.readline()) for each in workers]
    with tempfile.TemporaryDirectory() as folder:
        coordinator = Coordinator(ports, num_bytes, Path(folder), state_only=state_only)
        marks = []
        for _ in range(rounds + 1):
            marks.append((time.perf_counter(), cpu_s(pids)))
            await coordinator.round()
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks)]


def measure(
    mb: int, num_clients: int, rounds: int, *, state_only: bool
) -> tuple[float, float, float, float]:
    """Median, minimum, maximum and CPU seconds per round."""
    num_bytes = mb * 1_000_000
    command = [sys.executable, __file__, "--work", str(num_bytes)]
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(num_clients)
    ]
    try:
        every = asyncio.run(rounds_of(workers, num_bytes, rounds, state_only=state_only))
        found = every[NUM_WARMUP_ROUNDS:]
    finally:
        for each in workers:
            each.kill()
            each.wait()
    seconds, cpu = zip(*found, strict=True)
    return statistics.median(seconds), min(seconds), max(seconds), statistics.median(cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, nargs="+", default=[4, 40])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--state-only", action="store_true", help="sync no updates")
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    tune_malloc()
    if args.work:
        asyncio.run(work(args.work))
        return
    columns = ("s/round", "min", "max", "CPU s")
    print(f"{'model':>8} {'':>8}", *(f"{each:>8}" for each in columns))
    for mb in args.mb:
        row = measure(mb, 2, args.rounds, state_only=args.state_only)
        print(f"{mb:>5} MB {'floor':>8}", *(f"{each:>8.4f}" for each in row), flush=True)


if __name__ == "__main__":
    main()

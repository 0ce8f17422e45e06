"""How fast a state of tensors travels, against what is possible underneath.

    python benchmarks/tensor_stream.py [--mb 400] [--repeats 5] [--chunks] [--only ours raw]

Client and server are separate processes on loopback. `ours` is the real transfer code: plain
protobuf messages, a CRC32C per chunk, received into torch tensors in place. It is compared with the
same under the default allocator, with the same messages written and read by the generated classes,
with gRPC that carries raw bytes in chunks of the same size without checksums, and with a bare TCP
socket. The floor is what a checked stream over gRPC can cost at least: the same raw bytes, and one
CRC32C at each end. All receive into memory that has been touched before.
The variants take turns, so that other load on the machine hits all of them alike; ratios are
medians of those of each turn. --chunks compares chunk sizes instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc.aio
import torch

from stratagem.common.process.process import tune_malloc
from stratagem.common.rpc.channel import CLIENT_OPTIONS, SERVER_OPTIONS, open_channel
from stratagem.common.rpc.server import bind, make_server
from stratagem.common.rpc.tensor_transfer import (
    pull,
    push,
    receive_header,
    receive_upload,
    serve_get,
)
from stratagem.common.tensors.manifest import Manifest, Purpose, from_proto, to_proto
from stratagem.common.tensors.stream import (
    CHUNK_BYTES,
    ChunkWriter,
    Sink,
    crc32c,
    fill_chunk,
    from_buffers,
)
from stratagem.common.tensors.torch_codec import allocate, manifest_of
from stratagem.v1 import worker_pb2, worker_pb2_grpc

TENSOR_ELEMENTS = 1_000_037  # about 4 MB, and no multiple of a chunk
RAW = "/raw/"
Operation = Callable[[], Awaitable[None]]


class State:
    """The tensors that travel, and the ones that receive them."""

    def __init__(self, num_mb: int, chunk_bytes: int) -> None:
        torch.manual_seed(0)  # the same in all processes
        count = max(1, num_mb * 1_000_000 // (4 * TENSOR_ELEMENTS))
        named = {f"layer{i}.weight": torch.rand(TENSOR_ELEMENTS) for i in range(count)}
        self.manifest, self.buffers = manifest_of(named, Purpose.STATE)
        self.total_bytes = self.manifest.total_bytes
        self.source = from_buffers(self.buffers, chunk_bytes)
        self.sink, self.received = allocate(self.manifest)
        for tensor in self.received().values():
            tensor.zero_()

    def accept(self, manifest: Manifest) -> Sink:
        assert manifest == self.manifest
        return self.sink

    def check(self) -> None:
        """The first and last elements have arrived."""
        for received, buffer in zip(self.received().values(), self.buffers, strict=True):
            assert received[0].item() == buffer.cast("f")[0]
            assert received[-1].item() == buffer.cast("f")[-1]
            received.zero_()


# ---- ours ----


class Service(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, state: State) -> None:
        self._state = state

    async def GetState(self, request: Any, context: Any) -> AsyncIterator[Any]:
        state = self._state
        async for message in serve_get(
            worker_pb2.GetStateResponse, state.manifest, state.source, request.offset
        ):
            yield message

    async def SetState(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        header = (await receive_header(request_iterator)).header
        manifest = from_proto(header.manifest)

        async def commit() -> None:
            """Nothing to publish here."""

        writer = ChunkWriter(manifest.total_bytes, self._state.sink)
        async for response in receive_upload(
            request_iterator, worker_pb2.SetStateResponse, writer, commit
        ):
            yield response


async def serve_ours(state: State) -> None:
    server = make_server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Service(state), server)
    await _serve(server)


def call_ours(state: State, port: int) -> tuple[Operation, Operation]:
    stub: Any = worker_pb2_grpc.WorkerServiceStub(open_channel(f"127.0.0.1:{port}"))
    header = worker_pb2.SetStateRequest(
        header=worker_pb2.SetStateHeader(manifest=to_proto(state.manifest))
    )

    async def put() -> None:
        await push(stub.SetState, header, state.manifest, state.source)

    async def get() -> None:
        await pull(
            lambda offset: stub.GetState(worker_pb2.GetStateRequest(offset=offset)), state.accept
        )

    return put, get


# ---- the same messages through generated classes alone ----


class StockService(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, state: State) -> None:
        self._state = state

    async def GetState(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for message in _stock(worker_pb2.GetStateResponse, self._state):
            yield message

    async def SetState(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        writer = ChunkWriter(self._state.total_bytes, self._state.sink)
        async for request in request_iterator:
            writer.write(request.chunk)
        yield worker_pb2.SetStateResponse(committed=writer.is_complete)


def _stock(make: Any, state: State) -> Any:
    offset = 0
    for parts in state.source(0):
        piece = b"".join(cast(list[bytes], parts))
        message = make()
        fill_chunk(message.chunk, offset, piece)
        offset += len(piece)
        yield message


async def serve_stock(state: State) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(StockService(state), server)
    await _serve(server)


def call_stock(state: State, port: int) -> tuple[Operation, Operation]:
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS)
    stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)

    async def put() -> None:
        call = stub.SetState()
        for message in _stock(worker_pb2.SetStateRequest, state):
            await call.write(message)
        await call.done_writing()
        assert (await call.read()).committed

    async def get() -> None:
        writer = ChunkWriter(state.total_bytes, state.sink)
        async for response in stub.GetState(worker_pb2.GetStateRequest()):
            writer.write(response.chunk)

    return put, get


# ---- raw bytes over gRPC; the floor takes a checksum of them at both ends ----


def _pieces(state: State, is_checked: bool) -> Iterator[bytes]:
    for parts in state.source(0):
        piece = b"".join(cast(list[bytes], parts))
        if is_checked:
            crc32c(piece)
        yield piece


async def _receive_raw(messages: AsyncIterator[bytes], state: State, is_checked: bool) -> None:
    offset = 0
    async for data in messages:
        if is_checked:
            crc32c(data)
        state.sink(offset, data)
        offset += len(data)


async def serve_raw(state: State, *, is_checked: bool = False) -> None:
    async def put(requests: AsyncIterator[bytes], context: Any) -> bytes:
        await _receive_raw(requests, state, is_checked)
        return b""

    async def get(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for piece in _pieces(state, is_checked):
            yield piece

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers: dict[str, Any] = {
        "put": grpc.stream_unary_rpc_method_handler(put),
        "get": grpc.unary_stream_rpc_method_handler(get),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", handlers),))
    await _serve(server)


def call_raw(state: State, port: int, *, is_checked: bool = False) -> tuple[Operation, Operation]:
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS)
    put_method: Any = channel.stream_unary(RAW + "put")
    get_method: Any = channel.unary_stream(RAW + "get")

    async def put() -> None:
        call = put_method()
        for piece in _pieces(state, is_checked):
            await call.write(piece)
        await call.done_writing()
        await call

    async def get() -> None:
        await _receive_raw(get_method(b""), state, is_checked)

    return put, get


async def _serve(server: grpc.aio.Server) -> None:
    print(bind(server, "127.0.0.1", 0), flush=True)
    await server.start()
    await server.wait_for_termination()


# ---- a socket ----


def _fill(connection: socket.socket, state: State) -> None:
    for tensor in state.received().values():
        view = tensor.numpy().data.cast("B")
        while view:
            view = view[connection.recv_into(view) :]


def _drain(connection: socket.socket, state: State) -> None:
    for buffer in state.buffers:
        connection.sendall(buffer)


async def serve_tcp(state: State) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)

    def serve() -> None:
        connection, _ = listener.accept()
        while command := connection.recv(1):
            if command == b"p":
                _fill(connection, state)
                connection.sendall(b"k")
            else:
                _drain(connection, state)

    thread = threading.Thread(target=serve)
    thread.start()
    await asyncio.to_thread(thread.join)


def call_tcp(state: State, port: int) -> tuple[Operation, Operation]:
    connection = socket.create_connection(("127.0.0.1", port))

    async def put() -> None:
        connection.sendall(b"p")
        _drain(connection, state)
        connection.recv(1)

    async def get() -> None:
        connection.sendall(b"g")
        _fill(connection, state)

    return put, get


# ---- processes ----

KINDS: dict[str, tuple[Any, Any]] = {
    "ours": (serve_ours, call_ours),
    "stock": (serve_stock, call_stock),
    "raw": (serve_raw, call_raw),
    "floor": (partial(serve_raw, is_checked=True), partial(call_raw, is_checked=True)),
    "tcp": (serve_tcp, call_tcp),
}


def _peak_rss_mb(pid: int) -> float:
    # Not ru_maxrss: that remembers the parent process too.
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def _cpu_s(pid: int) -> float:
    """Processor seconds of all threads so far; psutil's are multiples of 10 ms."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in tasks) / 1e9


async def client(kind: str, port: int, state: State) -> None:
    """Carries out the commands that come on stdin, one line of JSON each."""
    put, get = KINDS[kind][1](state, port)
    loop = asyncio.get_running_loop()
    while command := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        cpu, start = time.process_time(), time.perf_counter()
        await (put if command == "put" else get)()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        if command == "get":
            state.check()
        print(json.dumps({"seconds": seconds, "cpu": cpu}), flush=True)
    os._exit(0)


class Pair:
    """One server and one client of a variant."""

    def __init__(self, title: str, kind: str, malloc: str, num_mb: int, chunk_bytes: int) -> None:
        self.title, self.kind = title, kind
        self.results: dict[str, list[dict[str, float]]] = {"put": [], "get": []}
        environment = os.environ | {"STRATAGEM_MALLOC": malloc, "GRPC_VERBOSITY": "NONE"}
        base = [sys.executable, __file__, "--mb", str(num_mb), "--chunk-bytes", str(chunk_bytes)]
        self.server = subprocess.Popen(
            [*base, "--serve", kind], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.server.stdout
        port = self.server.stdout.readline().strip()
        self.client = subprocess.Popen(
            [*base, "--call", kind, "--port", port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, command: str, keep: bool) -> None:
        assert self.client.stdin
        assert self.client.stdout
        before = _cpu_s(self.server.pid)
        self.client.stdin.write(command + "\n")
        self.client.stdin.flush()
        result = json.loads(self.client.stdout.readline())
        result["server_cpu"] = _cpu_s(self.server.pid) - before
        if keep:
            self.results[command].append(result)

    def median(self, command: str, key: str) -> float:
        return statistics.median(each[key] for each in self.results[command])

    def ratio(self, command: str, other: Pair, *keys: str) -> float:
        """The median over turns of what `other` took in terms of what this one took."""
        turns = zip(self.results[command], other.results[command], strict=True)
        return statistics.median(
            sum(b[k] for k in keys) / sum(a[k] for k in keys) for a, b in turns
        )

    def stop(self) -> None:
        for process in (self.client, self.server):
            process.kill()
            process.wait()


def measure(pairs: list[Pair], repeats: int) -> None:
    try:
        for turn in range(repeats + 1):  # the first one warms up
            for pair in pairs:
                for command in ("put", "get"):
                    pair.run(command, keep=turn > 0)
        for pair in pairs:
            pair.results["rss"] = [
                {"client": _peak_rss_mb(pair.client.pid), "server": _peak_rss_mb(pair.server.pid)}
            ]
    finally:
        for pair in pairs:
            pair.stop()


def table(pairs: list[Pair], num_bytes: int) -> None:
    groups = ("MB/s", "raw / this", "CPU s/GB", "raw / this", "RSS MB")
    print(" " * 35, *(f"{each:>12}" for each in groups))
    columns = (*(("put", "get"),) * 4, ("cl", "srv"))
    print(" " * 35, *(f"{a:>6} {b:>5}" for a, b in columns))
    base = next((each for each in pairs if each.kind == "raw"), pairs[0])
    for pair in pairs:
        cells = [f"{pair.title:35}"]
        for command in ("put", "get"):
            cells.append(f"{num_bytes / pair.median(command, 'seconds') / 1e6:6.0f}")
        cells += [f"{pair.ratio(command, base, 'seconds'):6.2f}" for command in ("put", "get")]
        for command in ("put", "get"):
            used = statistics.median(
                each["cpu"] + each["server_cpu"] for each in pair.results[command]
            )
            cells.append(f"{used / num_bytes * 1e9:6.3f}")
        cells += [
            f"{pair.ratio(command, base, 'cpu', 'server_cpu'):6.2f}" for command in ("put", "get")
        ]
        cells += [f"{pair.median('rss', who):5.0f}" for who in ("client", "server")]
        print(" ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunks", action="store_true", help="compare chunk sizes")
    parser.add_argument("--only", choices=list(KINDS), nargs="+", help="only these kinds")
    parser.add_argument("--chunk-bytes", type=int, default=CHUNK_BYTES, help=argparse.SUPPRESS)
    parser.add_argument("--serve", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--call", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve or options.call:
        tune_malloc()
        state = State(options.mb, options.chunk_bytes)
        role = KINDS[options.serve][0](state) if options.serve else None
        asyncio.run(role or client(options.call, options.port, state))
        return
    num_bytes = State(options.mb, CHUNK_BYTES).total_bytes
    kib = CHUNK_BYTES // 1024
    print(
        f"{num_bytes / 1e6:.0f} MB, median of {options.repeats}, loopback, "
        f"chunks of {kib} KiB unless said"
    )
    variants: list[tuple[str, str, str, int]] = [
        ("ours", "ours", "on", CHUNK_BYTES),
        ("(a) ours, default malloc", "ours", "off", CHUNK_BYTES),
        ("(d) generated classes, default", "stock", "off", CHUNK_BYTES),
        ("(e) generated classes, tuned", "stock", "on", CHUNK_BYTES),
        ("(b) gRPC, raw bytes, tuned malloc", "raw", "on", CHUNK_BYTES),
        ("(b) the same, chunks of 1024 KiB", "raw", "on", 2**20),
        ("(f) floor: (b) and two checksums", "floor", "on", CHUNK_BYTES),
        ("(c) TCP socket", "tcp", "on", CHUNK_BYTES),
    ]
    if options.chunks:
        sizes = (2048, 1024, 512)
        variants = [(f"{kib} KiB", "ours", "on", kib * 1024) for kib in sizes]
        variants += [(f"{kib} KiB, raw", "raw", "on", kib * 1024) for kib in sizes]
    if options.only:
        variants = [each for each in variants if each[1] in options.only]
    pairs = [
        Pair(title, kind, malloc, options.mb, chunk) for title, kind, malloc, chunk in variants
    ]
    measure(pairs, options.repeats)
    table(pairs, num_bytes)


if __name__ == "__main__":
    main()

"""The recorded messages of a version: its calls, how that version reads what it is answered, and
its workers, played."""

import asyncio
import base64
import gzip
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from stratagem.v1 import coordinator_pb2, worker_pb2
from tests.golden.record_messages import FOLDER
from tests.hostile.attack import PROTOCOL

VERSIONS = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))
PROTOS = Path(__file__).parent / "protos"
_SERVICES = {
    f"/{service.full_name}/{method.name}": method
    for module in (coordinator_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


@dataclass(frozen=True)
class Note:
    """A message as it was sent, and when."""

    is_request: bool
    at_s: float
    content: bytes


@dataclass(frozen=True, eq=False)
class Call:
    by: str
    to: str
    method: str
    begun_s: float
    notes: tuple[Note, ...]

    @property
    def name(self) -> str:
        return self.method.rpartition("/")[2]

    @property
    def requests(self) -> list[bytes]:
        return [note.content for note in self.notes if note.is_request]

    @property
    def responses(self) -> list[bytes]:
        return [note.content for note in self.notes if not note.is_request]

    @property
    def ended_s(self) -> float:
        return self.notes[-1].at_s

    @property
    def request(self) -> Any:
        """Its first request, as this version reads it."""
        return self.read(self.requests[0])

    def read(self, content: bytes, *, is_request: bool = True) -> Any:
        """A message of it as this version reads it."""
        known = _SERVICES[self.method]
        of = known.input_type if is_request else known.output_type
        return message_factory.GetMessageClass(of).FromString(content)

    @property
    def run_id(self) -> str:
        """The run that it is about; "" for none."""
        return _key(self.name, self.request)[1]


@cache
def calls_of(version: str) -> tuple[Call, ...]:
    """The calls of a version, in the order of their begin."""
    text = gzip.decompress((FOLDER / f"{version}.json.gz").read_bytes())
    return tuple(
        Call(
            told["by"],
            told["to"],
            told["method"],
            told["begun_s"],
            tuple(
                Note(direction == "request", at_s, base64.b64decode(content))
                for direction, at_s, content in told["messages"]
            ),
        )
        for told in json.loads(text)["calls"]
    )


class Reader:
    """Reads messages as a version does."""

    def __init__(self, version: str) -> None:
        files = descriptor_pb2.FileDescriptorSet.FromString(
            (PROTOS / f"{version}.binpb").read_bytes()
        )
        self._pool = descriptor_pool.DescriptorPool()
        for file in files.file:
            self._pool.Add(file)

    def read(self, call: Call, content: bytes, *, is_request: bool) -> Message:
        """A request or a response of a call."""
        service, _, name = call.method[1:].rpartition("/")
        method = self._pool.FindServiceByName(service).methods_by_name[name]
        of = method.input_type if is_request else method.output_type
        return message_factory.GetMessageClass(of).FromString(content)

    def told(self, call: Call, content: bytes, *, is_request: bool = False) -> dict[str, Any]:
        """The same as JSON, in which a field that is not set does not stand."""
        return MessageToDict(self.read(call, content, is_request=is_request))


def paths_of(told: Any, at: str = "") -> set[str]:
    """The fields that are set, as paths; elements of a list count as one."""
    if isinstance(told, list):
        return set().union(*(paths_of(each, at) for each in told))
    if not isinstance(told, dict):
        return {at}
    inside = (paths_of(value, f"{at}.{name}") for name, value in told.items())
    return {at}.union(*inside)


class Player:
    """A worker of a version, which answers as it did then, and in the same order: a message that
    came after a call of the coordinator's does not come before it."""

    def __init__(self, name: str, calls: list[Call], report: Callable[[Call], Any]) -> None:
        """calls: those that the worker got, or made itself, which are reported."""
        self._to: list[Call] = []
        self._own = [call for call in calls if call.by == name]
        self._report = report
        self._left: defaultdict[tuple[str, ...], list[Call]] = defaultdict(list)
        for call in calls:
            if call.to == name and (call.responses or call.name == "Execute"):  # else refused
                left = self._left[_key(call.name, call.request)]
                if not left or call.name not in _REPEATED:
                    left.append(call)
                    self._to.append(call)
        self._done: set[Call] = set()
        self._changed = asyncio.Condition()
        self.unknown: list[tuple[str, ...]] = []
        """Calls that were not recorded."""

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Serve the worker, at an address."""
        server = grpc.aio.server()
        handlers: dict[str, Any] = {}
        for method in worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].methods:
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(self._answer(method))
        service = grpc.method_handlers_generic_handler("stratagem.v1.WorkerService", handlers)
        server.add_generic_rpc_handlers((service,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0)

    def _answer(self, method: Any) -> Any:
        async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            kind = message_factory.GetMessageClass(method.input_type)
            key = _key(method.name, kind.FromString(await anext(requests)))
            left = self._left[key]
            if not left:
                self.unknown.append(key)
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{key} was not recorded")
            call = left[0] if method.name in _REPEATED else left.pop(0)
            has_all = asyncio.create_task(_drained(requests))
            for note in call.notes[1:]:
                if note.is_request:
                    continue
                if call.notes[-1] is note:
                    await has_all
                await self._caught_up(call, note.at_s)
                yield note.content
            if call.name == "Execute" and not _has_result(call):
                await asyncio.Event().wait()  # until the coordinator cancels it
            await self._finish(call)

        return answer

    async def _caught_up(self, at: Call, at_s: float) -> None:
        """Wait for what had ended when a message was sent, and do what the worker itself did."""
        if at.name != "Execute":
            return
        since_s, run_id = at.begun_s, at.run_id
        for call in self._own:
            if call not in self._done and since_s <= call.begun_s <= at_s and call.run_id == run_id:
                self._done.add(call)
                await self._report(call)
        before = {
            call
            for call in self._to
            if call.name in _AWAITED and call.run_id == run_id and call.responses
            if since_s <= call.ended_s <= at_s
        }
        async with self._changed:
            await self._changed.wait_for(lambda: before <= self._done)

    async def _finish(self, call: Call) -> None:
        async with self._changed:
            self._done.add(call)
            self._changed.notify_all()


_REPEATED = {"Describe", "SetState"}
"""Calls that may be made more often than they were: a state that was on its way is sent once more
when it had come just before the worker was heard to need it."""
_AWAITED = {"GetGradients", "ApplyGradients", "SetState"}
"""Calls without which the worker does not go on."""


async def _drained(requests: AsyncIterator[bytes]) -> None:
    async for _ in requests:
        pass


def _has_result(call: Call) -> bool:
    return any(
        worker_pb2.ExecuteResponse.FromString(content).HasField("result")
        for content in call.responses
    )


def _key(name: str, request: Any) -> tuple[str, ...]:
    """What tells calls of a method apart, where the order does not; of SetState, which state."""
    header = getattr(request, "header", request)
    session = getattr(header, "session", None)
    run_id = getattr(header, "run_id", "") or getattr(session, "run_id", "")
    party = getattr(session, "party", "")
    plan = str(request.WhichOneof("plan")) if name == "Execute" else ""
    return name, run_id, party, plan, getattr(header, "digest", "")


def raw(channel: grpc.aio.Channel, call: Call, *requests: bytes) -> Any:
    """The call made again, with the same bytes unless others are given."""
    stream: Any = channel.stream_stream(call.method)
    return stream(iter(requests or call.requests), metadata=PROTOCOL)


def of_run(version: str, run_id: str) -> Iterator[Call]:
    """The calls about a run."""
    return (call for call in calls_of(version) if call.run_id == run_id)

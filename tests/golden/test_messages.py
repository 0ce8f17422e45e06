"""Messages that a released version has sent are understood, and answered with what it reads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.json_format import MessageToDict

from stratagem.common.base.ids import RunId
from stratagem.common.base.retry import Backoff
from stratagem.common.numerics.rules import OF_SILENT_WORKERS
from stratagem.coordinator.core.fact_text import SCHEMA_VERSION, encode
from stratagem.coordinator.core.facts import RunSubmitted
from stratagem.coordinator.store.journal import Journal, Record
from stratagem.coordinator.store.lead import Holder
from stratagem.v1 import coordinator_pb2 as pb
from tests.coordinator.service.serving import served
from tests.golden.record_messages import STRATEGIES
from tests.golden.recorded_messages import (
    VERSIONS,
    Call,
    Player,
    Reader,
    calls_of,
    of_run,
    paths_of,
    raw,
)
from tests.hostile.attack import PROTOCOL
from tests.patience import PATIENCE_S
from tests.worker.service.rig import Rig, open_rig

WORKERS = ("worker-0", "worker-1")
RUNS = [(version, f"recorded-{name}") for version in VERSIONS for name in STRATEGIES]


@pytest.mark.parametrize("version", VERSIONS)
def test_all_that_a_version_said_is_read_as_it_was_meant(version: str) -> None:
    reader = Reader(version)
    for call in calls_of(version):
        for note in call.notes:
            now = call.read(note.content, is_request=note.is_request)
            then = reader.read(call, note.content, is_request=note.is_request)
            assert MessageToDict(now) == MessageToDict(then)
            assert type(now).FromString(then.SerializeToString()) == now


@asynccontextmanager
async def served_workers(version: str, address: list[str]) -> AsyncIterator[dict[str, Player]]:
    """The workers of a version, registered at a coordinator: address[-1], wherever it is now."""

    async def report(call: Call) -> None:
        async with grpc.aio.insecure_channel(address[-1]) as channel:
            answers = await all_of(raw(channel, call))
        check_answers(version, call, answers)

    async with AsyncExitStack() as stack:
        players = {name: Player(name, list(calls_of(version)), report) for name in WORKERS}
        for name, player in players.items():
            place = await stack.enter_async_context(player.served())
            (call,) = [
                each
                for each in calls_of(version)
                if each.by == name and each.name == "RegisterWorker"
            ]
            request = Reader(version).read(call, call.requests[0], is_request=True)
            request.address = place  # type: ignore[attr-defined]
            async with grpc.aio.insecure_channel(address[-1]) as channel:
                answers = await all_of(raw(channel, call, request.SerializeToString()))
            check_answers(version, call, answers)
        yield players


def check_answers(version: str, call: Call, answers: list[bytes]) -> None:
    """The version finds in these answers whatever it has found in those of its own time, but for
    what comes or not: see _BY_CHANCE."""
    reader = Reader(version)
    then = set().union(*(paths_of(reader.told(call, each)) for each in call.responses))
    now = set().union(*(paths_of(reader.told(call, each)) for each in answers))
    missing = sorted(path for path in then - now if not path.startswith(_BY_CHANCE))
    assert not missing, f"{call.method} says nothing of {missing}"


_BY_CHANCE = (".progress", ".needBlob")
"""Of progress readers get the newest alone; a worker has been sent the state before it asks."""


def numerics_of(version: str) -> int:
    """The rules that runs of a version follow: the newest that its workers know."""
    registered = (call for call in calls_of(version) if call.name == "RegisterWorker")
    return next(registered).request.capability.numerics_rules or OF_SILENT_WORKERS


@asynccontextmanager
async def with_run(
    version: str, run_id: str, folder: Path
) -> AsyncIterator[tuple[grpc.aio.Channel, dict[str, Player]]]:
    """A coordinator that has been upgraded: a run that began before, and workers of before."""
    (submit,) = [each for each in of_run(version, run_id) if each.name == "SubmitRun"]
    settings = {"worker_ttl_s": PATIENCE_S}
    addresses: list[str] = []
    async with AsyncExitStack() as stack:
        async with served(folder, **settings) as (_, address):
            addresses.append(address)
            players = await stack.enter_async_context(served_workers(version, addresses))
        submitted = RunSubmitted(
            job_json=submit.request.job_json, wall_s=1.0, numerics=numerics_of(version)
        )
        journal = Journal.open(folder / "journal.sqlite")
        lead = journal.take_lead(Holder.of_this_process(), ttl_s=1)
        kind, payload = encode(submitted)
        record = Record(RunId(run_id), 0, kind, SCHEMA_VERSION, payload, lead.last_time_s, 1.0)
        journal.append(lead.term, [record])
        journal.release(lead.term)
        journal.close()
        _, address = await stack.enter_async_context(served(folder, **settings))
        addresses.append(address)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        yield channel, players


@pytest.mark.parametrize(("version", "run_id"), RUNS)
async def test_a_run_of_before_ends_with_workers_of_before_in_the_same_states(
    version: str, run_id: str, tmp_path: Path
) -> None:
    async with asyncio.timeout(PATIENCE_S), with_run(version, run_id, tmp_path) as (channel, them):
        asked = {call.name: call for call in of_run(version, run_id) if call.by == "client"}
        del asked["SubmitRun"]
        whole = pb.WatchRunRequest(run_id=run_id).SerializeToString()
        answers = {"WatchRun": await all_of(raw(channel, asked["WatchRun"], whole))}
        for name in sorted(asked.keys() - {"WatchRun"}):
            answers[name] = await all_of(raw(channel, asked[name]))
        assert [player.unknown for player in them.values()] == [[], []]
        run = asked["GetRun"].read(answers["GetRun"][0], is_request=False).run
        then = asked["GetRun"].read(asked["GetRun"].responses[0], is_request=False).run
        assert run.reason == then.reason
        assert [(each.step, each.digest) for each in run.commits] == [
            (each.step, each.digest) for each in then.commits
        ]
        for name, found in answers.items():
            check_answers(version, asked[name], found)


@pytest.mark.parametrize("version", VERSIONS)
async def test_other_calls_of_the_version_before_are_answered(version: str, tmp_path: Path) -> None:
    """With a run that is new, for which workers of before may not know the rules."""
    run_id = "recorded-cancelled"
    async with (
        asyncio.timeout(PATIENCE_S),
        served(tmp_path) as (_, address),
        served_workers(version, [address]),
        grpc.aio.insecure_channel(address) as channel,
    ):
        for call in calls_of(version):
            of_client = call.by == "client" and call.run_id == run_id and call.responses
            if of_client or call.name in ("ListWorkers", "Heartbeat", "HeartbeatStream", "Leave"):
                check_answers(version, call, await answers_in_time(channel, call))


async def answers_in_time(channel: grpc.aio.Channel, call: Call) -> list[bytes]:
    """The answers to a call, which is made again, as by a client, for as long as the coordinator
    cannot do it yet: its workers may take longer to let go of a run than those of before did."""
    backoff = Backoff(0.01, 1.0)
    while True:
        try:
            return await all_of(raw(channel, call))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await backoff.pause()


async def all_of(answers: Any) -> list[bytes]:
    return [answer async for answer in answers]


@pytest.fixture(scope="module")
async def workers(version: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """Two workers of today, and a coordinator, for this version alone: the runs of the others have
    the same names, and would be gone on with."""
    async with open_rig(tmp_path_factory.mktemp("workers")) as rig:
        for name in WORKERS:
            # The recorded requests may name this machine, if it is the one that recorded them.
            await rig.start(name, STRATAGEM_WORKER_OPEN_FILES="false")
        yield rig


@pytest.mark.cluster
@pytest.mark.parametrize(("version", "run_id"), RUNS, scope="module")
async def test_a_worker_does_what_a_coordinator_of_before_has_it_do(
    version: str, run_id: str, workers: Rig
) -> None:
    met = [call.request for call in of_run(version, run_id) if call.name == "Rendezvous"]
    for request in met:
        workers.coordinator.sizes[run_id, request.fence.membership] = len(WORKERS)
    places = {worker.name: worker.address for worker in workers.workers}
    again = Again([call for call in of_run(version, run_id) if call.by == "coordinator"])
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for call in again.calls:
            group.create_task(again.make(call, places[call.to]))
    for call, answers in again.answers.items():
        assert kinds_of(call, answers) == kinds_of(call, call.responses)
        check_answers(version, call, answers)


_REPEATED = (
    ("GetGradients", grpc.StatusCode.NOT_FOUND),
    ("SetState", grpc.StatusCode.NOT_FOUND),
)
"""Refusals after which the coordinator tries again: it was too early for them."""
_MASKED = "Internal error from Core"
"""What gRPC makes of a refusal that comes while a message is written, see `write_message`."""


class Again:
    """The calls of a coordinator, made again in the order in which it made them: no request before
    what it had been answered by then, as it sends sums, say, of what members have sent it."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = [call for call in calls if call.responses]  # others were refused, or cancelled
        self.answers: dict[Call, list[bytes]] = {call: [] for call in self.calls}
        self._changed = asyncio.Condition()

    async def make(self, call: Call, place: str) -> None:
        await self._caught_up(call.begun_s)
        backoff = Backoff(0.01, 1.0)
        async with grpc.aio.insecure_channel(place) as channel:
            while not self.answers[call]:
                try:
                    stream: Any = channel.stream_stream(call.method)
                    async for answer in stream(self._requests(call), metadata=PROTOCOL):
                        self.answers[call].append(answer)
                        async with self._changed:
                            self._changed.notify_all()
                except grpc.aio.AioRpcError as error:
                    is_masked = call.name == "SetState" and error.details() == _MASKED
                    if (call.name, error.code()) not in _REPEATED and not is_masked:
                        raise
                    await backoff.pause()

    async def _requests(self, call: Call) -> AsyncIterator[bytes]:
        for note in call.notes:
            if note.is_request:
                await self._caught_up(note.at_s)
                yield note.content

    async def _caught_up(self, at_s: float) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: all(self._has_come(o, at_s) for o in self.calls))

    def _has_come(self, call: Call, at_s: float) -> bool:
        """Whether a call has been answered all that it had been answered at a time."""
        then = [note.content for note in call.notes if not note.is_request and note.at_s < at_s]
        return len(kinds_of(call, self.answers[call])) >= len(kinds_of(call, then))


def kinds_of(call: Call, answers: list[bytes]) -> list[str]:
    """What kinds of messages came, but for those that come as often as it happens, or not."""
    if call.name != "Execute":
        return [call.name] * len(answers)
    kinds = [str(call.read(each, is_request=False).WhichOneof("message")) for each in answers]
    return [kind for kind in kinds if kind in ("accepted", "result")]

"""Serve the calls of workers: heartbeats, tunnels, registration, failures and diagnosis."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from itertools import chain, islice
from typing import Any, Final, Protocol, TypeVar

import grpc
import structlog

from stratagem.common.base.errors import AlreadyExistsError, InvalidInputError, UnavailableError
from stratagem.common.base.ids import Incarnation, Party, RunId, check_run_id, check_worker_id
from stratagem.common.identity.callers import check_caller_again
from stratagem.common.observe.findings import environment_of
from stratagem.common.rpc.status_codes import shown
from stratagem.common.rpc.streams import PARKED
from stratagem.coordinator.app.app import App
from stratagem.coordinator.app.storage import tls_of
from stratagem.coordinator.core.commands import LoseWorker, ReportTrouble
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.core.strategy_calls import parties_of
from stratagem.coordinator.core.world import WorkerRecord
from stratagem.coordinator.effects.execute import let_in
from stratagem.coordinator.runtime.leases import HeartbeatStreams, Wire
from stratagem.coordinator.runtime.relay import RelayHub
from stratagem.coordinator.service import queries
from stratagem.coordinator.service.limits import check_address
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2, worker_pb2

# ---- Heartbeats ----
#
# A worker keeps its lease over one call, whose first message names the worker.


async def take_heartbeats(
    streams: HeartbeatStreams,
    requests: AsyncIterator[pb.HeartbeatStreamRequest],
    context: "grpc.aio.ServicerContext[Any, Any]",
    idle_s: float,
) -> None:
    """Receive the heartbeats of one worker until either side ends the call."""
    beats = aiter(requests)
    hello = await first_of(beats, idle_s)
    if hello is None:
        raise InvalidInputError.at("worker_id", "is missing: the call ended without a message")
    member = member_of(hello)
    for_run = check_run_id(hello.for_run) if hello.for_run else RunId("")

    async def receive() -> pb.HeartbeatStreamRequest | None:
        return await anext(beats, None)

    await streams.serve(member, for_run, hello, Wire(receive, context.write, check_caller_again))


# ---- Tunnels and registration ----
#
# One call carries connections to workers that cannot be dialled. This section also checks
# the names and addresses of the workers that register.

T = TypeVar("T")


class _OfWorker(Protocol):
    """A request that names the worker that sends it."""

    worker_id: str
    incarnation: str


def member_of(request: _OfWorker) -> Member:
    """Return the worker process that a request names. Raises InvalidInputError."""
    incarnation = request.incarnation
    if not 1 <= len(incarnation) <= 64:
        raise InvalidInputError.at(
            "incarnation", f"{incarnation[:80]!r} must have 1 to 64 characters"
        )
    worker_id = check_worker_id(request.worker_id)
    return Member(worker_id=worker_id, incarnation=Incarnation(incarnation))


def check_reachability(relay: RelayHub, request: pb.RegisterWorkerRequest) -> None:
    """Check that a registering worker has either an address or a tunnel."""
    if not request.capability.tunnelled:
        check_address(request.address)
        return
    relay.check_on()
    if request.address:
        raise InvalidInputError.at("address", "must be empty: the worker is tunnelled")


async def first_of(frames: AsyncIterator[T], idle_s: float) -> T | None:
    """Return the first message of a long-lived call; None if there is none. Raises TimeoutError."""
    try:
        async with asyncio.timeout(idle_s):
            return await anext(frames, None)
    except TimeoutError:
        raise TimeoutError(f"the first frame did not arrive within {idle_s:g} s") from None


async def relay_connection(
    relay: RelayHub,
    requests: AsyncIterator[pb.RelayRequest],
    context: "grpc.aio.ServicerContext[Any, Any]",
    idle_s: float,
) -> None:
    """Carry one tunnelled connection, from the frame that names its worker until it ends."""
    relay.check_on()
    frames = aiter(requests)
    hello = await first_of(frames, idle_s)
    if hello is None or hello.data:
        raise InvalidInputError.at("data", "the first frame names the worker, and has no bytes")
    member = member_of(hello)

    async def receive() -> bytes | None:
        frame = await anext(frames, None)
        return None if frame is None else frame.data

    async def send(data: bytes) -> None:
        await context.write(pb.RelayResponse(data=data))

    async def say_parked() -> None:
        await context.send_initial_metadata(PARKED)

    await relay.carry(member, receive, send, say_parked)


# ---- Failure detection ----
#
# The coordinator asks the workers themselves to distinguish a dead worker from a broken exchange.

log = structlog.get_logger()


async def investigate(app: App, run_id: RunId, party: Party, membership: int, reason: str) -> None:
    """Handle a failed exchange: report silent members as lost or, if none is, re-form the party.

    Do nothing if the membership is over already.
    """
    run = app.loop.state.runs.get(run_id)
    view = None if run is None else parties_of(run).get(party)
    if view is None or view.membership != membership:
        return
    answered = await asyncio.gather(*(_answers(app, member) for member in view.members))
    silent = [m for m, is_there in zip(view.members, answered, strict=True) if not is_there]
    names = [member.worker_id for member in silent]
    log.info("exchange failed", run_id=run_id, party=party, reason=reason, silent=names)
    for member in silent:
        await app.loop.submit(LoseWorker(member, f"does not answer ({reason})"))
    if not silent:
        await app.loop.submit(ReportTrouble(run_id, party, membership, reason))


async def dial_back(app: App, member: Member, address: str) -> None:
    """Call a registering worker back: it must answer, under its name, before it is accepted.

    Raises AlreadyExistsError if another process of that name is alive.
    """
    record = app.loop.state.workers.get(member.worker_id)
    is_other = record is not None and record.is_alive and record.member != member
    if record is not None and is_other and await _answers(app, record.member):
        where = record.address or "the end of a tunnel"
        message = f"worker {member.worker_id!r} lives at {where}; choose another name"
        raise AlreadyExistsError(message)
    link = app.links.open(member, address)
    try:
        trouble = await link.trouble(timeout_s=5.0)
        if trouble:
            why = await link.why_silent() or trouble
            where = address or "the end of its tunnel"
            name = member.worker_id
            raise UnavailableError(f"nobody answers at {where} as worker {name!r}: {why}")
    finally:
        await link.close()


async def _answers(app: App, member: Member) -> bool:
    try:
        return await app.links.to(member, app.loop.state).answers()
    except UnavailableError:
        return False


# ---- Diagnosis ----
#
# For `stratagem doctor`, every worker reports its condition and the other workers that it reaches.
# Among many workers each one probes the next few, in order of name, so another one probes every
# worker.

WORKER_TIMEOUT_S: Final = 8.0
MAX_PROBES: Final = 8
"""The number of peers that each worker probes; with over nine workers not every pair is probed."""
MAX_AT_ONCE: Final = 256
"""The most workers that are queried at the same time."""
_PACKAGES: Final = ("sqlalchemy", "safetensors")


async def diagnose(app: App, *, with_workers: bool = True) -> pb.DiagnoseResponse:
    """Diagnose all workers, and meanwhile the coordinator's environment."""
    settings = app.settings
    environment, diagnosed = await asyncio.gather(
        asyncio.to_thread(environment_of, settings.data_dir, _PACKAGES, tls_of(settings)),
        _workers(app, with_workers),
    )
    return pb.DiagnoseResponse(
        environment=environment,
        time_s=time.time(),
        term=app.loop.term,
        workers=diagnosed,
        store_id=app.store_id,
        refused=app.refusals.messages() if with_workers else (),
    )


async def _workers(app: App, are_wanted: bool) -> list[pb.WorkerDiagnosis]:
    if not are_wanted:
        return []
    listed = (record for record in app.loop.state.workers.values() if record.is_listed)
    workers = sorted(listed, key=lambda record: record.member.worker_id)
    alive = [worker for worker in workers if worker.is_alive]
    infos = queries.worker_infos(app.loop.state, workers, app.silent_s)
    places = {worker.member: place for place, worker in enumerate(alive)}
    room = asyncio.Semaphore(MAX_AT_ONCE)

    async def ask(worker: WorkerRecord, info: pb.WorkerInfo) -> pb.WorkerDiagnosis:
        async with room:
            return await _worker(app, worker, info, _neighbours(alive, places.get(worker.member)))

    return await asyncio.gather(*map(ask, workers, infos))


def _neighbours(alive: Sequence[WorkerRecord], place: int | None) -> list[WorkerRecord]:
    """Return the workers that the worker at this place probes: the next ones, in a circle."""
    if place is None:
        return []
    others = chain(islice(alive, place + 1, None), islice(alive, place))
    dialled = (other for other in others if not other.capability.tunnelled)
    return list(islice(dialled, MAX_PROBES))


async def _worker(
    app: App, worker: WorkerRecord, info: pb.WorkerInfo, neighbours: Sequence[WorkerRecord]
) -> pb.WorkerDiagnosis:
    diagnosis = pb.WorkerDiagnosis(info=info)
    if not worker.is_alive:
        diagnosis.problem = worker.reason or "is lost"
        return diagnosis
    probes = [
        types_pb2.PeerProbe(worker_id=neighbour.member.worker_id, address=neighbour.address)
        for neighbour in neighbours
    ]
    request = worker_pb2.DescribeRequest(with_environment=True, probes=probes)
    try:
        link = app.links.to(worker.member, app.loop.state)
        sent_s = time.time()
        quick = await link.stub.Describe(worker_pb2.DescribeRequest(), timeout=WORKER_TIMEOUT_S)
        received_s = time.time()
        description = await link.stub.Describe(request, timeout=WORKER_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        diagnosis.problem = shown(f"{error.code().name}: {error.details()}")
        return diagnosis
    except UnavailableError as error:
        diagnosis.problem = str(error)
        return diagnosis
    let_in(description)
    diagnosis.round_trip_s = received_s - sent_s
    if quick.time_s:  # an older worker does not say
        diagnosis.clock_offset_s = (sent_s + received_s) / 2 - quick.time_s
    diagnosis.environment.CopyFrom(description.environment)
    diagnosis.probes.extend(description.probes)
    return diagnosis

"""Asks every worker for its condition, and which other workers it reaches; for `stratagem doctor`.

Owns nothing: measures on request. With many workers each one probes the next few of them, in order
of name, so that every worker is probed by another one.
"""

import asyncio
import time
from collections.abc import Sequence
from itertools import chain, islice
from typing import Final

import grpc

from stratagem.common.base.errors import UnavailableError
from stratagem.common.observe.findings import environment_of
from stratagem.common.rpc.status_codes import shown
from stratagem.coordinator.app.app import App
from stratagem.coordinator.app.listeners import tls_of
from stratagem.coordinator.core.state import WorkerRecord
from stratagem.coordinator.effects.execution.report_intake import let_in
from stratagem.coordinator.service import protobuf_views
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2, worker_pb2

WORKER_TIMEOUT_S: Final = 8.0
MAX_PROBES: Final = 8
"""Probes per worker; with more than nine workers not every pair is probed."""
MAX_AT_ONCE: Final = 256
"""Workers that are asked at the same time."""
_PACKAGES: Final = ("sqlalchemy", "safetensors")


async def diagnose(app: App, *, with_workers: bool = True) -> pb.DiagnoseResponse:
    """Diagnose all workers at once, and the coordinator's own environment meanwhile."""
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
    workers = sorted(app.loop.state.workers.values(), key=lambda record: record.member.worker_id)
    alive = [worker for worker in workers if worker.is_alive]
    infos = protobuf_views.worker_infos(app.loop.state, workers, app.silent_s)
    places = {worker.member: place for place, worker in enumerate(alive)}
    room = asyncio.Semaphore(MAX_AT_ONCE)

    async def ask(worker: WorkerRecord, info: pb.WorkerInfo) -> pb.WorkerDiagnosis:
        async with room:
            return await _worker(app, worker, info, _neighbours(alive, places.get(worker.member)))

    return await asyncio.gather(*map(ask, workers, infos))


def _neighbours(alive: Sequence[WorkerRecord], place: int | None) -> list[WorkerRecord]:
    """Return the workers that follow the one at this place, around the circle."""
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
        told = await link.stub.Describe(request, timeout=WORKER_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        diagnosis.problem = shown(f"{error.code().name}: {error.details()}")
        return diagnosis
    except UnavailableError as error:
        diagnosis.problem = str(error)
        return diagnosis
    let_in(told)
    diagnosis.round_trip_s = received_s - sent_s
    if quick.time_s:  # one that is older does not say
        diagnosis.clock_offset_s = (sent_s + received_s) / 2 - quick.time_s
    diagnosis.environment.CopyFrom(told.environment)
    diagnosis.probes.extend(told.probes)
    return diagnosis

"""Start a coordinator process: `python -m stratagem.coordinator`."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import structlog
from grpc_reflection.v1alpha import reflection
from pydantic import ValidationError

from stratagem.common.base import errors
from stratagem.common.base.errors import StratagemError
from stratagem.common.base.files import whole_file
from stratagem.common.base.text import dialled_host, split_address
from stratagem.common.observe import tracing
from stratagem.common.observe.logs import setup_logging
from stratagem.common.process.file_descriptors import raise_descriptor_limit
from stratagem.common.process.process import told, tune_malloc
from stratagem.common.process.process_exit import MISTAKEN
from stratagem.common.rpc.admission import CallLimits
from stratagem.common.rpc.server import add_health, make_health_server, make_server
from stratagem.coordinator.app.app import App
from stratagem.coordinator.app.storage import CoordinatorSecurity, host_and_port
from stratagem.coordinator.observe.troubles import Refusals
from stratagem.coordinator.process.metrics import CoordinatorMonitor
from stratagem.coordinator.runtime.leader_gate import LeaderGate
from stratagem.coordinator.runtime.memory import small_portions
from stratagem.coordinator.runtime.settings import Settings
from stratagem.coordinator.service.service import CoordinatorServicer
from stratagem.coordinator.store.lead import FencedError
from stratagem.v1 import coordinator_pb2

STOP_GRACE_S = 1.0
FROM_WORKERS = (
    *("RegisterWorker", "Heartbeat", "HeartbeatStream", "Leave"),
    *("Rendezvous", "Suspect", "Relay"),
)
"""Calls that keep workers alive, and are exempt from the limit on the number of calls."""
EXIT_FENCED = 3

log = structlog.get_logger()


def main() -> None:
    """Run until SIGTERM or SIGINT, or until another coordinator has taken the lead."""
    try:
        settings = Settings()
    except ValidationError as error:
        print(told("stratagem coordinator", error), file=sys.stderr)
        sys.exit(MISTAKEN)
    setup_logging("coordinator", settings.log_level, settings.log_json)
    log.info("malloc", tuning=tune_malloc())
    log.info("descriptors", limit=raise_descriptor_limit())
    try:
        tracing.start("coordinator", settings.name)
        asyncio.run(_serve(settings))
    except* FencedError as group:
        log.error("another coordinator leads", reason=errors.told(group))
        sys.exit(EXIT_FENCED)
    except* (OSError, StratagemError) as group:
        log.error("coordinator ends", reason=errors.told(group))
        sys.exit(1)
    finally:
        tracing.stop()


async def _serve(settings: Settings) -> None:
    security = CoordinatorSecurity(settings)
    host, _ = host_and_port("listen", settings.listen)
    monitor = CoordinatorMonitor(settings)
    async with small_portions(), monitor.served(host) as metrics:
        await _serve_calls(settings, security, monitor, metrics)


async def _serve_calls(
    settings: Settings, security: CoordinatorSecurity, monitor: CoordinatorMonitor, metrics: str
) -> None:
    limits = CallLimits(settings.stream_idle_timeout_s, settings.max_calls, unlimited=FROM_WORKERS)
    refusals = Refusals()
    server = make_server(
        limits,
        gate=security.gate,
        calls=monitor.process.calls,
        on_refusal={"RegisterWorker": refusals.note},
    )
    if settings.reflection:
        name = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
        reflection.enable_server_reflection((name, reflection.SERVICE_NAME), server)
    address = security.listen(server)
    health_server = make_health_server()
    health = add_health(health_server)
    health_port = security.listen_for_probes(health_server)
    entrance = LeaderGate(settings.advertise or _dialled(address), health)
    server.add_generic_rpc_handlers((entrance,))
    await entrance.shut("waits for the lead")
    await server.start()
    await health_server.start()
    log.info("coordinator waits for the lead", address=address, health_port=health_port)
    try:
        monitor.app = app = await App.lead(settings, entrance, refusals)
        running = asyncio.create_task(app.run())
        await entrance.open(CoordinatorServicer(app))
        log.info("coordinator serves", address=address, health_port=health_port, pid=os.getpid())
        if settings.ready_file is not None:
            _write_ready(settings.ready_file, address, metrics)
        await _until_stopped(running)
    finally:
        await health.enter_graceful_shutdown()
        await server.stop(STOP_GRACE_S)
        await health_server.stop(STOP_GRACE_S)
    await app.loop.close()


def _dialled(bound: str) -> str:
    """Return the HOST:PORT at which others reach a listener that is bound to this address."""
    host, port = split_address(bound)
    return f"{dialled_host(host)}:{port}"


async def _until_stopped(running: asyncio.Task[None]) -> None:
    """Wait for a signal, or for the app to end on its own, which is always an error."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopped.set)
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done():
        await running
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def _write_ready(path: Path, address: str, metrics: str) -> None:
    facts = {"address": address, "pid": os.getpid(), "metrics_address": metrics}
    with whole_file(path, durable=False) as file:
        file.write(json.dumps(facts).encode())

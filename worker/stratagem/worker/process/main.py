"""Run the worker process: one event loop for gRPC, one thread for torch, their start and their end.

When asked to end, the worker announces the drain, ends its plans after the present step, reports
that it leaves, and exits with 0; or with PREEMPTED, where a launcher started it and a signal ended
it, so that it is started again.
"""

import asyncio
import atexit
import gc
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import structlog
import torch
from grpc_health.v1 import health_pb2
from pydantic import ValidationError

from stratagem.common.base.errors import InvalidInputError, StratagemError
from stratagem.common.base.files import whole_file
from stratagem.common.observe import tracing
from stratagem.common.observe.logs import identify, setup_logging
from stratagem.common.process.file_descriptors import raise_descriptor_limit
from stratagem.common.process.process import told
from stratagem.common.process.process_exit import MISTAKEN, PREEMPTED
from stratagem.common.rpc.admission import CallLimits
from stratagem.common.rpc.channel import (
    CoordinatorChannel,
    Coordinators,
    open_channel,
    split_addresses,
)
from stratagem.common.rpc.health_service import HealthService
from stratagem.common.rpc.server import add_health, make_health_server, make_server
from stratagem.common.rpc.streams import SocketFolder
from stratagem.common.tensors.manifest import Limits
from stratagem.v1 import types_pb2
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from stratagem.v1.peer_pb2_grpc import add_PeerServiceServicer_to_server
from stratagem.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from stratagem.worker.host.clock import TorchThread
from stratagem.worker.host.exit_record import DeviceFault
from stratagem.worker.host.stalls import StallLimits
from stratagem.worker.mesh.choice import MeshOffer
from stratagem.worker.mesh.peers import PeerServicer
from stratagem.worker.process.heartbeat import Agent, Identity
from stratagem.worker.process.host import (
    Reach,
    WorkerSecurity,
    capability_of,
    device_of,
    host_of,
    secure_rounds_of,
    server_socket,
)
from stratagem.worker.process.metrics import WorkerMonitor, process_stats
from stratagem.worker.process.settings import WorkerSettings, from_command_line
from stratagem.worker.process.tunnel import Tunnel
from stratagem.worker.service.diagnosis import say_mismatch
from stratagem.worker.service.service import WorkerLimits, WorkerServicer
from stratagem.worker.service.sessions import Sessions
from stratagem.worker.service.watchdog import Watchdog
from stratagem.worker.session.context import Host
from stratagem.worker.site.gate import SiteGate
from stratagem.worker.user_code import bundles as bundle_import
from stratagem.worker.user_code import watching

# ---- Shutdown by signals ----
#
# Schedulers repeat signals: at the end of a job's time Slurm sends SIGTERM to the step and, at
# once, to the job. So a repeat that follows closely is ignored. A later one, or a second Ctrl-C,
# ends the process at once.

REPEAT_S: Final = 2.0
"""Seconds within which a repeated signal counts as the same request."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Stop:
    """The request to end this process, and its cause."""

    reason: str = ""
    is_release: bool = False
    """True if the work is done, and no signal came before."""
    is_mistaken: bool = False
    """True if this process was started for a run that does not exist; a person must act."""
    is_replacement: bool = False
    """True if this process cannot compute any more and must be replaced."""
    is_stuck: bool = False
    """True if the running work will never end."""
    cause: str = ""
    """The reason why this process is stuck, for this process's log only."""
    told: asyncio.Event = field(default_factory=asyncio.Event)
    _first_s: float | None = None

    def release(self, reason: str) -> None:
        """Request the end because this process is not needed any more."""
        if not self.told.is_set():
            self.reason, self.is_release = reason, True
            self.told.set()

    def refuse(self, reason: str) -> None:
        """Request the end because this process was started for something that does not exist."""
        if not self.told.is_set():
            self.reason, self.is_mistaken = reason, True
            self.told.set()

    def replace(self, reason: str) -> None:
        """Request the end because another process must replace this one."""
        self.is_replacement = True
        if not self.told.is_set():
            self.reason = reason
            self.told.set()

    def give_up(self, cause: str) -> None:
        """Request the end because the torch thread is stuck: like `replace`, but without waiting
        for work.

        A process that is ending already keeps its status.
        """
        if not self.told.is_set():
            self.is_stuck, self.cause = True, cause
            self.replace("the torch thread was lost")

    def note(self, number: signal.Signals, now_s: float) -> bool:
        """Handle a signal; return whether the process must end at once."""
        if self._first_s is None:
            self._first_s = now_s
            if not self.told.is_set():
                self.reason = number.name
                self.told.set()
            return False
        return number is signal.SIGINT or now_s - self._first_s > REPEAT_S

    @property
    def is_preemption(self) -> bool:
        """Return whether a scheduler, not a person, has ended a process that was still needed."""
        is_done = self.is_release or self.is_replacement or self.is_mistaken
        return self.told.is_set() and not is_done and self.reason != signal.SIGINT.name

    def status(self, is_launched: bool) -> int:
        """Return the exit status.

        Supervisors restart a process whose status is not 0; launchers restart for PREEMPTED, and no
        one takes MISTAKEN for success.
        """
        if self.is_mistaken:
            return MISTAKEN
        if is_launched and (self.is_preemption or self.is_replacement):
            return PREEMPTED
        return 1 if self.is_replacement else 0


def stop_by_signals(preempt_signal: str) -> Stop:
    """Return a Stop that is set by SIGTERM, SIGINT and the given signal, if any."""
    stop, loop = Stop(), asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.note(number, loop.time()):
            _log.warning("second signal: exiting at once", signal=number.name)
            sys.stderr.flush()
            os._exit(1)

    numbers = {signal.SIGTERM, signal.SIGINT}
    if preempt_signal:
        numbers.add(signal.Signals[f"SIG{preempt_signal}"])
    if signal.SIGUSR1 not in numbers:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # __main__ did not know the signal yet
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    return stop


# ---- Main program ----

log = structlog.get_logger(__name__)

WAITS_FOR_OTHERS: Final = ("GetGradients",)
"""Calls in which the coordinator may be as slow as the slowest member."""

# The grace is for streams that carry the last results when the server stops.
UPLOAD_BEGINS_S: Final = 5.0
"""Seconds that a draining worker waits for requests for data that only it has."""
STOP_GRACE_S: Final = 2.0


def main(arguments: list[str], malloc: str = "", waiting: str = "") -> int:
    """Run one worker until it is asked to stop; return the exit code."""
    keep_forks_away()
    try:
        settings = from_command_line(arguments)
        device_of(settings.device)
        site = _site(settings)
    except ValidationError as error:
        print(told("stratagem worker", error), file=sys.stderr)
        return MISTAKEN
    except InvalidInputError as error:
        print(f"stratagem worker: {error}", file=sys.stderr)
        return 1  # a device or a file of this machine is missing, and may exist at the next start
    setup_logging(f"worker {settings.worker_id}", settings.log_level, settings.log_json)
    identify(worker_id=settings.worker_id)
    log.info("allocator", result=malloc or "untouched")
    log.info("threads", result=settings.threads_text, waiting=waiting or "untouched")
    log.info("descriptors", limit=raise_descriptor_limit())
    for reason in site.absent_data() if site is not None else ():
        log.warning("data of the site are not there; jobs that name them will fail", reason=reason)
    thread = TorchThread(settings.threads)
    thread.start()
    try:
        tracing.start("worker", settings.worker_id)
        with watching.installed():
            stop = asyncio.run(run(settings, thread, site))
    except StratagemError as error:
        log.error("worker cannot serve", reason=str(error))
        return 1
    finally:
        tracing.stop()
    status = stop.status(is_launched=settings.rendezvous is not None)
    if not thread.stop(timeout_s=1.0):
        why = stop.cause or stop.reason
        log.warning("user code did not end: this process does", reason=why, exit_status=status)
        sys.stderr.flush()
        os._exit(status)  # an orderly exit would wait for the thread
    return status


def keep_forks_away() -> None:
    """Make multiprocessing fork from a server process that has only imported torch.

    A fork of this process, with gRPC's threads in it, would be killed or hang; this concerns
    processes that the user's code starts, such as a DataLoader's. The server is started at its
    first use, by exec. Its sockets are in a folder that is removed even if this process is killed,
    unlike the one that multiprocessing makes.
    """
    sockets = SocketFolder()
    folder = Path(sockets.path("listener-01234567")).parent
    atexit.register(sockets.close)
    multiprocessing.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(["torch", bundle_import.__name__])


async def run(settings: WorkerSettings, thread: TorchThread, site: SiteGate | None = None) -> Stop:
    """Serve until a signal arrives, the work is done, or the device or the torch thread is lost,
    then drain; return the cause. site: decides on the accepted jobs."""
    stop = stop_by_signals(settings.preempt_signal)
    security = WorkerSecurity(settings)
    mesh = MeshOffer(security.mesh, torch.device(settings.device))
    capability = await _in_thread(thread, settings, site)
    capability.data_plane = security.data_plane
    policy = settings.allow_code.partition(":")[0] if site is None else site.code_policy
    capability.code_policy = policy
    capability.tunnelled, capability.ephemeral = settings.tunnel, settings.ephemeral
    capability.keeps_nothing = settings.data_dir is None
    capability.writes_states = settings.state_folder is not None
    capability.takes_signed_requests = settings.takes_signed_requests
    process = process_stats(settings)
    limits = CallLimits(
        settings.stream_idle_timeout_s, settings.max_calls, unhurried=WAITS_FOR_OTHERS
    )
    server, health_server = make_server(limits, gate=security.gate, calls=process.calls), None
    coordinators = Coordinators(split_addresses(settings.coordinator))
    async with AsyncExitStack() as opened:
        sockets = SocketFolder()
        opened.callback(sockets.close)
        address = security.listen(server, sockets)
        open_one = partial(open_channel, proof=security.proof, proxy=settings.proxy)
        channel = CoordinatorChannel(coordinators, open_one)
        await opened.enter_async_context(channel)
        stub = CoordinatorServiceStub(channel)
        reach = Reach(address, security.proof, stub, security.data_plane)
        secure = secure_rounds_of(settings, security, site)
        host = host_of(settings, thread, mesh, reach, site, secure)
        host.last_words.explain_faults()
        host.health.on_lost = partial(_device_lost, stop, host.loop)
        sessions = Sessions(host, settings.max_sessions)
        monitor = WorkerMonitor(process, host, sessions)
        metrics = await opened.enter_async_context(monitor.served(settings))
        servicer = WorkerServicer(host, sessions, capability, _limits(settings))
        add_WorkerServiceServicer_to_server(servicer, server)
        peers = PeerServicer(host.hub, settings.stream_idle_timeout_s)
        add_PeerServiceServicer_to_server(peers, server)
        await server.start()
        if settings.health_port is not None:
            health_server = await _serve_health(security, settings.health_port)
        identity = Identity(
            settings.worker_id, host.incarnation, address, capability, host.last_words.previous
        )
        log.info("serving", address=address, device=settings.device)
        agent = Agent(coordinators, identity, sessions.fences.see_term, host.clock, security.proof)
        agent.proxy = settings.proxy
        sessions.fences.ask_with(agent.beat)
        agent.on_registered = host.last_words.registered
        if security.data_plane == "trusted" and site is None:  # else there is no folder of states
            agent.on_store = partial(_look_at_states, host)
        agent.for_run = settings.for_run
        agent.on_released = partial(_released, stop, settings.for_run)
        agent.on_unknown = partial(_unknown, stop, settings.for_run)
        monitor.agent = agent
        tunnel = _tunnel(settings, agent, server_socket(sockets)) if settings.tunnel else None
        tasks = [
            asyncio.create_task(_join_once_warm(agent, thread, tunnel)),
            asyncio.create_task(_watchdog(settings, host, sessions, stop).run()),
        ]
        if tunnel is not None:
            tasks.append(asyncio.create_task(tunnel.run()))
        try:
            await _first_of(tasks, agent.is_registered, stop.told)
            if settings.ready_file is not None and not stop.told.is_set():
                _write_ready(settings.ready_file, identity, health_server, metrics)
            await _first_of(tasks, stop.told)
            host.last_words.stopped()
            await _drain(settings, agent, sessions, server, health_server, stop)
            await agent.leave(f"drained after {stop.reason}")
            log.info("drained")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            host.blobs.clear()
            host.user_code.bundles.close()
    return stop


def _released(stop: Stop, run_id: str) -> None:
    """Request the end of this process, since the run for which it was started has ended."""
    if not stop.told.is_set():
        log.warning("not needed: the run has ended", run=run_id)
    stop.release(f"the end of run {run_id}")


def _unknown(stop: Stop, run_id: str) -> None:
    """Request the end of this process: the coordinator does not know the run it was started for."""
    if not stop.told.is_set():
        log.error("no such run: its id is misspelt, or it was deleted", run=run_id)
    stop.refuse(f"learning that no run {run_id} is known")


def _look_at_states(host: Host, store_id: str) -> None:
    """Compare the folder of states with the coordinator's, in a thread, as disks may be slow."""
    folder = None if host.states is None else host.states.folder
    host.loop.run_in_executor(None, say_mismatch, folder, store_id)


def _device_lost(stop: Stop, loop: asyncio.AbstractEventLoop, fault: DeviceFault) -> None:
    """End this process after it has lost its device.

    If a job has caused that, the job is told first; otherwise the process ends like a crash, after
    which its work is repeated.
    """
    log.error("device lost: this process ends, to be started again", reason=fault.reason)
    if not fault.is_the_jobs:
        sys.stderr.flush()
        os._exit(1)
    loop.call_soon_threadsafe(stop.replace, f"the device was lost: {fault.reason}")


def _watchdog(settings: WorkerSettings, host: Host, sessions: Sessions, stop: Stop) -> Watchdog:
    """Make the watchdog, which ends this process if the torch thread is stuck in an ended plan
    while others wait."""

    def give_up(cause: str) -> None:
        log.error("torch thread lost: this process ends, to be started again", reason=cause)
        stop.give_up(cause)

    limits = StallLimits(
        settings.stall_report_s, settings.abort_grace_s, settings.compile_timeout_s
    )
    return Watchdog(host, sessions, limits, give_up)


def _tunnel(settings: WorkerSettings, agent: Agent, server_path: str) -> Tunnel:
    return Tunnel(
        agent.coordinators,
        agent.identity.worker_id,
        agent.identity.incarnation,
        server_path,
        agent.proof,
        settings.proxy,
    )


def _limits(settings: WorkerSettings) -> WorkerLimits:
    return WorkerLimits(
        tensors=Limits(
            max_tensors=settings.max_state_tensors, max_total_bytes=settings.max_state_bytes
        ),
        idle_timeout_s=settings.stream_idle_timeout_s,
        wait_s=settings.exchange_timeout_s,
    )


@dataclass(frozen=True, slots=True)
class _Health:
    server: grpc.aio.Server
    servicer: HealthService
    address: str


async def _tell_outcomes(settings: WorkerSettings, sessions: Sessions) -> None:
    """Accept no new work, and report the error of the job that has lost the device before
    announcing the drain, since the coordinator would otherwise repeat the segment elsewhere."""
    sessions.drain()
    try:
        async with asyncio.timeout(settings.drain_grace_s):
            await sessions.until_reported()
    except TimeoutError:
        log.warning("not idle in time", grace_s=settings.drain_grace_s)


async def _drain(
    settings: WorkerSettings,
    agent: Agent,
    sessions: Sessions,
    server: grpc.aio.Server,
    health_server: _Health | None,
    stop: Stop,
) -> None:
    """Accept no new work, announce the drain, and stop serving once running plans have finished
    their step, unless they are stuck."""
    if stop.is_replacement and not stop.is_stuck:
        await _tell_outcomes(settings, sessions)
    agent.drain()
    sessions.drain()
    log.info("draining", grace_s=settings.drain_grace_s)
    if health_server is not None:
        await health_server.servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    try:
        async with asyncio.timeout(settings.drain_grace_s):
            if not stop.is_stuck:
                await sessions.idle()
            await agent.until_drain_is_announced()
            await sessions.until_uploaded(UPLOAD_BEGINS_S)
    except TimeoutError:
        log.warning("not idle in time", grace_s=settings.drain_grace_s)
    await server.stop(STOP_GRACE_S)
    if health_server is not None:
        await health_server.server.stop(None)


async def _join_once_warm(agent: Agent, thread: TorchThread, tunnel: Tunnel | None) -> None:
    """Warm up, then register and send heartbeats, since others would wait for a worker that still
    imports.

    A tunnelled worker is called back through its tunnel when it registers.
    """
    loop, is_warm = asyncio.get_running_loop(), asyncio.Event()

    def warm_up() -> None:
        # The collector need not examine modules again: a full pass, as at the end of every run,
        # then takes 1 ms and not 60.
        gc.collect()
        gc.freeze()
        with suppress(RuntimeError):  # the loop is closed: the process was told to stop meanwhile
            loop.call_soon_threadsafe(is_warm.set)

    thread.submit(warm_up)
    await is_warm.wait()
    if tunnel is not None:
        await tunnel.is_parked.wait()
    await agent.run()


async def _first_of(tasks: Sequence[asyncio.Task[None]], *events: asyncio.Event) -> None:
    """Wait for the first of these events. Raises the error of a task, which ends the process."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait((*tasks, *waiting), return_when=asyncio.FIRST_COMPLETED)
        for ended in tasks:
            if ended.done():
                ended.result()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _site(settings: WorkerSettings) -> SiteGate | None:
    """Make the gate for the site's file, if any. Raises InvalidInputError for a wrong file."""
    if settings.site is None:
        return None
    try:
        return SiteGate(settings.site, settings.worker_id, tuple(settings.import_path))
    except InvalidInputError as error:
        raise InvalidInputError(f"--site {settings.site}: {error}") from None


async def _in_thread(
    thread: TorchThread, settings: WorkerSettings, site: SiteGate | None
) -> types_pb2.Capability:
    """Measure this worker's capability in the torch thread, and return it."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[types_pb2.Capability] = loop.create_future()

    def ask() -> None:
        try:
            local = settings.local_data if site is None else site.data_names
            capability = capability_of(torch.device(settings.device), local, settings.tags)
        except Exception as error:  # raised again where the result is awaited
            loop.call_soon_threadsafe(answer.set_exception, error)
        else:
            loop.call_soon_threadsafe(answer.set_result, capability)

    thread.submit(ask)
    return await answer


async def _serve_health(security: WorkerSecurity, port: int) -> _Health:
    """Serve health checks on a separate port, where they do not wait behind tensors."""
    server = make_health_server()
    servicer = add_health(server)
    address = security.listen_for_probes(server, port)
    await server.start()
    return _Health(server, servicer, address)


def _write_ready(
    path: Path, identity: Identity, health_server: _Health | None, metrics: str
) -> None:
    facts = {
        "address": identity.address or "tunnel",
        "pid": os.getpid(),
        "incarnation": identity.incarnation,
        "health_address": health_server.address if health_server is not None else "",
        "metrics_address": metrics,
    }
    with whole_file(path, durable=False) as file:
        file.write(json.dumps(facts).encode())

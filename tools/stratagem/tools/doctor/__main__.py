"""`stratagem doctor --worker-settings`: what is wrong with the settings of a worker, where it runs.

`python -m stratagem.tools.doctor OPTIONS` takes what `stratagem worker` takes, tries each of the
settings as the worker would use it, and prints findings as a JSON list. It registers nowhere, and
the worker itself may run meanwhile. Modules that `--allow` names are imported, as jobs would have
them imported.
"""

import asyncio
import dataclasses
import json
import socket
import sys
import time
from collections.abc import Iterator
from typing import Final

import grpc
from pydantic import ValidationError

from stratagem.common.base.errors import InvalidInputError, StandbyError, StratagemError
from stratagem.common.base.text import is_loopback, split_address
from stratagem.common.observe import findings
from stratagem.common.observe.findings import Finding, Level
from stratagem.common.observe.metrics_server import Guard
from stratagem.common.process.process import told
from stratagem.common.rpc.channel import Proof, open_channel, split_addresses
from stratagem.common.rpc.probe import identity_problem
from stratagem.common.rpc.server import make_server
from stratagem.common.rpc.status_codes import from_rpc_error, name_of
from stratagem.common.rpc.streams import SocketFolder
from stratagem.common.tensors.leaves import StateFolder
from stratagem.tools.doctor.worker_findings import local_findings
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from stratagem.worker.process.host import WorkerSecurity
from stratagem.worker.process.settings import WorkerSettings, advertised, from_command_line
from stratagem.worker.service.diagnosis import probe, surroundings

CALL_TIMEOUT_S: Final = 10.0


def main(arguments: list[str]) -> int:
    """Print the findings; 0 also where they are bad."""
    try:
        settings = from_command_line(arguments)
    except ValidationError as error:
        report = [_bad_settings(line) for line in told("stratagem worker", error).splitlines()]
    else:
        report = asyncio.run(examine(settings))
    print(json.dumps([dataclasses.asdict(finding) for finding in report]))
    return 0


async def examine(settings: WorkerSettings) -> list[Finding]:
    """Everything that can be said about a worker that would be started with these settings."""
    name = settings.name
    try:
        security = WorkerSecurity(settings)
    except InvalidInputError as error:
        own = await asyncio.to_thread(surroundings, settings.data_dir, Proof())
        return [_bad_settings(str(error)), *await asyncio.to_thread(local_findings, settings, own)]
    root = settings.state_folder
    folder = None if root is None else StateFolder(root)
    own = await asyncio.to_thread(surroundings, settings.data_dir, security.proof, folder)
    report = [
        *findings.certificate(name, own, time.time()),
        *await asyncio.to_thread(local_findings, settings, own),
        *([] if settings.tunnel else _exchange(name, security)),
        *_metrics(settings),
        await _listening(settings, security),
        *await asyncio.to_thread(_advertising, settings),
    ]
    for address in split_addresses(settings.coordinator):
        report += await _coordinator(address, settings, security, own)
    return report


def _bad_settings(said: str) -> Finding:
    advice = "the worker does not start so; `stratagem worker --help` tells what it takes"
    return Finding("settings", "worker", Level.FAIL, said, advice)


# ---- the coordinator ----


async def _coordinator(
    address: str, settings: WorkerSettings, security: WorkerSecurity, own: types_pb2.Environment
) -> list[Finding]:
    name, proof, proxy = settings.name, security.proof, settings.proxy
    try:
        async with open_channel(address, proof, proxy=proxy) as channel:
            stub = CoordinatorServiceStub(channel)
            sent_s = time.time()
            answer = await stub.Diagnose(
                pb.DiagnoseRequest(without_workers=True), timeout=CALL_TIMEOUT_S
            )
            received_s = time.time()
    except grpc.aio.AioRpcError as error:
        problem = (
            "" if name_of(error) else await identity_problem(error, address, proof, proxy=proxy)
        )
        if not problem and "Connection refused" in (error.details() or ""):
            problem = "nobody listens there: connection refused"
        return [_no_answer(address, from_rpc_error(error), problem)]
    except StratagemError as error:
        return [_no_answer(address, error)]
    round_trip_s = received_s - sent_s
    # The answer's time was read at its end, half a round trip ago at most.
    offset_s = answer.time_s + round_trip_s / 2 - received_s
    may_see = security.data_plane == "trusted" and settings.site is None
    return [
        findings.connection(address, round_trip_s, answer.term),
        *findings.versions({name: own, "coordinator": answer.environment}),
        findings.clock(name, offset_s, round_trip_s),
        *findings.states(name, own, answer.store_id, may_see=may_see),
    ]


def _no_answer(address: str, error: StratagemError, problem: str = "") -> Finding:
    if isinstance(error, StandbyError):
        return Finding("connection", address, Level.OK, f"stands by: {error}")
    told = StratagemError(problem) if problem else error
    return Finding("connection", address, Level.FAIL, str(told), findings.advice_on(told))


# ---- how others reach it ----


async def _listening(settings: WorkerSettings, security: WorkerSecurity) -> Finding:
    """Check that `--listen` can be bound, or is bound by this very worker."""
    server, sockets = make_server(), SocketFolder()
    try:
        security.listen(server, sockets)
    except InvalidInputError as error:
        return _bad_settings(str(error))
    except StratagemError as error:
        there = await probe(security.proof, settings.name, settings.listen)
        if not there.problem:
            found = f"worker {settings.name} serves at {settings.listen} now"
            return Finding("listen", settings.name, Level.OK, found)
        advice = "choose another port with --listen, or end the program that has it"
        return Finding("listen", settings.name, Level.FAIL, f"{error}: {there.problem}", advice)
    finally:
        await server.stop(None)
        sockets.close()
    found = "nobody dials it: it has a tunnel" if settings.tunnel else f"{settings.listen} is free"
    return Finding("listen", settings.name, Level.OK, found)


def _metrics(settings: WorkerSettings) -> Iterator[Finding]:
    """Check that the TLS and token files of the metrics endpoint can be used."""
    if settings.metrics_port is None:
        return
    try:
        guard = Guard.of(settings)
        guard.ssl_context()
        if guard.token_file is not None:
            guard.token()
    except InvalidInputError as error:
        yield _bad_settings(str(error))
        return
    found = "over HTTPS" if guard.has_tls else "in plaintext"
    yield Finding("metrics", settings.name, Level.OK, found)


def _advertising(settings: WorkerSettings) -> Iterator[Finding]:
    """Check that other processes can resolve and reach the address that this worker advertises:
    nobody dials one with a tunnel."""
    if settings.tunnel:
        return
    host = split_address(advertised(settings, split_address(settings.listen)[1]))[0].strip("[]")
    advice = "set --advertise to a HOST by which the coordinator and other workers reach this one"
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        found = f"{host}, which others are told to dial, is no known name here: {error.strerror}"
        yield Finding("advertise", settings.name, Level.WARN, found, advice)
        return
    coordinators = split_addresses(settings.coordinator)
    elsewhere = [each for each in coordinators if not is_loopback(split_address(each)[0])]
    if elsewhere and is_loopback(host):
        found = f"others are told to dial {host}, which is themselves; {elsewhere[0]} is elsewhere"
        yield Finding("advertise", settings.name, Level.FAIL, found, advice)
    else:
        yield Finding("advertise", settings.name, Level.OK, f"others are told to dial {host}")


def _exchange(name: str, security: WorkerSecurity) -> Iterator[Finding]:
    try:
        found = f"data plane {security.data_plane}, mesh {security.mesh}"
    except InvalidInputError as error:
        yield _bad_settings(str(error))
    else:
        yield Finding("exchange", name, Level.OK, found)


if __name__ == "__main__":
    # What the settings say of the allocator holds for a worker, which tunes it as it starts.
    from stratagem.common.process.process import tune_malloc

    tune_malloc()
    sys.exit(main(sys.argv[1:]))

"""Check a worker's settings against its machine: disk, folders, devices, code that jobs may name.

`python -m stratagem.tools.doctor OPTIONS` (`stratagem doctor --worker-settings`) takes the options
of `stratagem worker`, tries each of the settings as the worker would use it, and prints findings as
a JSON list. It registers nowhere, and the worker itself may run meanwhile. It imports the modules
that `--allow` names, as jobs would, and changes nothing else. It blocks.
"""

import asyncio
import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import grpc
import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from stratagem.common.base.errors import InvalidInputError, StandbyError, StratagemError
from stratagem.common.base.text import counted, is_loopback, split_address
from stratagem.common.observe import findings
from stratagem.common.observe.findings import Finding, Level
from stratagem.common.observe.metrics_server import Guard
from stratagem.common.process.cpu_threads import available_cores
from stratagem.common.process.process import told
from stratagem.common.rpc.channel import Proof, open_channel, split_addresses
from stratagem.common.rpc.probe import identity_problem
from stratagem.common.rpc.server import make_server
from stratagem.common.rpc.status_codes import from_rpc_error, name_of
from stratagem.common.rpc.streams import SocketFolder
from stratagem.common.tensors.leaves import StateFolder
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from stratagem.worker.numerics.precision import obstacles
from stratagem.worker.pipeline.activation_store import ActivationStore
from stratagem.worker.process.host import WorkerSecurity, capability_of, device_of
from stratagem.worker.process.settings import WorkerSettings, advertised, from_command_line
from stratagem.worker.service.diagnosis import probe, surroundings
from stratagem.worker.site.file import absent_data, read_site
from stratagem.worker.user_code.entrypoints import EntryPoints

# ---- Local findings ----
#
# Each check is a function from the settings to findings.

_WILD: Final = frozenset("*?[")


def local_findings(settings: WorkerSettings, own: types_pb2.Environment) -> list[Finding]:
    """Return the findings that need no network. own: the environment of this process."""
    return [
        *findings.limits(settings.worker_id, own),
        *_data_dir(settings),
        *findings.disk(settings.worker_id, own),
        *_device(settings, own),
        *_folders(settings.worker_id, "import path", settings.import_path),
        *_data_roots(settings),
        *_local_data(settings),
        *_site(settings),
        *_activation_store(settings),
        *_allowed(settings),
    ]


def _data_dir(settings: WorkerSettings) -> Iterator[Finding]:
    """Check the data folder; a missing folder is fine if the worker may create it."""
    folder = settings.data_dir
    if folder is None or folder.is_dir():
        return
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        yield Finding("disk", settings.worker_id, Level.OK, f"{folder} will be made in {there}")
    else:
        advice = "make the folder for the worker's user, or name another one as --data-dir"
        found = f"{folder} is not there, and cannot be made in {there}"
        yield Finding("disk", settings.worker_id, Level.FAIL, found, advice)


def _device(settings: WorkerSettings, own: types_pb2.Environment) -> Iterator[Finding]:
    torch.set_num_threads(settings.threads)
    try:
        device = device_of(settings.device)
        capability = capability_of(device, settings.local_data, settings.tags)
    except (RuntimeError, StratagemError) as error:
        there = ", ".join(f"cuda:{n}" for n in range(len(own.cuda_devices))) or "none"
        advice = f"CUDA devices here: {there}; install a torch built for CUDA, or use --device cpu"
        found = str(error).partition("\n")[0]
        yield Finding("device", settings.worker_id, Level.FAIL, found, advice)
        return
    yield from findings.torch(settings.worker_id, own, capability)
    yield Finding("numerics", settings.worker_id, Level.OK, capability.numerics_description)
    yield _precision(settings.worker_id, device)
    num_processors = available_cores()
    if settings.threads > num_processors:
        advice = "threads that share a processor wait for each other: set --threads"
        found = f"{settings.threads} threads on {num_processors} processors"
        yield Finding("threads", settings.worker_id, Level.WARN, found, advice)


def _precision(name: str, device: torch.device) -> Finding:
    """Report the kinds of layers that the device cannot train in some precision; jobs that need
    them are refused (numerics/precision.py)."""
    missing = [f"{kind} as {numbers}" for numbers, kind, _ in obstacles(device)]
    found = "all kinds of layers can be trained in all precisions"
    if missing:
        found += f", but {', '.join(missing)}"
    return Finding("precision", name, Level.OK, found)


def _folders(name: str, check: str, folders: Iterable[str]) -> Iterator[Finding]:
    for folder in folders:
        if os.access(folder, os.R_OK | os.X_OK) and Path(folder).is_dir():
            yield Finding(check, name, Level.OK, folder)
        else:
            reason = "may not be read by this user" if Path(folder).is_dir() else "is no folder"
            advice = f"mount it here, or name another one as --{check.replace(' ', '-')}"
            yield Finding(check, name, Level.FAIL, f"{folder} {reason}", advice)


def _data_roots(settings: WorkerSettings) -> Iterator[Finding]:
    yield from _folders(settings.worker_id, "data root", settings.data_root)
    if not settings.data_roots:
        found = "none: jobs may not name files of this worker (data.path)"
        yield Finding("data root", settings.worker_id, Level.OK, found)


def _local_data(settings: WorkerSettings) -> Iterator[Finding]:
    for name, file in settings.local_data.items():
        try:
            with safe_open(file, "pt") as opened:
                keys = sorted(opened.keys())
        except (OSError, SafetensorError) as error:
            advice = "name a .safetensors file that this user may read: --local-data NAME=FILE"
            yield Finding("local data", settings.worker_id, Level.FAIL, f"{name}: {error}", advice)
        else:
            found = f"{name}: {', '.join(keys)}"
            yield Finding("local data", settings.worker_id, Level.OK, found)


def _site(settings: WorkerSettings) -> Iterator[Finding]:
    """Check the site file, and that the functions that load the site's data exist."""
    if settings.site is None:
        return
    name, advice = settings.worker_id, "see docs/reference/site-file.md"
    try:
        site = read_site(settings.site)
        spec, paths = site.spec, tuple(settings.import_path)
        if absent := "; ".join(absent_data(site, paths)):
            raise InvalidInputError(absent)
        for key, data in spec.data.items():
            if data.entrypoint is not None:
                known = EntryPoints((data.entrypoint,), paths)
                known.resolve(data.entrypoint, f"data.{key}.entrypoint")
    except StratagemError as error:
        yield Finding("site", name, Level.FAIL, f"{settings.site}: {error}", advice)
    else:
        found = f"{spec.site}: {', '.join(spec.data)}; {counted(len(spec.accept), 'rule')}"
        yield Finding("site", name, Level.OK, found)


def _activation_store(settings: WorkerSettings) -> Iterator[Finding]:
    if not settings.activation_store:
        return
    try:
        ActivationStore(settings.activation_store).check(settings.worker_id)
    except StratagemError as error:
        advice = "docs/how-to/operations.md has the variables; all workers must name the same store"
        yield Finding("activation store", settings.worker_id, Level.FAIL, str(error), advice)
    else:
        found = settings.activation_store
        yield Finding("activation store", settings.worker_id, Level.OK, found)


def _allowed(settings: WorkerSettings) -> Iterator[Finding]:
    """Check that each pattern of `--allow` matches something, as far as it can be looked up."""
    entrypoints = EntryPoints(tuple(settings.allow), tuple(settings.import_path))
    if not settings.allow and settings.site is None:  # the site's file replaces the patterns
        advice = "list what jobs may name as --allow 'package.module:*'; graphs run without"
        found = "nothing: jobs that name code of theirs are refused"
        yield Finding("allow", settings.worker_id, Level.WARN, found, advice)
    for pattern in settings.allow:
        yield _pattern(settings.worker_id, entrypoints, pattern)


def _pattern(name: str, entrypoints: EntryPoints, pattern: str) -> Finding:
    module, colon, _ = pattern.partition(":")
    if not colon:
        advice = "write it as 'package.module:name', or 'package.*:*'"
        return Finding("allow", name, Level.FAIL, f"{pattern} matches no entry point", advice)
    try:
        if not _WILD & set(pattern):
            entrypoints.resolve(pattern, "allow")
            return Finding("allow", name, Level.OK, f"{pattern} is there")
        imported = _certain_part(module)
        if not imported:
            advice = "fit for machines of your own; elsewhere name packages: 'package.*:*'"
            found = f"{pattern} lets jobs name any module there is"
            return Finding("allow", name, Level.WARN, found, advice)
        entrypoints.import_allowed(imported, "allow", pattern)
    except StratagemError as error:
        advice = "install it for this worker, add its folder as --import-path, or mend --allow"
        return Finding("allow", name, Level.FAIL, str(error), advice)
    return Finding("allow", name, Level.OK, f"{pattern}: {imported} can be imported")


def _certain_part(module: str) -> str:
    """Return the leading packages of a module pattern such as "a.b.*", up to the first wildcard."""
    parts = module.split(".")
    wild = next((n for n, part in enumerate(parts) if _WILD & set(part)), len(parts))
    return ".".join(parts[:wild])


# ---- Main program ----

CALL_TIMEOUT_S: Final = 10.0


def main(arguments: list[str]) -> int:
    """Print the findings as JSON; return the exit status 0 even if some findings are bad."""
    try:
        settings = from_command_line(arguments)
    except ValidationError as error:
        report = [_bad_settings(line) for line in told("stratagem worker", error).splitlines()]
    else:
        report = asyncio.run(examine(settings))
    print(json.dumps([dataclasses.asdict(finding) for finding in report]))
    return 0


async def examine(settings: WorkerSettings) -> list[Finding]:
    """Return all findings about a worker that would start with these settings."""
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


# ---- Reach of the coordinator ----


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
    # The time in the answer was read at its end, at most half a round trip ago.
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


# ---- Reach from other processes ----


async def _listening(settings: WorkerSettings, security: WorkerSecurity) -> Finding:
    """Check that `--listen` can be bound, or that this very worker serves there already."""
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
    """Check that the TLS and token files of the metrics endpoint are usable."""
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
    """Check that other processes can resolve and reach the worker's advertised address, unless it
    uses a tunnel."""
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
    # The finding on the allocator is about a worker, which tunes it at its start.
    from stratagem.common.process.process import tune_malloc

    tune_malloc()
    sys.exit(main(sys.argv[1:]))

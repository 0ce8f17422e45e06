"""Looks for what is wrong with a client, its coordinator and the workers, and says what to do.

Owns the thresholds and the words. Each check is a function from what was measured to findings; what
there is to measure comes from `Diagnose`, and from this process. Nothing here changes anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stratagem.client.calls import Connection
from stratagem.common.environment import environment_of
from stratagem.common.errors import (
    InvalidInputError,
    PermissionDeniedError,
    StratagemError,
    UnauthenticatedError,
    WrongStateError,
)
from stratagem.common.rpc.channel import Proof
from stratagem.common.rpc.options import PROTOCOL_VERSION
from stratagem.common.rpc.tls import Role
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2

SLOW_ROUND_TRIP_S: Final = 0.25
SKEW_S: Final = 1.0
MIN_OPEN_FILES: Final = 1024
LOW_DISK_BYTES: Final = 5 * 2**30
LOW_DISK_SHARE: Final = 0.1
SLOW_FSYNC_S: Final = 0.03
LOW_SHARED_MEMORY_BYTES: Final = 64 * 2**20
EXPIRES_SOON_S: Final = 14 * 86_400.0
NUM_ROUND_TRIPS: Final = 3
_MUST_AGREE: Final = ("stratagem",)
_SHOULD_AGREE: Final = ("grpcio", "protobuf")
_WORKERS_SHOULD_AGREE: Final = ("python", "torch", "numpy")


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found about one process, and what to do where that is not well."""

    check: str
    about: str
    level: Level
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that findings are made from. Times are of this process's clock."""

    client: types_pb2.Environment
    answer: pb.DiagnoseResponse
    round_trip_s: float
    clock_offset_s: float
    """What to add to this clock to have the coordinator's."""
    now_s: float


async def examine(address: str, proof: Proof) -> list[Finding]:
    """Everything that can be said about the coordinator at an address, and its workers."""
    own = environment_of(None, ("torch",), proof.tls)
    findings = [*_certificate("client", own, time.time()), *_role(proof), *_limits("client", own)]
    connection = Connection(address, 0.0, proof)
    try:
        measured = await _measure(connection, own)
    except StratagemError as error:
        return [*findings, _no_answer(address, error)]
    finally:
        await connection.close()
    return [*findings, *judge(address, measured)]


async def _measure(connection: Connection, own: types_pb2.Environment) -> Measured:
    times = []
    for _ in range(NUM_ROUND_TRIPS):
        began_s = time.perf_counter()
        await connection.call(connection.stub.ListWorkers, pb.ListWorkersRequest())
        times.append(time.perf_counter() - began_s)
    answer = await connection.call(connection.stub.Diagnose, pb.DiagnoseRequest())
    # The answer's time was read at its end, half a round trip ago.
    now_s, round_trip_s = time.time(), min(times)
    return Measured(own, answer, round_trip_s, answer.time_s + round_trip_s / 2 - now_s, now_s)


def _no_answer(address: str, error: StratagemError) -> Finding:
    return Finding("connection", address, Level.FAIL, str(error), _advice_on(error))


def _advice_on(error: StratagemError) -> str:
    """What to do when the coordinator cannot be asked."""
    said = str(error)
    match error:
        case UnauthenticatedError():
            return "name your certificate (--tls-cert, --tls-key) or your token (--token-file)"
        case PermissionDeniedError():
            return "use a certificate of a client, or a token with the scope that it names"
        case WrongStateError() if "protocol version" in said:
            return "run one version of stratagem here and there"
    if "wants TLS" in said:
        return "`stratagem certs show FILE` says whose certificates you have"
    if any(word in said for word in ("handshake", "SSL", "certificate", "Cannot check peer")):
        return (
            "--tls-ca must hold the authority of the coordinator's certificate, and that must name "
            "the host that you dial"
        )
    if "UNIMPLEMENTED" in said or "Method not found" in said:
        return "the coordinator is older than this command: upgrade it"
    return (
        "look whether it runs (`stratagem health HOST:HEALTH-PORT`), and whether the address, the "
        "firewall and the network let you reach it"
    )


def judge(address: str, measured: Measured) -> Iterator[Finding]:
    """What follows from what was measured; pure."""
    answer = measured.answer
    yield _connection(address, measured)
    yield from _versions(measured)
    yield _clock("client", measured.clock_offset_s, measured.round_trip_s)
    yield from _certificate("coordinator", answer.environment, measured.now_s)
    yield from _limits("coordinator", answer.environment)
    yield from _disk("coordinator", answer.environment)
    if not answer.workers:
        advice = "start one: `stratagem worker --coordinator HOST:PORT`; its log says what it meets"
        yield Finding("workers", "coordinator", Level.WARN, "no worker has registered", advice)
    for worker in answer.workers:
        yield from _worker(worker, measured.now_s)
    yield from _numerics(answer)


def _connection(address: str, measured: Measured) -> Finding:
    found = f"answers in {1e3 * measured.round_trip_s:.1f} ms, term {measured.answer.term}"
    found += f", protocol {PROTOCOL_VERSION}"
    if measured.round_trip_s <= SLOW_ROUND_TRIP_S:
        return Finding("connection", address, Level.OK, found)
    advice = "its event loop or the network is slow: look at stratagem_event_loop_lag_seconds"
    return Finding("connection", address, Level.WARN, found, advice)


def _worker(worker: pb.WorkerDiagnosis, now_s: float) -> Iterator[Finding]:
    name = worker.info.worker_id
    if not worker.info.is_alive:
        advice = "start it again, or forget it: runs go on without it"
        yield Finding("worker", name, Level.WARN, f"is lost: {worker.problem}", advice)
        return
    if worker.problem:
        advice = "the coordinator must reach its address: set --advertise, open its port"
        found = f"does not answer at {worker.info.address}: {worker.problem}"
        yield Finding("worker", name, Level.FAIL, found, advice)
        return
    yield Finding(
        "worker", name, Level.OK, f"answers the coordinator in {1e3 * worker.round_trip_s:.1f} ms"
    )
    yield _clock(name, worker.clock_offset_s, worker.round_trip_s)
    yield from _certificate(name, worker.environment, now_s)
    yield from _limits(name, worker.environment)
    yield from _disk(name, worker.environment)
    yield from _torch(worker)
    yield from _peers(worker)


def _clock(about: str, offset_s: float, round_trip_s: float) -> Finding:
    """offset_s: what to add to the clock of `about` to have the coordinator's."""
    found = f"{abs(offset_s):.3f} s {'behind' if offset_s > 0 else 'ahead of'} the coordinator's"
    found += f" (± {round_trip_s / 2:.3f} s)"
    if abs(offset_s) <= SKEW_S + round_trip_s:
        return Finding("clock", about, Level.OK, found)
    advice = (
        "keep the clocks together (chrony, systemd-timesyncd): nothing is decided by them, but "
        "times in logs and traces, and certificates, are judged by them"
    )
    return Finding("clock", about, Level.WARN, found, advice)


def _versions(measured: Measured) -> Iterator[Finding]:
    processes = {"client": measured.client, "coordinator": measured.answer.environment}
    workers = {
        each.info.worker_id: each.environment
        for each in measured.answer.workers
        if each.info.is_alive and not each.problem
    }
    processes |= workers
    yield from _agreement(processes, _MUST_AGREE, Level.FAIL, "run one version everywhere")
    yield from _agreement(
        processes, _SHOULD_AGREE, Level.WARN, "any will do; one version is easier to look after"
    )
    advice = "workers of one run compute the same bits only with the same versions"
    yield from _agreement(workers, _WORKERS_SHOULD_AGREE, Level.WARN, advice)


def _agreement(
    processes: dict[str, types_pb2.Environment],
    packages: tuple[str, ...],
    level: Level,
    advice: str,
) -> Iterator[Finding]:
    for package in packages:
        by_version: dict[str, list[str]] = {}
        for name, environment in processes.items():
            if environment.packages.get(package):
                by_version.setdefault(environment.packages[package], []).append(name)
        if len(by_version) == 1:
            (found,) = by_version
            yield Finding("versions", package, Level.OK, found)
        elif by_version:
            told = "; ".join(f"{each}: {', '.join(who)}" for each, who in by_version.items())
            yield Finding("versions", package, level, told, advice)


def _certificate(about: str, environment: types_pb2.Environment, now_s: float) -> Iterator[Finding]:
    if environment.certificate_problem:
        advice = "name files that can be read and fit together; `stratagem certs` makes them"
        yield Finding("certificate", about, Level.FAIL, environment.certificate_problem, advice)
    if not environment.certificate_expires_s:
        return
    left_s = environment.certificate_expires_s - now_s
    found = f"{environment.certificate}, expires in {left_s / 86_400:.0f} days"
    if left_s > EXPIRES_SOON_S:
        yield Finding("certificate", about, Level.OK, found)
        return
    advice = "write a new certificate to the same files; processes read them again by themselves"
    level = Level.WARN if left_s > 0 else Level.FAIL
    yield Finding("certificate", about, level, found if left_s > 0 else f"{found}: it has", advice)


def _role(proof: Proof) -> Iterator[Finding]:
    """A person who shows a worker's certificate is refused everywhere."""
    try:
        shown = None if proof.tls is None else proof.tls.read().cert_id
    except InvalidInputError:
        return  # said by _certificate
    if shown is not None and shown.role is not Role.CLIENT:
        advice = f"make one for a client: `stratagem certs`; this one is of a {shown.role}"
        yield Finding("certificate", "client", Level.FAIL, f"{shown} is no client", advice)


def _limits(about: str, environment: types_pb2.Environment) -> Iterator[Finding]:
    limit = environment.open_files_limit
    if limit >= MIN_OPEN_FILES:
        yield Finding("open files", about, Level.OK, f"at most {limit}")
    else:
        advice = f"raise it to {MIN_OPEN_FILES} or more: ulimit -n, LimitNOFILE=, compose's ulimits"
        yield Finding("open files", about, Level.WARN, f"at most {limit}", advice)
    if about != "client":
        yield _malloc(about, environment.malloc)


def _malloc(about: str, said: str) -> Finding:
    said = said.removeprefix("malloc: ")
    if said.startswith("tuned"):
        return Finding("malloc", about, Level.OK, said)
    advice = "tensor streams take about twice the CPU time so; unset STRATAGEM_MALLOC and MALLOC_*"
    return Finding("malloc", about, Level.WARN, said, advice)


def _disk(about: str, environment: types_pb2.Environment) -> Iterator[Finding]:
    if not environment.data_dir:
        return
    free, total = environment.data_free_bytes, environment.data_total_bytes
    found = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free at {environment.data_dir}"
    if free > LOW_DISK_BYTES and free > LOW_DISK_SHARE * total:
        yield Finding("disk", about, Level.OK, found)
    else:
        advice = (
            "make room, delete runs, or move --data-dir: a journal that is full ends the process"
        )
        yield Finding("disk", about, Level.WARN, found, advice)
    if not environment.fsync_s:
        advice = "the process must be able to write there"
        yield Finding("fsync", about, Level.FAIL, "cannot write to --data-dir", advice)
        return
    found = f"{1e3 * environment.fsync_s:.2f} ms to have 4 KiB on the disk"
    if environment.fsync_s <= SLOW_FSYNC_S:
        yield Finding("fsync", about, Level.OK, found)
    else:
        advice = "each decision waits for it: give --data-dir a local disk that is not shared"
        yield Finding("fsync", about, Level.WARN, found, advice)


def _torch(worker: pb.WorkerDiagnosis) -> Iterator[Finding]:
    environment, capability = worker.environment, worker.info.capability
    name, is_cuda = worker.info.worker_id, capability.device.startswith("cuda")
    backends = ", ".join(environment.backends) or "none"
    devices = ", ".join(environment.cuda_devices) or "none"
    found = f"{capability.device}, {capability.num_threads} threads; backends {backends}; "
    found += f"CUDA devices {devices}"
    needed = "nccl" if is_cuda else "gloo"
    if needed in environment.backends:
        yield Finding("torch", name, Level.OK, found)
    else:
        advice = f"torch was built without {needed}: workers exchange over gRPC, which is slower"
        yield Finding("torch", name, Level.WARN, found, advice)
    if environment.cuda_devices and not is_cuda:
        advice = "start it with --device cuda:N to train on it"
        yield Finding("device", name, Level.WARN, f"trains on the CPU, and has {devices}", advice)
    free = environment.shared_memory_bytes
    if free < LOW_SHARED_MEMORY_BYTES:
        advice = "ours needs none, but torch's data loaders do: compose's shm_size, an emptyDir"
        found = f"{free / 2**20:.0f} MiB free in /dev/shm"
        yield Finding("shared memory", name, Level.WARN, found, advice)


def _peers(worker: pb.WorkerDiagnosis) -> Iterator[Finding]:
    name = worker.info.worker_id
    for probe in worker.probes:
        if probe.problem:
            found = f"does not reach {probe.worker_id} at {probe.address}: {probe.problem}"
            advice = (
                "workers must reach each other: --advertise, ports, network policies, firewalls"
            )
            yield Finding("peers", name, Level.FAIL, found, advice)
    reached = [probe for probe in worker.probes if not probe.problem]
    if reached:
        slowest_s = max(probe.round_trip_s for probe in reached)
        found = f"reaches {len(reached)} other workers, the slowest in {1e3 * slowest_s:.1f} ms"
        yield Finding("peers", name, Level.OK, found)


def _numerics(answer: pb.DiagnoseResponse) -> Iterator[Finding]:
    by_fingerprint: dict[str, list[pb.WorkerInfo]] = {}
    for worker in answer.workers:
        if worker.info.is_alive:
            key = worker.info.capability.numerics_fingerprint
            by_fingerprint.setdefault(key, []).append(worker.info)
    if len(by_fingerprint) == 1:
        (fingerprint,) = by_fingerprint
        yield Finding("numerics", "workers", Level.OK, f"all have {fingerprint}")
    elif by_fingerprint:
        told = "; ".join(
            f"{', '.join(each.worker_id for each in who)}: {who[0].capability.numerics_description}"
            for who in by_fingerprint.values()
        )
        advice = (
            "a deterministic run takes workers of one kind only: give them the same torch, "
            "processor and --threads, or start jobs with execution.deterministic: false"
        )
        yield Finding("numerics", "workers", Level.WARN, told, advice)

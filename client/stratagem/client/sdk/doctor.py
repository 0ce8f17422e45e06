"""Diagnose a client, its coordinator and the workers, and advise what to do.

This module has the findings about all of them together; common/observe/findings.py has those about
one process. Each check is a function from measurements to findings; the measurements come from the
call `Diagnose` and from this process. Nothing is changed.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from stratagem.client.pictures.axes import duration
from stratagem.client.sdk.connection import Connection
from stratagem.common.base.errors import InvalidInputError, StratagemError
from stratagem.common.identity.tls import Role
from stratagem.common.observe import findings
from stratagem.common.observe.findings import Finding, Level, environment_of
from stratagem.common.rpc.channel import Proof
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2

NUM_ROUND_TRIPS: Final = 3
_WORKERS_SHOULD_AGREE: Final = ("python", "torch", "numpy")


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of client, coordinator and workers. Times are by this process's clock."""

    client: types_pb2.Environment
    answer: pb.DiagnoseResponse
    round_trip_s: float
    clock_offset_s: float
    """The time of the coordinator's clock minus that of this process's clock, in seconds."""
    now_s: float


async def examine(address: str, proof: Proof) -> list[Finding]:
    """Measure the coordinator at an address and its workers, and return all findings."""
    env = environment_of(None, ("torch",), proof.tls)
    of_client = [
        *findings.certificate("client", env, time.time()),
        *_role(proof),
        *findings.limits("client", env),
    ]
    connection = Connection(address, 0.0, proof)
    try:
        measured = await _measure(connection, env)
    except StratagemError as error:
        return [*of_client, _no_answer(address, error)]
    finally:
        await connection.close()
    return [*of_client, *judge(address, measured)]


async def _measure(connection: Connection, env: types_pb2.Environment) -> Measured:
    times = []
    for _ in range(NUM_ROUND_TRIPS):
        began_s = time.perf_counter()
        await connection.call(connection.stub.ListWorkers, pb.ListWorkersRequest(page_size=1))
        times.append(time.perf_counter() - began_s)
    answer = await connection.call(connection.stub.Diagnose, pb.DiagnoseRequest())
    # The answer's time was read at its end, half a round trip ago.
    now_s, round_trip_s = time.time(), min(times)
    return Measured(env, answer, round_trip_s, answer.time_s + round_trip_s / 2 - now_s, now_s)


def _no_answer(address: str, error: StratagemError) -> Finding:
    return Finding("connection", address, Level.FAIL, str(error), findings.advice_on(error))


def judge(address: str, measured: Measured) -> Iterator[Finding]:
    """Yield the findings that follow from the measurements; a pure function."""
    answer = measured.answer
    yield findings.connection(address, measured.round_trip_s, answer.term)
    yield from _versions(measured)
    yield findings.clock("client", measured.clock_offset_s, measured.round_trip_s)
    yield from findings.certificate("coordinator", answer.environment, measured.now_s)
    yield from findings.limits("coordinator", answer.environment)
    yield from findings.disk("coordinator", answer.environment)
    if not answer.workers and not answer.refused:
        advice = "start one: `stratagem worker --coordinator HOST:PORT`; its log shows any problem"
        yield Finding("workers", "coordinator", Level.WARN, "no worker is registered", advice)
    for worker in answer.workers:
        yield from _worker(worker, answer.store_id, measured.now_s)
    for refused in answer.refused:
        where = f" at {refused.address}" if refused.address else ""
        finding = f"asks to be registered{where}, and is refused: {refused.reason}"
        advice = (
            "fix the cause: it keeps asking, and registers then; for an address, set --advertise"
        )
        yield Finding("worker", refused.worker_id, Level.FAIL, finding, advice)
    yield from _numerics(answer)


def _worker(worker: pb.WorkerDiagnosis, store_id: str, now_s: float) -> Iterator[Finding]:
    name = worker.info.worker_id
    if worker.info.quarantine:
        advice = f"examine its machine, then `stratagem workers --release {name}`"
        text = f"is quarantined and gets no work: {worker.info.quarantine}"
        yield Finding("worker", name, Level.FAIL, text, advice)
    if not worker.info.is_alive:
        advice = "start it again, or ignore it: runs continue without it"
        finding = f"is lost, silent for {duration(worker.info.silent_s)}: {worker.problem}"
        yield Finding("worker", name, Level.WARN, finding, advice)
        return
    if worker.problem:
        advice = "the coordinator must reach its address: set --advertise, open its port"
        if worker.info.capability.tunnelled:
            advice = "its log says what keeps it from the coordinator: the network, or a proxy"
        where = worker.info.address or "the end of its tunnel"
        finding = f"does not answer at {where}: {worker.problem}"
        yield Finding("worker", name, Level.FAIL, finding, advice)
        return
    yield Finding(
        "worker", name, Level.OK, f"answers the coordinator in {1e3 * worker.round_trip_s:.1f} ms"
    )
    yield findings.clock(name, worker.clock_offset_s, worker.round_trip_s)
    yield from findings.certificate(name, worker.environment, now_s)
    yield from findings.limits(name, worker.environment)
    yield from findings.disk(name, worker.environment)
    yield from findings.torch(name, worker.environment, worker.info.capability)
    may_see = worker.info.capability.data_plane == "trusted"
    yield from findings.states(name, worker.environment, store_id, may_see=may_see)
    yield from _peers(worker)


def _versions(measured: Measured) -> Iterator[Finding]:
    processes = {"client": measured.client, "coordinator": measured.answer.environment}
    workers = {
        worker.info.worker_id: worker.environment
        for worker in measured.answer.workers
        if worker.info.is_alive and not worker.problem
    }
    processes |= workers
    yield from findings.versions(processes)
    advice = "workers of one run compute the same bits only with the same versions"
    yield from findings.agreement(workers, _WORKERS_SHOULD_AGREE, Level.WARN, advice)


def _role(proof: Proof) -> Iterator[Finding]:
    """Yield a finding if the certificate is not that of a client, as then every call is refused."""
    try:
        cert_id = None if proof.tls is None else proof.tls.read().cert_id
    except InvalidInputError:
        return  # findings.certificate reports it
    if cert_id is not None and cert_id.role is not Role.CLIENT:
        advice = f"make one for a client: `stratagem certs`; this one is for a {cert_id.role}"
        yield Finding("certificate", "client", Level.FAIL, f"{cert_id} is not a client", advice)


def _peers(worker: pb.WorkerDiagnosis) -> Iterator[Finding]:
    name = worker.info.worker_id
    for probe in worker.probes:
        if probe.problem:
            finding = f"does not reach {probe.worker_id} at {probe.address}: {probe.problem}"
            advice = (
                "workers must reach each other: --advertise, ports, network policies, firewalls"
            )
            yield Finding("peers", name, Level.FAIL, finding, advice)
    reached = [probe for probe in worker.probes if not probe.problem]
    if reached:
        slowest_s = max(probe.round_trip_s for probe in reached)
        finding = f"reaches {len(reached)} other workers, the slowest in {1e3 * slowest_s:.1f} ms"
        yield Finding("peers", name, Level.OK, finding)


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
        kinds = "; ".join(
            f"{', '.join(w.worker_id for w in who)}: {who[0].capability.numerics_description}"
            for who in by_fingerprint.values()
        )
        advice = (
            "a deterministic run takes workers of one kind only: give them the same torch, "
            "processor and --threads, or start jobs with execution.deterministic: false"
        )
        yield Finding("numerics", "workers", Level.WARN, kinds, advice)

"""Measure the environment of a process and state findings, with advice, for `stratagem doctor`."""

import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from stratagem.common.base.errors import (
    InvalidInputError,
    PermissionDeniedError,
    StratagemError,
    UnauthenticatedError,
    WrongStateError,
)
from stratagem.common.base.ids import PROTOCOL_VERSION
from stratagem.common.identity.tls import TlsFiles, first_to_end
from stratagem.common.process import process
from stratagem.common.tensors.leaves import folder_mismatch
from stratagem.v1 import types_pb2

# ---- Measurement ----
#
# The measurement covers versions, limits, disk and certificates. It runs on request only: writing
# to the disk takes a while, so it must not run on an event loop. It judges nothing.

PACKAGES: Final = ("stratagem", "grpcio", "protobuf", "numpy", "pydantic")
"""The packages whose versions every process reports; torch is only reported if installed."""
SHARED_MEMORY: Final = Path("/dev/shm")
NUM_SYNCS: Final = 5
SYNC_BYTES: Final = 4096


def environment_of(
    data_dir: Path | None, packages: Iterable[str] = (), tls: TlsFiles | None = None
) -> types_pb2.Environment:
    """Measure versions, limits, disk and certificates of this process. data_dir: the folder of its
    durable data."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    environment = types_pb2.Environment(
        packages={
            "python": platform.python_version(),
            **installed_versions((*PACKAGES, *packages)),
        },
        open_files_limit=soft if soft != resource.RLIM_INFINITY else 2**63,
        malloc=process.malloc_note(),
        shared_memory_bytes=_free(SHARED_MEMORY)[0] if SHARED_MEMORY.exists() else 0,
    )
    if data_dir is not None and data_dir.is_dir():
        environment.data_dir = str(data_dir.resolve())
        environment.data_free_bytes, environment.data_total_bytes = _free(data_dir)
        environment.fsync_s = fsync_s(data_dir)
    if tls is not None:
        _add_certificate(environment, tls)
    return environment


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the given packages, without those that are not installed."""
    by_package = {}
    for name in packages:
        try:
            by_package[name] = version(name)
        except PackageNotFoundError:
            continue
    return by_package


def fsync_s(folder: Path) -> float:
    """Return the median seconds to write a small block durably; 0 if the folder is not writable."""
    times = []
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(NUM_SYNCS):
                began_s = time.perf_counter()
                file.write(os.urandom(SYNC_BYTES))
                file.flush()
                os.fsync(file.fileno())
                times.append(time.perf_counter() - began_s)
    except OSError:
        return 0.0
    return statistics.median(times)


def _free(path: Path) -> tuple[int, int]:
    """Return the free and the total bytes of the file system that holds a path."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize


def _add_certificate(environment: types_pb2.Environment, tls: TlsFiles) -> None:
    try:
        material = tls.read()
    except InvalidInputError as error:
        environment.certificate_problem = str(error)
        return
    environment.certificate = str(material.cert_id or "")
    first = first_to_end(material.chain)
    if first is not None:
        environment.certificate_expires_s = first.ends.timestamp()
        if first.is_authority:
            environment.certificate += f" by {first}"


# ---- Findings ----
#
# The findings are pure functions of the measurement, with the thresholds and the wording that apply
# to any process.

SLOW_ROUND_TRIP_S: Final = 0.25
SKEW_S: Final = 1.0
MIN_OPEN_FILES: Final = 1024
LOW_DISK_BYTES: Final = 5 * 2**30
LOW_DISK_SHARE: Final = 0.1
SLOW_FSYNC_S: Final = 0.03
LOW_SHARED_MEMORY_BYTES: Final = 64 * 2**20
EXPIRES_SOON_S: Final = 14 * 86_400.0
_MUST_AGREE: Final = ("stratagem",)
_SHOULD_AGREE: Final = ("grpcio", "protobuf")


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of one process: its level, and advice if it is not OK."""

    check: str
    about: str
    level: Level
    found: str
    advice: str = ""


def certificate(about: str, environment: types_pb2.Environment, now_s: float) -> Iterator[Finding]:
    """Yield a finding on a process's certificate: unusable, expired, expiring soon, or OK."""
    if environment.certificate_problem:
        advice = "name files that can be read and fit together; `stratagem certs` makes them"
        yield Finding("certificate", about, Level.FAIL, environment.certificate_problem, advice)
    if not environment.certificate_expires_s:
        return
    left_s = environment.certificate_expires_s - now_s
    text = f"{environment.certificate}, expires in {left_s / 86_400:.0f} days"
    if left_s > EXPIRES_SOON_S:
        yield Finding("certificate", about, Level.OK, text)
        return
    advice = (
        "renew what is named: a certificate, or an authority and then what it has signed, and "
        "write it to the same files; processes read them again by themselves"
    )
    if left_s > 0:
        yield Finding("certificate", about, Level.WARN, text, advice)
        return
    when = datetime.fromtimestamp(environment.certificate_expires_s, UTC)
    text = f"{environment.certificate}, has expired at {when:%Y-%m-%d %H:%M} UTC"
    yield Finding("certificate", about, Level.FAIL, text, advice)


def limits(about: str, environment: types_pb2.Environment) -> Iterator[Finding]:
    """Yield findings on the limit on open files, and on the memory allocator of servers."""
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


def disk(about: str, environment: types_pb2.Environment) -> Iterator[Finding]:
    """Yield findings on the disk for durable data, if there is one: free space, fsync time."""
    if not environment.data_dir:
        return
    free, total = environment.data_free_bytes, environment.data_total_bytes
    text = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free at {environment.data_dir}"
    if free > LOW_DISK_BYTES and free > LOW_DISK_SHARE * total:
        yield Finding("disk", about, Level.OK, text)
    else:
        advice = (
            "make room, delete runs, or move --data-dir: a journal that is full ends the process"
        )
        yield Finding("disk", about, Level.WARN, text, advice)
    if not environment.fsync_s:
        advice = "the process must be able to write there"
        yield Finding("fsync", about, Level.FAIL, "cannot write to --data-dir", advice)
        return
    text = f"{1e3 * environment.fsync_s:.2f} ms to have 4 KiB on the disk"
    if environment.fsync_s <= SLOW_FSYNC_S:
        yield Finding("fsync", about, Level.OK, text)
    else:
        advice = "each decision waits for it: give --data-dir a local disk that is not shared"
        yield Finding("fsync", about, Level.WARN, text, advice)


def torch(
    name: str, environment: types_pb2.Environment, capability: types_pb2.Capability
) -> Iterator[Finding]:
    """Yield findings on a worker's device, threads and communication backends."""
    is_cuda = capability.device.startswith("cuda")
    backends = ", ".join(environment.backends) or "none"
    devices = ", ".join(environment.cuda_devices) or "none"
    text = f"{capability.device}, {capability.num_threads} threads; backends {backends}; "
    text += f"CUDA devices {devices}"
    needed = "nccl" if is_cuda else "gloo"
    if needed in environment.backends:
        yield Finding("torch", name, Level.OK, text)
    else:
        advice = f"torch was built without {needed}: workers exchange over gRPC, which is slower"
        yield Finding("torch", name, Level.WARN, text, advice)
    if environment.cuda_devices and not is_cuda:
        advice = "start it with --device cuda:N to train on it"
        yield Finding("device", name, Level.WARN, f"trains on the CPU, and has {devices}", advice)
    free = environment.shared_memory_bytes
    if free < LOW_SHARED_MEMORY_BYTES:
        advice = "ours needs none, but torch's data loaders do: compose's shm_size, an emptyDir"
        text = f"{free / 2**20:.0f} MiB free in /dev/shm"
        yield Finding("shared memory", name, Level.WARN, text, advice)


def states(
    name: str, environment: types_pb2.Environment, store_id: str, *, may_see: bool = True
) -> Iterator[Finding]:
    """Yield a finding on whether a worker sees the coordinator's folder of states, if one of them
    has such a folder. may_see: the worker could use it, since its network is trusted."""
    folder = environment.state_folder
    problem = folder_mismatch(
        folder, environment.store_id, store_id, environment.state_folder_problem
    )
    if not problem:
        if folder:
            yield Finding("states", name, Level.OK, f"sees the coordinator's at {folder}")
    elif folder:
        advice = "mount DATA-DIR/states of this coordinator there, or name where it is"
        yield Finding("states", name, Level.WARN, f"{problem}; states are relayed", advice)
    elif may_see:
        advice = "mount DATA-DIR/states and name it, so that it writes and reads states by itself"
        yield Finding("states", name, Level.WARN, f"{problem}; states are relayed", advice)


def clock(about: str, offset_s: float, round_trip_s: float) -> Finding:
    """Return a finding on a process's clock. about: the process's name; offset_s: the coordinator's
    time minus its time."""
    text = f"{abs(offset_s):.3f} s {'behind' if offset_s > 0 else 'ahead of'} the coordinator's"
    text += f" (± {round_trip_s / 2:.3f} s)"
    if abs(offset_s) <= SKEW_S + round_trip_s:
        return Finding("clock", about, Level.OK, text)
    advice = (
        "keep the clocks together (chrony, systemd-timesyncd): nothing is decided by them, but "
        "times in logs and traces, and certificates, are judged by them"
    )
    return Finding("clock", about, Level.WARN, text, advice)


def connection(address: str, round_trip_s: float, term: int) -> Finding:
    """Return a finding on the latency of the connection to a coordinator, which has answered."""
    text = f"answers in {1e3 * round_trip_s:.1f} ms, term {term}, protocol {PROTOCOL_VERSION}"
    if round_trip_s <= SLOW_ROUND_TRIP_S:
        return Finding("connection", address, Level.OK, text)
    advice = "its event loop or the network is slow: look at stratagem_event_loop_lag_seconds"
    return Finding("connection", address, Level.WARN, text, advice)


def versions(processes: Mapping[str, types_pb2.Environment]) -> Iterator[Finding]:
    """Yield findings on whether all processes have the same version of each important package."""
    yield from agreement(processes, _MUST_AGREE, Level.FAIL, "run one version everywhere")
    yield from agreement(
        processes, _SHOULD_AGREE, Level.WARN, "any will do; one version is easier to look after"
    )


def agreement(
    processes: Mapping[str, types_pb2.Environment],
    packages: tuple[str, ...],
    level: Level,
    advice: str,
) -> Iterator[Finding]:
    """Yield a finding per package: the version that all processes have, or who has which one."""
    for package in packages:
        by_version: dict[str, list[str]] = {}
        for name, environment in processes.items():
            if environment.packages.get(package):
                by_version.setdefault(environment.packages[package], []).append(name)
        if len(by_version) == 1:
            (one_version,) = by_version
            yield Finding("versions", package, Level.OK, one_version)
        elif by_version:
            text = "; ".join(f"{version}: {', '.join(who)}" for version, who in by_version.items())
            yield Finding("versions", package, level, text, advice)


def advice_on(error: StratagemError) -> str:
    """Return advice for the user on an error of a call to the coordinator."""
    said = str(error)
    if "the proxy " in said:
        return (
            "ask those who run the proxy; --proxy of a worker, or https_proxy of the environment, "
            "is http://USER:PASSWORD@HOST:PORT, and what no_proxy names is reached directly"
        )
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

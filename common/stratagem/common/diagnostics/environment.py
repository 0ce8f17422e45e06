"""Measures the environment of a process for `stratagem doctor`: versions, limits, disk,
certificates.

Measured on request, and at no other time: writing to the disk takes a while, so not on an event
loop. Says what is, and judges nothing.
"""

import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.identity.certificate_chain import first_to_end
from stratagem.common.identity.tls_files import TlsFiles
from stratagem.common.process import malloc
from stratagem.v1 import types_pb2

PACKAGES: Final = ("stratagem", "grpcio", "protobuf", "numpy", "pydantic")
"""Of every process; torch only where there is one."""
SHARED_MEMORY: Final = Path("/dev/shm")
NUM_SYNCS: Final = 5
SYNC_BYTES: Final = 4096


def environment_of(
    data_dir: Path | None, packages: Iterable[str] = (), tls: TlsFiles | None = None
) -> types_pb2.Environment:
    """Measure the environment of this process; data_dir is where it keeps what must last, if
    anything."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    environment = types_pb2.Environment(
        packages={"python": platform.python_version(), **versions((*PACKAGES, *packages))},
        open_files_limit=soft if soft != resource.RLIM_INFINITY else 2**63,
        malloc=malloc.said(),
        shared_memory_bytes=_free(SHARED_MEMORY)[0] if SHARED_MEMORY.exists() else 0,
    )
    if data_dir is not None and data_dir.is_dir():
        environment.data_dir = str(data_dir.resolve())
        environment.data_free_bytes, environment.data_total_bytes = _free(data_dir)
        environment.fsync_s = fsync_s(data_dir)
    if tls is not None:
        _add_certificate(environment, tls)
    return environment


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    by_package = {}
    for name in packages:
        try:
            by_package[name] = version(name)
        except PackageNotFoundError:
            continue
    return by_package


def fsync_s(folder: Path) -> float:
    """Median seconds to write a small block and have it on the disk; 0 where one cannot write."""
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
    """(free, total) bytes of its file system."""
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

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
    found = types_pb2.Environment(
        packages={"python": platform.python_version(), **versions((*PACKAGES, *packages))},
        open_files_limit=soft if soft != resource.RLIM_INFINITY else 2**63,
        malloc=malloc.said(),
        shared_memory_bytes=_free(SHARED_MEMORY)[0] if SHARED_MEMORY.exists() else 0,
    )
    if data_dir is not None and data_dir.is_dir():
        found.data_dir = str(data_dir.resolve())
        found.data_free_bytes, found.data_total_bytes = _free(data_dir)
        found.fsync_s = fsync_s(data_dir)
    if tls is not None:
        _add_certificate(found, tls)
    return found


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


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
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def _add_certificate(found: types_pb2.Environment, tls: TlsFiles) -> None:
    try:
        material = tls.read()
    except InvalidInputError as error:
        found.certificate_problem = str(error)
        return
    found.certificate = str(material.cert_id or "")
    first = first_to_end(material.chain)
    if first is not None:
        found.certificate_expires_s = first.ends.timestamp()
        if first.is_authority:
            found.certificate += f" by {first}"

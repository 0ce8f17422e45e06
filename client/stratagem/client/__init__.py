"""The client SDK of Stratagem.

`Client` is for scripts and notebooks, `AsyncClient` for asynchronous programs, `LocalCluster`
starts everything on this machine. Imports neither torch nor the server parts.
"""

from stratagem.client.client import AsyncClient, AsyncRun
from stratagem.client.local_cluster import LocalCluster
from stratagem.client.planning import (
    MemoryEstimate,
    Recommendation,
    estimate_memory,
    recommend,
)
from stratagem.client.sync import Client, RunHandle, RunResult
from stratagem.client.views import (
    Commit,
    Event,
    LogLine,
    Phase,
    Progress,
    RunStatus,
    UserError,
    Worker,
)
from stratagem.common.errors import (
    ConflictError,
    IntegrityError,
    InvalidInputError,
    LimitError,
    NotFoundError,
    PermissionDeniedError,
    RunFailedError,
    StratagemError,
    UnauthenticatedError,
    UnavailableError,
    UserCodeError,
)
from stratagem.common.rpc.tls import TlsFiles

__all__ = [
    "AsyncClient",
    "AsyncRun",
    "Client",
    "Commit",
    "ConflictError",
    "Event",
    "IntegrityError",
    "InvalidInputError",
    "LimitError",
    "LocalCluster",
    "LogLine",
    "MemoryEstimate",
    "NotFoundError",
    "PermissionDeniedError",
    "Phase",
    "Progress",
    "Recommendation",
    "RunFailedError",
    "RunHandle",
    "RunResult",
    "RunStatus",
    "StratagemError",
    "TlsFiles",
    "UnauthenticatedError",
    "UnavailableError",
    "UserCodeError",
    "UserError",
    "Worker",
    "estimate_memory",
    "recommend",
]

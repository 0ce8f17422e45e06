"""This package is the client SDK of Stratagem: `Client`, `AsyncClient` and `LocalCluster`, which
starts everything on this machine; `%load_ext stratagem.client` lets cells of a notebook be modules
of jobs. It imports neither torch nor the server parts.
"""

from stratagem.client.course.client_sums import FederatedClient
from stratagem.client.course.members import MemberInterval
from stratagem.client.course.population import Population
from stratagem.client.course.rounds import Round
from stratagem.client.course.views import (
    Commit,
    Event,
    LogLine,
    Phase,
    Progress,
    RunStatus,
    UserError,
    Worker,
)
from stratagem.client.local.cluster import LocalCluster
from stratagem.client.report.comparison import Comparison, JobDifference
from stratagem.client.sdk.blocking import Client, RunHandle, RunResult
from stratagem.client.sdk.cell_modules import register as load_ipython_extension
from stratagem.client.sdk.client import AsyncClient
from stratagem.client.sdk.run import AsyncRun
from stratagem.client.sdk.torch_process import (
    MemoryEstimate,
    Recommendation,
    check_job,
    estimate_memory,
    recommend,
)
from stratagem.common.base.errors import (
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
from stratagem.common.identity.tls import TlsFiles

__all__ = [
    "AsyncClient",
    "AsyncRun",
    "Client",
    "Commit",
    "Comparison",
    "ConflictError",
    "Event",
    "FederatedClient",
    "IntegrityError",
    "InvalidInputError",
    "JobDifference",
    "LimitError",
    "LocalCluster",
    "LogLine",
    "MemberInterval",
    "MemoryEstimate",
    "NotFoundError",
    "PermissionDeniedError",
    "Phase",
    "Population",
    "Progress",
    "Recommendation",
    "Round",
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
    "check_job",
    "estimate_memory",
    "load_ipython_extension",
    "recommend",
]

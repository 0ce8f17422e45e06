"""The client SDK of Stratagem.

`Client` is for scripts and notebooks, `AsyncClient` for asynchronous programs, `LocalCluster`
starts everything on this machine. `%load_ext stratagem.client` lets cells of a notebook be modules
of jobs. Imports neither torch nor the server parts.
"""

from stratagem.client.code.notebook import register as load_ipython_extension
from stratagem.client.course.client_sums import FederatedClient
from stratagem.client.course.members import MemberInterval
from stratagem.client.course.population import Population
from stratagem.client.course.rounds import Round
from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.report.comparison import Comparison, JobDifference
from stratagem.client.sdk.async_client import AsyncClient
from stratagem.client.sdk.async_run import AsyncRun
from stratagem.client.sdk.blocking_client import Client
from stratagem.client.sdk.job_check import check_job
from stratagem.client.sdk.planning import MemoryEstimate, Recommendation, estimate_memory, recommend
from stratagem.client.sdk.run_handle import RunHandle, RunResult
from stratagem.client.sdk.views import (
    Commit,
    Event,
    LogLine,
    Phase,
    Progress,
    RunStatus,
    UserError,
    Worker,
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

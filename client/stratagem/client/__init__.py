"""This package is the client SDK of Stratagem: `Client`, `AsyncClient` and `LocalCluster`, which
starts everything on this machine; `%load_ext stratagem.client` lets cells of a notebook be modules
of jobs. It imports neither torch nor the server parts, and a name only when it is used.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

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

if TYPE_CHECKING:
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

_HOMES: Final[Mapping[str, str]] = {
    "AsyncClient": "stratagem.client.sdk.client:AsyncClient",
    "AsyncRun": "stratagem.client.sdk.run:AsyncRun",
    "Client": "stratagem.client.sdk.blocking:Client",
    "Commit": "stratagem.client.course.views:Commit",
    "Comparison": "stratagem.client.report.comparison:Comparison",
    "Event": "stratagem.client.course.views:Event",
    "FederatedClient": "stratagem.client.course.client_sums:FederatedClient",
    "JobDifference": "stratagem.client.report.comparison:JobDifference",
    "LocalCluster": "stratagem.client.local.cluster:LocalCluster",
    "LogLine": "stratagem.client.course.views:LogLine",
    "MemberInterval": "stratagem.client.course.members:MemberInterval",
    "MemoryEstimate": "stratagem.client.sdk.torch_process:MemoryEstimate",
    "Phase": "stratagem.client.course.views:Phase",
    "Population": "stratagem.client.course.population:Population",
    "Progress": "stratagem.client.course.views:Progress",
    "Recommendation": "stratagem.client.sdk.torch_process:Recommendation",
    "Round": "stratagem.client.course.rounds:Round",
    "RunHandle": "stratagem.client.sdk.blocking:RunHandle",
    "RunResult": "stratagem.client.sdk.blocking:RunResult",
    "RunStatus": "stratagem.client.course.views:RunStatus",
    "TlsFiles": "stratagem.common.identity.tls:TlsFiles",
    "UserError": "stratagem.client.course.views:UserError",
    "Worker": "stratagem.client.course.views:Worker",
    "check_job": "stratagem.client.sdk.torch_process:check_job",
    "estimate_memory": "stratagem.client.sdk.torch_process:estimate_memory",
    "load_ipython_extension": "stratagem.client.sdk.cell_modules:register",
    "recommend": "stratagem.client.sdk.torch_process:recommend",
}
"""The places, as module:name, of the names that are imported when they are first used: a command
that asks for a status needs no job, no report and no numpy."""


if not TYPE_CHECKING:  # a type checker knows which names there are

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, inside = _HOMES[name].partition(":")
        value = globals()[name] = getattr(import_module(module), inside)
        return value


def __dir__() -> list[str]:
    return __all__

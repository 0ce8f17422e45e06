"""Defines, in one table for all calls, who may make which call and what about. A call that is not
in it is refused.

Owns the table. Who a caller is, and the refusals, are in `authentication.py`. What belongs to whom
is known to the services: `ownership_check.py` has them look.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from stratagem.common.identity.bearer_tokens import Scope
from stratagem.common.identity.tls_files import Role


class Anyone(StrEnum):
    """A caller who needs no proof."""

    ANYONE = "anyone"


Who = Role | Scope | Anyone


class Names(StrEnum):
    """The kind of thing that a request names, and to whom that must belong; the value is for
    people."""

    NOTHING = "nothing that has an owner"
    SHARED_RUN = "a run: with `read` all runs are visible, and their states"
    OWN_RUN = "a run of one's own; any run with `admin`"
    OWN_DATA = "data and states that one has uploaded, or that are a run's states"
    BROUGHT_DATA = "data: they are the caller's once all their bytes have come"
    COORDINATOR = "a worker: the coordinator alone, not other workers"
    ITSELF = "a worker: itself, or one of its pool"
    OWN_PARTY = "a party that the caller is a member of"
    OWN_RANK = "a party, and in it the member that the caller is"
    OWN_STATE = "a worker: the live state and pieces of snapshots of a party of its own"
    ORDERED = "what the coordinator gives an order about"


UNCHECKED: Final = frozenset({Names.NOTHING, Names.SHARED_RUN, Names.BROUGHT_DATA, Names.ORDERED})
"""A caller that may make the call may name any such thing."""


@dataclass(frozen=True, slots=True)
class AccessRule:
    """The roles or scopes, any of which may make a call, and what the call may be about."""

    who: tuple[Who, ...]
    names: Names


_COORDINATOR: Final = "/stratagem.v1.CoordinatorService/"
_WORKER: Final = "/stratagem.v1.WorkerService/"
_READ: Final = AccessRule((Scope.READ,), Names.SHARED_RUN)
_CHANGE: Final = AccessRule((Scope.SUBMIT,), Names.OWN_RUN)
_ALL: Final = AccessRule((Scope.ADMIN,), Names.NOTHING)
_ORDER: Final = AccessRule((Role.COORDINATOR,), Names.ORDERED)
_PROBE: Final = AccessRule((Anyone.ANYONE,), Names.NOTHING)

TABLE: Final[Mapping[str, AccessRule]] = {
    # People: the certificate of a client has every scope.
    f"{_COORDINATOR}SubmitRun": AccessRule((Scope.SUBMIT,), Names.OWN_DATA),
    f"{_COORDINATOR}UploadData": AccessRule((Scope.SUBMIT,), Names.BROUGHT_DATA),
    f"{_COORDINATOR}CancelRun": _CHANGE,
    f"{_COORDINATOR}ResumeRun": _CHANGE,
    f"{_COORDINATOR}DeleteRun": _CHANGE,
    f"{_COORDINATOR}PinRun": _CHANGE,
    f"{_COORDINATOR}BackUp": _ALL,
    f"{_COORDINATOR}DownloadBlob": _ALL,
    f"{_COORDINATOR}GetRun": _READ,
    f"{_COORDINATOR}ListRuns": _READ,
    f"{_COORDINATOR}WatchRun": _READ,
    f"{_COORDINATOR}WatchRuns": _READ,
    f"{_COORDINATOR}GetHistory": _READ,
    f"{_COORDINATOR}DownloadState": _READ,
    f"{_COORDINATOR}DownloadProfile": _READ,
    f"{_COORDINATOR}TailLogs": _READ,
    f"{_COORDINATOR}ListWorkers": AccessRule((Scope.READ,), Names.NOTHING),
    f"{_COORDINATOR}Diagnose": AccessRule((Scope.READ, Role.WORKER), Names.COORDINATOR),
    # Workers, each for itself.
    f"{_COORDINATOR}RegisterWorker": AccessRule((Role.WORKER,), Names.ITSELF),
    f"{_COORDINATOR}Heartbeat": AccessRule((Role.WORKER,), Names.ITSELF),
    f"{_COORDINATOR}HeartbeatStream": AccessRule((Role.WORKER,), Names.ITSELF),
    f"{_COORDINATOR}Leave": AccessRule((Role.WORKER,), Names.ITSELF),
    f"{_COORDINATOR}Relay": AccessRule((Role.WORKER,), Names.ITSELF),
    f"{_COORDINATOR}Rendezvous": AccessRule((Role.WORKER,), Names.OWN_RANK),
    f"{_COORDINATOR}Suspect": AccessRule((Role.WORKER,), Names.OWN_PARTY),
    # What a worker does for the coordinator; a live state and pieces also for members of a party.
    f"{_WORKER}Execute": _ORDER,
    f"{_WORKER}WriteLeaves": _ORDER,
    f"{_WORKER}PutLeaves": _ORDER,
    f"{_WORKER}FetchState": _ORDER,
    f"{_WORKER}SetState": _ORDER,
    f"{_WORKER}GetGradients": _ORDER,
    f"{_WORKER}ApplyGradients": _ORDER,
    f"{_WORKER}Abort": _ORDER,
    f"{_WORKER}CloseSession": _ORDER,
    f"{_WORKER}SecureRound": _ORDER,
    f"{_WORKER}Describe": _ORDER,
    f"{_WORKER}GetState": AccessRule((Role.COORDINATOR, Role.WORKER), Names.OWN_STATE),
    "/stratagem.v1.PeerService/Send": AccessRule((Role.WORKER,), Names.OWN_RANK),
    # Says SERVING or not, to probes, on a port of its own.
    "/grpc.health.v1.Health/Check": _PROBE,
    "/grpc.health.v1.Health/Watch": _PROBE,
    "/grpc.health.v1.Health/List": _PROBE,
    # Off unless switched on.
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": AccessRule(
        (Scope.READ,), Names.NOTHING
    ),
}


def is_open(method: str) -> bool:
    """Return whether a call may be made without authentication."""
    rule = TABLE.get(method)
    return rule is not None and Anyone.ANYONE in rule.who


def say_needed(needed: Iterable[Who]) -> str:
    """The scopes and roles of which one is enough, for a refusal."""
    words = [
        f"the scope {need}" if isinstance(need, Scope) else f"the role {need}" for need in needed
    ]
    return " or ".join(words)

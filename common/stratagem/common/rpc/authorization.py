"""Who may make which call: one table for every call of every service. What is not in it is refused.

Owns the table, who a caller is, and the sentences of a refusal. A caller proves who it is by the
certificate of its connection, or by a token where the connection has none. Without TLS nobody
proves anything and everybody may do everything: such a server listens on this machine only, unless
its operator has said otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from stratagem.common.errors import (
    InvalidInputError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from stratagem.common.rpc.revocation import RevokedFile
from stratagem.common.rpc.tls import CertId, Role
from stratagem.common.rpc.tokens import ALL_SCOPES, Scope, TokenBook, token_in, with_included


class Anyone(StrEnum):
    """Needs no proof."""

    ANYONE = "anyone"


Who = Role | Scope | Anyone

_COORDINATOR: Final = "/stratagem.v1.CoordinatorService/"
_WORKER: Final = "/stratagem.v1.WorkerService/"

TABLE: Final[Mapping[str, tuple[Who, ...]]] = {
    # People: the certificate of a client has every scope. Stopping, resuming and deleting what
    # somebody else has submitted needs the scope admin, which the service checks.
    f"{_COORDINATOR}SubmitRun": (Scope.SUBMIT,),
    f"{_COORDINATOR}GetRun": (Scope.READ,),
    f"{_COORDINATOR}ListRuns": (Scope.READ,),
    f"{_COORDINATOR}WatchRun": (Scope.READ,),
    f"{_COORDINATOR}CancelRun": (Scope.SUBMIT,),
    f"{_COORDINATOR}ResumeRun": (Scope.SUBMIT,),
    f"{_COORDINATOR}DeleteRun": (Scope.SUBMIT,),
    f"{_COORDINATOR}DownloadState": (Scope.READ,),
    f"{_COORDINATOR}DownloadProfile": (Scope.READ,),
    f"{_COORDINATOR}UploadData": (Scope.SUBMIT,),
    f"{_COORDINATOR}TailLogs": (Scope.READ,),
    f"{_COORDINATOR}ListWorkers": (Scope.READ,),
    # A worker may ask for the coordinator's own part, which the service checks.
    f"{_COORDINATOR}Diagnose": (Scope.READ, Role.WORKER),
    # Workers, each for itself, which the service checks.
    f"{_COORDINATOR}RegisterWorker": (Role.WORKER,),
    f"{_COORDINATOR}Heartbeat": (Role.WORKER,),
    f"{_COORDINATOR}Leave": (Role.WORKER,),
    f"{_COORDINATOR}Rendezvous": (Role.WORKER,),
    f"{_COORDINATOR}Suspect": (Role.WORKER,),
    # What a worker does for the coordinator; a live state is also for the members of its party.
    f"{_WORKER}Execute": (Role.COORDINATOR,),
    f"{_WORKER}GetState": (Role.COORDINATOR, Role.WORKER),
    f"{_WORKER}SetState": (Role.COORDINATOR,),
    f"{_WORKER}GetGradients": (Role.COORDINATOR,),
    f"{_WORKER}ApplyGradients": (Role.COORDINATOR,),
    f"{_WORKER}Abort": (Role.COORDINATOR,),
    f"{_WORKER}CloseSession": (Role.COORDINATOR,),
    f"{_WORKER}Describe": (Role.COORDINATOR,),
    "/stratagem.v1.PeerService/Send": (Role.WORKER,),
    # Says SERVING or not, to probes, on a port of its own.
    "/grpc.health.v1.Health/Check": (Anyone.ANYONE,),
    "/grpc.health.v1.Health/Watch": (Anyone.ANYONE,),
    "/grpc.health.v1.Health/List": (Anyone.ANYONE,),
    # Off unless switched on.
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": (Scope.READ,),
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, as far as it has been proved."""

    name: str
    """"client alice", "worker w0", "token ci"; empty: nobody has to say who they are."""
    cert_id: CertId | None = None
    scopes: frozenset[Scope] = frozenset()

    @property
    def may(self) -> frozenset[Who]:
        """What calls may ask for, one of which is enough."""
        return self.scopes if self.cert_id is None else self.scopes | {self.cert_id.role}

    @property
    def is_known(self) -> bool:
        return bool(self.name)

    @property
    def is_worker(self) -> bool:
        return self.cert_id is not None and self.cert_id.role is Role.WORKER

    def must_be_worker(self, worker_id: str) -> None:
        """Refuse a worker that speaks for another one."""
        if self.cert_id is not None and not self.cert_id.covers(worker_id):
            raise PermissionDeniedError(
                f"{self.name} speaks for worker {worker_id!r}: a worker's name must be the one in "
                f"its certificate, or of the pool in it"
            )

    def must_own(self, run_id: str, owner: str) -> None:
        """Refuse to let somebody change another one's run without the scope admin."""
        if self.is_known and self.name != owner and Scope.ADMIN not in self.scopes:
            whose = f"belongs to {owner}" if owner else "has no known owner"
            raise PermissionDeniedError(
                f"run {run_id} {whose}; {self.name} needs the scope {Scope.ADMIN}"
            )


NOBODY: Final = Caller("")
"""Where nobody has to say who they are."""

_caller: ContextVar[Caller] = ContextVar("caller", default=NOBODY)


def current_caller() -> Caller:
    """Who makes the call that is being served."""
    return _caller.get()


def is_open(method: str) -> bool:
    """Whether a call asks nobody who they are."""
    return Anyone.ANYONE in TABLE.get(method, ())


@dataclass(frozen=True, slots=True)
class Gate:
    """How a server tells who calls; made once per server."""

    trust_domain: str = ""
    """Of the certificates that count; empty: the server has no TLS."""
    tokens: TokenBook | None = None
    revoked: RevokedFile | None = None

    def admit(
        self,
        method: str,
        auth_context: Mapping[str, Iterable[bytes]],
        metadata: Iterable[tuple[str, Any]],
    ) -> None:
        """Let a call in and note its caller; raises what it is refused with.

        Errors: UnauthenticatedError when it is not proved who calls, PermissionDeniedError when
        that one may not.
        """
        needed = TABLE.get(method)
        if needed is None:
            raise PermissionDeniedError(f"{method}: nobody may, it is not in the table of calls")
        try:
            caller = self._caller(auth_context, metadata)
        except UnauthenticatedError as error:
            raise UnauthenticatedError(f"{method}: {error}; it is for {_say(needed)}") from None
        if caller.is_known and not caller.may & set(needed):
            raise PermissionDeniedError(
                f"{method}: it is for {_say(needed)}, and the caller is {_describe(caller)}"
            )
        _caller.set(caller)

    def _caller(
        self, auth_context: Mapping[str, Iterable[bytes]], metadata: Iterable[tuple[str, Any]]
    ) -> Caller:
        if self.trust_domain and "x509_pem_cert" in auth_context:
            caller = self._holder([uri.decode() for uri in auth_context.get("peer_uri", ())])
            if self.revoked is not None and caller.cert_id is not None:
                (pem,) = auth_context["x509_pem_cert"]
                self.revoked.check(caller.cert_id, pem)
            return caller
        token = token_in(metadata)
        if self.tokens is not None and token:
            known = self.tokens.find(token, time.time())
            return Caller(f"token {known.name}", scopes=with_included(known.scopes))
        if not self.trust_domain:
            return NOBODY
        raise UnauthenticatedError("the caller has shown neither a certificate nor a token")

    def _holder(self, uris: list[str]) -> Caller:
        try:
            cert_id = CertId.from_uris(uris)
        except InvalidInputError as error:
            raise UnauthenticatedError(f"the caller's {error}") from None
        if cert_id.trust_domain != self.trust_domain:
            raise UnauthenticatedError(
                f"the caller's certificate is of {cert_id.trust_domain!r}, this server of "
                f"{self.trust_domain!r}"
            )
        scopes = ALL_SCOPES if cert_id.role is Role.CLIENT else frozenset[Scope]()
        return Caller(str(cert_id), cert_id, scopes)


def _say(needed: Iterable[Who]) -> str:
    words = [
        f"the scope {each}" if isinstance(each, Scope) else f"the role {each}" for each in needed
    ]
    return " or ".join(words)


def _describe(caller: Caller) -> str:
    if caller.cert_id is not None:
        return caller.name
    scopes = ", ".join(each for each in Scope if each in caller.scopes)
    return f"{caller.name} with the scopes {scopes}"

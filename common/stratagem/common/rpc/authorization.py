"""Who may make which call, and what about: one table for all calls. What is not in it is refused.

Owns the table, who a caller is, and the sentences of a refusal. What belongs to whom is known to
the services: `named.py` has them look. A caller proves who it is by the
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


class Names(StrEnum):
    """What a request names, and to whom that must belong; the value is for people."""

    NOTHING = "nothing of anybody's"
    SHARED_RUN = "a run: whoever may read sees all runs and may have their states"
    OWN_RUN = "a run of one's own; of anybody with `admin`"
    OWN_DATA = "data and states that one has uploaded, or that are a run's states"
    BROUGHT_DATA = "data: they are the caller's once all their bytes have come"
    COORDINATOR = "a worker: the coordinator alone, not other workers"
    ITSELF = "a worker: itself, or one of its pool"
    OWN_PARTY = "a party that the caller is a member of"
    OWN_RANK = "a party, and in it the member that the caller is"
    OWN_STATE = "a worker: the live state of a party that it is a member of"
    ORDERED = "what the coordinator gives an order about"


UNCHECKED: Final = frozenset({Names.NOTHING, Names.SHARED_RUN, Names.BROUGHT_DATA, Names.ORDERED})
"""Whoever may make the call may name any such thing."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may make a call, any of these, and what about."""

    who: tuple[Who, ...]
    names: Names


_NUMBERED: Final = "#"
"""Between the name of a token and its id; no name has it."""

_COORDINATOR: Final = "/stratagem.v1.CoordinatorService/"
_WORKER: Final = "/stratagem.v1.WorkerService/"
_READ: Final = Rule((Scope.READ,), Names.SHARED_RUN)
_CHANGE: Final = Rule((Scope.SUBMIT,), Names.OWN_RUN)
_ORDER: Final = Rule((Role.COORDINATOR,), Names.ORDERED)
_PROBE: Final = Rule((Anyone.ANYONE,), Names.NOTHING)

TABLE: Final[Mapping[str, Rule]] = {
    # People: the certificate of a client has every scope.
    f"{_COORDINATOR}SubmitRun": Rule((Scope.SUBMIT,), Names.OWN_DATA),
    f"{_COORDINATOR}UploadData": Rule((Scope.SUBMIT,), Names.BROUGHT_DATA),
    f"{_COORDINATOR}CancelRun": _CHANGE,
    f"{_COORDINATOR}ResumeRun": _CHANGE,
    f"{_COORDINATOR}DeleteRun": _CHANGE,
    f"{_COORDINATOR}GetRun": _READ,
    f"{_COORDINATOR}ListRuns": _READ,
    f"{_COORDINATOR}WatchRun": _READ,
    f"{_COORDINATOR}DownloadState": _READ,
    f"{_COORDINATOR}DownloadProfile": _READ,
    f"{_COORDINATOR}TailLogs": _READ,
    f"{_COORDINATOR}ListWorkers": Rule((Scope.READ,), Names.NOTHING),
    f"{_COORDINATOR}Diagnose": Rule((Scope.READ, Role.WORKER), Names.COORDINATOR),
    # Workers, each for itself.
    f"{_COORDINATOR}RegisterWorker": Rule((Role.WORKER,), Names.ITSELF),
    f"{_COORDINATOR}Heartbeat": Rule((Role.WORKER,), Names.ITSELF),
    f"{_COORDINATOR}Leave": Rule((Role.WORKER,), Names.ITSELF),
    f"{_COORDINATOR}Rendezvous": Rule((Role.WORKER,), Names.OWN_RANK),
    f"{_COORDINATOR}Suspect": Rule((Role.WORKER,), Names.OWN_PARTY),
    # What a worker does for the coordinator; a live state is also for the members of its party.
    f"{_WORKER}Execute": _ORDER,
    f"{_WORKER}SetState": _ORDER,
    f"{_WORKER}GetGradients": _ORDER,
    f"{_WORKER}ApplyGradients": _ORDER,
    f"{_WORKER}Abort": _ORDER,
    f"{_WORKER}CloseSession": _ORDER,
    f"{_WORKER}Describe": _ORDER,
    f"{_WORKER}GetState": Rule((Role.COORDINATOR, Role.WORKER), Names.OWN_STATE),
    "/stratagem.v1.PeerService/Send": Rule((Role.WORKER,), Names.OWN_RANK),
    # Says SERVING or not, to probes, on a port of its own.
    "/grpc.health.v1.Health/Check": _PROBE,
    "/grpc.health.v1.Health/Watch": _PROBE,
    "/grpc.health.v1.Health/List": _PROBE,
    # Off unless switched on.
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Rule(
        (Scope.READ,), Names.NOTHING
    ),
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, as far as it has been proved."""

    name: str
    """"client alice", "worker w0", "token ci"; empty: nobody has to say who they are."""
    cert_id: CertId | None = None
    scopes: frozenset[Scope] = frozenset()
    token_id: str = ""

    @property
    def owner(self) -> str:
        """To whom belongs what the caller makes: a new token inherits nothing of one of its name
        that was revoked. The renewed certificate of a holder is that holder's."""
        return f"{self.name}{_NUMBERED}{self.token_id}" if self.token_id else self.name

    @property
    def is_admin(self) -> bool:
        """Whether what belongs to others is the caller's, too; without TLS it is everybody's."""
        return not self.is_known or Scope.ADMIN in self.scopes

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

    def is_one_of(self, worker_ids: Iterable[str]) -> bool:
        """Whether the caller's certificate is of one of these workers; so it is without TLS."""
        return self.cert_id is None or any(map(self.cert_id.covers, worker_ids))

    def must_be_worker(self, worker_id: str) -> None:
        """Refuse a worker that speaks for another one."""
        if self.cert_id is not None and not self.cert_id.covers(worker_id):
            raise PermissionDeniedError(
                f"{self.name} speaks for worker {worker_id!r}: a worker's name must be the one in "
                f"its certificate, or of the pool in it"
            )

    def must_own(self, run_id: str, owner: str) -> None:
        """Refuse to let somebody change another one's run without the scope admin."""
        if self.owner != owner and not self.is_admin:
            name = owner.partition(_NUMBERED)[0]
            other = "an earlier " if name == self.name else ""
            whose = f"belongs to {other}{name}" if owner else "has no known owner"
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
    rule = TABLE.get(method)
    return rule is not None and Anyone.ANYONE in rule.who


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
        rule = TABLE.get(method)
        if rule is None:
            raise PermissionDeniedError(f"{method}: nobody may, it is not in the table of calls")
        needed = rule.who
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
            scopes = with_included(known.scopes)
            return Caller(f"token {known.name}", scopes=scopes, token_id=known.token_id)
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

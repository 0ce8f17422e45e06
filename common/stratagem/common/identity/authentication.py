"""Proves who makes a call, and lets the call in or refuses it by the table of `authorization.py`.

Owns who a caller is, and the sentences of a refusal. A caller proves who it is by the certificate
of its connection, or by a token where the connection has none. Without TLS nobody proves anything
and everybody may do everything: such a server listens on this machine only, unless its operator has
said otherwise.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from stratagem.common.base.errors import (
    InvalidInputError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from stratagem.common.identity.authorization import TABLE, Who, say_needed
from stratagem.common.identity.bearer_tokens import (
    ALL_SCOPES,
    Scope,
    TokenBook,
    token_in,
    with_included,
)
from stratagem.common.identity.revocation import RevokedFile
from stratagem.common.identity.tls_files import CertId, Role

_NUMBERED: Final = "#"
"""Between the name of a token and its id; no name has it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity of a caller, as far as it has been proved."""

    name: str
    """"client alice", "worker w0", "token ci"; empty: callers are not authenticated."""
    cert_id: CertId | None = None
    scopes: frozenset[Scope] = frozenset()
    token_id: str = ""

    @property
    def owner(self) -> str:
        """Return the owner of what the caller makes: a new token inherits nothing of a revoked one
        of its name. The renewed certificate of a holder is that holder's."""
        return f"{self.name}{_NUMBERED}{self.token_id}" if self.token_id else self.name

    @property
    def is_admin(self) -> bool:
        """Return whether the caller may act on what belongs to others; without TLS every caller
        may."""
        return not self.is_known or Scope.ADMIN in self.scopes

    @property
    def may(self) -> frozenset[Who]:
        """Return the caller's scopes and role; a call asks for one of several of these."""
        return self.scopes if self.cert_id is None else self.scopes | {self.cert_id.role}

    @property
    def is_known(self) -> bool:
        return bool(self.name)

    @property
    def is_worker(self) -> bool:
        return self.cert_id is not None and self.cert_id.role is Role.WORKER

    def is_one_of(self, worker_ids: Iterable[str]) -> bool:
        """Return whether the caller's certificate is that of one of these workers; true without
        TLS."""
        return self.cert_id is None or any(map(self.cert_id.covers, worker_ids))

    def must_be_worker(self, worker_id: str) -> None:
        """Refuse a worker that speaks for another one."""
        if self.cert_id is not None and not self.cert_id.covers(worker_id):
            raise PermissionDeniedError(
                f"{self.name} speaks for worker {worker_id!r}: a worker's name must be the one in "
                f"its certificate, or of the pool in it"
            )

    def must_own(self, run_id: str, owner: str) -> None:
        """Refuse to let a caller change another one's run without the scope admin."""
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
_check_again: ContextVar[Callable[[], None] | None] = ContextVar("check_again", default=None)


def current_caller() -> Caller:
    """Return the caller of the call that is being served."""
    return _caller.get()


def check_caller_again() -> None:
    """Refuse the caller of the call that is being served if its certificate has been revoked since
    the call began; for calls that last."""
    check = _check_again.get()
    if check is not None:
        check()


@dataclass(frozen=True, slots=True)
class Authorizer:
    """Authenticates and authorizes the callers of a server; made once per server."""

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
        _check_again.set(None)
        try:
            caller = self._caller(auth_context, metadata)
        except UnauthenticatedError as error:
            message = f"{method}: {error}; it is for {say_needed(needed)}"
            raise UnauthenticatedError(message) from None
        if caller.is_known and not caller.may & set(needed):
            raise PermissionDeniedError(
                f"{method}: it is for {say_needed(needed)}, and the caller is {_describe(caller)}"
            )
        _caller.set(caller)

    def _caller(
        self, auth_context: Mapping[str, Iterable[bytes]], metadata: Iterable[tuple[str, Any]]
    ) -> Caller:
        if self.trust_domain and "x509_pem_cert" in auth_context:
            caller = self._holder([uri.decode() for uri in auth_context.get("peer_uri", ())])
            if self.revoked is not None and caller.cert_id is not None:
                (pem,) = auth_context["x509_pem_cert"]
                check = partial(self.revoked.check, caller.cert_id, pem)
                check()
                _check_again.set(check)
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


def _describe(caller: Caller) -> str:
    if caller.cert_id is not None:
        return caller.name
    scopes = ", ".join(scope for scope in Scope if scope in caller.scopes)
    return f"{caller.name} with the scopes {scopes}"

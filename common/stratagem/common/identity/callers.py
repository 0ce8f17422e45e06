"""Authenticate the caller of each call, and admit or refuse the call by one table of all calls.

A caller proves its identity by the certificate of its connection, or by a token where the
connection has none. Without TLS nobody proves anything and everybody may do everything: such a
server listens on this machine only, unless its operator has said otherwise.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Final

from stratagem.common.base.errors import (
    AlreadyExistsError,
    InvalidInputError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from stratagem.common.base.files import Stamp, WatchedFiles, stamp_of, whole_file
from stratagem.common.base.ids import check_token_name
from stratagem.common.identity.tls import CertId, Role

# ---- Bearer tokens ----
#
# A person without a certificate proves their identity by a token.
#
# A token is 256 random bits that are shown once. The coordinator keeps a file with the SHA-256 of
# each, a name, its scopes and its expiry; a reader of the file cannot call with it.

HEADER: Final = "authorization"
_SCHEME: Final = "Bearer "
_PREFIX: Final = "stratagem_"
"""The prefix of every token, by which scanners of repositories and logs find leaked tokens."""
_TOKEN_BYTES: Final = 32
_ID_BYTES: Final = 8


class Scope(StrEnum):
    """The rights of a person; each scope includes the ones before it."""

    READ = "read"
    """See runs, logs, workers; download states."""
    SUBMIT = "submit"
    """Start runs; stop, resume and delete one's own."""
    ADMIN = "admin"
    """Stop, resume and delete any run."""


ALL_SCOPES: Final = frozenset(Scope)


def with_included(scopes: Iterable[Scope]) -> frozenset[Scope]:
    """Return the scopes together with the lower scopes that each of them includes."""
    order = list(Scope)
    highest = max((order.index(scope) for scope in scopes), default=-1)
    return frozenset(order[: highest + 1])


@dataclass(frozen=True, slots=True)
class KnownToken:
    """The stored record of a token: its hash, name, scopes and expiry, without the token itself."""

    name: str
    sha256: str
    """The SHA-256 of the token, as lower-case hex digits."""
    scopes: tuple[Scope, ...]
    expires_s: float | None
    """The Unix time at which the token expires; None: never."""
    token_id: str = ""
    """A unique id, which distinguishes tokens of one name; empty in files of earlier versions."""


def new_token(
    name: str, scopes: Iterable[Scope], expires_s: float | None = None
) -> tuple[str, KnownToken]:
    """Make a new token; return the token and its record."""
    token = _PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)
    granted = tuple(scope for scope in Scope if scope in set(scopes))
    if not granted:
        raise InvalidInputError.at("scopes", f"must name some of {', '.join(Scope)}")
    token_id = secrets.token_hex(_ID_BYTES)
    return token, KnownToken(check_token_name(name), _digest(token), granted, expires_s, token_id)


def add_token(path: Path, record: KnownToken) -> None:
    """Add a record to a tokens file, which is replaced atomically; only its owner can read it."""
    tokens = read_tokens(path) if path.exists() else ()
    if record.name in {token.name for token in tokens}:
        raise AlreadyExistsError(f"{path} has a token {record.name!r} already; revoke it first")
    _write(path, (*tokens, record))


def remove_token(path: Path, name: str) -> None:
    """Remove a token from a tokens file. Raises InvalidInputError if it is not there."""
    tokens = read_tokens(path)
    remaining = tuple(token for token in tokens if token.name != name)
    if remaining == tokens:
        there = ", ".join(token.name for token in tokens) or "none"
        raise InvalidInputError.at("name", f"{path} has no token {name!r}; there are: {there}")
    _write(path, remaining)


def read_tokens(path: Path) -> tuple[KnownToken, ...]:
    """Read the records of a tokens file. Raises InvalidInputError, which names what is wrong."""
    try:
        document = json.loads(path.read_text())
        return tuple(map(_parse_token, document["tokens"]))
    except OSError as error:
        raise InvalidInputError.at("tokens_file", f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInputError.at(
            "tokens_file", f"{path} is not a tokens file ({type(error).__name__}: {error})"
        ) from None


class TokenBook:
    """The token records in a tokens file of a server, reloaded when the file changes."""

    def __init__(self, path: Path) -> None:
        """Read the file; one that does not exist yet has no tokens. Raises InvalidInputError if
        it cannot be used."""
        self._file = WatchedFiles(
            [path],
            lambda: read_tokens(path) if path.exists() else (),
            unusable="the tokens stay as they were",
            renewed="tokens read again",
        )

    def find(self, token: str, now_s: float) -> KnownToken:
        """Return the record of a token. Raises UnauthenticatedError if it is unknown or expired."""
        digest, record = _digest(token), None
        for entry in self._file.newest():  # all are compared, so the time taken reveals nothing
            if hmac.compare_digest(entry.sha256, digest):
                record = entry
        if record is None:
            raise UnauthenticatedError("the token is not known here")
        if record.expires_s is not None and record.expires_s <= now_s:
            when = datetime.fromtimestamp(record.expires_s, UTC).isoformat(timespec="seconds")
            raise UnauthenticatedError(f"token {record.name} has expired at {when}")
        return record


class TokenFile:
    """The token that this process sends to servers, reloaded when its file changes."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        self._seen: Stamp = ()
        self._metadata: tuple[tuple[str, str], ...] = ()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the call metadata with the token. Raises InvalidInputError for a bad file."""
        try:
            stamp = stamp_of(self._path)
            if stamp != self._seen:
                token = self._path.read_text().strip()
                if not token.startswith(_PREFIX) or not token.isascii() or token.split() != [token]:
                    message = f"{self._path} holds no token of `stratagem token create`"
                    raise InvalidInputError.at("token_file", message)
                self._seen, self._metadata = stamp, ((HEADER, _SCHEME + token),)
        except OSError as error:
            message = f"{self._path}: {error.strerror}"
            raise InvalidInputError.at("token_file", message) from None
        return self._metadata


def token_in(metadata: Iterable[tuple[str, Any]]) -> str:
    """Return the token in the metadata of a call, or "" if it carries none."""
    given = [str(value) for key, value in metadata if key == HEADER]
    return given[0].removeprefix(_SCHEME) if len(given) == 1 else ""


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _parse_token(entry: Any) -> KnownToken:
    sha256, expires_s = str(entry["sha256"]), entry["expires_s"]
    if len(bytes.fromhex(sha256)) != hashlib.sha256().digest_size:
        raise ValueError("sha256 is not 64 hex digits")
    scopes = tuple(Scope(scope) for scope in entry["scopes"])
    name = check_token_name(entry["name"])
    expires = None if expires_s is None else float(expires_s)
    return KnownToken(name, sha256, scopes, expires, str(entry.get("token_id", "")))


def _write(path: Path, tokens: tuple[KnownToken, ...]) -> None:
    text = json.dumps({"tokens": [asdict(token) for token in tokens]}, indent=2)
    with whole_file(path, mode=0o600) as file:
        file.write(f"{text}\n".encode())
        if path.exists():
            os.fchmod(file.fileno(), path.stat().st_mode & 0o777)


# ---- Authorization ----
#
# The table defines for all calls who may make which call, and about which resources. A call that is
# not in it is refused. The services, called by rpc/server.py, check what belongs to whom.


class Anyone(StrEnum):
    """The marker, in the table of calls, of a call that needs no authentication."""

    ANYONE = "anyone"


Who = Role | Scope | Anyone


class Names(StrEnum):
    """The kind of resource that a call's requests name, which decides how ownership is checked."""

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
"""The kinds of resources that any caller who may make the call may also name."""


@dataclass(frozen=True, slots=True)
class AccessRule:
    """A row of the table of calls: the scopes or roles that may make the call (one is enough), and
    the kind of resource that its requests name."""

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
    f"{_COORDINATOR}RecordVerification": _CHANGE,
    f"{_COORDINATOR}BackUp": _ALL,
    f"{_COORDINATOR}DownloadBlob": _ALL,
    f"{_COORDINATOR}ReleaseWorker": _ALL,
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
    # Workers, about themselves.
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
    # Answers probes with SERVING or not, on a separate port.
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
    """Format the scopes and roles, any one of which is enough for a call, for an error message."""
    words = [
        f"the scope {need}" if isinstance(need, Scope) else f"the role {need}" for need in needed
    ]
    return " or ".join(words)


# ---- Revocation ----
#
# Revoked certificates are invalid although they have not expired. A file, which is read again when
# it changes, lists them:
#
#     worker w3                 # any holder of a certificate of worker w3, also a renewed one
#     worker *.gpu              # the certificate that the workers of the pool gpu share
#     sha256:9f86d0...          # this one certificate
#
# Revocation fails closed: a file that cannot be read ends a process at its start, and later
# leaves the list as it was.

_FINGERPRINT: Final = re.compile(r"sha256:[0-9a-f]{64}")
_HOLDER: Final = re.compile(rf"({'|'.join(Role)}) (\*\.)?[A-Za-z0-9._-]{{1,64}}")


def fingerprint(pem: bytes) -> str:
    """Return the fingerprint of a certificate: the SHA-256 of its DER form."""
    der = ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))
    return f"sha256:{hashlib.sha256(der).hexdigest()}"


def check_entry(entry: str) -> str:
    """Validate an entry of a revocation list and return it. Raises InvalidInputError."""
    if not (_FINGERPRINT.fullmatch(entry) or _HOLDER.fullmatch(entry)):
        roles = ", ".join(f"`{role} NAME`" for role in Role)
        raise InvalidInputError.at("revoked", f"{entry!r} is neither {roles} nor `sha256:HEX`")
    return entry


def read_revoked(path: Path) -> frozenset[str]:
    """Read the entries of a revocation list. Raises InvalidInputError, which names a bad line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError.at("revoked_file", f"{path}: {error}") from None
    revoked = set()
    for number, line in enumerate(lines, start=1):
        entry = " ".join(line.partition("#")[0].split())
        try:
            revoked |= {check_entry(entry)} if entry else set()
        except InvalidInputError as error:
            reason = f"{path}, line {number}: {error.violations[0].message}"
            raise InvalidInputError.at("revoked_file", reason) from None
    return frozenset(revoked)


def add_revoked(path: Path, entries: Iterable[str]) -> None:
    """Add entries to a revocation list, which is created if missing and replaced atomically."""
    listed = read_revoked(path) if path.exists() else frozenset()
    new = [entry for entry in entries if check_entry(entry) not in listed]
    before = path.read_text() if path.exists() else ""
    before += "" if before.endswith("\n") or not before else "\n"
    with whole_file(path) as file:
        file.write((before + "".join(f"{entry}\n" for entry in new)).encode())


class RevokedFile:
    """The revocation list of a process, reloaded when its file changes."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises InvalidInputError if it cannot be used."""
        self._file = WatchedFiles(
            [path],
            lambda: read_revoked(path),
            unusable="the revoked certificates stay as they were",
            renewed="revoked certificates read again",
        )

    def check(self, cert_id: CertId, pem: bytes) -> None:
        """Raise UnauthenticatedError if this certificate is revoked."""
        entries = self._file.newest()
        if entries and (str(cert_id) in entries or fingerprint(pem) in entries):
            raise UnauthenticatedError(f"the certificate of {cert_id} has been revoked")


# ---- Authentication ----

_NUMBERED: Final = "#"
"""The separator between a token's name and its id in an owner's name; no token name contains it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity of a caller, as far as it is proved, and what the caller may do."""

    name: str
    """The name, such as "client alice", "worker w0" or "token ci"; empty without authentication."""
    cert_id: CertId | None = None
    scopes: frozenset[Scope] = frozenset()
    token_id: str = ""

    @property
    def owner(self) -> str:
        """Return the name under which the caller owns what it creates. A new token is another owner
        than a removed one of its name; a renewed certificate is the same."""
        return f"{self.name}{_NUMBERED}{self.token_id}" if self.token_id else self.name

    @property
    def is_admin(self) -> bool:
        """Return whether the caller may act for other owners; without TLS every caller may."""
        return not self.is_known or Scope.ADMIN in self.scopes

    @property
    def may(self) -> frozenset[Who]:
        """Return the caller's scopes and role; a call must accept at least one of them."""
        return self.scopes if self.cert_id is None else self.scopes | {self.cert_id.role}

    @property
    def is_known(self) -> bool:
        return bool(self.name)

    @property
    def is_worker(self) -> bool:
        return self.cert_id is not None and self.cert_id.role is Role.WORKER

    def is_one_of(self, worker_ids: Iterable[str]) -> bool:
        """Return whether the caller has no certificate, or one that covers one of these workers."""
        return self.cert_id is None or any(map(self.cert_id.covers, worker_ids))

    def must_be_worker(self, worker_id: str) -> None:
        """Raise PermissionDeniedError if the caller is a worker that acts for another worker."""
        if self.cert_id is not None and not self.cert_id.covers(worker_id):
            raise PermissionDeniedError(
                f"{self.name} speaks for worker {worker_id!r}: a worker's name must be the one in "
                f"its certificate, or of the pool in it"
            )

    def must_own(self, run_id: str, owner: str) -> None:
        """Raise PermissionDeniedError unless the caller owns the run or has the scope admin."""
        if self.owner != owner and not self.is_admin:
            name = owner.partition(_NUMBERED)[0]
            other = "an earlier " if name == self.name else ""
            whose = f"belongs to {other}{name}" if owner else "has no known owner"
            raise PermissionDeniedError(
                f"run {run_id} {whose}; {self.name} needs the scope {Scope.ADMIN}"
            )


NOBODY: Final = Caller("")
"""The unauthenticated caller, on servers without TLS."""

_caller: ContextVar[Caller] = ContextVar("caller", default=NOBODY)
_check_again: ContextVar[Callable[[], None] | None] = ContextVar("check_again", default=None)


def current_caller() -> Caller:
    """Return the authenticated caller of the call that this task serves."""
    return _caller.get()


def check_caller_again() -> None:
    """Raise UnauthenticatedError if the caller's certificate was revoked during a long call."""
    check = _check_again.get()
    if check is not None:
        check()


@dataclass(frozen=True, slots=True)
class Authorizer:
    """The authenticator and authorizer of all calls to one server."""

    trust_domain: str = ""
    """The trust domain of accepted certificates; empty: the server has no TLS."""
    tokens: TokenBook | None = None
    revoked: RevokedFile | None = None

    def admit(
        self,
        method: str,
        auth_context: Mapping[str, Iterable[bytes]],
        metadata: Iterable[tuple[str, Any]],
    ) -> None:
        """Authenticate and authorize the caller of a call, and make it the current caller.

        Raises UnauthenticatedError if the caller's identity is not proved, PermissionDeniedError if
        the caller may not make the call.
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
            record = self.tokens.find(token, time.time())
            scopes = with_included(record.scopes)
            return Caller(f"token {record.name}", scopes=scopes, token_id=record.token_id)
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

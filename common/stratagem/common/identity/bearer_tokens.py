"""Bearer tokens: how a person without a certificate proves to be known.

A token is 256 random bits that are shown once. The coordinator keeps a file with the SHA-256 of
each, a name, what it may do and until when; a reader of the file cannot call with it. Owns the
file's form. Must not know which call needs what.
"""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import Any, Final

from stratagem.common.base.errors import AlreadyExistsError, InvalidInputError, UnauthenticatedError
from stratagem.common.base.ids import check_token_name
from stratagem.common.files.atomic_file import whole_file
from stratagem.common.files.watched_file import Stamp, WatchedFiles, stamp_of

HEADER: Final = "authorization"
_SCHEME: Final = "Bearer "
_PREFIX: Final = "stratagem_"
"""Lets a scanner of repositories and logs find a token that went astray."""
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
    """The scopes and those that they include."""
    order = list(Scope)
    highest = max((order.index(scope) for scope in scopes), default=-1)
    return frozenset(order[: highest + 1])


@dataclass(frozen=True, slots=True)
class KnownToken:
    """The record that is kept of a token, without the token itself."""

    name: str
    sha256: str
    """Lower-case hex."""
    scopes: tuple[Scope, ...]
    expires_s: float | None
    """Unix time; None: never."""
    token_id: str = ""
    """Differs between tokens of one name, earlier and later; empty in files of earlier versions."""


def new_token(
    name: str, scopes: Iterable[Scope], expires_s: float | None = None
) -> tuple[str, KnownToken]:
    """A fresh token, and what is kept of it."""
    token = _PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)
    kept = tuple(scope for scope in Scope if scope in set(scopes))
    if not kept:
        raise InvalidInputError.at("scopes", f"must name some of {', '.join(Scope)}")
    token_id = secrets.token_hex(_ID_BYTES)
    return token, KnownToken(check_token_name(name), _digest(token), kept, expires_s, token_id)


def add_token(path: Path, known: KnownToken) -> None:
    """Write a tokens file with one more; it is replaced whole, and only its owner can read it."""
    tokens = read_tokens(path) if path.exists() else ()
    if known.name in {token.name for token in tokens}:
        raise AlreadyExistsError(f"{path} has a token {known.name!r} already; revoke it first")
    _write(path, (*tokens, known))


def remove_token(path: Path, name: str) -> None:
    """Write the tokens file without one; InvalidInputError when there is none of this name."""
    tokens = read_tokens(path)
    left = tuple(token for token in tokens if token.name != name)
    if left == tokens:
        there = ", ".join(token.name for token in tokens) or "none"
        raise InvalidInputError.at("name", f"{path} has no token {name!r}; there are: {there}")
    _write(path, left)


def read_tokens(path: Path) -> tuple[KnownToken, ...]:
    """Read the tokens of a tokens file; InvalidInputError says what is wrong with it."""
    try:
        document = json.loads(path.read_text())
        return tuple(map(_known, document["tokens"]))
    except OSError as error:
        raise InvalidInputError.at("tokens_file", f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInputError.at(
            "tokens_file", f"{path} is not a tokens file ({type(error).__name__}: {error})"
        ) from None


class TokenBook:
    """The tokens of a file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        """InvalidInputError when the file cannot be used now. A file that is not there yet has no
        tokens."""
        self._file = WatchedFiles(
            [path],
            lambda: read_tokens(path) if path.exists() else (),
            unusable="the tokens stay as they were",
            renewed="tokens read again",
        )

    def find(self, token: str, now_s: float) -> KnownToken:
        """The entry of a token; UnauthenticatedError when it is unknown or has expired."""
        digest, known = _digest(token), None
        for entry in self._file.newest():  # all of them: how long it takes says nothing
            if hmac.compare_digest(entry.sha256, digest):
                known = entry
        if known is None:
            raise UnauthenticatedError("the token is not known here")
        if known.expires_s is not None and known.expires_s <= now_s:
            when = datetime.fromtimestamp(known.expires_s, UTC).isoformat(timespec="seconds")
            raise UnauthenticatedError(f"token {known.name} has expired at {when}")
        return known


class TokenFile:
    """The one token of a caller, read again when its file changes."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        self._seen: Stamp = ()
        self._metadata: tuple[tuple[str, str], ...] = ()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata that a call carries. InvalidInputError when the file cannot be
        used."""
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
    """The token that a call carries; empty when it carries none."""
    given = [str(value) for key, value in metadata if key == HEADER]
    return given[0].removeprefix(_SCHEME) if len(given) == 1 else ""


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _known(entry: Any) -> KnownToken:
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

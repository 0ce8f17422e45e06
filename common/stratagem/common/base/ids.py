"""This module defines the identifiers that all parts share, the switch that lifts size limits, and
the protocol version.

It owns the spelling of an id and makes new ones, independently of what the id stands for.
"""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NewType

from stratagem.common.base.errors import InvalidInputError

# ---- Identifiers ----

RunId = NewType("RunId", str)
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", str)  # one start of one worker process
Digest = NewType("Digest", str)  # lower-case hex SHA-256
NO_DIGEST: Final = Digest("")
"""The digest value that stands for "no blob", where a digest is required."""
Party = NewType("Party", str)  # path in the tree of a run: "silo0/replica1"; "" is the root

MAX_ID_CHARS: Final = 64

_RUN_ID: Final = re.compile(r"[a-z0-9-]{1,64}")
_WORKER_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_PARTY: Final = re.compile(r"|(?!\.+(/|$))[A-Za-z0-9._-]+(/(?!\.+(/|$))[A-Za-z0-9._-]+)*")
_MAX_PARTY_CHARS: Final = 256
_SUFFIX_BYTES: Final = 4
_MAX_SLUG_CHARS: Final = MAX_ID_CHARS - 1 - 2 * _SUFFIX_BYTES


def child_party(parent: Party, name: str) -> Party:
    """Return the path of the party named `name` that is nested inside the party `parent`."""
    return Party(f"{parent}/{name}" if parent else name)


def is_within(party: Party, ancestor: Party) -> bool:
    """Return whether the party at the first path is `ancestor` itself or nested inside it."""
    return not ancestor or party == ancestor or party.startswith(f"{ancestor}/")


def new_run_id(name: str) -> RunId:
    """Return a fresh run id: the name as a slug, then eight random hex digits."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower())[:_MAX_SLUG_CHARS].strip("-")
    return RunId(f"{slug or 'run'}-{secrets.token_hex(_SUFFIX_BYTES)}")


def new_submission() -> str:
    """Return a unique id for one submission; the run id may be used again after a deletion."""
    return secrets.token_hex(8)


def new_incarnation() -> Incarnation:
    """Return a unique id for one start of a worker process."""
    return Incarnation(secrets.token_hex(8))


def check_digest(value: str) -> Digest:
    """Validate the digest of a blob and return it. Raises InvalidInputError."""
    if not _DIGEST.fullmatch(value):
        raise InvalidInputError(f"{value!r} is not a SHA-256 digest of 64 hex digits")
    return Digest(value)


def check_run_id(value: str) -> RunId:
    """Validate a run id and return it. Raises InvalidInputError with the allowed form."""
    if not _RUN_ID.fullmatch(value):
        raise InvalidInputError.at("run_id", f"{value[:80]!r} is not 1 to 64 of a-z, 0-9, '-'")
    return RunId(value)


def check_token_name(value: str) -> str:
    """Validate a token's name and return it. Raises InvalidInputError with the allowed form."""
    if not _WORKER_ID.fullmatch(value):
        raise InvalidInputError.at(
            "name", f"{value!r} is not 1 to 64 of A-Z, a-z, 0-9, '.', '_', '-'"
        )
    return value


def check_worker_id(value: str) -> WorkerId:
    """Validate a worker id and return it. Raises InvalidInputError with the allowed form."""
    if not _WORKER_ID.fullmatch(value) or not value.strip("."):
        # "." and ".." are directory names, and worker ids become file names
        raise InvalidInputError.at(
            "worker_id", f"{value[:80]!r} is not 1 to 64 of A-Z, a-z, 0-9, '.', '_', '-'"
        )
    return WorkerId(value)


def is_party(value: str) -> bool:
    """Return whether the text is a valid path of a party."""
    return len(value) <= _MAX_PARTY_CHARS and _PARTY.fullmatch(value) is not None


def check_party(value: str) -> Party:
    """Validate a party's path and return it. Raises InvalidInputError with the allowed form."""
    if not is_party(value):
        # parties become the names of folders, so none may be "." or ".."
        raise InvalidInputError.at(
            "party",
            f"{value[:80]!r} is not a path of A-Z, a-z, 0-9, '.', '_', '-' of at most "
            f"{_MAX_PARTY_CHARS} characters, such as 'silo0/replica1'",
        )
    return Party(value)


# ---- Limits ----
#
# The limits on the size of a job are checked at submission, and lifted for jobs that were
# accepted earlier.
#
# A limit protects against callers that ask for too much. A journal holds jobs that were accepted
# under the limits of their time, and a coordinator with other limits must be able to read them.

_are_checked: ContextVar[bool] = ContextVar("limits are checked", default=True)


def are_checked() -> bool:
    """Return whether size limits apply here: they do, except inside a block of `lifted`."""
    return _are_checked.get()


@contextmanager
def lifted() -> Iterator[None]:
    """Context manager that lifts size limits, to read input that was accepted earlier; its block
    must not await."""
    token = _are_checked.set(False)
    try:
        yield
    finally:
        _are_checked.reset(token)


# ---- Protocol version ----

PROTOCOL_KEY: Final = "stratagem-protocol"
PROTOCOL_VERSION: Final = "1"

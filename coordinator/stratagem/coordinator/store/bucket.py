"""Objects under one prefix of a bucket: written whole, read from the start, listed, deleted.

An object is never overwritten: `unique_name` makes a name for each, which starts with the term of
the coordinator that writes it. A delete names an object that was listed before, so it can never hit
a later write, however long it was on its way. A coordinator that has lost the lead without knowing
it deletes nothing of its successor, since `deletable` leaves later terms alone. Transient errors
are retried here, for a minute at most.
"""

import configparser
import itertools
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    StratagemError,
    UnavailableError,
    WrongStateError,
)
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.signed_objects import SignedObjects

# ---- Objects ----

PART_BYTES: Final = 8 << 20
"""The part size of uploads and downloads. A transfer's memory is this times MAX_PARTS_AT_ONCE; a
single connection would get only a fraction of the store's bandwidth."""

MAX_PARTS_AT_ONCE: Final = 4
_MAX_PARTS: Final = 9000  # S3 takes 10,000
_PAUSE_S: Final = 0.2
_MAX_ERROR_CHARS: Final = 300
_COUNTER: Final = itertools.count()
_LASTING: Final = re.compile(r"^(?:4(?!08|09|29)\d\d|501) ")
"""Matches errors of requests that the store refuses permanently, so that a retry is useless."""
_CERTIFICATE: Final = re.compile(r"\bInvalidCertificate\(\s*([A-Za-z]+)")
_UNIQUE: Final = re.compile(r"(\d{10})-[0-9a-f]{16}[-.].*")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A stored object: its name below the prefix, its size, and its ETag. Two objects with the same
    tag and size have the same bytes."""

    name: str
    num_bytes: int
    tag: str = ""


class Objects:
    """Access to the objects of one obstore store. Thread-safe; all methods block on the network."""

    def __init__(self, store: Any, url: str) -> None:
        """Wrap an obstore store; url: for display."""
        import obstore  # an extra: only where blobs are in an object store

        self._store = store
        self._obstore = obstore
        self.url = url.rstrip("/")

    def put(self, name: str, pieces: Iterable[bytes], num_bytes: int) -> None:
        """Write an object of num_bytes; when this returns, the object is complete and durable.

        Raises UnavailableError; the object is then missing or complete. Each piece must own its
        memory.
        """
        part_bytes = max(PART_BYTES, -(-num_bytes // _MAX_PARTS))
        # Each try may write another name, and is no other reason.
        with _translated(f"writing into {name.rpartition('/')[0] or name}"):
            if num_bytes <= part_bytes:
                content = b"".join(pieces)
                self._obstore.put(self._store, name, content, use_multipart=False)
            else:
                self._obstore.put(
                    self._store,
                    name,
                    _watched(pieces, part_bytes),
                    chunk_size=part_bytes,
                    max_concurrency=MAX_PARTS_AT_ONCE,
                )
        failpoint("coordinator.objects.after_put")

    def read(self, entry: StoredObject) -> Iterator[memoryview]:
        """Yield the bytes of an object in order, reading some parts ahead. Raises NotFoundError."""
        starts = range(0, entry.num_bytes, PART_BYTES)
        waiting: deque[Future[memoryview]] = deque()
        with ThreadPoolExecutor(MAX_PARTS_AT_ONCE, thread_name_prefix="objects") as pool:
            for start in starts:
                num_bytes = min(PART_BYTES, entry.num_bytes - start)
                waiting.append(pool.submit(self._read_part, entry.name, start, num_bytes))
                if len(waiting) == MAX_PARTS_AT_ONCE:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def list(self, folder: str) -> list[StoredObject]:
        """Return all objects below a folder, sorted by name."""
        with _translated(f"listing {folder}"):
            listed = [
                StoredObject(entry["path"], entry["size"], entry["e_tag"] or "")
                for page in self._obstore.list(self._store, prefix=folder)
                for entry in page
            ]
        return sorted(listed, key=lambda stored: stored.name)

    def find(self, name: str) -> StoredObject | None:
        """Return the object of this name; None if there is none."""
        try:
            with _translated(f"looking for {name}"):
                entry = self._obstore.head(self._store, name)
        except NotFoundError:
            return None
        return StoredObject(name, entry["size"], entry["e_tag"] or "")

    def copy(self, name: str, copied: str) -> None:
        """Copy an object inside the store. Raises NotFoundError, and WrongStateError if the store
        refuses to copy, so that a retry is useless."""
        try:
            with _translated(f"copying {name}"):
                self._obstore.copy(self._store, name, copied)
        except UnavailableError as error:
            if error.__cause__ is None or not _LASTING.match(brief(error.__cause__)):
                raise
            raise WrongStateError(str(error)) from error

    def signed(
        self, method: Literal["GET", "PUT"], names: Sequence[str], valid: timedelta
    ) -> Sequence[str]:
        """Return a presigned URL per object, valid for `valid`, for callers without keys. Raises
        UnavailableError if nothing can be signed now."""
        with _translated(f"signing a {method}"):
            return self._obstore.sign(self._store, method, list(names), expires_in=valid)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; objects that are gone already are ignored."""
        doomed = list(names)
        if doomed:
            with _translated(f"deleting {len(doomed)} objects"):
                self._obstore.delete(self._store, doomed)

    def _read_part(self, name: str, start: int, num_bytes: int) -> memoryview:
        """Read one part, retrying responses that break off: the library retries only requests."""
        for is_last in (False, False, True):
            try:
                with _translated(f"reading {name}"):
                    part = memoryview(
                        self._obstore.get_range(self._store, name, start=start, length=num_bytes)
                    )
                    if len(part) == num_bytes:
                        return part
                    raise ValueError(f"{len(part)} of {num_bytes} bytes from {start} on came")
            except UnavailableError:
                if is_last:
                    raise
                time.sleep(_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")


def unique_name(term: int) -> str:
    """Return a name, or the start of a name, that no other object has or will have.

    Names of one leadership term sort as they were made: only one process ever has that term.
    """
    return f"{mark(term)}{secrets.token_hex(4)}"


def mark(term: int) -> str:
    """Return a name that sorts after this leadership term's names so far, and before later ones."""
    return f"{beginning(term)}{next(_COUNTER):08x}"


def beginning(term: int) -> str:
    """Return a name that sorts before all names that are made in a leadership term."""
    return f"{term:010}-"


def term_of(name: str) -> int | None:
    """Return the leadership term in an object's name; None if no coordinator wrote it."""
    match_ = _UNIQUE.fullmatch(name.rpartition("/")[2])
    return int(match_[1]) if match_ else None


def deletable(listed: Iterable[StoredObject], before: str) -> list[StoredObject]:
    """Return the objects written by coordinators whose names sort before a mark, so that none is of
    a later term."""
    return [
        stored
        for stored in listed
        if term_of(stored.name) is not None and stored.name.rpartition("/")[2] < before
    ]


def _watched(pieces: Iterable[bytes], part_bytes: int) -> Iterator[bytes]:
    done = 0
    for piece in pieces:
        yield piece
        done += len(piece)
        if done >= part_bytes:
            done -= part_bytes
            failpoint("coordinator.objects.after_part")


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Context manager that converts obstore errors to errors of this project."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error):
            raise UnavailableError(f"object store: {doing}: {brief(error)}") from error
        raise NotFoundError(f"object store: {doing}: there is no such object") from error
    except (BaseError, OSError, ValueError) as error:
        raise UnavailableError(f"object store: {doing}: {brief(error)}") from error


def brief(error: BaseException) -> str:
    """Return the server's message, or the shortened library message, and certificate faults."""
    text = " ".join(str(error).partition("Debug source:")[0].split())
    text = (text.partition("Server returned non-2xx status code: ")[2] or text).rstrip(": ")
    text = text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}…"
    fault = certificate_fault(str(error))
    return f"{text}: its certificate is refused: {fault}" if fault else text


def certificate_fault(text: str) -> str:
    """Return the reason why the store's certificate is refused, such as UnknownIssuer; "" for other
    errors. text: the message of the library's error."""
    match = _CERTIFICATE.search(text)
    return match[1] if match else ""


# ---- Keys ----
#
# The keys come from a file, which is read again when it may have changed.
#
# The file is the shared credentials file of AWS tools, as AWS_SHARED_CREDENTIALS_FILE names it:
#
#     [default]
#     aws_access_key_id = ...
#     aws_secret_access_key = ...
#
# Keys in the environment come first; without either, those of the machine's role are used.

FILE_VARIABLE: Final = "AWS_SHARED_CREDENTIALS_FILE"
_KEY_VARIABLE: Final = "AWS_ACCESS_KEY_ID"
_PROFILE_VARIABLE: Final = "AWS_PROFILE"

VALID_FOR: Final = timedelta(minutes=15)
"""The time for which keys are used after they are read; obstore reads the file again five minutes
before the end, so new keys need no restart."""


def credentials_from_file(environ: Mapping[str, str]) -> Callable[[], dict[str, Any]] | None:
    """Return a function that reads the keys from the file that the environment names; None if it
    names no file, or has keys itself.

    The keys are read once now. Raises InvalidInputError, which never quotes the file's content.
    """
    if environ.get(_KEY_VARIABLE) or not environ.get(FILE_VARIABLE):
        return None
    path, profile = Path(environ[FILE_VARIABLE]), environ.get(_PROFILE_VARIABLE) or "default"

    def read() -> dict[str, Any]:
        keys = _section(path, profile)
        return {
            "access_key_id": keys["aws_access_key_id"],
            "secret_access_key": keys["aws_secret_access_key"],
            "token": keys.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + VALID_FOR,
        }

    read()
    return read


def describe(environ: Mapping[str, str]) -> str:
    """Return where the keys of the bucket come from, for display."""
    if environ.get(_KEY_VARIABLE):
        return f"the environment ({_KEY_VARIABLE})"
    if environ.get(FILE_VARIABLE):
        return f"{environ[FILE_VARIABLE]} ({FILE_VARIABLE})"
    return f"the machine's role, as neither {_KEY_VARIABLE} nor {FILE_VARIABLE} is set"


def _section(path: Path, profile: str) -> Mapping[str, str]:
    parser = configparser.RawConfigParser(default_section="")
    try:
        parser.read_string(path.read_text())
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror}"
        raise InvalidInputError.at(FILE_VARIABLE, reason) from None
    except (configparser.Error, UnicodeDecodeError):
        raise InvalidInputError.at(FILE_VARIABLE, f"{path} is no file of [sections]") from None
    if not parser.has_section(profile):
        raise InvalidInputError.at(FILE_VARIABLE, f"{path} has no section [{profile}]")
    section = parser[profile]
    for key in ("aws_access_key_id", "aws_secret_access_key"):
        if not section.get(key):
            raise InvalidInputError.at(FILE_VARIABLE, f"{path}: [{profile}] has no {key}")
    return section


# ---- S3 ----
#
# An S3 bucket is opened by a setting, and is tried before anything depends on it.
#
# The settings of AWS tools in the environment apply here, too: AWS_ENDPOINT_URL, AWS_REGION, the
# keys or the file with them; AWS_ALLOW_HTTP=true permits an endpoint without TLS.

SETTING: Final = "blob_store"
_URL: Final = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[A-Za-z0-9_.-]+)*)/?")
_RETRIES: Final[Mapping[str, Any]] = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=5),
        "base": 2,
    },
}
_TIMEOUTS: Final[Mapping[str, Any]] = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=30),
    "timeout": timedelta(seconds=120),
}
_TRIAL: Final = b"tried at the start of a coordinator"

_REFUSED: Final = re.compile(
    r"\b40[13]\b|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken"
)


def check_url(url: str) -> None:
    """Raise InvalidInputError unless the URL is s3://BUCKET/PREFIX."""
    match_ = _URL.fullmatch(url)
    if match_ is None or any(part in (".", "..") for part in match_[2].split("/")):
        allowed = "with a prefix of letters, digits, '-', '_', '.' and '/'"
        text = f"{url!r} is not s3://BUCKET or s3://BUCKET/PREFIX, {allowed}"
        raise InvalidInputError.at(SETTING, text)


def open_s3(url: str, environ: Mapping[str, str], *, signs: bool = False) -> Objects:
    """Open the objects below a URL, after a trial that writes, lists, reads and deletes one.

    signs: try presigned requests and a copy inside the store, too. Raises InvalidInputError that
    says what is wrong, which setting to change, and how.
    """
    check_url(url)
    objects = Objects(_store(url, environ), url)
    try:
        _try(objects)
    except (UnavailableError, NotFoundError) as error:
        advice = _advice(f"{error.__cause__}", environ) or f"the trial of it failed: {error}"
        raise InvalidInputError.at(SETTING, f"{url}: {advice}") from error
    if signs:
        _try_signed(objects)
        _try_copy(objects)
    return objects


def _store(url: str, environ: Mapping[str, str]) -> Any:
    try:
        from obstore.store import S3Store
    except ImportError:
        reason = f"{url} needs the library obstore: pip install 'stratagem[s3]'"
        raise InvalidInputError.at(SETTING, reason) from None
    provider = credentials_from_file(environ)
    allow_http = environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes", "on")
    options: dict[str, Any] = {"credential_provider": provider} if provider else {}
    options["client_options"] = {**_TIMEOUTS, "allow_http": allow_http}
    options["retry_config"] = {**_RETRIES}
    try:
        return S3Store.from_url(url, **options)
    except BaseException as error:  # obstore panics, beside Exception, at an unknown setting
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise InvalidInputError.at(SETTING, f"{url}: {brief(error)}") from error
        raise


def _try(objects: Objects) -> None:
    """Make every kind of request that a coordinator makes, once, as a trial."""
    name = f"trial/{unique_name(0)}.txt"
    objects.put(name, [_TRIAL], len(_TRIAL))
    trials = [stored for stored in objects.list("trial") if stored.name == name]
    if not trials or b"".join(objects.read(trials[0])) != _TRIAL:
        raise UnavailableError("an object that was just written is not listed, or has other bytes")
    objects.delete([name])


def _try_signed(objects: Objects) -> None:
    """Write and read a trial object by presigned requests, as a worker without keys does."""
    name, valid = f"trial/{unique_name(0)}.txt", timedelta(minutes=1)
    by_hand = SignedObjects(allows_http=True)
    try:
        (put,) = objects.signed("PUT", [name], valid)
        by_hand.put(put, [memoryview(_TRIAL)], len(_TRIAL))
        (get,) = objects.signed("GET", [name], valid)
        if bytes(by_hand.get(get, len(_TRIAL))) != _TRIAL:
            raise UnavailableError("it has other bytes")
    except (UnavailableError, IntegrityError, InvalidInputError) as error:
        text = f"{objects.url}: requests that are signed for workers are not carried out: {error}"
        remedy = "--state-path direct needs a store that takes them; leave it out, or correct that"
        raise InvalidInputError.at(SETTING, f"{text}. {remedy}") from error
    finally:
        objects.delete([name])


def _try_copy(objects: Objects) -> None:
    """Copy a trial object inside the store, as a coordinator copies leaves of earlier terms."""
    name, copied = (f"trial/{unique_name(0)}.txt" for _ in range(2))
    try:
        objects.put(name, [_TRIAL], len(_TRIAL))
        objects.copy(name, copied)
        copy = objects.find(copied)
        if copy is None or b"".join(objects.read(copy)) != _TRIAL:
            raise UnavailableError("the copy has other bytes")
    except StratagemError as error:
        text = f"{objects.url}: the store does not copy an object (CopyObject): {error}"
        remedy = "--state-path direct needs that; leave it out, or name a store that has it"
        raise InvalidInputError.at(SETTING, f"{text}. {remedy}") from error
    finally:
        objects.delete([name, copied])


def _advice(text: str, environ: Mapping[str, str]) -> str:
    """Return the remedy for an error of the library; "" if none is known."""
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or "AWS"
    if "NoSuchBucket" in text:
        return f"there is no such bucket at {endpoint}; make it, or name another one"
    if "169.254." in text:
        return (
            "there are no keys: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or have "
            "AWS_SHARED_CREDENTIALS_FILE name a file with them"
        )
    if "builder error" in text and endpoint.startswith("http:"):
        return f"{endpoint} (AWS_ENDPOINT_URL) has no TLS; set AWS_ALLOW_HTTP=true if it may"
    if _REFUSED.search(text):
        return (
            f"{endpoint} refuses the keys from {describe(environ)}; they must allow to list the "
            "bucket and to get, put and delete objects"
        )
    if fault := certificate_fault(text):
        return (
            f"the certificate of {endpoint} (AWS_ENDPOINT_URL) is refused: {fault}; SSL_CERT_FILE "
            "names a file with authorities in place of those of the system"
        )
    if "error sending request" in text:
        return f"{endpoint} (AWS_ENDPOINT_URL) cannot be reached"
    return ""

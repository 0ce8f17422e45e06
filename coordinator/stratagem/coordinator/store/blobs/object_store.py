"""Objects under one prefix of a bucket: written whole, read from the start, listed, deleted.

An object is never overwritten: `unique_name` makes a name for each, which starts with the term of
the coordinator that writes it. So a delete, which names an object that was listed before, can never
hit what was written later, however long it was on its way; and a coordinator that has lost the lead
without knowing it deletes nothing that its successor has written, since `deletable` leaves later
terms alone. Transient errors are tried again here, for a minute at most.

Owns the library, its errors and its retries. Knows neither blobs nor spools.
"""

import itertools
import re
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal

from stratagem.common.base.errors import NotFoundError, UnavailableError, WrongStateError
from stratagem.common.process.failpoints import failpoint

PART_BYTES: Final = 8 << 20
"""Size of a part of an upload or download. Memory is this times MAX_PARTS_AT_ONCE, however large
the object is; one connection alone gets a fraction of what an object store can do."""

MAX_PARTS_AT_ONCE: Final = 4
_MAX_PARTS: Final = 9000  # S3 takes 10,000
_PAUSE_S: Final = 0.2
_MAX_ERROR_CHARS: Final = 300
_COUNTER: Final = itertools.count()
_LASTING: Final = re.compile(r"^(?:4(?!08|09|29)\d\d|501) ")
"""Begins the error of a request that the store refuses, and will refuse again."""
_CERTIFICATE: Final = re.compile(r"\bInvalidCertificate\(\s*([A-Za-z]+)")
_UNIQUE: Final = re.compile(r"(\d{10})-[0-9a-f]{16}[-.].*")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in the store: its name below the prefix, its size, and what the store calls its
    bytes: of two objects with the same tag and size the bytes are equal."""

    name: str
    num_bytes: int
    tag: str = ""


class Objects:
    """The objects of one obstore store. For any thread; all methods block on the network."""

    def __init__(self, store: Any, url: str) -> None:
        """Wrap an obstore store; url: for display."""
        import obstore  # an extra: only where blobs are in an object store

        self._store = store
        self._obstore = obstore
        self.url = url.rstrip("/")

    def put(self, name: str, pieces: Iterable[bytes], num_bytes: int) -> None:
        """Write an object of num_bytes; when this returns, the store has all of it, durably.

        Raises UnavailableError; then the object is not there, or is there as a whole. Each piece
        must own its memory.
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
        """The bytes of an object, in order, some parts read ahead. Raises NotFoundError."""
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
        """Return all objects below a folder, by name."""
        with _translated(f"listing {folder}"):
            listed = [
                StoredObject(entry["path"], entry["size"], entry["e_tag"] or "")
                for page in self._obstore.list(self._store, prefix=folder)
                for entry in page
            ]
        return sorted(listed, key=lambda stored: stored.name)

    def find(self, name: str) -> StoredObject | None:
        """Return the object of a name; None where there is none."""
        try:
            with _translated(f"looking for {name}"):
                entry = self._obstore.head(self._store, name)
        except NotFoundError:
            return None
        return StoredObject(name, entry["size"], entry["e_tag"] or "")

    def copy(self, name: str, copied: str) -> None:
        """Make an object of the same bytes inside the store. Raises NotFoundError, and
        WrongStateError where the store refuses to copy: asking again does not help."""
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
        """Return URLs by which somebody without keys may make that kind of request about one object
        each, for so long at most. Raises UnavailableError where nothing can be signed now."""
        with _translated(f"signing a {method}"):
            return self._obstore.sign(self._store, method, list(names), expires_in=valid)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; one that is gone already is no error."""
        doomed = list(names)
        if doomed:
            with _translated(f"deleting {len(doomed)} objects"):
                self._obstore.delete(self._store, doomed)

    def _read_part(self, name: str, start: int, num_bytes: int) -> memoryview:
        """Read a part, with retries: the library repeats a request, but not an answer that breaks
        off."""
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
    """A name, or the start of one, that no other object has or will have.

    Names of one term sort as they were made: only one process ever has that term.
    """
    return f"{mark(term)}{secrets.token_hex(4)}"


def mark(term: int) -> str:
    """Return a name that sorts behind all names made so far, and before those that will be made."""
    return f"{beginning(term)}{next(_COUNTER):08x}"


def beginning(term: int) -> str:
    """Return a name that sorts before all names of a term."""
    return f"{term:010}-"


def term_of(name: str) -> int | None:
    """Return the term of the coordinator that wrote an object; None where no coordinator
    wrote it."""
    match_ = _UNIQUE.fullmatch(name.rpartition("/")[2])
    return int(match_[1]) if match_ else None


def deletable(listed: Iterable[StoredObject], before: str) -> list[StoredObject]:
    """Return the objects of coordinators whose names sort before a mark, so that none is of a later
    term."""
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
    """Raise errors of the library as errors of this project."""
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
    """Return the server's message, else that of the library without its long second half, of which
    only what is wrong with a certificate stays."""
    text = " ".join(str(error).partition("Debug source:")[0].split())
    text = (text.partition("Server returned non-2xx status code: ")[2] or text).rstrip(": ")
    text = text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}…"
    fault = certificate_fault(str(error))
    return f"{text}: its certificate is refused: {fault}" if fault else text


def certificate_fault(text: str) -> str:
    """Return why the library refuses the certificate of the store, as an error of it tells in the
    words of its TLS, such as UnknownIssuer; "" for other errors."""
    found = _CERTIFICATE.search(text)
    return found[1] if found else ""

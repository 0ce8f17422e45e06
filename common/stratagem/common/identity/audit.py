"""Make and check the lines of an audit log, each with its hash and the hash of the line before.

A line is one JSON object in one spelling. `hash` is the SHA-256 of the line without it, `previous`
is the `hash` of the line before, so that no line can be changed, removed or inserted without
changing the lines after it. A crash may leave a partial line at the end, about which nothing has
left the site: a line with its length and SHA-256 replaces it. The module reads no file.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from stratagem.common.base.errors import IntegrityError, InvalidInputError
from stratagem.common.schema.json import JSON, dump_json

GENESIS: Final = "0" * 64
"""The value of `previous` in the first line of an audit log."""
TORN: Final = "torn"
"""The kind of a line that replaces a line of which a crash left only a part."""
MAX_LINE_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class CheckedAudit:
    """The summary of an audit log that passed its check."""

    num_lines: int
    head: str
    """The hash of the last line; kept elsewhere, it proves that no line up to it has changed."""
    num_torn: int
    """The number of lines that replace partial lines left by crashes."""
    is_torn: bool
    """True if the file ends in a partial line, left by a crash."""


def line_of(record: Mapping[str, JSON], previous: str) -> bytes:
    """Encode a record as the audit line that follows a line with the hash `previous`."""
    body = {**record, "previous": previous}
    return dump_json({**body, "hash": _hash(body)}).encode() + b"\n"


def torn_record(fragment: bytes) -> dict[str, JSON]:
    """Return the record for the line that replaces a partial line left by a crash."""
    return {
        "kind": TORN,
        "torn_bytes": len(fragment),
        "torn_sha256": hashlib.sha256(fragment).hexdigest(),
    }


def parsed(line: bytes) -> dict[str, Any]:
    """Parse a line without its line end. Raises IntegrityError if its hash does not match."""
    try:
        record = json.loads(line)
        is_whole = isinstance(record, dict) and dump_json(record).encode() == line
    except (ValueError, InvalidInputError, RecursionError):
        is_whole = False
    if not is_whole:
        raise IntegrityError("it is no line of an audit")
    body = dict(record)
    if body.pop("hash", None) != _hash(body) or "previous" not in body:
        raise IntegrityError("it is not as it was written: its hash is of another text")
    entry: dict[str, Any] = record
    return entry


def check_lines(lines: Iterable[bytes]) -> CheckedAudit:
    """Check a whole audit log, given as lines with their line ends. Raises IntegrityError, which
    names the first changed line."""
    head, number, num_torn = GENESIS, 0, 0
    for raw in lines:
        if not raw.endswith(b"\n"):
            return CheckedAudit(number, head, num_torn, is_torn=True)
        number += 1
        try:
            record = parsed(raw[:-1])
        except IntegrityError as error:
            raise IntegrityError(f"line {number} was changed: {error}") from None
        if record["previous"] != head:
            raise _not_followed(number)
        head, num_torn = record["hash"], num_torn + (record.get("kind") == TORN)
    return CheckedAudit(number, head, num_torn, is_torn=False)


def hashes(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the hash of each line of an audit log that `check_lines` has passed."""
    for raw in lines:
        if raw.endswith(b"\n"):
            yield parsed(raw[:-1])["hash"]


def _not_followed(number: int) -> IntegrityError:
    if number == 1:
        return IntegrityError("line 1 was changed: it is not the first line of an audit")
    return IntegrityError(
        f"line {number - 1} was changed: line {number} follows another one, or lines between them "
        "are missing"
    )


def _hash(body: Mapping[str, JSON]) -> str:
    return hashlib.sha256(dump_json(dict(body)).encode()).hexdigest()

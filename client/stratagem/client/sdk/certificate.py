"""Certificates of verified runs: what was verified, by whom, with the digests of all states.

A certificate carries the SHA-256 of its own canonical JSON, which shows damage; it is not signed.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stratagem.client.course.claims import Claims
from stratagem.client.course.views import RunStatus
from stratagem.client.sdk.verification import Verification
from stratagem.common.base.errors import IntegrityError, InvalidInputError
from stratagem.common.job import JobSpec

VERSION: Final = 1
_FIELDS: Final = ("certificate", "run", "job", "verified", "unverified", "workers", "time_s")


def certificate(status: RunStatus, found: Verification, time_s: float) -> dict[str, Any]:
    """Return the certificate of a verification as plain JSON values.

    Raises InvalidInputError for a verification that has found a difference.
    """
    if found.difference is not None:
        text = f"run {found.run_id} has a state that differs, so nothing is certified"
        raise InvalidInputError.at("--certificate", text)
    job = JobSpec.parse(dict(status.job)).canonical_json()
    body = {
        "certificate": VERSION,
        "run": found.run_id,
        "job": hashlib.sha256(job.encode()).hexdigest(),
        "verified": [
            {"place": list(each.place), "digest": each.digest, "numerics": each.numerics}
            for each in found.equal
        ],
        "unverified": {str(place): reason for place, reason in found.unverified.items()},
        "workers": list(found.workers),
        "time_s": time_s,
    }
    return {**body, "sha256": _digest(body)}


def read_certificate(path: Path) -> Mapping[str, Any]:
    """Return the certificate that a file holds.

    Raises InvalidInputError for a file that is none, IntegrityError for one that was changed.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError.at("RUN", f"{path} is no certificate: {error}") from error
    if not isinstance(found, dict) or set(found) != {*_FIELDS, "sha256"}:
        raise InvalidInputError.at("RUN", f"{path} is no certificate of a verified run")
    body = {name: value for name, value in found.items() if name != "sha256"}
    if _digest(body) != found["sha256"]:
        raise IntegrityError(f"{path} was changed after it was written: its digest is another one")
    return found


def check_certificate(found: Mapping[str, Any], claims: Claims) -> int:
    """Return how many digests a certificate and the claims of its run have in common.

    Raises IntegrityError for a digest that the run has not recorded.
    """
    recorded = {tuple(place): claim.digest for place, claim in claims.by_place.items()}
    for each in found["verified"]:
        if recorded.get(tuple(each["place"])) != each["digest"]:
            raise IntegrityError(
                f"certificate: run {found['run']} has no such state: {each['place']}, "
                f"{each['digest']}"
            )
    return len(found["verified"])


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()

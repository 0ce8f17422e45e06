"""Opens the S3 bucket that a setting names, and tries it before anything depends on it.

What AWS tools read from the environment is read here too: AWS_ENDPOINT_URL, AWS_REGION, the keys or
the file with them (object_store_keys.py); AWS_ALLOW_HTTP=true for an endpoint without TLS.
"""

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    StratagemError,
    UnavailableError,
)
from stratagem.common.rpc.signed_objects import SignedObjects
from stratagem.coordinator.store.blobs.object_store import (
    Objects,
    brief,
    certificate_fault,
    unique_name,
)
from stratagem.coordinator.store.blobs.object_store_keys import credentials_from_file, describe

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
    """Open the objects below a URL, after a trial that writes, lists, reads and deletes one; signs:
    also by requests that workers could make, and with a copy of it inside the store.

    Raises InvalidInputError that says what is wrong, with which setting, and what to do.
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
    """Make every kind of request that a coordinator makes, once."""
    name = f"trial/{unique_name(0)}.txt"
    objects.put(name, [_TRIAL], len(_TRIAL))
    trials = [stored for stored in objects.list("trial") if stored.name == name]
    if not trials or b"".join(objects.read(trials[0])) != _TRIAL:
        raise UnavailableError("an object that was just written is not listed, or has other bytes")
    objects.delete([name])


def _try_signed(objects: Objects) -> None:
    """Write and read an object as a worker does, who has a signed request and no keys."""
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
    """Copy an object inside the store, as is done with leaves of an earlier term that a new run
    begins from."""
    name, copied = (f"trial/{unique_name(0)}.txt" for _ in range(2))
    try:
        objects.put(name, [_TRIAL], len(_TRIAL))
        objects.copy(name, copied)
        found = objects.find(copied)
        if found is None or b"".join(objects.read(found)) != _TRIAL:
            raise UnavailableError("the copy has other bytes")
    except StratagemError as error:
        text = f"{objects.url}: the store does not copy an object (CopyObject): {error}"
        remedy = "--state-path direct needs that; leave it out, or name a store that has it"
        raise InvalidInputError.at(SETTING, f"{text}. {remedy}") from error
    finally:
        objects.delete([name, copied])


def _advice(text: str, environ: Mapping[str, str]) -> str:
    """Return the remedy for an error of the library, or "" for one that is not known."""
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

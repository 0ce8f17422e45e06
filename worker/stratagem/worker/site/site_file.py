"""The file by which a site decides what it takes part in, and what of it leaves: `site.toml`.

Owns its keys and what is checked of each, and reading. A file that is wrong is refused as a whole,
naming the key, the value and what is allowed. Decides nothing.
"""

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from pydantic import AfterValidator, PlainValidator

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.code.bundle import read_public_keys
from stratagem.common.identity.tls import certificates_in
from stratagem.common.job.sections import check_tensor_file
from stratagem.common.schema.document import (
    Count,
    EntrypointName,
    Items,
    Kwargs,
    MetricName,
    Name,
    NonEmptyItems,
    NonEmptyText,
    Positive,
    Section,
    one_of,
    only_with,
)
from stratagem.common.schema.json import FrozenDict, under
from stratagem.common.schema.rules import rule
from stratagem.worker.site.windows import parse_window

SIGNED: Final = "signed:"
_DIGEST: Final = re.compile("sha256:[0-9a-f]{64}")


def _check_code(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str):
        if value != "none" and (not value.startswith(SIGNED) or value == SIGNED):
            allowed = 'none, signed:FILE or a list of "sha256:DIGEST"'
            raise InvalidInputError(f"{value!r} is not one of {allowed}")
        return value
    if not isinstance(value, list | tuple) or not value:
        raise InvalidInputError(f'{value!r} is not none, signed:FILE or a list of "sha256:DIGEST"')
    for each in value:
        if not isinstance(each, str) or not _DIGEST.fullmatch(each):
            raise InvalidInputError(
                f"{each!r} is not sha256: and the 64 hex digits that `stratagem code digest` prints"
            )
    return tuple(value)


def _check_fingerprint(value: str) -> str:
    """Return a fingerprint in small letters without colons; openssl writes both."""
    kind, _, digits = value.partition(":")
    plain = f"{kind}:{digits.replace(':', '').lower()}"
    if not _DIGEST.fullmatch(plain):
        text = "is not sha256: and the 64 hex digits of a certificate's fingerprint"
        raise InvalidInputError(f"{value!r} {text}")
    return plain


def _check_window(value: str) -> str:
    parse_window(value)
    return value


def _check_zone(value: str) -> str:
    try:
        ZoneInfo(value)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        text = f"{value!r} is no time zone that is known here, such as Europe/Vienna or UTC"
        raise InvalidInputError(text) from None
    return value


def _read_data(value: object) -> Mapping[str, "SiteDataSpec"]:
    if not isinstance(value, Mapping) or not value:
        raise InvalidInputError("must have at least one table [data.NAME]")
    found = {}
    for name, table in value.items():
        try:
            found[name] = SiteDataSpec.parse(table)
        except InvalidInputError as error:
            raise InvalidInputError(violations=under(name, error.violations)) from None
    return FrozenDict(found)


Code: TypeAlias = Annotated[Any, PlainValidator(_check_code)]
Fingerprint: TypeAlias = Annotated[str, AfterValidator(_check_fingerprint)]
Window: TypeAlias = Annotated[str, AfterValidator(_check_window)]
Zone: TypeAlias = Annotated[str, AfterValidator(_check_zone)]


class SiteDataSpec(Section):
    """One data set of the site, which jobs name as `data: {worker_local: NAME}`.

    entrypoint: a function of a module that is installed or in --import-path, called with kwargs,
    that returns {split: rows}; never one that comes with a job. file: a .safetensors file instead.
    min_rows: rows of the train split, without which nothing is trained on it.
    """

    entrypoint: EntrypointName | None = None
    kwargs: Kwargs = FrozenDict()
    file: Annotated[str, AfterValidator(check_tensor_file)] | None = None
    min_rows: Count = 1

    @rule
    def _one_source(self) -> Iterator[Violation]:
        yield from one_of(self, ("entrypoint", "file"))
        yield from only_with(self, "kwargs", "entrypoint")


class AcceptRule(Section):
    """One kind of job that the site takes part in. A job must fit everything that a rule says; one
    rule that it fits is enough.

    data: names of the site's data that it may use. entrypoints: patterns of the installed functions
    that it may name, as "consortium.*:*"; what comes with the job is a matter of code. submitters:
    patterns of who may have submitted it, as "client/maria" or "token/*"; anybody unless set.
    require: what it must have. max_epsilon: how much privacy, in ε of client- or row-level
    differential privacy, all runs together may spend on a data set. min_clients: the updates that
    each round must at least be made of. code: which code may come with it: none, signed:FILE with
    the public keys that may have signed it, or a list of "sha256:DIGEST". metrics: what evaluation
    may compute, beside the loss. report: sums tells the mean loss, the sums of metrics over all
    rows, and the states of metrics that are sums; none tells nothing of them. windows: when, as
    "Mon-Fri 19:00-06:00"; always unless set.
    """

    data: NonEmptyItems[Name]
    entrypoints: Items[NonEmptyText] = ()
    submitters: NonEmptyItems[NonEmptyText] | None = None
    strategies: NonEmptyItems[Literal["Federated"]] = ("Federated",)
    require: Items[Literal["privacy", "secure_aggregation"]] = ()
    max_epsilon: Positive | None = None
    min_clients: Count = 1
    max_rounds: Count | None = None
    code: Code = "none"
    metrics: Items[MetricName] = ()
    report: Literal["sums", "none"] = "sums"
    windows: Items[Window] = ()
    timezone: Zone | None = None

    @rule
    def _fits_together(self) -> Iterator[Violation]:
        if self.windows and self.timezone is None:
            yield Violation("timezone", "missing; windows are hours of a time zone")
        if self.timezone is not None and not self.windows:
            yield Violation("timezone", "has a meaning only together with windows")


class AuditSpec(Section):
    """What the site writes down, and whether log lines leave.

    file: where a line is added for each offer, refusal and update; beside site.toml unless the
    path is absolute. consent: a document whose SHA-256 stands in each line. share_logs: what the
    job prints and logs, and warnings about its data, go to the coordinator.
    """

    file: NonEmptyText = "audit.jsonl"
    consent: NonEmptyText | None = None
    share_logs: bool = False


class SiteSpec(Section):
    """The whole file.

    site: the name under which refusals and the audit speak of the site. share_errors: of an error
    of the job, type tells the exception's type and where in the job's code it was raised; message
    its message, too, in which a row may stand. peers, peer_authority: whose certificates count in
    secure aggregation: those with one of these SHA-256 fingerprints, and those that an authority in
    this PEM file has issued; without both the coordinator is trusted to follow the protocol.
    """

    site: Name
    data: Annotated[Mapping[str, Any], PlainValidator(_read_data)]
    accept: NonEmptyItems[AcceptRule]
    audit: AuditSpec = AuditSpec()
    share_errors: Literal["type", "message"] = "type"
    peers: Items[Fingerprint] = ()
    peer_authority: NonEmptyText | None = None

    @rule
    def _knows_its_peers(self) -> Iterator[Violation]:
        if self.peers or self.peer_authority is not None:
            return
        text = (
            '"secure_aggregation" needs peers or peer_authority: a coordinator that chooses whose '
            "keys are believed can make up the others"
        )
        for i, accepted in enumerate(self.accept):
            if "secure_aggregation" in accepted.require:
                yield Violation(f"accept[{i}].require", text)

    @rule
    def _rules_fit(self) -> Iterator[Violation]:
        known = ", ".join(self.data)
        for i, accepted in enumerate(self.accept):
            for j, name in enumerate(accepted.data):
                if name not in self.data:
                    yield Violation(f"accept[{i}].data[{j}]", f"{name!r} is not one of {known}")


@dataclass(frozen=True, slots=True)
class PeerPins:
    """Whose certificates a site believes in. fingerprints: SHA-256 of certificates, hexadecimal.
    authorities: in DER; either is enough."""

    fingerprints: frozenset[str] = frozenset()
    authorities: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class SiteFile:
    """The site's file with what it names: keys of code, the digest of the consent."""

    spec: SiteSpec
    folder: Path
    digest: str
    """SHA-256 of the text of the file."""
    consent: str
    """SHA-256 of the consent; "" without one."""
    keys: Mapping[str, tuple[Ed25519PublicKey, ...]]
    """By the file that a rule's `code` names."""
    files: tuple[Path, ...]
    """All that was read: when one of them changes, the file is read again."""
    pins: PeerPins | None = None
    """Whose certificates count in secure aggregation; None: those of any worker."""

    def path(self, name: str) -> Path:
        """Return the path of a file that the site's file names: relative ones are beside it."""
        return self.folder / name


def read_site(file: Path) -> SiteFile:
    """Read a site's file, and what it names. Raises InvalidInputError with what is wrong."""
    try:
        raw = file.read_bytes()
        spec = SiteSpec.parse(tomllib.loads(raw.decode()))
    except OSError as error:
        raise InvalidInputError(error.strerror or "cannot be read") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"is not TOML: {error}") from None
    folder, keys, consent = file.absolute().parent, {}, ""
    files = [file]
    for number, accepted in enumerate(spec.accept):
        if isinstance(accepted.code, str) and accepted.code.startswith(SIGNED):
            path = folder / accepted.code.removeprefix(SIGNED)
            files.append(path)
            try:
                keys[accepted.code] = read_public_keys(path)
            except InvalidInputError as error:
                raise InvalidInputError.at(f"accept[{number}].code", str(error)) from None
    if spec.audit.consent is not None:
        path = folder / spec.audit.consent
        files.append(path)
        try:
            consent = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise InvalidInputError.at("audit.consent", f"{path}: {error.strerror}") from None
    digest = hashlib.sha256(raw).hexdigest()
    pins = _pins(spec, folder, files)
    return SiteFile(spec, folder, digest, consent, keys, tuple(files), pins)


def _pins(spec: SiteSpec, folder: Path, files: list[Path]) -> PeerPins | None:
    if not spec.peers and spec.peer_authority is None:
        return None
    authorities: tuple[bytes, ...] = ()
    if spec.peer_authority is not None:
        path = folder / spec.peer_authority
        files.append(path)
        found = certificates_in("peer_authority", path)
        authorities = tuple(each.public_bytes(Encoding.DER) for each in found)
    fingerprints = frozenset(each.removeprefix("sha256:") for each in spec.peers)
    return PeerPins(fingerprints, authorities)

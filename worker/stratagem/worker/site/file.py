"""Read `site.toml`, which defines the jobs in which a site takes part, and the data that leave it.

A wrong file is refused as a whole, with the key, the value and the allowed ones. Decisions are in
decision.py.
"""

import hashlib
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from pydantic import AfterValidator, PlainValidator

from stratagem.common.base.errors import InvalidInputError, RefusedBySiteError, Violation
from stratagem.common.code.signatures import read_public_keys
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
from stratagem.common.schema.json import FrozenDict, dump_json, under
from stratagem.common.schema.rules import rule
from stratagem.worker.data.datasets import Dataset
from stratagem.worker.data.factory import DataFunction, made_data
from stratagem.worker.data.sources import LocalData, read_tensors
from stratagem.worker.data.streams import StreamedSplit
from stratagem.worker.user_code.entrypoints import EntryPoints

# ---- Site file ----

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
    for item in value:
        if not isinstance(item, str) or not _DIGEST.fullmatch(item):
            raise InvalidInputError(
                f"{item!r} is not sha256: and the 64 hex digits that `stratagem code digest` prints"
            )
    return tuple(value)


def _check_fingerprint(value: str) -> str:
    """Return a fingerprint in lower case without colons, both of which openssl writes."""
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
    specs = {}
    for name, table in value.items():
        try:
            specs[name] = SiteDataSpec.parse(table)
        except InvalidInputError as error:
            raise InvalidInputError(violations=under(name, error.violations)) from None
    return FrozenDict(specs)


Code: TypeAlias = Annotated[Any, PlainValidator(_check_code)]
Fingerprint: TypeAlias = Annotated[str, AfterValidator(_check_fingerprint)]
Window: TypeAlias = Annotated[str, AfterValidator(_check_window)]
Zone: TypeAlias = Annotated[str, AfterValidator(_check_zone)]


class SiteDataSpec(Section):
    """One data set of the site, which jobs name as `data: {worker_local: NAME}`.

    entrypoint: a function that returns {split: rows}, called with kwargs, in a module that is
    installed or in --import-path; never one that comes with a job. file: a .safetensors file
    instead. min_rows: the smallest number of rows of the train split with which anything is trained
    on the data set.
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
    """One kind of job that the site takes part in. A job is accepted if it meets all conditions of
    at least one rule.

    data: the names of the site's data sets that the job may use. entrypoints: patterns of the
    installed functions that it may name, such as "consortium.*:*"; `code` decides on functions that
    come with the job. submitters: patterns of those who may submit it, such as "client/maria" or
    "token/*"; by default anybody. require: protections that the job must have. max_epsilon: the
    largest ε of client- or row-level differential privacy that all runs together may spend on a
    data set. min_clients: the smallest number of updates in each round. code: the code that may
    come with the job: none, signed:FILE with the public keys of accepted signers, or a list of
    "sha256:DIGEST". metrics: the metrics that an evaluation may compute, besides the loss. report:
    "sums" discloses the mean loss, the sums of metrics over all rows, and the states of metrics
    that are sums; "none" discloses none of them. windows: the hours in which the site takes part,
    such as "Mon-Fri 19:00-06:00"; by default always.
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
    """The records of the site, and the disclosure of log lines.

    file: the audit log, which gets a line for each offer, refusal and update; a relative path is
    beside site.toml. consent: a document whose SHA-256 is in each line. share_logs: send the job's
    output and logs, and warnings about its data, to the coordinator.
    """

    file: NonEmptyText = "audit.jsonl"
    consent: NonEmptyText | None = None
    share_logs: bool = False


class SiteSpec(Section):
    """The content of the whole file.

    site: the name of the site in refusals and in the audit. share_errors: what is disclosed of an
    error of the job: "type", the exception's type and the line of the job's code that raised it;
    "message", the message too, which may contain a row. peers, peer_authority: the certificates
    that are accepted in secure aggregation: those with one of these SHA-256 fingerprints, and those
    issued by an authority in this PEM file; without either, the coordinator is trusted to follow
    the protocol.
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
        names = ", ".join(self.data)
        for i, accepted in enumerate(self.accept):
            for j, name in enumerate(accepted.data):
                if name not in self.data:
                    yield Violation(f"accept[{i}].data[{j}]", f"{name!r} is not one of {names}")


@dataclass(frozen=True, slots=True)
class PeerPins:
    """The certificates that a site trusts. fingerprints: SHA-256 of certificates, hexadecimal.
    authorities: in DER. Either is enough."""

    fingerprints: frozenset[str] = frozenset()
    authorities: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class SiteFile:
    """The content of the site's file and of the files that it names: signing keys, consent."""

    spec: SiteSpec
    folder: Path
    digest: str
    """The SHA-256 of the text of the file."""
    consent: str
    """The SHA-256 of the consent; "" without one."""
    keys: Mapping[str, tuple[Ed25519PublicKey, ...]]
    """The public keys, keyed by the file that a rule's `code` names."""
    files: tuple[Path, ...]
    """All files that were read; when one of them changes, the site's file is read again."""
    pins: PeerPins | None = None
    """The certificates that count in secure aggregation; None: those of any worker."""

    def path(self, name: str) -> Path:
        """Return the path of a file that the site's file names; relative paths are beside it."""
        return self.folder / name


def read_site(file: Path) -> SiteFile:
    """Read a site's file, and the files that it names. Raises InvalidInputError with the faults."""
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
        certificates = certificates_in("peer_authority", path)
        authorities = tuple(certificate.public_bytes(Encoding.DER) for certificate in certificates)
    fingerprints = frozenset(fingerprint.removeprefix("sha256:") for fingerprint in spec.peers)
    return PeerPins(fingerprints, authorities)


# ---- Data sets of a site ----
#
# The file names the data sets; a function that came with a job never loads them.

_TRAIN: Final = "train"


def site_data(site: SiteFile, import_paths: tuple[str, ...]) -> dict[str, LocalData]:
    """Return the loaders of the site's data sets, by name."""
    return {
        name: partial(_load, site, name, spec, import_paths)
        for name, spec in site.spec.data.items()
    }


def absent_data(site: SiteFile, import_paths: tuple[str, ...]) -> Iterator[str]:
    """Yield a sentence for each data set whose file, or whose loader's module, is missing.

    Nothing is imported, as that may take minutes.
    """
    for name, spec in site.spec.data.items():
        if spec.file is not None and not site.path(spec.file).is_file():
            yield f"data.{name}.file: {site.path(spec.file)} is no file"
        package = (spec.entrypoint or "").partition(":")[0].partition(".")[0]
        if package and not _is_found(package, import_paths):
            text = f"no module {package!r} is installed, or in --import-path"
            yield f"data.{name}.entrypoint: {spec.entrypoint!r} cannot be found: {text}"


def _is_found(package: str, import_paths: tuple[str, ...]) -> bool:
    return (
        package in sys.modules
        or importlib.util.find_spec(package) is not None
        or PathFinder.find_spec(package, list(import_paths)) is not None
    )


def data_version(site: SiteFile) -> str:
    """Return a text that changes with the definition of the site's data."""
    return dump_json({name: spec.document() for name, spec in site.spec.data.items()})


def _load(
    site: SiteFile, name: str, spec: SiteDataSpec, import_paths: tuple[str, ...], seed: int | None
) -> Mapping[str, Dataset]:
    """Load a data set. Raises RefusedBySiteError where it has too few rows."""
    if spec.entrypoint is None:
        assert spec.file is not None
        splits = read_tensors(Path(site.path(spec.file)), f"data.{name}.file")
    else:
        entrypoints = EntryPoints((spec.entrypoint,), import_paths)
        function = DataFunction(spec.entrypoint, spec.kwargs, collate=None)
        splits = made_data(function, entrypoints, {}, seed)
    streams = [split for split, rows in splits.items() if isinstance(rows, StreamedSplit)]
    if streams:
        text = f"data.{name}: its split {streams[0]} is a stream, whose rows cannot be counted"
        raise RefusedBySiteError(f"site {site.spec.site} refuses: {text}")
    num_rows = len(splits[_TRAIN]) if _TRAIN in splits else 0
    if num_rows < spec.min_rows:
        text = f"data.{name}.min_rows: it has fewer rows to train on than {spec.min_rows}"
        raise RefusedBySiteError(f"site {site.spec.site} refuses: {text}")
    return splits


# ---- Windows ----
#
# Windows are the times of the week in which a site takes part, in its time zone. A window has days
# and, unless it means whole days, hours: "Mon-Fri 19:00-06:00", "Sat-Sun". Hours whose end is not
# after their beginning end on the next day. The functions are pure, with the time as an argument.

DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
FORM: Final = 'days and perhaps hours, such as "Mon-Fri 19:00-06:00" or "Sat-Sun"'
_WINDOW: Final = re.compile(
    r"(?P<days>\w{3}(-\w{3})?(,\w{3}(-\w{3})?)*)( (?P<begin>\d\d:\d\d)-(?P<end>\d\d:\d\d))?"
)
_WHOLE_WEEK: Final = timedelta(days=8)
"""The look-ahead for a window's end: one that stays open for longer counts as always open."""
_MIDNIGHT: Final = time()


@dataclass(frozen=True, slots=True)
class SiteWindow:
    """Hours on some days of the week. An end that is not after the beginning is on the next day."""

    days: frozenset[int]
    begin: time = _MIDNIGHT
    end: time = _MIDNIGHT

    def on(self, day: date, zone: ZoneInfo) -> tuple[datetime, datetime] | None:
        """Return the opening and closing of the window that begins on a day; None on other days."""
        if day.weekday() not in self.days:
            return None
        last = day + timedelta(days=self.end <= self.begin)
        opens = datetime.combine(day, self.begin, zone)
        return opens, datetime.combine(last, self.end, zone)


@dataclass(frozen=True, slots=True)
class Opening:
    """The state of the windows at a time, open or closed, and its next change."""

    is_open: bool
    changes: datetime | None = None
    """The time of the next change; None: none within a week."""


def parse_window(text: str) -> SiteWindow:
    """Parse a window. Raises InvalidInputError with the allowed forms."""
    matched = _WINDOW.fullmatch(text)
    if matched is None:
        raise InvalidInputError(f"{text!r} is not {FORM}")
    days = frozenset(day for part in matched["days"].split(",") for day in _days(part, text))
    if matched["begin"] is None:
        return SiteWindow(days)
    return SiteWindow(days, _hour(matched["begin"], text), _hour(matched["end"], text))


def _days(part: str, text: str) -> Iterator[int]:
    names = part.split("-")
    unknown = [name for name in names if name not in DAYS]
    if unknown:
        raise InvalidInputError(f"{text!r}: {unknown[0]!r} is not one of {', '.join(DAYS)}")
    first, last = DAYS.index(names[0]), DAYS.index(names[-1])
    for offset in range((last - first) % len(DAYS) + 1):
        yield (first + offset) % len(DAYS)


def _hour(text: str, whole: str) -> time:
    if text == "24:00":
        return _MIDNIGHT
    try:
        return time.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(f"{whole!r}: {text!r} is not a time from 00:00 to 24:00") from None


def opening(windows: Sequence[SiteWindow], zone: ZoneInfo, at: datetime) -> Opening:
    """Return the state of the windows at a time, which must have a time zone: open if one of them
    is, or if there are none.

    Adjacent windows count as one. Times are compared as moments, so a night on which the clocks are
    put back is an hour longer.
    """
    if not windows:
        return Opening(is_open=True)
    now = at.timestamp()
    spans = _spans(windows, zone, at.astimezone(zone).date())
    for opens, closes in spans:
        if opens.timestamp() <= now < closes.timestamp():
            is_endless = closes.timestamp() - now > _WHOLE_WEEK.total_seconds()
            return Opening(is_open=True, changes=None if is_endless else closes)
    later = [opens for opens, _ in spans if opens.timestamp() > now]
    return Opening(is_open=False, changes=later[0] if later else None)


def _spans(
    windows: Sequence[SiteWindow], zone: ZoneInfo, today: date
) -> list[tuple[datetime, datetime]]:
    """Return the open times from yesterday to two weeks from now, in order and without overlap."""
    days = [today + timedelta(days=number) for number in range(-1, 15)]
    openings = (window.on(day, zone) for day in days for window in windows)
    merged: list[tuple[datetime, datetime]] = []
    for opens, closes in sorted(filter(None, openings), key=lambda span: span[0].timestamp()):
        if merged and opens.timestamp() <= merged[-1][1].timestamp():
            before = merged.pop()
            merged.append((before[0], max(before[1], closes, key=lambda end: end.timestamp())))
        else:
            merged.append((opens, closes))
    return merged


def moment_text(moment: datetime, zone: ZoneInfo) -> str:
    """Return a moment as "Mon 19:00 Europe/Vienna"."""
    local = moment.astimezone(zone)
    return f"{DAYS[local.weekday()]} {local:%H:%M} {zone.key}"

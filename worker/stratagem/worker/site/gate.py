"""Check each plan of a coordinator against the site's file, and audit it.

The gate reads the file again when it has changed, and writes the audit. The decision itself is a
pure function in decision.py. Used from any thread.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock

import structlog

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    RefusedBySiteError,
    SiteClosedError,
    UserCodeError,
)
from stratagem.common.base.files import Stamp, stamp_of
from stratagem.common.job import JobSpec
from stratagem.common.job.derived import entry_points
from stratagem.common.schema.json import JSON
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import Manifest
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.data.sources import LocalData
from stratagem.worker.site.audit import AuditFile
from stratagem.worker.site.decision import FitsRule, Offer, decide, epsilon_of
from stratagem.worker.site.disclosure import CodePlaces, Disclosure
from stratagem.worker.site.file import SiteFile, absent_data, data_version, read_site, site_data

# ---- Admission of a plan ----
#
# An admission is an offer that a site has accepted: the data that its plan may use and disclose,
# and its lines in the audit.

Write = Callable[[Mapping[str, JSON]], None]
"""Adds a line to the audit, with the time. Raises OSError or IntegrityError."""


@dataclass(frozen=True, slots=True)
class SiteAdmission:
    """A plan's admission: what it may use and disclose at the site. Used from any thread."""

    site: str
    disclosure: Disclosure
    entrypoints: tuple[str, ...]
    """The patterns of the installed functions that the job may name."""
    data: Mapping[str, LocalData]
    data_version: str
    places: CodePlaces
    record: Mapping[str, JSON]
    """Fields common to all audit lines about the plan."""
    write: Write
    noises: frozenset[str] = frozenset()
    """Names that identify the noise of the run's earlier rounds, if rows are protected."""
    open_s: float | None = None
    """Seconds from the offer to the end of the site's window; None if it has no end."""
    closed_text: str = ""
    """A sentence about the next window's beginning."""
    closed_s: float = 0.0
    """Seconds from the end of the site's window to the next one."""

    @property
    def closed(self) -> SiteClosedError:
        """Return the error of a plan that is ended by the window's end."""
        return SiteClosedError(f"site {self.site} is closed: {self.closed_text}", self.closed_s)

    def update(
        self,
        manifest: Manifest,
        buffers: Sequence[memoryview],
        num_rows: int,
        costs: Mapping[str, JSON],
    ) -> None:
        """Audit an update before it can be fetched. costs: the spent privacy of protected rows;
        without it, the job's limit is recorded."""
        digest = hashlib.sha256(header_bytes(manifest))
        for buffer in buffers:
            digest.update(buffer)
        update: JSON = digest.hexdigest()
        num_bytes = manifest.total_bytes
        line: dict[str, JSON] = {
            "kind": "round",
            "rows": num_rows,
            "bytes": num_bytes,
            "update": update,
        }
        self._write({**line, **costs})

    def disclosed(self, result: pb.ExecuteResult) -> pb.ExecuteResult:
        """Return the disclosed part of a result, after auditing it."""
        disclosed = self.disclosure.result(result)
        data = disclosed.SerializeToString(deterministic=True)
        answer: dict[str, JSON] = {
            "kind": "answer",
            "outcome": disclosed.WhichOneof("outcome") or "",
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        if disclosed.HasField("error"):
            answer["reason"] = disclosed.error.message
        self._write(answer)
        return disclosed

    def error(self, error: BaseException, activity: str, told: UserCodeError) -> UserCodeError:
        """Return the disclosed part of an error; the whole error goes to the site's log."""
        log.warning("an error of the job stays here", error=str(told), traceback=told.traceback)
        return self.disclosure.error(error, self.places, activity)

    def _write(self, fields: Mapping[str, JSON]) -> None:
        try:
            self.write({**self.record, **fields})
        except (OSError, IntegrityError) as error:
            log.error("the audit cannot be written", reason=str(error))
            raise unwritten(self.site) from None


def unwritten(site: str) -> RefusedBySiteError:
    """Return the error by which everything is refused while the audit cannot be written."""
    return RefusedBySiteError(f"site {site} refuses: its audit cannot be written; see its log")


# ---- Site gate ----

log = structlog.get_logger(__name__)

Clock = Callable[[], datetime]


def wall_clock() -> datetime:
    """Return the current time, by which windows open and audit lines are dated."""
    return datetime.now(UTC)


class SiteGate:
    """Admits or refuses plans by the site's file, in one worker process."""

    def __init__(
        self,
        file: Path,
        worker_id: str,
        import_paths: tuple[str, ...] = (),
        clock: Clock = wall_clock,
    ) -> None:
        """Read the file. Raises InvalidInputError for a wrong file or an unwritable audit."""
        self._file, self._worker_id, self._import_paths = file, worker_id, import_paths
        self._clock, self._lock = clock, Lock()
        self._site = read_site(file)
        self._stamp = _stamp(self._site)
        self._wrong = ""
        self._audit = AuditFile(self._site.path(self._site.spec.audit.file))

    @property
    def site(self) -> SiteFile:
        """The site's file as last read."""
        return self._site

    def absent_data(self) -> list[str]:
        """Return a sentence for each data set that cannot be loaded, as far as that is known
        without loading."""
        return list(absent_data(self._site, self._import_paths))

    @property
    def data_names(self) -> list[str]:
        """The names of data sets that jobs may use as worker_local."""
        return sorted(self._site.spec.data)

    @property
    def code_policy(self) -> str:
        """The accepted code as reported to the coordinator: "none" or "signed"."""
        return "signed" if any(r.code != "none" for r in self._site.spec.accept) else "none"

    @property
    def shares_logs(self) -> bool:
        return self._site.spec.audit.share_logs

    def admit(self, request: pb.ExecuteRequest, job: JobSpec) -> SiteAdmission:
        """Admit a plan and audit the decision. Raises RefusedBySiteError or SiteClosedError with
        the reason."""
        with self._lock:
            now = self._clock()
            try:
                site = self._newest()
            except RefusedBySiteError as error:
                record = self._record(self._site, request, job)
                self._note({**record, "kind": "refusal", "reason": str(error)}, now)
                raise
            record = self._record(site, request, job)
            plan = request.WhichOneof("plan") or ""
            client_round = request.client_round
            is_masked = client_round.HasField("secure_mask")
            clip_norm = client_round.clip_norm
            offer = Offer(job, plan, request.submitted_by, clip_norm, is_masked)
            spent = self._audit.spent(request.session.run_id)
            verdict = decide(site, offer, now, spent)
            if isinstance(verdict, FitsRule):
                record["rule"] = verdict.number
                self._note({**record, "kind": "offer"}, now)
                return self._admission(site, verdict, job, record, now)
            self._note({**record, "kind": "refusal", "reason": verdict.reason}, now)
            if verdict.opens is None:
                raise RefusedBySiteError(verdict.reason)
            raise SiteClosedError(verdict.reason, (verdict.opens - now).total_seconds())

    def write(self, fields: dict[str, JSON]) -> None:
        """Write a line into the audit. Raises RefusedBySiteError if that fails."""
        self._note(fields, self._clock())

    def _newest(self) -> SiteFile:
        """Return the file, read again if changed. Raises RefusedBySiteError if it is wrong."""
        stamp = _stamp(self._site)
        if stamp != self._stamp:
            self._stamp, self._wrong = stamp, ""
            try:
                site = read_site(self._file)
                if site.path(site.spec.audit.file) != self._audit.path:
                    self._audit = AuditFile(site.path(site.spec.audit.file))
            except InvalidInputError as error:
                log.error("the site's file is wrong; all is refused until it is right", why=error)
                keys = ", ".join(fault.field for fault in error.violations if fault.field)
                self._wrong = f"its file was changed and is wrong{keys and ' at '}{keys}"
            else:
                log.info("the site's file was read again", path=str(self._file))
                self._site, self._stamp = site, _stamp(site)
        if self._wrong:
            raise RefusedBySiteError(f"site {self._site.spec.site} refuses: {self._wrong}")
        return self._site

    def _admission(
        self,
        site: SiteFile,
        verdict: FitsRule,
        job: JobSpec,
        record: dict[str, JSON],
        now: datetime,
    ) -> SiteAdmission:
        rule, spec = verdict.rule, site.spec
        closes = verdict.closes
        return SiteAdmission(
            site=spec.site,
            disclosure=Disclosure(
                site=spec.site,
                metrics=frozenset(rule.metrics),
                tells_loss=rule.report == "sums",
                shares_logs=spec.audit.share_logs,
                shares_messages=spec.share_errors == "message",
            ),
            entrypoints=rule.entrypoints,
            data=site_data(site, self._import_paths),
            data_version=data_version(site),
            places=CodePlaces(
                bundle=(job.code.digest or "") if job.code is not None else "",
                packages=frozenset(
                    name.partition(":")[0].partition(".")[0] for name in entry_points(job)
                ),
            ),
            record=record,
            write=lambda fields: self._audit.add({"at": _timestamp(self._clock()), **fields}),
            noises=self._audit.noises(str(record["run"]), job.data.worker_local or ""),
            open_s=None if closes is None else (closes - now).total_seconds(),
            closed_text=verdict.closed_text,
            closed_s=verdict.closed_s,
        )

    def _record(self, site: SiteFile, request: pb.ExecuteRequest, job: JobSpec) -> dict[str, JSON]:
        """Return the fields common to all audit lines about a plan."""
        session, code = request.session, job.code
        epsilon = epsilon_of(job)
        return {
            "site": site.spec.site,
            "worker": self._worker_id,
            "run": session.run_id,
            "party": session.party,
            "plan": request.WhichOneof("plan") or "",
            "round": request.segment,
            "job": hashlib.sha256(request.job_json.encode()).hexdigest(),
            "code": (code.digest or "") if code is not None else "",
            "submitter": request.submitted_by,
            "data": job.data.worker_local or "",
            "epsilon": epsilon,
            "file": site.digest,
            "consent": site.consent,
        }

    def _note(self, record: dict[str, JSON], now: datetime) -> None:
        try:
            self._audit.add({"at": _timestamp(now), **record})
        except (OSError, IntegrityError) as error:
            log.error("the audit cannot be written", reason=str(error))
            raise unwritten(self._site.spec.site) from None


def _timestamp(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")


def _stamp(site: SiteFile) -> Stamp:
    """Return a value that changes with the site's files; () if one is missing."""
    try:
        return stamp_of(*site.files)
    except OSError:
        return ()

"""The gate of a site: asks its file about each plan that a coordinator sends, and writes it down.

Owns the site's file as it stands, which is read again when it has changed, the audit, and the time.
The decision itself is a pure function in decision.py. Used from any thread.
"""

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock

import structlog

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    RefusedBySiteError,
    SiteClosedError,
)
from stratagem.common.base.files import Stamp, stamp_of
from stratagem.common.job import JobSpec
from stratagem.common.job.derived import entry_points
from stratagem.common.schema.json import JSON
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.site.audit_file import AuditFile
from stratagem.worker.site.decision import FitsRule, Offer, decide, epsilon_of
from stratagem.worker.site.disclosure import Disclosure
from stratagem.worker.site.error_place import CodePlaces
from stratagem.worker.site.site_admission import SiteAdmission, unwritten
from stratagem.worker.site.site_data import absent_data, data_version, site_data
from stratagem.worker.site.site_file import SiteFile, read_site

log = structlog.get_logger(__name__)

Clock = Callable[[], datetime]


def wall_clock() -> datetime:
    """Return the time by which windows open and audits are dated."""
    return datetime.now(UTC)


class SiteGate:
    """Lets plans in or refuses them, for one worker process."""

    def __init__(
        self,
        file: Path,
        worker_id: str,
        import_paths: tuple[str, ...] = (),
        clock: Clock = wall_clock,
    ) -> None:
        """Raises InvalidInputError for a file that is wrong, or an audit that cannot be written."""
        self._file, self._worker_id, self._import_paths = file, worker_id, import_paths
        self._clock, self._lock = clock, Lock()
        self._site = read_site(file)
        self._stamp = _stamp(self._site)
        self._wrong = ""
        self._audit = AuditFile(self._site.path(self._site.spec.audit.file))

    @property
    def site(self) -> SiteFile:
        """The file as it was last read."""
        return self._site

    def absent_data(self) -> list[str]:
        """Return a sentence for each data set that cannot be loaded now, as far as that shows
        without loading it."""
        return list(absent_data(self._site, self._import_paths))

    @property
    def data_names(self) -> list[str]:
        """Names of the data that jobs may name as worker_local."""
        return sorted(self._site.spec.data)

    @property
    def code_policy(self) -> str:
        """What the coordinator is told of the code that is taken: "none", or "signed"."""
        return "signed" if any(r.code != "none" for r in self._site.spec.accept) else "none"

    @property
    def shares_logs(self) -> bool:
        return self._site.spec.audit.share_logs

    def admit(self, request: pb.ExecuteRequest, job: JobSpec) -> SiteAdmission:
        """Let a plan in. Raises RefusedBySiteError, or SiteClosedError, with the reason; either way
        it stands in the audit then."""
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
        """Write a line into the audit. Raises RefusedBySiteError where it cannot be written."""
        self._note(fields, self._clock())

    def _newest(self) -> SiteFile:
        """Return the file as it is now. Raises RefusedBySiteError where it has become wrong."""
        stamp = _stamp(self._site)
        if stamp != self._stamp:
            self._stamp, self._wrong = stamp, ""
            try:
                site = read_site(self._file)
                if site.path(site.spec.audit.file) != self._audit.path:
                    self._audit = AuditFile(site.path(site.spec.audit.file))
            except InvalidInputError as error:
                log.error("the site's file is wrong; all is refused until it is right", why=error)
                keys = ", ".join(each.field for each in error.violations if each.field)
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
            write=lambda fields: self._audit.add({"at": _said(self._clock()), **fields}),
            noises=self._audit.noises(str(record["run"]), job.data.worker_local or ""),
            open_s=None if closes is None else (closes - now).total_seconds(),
            closed_text=verdict.closed_text,
            closed_s=verdict.closed_s,
        )

    def _record(self, site: SiteFile, request: pb.ExecuteRequest, job: JobSpec) -> dict[str, JSON]:
        """Return what all lines about a plan have in common."""
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
            self._audit.add({"at": _said(now), **record})
        except (OSError, IntegrityError) as error:
            log.error("the audit cannot be written", reason=str(error))
            raise unwritten(self._site.spec.site) from None


def _said(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")


def _stamp(site: SiteFile) -> Stamp:
    """Return what differs when a file of the site has changed; () when one is not there."""
    try:
        return stamp_of(*site.files)
    except OSError:
        return ()

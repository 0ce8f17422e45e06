"""One offer that a site has accepted: what its plan may use and tell, and what is written of it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from stratagem.common.base.errors import (
    IntegrityError,
    RefusedBySiteError,
    SiteClosedError,
    UserCodeError,
)
from stratagem.common.schema.json import JSON
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import Manifest
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.data.data_sources import LocalData
from stratagem.worker.site.disclosure import Disclosure
from stratagem.worker.site.error_place import CodePlaces

log = structlog.get_logger(__name__)

Write = Callable[[Mapping[str, JSON]], None]
"""Adds a line to the audit, with the time. Raises OSError or IntegrityError."""


@dataclass(frozen=True, slots=True)
class SiteAdmission:
    """What an accepted plan has of the site. Used from any thread."""

    site: str
    disclosure: Disclosure
    entrypoints: tuple[str, ...]
    """Patterns of the installed functions that the job may name."""
    data: Mapping[str, LocalData]
    data_version: str
    places: CodePlaces
    record: Mapping[str, JSON]
    """What all lines about the plan have in common."""
    write: Write
    noises: frozenset[str] = frozenset()
    """What names the noise of the run's rounds that have left before, where rows are protected."""
    open_s: float | None = None
    """Seconds from the offer to the end of the site's window; None: no end."""
    closed_text: str = ""
    """When the next window begins."""
    closed_s: float = 0.0
    """Seconds from the end of the site's window to the next one."""

    @property
    def closed(self) -> SiteClosedError:
        """The error with which the plan ends when the window does."""
        return SiteClosedError(f"site {self.site} is closed: {self.closed_text}", self.closed_s)

    def update(
        self,
        manifest: Manifest,
        buffers: Sequence[memoryview],
        num_rows: int,
        costs: Mapping[str, JSON],
    ) -> None:
        """Write down an update before it can be fetched. costs: of protected rows, what has been
        spent with it in place of what the job may spend."""
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

    def told(self, result: pb.ExecuteResult) -> pb.ExecuteResult:
        """Return what leaves of a result, once it is written down; of an update that is done
        already."""
        told = self.disclosure.result(result)
        data = told.SerializeToString(deterministic=True)
        answer: dict[str, JSON] = {
            "kind": "answer",
            "outcome": told.WhichOneof("outcome") or "",
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        if told.HasField("error"):
            answer["reason"] = told.error.message
        self._write(answer)
        return told

    def error(self, error: BaseException, activity: str, told: UserCodeError) -> UserCodeError:
        """Return what leaves of an error; all of it stands in the site's log."""
        log.warning("an error of the job stays here", error=str(told), traceback=told.traceback)
        return self.disclosure.error(error, self.places, activity)

    def _write(self, fields: Mapping[str, JSON]) -> None:
        try:
            self.write({**self.record, **fields})
        except (OSError, IntegrityError) as error:
            log.error("the audit cannot be written", reason=str(error))
            raise unwritten(self.site) from None


def unwritten(site: str) -> RefusedBySiteError:
    """Return the refusal of everything while the audit cannot be written."""
    return RefusedBySiteError(f"site {site} refuses: its audit cannot be written; see its log")

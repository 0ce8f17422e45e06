"""What a worker keeps of its clients' secure rounds: secrets, and what they were used for.

Owns one record for each client of each run, on the disk before an answer leaves where the worker
has a data folder (0600, one file for each), else in memory: a worker that is restarted without one
has lost its keys, and its clients drop out of the round. Of a round that is over only its number
stays, so that it is never unmasked a second time.
"""

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import RLock
from typing import Final

import structlog

from stratagem.common.base.files import whole_file
from stratagem.common.schema.json import JSON
from stratagem.common.strategy.secure import SecureAggregation

log = structlog.get_logger(__name__)

MAX_RECORDS: Final = 65_536
_SUFFIX: Final = ".secret"


@dataclass(frozen=True, slots=True)
class PeerKeys:
    """What was verified of a neighbour: hexadecimal."""

    share_key: str
    mask_key: str
    identity: str


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """The newest round of one client. Bytes are hexadecimal."""

    run_id: str
    party: str
    client: int
    round_num: int
    attempt: int
    root: str = field(repr=False)
    """Empty once the secrets are forgotten."""
    job: str
    """SHA-256 of the job's text, which all of the round must have."""
    spec: SecureAggregation
    """The job's section."""
    audit: Mapping[str, JSON] = field(default_factory=dict)
    """What the lines of a site's audit about the round have in common."""
    last_opened: int = 0
    """The newest round in which shares were opened."""
    setup: str = ""
    """SHA-256 of what the shares depend on: who is in the round, and the neighbours' keys."""
    members: tuple[int, ...] = ()
    ring_seed: str = ""
    neighbours: Mapping[int, PeerKeys] = field(default_factory=dict)
    routed: tuple[int, ...] = ()
    update: str = ""
    """SHA-256 of the masked update, before which none has left."""
    survivors: tuple[int, ...] = ()
    """The set that was signed; there is no second one."""
    identity: str = ""
    """SHA-256 of what the client's signatures of the round are verified with."""

    @property
    def key(self) -> "RecordKey":
        return self.run_id, self.party, self.client

    def forgotten(self) -> "RoundRecord":
        """Return what is kept of a round that is over."""
        of_round = self.round_num, self.attempt
        opened = self.last_opened
        return RoundRecord(*self.key, *of_round, "", self.job, self.spec, last_opened=opened)


RecordKey = tuple[str, str, int]
"""Run, party, client."""


class SecretStore:
    """The records of one worker. Used from any thread, under `lock`."""

    def __init__(self, folder: Path | None) -> None:
        self.lock = RLock()
        self._folder = folder
        self._records: OrderedDict[RecordKey, RoundRecord] = OrderedDict()
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
            for path in files:
                self._load(path)

    def find(self, key: RecordKey) -> RoundRecord | None:
        return self._records.get(key)

    def save(self, record: RoundRecord) -> None:
        """Keep a record in the place of the one before. It is on the disk when this returns."""
        if self._folder is not None:
            with whole_file(self._path(record.key), mode=0o600) as file:
                file.write(json.dumps(asdict(record)).encode())
            _sync(self._folder)
        self._records[record.key] = record
        self._records.move_to_end(record.key)
        if len(self._records) > MAX_RECORDS:
            self._drop_oldest()

    def forget_run(self, run_id: str) -> None:
        """Forget the secrets of a run that is over, and keep which of its rounds were opened."""
        with self.lock:
            for record in [each for each in self._records.values() if each.run_id == run_id]:
                if record.root:
                    self.save(record.forgotten())

    def _drop_oldest(self) -> None:
        key, _ = self._records.popitem(last=False)
        if self._folder is not None:
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: RecordKey) -> Path:
        assert self._folder is not None
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        return self._folder / f"{name}{_SUFFIX}"

    def _load(self, path: Path) -> None:
        try:
            fields = json.loads(path.read_bytes())
            peers = {int(c): PeerKeys(**keys) for c, keys in fields.pop("neighbours").items()}
            fields["spec"] = SecureAggregation(**fields["spec"])
            for name in ("members", "routed", "survivors"):
                fields[name] = tuple(fields[name])
            record = RoundRecord(**fields, neighbours=peers)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            log.warning("a secure round's record cannot be read: its keys are lost", file=str(path))
            return
        self._records[record.key] = record


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The spool keeps the updates of federated rounds in files that survive a crash.

    root/<run>/<party>/<round>/<client>.<token>.safetensors   data, whole or on their way
    root/<run>/<party>/<round>/<client>.json                  the entry: this client is accepted

This module owns files, quota and removal; upload.py receives one update. With an object store, an
update is accepted when the object store has it, and the files here are copies: updates that
another coordinator has accepted are fetched. The spool does not decide who takes part in a round.
"""

import io
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final, Self

import structlog

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    LimitError,
    NotFoundError,
)
from stratagem.common.base.ids import Digest, Party, RunId, check_run_id, is_within
from stratagem.common.numerics.verification import VERIFIER
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.files import MAX_HEADER_BYTES, header_bytes, header_size, parse_header
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.coordinator.core.state import EndedRun, RunRecord
from stratagem.coordinator.store.bucket import (
    Objects,
    StoredObject,
    beginning,
    deletable,
    mark,
    unique_name,
)
from stratagem.coordinator.store.files import MakeRoom, NoSpaceError, make_folder, no_room
from stratagem.coordinator.store.shared_blobs import own_pieces
from stratagem.coordinator.updates.upload import (
    Before,
    SpoolEntry,
    SpoolWriter,
    UpdateRejectedError,
    UpdateUpload,
    noted_offset,
    remove_files,
    update_digest,
)

# ---- Keys ----
#
# A key identifies an update and names the folder below the spool in which it is stored:
#
#     <run>.<submission>/<party>/<round>      where the party is root, root-<returns>, root.<path>,
#                                             root.verifier-<repeats>, ..
#
# The folder of a run is that of one submission, and the folder of a party that of the time since
# the run last went back to an earlier commit, or its verifier began a segment again. So no run or
# round finds an update that was not made for it, whether or not old updates have been deleted.

_SEGMENT: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ROOT: Final = re.compile(rf"root(?:-(\d{{1,9}}))?(?:\.{VERIFIER}-(\d{{1,9}}))?(?:\..*)?")


@dataclass(frozen=True, slots=True)
class SpoolRun:
    """The identity of a run for its updates: its submission, and its returns to earlier commits."""

    run_id: RunId
    submission: str = ""
    """The identifier of the submission; see RunSubmitted."""
    num_returns: int = 0
    """The number of times the run returned to an earlier commit. Its rounds are then repeated,
    perhaps from other states, and updates accepted before do not count."""
    num_repeats: int = 0
    """The number of times the run's verifier has begun segments again; likewise for its rounds."""

    @classmethod
    def of(cls, run: RunRecord | EndedRun) -> Self:
        """Return the current submission of a run, and its numbers of returns and repeats."""
        if not isinstance(run, RunRecord):
            return cls(run.run_id, run.submission)
        num_repeats = run.strategy.num_repeats(run.value)
        return cls(run.run_id, run.submission, run.num_returns, num_repeats)

    @property
    def folder(self) -> str:
        """Return the name of the run's folder for all parties. Raises InvalidInputError."""
        name = check_run_id(self.run_id)
        if not self.submission:
            return name
        if not _SEGMENT.fullmatch(self.submission):
            raise InvalidInputError.at("submission", f"{self.submission!r} is no name")
        return f"{name}.{self.submission}"

    def folder_of(self, party: Party, round_num: int) -> PurePosixPath:
        """Return the folder of a round. Raises InvalidInputError if a part is not a valid name."""
        segments = party.split("/") if party else []
        if not all(_SEGMENT.fullmatch(segment) for segment in segments):
            raise InvalidInputError.at("party", f"{party!r} is no path of names")
        root = f"root-{self.num_returns}" if self.num_returns else "root"
        if is_within(party, VERIFIER):
            segments[0] = f"{VERIFIER}-{self.num_repeats}"
        return PurePosixPath(self.folder, ".".join((root, *segments)), str(int(round_num)))

    def is_over(self, party_folder: str) -> bool:
        """Return True if a party's folder is from before the run last returned to a commit, or its
        verifier last began a segment again."""
        match_ = _ROOT.fullmatch(party_folder)
        if match_ is None:
            return False
        is_repeated = match_[2] is not None and int(match_[2]) < self.num_repeats
        return is_repeated or int(match_[1] or 0) < self.num_returns


@dataclass(frozen=True, slots=True)
class SpoolKey:
    """The key of a client's update: run, party, round and client."""

    run: SpoolRun
    party: Party
    round_num: int
    client: int

    @property
    def folder(self) -> PurePosixPath:
        """Return the folder of the update's round."""
        return self.run.folder_of(self.party, self.round_num)


# ---- Object store ----
#
# Accepted updates in an object store let another coordinator fold the round.
#
#     spool/<run>/<party>/<round>/<client>/<term>-<token>-<samples>-<crc32c>.safetensors
#
# One object is one acceptance: its name says what the fold needs to know beside the file, so it
# takes one write, which is whole or absent. Nothing is overwritten (store/bucket.py gives the
# reason): the journal says which of a client's updates counts.

_FOLDER: Final = "spool"
_NAME: Final = re.compile(r"\d{10}-[0-9a-f]{16}-(\d{1,18})-([0-9a-f]{8})\.safetensors")


@dataclass(frozen=True, slots=True)
class SharedUpdate:
    """A client's accepted update, as it is kept in the object store."""

    client: int
    stored: StoredObject
    num_samples: int
    digest: Digest


class SharedSpool:
    """The updates below one prefix of a bucket, for the coordinator of one leadership term.
    `folder` is <run>/<party>/..."""

    def __init__(self, objects: Objects, term: int) -> None:
        self._objects, self._term = objects, term

    def put(self, folder: str, entry: SpoolEntry) -> None:
        """Upload a client's update into the client's folder, which accepts the update."""
        facts = f"{entry.num_samples}-{entry.crc32c:08x}"
        name = f"{_FOLDER}/{folder}/{unique_name(self._term)}-{facts}.safetensors"
        num_bytes = entry.data_start + entry.data_bytes
        with entry.path.open("rb") as file:
            self._objects.put(name, own_pieces(file.fileno(), num_bytes), num_bytes)

    def find(self, round_folder: str) -> dict[int, list[SharedUpdate]]:
        """Return a round's updates, keyed by client; the newest leadership term's comes last."""
        clients: dict[int, list[SharedUpdate]] = {}
        for entry in self._objects.list(f"{_FOLDER}/{round_folder}"):
            *_, client, name = entry.name.split("/")
            facts = _NAME.fullmatch(name)
            if facts and client.isdigit():
                digest = update_digest(int(facts[2], 16))
                update = SharedUpdate(int(client), entry, int(facts[1]), digest)
                clients.setdefault(int(client), []).append(update)
        return clients

    def read(self, update: SharedUpdate) -> tuple[Manifest, Iterator[bytes | memoryview]]:
        """Return the manifest of an update, and its data, unverified.

        Raises NotFoundError, and IntegrityError if the object does not begin with a header.
        """
        pieces = self._objects.read(update.stored)
        head = b""
        for piece in pieces:
            head += bytes(piece)
            if not len(head) < header_size(head) <= MAX_HEADER_BYTES:
                break
        file = io.BytesIO(head)
        try:
            manifest, data_start = parse_header(file, Path(update.stored.name).name)
        except (ValueError, LimitError) as error:
            raise IntegrityError(f"{update.stored.name} is damaged: {error}") from error

        def data() -> Iterator[bytes | memoryview]:
            yield head[data_start:]
            yield from pieces

        return replace(manifest, purpose=Purpose.UPDATE), data()

    def delete(self, folder: str, is_meant: Callable[[str], bool] = lambda _name: True) -> None:
        """Delete the objects of this and earlier coordinators below a folder whose names pass
        is_meant. is_meant: takes the name as <run>/<party>/..."""
        listed = self._objects.list(f"{_FOLDER}/{folder}")
        meant = [stored for stored in listed if is_meant(stored.name.partition("/")[2])]
        self._delete(meant, mark(self._term))

    def clean(self, kept: Collection[str]) -> None:
        """Delete objects of earlier coordinators, except those of the kept run folders."""
        listed = self._objects.list(_FOLDER)
        others = [stored for stored in listed if stored.name.split("/")[1] not in kept]
        self._delete(others, beginning(self._term))

    def _delete(self, listed: list[StoredObject], before: str) -> None:
        self._objects.delete(stored.name for stored in deletable(listed, before))


# ---- Spool ----

_DATA: Final = ".safetensors"
_ENTRY: Final = ".json"
Publish = Callable[[SpoolEntry], None]
_log = structlog.get_logger(__name__)


class Spool:
    """The spool: updates in one folder, which is made if absent. Thread-safe."""

    def __init__(
        self,
        root: Path,
        *,
        quota_bytes: int,
        shared: SharedSpool | None = None,
        make_room: MakeRoom = no_room,
    ) -> None:
        """Open the folder; shared: storage that outlives this disk; make_room: frees disk space."""
        self._root = root
        self._make_room = make_room
        self._shared = shared
        self._of_others: dict[str, dict[int, list[SharedUpdate]]] = {}  # by round, when first seen
        self._quota_bytes = quota_bytes
        self._lock = threading.Lock()
        self._used: dict[Path, int] = {}
        root.parent.mkdir(parents=True, exist_ok=True)
        make_folder(root)
        self._of_client: dict[Path, set[Path]] = {}  # folder/client -> its data files
        for path in root.glob(f"*/*/*/*{_DATA}"):
            self._note(path, path.stat().st_size)
        self._left_folders = [folder.name for folder in root.iterdir()]
        """The folders of runs that earlier coordinators have left."""

    def open(
        self,
        key: SpoolKey,
        manifest: Manifest,
        *,
        source: str = "",
        before: Before | None = None,
    ) -> SpoolWriter:
        """Return a writer for the update that `manifest` describes; continue at `writer.offset`.

        An earlier upload of the same key continues if its manifest is equal and its `source` the
        same (a worker process: others may compute other bits); else it restarts at 0. A writer that
        is still open on the key is replaced: its commit will fail as stale. before: see
        UpdateUpload. Raises NoSpaceError if the quota does not allow the update.
        """
        return self._open(key, manifest, source, self._publish(key), before)

    def _open(
        self,
        key: SpoolKey,
        manifest: Manifest,
        source: str,
        publish: Publish | None,
        before: Before | None = None,
    ) -> SpoolWriter:
        folder = self._folder_of(key, make=True)
        upload = UpdateUpload(
            path=folder / f"{key.client}.{secrets.token_hex(8)}{_DATA}",
            entry_path=folder / f"{key.client}{_ENTRY}",
            manifest=manifest,
            header=header_bytes(manifest),
            source=source,
            make_room=self._make_room,
            before=before,
        )
        for path in self._unfinished(folder, key.client):
            try:
                return self._writer(replace(upload, path=path), publish)
            except BlockingIOError:
                self._remove(path)
        return self._writer(upload, publish)

    def look(self, key: SpoolKey, source: str = "") -> tuple[SpoolEntry | None, int]:
        """Return a client's accepted update or None, and the offset at which to resume pulling an
        update from `source`, a worker process."""
        self._folder_of(key, make=True)
        try:
            entry = self.entry(key)
        except (IntegrityError, NotFoundError) as error:  # the client still has it
            _log.warning("an update in the object store is of no use", reason=str(error))
            entry = None
        return entry, self.likely_offset(key, source)

    def likely_offset(self, key: SpoolKey, source: str = "") -> int:
        """Return the offset from which to request an update before its manifest is known.

        Only the open writer knows the offset for certain. `write_at` refuses a request from too far
        on; it is not repeated, since an upload that restarts forgets the noted offset.
        """
        folder = self._folder_of(key)
        unfinished = self._unfinished(folder, key.client)
        return max((noted_offset(path, source) for path in unfinished), default=0)

    def entry(self, key: SpoolKey, digest: Digest | None = None) -> SpoolEntry | None:
        """Return the accepted update of a client, even after a restart; None if there is none.

        With a digest, return that update: the client may have sent others to other coordinators.
        Raises IntegrityError if the object store has damaged it.
        """
        folder = self._folder_of(key)
        entry = SpoolEntry.read(folder / f"{key.client}{_ENTRY}")
        if self._shared is None or (entry is not None and digest in (None, entry.digest)):
            return entry
        updates = self._updates(key, is_fresh=digest is not None).get(key.client, [])
        wanted = [update for update in updates if digest in (None, update.digest)]
        return self._fetch(key, wanted[-1]) if wanted else None

    def entries(self, run: SpoolRun, party: Party, round_num: int) -> Mapping[int, SpoolEntry]:
        """Return all accepted updates of a round, sorted by client."""
        folder = self._root / run.folder_of(party, round_num)
        clients = {int(path.stem) for path in folder.glob(f"*{_ENTRY}")}
        if self._shared is not None:
            clients |= self._shared.find(self._relative(folder)).keys()
        pairs = (
            (client, self.entry(SpoolKey(run, party, round_num, client)))
            for client in sorted(clients)
        )
        return {client: entry for client, entry in pairs if entry is not None}

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the quota in use by present and announced updates."""
        with self._lock:
            return sum(self._used.values())

    def delete_round(self, run: SpoolRun, party: Party, round_num: int) -> None:
        """Delete all updates of a round, accepted or unfinished."""
        folder = run.folder_of(party, round_num).as_posix()
        self._delete_here(self._root / folder)
        self._delete_shared(folder, lambda _name: True)

    def delete_updates(self, keys: Iterable[SpoolKey]) -> None:
        """Delete some accepted updates: first the entries that accept them, then the data."""
        for key in keys:
            folder = self._folder_of(key)
            path = folder / f"{key.client}{_ENTRY}"
            entry = SpoolEntry.read(path)
            if entry is not None:
                path.unlink(missing_ok=True)
                self._remove(entry.path)
            if self._shared is not None:
                self._shared.delete(f"{self._relative(folder)}/{key.client}")

    def distrust(self, entries: Iterable[SpoolEntry]) -> None:
        """Delete damaged local files that can be fetched again from the object store."""
        if self._shared is None:
            return
        for entry in entries:
            _client_of(entry.path).with_suffix(_ENTRY).unlink(missing_ok=True)
            self._remove(entry.path)

    def delete_run(self, run: SpoolRun) -> None:
        """Delete all updates of one submission of a run, in all parties and rounds."""
        self._delete_here(self._root / run.folder)
        self._delete_shared(run.folder, lambda _name: True)

    def delete_returned(self, run: SpoolRun) -> None:
        """Delete updates from before the run last returned to an earlier commit, and those of its
        verifier from before it last began a segment again; others stay."""
        self._delete_returned_here(run)
        self._delete_shared(run.folder, lambda name: run.is_over(name.split("/")[1]))

    def clean(self, kept: Iterable[SpoolRun]) -> None:
        """Delete leftovers of crashes for all runs except the kept ones.

        `kept` was read from the journal after this spool was opened, so a run that is not in it is
        over. Folders that a later coordinator has begun since then are not known, and stay.
        """
        kept = list(kept)
        folders = {run.folder for run in kept}
        for name in self._left_folders:
            if name not in folders:
                self._delete_here(self._root / name)
        for run in kept:
            self._delete_returned_here(run)
        if self._shared is not None:
            self._shared.clean(folders)

    def _publish(self, key: SpoolKey) -> Publish | None:
        shared = self._shared
        if shared is None:
            return None
        return lambda entry: shared.put(f"{key.folder}/{key.client}", entry)

    def _updates(self, key: SpoolKey, *, is_fresh: bool) -> dict[int, list[SharedUpdate]]:
        """Return the object store's updates of a round: fresh, or as cached when first listed.

        Updates that this coordinator has accepted are in its own files, so one listing per round is
        enough, except for updates that the journal names.
        """
        assert self._shared is not None
        folder = key.folder.as_posix()
        if is_fresh or folder not in self._of_others:
            self._of_others[folder] = self._shared.find(folder)
        return self._of_others[folder]

    def _fetch(self, key: SpoolKey, update: SharedUpdate) -> SpoolEntry:
        assert self._shared is not None
        self._folder_of(key, make=True)
        manifest, pieces = self._shared.read(update)
        with closing(self._open(key, manifest, update.stored.name, None)) as writer:
            offset = 0
            try:
                for piece in pieces:
                    writer.write_at(offset, piece)
                    offset += len(piece)
                is_whole = writer.digest == update.digest
            except UpdateRejectedError:
                is_whole = False
            if is_whole:
                return writer.commit(manifest, update.num_samples)
            writer.discard()
        raise IntegrityError(f"the accepted update {update.stored.name} is damaged")

    def _relative(self, folder: Path) -> str:
        return folder.relative_to(self._root).as_posix()

    def _writer(self, upload: UpdateUpload, publish: Publish | None) -> SpoolWriter:
        self._reserve(upload.path, upload.num_bytes)
        return SpoolWriter(upload, self._remove, publish)

    def _unfinished(self, folder: Path, client: int) -> Iterator[Path]:
        """Yield the data files of a client that are not the accepted update."""
        entry = SpoolEntry.read(folder / f"{client}{_ENTRY}")
        accepted = entry.path if entry is not None else None
        for path in sorted(self._of_client.get(folder / str(client), ())):
            if path != accepted:
                yield path

    def _folder_of(self, key: SpoolKey, *, make: bool = False) -> Path:
        path = self._root
        for name in key.folder.parts:
            path = path / name
            if make:
                make_folder(path)
        return path

    def _reserve(self, path: Path, num_bytes: int) -> None:
        with self._lock:
            used = sum(self._used.values()) - self._used.get(path, 0)
            if used + num_bytes > self._quota_bytes:
                raise NoSpaceError(
                    f"spool: an update of {num_bytes} bytes does not fit, "
                    f"{used} of {self._quota_bytes} bytes are in use"
                )
            self._note(path, num_bytes)

    def _note(self, path: Path, num_bytes: int) -> None:
        self._used[path] = num_bytes
        self._of_client.setdefault(_client_of(path), set()).add(path)

    def _remove(self, path: Path) -> None:
        remove_files(path)
        with self._lock:
            self._used.pop(path, None)
            self._of_client.get(_client_of(path), set()).discard(path)

    def _delete_shared(self, folder: str, is_meant: Callable[[str], bool]) -> None:
        """Delete objects below a folder of the object store whose names pass is_meant."""
        if self._shared is not None:
            self._shared.delete(folder, is_meant)
            below = [other for other in self._of_others if Path(other).is_relative_to(folder)]
            for seen in filter(is_meant, below):
                self._of_others.pop(seen, None)

    def _delete_returned_here(self, run: SpoolRun) -> None:
        for folder in (self._root / run.folder).glob("root*"):
            if run.is_over(folder.name):
                self._delete_here(folder)

    def _delete_here(self, folder: Path) -> None:
        failpoint("coordinator.spool.before_delete")
        shutil.rmtree(folder, ignore_errors=True)
        with self._lock:
            self._used = {p: n for p, n in self._used.items() if folder not in p.parents}
            self._of_client = {
                client: paths
                for client, paths in self._of_client.items()
                if folder not in client.parents
            }


def _client_of(path: Path) -> Path:
    """Return the path folder/client that a data file belongs to."""
    return path.parent / path.name.partition(".")[0]

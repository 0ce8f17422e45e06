"""Receive one update into the spool: a data file, and a note of how much of it is durable.

To resume, the bytes that the note claims are read again and must have the noted checksum, so a
resumed upload is as sure as a new one. An upload ends with one rename, of the entry that names its
data file.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

import google_crc32c
import numpy as np

from stratagem.common.base.errors import IntegrityError, StaleError, StratagemError
from stratagem.common.base.files import whole_file
from stratagem.common.base.ids import Digest
from stratagem.common.compression import ByteArray
from stratagem.common.compression.table import PAYLOAD
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.manifest import Manifest, TensorSpec, dtype_named
from stratagem.common.tensors.stream import crc32c
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.store.files import (
    DurableFile,
    MakeRoom,
    no_room,
    pieces,
    space_needed,
    sync_folder,
)
from stratagem.coordinator.updates.floats import Raw, is_finite, storage

# ---- Checks ----
#
# An update may be accepted if it has the layout of the run and finite values.
#
# The data are checked while they stream by, without a second pass. A client that fails is
# rejected alone, with the reason.


class UpdateRejectedError(StratagemError):
    """This update cannot enter the round; `reason` is the sentence to show."""

    def __init__(self, cause: Cause, reason: str) -> None:
        self.cause, self.reason = cause, reason
        super().__init__(reason)


def check_layout(announced: Manifest, expected: Manifest) -> None:
    """Check names, shapes, types and order of tensors; the error names the first difference.

    May be called before the first byte is pulled: the layout is in the manifest.
    """
    ours, theirs = expected.stored(), announced.stored()
    for index, (want, have) in enumerate(zip(ours, theirs, strict=False)):
        if have.name != want.name:
            raise UpdateRejectedError(
                Cause.LAYOUT, f"tensor {index} is {have.name!r}, expected {want.name!r}"
            )
        for what, value, allowed in (
            ("shape", have.shape, want.shape),
            ("dtype", have.dtype, want.dtype),
        ):
            if value != allowed:
                raise UpdateRejectedError(
                    Cause.LAYOUT, f"{want.name!r} has {what} {value}, expected {allowed}"
                )
    if len(theirs) != len(ours):
        longer, problem = (ours, "is missing") if len(ours) > len(theirs) else (theirs, "is extra")
        name = longer[min(len(ours), len(theirs))].name
        raise UpdateRejectedError(
            Cause.LAYOUT, f"{len(theirs)} tensors, expected {len(ours)}: {name!r} {problem}"
        )
    if _aliases(announced) != _aliases(expected):
        raise UpdateRejectedError(
            Cause.LAYOUT, "other tensors share their storage than in the run's model"
        )


def _aliases(manifest: Manifest) -> dict[str, str]:
    return {
        tensor.name: tensor.alias_of for tensor in manifest.tensors if tensor.alias_of is not None
    }


Before = Callable[[TensorSpec, int, int], Raw | None]
"""Returns bytes of a tensor in the state that an update began from, given (tensor, offset, number
of bytes); None if there is no such tensor."""


def check_finite(spec: TensorSpec, values: Raw, before: Raw | None = None) -> None:
    """Raise UpdateRejectedError if a floating tensor has values that are not finite, unless they
    equal those `before` training, to the bit: a mask of infinities is no fault of the client's."""
    if is_finite(spec.dtype, values):
        return
    if before is not None:
        bits = np.dtype(f"u{values.itemsize}")
        values = values[values.view(bits) != before.view(bits)]
    if before is None or not is_finite(spec.dtype, values):
        raise UpdateRejectedError(Cause.NOT_FINITE, f"values of {spec.name!r} are not finite")


class DataCheck:
    """A streaming check of an update's data, which arrive once, in order, in pieces of any size.

    before: called for values that are not finite.
    """

    def __init__(self, manifest: Manifest, before: Before | None = None) -> None:
        self._before = before
        self.crc32c = 0
        self.num_bytes = 0
        self._specs = [spec for spec in manifest.stored() if spec.size_bytes]
        self._index = 0
        self._split_element = b""  # the first bytes of an element that two pieces share

    def see(self, data: memoryview) -> None:
        """Check the next piece. Raises UpdateRejectedError if a value is not finite."""
        self.crc32c = google_crc32c.extend(self.crc32c, np.frombuffer(data, np.uint8))
        while data:
            spec = self._specs[self._index]
            part = data[: spec.offset + spec.size_bytes - self.num_bytes]
            if dtype_named(spec.dtype).is_floating:
                self._check(spec, part, self.num_bytes - spec.offset)
            data = data[len(part) :]
            self.num_bytes += len(part)
            self._index += self.num_bytes == spec.offset + spec.size_bytes

    def _check(self, spec: TensorSpec, part: memoryview, offset: int) -> None:
        """Check values of one tensor. offset: the offset of these bytes in the tensor."""
        item_bytes = dtype_named(spec.dtype).item_bytes
        if self._split_element:
            begin = offset - len(self._split_element)
            num_missing = item_bytes - len(self._split_element)
            joined = self._split_element + bytes(part[:num_missing])
            part, offset = part[num_missing:], offset + num_missing
            self._split_element = b""
            self._check(spec, memoryview(joined), begin)
        num_whole = len(part) - len(part) % item_bytes
        self._check_whole(spec, np.frombuffer(part[:num_whole], storage(spec.dtype)), offset)
        if part[num_whole:]:
            self._split_element = bytes(part[num_whole:])

    def _check_whole(self, spec: TensorSpec, values: Raw, offset: int) -> None:
        if self._before is None or is_finite(spec.dtype, values):
            check_finite(spec, values)
            return
        check_finite(spec, values, self._before(spec, offset, values.nbytes))


# ---- Upload ----

CHECKPOINT_BYTES: Final = 32 << 20
"""The bytes between two checkpoints: a power cut costs an upload at most this much."""

_NOTE: Final = ".progress"


@dataclass(frozen=True, slots=True)
class SpoolEntry:
    """An accepted update: a canonical safetensors file, and the facts that the fold needs."""

    path: Path
    digest: Digest
    """ "crc32c:" and the hex checksum of the data. It distinguishes updates of one client and
    detects damage; it need not resist malice, as a client may send any update anyway."""
    num_samples: int
    data_start: int
    data_bytes: int
    crc32c: int
    """The checksum of the data, by which the fold detects disk damage."""
    header_crc32c: int | None = None
    """The checksum of a coded update's header, which locates the update's tensors; None if the
    update has the layout of the model."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the entry that `write` wrote; None if there is none."""
        try:
            facts = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return cls(**facts | {"path": path.with_name(facts["path"])})

    @property
    def is_coded(self) -> bool:
        """Return True if the update is coded: a payload replaces some tensors of the model."""
        return self.header_crc32c is not None

    def write(self, path: Path) -> None:
        """Write the entry durably, replacing an earlier one in one rename."""
        facts = asdict(self) | {"path": self.path.name}
        present = {key: fact for key, fact in facts.items() if fact is not None}
        with whole_file(path, mode=0o600) as file:
            file.write(json.dumps(present).encode())
            failpoint("coordinator.spool.before_rename")
        sync_folder(path.parent)
        failpoint("coordinator.spool.after_rename")


@dataclass(frozen=True, slots=True)
class UpdateUpload:
    """The description of one upload: its manifest, files and source."""

    path: Path
    """The path of the data file: <client>.<token>.safetensors."""
    entry_path: Path
    manifest: Manifest
    header: bytes
    """The header of the data file, made from the manifest."""
    source: str
    make_room: MakeRoom = no_room
    before: Before | None = None
    """Returns bytes of the state that the update began from; its numbers may be non-finite."""

    @property
    def num_bytes(self) -> int:
        """Return the size of the complete data file."""
        return len(self.header) + self.manifest.total_bytes


class SpoolWriter:
    """Writes one upload. Not thread-safe. It can be reopened after an error."""

    def __init__(
        self,
        upload: UpdateUpload,
        drop: Callable[[Path], None],
        publish: Callable[[SpoolEntry], None] | None = None,
    ) -> None:
        """Continue at the end of the file if it is of the same upload, else at 0.

        `drop` removes a data file. `publish` copies a complete update to storage that outlives this
        disk, before it is accepted. Raises BlockingIOError while another writer has the file
        locked.
        """
        self.upload = upload
        self._drop = drop
        self._publish = publish
        self._identity = hashlib.sha256(upload.header + upload.source.encode()).hexdigest()
        self._file = DurableFile(_open_locked(upload.path), upload.make_room)
        self._check = DataCheck(upload.manifest, upload.before)
        self._noted_bytes = 0
        if not self._resume():
            self._start()

    @property
    def offset(self) -> int:
        """Return the offset of the next data byte; when just opened, earlier bytes are durable."""
        return self._check.num_bytes

    @property
    def is_open(self) -> bool:
        """Return True if the writer was not committed, discarded or closed."""
        return self._file.descriptor >= 0

    @property
    def digest(self) -> Digest:
        """Return the digest of the data written so far."""
        return update_digest(self._check.crc32c)

    def read_back(self) -> ByteArray:
        """Return all data of the update. Raises IntegrityError while bytes are missing."""
        self._check_complete()
        start = len(self.upload.header)
        written = b"".join(map(bytes, pieces(self._file.descriptor, self.offset, start)))
        return np.frombuffer(written, np.uint8)

    def write(self, data: memoryview | bytes) -> None:
        """Append data. Raises UpdateRejectedError, after which the upload is deleted."""
        view = memoryview(data).cast("B")
        total_bytes = self.upload.manifest.total_bytes
        try:
            if self.offset + len(view) > total_bytes:
                raise UpdateRejectedError(
                    Cause.SIZE, f"more than the announced {total_bytes} bytes"
                )
            self._file.write(view)
            self._check.see(view)  # afterwards: all that it has seen is in the file
        except UpdateRejectedError:
            self.discard()
            raise
        if self._file.num_bytes - self._noted_bytes >= CHECKPOINT_BYTES:
            self._note_progress()

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Append the part of a piece that is new; a piece may begin before the current offset.

        Raises IntegrityError if the piece begins after the current offset.
        """
        if offset > self.offset:
            raise IntegrityError(
                f"bytes from {offset} on came, those from {self.offset} are wanted"
            )
        self.write(memoryview(data).cast("B")[self.offset - offset :])

    def commit(
        self,
        expected: Manifest,
        num_samples: int,
        check_coded: Callable[[Manifest, SpoolEntry], None] | None = None,
    ) -> SpoolEntry:
        """Accept the update durably, with its number of samples.

        expected: the layout that the update must have, unless it is coded and there is
        `check_coded`, which then decides. Raises UpdateRejectedError, after which the upload is
        deleted; IntegrityError while bytes are missing; StaleError if a later upload of the same
        client has replaced this one.
        """
        self._check_complete()
        self._refuse_if_replaced()
        manifest = self.upload.manifest
        entry = SpoolEntry(
            path=self.upload.path,
            digest=self.digest,
            num_samples=num_samples,
            data_start=len(self.upload.header),
            data_bytes=manifest.total_bytes,
            crc32c=self._check.crc32c,
            header_crc32c=crc32c(self.upload.header) if self._is_coded else None,
        )
        try:
            if manifest.codec and check_coded is not None:
                check_coded(manifest, entry)
            else:
                check_layout(manifest, expected)
            self._check_announced(entry)
        except UpdateRejectedError:
            self.discard()
            raise
        self._refuse_if_replaced()
        self._file.sync()
        if self._publish is not None:
            self._publish(entry)
            self._refuse_if_replaced()
        before = SpoolEntry.read(self.upload.entry_path)
        with space_needed():
            entry.write(self.upload.entry_path)
        self._note_path.unlink(missing_ok=True)
        if before is not None:
            self._drop(before.path)
        self._file.close()
        return entry

    def close(self) -> None:
        """Pause the upload, and keep its files; do nothing after a commit, a discard or a close."""
        if self.is_open:
            with suppress(StratagemError):  # bytes that cannot be noted are sent again
                self._note_progress()
            self._file.close()

    def discard(self) -> None:
        """Delete all files of the upload, which ends it."""
        if os.fstat(self._file.descriptor).st_nlink:
            self._drop(self.upload.path)
        self._file.close()

    @property
    def _is_coded(self) -> bool:
        return any(tensor.name == PAYLOAD for tensor in self.upload.manifest.tensors)

    @property
    def _note_path(self) -> Path:
        return self.upload.path.with_suffix(_NOTE)

    def _start(self) -> None:
        self._note_path.unlink(missing_ok=True)
        descriptor = self._file.descriptor
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        self._file = DurableFile(descriptor, self.upload.make_room)
        self._check = DataCheck(self.upload.manifest, self.upload.before)
        self._noted_bytes = 0
        self._file.write(self.upload.header)

    def _resume(self) -> bool:
        """Continue from the note; return False if the note is of another upload, or wrong."""
        try:
            note = json.loads(self._note_path.read_text())
            identity, num_bytes, crc32c = note["identity"], note["num_bytes"], note["crc32c"]
        except (FileNotFoundError, ValueError, KeyError):  # none, or cut by a crash
            return False
        header_bytes = len(self.upload.header)
        header = os.pread(self._file.descriptor, header_bytes, 0)
        if identity != self._identity or num_bytes < header_bytes or header != self.upload.header:
            return False

        def see(piece: memoryview) -> None:
            nonlocal header_bytes
            self._check.see(piece[header_bytes:])
            header_bytes = max(0, header_bytes - len(piece))

        try:
            self._file.resume(num_bytes, see)
        except UpdateRejectedError:
            return False  # it was finite when it was noted: the disk is at fault
        self._noted_bytes = num_bytes
        return bool(self._check.crc32c == crc32c)

    def _note_progress(self) -> None:
        """Make the data durable, then note the progress; losing the note does no harm."""
        self._refuse_if_replaced()
        self._file.sync()
        note = {
            "identity": self._identity,
            "num_bytes": len(self.upload.header) + self.offset,
            "crc32c": self._check.crc32c,
            "offset": self.offset,
            "source": self.upload.source,
        }
        with space_needed(), whole_file(self._note_path, durable=False) as file:
            file.write(json.dumps(note).encode())
        self._noted_bytes = self._file.num_bytes
        failpoint("coordinator.spool.after_checkpoint")

    def _check_complete(self) -> None:
        total_bytes = self.upload.manifest.total_bytes
        if self.offset < total_bytes:
            raise IntegrityError(f"{self.offset} of {total_bytes} bytes are here")

    def _check_announced(self, entry: SpoolEntry) -> None:
        """Raise UpdateRejectedError if the sender announced fewer than one sample."""
        if entry.num_samples < 1:
            raise UpdateRejectedError(
                Cause.NUM_SAMPLES, f"num_samples is {entry.num_samples}, must be at least 1"
            )

    def _refuse_if_replaced(self) -> None:
        if os.fstat(self._file.descriptor).st_nlink == 0:
            raise StaleError("a later upload of the same client has taken the place of this one")


def update_digest(crc32c: int) -> Digest:
    """Return the digest of an update with this data checksum."""
    return Digest(f"crc32c:{crc32c:08x}")


def noted_offset(path: Path, source: str) -> int:
    """Return the offset at which this source's upload would probably resume; 0 if none is noted."""
    try:
        note = json.loads(path.with_suffix(_NOTE).read_text())
        return int(note["offset"]) if note["source"] == source else 0
    except (FileNotFoundError, ValueError, KeyError):
        return 0


def remove_files(path: Path) -> None:
    """Remove a data file and its progress note."""
    path.unlink(missing_ok=True)
    path.with_suffix(_NOTE).unlink(missing_ok=True)


def _open_locked(path: Path) -> int:
    """Open and lock a file against a second writer, of this or a fenced coordinator."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor

"""Upload one update into the spool as a data file and a note of how much of it is durable.

To resume, the bytes that the note claims are read again and must have the noted checksum, so a
resumed upload is as sure as a new one. An upload ends in one rename, of the entry that names its
data.
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
    """Check names, shapes, types and order against the run's; the error gives the first difference.

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
"""(tensor, offset in it, number of bytes) -> bytes of the state that an update began from; None for
a tensor that is not there."""


def check_finite(spec: TensorSpec, values: Raw, before: Raw | None = None) -> None:
    """Raise UpdateRejectedError where values of a floating tensor are not finite, unless they have
    the bits that they had `before`: a mask of infinities is no fault of the client's."""
    if is_finite(spec.dtype, values):
        return
    if before is not None:
        bits = np.dtype(f"u{values.itemsize}")
        values = values[values.view(bits) != before.view(bits)]
    if before is None or not is_finite(spec.dtype, values):
        raise UpdateRejectedError(Cause.NOT_FINITE, f"values of {spec.name!r} are not finite")


class DataCheck:
    """The running check of a manifest's data, which come in order, in pieces of any size, once.

    before: called where values are not finite.
    """

    def __init__(self, manifest: Manifest, before: Before | None = None) -> None:
        self._before = before
        self.crc32c = 0
        self.num_bytes = 0
        self._specs = [spec for spec in manifest.stored() if spec.size_bytes]
        self._index = 0
        self._split_element = b""  # the first bytes of an element that two pieces share

    def see(self, data: memoryview) -> None:
        """Take the next piece. Raises UpdateRejectedError where a value is not finite."""
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
        """offset: of the part in the tensor."""
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
"""Bytes between two checkpoints: a power cut costs an upload at most this much."""

_NOTE: Final = ".progress"


@dataclass(frozen=True, slots=True)
class SpoolEntry:
    """An accepted update: a canonical safetensors file, and what the fold needs to know of it."""

    path: Path
    digest: Digest
    """"crc32c:" and the checksum of the data in hex. It tells updates of one client apart and finds
    damage; against malice it need not help, as a client may send what it likes anyway."""
    num_samples: int
    data_start: int
    data_bytes: int
    crc32c: int
    """Checksum of the data, by which the fold detects damage on the disk."""
    header_crc32c: int | None = None
    """Checksum of the header of a coded update, which says where the fold finds what; None for an
    update that has the layout of the model."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the entry that `write` left; None when there is none."""
        try:
            facts = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return cls(**facts | {"path": path.with_name(facts["path"])})

    @property
    def is_coded(self) -> bool:
        """Return True if the file has a payload in place of some tensors of the model."""
        return self.header_crc32c is not None

    def write(self, path: Path) -> None:
        """Replace the file durably, in one rename."""
        facts = asdict(self) | {"path": self.path.name}
        present = {key: fact for key, fact in facts.items() if fact is not None}
        with whole_file(path, mode=0o600) as file:
            file.write(json.dumps(present).encode())
            failpoint("coordinator.spool.before_rename")
        sync_folder(path.parent)
        failpoint("coordinator.spool.after_rename")


@dataclass(frozen=True, slots=True)
class UpdateUpload:
    """The description of one upload: its content, its files, its source."""

    path: Path
    """The data file: <client>.<token>.safetensors."""
    entry_path: Path
    manifest: Manifest
    header: bytes
    """Header of the file, made from the manifest."""
    source: str
    make_room: MakeRoom = no_room
    before: Before | None = None
    """Bytes of the state that the update began from, which may have values that are not finite."""

    @property
    def num_bytes(self) -> int:
        """Return the size of the complete file."""
        return len(self.header) + self.manifest.total_bytes


class SpoolWriter:
    """The writer of one upload, for one thread at a time. It can be reopened after an error."""

    def __init__(
        self,
        upload: UpdateUpload,
        drop: Callable[[Path], None],
        publish: Callable[[SpoolEntry], None] | None = None,
    ) -> None:
        """Continue where the file ends if it is of the same upload, else at 0.

        `drop` removes a data file; `publish` takes a complete update to where it lasts longer than
        on this disk, before it is accepted. Raises BlockingIOError while another writer holds the
        file.
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
        """Return the next byte of the data to write; when just opened, earlier ones are durable."""
        return self._check.num_bytes

    @property
    def is_open(self) -> bool:
        """Return True if it was neither committed, discarded nor closed."""
        return self._file.descriptor >= 0

    @property
    def digest(self) -> Digest:
        """Return the digest of the data so far."""
        return update_digest(self._check.crc32c)

    def read_back(self) -> ByteArray:
        """Return all data. Raises IntegrityError while bytes are missing."""
        self._check_complete()
        start = len(self.upload.header)
        written = b"".join(map(bytes, pieces(self._file.descriptor, self.offset, start)))
        return np.frombuffer(written, np.uint8)

    def write(self, data: memoryview | bytes) -> None:
        """Append data. Raises UpdateRejectedError, after which nothing of the upload is left."""
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
        """Append the new bytes of a piece that begins at `offset`: a sender may start too early.

        Raises IntegrityError when it starts too late.
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
        """Accept the update, durably, as one of num_samples.

        expected: the layout that it must have, unless it was announced as coded and there is
        `check_coded`, which then decides.
        Raises UpdateRejectedError, after which nothing of it is left; IntegrityError while bytes
        are missing; StaleError when a later upload of the same client has taken its place.
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
        """Stop for now, and keep the files; no error after a commit, a discard or a close."""
        if self.is_open:
            with suppress(StratagemError):  # bytes that cannot be noted are sent again
                self._note_progress()
            self._file.close()

    def discard(self) -> None:
        """Delete everything of the upload."""
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
        """Continue from the note; False when it is not of this upload, or not true."""
        try:
            note = json.loads(self._note_path.read_text())
            identity, num_bytes, crc32c = note["identity"], note["num_bytes"], note["crc32c"]
        except (FileNotFoundError, ValueError, KeyError):  # none, or cut by a crash
            return False
        left = len(self.upload.header)
        header = os.pread(self._file.descriptor, left, 0)
        if identity != self._identity or num_bytes < left or header != self.upload.header:
            return False

        def see(piece: memoryview) -> None:
            nonlocal left
            self._check.see(piece[left:])
            left = max(0, left - len(piece))

        try:
            self._file.resume(num_bytes, see)
        except UpdateRejectedError:
            return False  # it was finite when it was noted: the disk is at fault
        self._noted_bytes = num_bytes
        return bool(self._check.crc32c == crc32c)

    def _note_progress(self) -> None:
        """Make what is here durable, and note it. The note itself may get lost: it only helps."""
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
        """Check the sender's facts other than the layout: the number of samples."""
        if entry.num_samples < 1:
            raise UpdateRejectedError(
                Cause.NUM_SAMPLES, f"num_samples is {entry.num_samples}, must be at least 1"
            )

    def _refuse_if_replaced(self) -> None:
        if os.fstat(self._file.descriptor).st_nlink == 0:
            raise StaleError("a later upload of the same client has taken the place of this one")


def update_digest(crc32c: int) -> Digest:
    """Return the digest of an update whose data have that checksum."""
    return Digest(f"crc32c:{crc32c:08x}")


def noted_offset(path: Path, source: str) -> int:
    """Return where an upload of a source would probably continue; 0 when nothing is noted."""
    try:
        note = json.loads(path.with_suffix(_NOTE).read_text())
        return int(note["offset"]) if note["source"] == source else 0
    except (FileNotFoundError, ValueError, KeyError):
        return 0


def remove_files(path: Path) -> None:
    """Remove a data file and its note."""
    path.unlink(missing_ok=True)
    path.with_suffix(_NOTE).unlink(missing_ok=True)


def _open_locked(path: Path) -> int:
    """Open and lock a file, against a second writer of this coordinator or a fenced one."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor

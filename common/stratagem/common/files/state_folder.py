"""The folder of states in leaves that the coordinator and its workers both see.

    store-id               what the coordinator has named the folder
    lists/aa/<digest>.leaves
                           the list of a state's leaves; written by the coordinator alone
    leaves/aa/<sha256>-<upload>
                           one leaf, as one upload has written it; several may be equal
    leaves/tmp/            leaves that are not whole yet

Nothing is ever overwritten, and a leaf appears whole and durable or not at all. Owns these names,
writing a leaf, and reading a state with all digests checked. What is deleted, and when, is the
coordinator's business.
"""

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from stratagem.common.base.errors import IntegrityError, NotFoundError, UnavailableError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.manifest import DEFAULT_LIMITS, Limits
from stratagem.common.tensors.state_leaves import LeafList, leaves_of, places_of, read_list

LIST_SUFFIX: Final = ".leaves"
_DIGEST_CHARS: Final = 64
_WRITEBACK_BYTES: Final = 4 * 2**20
"""How much goes to the disk early; measured, it saves a fifth of the time of a leaf."""


class StateFolder:
    """The folder as one process sees it; for any thread."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lists = root / "lists"
        self.leaves = root / "leaves"
        self.temporary = self.leaves / "tmp"

    def store_id(self) -> str:
        """Return the name of the folder; "" where it has none, or cannot be read."""
        try:
            return (self.root / "store-id").read_text().strip()
        except OSError:
            return ""

    def problem(self) -> str:
        """Return why the folder cannot be looked into; "" where it can."""
        try:
            os.scandir(self.root).close()
        except FileNotFoundError:
            return "is not there"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return ""

    def copies(self, digest: Digest) -> list[Path]:
        """Return the files that have a leaf, the newest first."""
        folder = self.leaves / digest[:2]
        return sorted(folder.glob(f"{digest}-*"), reverse=True)

    def write_leaf(
        self,
        digest: Digest,
        upload: str,
        pieces: Iterable[memoryview],
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a leaf durably; on_written: called when its bytes are there, and its name is not.

        Raises UnavailableError where the folder cannot be written.
        """
        temporary = self.temporary / f"{upload}-{secrets.token_hex(8)}"
        path = self.leaves / digest[:2] / f"{digest}-{upload}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                for piece in pieces:
                    _write(descriptor, memoryview(piece).cast("B"))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            on_written()
            temporary.rename(path)
            _sync(path.parent)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            text = f"leaf {digest} cannot be written below {self.root}: {error.strerror}"
            raise UnavailableError(text) from error

    def read_list(self, digest: Digest, limits: Limits = DEFAULT_LIMITS) -> LeafList | None:
        """Return the list of a state's leaves, checked against its digest; None where there is
        none."""
        try:
            content = (self.lists / digest[:2] / f"{digest}{LIST_SUFFIX}").read_bytes()
        except OSError:
            return None
        if hashlib.sha256(content).hexdigest() != digest:
            raise IntegrityError(f"the list {digest} has other bytes than it was written with")
        return read_list(content, digest, limits)

    def read_leaf(self, digest: Digest) -> bytes:
        """Return the bytes of a leaf, checked. Raises NotFoundError, or IntegrityError where no
        copy has its digest."""
        is_there = False
        for path in self.copies(digest):
            try:
                data = path.read_bytes()
            except OSError:  # collected since, or not readable from here
                continue
            is_there = True
            if hashlib.sha256(data).hexdigest() == digest:
                return data
        if is_there:
            raise IntegrityError(f"leaf {digest} is damaged: its bytes have another digest")
        raise NotFoundError(f"leaf {digest} is not below {self.root}")

    def read_state(self, listed: LeafList) -> Iterator[memoryview]:
        """Yield the data of a state in their order; no more than two leaves are in memory."""
        leaves = leaves_of(listed.manifest)
        held: dict[int, memoryview] = {}
        for place in places_of(leaves):
            if place.leaf not in held:
                held[place.leaf] = memoryview(self.read_leaf(listed.digests[place.leaf]))
            end = place.start + place.size
            yield held[place.leaf][place.start : end]
            if end == leaves[place.leaf].size:
                del held[place.leaf]


def digest_and_upload(name: str) -> tuple[Digest, str]:
    """Return what the name of a leaf's file says."""
    return Digest(name[:_DIGEST_CHARS]), name[_DIGEST_CHARS + 1 :]


def folder_mismatch(folder: str, found_id: str, meant_id: str, problem: str = "") -> str:
    """Return why a worker does not see the folder of states that its coordinator means; "" where it
    does, and where neither has one.

    folder: as the worker was told, and found_id: what is there; both "" without. meant_id: that of
    the coordinator, "" where it has none that workers may write to. problem: that of the folder.
    """
    if not folder:
        ours = f"the coordinator's folder of states (store-id {meant_id})"
        return f"no --state-folder: {ours} is not seen from here" if meant_id else ""
    if not meant_id:
        return f"--state-folder {folder}: the coordinator has no folder of states for workers"
    if found_id == meant_id:
        return ""
    found = problem or f"has {f'store-id {found_id}' if found_id else 'no store-id'}"
    return f"--state-folder {folder} {found}, and the coordinator's has {meant_id}"


def _write(descriptor: int, view: memoryview) -> None:
    while view:
        written = os.write(descriptor, view[:_WRITEBACK_BYTES])
        if hasattr(os, "posix_fadvise"):  # by which Linux begins to write the range to the disk
            start = os.lseek(descriptor, 0, os.SEEK_CUR) - written
            os.posix_fadvise(descriptor, start, written, os.POSIX_FADV_DONTNEED)
        view = view[written:]


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

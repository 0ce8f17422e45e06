"""States in leaves: the cut of a state's bytes, and the list of leaves that names it.

A tensor of 1 MiB or more is cut into leaves of 64 MiB from its own start; all smaller ones share
leaves of up to 64 MiB, in order. Parameters that do not train are thus the same leaves from commit
to commit, and thousands of small tensors are few objects. The cut follows from the manifest alone.
The digest of a state is the SHA-256 of the list, which has names, types, shapes and metadata as in
the header of its safetensors file, and the SHA-256 of each leaf; no writer changes it.
"""

import hashlib
import os
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    OutOfRangeError,
    UnavailableError,
)
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.files import header_bytes, parse_header
from stratagem.common.tensors.manifest import (
    DEFAULT_LIMITS,
    Limits,
    Manifest,
    Purpose,
    build_manifest,
)

# ---- Leaves ----

LEAF_BYTES: Final = 64 * 2**20
SMALL_BYTES: Final = 2**20
MAGIC: Final = b"stratagem state in leaves 1\n"
MAX_ASKED: Final = 64
"""The most leaves for whose signed requests one message asks: half a megabyte of URLs."""
_DIGEST_BYTES: Final = 32


class Leaf(NamedTuple):
    """One leaf, a piece of a state of up to 64 MiB: the ranges (offset, size) of the data in it."""

    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.ranges)


class LeafPlace(NamedTuple):
    """The place of a range of a state's data: the leaf that holds it, and its offset there."""

    offset: int
    size: int
    leaf: int
    start: int


def leaves_of(
    manifest: Manifest, leaf_bytes: int = LEAF_BYTES, small_bytes: int = SMALL_BYTES
) -> tuple[Leaf, ...]:
    """Cut a state into leaves (pieces): those of large tensors, then those that small ones fill."""
    assert small_bytes <= leaf_bytes
    large: list[Leaf] = []
    small: list[list[tuple[int, int]]] = []
    room = 0
    for spec in manifest.stored():
        if spec.size_bytes >= small_bytes:
            for start in range(0, spec.size_bytes, leaf_bytes):
                size = min(leaf_bytes, spec.size_bytes - start)
                large.append(Leaf(((spec.offset + start, size),)))
        elif spec.size_bytes:
            if spec.size_bytes > room:
                small.append([])
                room = leaf_bytes
            small[-1].append((spec.offset, spec.size_bytes))
            room -= spec.size_bytes
    return (*large, *(Leaf(tuple(ranges)) for ranges in small))


def places_of(leaves: Sequence[Leaf]) -> list[LeafPlace]:
    """Return the places of a state's data in its leaves, sorted by offset in the state."""
    places = []
    for number, leaf in enumerate(leaves):
        start = 0
        for offset, size in leaf.ranges:
            places.append(LeafPlace(offset, size, number, start))
            start += size
    return sorted(places)


def pieces_of(
    leaf: Leaf, manifest: Manifest, buffers: Sequence[memoryview]
) -> Iterator[memoryview]:
    """Yield the bytes of one leaf (piece of a state) as views of the tensors' buffers."""
    placed = list(zip(manifest.stored(), buffers, strict=True))
    at = 0
    for offset, size in leaf.ranges:
        while not placed[at][0].offset <= offset < placed[at][0].offset + placed[at][0].size_bytes:
            at += 1
        begin = offset - placed[at][0].offset
        yield placed[at][1][begin : begin + size]


class LeafStream:
    """A splitter that assigns a state's data, given in order, to its leaves (stored pieces)."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._places = places_of(leaves)
        self._sizes = [leaf.size for leaf in leaves]
        self._next, self._done = 0, 0
        """The index of the place that is being filled, and the number of bytes it has so far."""

    def deal(self, data: Any) -> Iterator[tuple[int, memoryview, bool]]:
        """Yield (leaf number, its next bytes, whether they complete it) for the next data."""
        view = memoryview(data).cast("B")
        while view:
            if self._next == len(self._places):
                raise InvalidInputError.at("data", f"{len(view)} bytes more than the state has")
            place = self._places[self._next]
            part = view[: place.size - self._done]
            self._done += len(part)
            end = place.start + self._done
            yield place.leaf, part, end == self._sizes[place.leaf]
            view = view[len(part) :]
            if self._done == place.size:
                self._next, self._done = self._next + 1, 0

    @property
    def is_complete(self) -> bool:
        return self._next == len(self._places)


def list_bytes(manifest: Manifest, digests: Sequence[Digest]) -> bytes:
    """Encode the list of a state's leaves as bytes, whose SHA-256 is the digest of the state."""
    return MAGIC + header_bytes(manifest) + b"".join(map(bytes.fromhex, digests))


class LeafList(NamedTuple):
    """A decoded list of a state's leaves. header: the header of the state's safetensors file."""

    manifest: Manifest
    header: bytes
    digests: tuple[Digest, ...]


def read_list(content: bytes, name: str, limits: Limits = DEFAULT_LIMITS) -> LeafList:
    """Decode a list of leaves. Raises InvalidInputError for other bytes. name: for errors."""
    file = BytesIO(content)
    if file.read(len(MAGIC)) != MAGIC:
        raise InvalidInputError.at(name, "is no list of leaves")
    manifest, num_bytes = parse_header(file, name, limits)
    header, rest = content[len(MAGIC) :][:num_bytes], content[len(MAGIC) + num_bytes :]
    num = len(leaves_of(manifest))
    if len(rest) != num * _DIGEST_BYTES:
        text = f"has {len(rest)} bytes of digests; {num} leaves have {num * _DIGEST_BYTES}"
        raise InvalidInputError.at(name, text)
    places = range(0, len(rest), _DIGEST_BYTES)
    digests = tuple(Digest(rest[at : at + _DIGEST_BYTES].hex()) for at in places)
    return LeafList(replace(manifest, is_in_leaves=True), header, digests)


class StateHasher:
    """A hasher of a state's data, given in order: it hashes the state's file or each leaf, as the
    manifest says."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._of_file = None if manifest.is_in_leaves else hashlib.sha256(header_bytes(manifest))
        leaves = leaves_of(manifest) if manifest.is_in_leaves else ()
        self._stream = LeafStream(leaves)
        self._of_leaves = [hashlib.sha256() for _ in leaves]

    def update(self, data: Any) -> None:
        if self._of_file is not None:
            self._of_file.update(data)
            return
        for leaf, piece, _ in self._stream.deal(data):
            self._of_leaves[leaf].update(piece)

    def digest(self) -> Digest:
        """Return the state's digest from the data passed so far."""
        if self._of_file is not None:
            return Digest(self._of_file.hexdigest())
        digests = [Digest(leaf.hexdigest()) for leaf in self._of_leaves]
        return Digest(hashlib.sha256(list_bytes(self._manifest, digests)).hexdigest())


def state_digest(manifest: Manifest, pieces: Iterable[Any]) -> Digest:
    """Return the digest of a state with these `pieces`: the digest of its file or of its list of
    leaves, as the manifest says."""
    hasher = StateHasher(manifest)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


# ---- Byte ranges ----
#
# Ranges of the bytes that a manifest describes are read from the buffers of its tensors, and
# travel as a tensor of bytes.

_NAME: Final = "pieces"


class ByteReader:
    """A reader of byte ranges from several buffers, as if they were one."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        """Take the buffers of the stored tensors, in manifest order."""
        self._buffers = [buffer for buffer in buffers if len(buffer)]
        self._starts = [0, *accumulate(map(len, self._buffers))]

    def views(self, offset: int, size: int) -> Iterator[memoryview]:
        """Yield `size` bytes from `offset` on as views. Raises OutOfRangeError beyond the end."""
        if offset + size > self._starts[-1]:
            text = f"{size} bytes from {offset} on end behind the {self._starts[-1]} that are here"
            raise OutOfRangeError.at("range", text)
        at = bisect_right(self._starts, offset) - 1
        while size:
            begin = offset - self._starts[at]
            view = self._buffers[at][begin : begin + size]
            yield view
            offset, size, at = offset + len(view), size - len(view), at + 1

    def all_views(self, ranges: Iterable[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of several ranges (offset, size), in order, as views."""
        return [view for offset, size in ranges for view in self.views(offset, size)]


def pieces_manifest(num_bytes: int) -> Manifest:
    """Return the manifest of a stream that carries ranges of a state, num_bytes in all."""
    return build_manifest([(_NAME, "uint8", (num_bytes,))], Purpose.STATE)


# ---- Folder of states ----
#
# The coordinator and its workers both see the folder of states in leaves.
#
#     store-id               the name that the coordinator has given the folder
#     lists/aa/<digest>.leaves
#                            the list of a state's leaves; written by the coordinator alone
#     leaves/aa/<sha256>-<upload>
#                            one leaf, as one upload has written it; several may be equal
#     leaves/tmp/            leaves that are not whole yet
#
# Nothing is ever overwritten, and a leaf appears whole and durable or not at all. This section
# writes leaves, and reads states with all digests checked. The coordinator decides what is
# deleted, and when.

LIST_SUFFIX: Final = ".leaves"
_DIGEST_CHARS: Final = 64
_WRITEBACK_BYTES: Final = 4 * 2**20
"""The bytes after which a flush to disk is started early; saves a fifth of a leaf's time."""


class StateFolder:
    """A shared folder with the leaves (pieces) of stored states; thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lists = root / "lists"
        self.leaves = root / "leaves"
        self.temporary = self.leaves / "tmp"

    def store_id(self) -> str:
        """Return the folder's unique name; "" if it has none, or cannot be read."""
        try:
            return (self.root / "store-id").read_text().strip()
        except OSError:
            return ""

    def problem(self) -> str:
        """Return the reason why the folder cannot be read; "" if it can."""
        try:
            os.scandir(self.root).close()
        except FileNotFoundError:
            return "is not there"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return ""

    def leaf_path(self, digest: Digest, upload: str) -> Path:
        """Return the path at which the upload with this id writes a leaf."""
        return self.leaves / digest[:2] / f"{digest}-{upload}"

    def copies(self, digest: Digest) -> list[Path]:
        """Return the paths of all copies of a leaf, newest first."""
        folder = self.leaves / digest[:2]
        return sorted(folder.glob(f"{digest}-*"), reverse=True)

    def write_leaf(
        self,
        digest: Digest,
        upload: str,
        pieces: Iterable[memoryview],
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a leaf durably. on_written: called when its bytes are written but it has no name
        yet. Raises UnavailableError if the folder cannot be written."""
        temporary = self.temporary / f"{upload}-{secrets.token_hex(8)}"
        path = self.leaf_path(digest, upload)
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
        """Return the list of a state's leaves, checked by its digest; None if there is none."""
        try:
            content = (self.lists / digest[:2] / f"{digest}{LIST_SUFFIX}").read_bytes()
        except OSError:
            return None
        if hashlib.sha256(content).hexdigest() != digest:
            raise IntegrityError(f"the list {digest} has other bytes than it was written with")
        return read_list(content, digest, limits)

    def read_leaf(self, digest: Digest) -> bytes:
        """Return a leaf's bytes, checked. Raises NotFoundError, or IntegrityError if no copy has
        its digest."""
        is_there = False
        for path in self.copies(digest):
            try:
                data = path.read_bytes()
            except OSError:  # deleted meanwhile, or not readable from here
                continue
            is_there = True
            if hashlib.sha256(data).hexdigest() == digest:
                return data
        if is_there:
            raise IntegrityError(f"leaf {digest} is damaged: its bytes have another digest")
        raise NotFoundError(f"leaf {digest} is not below {self.root}")

    def read_state(self, listed: LeafList) -> Iterator[memoryview]:
        """Yield the data of a state in order, with at most two leaves in memory."""
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
    """Split the name of a leaf's file into its digest and the id of its upload."""
    return Digest(name[:_DIGEST_CHARS]), name[_DIGEST_CHARS + 1 :]


def folder_mismatch(folder: str, found_id: str, meant_id: str, problem: str = "") -> str:
    """Return an error message if a worker does not see its coordinator's folder of states; "" if it
    does, or neither has one.

    folder and found_id: the path that the worker was given, and the name of the folder at that
    path; both "" without a path. meant_id: the name of the coordinator's folder, "" if it has none
    that workers may write to. problem: the worker's error with the folder.
    """
    if not folder:
        ours = f"the coordinator's folder of states (store-id {meant_id})"
        return f"no --state-folder: {ours} is not seen from here" if meant_id else ""
    if not meant_id:
        return f"--state-folder {folder}: the coordinator has no folder of states for workers"
    if found_id == meant_id:
        return ""
    problem_text = problem or f"has {f'store-id {found_id}' if found_id else 'no store-id'}"
    return f"--state-folder {folder} {problem_text}, and the coordinator's has {meant_id}"


def _write(descriptor: int, view: memoryview) -> None:
    while view:
        written = os.write(descriptor, view[:_WRITEBACK_BYTES])
        if hasattr(os, "posix_fadvise"):  # Linux then begins to write the range to the disk
            start = os.lseek(descriptor, 0, os.SEEK_CUR) - written
            os.posix_fadvise(descriptor, start, written, os.POSIX_FADV_DONTNEED)
        view = view[written:]


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""States in leaves: how the bytes of a state are cut, and the list of leaves that names it.

A tensor of 1 MiB or more is cut into leaves of 64 MiB from its own start; all smaller ones share
leaves of up to 64 MiB, in order. So parameters that do not train are the same leaves from commit to
commit, and thousands of small tensors are few objects. How a state is cut follows from its manifest
alone, and so does its digest from its content: the SHA-256 of the list, which has names, types,
shapes and metadata as the header of its safetensors file, and the SHA-256 of each leaf. Who wrote
which leaf is in neither.

Owns the cut, the list and both digests. Must not know torch, files or stores.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any, Final, NamedTuple

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.manifest import DEFAULT_LIMITS, Limits, Manifest
from stratagem.common.tensors.safetensors_file import header_bytes, parse_header

LEAF_BYTES: Final = 64 * 2**20
SMALL_BYTES: Final = 2**20
MAGIC: Final = b"stratagem state in leaves 1\n"
_DIGEST_BYTES: Final = 32


class Leaf(NamedTuple):
    """The ranges of a state's data, as (offset, size), that stand in one leaf, in order."""

    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.ranges)


class LeafPlace(NamedTuple):
    """A range of a state's data, and where it is: in which leaf, and from where on there."""

    offset: int
    size: int
    leaf: int
    start: int


def leaves_of(
    manifest: Manifest, leaf_bytes: int = LEAF_BYTES, small_bytes: int = SMALL_BYTES
) -> tuple[Leaf, ...]:
    """Return the leaves of a state: first those of its large tensors, then those that small ones
    share."""
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
    """Return where all of a state's data are, in their order."""
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
    """Yield the bytes of a leaf, as views of the buffers of the tensors that are stored."""
    placed = list(zip(manifest.stored(), buffers, strict=True))
    at = 0
    for offset, size in leaf.ranges:
        while not placed[at][0].offset <= offset < placed[at][0].offset + placed[at][0].size_bytes:
            at += 1
        begin = offset - placed[at][0].offset
        yield placed[at][1][begin : begin + size]


class LeafStream:
    """Deals out the data of a state, which come in their order, to its leaves."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._places = places_of(leaves)
        self._sizes = [leaf.size for leaf in leaves]
        self._next, self._done = 0, 0
        """The place that is being filled, and how many of its bytes have come."""

    def deal(self, data: Any) -> Iterator[tuple[int, memoryview, bool]]:
        """Yield (number of the leaf, its next bytes, whether it is complete with them)."""
        view = memoryview(data).cast("B")
        while view:
            if self._next == len(self._places):
                raise InvalidInputError.at("data", f"{len(view)} bytes more than the state has")
            place = self._places[self._next]
            taken = view[: place.size - self._done]
            self._done += len(taken)
            end = place.start + self._done
            yield place.leaf, taken, end == self._sizes[place.leaf]
            view = view[len(taken) :]
            if self._done == place.size:
                self._next, self._done = self._next + 1, 0

    @property
    def is_complete(self) -> bool:
        return self._next == len(self._places)


def list_bytes(manifest: Manifest, digests: Sequence[Digest]) -> bytes:
    """Return the list of a state's leaves, by whose SHA-256 it is named."""
    return MAGIC + header_bytes(manifest) + b"".join(map(bytes.fromhex, digests))


class LeafList(NamedTuple):
    """A state as its list describes it. header: of the safetensors file that it makes."""

    manifest: Manifest
    header: bytes
    digests: tuple[Digest, ...]


def read_list(content: bytes, name: str, limits: Limits = DEFAULT_LIMITS) -> LeafList:
    """Return what a list says. Raises InvalidInputError for what is none; name: for errors."""
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
    """Takes the digest of a state whose data come in order: that of its file, or of its leaves,
    whichever the manifest says that its digest is."""

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
        """Return the digest of what has come."""
        if self._of_file is not None:
            return Digest(self._of_file.hexdigest())
        digests = [Digest(each.hexdigest()) for each in self._of_leaves]
        return Digest(hashlib.sha256(list_bytes(self._manifest, digests)).hexdigest())


def state_digest(manifest: Manifest, pieces: Iterable[Any]) -> Digest:
    """Return the digest of a state whose data are `pieces`; see StateHasher."""
    hasher = StateHasher(manifest)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()

"""Read accepted updates and stored states as windows (ranges of the model's data); every byte that
is used is checked."""

import io
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import google_crc32c
import numpy as np

from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.ids import Digest
from stratagem.common.compression import ByteArray, TensorLayout, make_codec
from stratagem.common.compression.codec import Decode, Read
from stratagem.common.compression.table import PAYLOAD, are_forwarded, sum_messages, update_codec
from stratagem.common.job import JobSpec, exchanged_codec
from stratagem.common.tensors.files import header_of, parse_header
from stratagem.common.tensors.manifest import (
    Manifest,
    Purpose,
    TensorSpec,
    build_manifest,
    dtype_named,
)
from stratagem.common.tensors.stream import CHUNK_BYTES, crc32c
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.store.blobs import BlobStore
from stratagem.coordinator.store.files import BlobFile, open_regular
from stratagem.coordinator.updates.floats import Raw, Wide, storage, widen
from stratagem.coordinator.updates.upload import SpoolEntry, UpdateRejectedError, check_finite

# ---- Sources ----
#
# A source holds no file open, and only its checksum for each block grows with the model, since
# there are many clients.

_BLOCK_BYTES: Final = 1 << 16
_READ_BYTES: Final = 16 * _BLOCK_BYTES


class Source(Protocol):
    """Reads one update in windows of the model's data, from the first to the last.

    Raises IntegrityError if the disk has damaged the update.
    """

    def read(self, offset: int, into: Raw) -> None:
        """Fill the array with the elements that begin at a byte offset in the model's data."""

    def check(self) -> None:
        """Check, once all bytes were read, that they are those of the accepted update."""


class WholeSource:
    """Reads an uncoded update, which has the tensor layout of the model."""

    def __init__(self, entry: SpoolEntry) -> None:
        self._entry = entry
        self._crc32c = 0

    def read(self, offset: int, into: Raw) -> None:
        elements = into.view(np.uint8)
        read_file(self._entry, self._entry.data_start + offset, elements)
        self._crc32c = google_crc32c.extend(self._crc32c, elements)

    def check(self) -> None:
        if self._crc32c != self._entry.crc32c:
            raise damaged(self._entry, "its checksum is another")


def read_integers(
    sources: Sequence[Source],
    chosen: int,
    offset: int,
    out: Raw,
    compared: Collection[int] | None = None,
) -> bool:
    """Fill `out` with the integers or bools of the chosen update, from a byte offset on. Every
    update is read; return True if a compared update (by default all) has other values."""
    sources[chosen].read(offset, out)
    other, differ = np.empty_like(out), False
    for place, source in enumerate(sources):
        if place != chosen:
            source.read(offset, other)
            is_compared = compared is None or place in compared
            differ |= is_compared and not np.array_equal(other, out)
    return differ


class CheckedData:
    """The data of one update, readable in any order.

    The checksum of the whole is verified first; a checksum taken of each block then verifies each
    later read.
    """

    def __init__(self, entry: SpoolEntry) -> None:
        """Read all data once. Raises IntegrityError if they are damaged."""
        self._entry = entry
        self._blocks = array("I")
        crc32c = 0
        for start in range(0, entry.data_bytes, _READ_BYTES):
            piece = self._data(start, start + _READ_BYTES)
            self._blocks.extend(map(google_crc32c.value, _blocks(piece)))
            crc32c = google_crc32c.extend(crc32c, piece)
        if crc32c != entry.crc32c:
            raise damaged(entry, "its checksum is another")

    def read(self, offset: int, num: int, dtype: str) -> Raw:
        """Return num elements from a byte offset on. Raises IntegrityError if they changed."""
        end = offset + num * np.dtype(dtype).itemsize
        first, skipped = divmod(offset, _BLOCK_BYTES)
        last = -(-end // _BLOCK_BYTES)
        data = self._data(first * _BLOCK_BYTES, last * _BLOCK_BYTES)
        if list(map(google_crc32c.value, _blocks(data))) != self._blocks[first:last].tolist():
            raise damaged(self._entry, "it has changed since it was checked")
        return data[skipped:][: end - offset].view(dtype)

    def _data(self, start: int, stop: int) -> ByteArray:
        """Return a range of the data, cut at the end of the data; unchecked."""
        data = np.empty(max(0, min(stop, self._entry.data_bytes) - start), np.uint8)
        read_file(self._entry, self._entry.data_start + start, data)
        return data


def _blocks(data: ByteArray) -> Iterator[ByteArray]:
    return (data[at : at + _BLOCK_BYTES] for at in range(0, data.size, _BLOCK_BYTES))


def read_file(entry: SpoolEntry, start: int, into: ByteArray) -> None:
    """Fill the array with bytes of an update's file, unchecked. Raises IntegrityError if the file
    is too short."""
    view = into.data
    descriptor = open_regular(entry.path)
    try:
        done = 0
        while done < len(view):
            got = os.preadv(descriptor, [view[done:]], start + done)
            if got == 0:
                raise damaged(entry, "it ends too early")
            done += got
    finally:
        os.close(descriptor)


def damaged(entry: SpoolEntry, what: str) -> IntegrityError:
    """Return the error for an accepted update that is damaged; what: the symptom."""
    return IntegrityError(f"the accepted update {entry.path.name} is damaged: {what}")


# ---- Decoding ----
#
# The updates of a job are coded, or whole. An update is spooled as it was received, and decoded
# when it is checked and when it is folded. Only the vsa codec has no windows, as any element may
# need any byte of a payload, which would have to be decoded for every window, or be held for
# every client; its updates are therefore spooled decoded.

_WINDOW_BYTES: Final = 4 << 18


class CodedLayout:
    """The layout of coded updates with the same manifest: each tensor is stored as it is, or in the
    payload. Everything that decoding relies on is checked here first."""

    def __init__(self, job: JobSpec, numerics: int, expected: Manifest, sent: Manifest) -> None:
        """Check the manifest `sent` against the model's. Raises UpdateRejectedError."""
        self.stored = expected.stored()
        self._ends = [spec.offset + spec.size_bytes for spec in self.stored]
        self.given = {tensor.name: tensor for tensor in sent.tensors}
        """The tensors stored as they are, and the payload, keyed by name."""
        self.coded = [spec for spec in self.stored if spec.name not in self.given]
        self._check_given()
        self.payload = self.given[PAYLOAD]
        self.codec, names = update_codec(job, self.coded, numerics)
        self.places = {name: place for place, name in enumerate(names)}
        """The index of each coded tensor in the payload, keyed by name."""
        if self.payload.size_bytes != self.codec.payload_bytes:
            came, wanted = self.payload.size_bytes, self.codec.payload_bytes
            raise UpdateRejectedError(
                Cause.CODEC, f"a payload of {came} bytes came, expected {wanted}"
            )

    def overlapping(self, offset: int, num_bytes: int) -> Iterator[tuple[TensorSpec, int, int]]:
        """Yield the tensors in a range of the model's data, as (tensor, its first byte in the
        range, the byte after its last)."""
        for index in range(bisect_right(self._ends, offset), len(self.stored)):
            spec = self.stored[index]
            if spec.offset >= offset + num_bytes:
                return
            start = max(0, offset - spec.offset)
            stop = min(offset + num_bytes - spec.offset, spec.size_bytes)
            if start < stop:
                yield spec, start, stop

    def decoder(self, name: str, read: Read) -> Decode:
        """Return the decoder of a coded tensor; `read` reads the data of the file."""
        begin = self.payload.offset
        decoder = self.codec.decoder(
            self.places[name], lambda at, num, dtype: read(begin + at, num, dtype)
        )
        assert decoder is not None, "tensors that share a payload are spooled decoded"
        return decoder

    def _check_given(self) -> None:
        """Check that uncoded tensors match the model's, and that coded tensors are float32."""
        wanted = {spec.name: spec for spec in self.stored}
        for name, have in self.given.items():
            want = wanted.get(name)
            if name == PAYLOAD and have.dtype == "uint8":
                continue
            if want is None or (have.dtype, have.shape) != (want.dtype, want.shape):
                raise UpdateRejectedError(
                    Cause.LAYOUT, f"{name!r} is no tensor of the model, or another one"
                )
        wide = [spec.name for spec in self.coded if spec.dtype != "float32"]
        if PAYLOAD not in self.given or wide:
            raise UpdateRejectedError(
                Cause.CODEC, f"no payload, or one that cannot hold {wide or 'anything'}"
            )


class CodedSource:
    """Reads a coded update: adds the decoded change to the state that the update began from."""

    def __init__(
        self, layout: CodedLayout, data: CheckedData, before: Callable[[int, int], ByteArray]
    ) -> None:
        """Begin to read. before: returns bytes of the state that the update began from, given
        (offset, number of bytes)."""
        self._layout, self._data, self._before = layout, data, before
        self._decoded: tuple[str, Decode] | None = None
        """The name of the tensor being read, and its decoder."""

    def read(self, offset: int, into: Raw) -> None:
        elements = into.view(np.uint8)
        for spec, start, stop in self._layout.overlapping(offset, into.nbytes):
            begin = spec.offset + start - offset
            piece = slice(begin, begin + stop - start)
            given = self._layout.given.get(spec.name)
            if given is not None:
                elements[piece] = self._data.read(given.offset + start, stop - start, "u1")
                continue
            if self._decoded is None or self._decoded[0] != spec.name:
                self._decoded = spec.name, self._layout.decoder(spec.name, self._data.read)
            moved = self._decoded[1](start // 4, stop // 4)
            before = self._before(offset, into.nbytes)[piece].view("<f4")
            np.add(before, moved, out=elements[piece].view("<f4"))

    def check(self) -> None:
        """Do nothing: the data were checked as they were read."""


class UpdateDecoding:
    """Decodes the updates of one job, and keeps open the states that the updates began from."""

    def __init__(
        self,
        job: JobSpec,
        numerics: int,
        blobs: BlobStore,
        expected: Manifest,
        bases: Sequence[Digest],
    ) -> None:
        """Begin to decode updates. expected: the manifest of the model. bases: the state that each
        update began from."""
        self.job, self.expected = job, expected
        self._numerics, self._blobs, self._bases = numerics, blobs, bases
        self._files = ExitStack()
        self._states: dict[Digest, StateReader] = {}
        self._newest: dict[Digest, tuple[int, ByteArray]] = {}
        self._layouts: dict[tuple[TensorSpec, ...], CodedLayout] = {}

    @property
    def has_windows(self) -> bool:
        """Return True if the job's codec can decode window by window; the job must have a codec."""
        codec, _ = update_codec(self.job, [], self._numerics)
        return codec.part(range(0)) is not None

    def layout(self, sent: Manifest) -> CodedLayout:
        """Return the layout of coded updates with that manifest, cached, since many clients share
        it. Raises UpdateRejectedError if the manifest is impossible."""
        layout = self._layouts.get(sent.tensors)
        if layout is None:
            layout = CodedLayout(self.job, self._numerics, self.expected, sent)
            self._layouts[sent.tensors] = layout
        return layout

    def source(self, place: int, entry: SpoolEntry) -> Source:
        """Return the reader of an accepted update; place: the index of the update among all
        updates. Raises IntegrityError if the update's file is damaged."""
        if not entry.is_coded:
            return WholeSource(entry)
        try:
            return self._coded(place, entry, self.layout(_manifest(entry)))
        except UpdateRejectedError as error:
            raise damaged(entry, error.reason) from error

    def check_size(self, manifest: Manifest) -> None:
        """Raise UpdateRejectedError if a coded update is larger than the model."""
        room = self.expected.total_bytes
        if manifest.codec and manifest.total_bytes > room:
            raise UpdateRejectedError(
                Cause.SIZE, f"{manifest.total_bytes} bytes for a model of {room}"
            )

    def check(self, manifest: Manifest, entry: SpoolEntry) -> None:
        """Check that the only update, which is coded, can be decoded to finite values. Raises
        UpdateRejectedError."""
        layout = self.layout(manifest)
        source = self._coded(0, entry, layout)
        for spec in layout.coded:
            for start in range(0, spec.size_bytes, _WINDOW_BYTES):
                values = np.empty(min(_WINDOW_BYTES, spec.size_bytes - start) // 4, "<f4")
                try:
                    with np.errstate(all="ignore"):  # looked for below
                        source.read(spec.offset + start, values)
                except ValueError as error:
                    raise UpdateRejectedError(Cause.CODEC, str(error)) from error
                check_finite(spec, values)

    def before(self, place: int, offset: int, num_bytes: int) -> ByteArray:
        """Return bytes of the state that an update began from; the latest are cached, since the
        clients of a round need the same bytes in turn."""
        base = self._bases[place]
        if base not in self._states:
            self._states[base] = open_state(self._files, self._blobs, base)[1]
        newest = self._newest.get(base)
        if newest is None or (newest[0], newest[1].size) != (offset, num_bytes):
            newest = offset, self._states[base].read_raw("uint8", offset, num_bytes)
            self._newest[base] = newest
        return newest[1]

    def known(self, spec: TensorSpec, offset: int, num_bytes: int) -> ByteArray | None:
        """Return bytes of a tensor, from an offset on, in the state that the only update began
        from; None if the state has no such tensor."""
        for ours in self.expected.stored():
            if (ours.name, ours.dtype, ours.size_bytes) == (spec.name, spec.dtype, spec.size_bytes):
                return self.before(0, ours.offset + offset, num_bytes)
        return None

    def close(self) -> None:
        """Close the files of the base states."""
        self._files.close()

    def _coded(self, place: int, entry: SpoolEntry, layout: CodedLayout) -> CodedSource:
        return CodedSource(layout, CheckedData(entry), partial(self.before, place))


def _manifest(entry: SpoolEntry) -> Manifest:
    """Return the manifest of a coded update's file. Raises IntegrityError if damaged."""
    header = np.empty(entry.data_start, np.uint8)
    read_file(entry, 0, header)
    if crc32c(header.data) != entry.header_crc32c:
        raise damaged(entry, "the checksum of its header is another")
    return parse_header(io.BytesIO(header.tobytes()), entry.path.name)[0]


# ---- Stored states ----
#
# A stored state is read window by window. This section also names the tensors that are averaged
# and not trained.

AVERAGED_KEY: Final = "averaged"
"""Metadata key of a state: the JSON list of floating tensors that no optimizer may touch."""


def averaged_names(manifest: Manifest) -> Collection[str]:
    """Return the names of tensors that are always averaged, whatever the server optimizer."""
    return frozenset(json.loads(manifest.metadata.get(AVERAGED_KEY, "[]")))


def is_trained(spec: TensorSpec, averaged: Collection[str]) -> bool:
    """Return True if the tensor is a trained parameter; buffers and frozen parameters are averaged
    instead."""
    return dtype_named(spec.dtype).is_floating and spec.name not in averaged


def open_state(
    files: ExitStack, store: BlobStore, digest: Digest
) -> "tuple[Manifest, StateReader]":
    """Open a stored state; return its manifest and a reader, which `files` closes."""
    file = files.enter_context(store.open(digest))
    manifest, data_start = header_of(file, digest)
    return manifest, StateReader(file, data_start)


class StateReader:
    """Reads windows of a stored state; every byte is checked."""

    def __init__(self, file: BlobFile, data_start: int) -> None:
        self._file = file
        self._data_start = data_start

    def read(self, dtype: str, offset: int, num: int) -> Wide:
        """Return num elements from a byte offset on, as float64."""
        values = np.empty(num)
        widen(dtype, self.read_raw(dtype, offset, num), values)
        return values

    def read_raw(self, dtype: str, offset: int, num: int) -> Raw:
        """Return num elements from a byte offset on, in their stored type."""
        raw = np.empty(num, storage(dtype))
        self._file.read_into(raw.view(np.uint8).data, self._data_start + offset)
        return raw


# ---- Coded gradients ----
#
# ParameterServer replies to the members of a step of coded shards with either the messages of all
# shards, which the members decode and add, or the sum of the decoded messages, whichever is fewer
# bytes.


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to coded gradients: vectors for all members, to send one after the other."""

    manifest: Manifest
    vectors: tuple[memoryview, ...]

    async def windows(self) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of all vectors of the reply, in pieces."""
        for vector in self.vectors:
            for start in range(0, len(vector), CHUNK_BYTES):
                yield bytes(vector[start : start + CHUNK_BYTES])


def codec_of(job: JobSpec) -> str:
    """Return the name of the job's codec as in manifests; "" if the job has none."""
    spec = exchanged_codec(job.compression, job.strategy)
    return "" if spec is None else spec.codec


def reply_to(
    job: JobSpec,
    layout: Sequence[TensorLayout],
    messages: Sequence[bytes],
    step: int,
    numerics: int,
) -> Reply:
    """Return the reply to the coded messages of shards 0, 1, ... in order. Raises IntegrityError if
    a message is not of this codec."""
    spec = exchanged_codec(job.compression, job.strategy)
    assert spec is not None
    codec = make_codec(spec, layout, job.seed, numerics=numerics)
    num_extras, rest = divmod(len(messages[0]) - codec.payload_bytes, 8)
    if num_extras < 1 or rest:
        raise IntegrityError(f"messages of {len(messages[0])} bytes are none of {spec.codec}")
    raw_bytes = sum(tensor.raw_bytes for tensor in layout) + 8 * num_extras
    if are_forwarded(len(messages), len(messages[0]), raw_bytes):
        data = b"".join(messages)
        named = [("messages", "uint8", (len(data),))]
        manifest = build_manifest(named, Purpose.GRADIENTS, codec=spec.codec)
        return Reply(manifest, (memoryview(data),))
    seed = job.seed if spec.seed is None else spec.seed
    try:
        sums, extras = sum_messages(codec, messages, seed, step, numerics)
    except ValueError as error:
        raise IntegrityError(str(error)) from error
    shapes = [("sums", "float32", sums.shape), ("extras", "float64", extras.shape)]
    manifest = build_manifest(shapes, Purpose.GRADIENTS)
    return Reply(manifest, tuple(memoryview(array.tobytes()) for array in (sums, extras)))

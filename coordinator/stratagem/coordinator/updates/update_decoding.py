"""Reads the updates of a job as windows of its model: coded ones, and whole ones.

An update is spooled as it was received, and decoded when it is checked and when it is folded. Only
the vsa codec has no windows, as any element may need any byte of a payload, which would have to be
decoded for every window, or be held for every client; so its updates are spooled decoded. Knows
nothing of rounds.
"""

import io
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

import numpy as np

from stratagem.common.base.ids import Digest
from stratagem.common.compression import ByteArray
from stratagem.common.compression.codec import Decode, Read
from stratagem.common.compression.table import PAYLOAD, update_codec
from stratagem.common.job import JobSpec
from stratagem.common.tensors.files import parse_header
from stratagem.common.tensors.manifest import Manifest, TensorSpec
from stratagem.common.tensors.stream import crc32c
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.store.blobs.blob_store import BlobStore
from stratagem.coordinator.updates.numpy_floats import Raw
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.state_reader import StateReader, open_state
from stratagem.coordinator.updates.update_checks import UpdateRejectedError, check_finite
from stratagem.coordinator.updates.update_sources import (
    CheckedData,
    Source,
    WholeSource,
    damaged,
    read_file,
)

_WINDOW_BYTES: Final = 4 << 18


class CodedLayout:
    """The tensors of all coded updates that have one manifest: each is in the file as it is, or in
    the payload. Owns what must be right before anything is decoded."""

    def __init__(self, job: JobSpec, numerics: int, expected: Manifest, sent: Manifest) -> None:
        """expected: manifest of the model. Raises UpdateRejectedError where `sent` cannot be that
        of a coded update."""
        self.stored = expected.stored()
        self._ends = [spec.offset + spec.size_bytes for spec in self.stored]
        self.given = {tensor.name: tensor for tensor in sent.tensors}
        """The tensors that are in the file as they are, and the payload."""
        self.coded = [spec for spec in self.stored if spec.name not in self.given]
        self._check_given()
        self.payload = self.given[PAYLOAD]
        self.codec, names = update_codec(job, self.coded, numerics)
        self.places = {name: place for place, name in enumerate(names)}
        """Of the coded tensors in the payload, in its order."""
        if self.payload.size_bytes != self.codec.payload_bytes:
            came, wanted = self.payload.size_bytes, self.codec.payload_bytes
            raise UpdateRejectedError(
                Cause.CODEC, f"a payload of {came} bytes came, expected {wanted}"
            )

    def overlapping(self, offset: int, num_bytes: int) -> Iterator[tuple[TensorSpec, int, int]]:
        """Yield what a range of the model's data has of each tensor: (tensor, its first byte in the
        range, the one after its last)."""
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
        """Check that tensors that are not coded are as in the model, and that coded ones are
        float32."""
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
    """Reads a coded update: what its payload gives is added to the state it began from."""

    def __init__(
        self, layout: CodedLayout, data: CheckedData, before: Callable[[int, int], ByteArray]
    ) -> None:
        """before: reads so many bytes of the data of that state, from an offset on."""
        self._layout, self._data, self._before = layout, data, before
        self._decoded: tuple[str, Decode] | None = None
        """The tensor of which windows are being read, and its decoder."""

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
        """Do nothing: the data were compared when they were read."""


class UpdateDecoding:
    """Decodes the updates of one job. Holds the states open that they are relative to."""

    def __init__(
        self,
        job: JobSpec,
        numerics: int,
        blobs: BlobStore,
        expected: Manifest,
        bases: Sequence[Digest],
    ) -> None:
        """expected: manifest of the model; bases: the state that each update began from."""
        self.job, self.expected = job, expected
        self._numerics, self._blobs, self._bases = numerics, blobs, bases
        self._files = ExitStack()
        self._states: dict[Digest, StateReader] = {}
        self._newest: dict[Digest, tuple[int, ByteArray]] = {}
        self._layouts: dict[tuple[TensorSpec, ...], CodedLayout] = {}

    @property
    def has_windows(self) -> bool:
        """Return True if the job's codec, which it must have, decodes window by window."""
        codec, _ = update_codec(self.job, [], self._numerics)
        return codec.part(range(0)) is not None

    def layout(self, sent: Manifest) -> CodedLayout:
        """Return the layout of coded updates of that manifest: one value, as clients are many.
        Raises UpdateRejectedError where it cannot be one."""
        known = self._layouts.get(sent.tensors)
        if known is None:
            known = CodedLayout(self.job, self._numerics, self.expected, sent)
            self._layouts[sent.tensors] = known
        return known

    def source(self, place: int, entry: SpoolEntry) -> Source:
        """Return the source of an accepted update, by its place among all. Raises IntegrityError
        where its file is damaged."""
        if not entry.is_coded:
            return WholeSource(entry)
        try:
            return self._coded(place, entry, self.layout(_manifest(entry)))
        except UpdateRejectedError as error:
            raise damaged(entry, error.reason) from error

    def check_size(self, manifest: Manifest) -> None:
        """Refuse a coded update that is larger than the model, by UpdateRejectedError."""
        room = self.expected.total_bytes
        if manifest.codec and manifest.total_bytes > room:
            raise UpdateRejectedError(
                Cause.SIZE, f"{manifest.total_bytes} bytes for a model of {room}"
            )

    def check(self, manifest: Manifest, entry: SpoolEntry) -> None:
        """Check the only update, which has arrived coded: that it can be decoded, and to finite
        values. Raises UpdateRejectedError."""
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
        """Return bytes of the data of the state that an update began from. The newest are kept: the
        clients of a round need the same ones in turn."""
        base = self._bases[place]
        if base not in self._states:
            self._states[base] = open_state(self._files, self._blobs, base)[1]
        kept = self._newest.get(base)
        if kept is None or (kept[0], kept[1].size) != (offset, num_bytes):
            kept = offset, self._states[base].read_raw("uint8", offset, num_bytes)
            self._newest[base] = kept
        return kept[1]

    def known(self, spec: TensorSpec, offset: int, num_bytes: int) -> ByteArray | None:
        """Return bytes of a tensor of the state that the only update began from, from this place in
        it on; None for another tensor."""
        for own in self.expected.stored():
            if (own.name, own.dtype, own.size_bytes) == (spec.name, spec.dtype, spec.size_bytes):
                return self.before(0, own.offset + offset, num_bytes)
        return None

    def close(self) -> None:
        """Close the files of the states."""
        self._files.close()

    def _coded(self, place: int, entry: SpoolEntry, layout: CodedLayout) -> CodedSource:
        return CodedSource(layout, CheckedData(entry), partial(self.before, place))


def _manifest(entry: SpoolEntry) -> Manifest:
    """Return the manifest of a coded update's file. Raises IntegrityError where it is damaged."""
    header = np.empty(entry.data_start, np.uint8)
    read_file(entry, 0, header)
    if crc32c(header.data) != entry.header_crc32c:
        raise damaged(entry, "the checksum of its header is another")
    return parse_header(io.BytesIO(header.tobytes()), entry.path.name)[0]

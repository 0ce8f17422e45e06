"""Takes in a client's coded update and puts what it says into the spool, as any other update.

What came over the wire is small and is held in memory; the spool has the whole update, decoded, so
the fold treats all alike. A coded update that cannot be right is rejected alone, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np

from stratagem.common.base.ids import Digest
from stratagem.common.compression import FloatArray
from stratagem.common.compression.coded_update import PAYLOAD, update_codec, update_key
from stratagem.common.job import JobSpec
from stratagem.common.numerics.numerics_rules import CURRENT
from stratagem.common.tensors.chunks import Sink, into
from stratagem.common.tensors.manifest import Manifest, Purpose, TensorSpec
from stratagem.common.tensors.safetensors_file import header_of
from stratagem.coordinator.core.rejection_causes import Cause
from stratagem.coordinator.store.blobs import BlobStore
from stratagem.coordinator.updates.spool import Spool, SpoolKey
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.update_checks import UpdateRejectedError, check_layout


@dataclass(slots=True)
class CodedUpload:
    """One update on its way: what was announced, and room for exactly that."""

    job: JobSpec
    key: SpoolKey
    base: Digest
    """The global state that the client has trained from."""
    expected: Manifest
    """Of that state."""
    numerics: int = CURRENT
    manifest: Manifest | None = None
    data: bytearray | None = None

    def accept(self, manifest: Manifest) -> Sink:
        """Raises UpdateRejectedError for an update that is larger than the model."""
        room = self.expected.total_bytes
        if manifest.total_bytes > room:
            raise UpdateRejectedError(
                Cause.SIZE, f"{manifest.total_bytes} bytes for a model of {room}"
            )
        self.manifest, self.data = manifest, bytearray(manifest.total_bytes)
        return into(memoryview(self.data))

    def enter(self, spool: Spool, blobs: BlobStore, source: str, num_samples: int) -> SpoolEntry:
        """Decode, check and accept the update, which is here as a whole. Blocks."""
        assert self.manifest is not None
        assert self.data is not None
        expected, data = self.expected, memoryview(self.data)
        given = {
            each.name: data[each.offset :][: each.size_bytes] for each in self.manifest.tensors
        }
        if self.manifest.codec:
            decoded = self._decode(given)
        else:
            decoded = {}
            check_layout(self.manifest, expected)
        manifest = replace(expected, purpose=Purpose.UPDATE, metadata={}, digest="")
        writer = spool.open(self.key, manifest, source=f"decoded {source}")
        try:
            with blobs.open(self.base) as base:
                _, data_start = header_of(base, self.base)
                for offset, piece in _pieces(expected, decoded, given, base, data_start):
                    writer.write_at(offset, piece)
            return writer.commit(expected, num_samples)
        finally:
            writer.close()

    def _decode(self, given: Mapping[str, memoryview]) -> dict[str, FloatArray]:
        """How far each coded parameter has moved."""
        assert self.manifest is not None
        by_name = {each.name: each for each in self.manifest.tensors}
        coded = [each for each in self.expected.stored() if each.name not in by_name]
        _check_announced(by_name, coded, self.expected)
        codec, names = update_codec(self.job, coded, self.numerics)
        try:
            payload = np.frombuffer(given[PAYLOAD], np.uint8)
            key = update_key(self.job, self.key.round_num, self.key.client)
            with np.errstate(all="ignore"):  # what is not finite is rejected by the spool
                moves = codec.decode(payload, key)
        except ValueError as error:
            raise UpdateRejectedError(Cause.CODEC, str(error)) from error
        return dict(zip(names, moves, strict=True))


def _check_announced(
    found: Mapping[str, TensorSpec], coded: list[TensorSpec], expected: Manifest
) -> None:
    """What is not coded must be as in the model, and what is coded must be float32."""
    wanted = {each.name: each for each in expected.stored()}
    for name, have in found.items():
        want = wanted.get(name)
        if name == PAYLOAD and have.dtype == "uint8":
            continue
        if want is None or (have.dtype, have.shape) != (want.dtype, want.shape):
            raise UpdateRejectedError(
                Cause.LAYOUT, f"{name!r} is no tensor of the model, or another one"
            )
    wide = [each.name for each in coded if each.dtype != "float32"]
    if PAYLOAD not in found or wide:
        raise UpdateRejectedError(
            Cause.CODEC, f"no payload, or one that cannot hold {wide or 'anything'}"
        )


def _pieces(
    expected: Manifest,
    decoded: Mapping[str, FloatArray],
    given: Mapping[str, memoryview],
    base: BinaryIO,
    data_start: int,
) -> Iterator[tuple[int, memoryview | bytes]]:
    """(offset, bytes) of the whole update, tensor by tensor."""
    for spec in expected.stored():
        if spec.name not in decoded:
            yield spec.offset, given[spec.name]
            continue
        base.seek(data_start + spec.offset)
        before = np.frombuffer(base.read(spec.size_bytes), "<f4")
        with np.errstate(all="ignore"):
            yield spec.offset, (before + decoded[spec.name]).tobytes()

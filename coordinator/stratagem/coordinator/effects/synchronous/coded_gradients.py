"""Computes a ParameterServer's reply to the members in a step of coded shards.

Either the messages of all shards, which the members decode and add, or the sum of the decoded
messages, whichever is fewer bytes. Knows neither streams nor members.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from stratagem.common.base.errors import IntegrityError
from stratagem.common.compression import TensorLayout, make_codec
from stratagem.common.compression.table import are_forwarded, sum_messages
from stratagem.common.job import JobSpec, exchanged_codec
from stratagem.common.tensors.manifest import Manifest, Purpose, build_manifest
from stratagem.common.tensors.stream import CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Reply:
    """Vectors that are sent one after the other."""

    manifest: Manifest
    vectors: tuple[memoryview, ...]

    async def windows(self) -> AsyncGenerator[bytes, None]:
        """All bytes, in pieces."""
        for vector in self.vectors:
            for start in range(0, len(vector), CHUNK_BYTES):
                yield bytes(vector[start : start + CHUNK_BYTES])


def codec_of(job: JobSpec) -> str:
    """Return the codec's name in a manifest; "" without one."""
    spec = exchanged_codec(job.compression, job.strategy)
    return "" if spec is None else spec.codec


def reply_to(
    job: JobSpec,
    layout: Sequence[TensorLayout],
    messages: Sequence[bytes],
    step: int,
    numerics: int,
) -> Reply:
    """Return the reply to the messages of the shards 0, 1, ... in order. Raises IntegrityError
    where they are not of this codec."""
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

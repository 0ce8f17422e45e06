"""Memory as the chunks that a tensor stream carries, for tests that send them by hand."""

from collections.abc import Iterator, Sequence

from stratagem.common.tensors.stream import fill_chunk, iter_views
from stratagem.v1 import tensor_pb2


def iter_chunks(buffers: Sequence[memoryview], offset: int = 0) -> Iterator[tensor_pb2.Chunk]:
    """The concatenation of `buffers` from `offset` on, as chunks."""
    for piece in map(b"".join, iter_views(buffers, offset)):
        chunk = tensor_pb2.Chunk()
        fill_chunk(chunk, offset, piece)
        offset += len(piece)
        yield chunk

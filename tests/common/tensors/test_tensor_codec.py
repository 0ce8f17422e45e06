"""Tensors through manifests, chunks and canonical files, and back, bit by bit."""

from __future__ import annotations

import hashlib
import json
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file as load_with_package
from safetensors.torch import save_file as save_with_package

from stratagem.common.base.errors import IntegrityError, InvalidInputError, LimitError
from stratagem.common.tensors.files import (
    blob_digest,
    file_digest,
    from_file,
    header_bytes,
    read_header,
)
from stratagem.common.tensors.manifest import DTYPES, Purpose, from_proto, to_proto
from stratagem.common.tensors.stream import CHUNK_BYTES, ChunkWriter, iter_views
from stratagem.common.tensors.torch_codec import TORCH_DTYPES, allocate, load_file, manifest_of
from stratagem.v1 import tensor_pb2, worker_pb2
from tests.common.tensors.chunk_messages import iter_chunks
from tests.common.tensors.strategies import make_tensor, same_bits, tensors

relaxed = settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def through_the_wire(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    manifest, buffers = manifest_of(named, Purpose.STATE, metadata={"step": "3"})
    received = tensor_pb2.Manifest.FromString(to_proto(manifest).SerializeToString())
    checked = from_proto(received, purpose=Purpose.STATE)
    assert checked == manifest
    sink, finish = allocate(checked)
    writer = ChunkWriter(checked.total_bytes, sink)
    for chunk in iter_chunks(buffers):
        assert len(chunk.data) <= CHUNK_BYTES
        writer.write(tensor_pb2.Chunk.FromString(chunk.SerializeToString()))
    writer.finish()
    return finish()


@relaxed
@given(tensors())
def test_every_tensor_comes_back_with_its_bits(named: dict[str, torch.Tensor]) -> None:
    received = through_the_wire(named)
    assert set(received) == set(named)
    for name, tensor in named.items():
        assert same_bits(received[name], tensor)
        assert received[name].data_ptr() % 64 == 0


def test_each_type_shape_and_layout() -> None:
    assert set(TORCH_DTYPES) == {each.name for each in DTYPES}
    shapes, layouts = [(), (0,), (5,), (3, 4), (2, 0, 3)], ["plain", "strided", "transposed"]
    named = {
        f"{dtype} {shape} {layout}": make_tensor(dtype, shape, 1, layout)
        for dtype, shape, layout in product(TORCH_DTYPES, shapes, layouts)
    }
    received = through_the_wire(named)
    assert [name for name in named if not same_bits(received[name], named[name])] == []


def test_tied_tensors_travel_once_and_stay_tied() -> None:
    weight = torch.randn(30, 20)
    manifest, buffers = manifest_of({"a": weight, "b": weight, "c": weight.t()}, Purpose.STATE)
    assert manifest.total_bytes == 2 * weight.nbytes  # c is another view, so it has its own bytes
    assert sum(len(each) for each in buffers) == manifest.total_bytes
    received = through_the_wire({"a": weight, "b": weight, "c": weight.t()})
    assert received["a"] is received["b"]
    assert same_bits(received["c"], weight.t())


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, dtype=torch.complex64), "'complex64' is not one of float64, float32, "),
        (torch.zeros(3, 3).to_sparse(), "is a tensor of layout sparse_coo; allowed is strided"),
        (torch.zeros(3, device="meta"), "is a tensor on the meta device"),
    ],
)
def test_what_cannot_be_sent_is_named(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^strange: {message}"):
        manifest_of({"strange": tensor}, Purpose.STATE)


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(0, 60), st.integers(1, 30))
def test_pieces_are_the_concatenation(parts: list[bytes], offset: int, size: int) -> None:
    whole = b"".join(parts)
    views = iter_views([memoryview(part) for part in parts], offset, size)
    pieces = [b"".join(piece) for piece in views]
    assert b"".join(pieces) == whole[offset:]
    assert all(len(piece) == size for piece in pieces[:-1])
    assert all(pieces)


@relaxed
@given(tensors())
def test_canonical_file_is_read_by_safetensors(
    tmp_path: Path, named: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "x.safetensors"
    manifest, buffers = manifest_of(named, Purpose.STATE, metadata={"step": "7", "a": "ü"})
    path.write_bytes(b"".join([header_bytes(manifest), *buffers]))
    others = load_with_package(path)
    for spec in manifest.stored():
        assert same_bits(others[spec.name], named[spec.name])
    with safe_open(path, "pt") as file:
        assert file.metadata()["step"] == "7"
    ours, read = load_file(path)
    assert all(same_bits(ours[name], named[name]) for name in named)
    assert read.metadata == {"step": "7", "a": "ü"}
    # The digest belongs to the content: whoever re-writes a file gets the same one.
    assert file_digest(path) == blob_digest(manifest, buffers)
    assert header_bytes(read) == header_bytes(manifest)
    data_start = read_header(path)[1]
    assert data_start % 8 == 0
    source = from_file(path, data_start, manifest.total_bytes)
    assert file_digest(path) == blob_digest(read, source(0))


def test_the_digest_never_changes() -> None:
    named = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor(True)}
    named["tied"] = named["b"]
    manifest, buffers = manifest_of(named, Purpose.STATE, metadata={"z": "1", "format": "1"})
    header = header_bytes(manifest)
    assert header[8:].decode().rstrip() == (
        '{"__metadata__":{"alias:tied":"b","format":"1","z":"1"},'
        '"b":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        '"a":{"dtype":"BOOL","shape":[],"data_offsets":[24,25]}}'
    )
    expected = hashlib.sha256(header + torch.arange(6.0).numpy().tobytes() + b"\1").hexdigest()
    assert blob_digest(manifest, buffers) == expected
    # Purpose, weight and so on are of the stream, not of the content.
    other, _ = manifest_of(named, Purpose.UPDATE, weight=3.0, metadata={"format": "1", "z": "1"})
    assert header_bytes(other) == header


def test_files_in_any_order_are_read_and_cut_ones_refused(tmp_path: Path) -> None:
    named = {f"t{i}": make_tensor(d.name, (i, 2), i, "plain") for i, d in enumerate(DTYPES)}
    save_with_package(named, tmp_path / "x")
    ours, _ = load_file(tmp_path / "x")
    assert all(same_bits(ours[name], named[name]) for name in named)
    (tmp_path / "huge").write_bytes((2**60).to_bytes(8, "little"))
    with pytest.raises(LimitError, match="header"):
        read_header(tmp_path / "huge")
    for cut in (b"", b"\x05\0\0", (50).to_bytes(8, "little") + b"{}"):
        (tmp_path / "cut").write_bytes(cut)
        with pytest.raises(InvalidInputError, match="too short"):
            read_header(tmp_path / "cut")
    (tmp_path / "x").write_bytes(b"12345")
    with pytest.raises(IntegrityError, match="3 bytes too early"):
        list(from_file(tmp_path / "x", 2, 6)(0))
    # A transfer that was interrupted goes on from where it was.
    assert b"".join(from_file(tmp_path / "x", 1, 4)(1)) == b"345"


def entry(**changes: object) -> dict[str, object]:
    return {"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes}


@pytest.mark.parametrize(
    ("header", "data", "error", "match"),
    [
        (b"{", b"", InvalidInputError, "no safetensors file"),
        (b"\xff", b"", InvalidInputError, "no safetensors file"),
        (b"[" * 100_000, b"", InvalidInputError, "no safetensors file"),
        (b"[]", b"", InvalidInputError, "no object"),
        (b'{"x":1,"x":1}', b"", InvalidInputError, "twice"),
        (entry(), b"123", IntegrityError, "its header says"),
        (entry(), b"12345", IntegrityError, "its header says"),
        (entry(dtype="C64"), b"1234", InvalidInputError, "C64"),
        (entry(dtype=7), b"1234", InvalidInputError, "malformed"),
        (entry(shape=[-4]), b"1234", InvalidInputError, "malformed"),
        (entry(shape=[True]), b"1", InvalidInputError, "malformed"),
        (entry(shape=[5]), b"1234", InvalidInputError, "takes 4 bytes"),
        (entry(data_offsets=[1, 5]), b"12345", InvalidInputError, "gap"),
        (entry() | {"y": entry()["x"]}, b"1234", InvalidInputError, "overlaps"),
        (entry() | {"__metadata__": {"a": 1}}, b"1234", InvalidInputError, "text to text"),
        (entry() | {"__metadata__": {"alias:y": "z"}}, b"1234", InvalidInputError, "no tensor"),
        (entry() | {"__metadata__": {"alias:x": "x"}}, b"1234", InvalidInputError, "twice"),
        (entry(shape=[1] * 9, data_offsets=[0, 1]), b"1", LimitError, "dimensions"),
    ],
)
def test_damage_is_found(
    tmp_path: Path, header: object, data: bytes, error: type[Exception], match: str
) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(error, match=match):
        read_header(tmp_path / "x")


def test_stock_messages_are_what_we_send() -> None:
    """Plain generated classes, filled by hand, are understood; ours are understood by them."""
    tensor = torch.arange(5, dtype=torch.int16)
    manifest, buffers = manifest_of({"x": tensor}, Purpose.UPDATE, weight=2.5)
    spec = tensor_pb2.TensorSpec(
        name="x", dtype=tensor_pb2.D_TYPE_INT16, shape=[5], offset=0, size_bytes=10
    )
    stock = tensor_pb2.Manifest(
        tensors=[spec], total_bytes=10, purpose=tensor_pb2.PURPOSE_UPDATE, weight=2.5
    )
    assert to_proto(manifest) == stock
    assert from_proto(stock) == manifest
    (chunk,) = iter_chunks(buffers)
    request = worker_pb2.SetStateRequest(chunk=chunk)
    again = worker_pb2.SetStateRequest.FromString(request.SerializeToString())
    assert again.chunk.data == tensor.numpy().tobytes()
    target = bytearray(10)
    ChunkWriter(10, memoryview(target)).write(again.chunk)
    assert bytes(target) == tensor.numpy().tobytes()

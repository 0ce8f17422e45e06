"""Parts of a divided state become one blob, whose form does not show how it was divided."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from stratagem.common.tensors.files import header_bytes, read_header
from stratagem.common.tensors.manifest import DEFAULT_LIMITS, Limits, Manifest, Purpose
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.coordinator.store.blobs import DirectoryBlobs, file_writer
from stratagem.coordinator.store.files import PIECE_BYTES
from stratagem.coordinator.updates.merge import (
    ContradictionError,
    MergeStoppedError,
    StatePart,
    joined_rows,
    merged_manifest,
    whole_of,
    write_merged,
)

LARGE = torch.arange(PIECE_BYTES // 4 + 7, dtype=torch.float32)
STATE = {
    "a/weight": torch.randn(3, 5),
    "b/count": torch.tensor(7),
    "c/none": torch.zeros(0, 4),
    "d/large": LARGE,
    "e/half": torch.randn(7).to(torch.bfloat16),
}


def part_of(store: DirectoryBlobs, tensors: Mapping[str, Tensor], **metadata: str) -> StatePart:
    manifest, buffers = manifest_of(tensors, Purpose.STATE, metadata=metadata)
    scratch = store.scratch()
    for buffer in buffers:
        scratch.write(buffer)
    return StatePart(manifest, scratch)


def merge(store: DirectoryBlobs, *parts: StatePart, limits: Limits = DEFAULT_LIMITS) -> Path:
    manifest, sources = whole_of([part.manifest for part in parts], limits)
    writer = file_writer(store, manifest)
    try:
        return store.path(write_merged(manifest, parts, writer, sources))
    finally:
        writer.abort()
        for part in parts:
            part.data.close()


def loaded(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, file.metadata() or {}


@pytest.mark.parametrize(
    "division",
    [
        [["a/weight", "b/count", "c/none", "d/large", "e/half"]],
        [["d/large", "a/weight"], ["e/half", "c/none", "b/count"]],
        [["e/half"], ["d/large"], ["c/none"], ["b/count"], ["a/weight"], []],
    ],
    ids=["one part, in order", "two parts, out of order", "a part each and an empty one"],
)
def test_blob_has_one_form_however_the_state_was_divided(
    tmp_path: Path, division: list[list[str]]
) -> None:
    store = DirectoryBlobs(tmp_path / "blobs")
    parts = [part_of(store, {name: STATE[name] for name in names}, step="4") for names in division]
    path = merge(store, *parts)
    tensors, metadata = loaded(path)
    assert metadata == {"step": "4"}
    assert tensors.keys() == STATE.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, STATE[name]), name
    manifest, _ = read_header(path)
    sizes = {name: tensor.element_size() for name, tensor in STATE.items()}
    assert [each.name for each in manifest.tensors] == sorted(STATE, key=lambda n: (-sizes[n], n))
    whole = part_of(store, dict(sorted(STATE.items())), step="4")
    content = b"".join(bytes(piece) for piece in whole.data.read(0, whole.manifest.total_bytes))
    expected = hashlib.sha256(header_bytes(whole.manifest) + content).hexdigest()
    assert path.stem == expected
    whole.data.close()
    assert list((tmp_path / "blobs" / "tmp").iterdir()) == []


def test_tied_tensors_stay_tied_to_the_first_of_their_names(tmp_path: Path) -> None:
    store = DirectoryBlobs(tmp_path / "blobs")
    tied = torch.randn(4)
    path = merge(
        store,
        part_of(store, {"z": tied, "m": torch.ones(2), "b": tied}),
        part_of(store, {"a": tied}),
    )
    manifest, _ = read_header(path)
    assert {each.name: each.alias_of for each in manifest.tensors} == {
        "a": None,
        "b": None,
        "m": None,
        "z": "b",
    }
    tensors, _ = loaded(path)
    assert torch.equal(tensors["b"], tied)
    assert torch.equal(tensors["m"], torch.ones(2))


def manifest(*names: str, **metadata: str) -> Manifest:
    return manifest_of({n: torch.zeros(2) for n in names}, Purpose.STATE, metadata=metadata)[0]


def test_metadata_of_all_parts_is_there_and_what_contradicts_is_refused_by_name() -> None:
    merged = merged_manifest([manifest("a", x="1"), manifest("b", y="2", x="1")], DEFAULT_LIMITS)
    assert merged.metadata == {"x": "1", "y": "2"}
    with pytest.raises(ContradictionError, match="two parts of the state have the tensor 'b'"):
        merged_manifest([manifest("a", "b"), manifest("b")], DEFAULT_LIMITS)
    with pytest.raises(ContradictionError, match="differ in 'step': '3' and '4'"):
        merged_manifest([manifest("a", step="3"), manifest("b", step="4")], DEFAULT_LIMITS)
    with pytest.raises(ContradictionError, match="total_bytes: 16 is over the limit of 15"):
        merged_manifest([manifest("a"), manifest("b")], Limits(max_total_bytes=15))


def test_batches_are_joined_where_only_their_rows_differ() -> None:
    def manifest(**tensors: Tensor) -> Manifest:
        named = {name.replace("_", "/"): tensor for name, tensor in tensors.items()}
        return merged_manifest([manifest_of(named, Purpose.STATE)[0]], DEFAULT_LIMITS)

    joined = joined_rows(
        manifest(out_0=torch.ones(7, 2), out_1=torch.ones(1, 2), n_0=torch.ones(3))
    )
    shapes = {spec.name: spec.shape for spec in joined.tensors}
    assert shapes == {"n": (3,), "out": (8, 2)}
    for other in (torch.ones(1, 3), torch.ones(1, 2, dtype=torch.float64)):
        with pytest.raises(ContradictionError, match="'out' is float"):
            joined_rows(manifest(out_0=torch.ones(7, 2), out_1=other))


def test_stopped_merge_leaves_nothing(tmp_path: Path) -> None:
    store = DirectoryBlobs(tmp_path / "blobs")
    part = part_of(store, STATE)
    target, sources = whole_of([part.manifest], DEFAULT_LIMITS)
    writer = file_writer(store, target)
    with pytest.raises(MergeStoppedError):
        write_merged(target, [part], writer, sources, lambda: True)
    writer.abort()
    part.data.close()
    part.data.close()
    assert [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()] == []

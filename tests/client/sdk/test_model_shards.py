"""A model divided among several files, as other programs read them."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from stratagem.client.sdk.model_files import (
    INDEX_NAME,
    PlainModel,
    ShardFolder,
    shards_of,
    whole_folder,
)
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.tensors.manifest import Purpose, TensorSpec
from stratagem.common.tensors.torch_codec import manifest_of

PIECE = 100
"""Bytes of which a state comes at a time here."""


def specs(sizes: Sequence[int]) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", "U8", (size,), 0, size) for i, size in enumerate(sizes)]


def sizes_of(sizes: Sequence[int], shard_bytes: int | None) -> list[list[int]]:
    return [[each.size_bytes for each in shard] for shard in shards_of(specs(sizes), shard_bytes)]


@pytest.mark.parametrize(
    ("sizes", "shards"),
    [
        ([], []),
        ([0], [[0]]),
        ([9], [[9]]),
        ([3, 2, 1], [[3, 2], [1]]),
        ([1, 9, 1, 0], [[1], [9], [1, 0]]),
        ([9, 0, 5], [[9], [0, 5]]),
        ([5, 0, 0, 1], [[5, 0, 0], [1]]),
    ],
)
def test_tensors_are_divided_in_their_order(sizes: list[int], shards: list[list[int]]) -> None:
    assert sizes_of(sizes, 5) == shards
    assert sizes_of(sizes, None) == ([sizes] if sizes else [])


@settings(max_examples=40)
@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_a_file_is_too_large_only_for_one_tensor(sizes: list[int], limit: int) -> None:
    shards = sizes_of(sizes, limit)
    assert [size for shard in shards for size in shard] == sizes
    assert all(shard and (len(shard) == 1 or sum(shard) <= limit) for shard in shards)
    # No two neighbours would have fitted into one file.
    assert all(sum(a) + b[0] > limit for a, b in pairwise(shards))


def test_more_files_than_their_names_can_number_are_refused() -> None:
    many = specs([1]) * 100_000
    assert len(shards_of(many, 2)) == 50_000
    with pytest.raises(InvalidInputError, match=r"shard_size: 1 bytes make 100000 files"):
        shards_of(many, 1)


def written(state: dict[str, torch.Tensor], files: ShardFolder, shard_bytes: int) -> None:
    manifest, buffers = manifest_of(state, Purpose.STATE)
    data = b"".join(map(bytes, buffers))
    model = PlainModel(manifest, files.write, shard_bytes=shard_bytes, begin=files.begin)
    for offset in range(0, len(data), PIECE):
        model.write(offset, data[offset : offset + PIECE])


def small_state(num_tensors: int) -> dict[str, torch.Tensor]:
    """A model of so many tensors: one larger than a file, an empty one, one of no dimension, tied
    ones that are in two files, and a name that begins as those of states do."""
    torch.manual_seed(num_tensors)
    model = {f"layer.{i}.weight": torch.randn(7, 3) for i in range(num_tensors)}
    if num_tensors > 1:
        model |= {
            "layer.1.weight": torch.randn(40, 9),
            "layer.2.weight": torch.zeros(0, 5),
            "layer.3.weight": torch.tensor(5),
            "model/half": torch.randn(11).bfloat16(),
        }
        model["layer.6.weight"] = model["layer.0.weight"]
    state = {f"model/{name}": tensor for name, tensor in model.items()}
    return state | {"optimizer/layer.0.weight/exp_avg": torch.randn(7, 3)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("num_tensors", "shard_bytes"), [(1, 1), (7, 1), (7, 200), (1, 10**9), (7, 10**9)]
)
def test_what_was_written_is_read_by_torch_and_by_safetensors(
    tmp_path: Path, num_tensors: int, shard_bytes: int
) -> None:
    # Every process would import these when it collects its tests: it takes a second.
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    state = small_state(num_tensors)
    model = {
        name.removeprefix("model/"): tensor
        for name, tensor in state.items()
        if name.startswith("model/")
    }
    folder = tmp_path / "out"
    with whole_folder(folder) as files:
        written(state, files, shard_bytes)
    index = json.loads((folder / INDEX_NAME).read_text())
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names == [
        f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)
    ]
    assert set(index["weight_map"].values()) == set(names)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in model.values())
    assert index["weight_map"].keys() == model.keys()
    for name, tensor in model.items():
        assert load_file(folder / index["weight_map"][name])[name].equal(tensor)
    if shard_bytes == 200 and num_tensors == 7:
        assert index["weight_map"]["layer.0.weight"] != index["weight_map"]["layer.6.weight"]
    target = {name: torch.empty_like(tensor) for name, tensor in model.items()}
    load(target, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(target[name].equal(tensor) for name, tensor in model.items())
    assert list(tmp_path.iterdir()) == [folder]


def test_what_was_written_is_loaded_by_huggingface_hub(tmp_path: Path) -> None:
    import huggingface_hub

    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    with whole_folder(tmp_path / "out") as files:
        written({f"model/{key}": each for key, each in model.state_dict().items()}, files, 60)
    other = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    huggingface_hub.load_torch_model(other, tmp_path / "out", strict=True)
    assert all(each.equal(model.state_dict()[key]) for key, each in other.state_dict().items())


def test_a_state_without_a_model_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidInputError, match="there is no model"),
        whole_folder(tmp_path / "out") as files,
    ):
        written({"test/outputs": torch.ones(3)}, files, 5)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (
        pytest.raises(InvalidInputError, match="out exists already"),
        whole_folder(tmp_path / "out"),
    ):
        raise AssertionError
    with (
        pytest.raises(FileNotFoundError, match="none/out"),
        whole_folder(tmp_path / "none" / "out"),
    ):
        raise AssertionError

"""Data sets whose rows are fetched one by one: which are taken, and what they may draw."""

import random
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset as TorchDataset

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.worker.data.checks import check_purity
from stratagem.worker.data.datasets import Gather, Subset, as_dataset
from stratagem.worker.data.rows import BatchKeys, RowDataset
from stratagem.worker.data.sources import ClientShare, DataSources, by_label, load_data
from tests.cluster.jobs import federated
from tests.jobs import job
from tests.userland.data import NoisyRows
from tests.worker.engine.support import ALLOWED, CPU

GATHER = Gather(torch.float32, CPU)
KEYS = BatchKeys((3, "row", 0), (3, 0, 0, 0))
NOISY = {"entrypoint": "tests.userland.data:noisy_rows"}


def rows_of(value: Any, indices: list[int], keys: BatchKeys = KEYS) -> tuple[Any, Any]:
    return GATHER(as_dataset(value, "train"), torch.tensor(indices), "a test", keys)


def test_a_row_is_the_same_in_whichever_batch_and_another_in_another_epoch() -> None:
    """And the generators stay as they were."""

    def drawn() -> tuple[Any, ...]:
        return random.random(), np.random.rand(), torch.rand(()).item()

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = drawn()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    rows = NoisyRows(20)
    whole, labels = rows_of(rows, list(range(20)))
    assert drawn() == expected
    x, y = rows_of(rows, [7, 3], BatchKeys(KEYS.rows, ("another", "batch")))
    assert torch.equal(x, whole[[7, 3]])
    assert torch.equal(y, labels[[7, 3]])
    assert not torch.equal(rows_of(rows, [7], BatchKeys((3, "row", 1), ()))[0][0], whole[7])
    assert not torch.equal(whole[7] / rows.x[7], whole[3] / rows.x[3])
    # The same row of a client's subset has the number that it has in the whole.
    own = Subset(as_dataset(rows, "train"), torch.tensor([3, 7]))
    assert torch.equal(GATHER(own, torch.tensor([1]), "a test", KEYS)[0][0], whole[7])


def test_memory_maps_lists_and_data_sets_of_torch_are_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(6, 2))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    x, y = rows_of(mapped, [4, 1])
    assert x.tolist() == [[8, 9], [2, 3]]
    assert x is y  # a batch that is no pair is input and target
    assert x.dtype == torch.float32
    assert rows_of(torch.arange(6), [4, 1])[0].tolist() == [4, 1]
    assert rows_of([(1.0, 5), (2.0, 6)], [1])[1].tolist() == [6]
    of_torch = TorchDataset(torch.arange(6), torch.arange(6) * 2)
    assert [each.tolist() for each in rows_of(of_torch, [4, 1])] == [[4, 1], [8, 2]]
    point = namedtuple("point", "left right middle")
    x, _ = rows_of([point(1, 2, 3), point(4, 5, 6)], [0, 1])
    assert x.middle.tolist() == [3, 6]


class Foreign:
    """What others call `take` is not ours: it is of the first rows, and not of those named."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> tuple[int, int]:
        return row, -row

    def take(self, count: int) -> "Foreign":
        raise AssertionError


Foreign.__module__ = "datasets.arrow_dataset"


class Unbounded:
    def __getitem__(self, row: int) -> int:
        return row


def test_data_sets_that_cannot_be_used_are_refused() -> None:
    assert rows_of(Foreign(), [2])[1].tolist() == [-2]
    loader: DataLoader[Any] = DataLoader(TorchDataset(torch.arange(3)))
    said = r"give its dataset: its collate_fn is data\.collate, its batch_size the job's"
    for value, words in (
        (loader, f"DataLoader; {said}"),
        (Unbounded(), r"Unbounded, which has no len\(\)"),
        ({"x": torch.arange(3)}, "is a dict"),
        ((1, 2, 3), "is a tuple"),
    ):
        with pytest.raises(InvalidInputError, match=rf"data\.train: .*{words}"):
            as_dataset(value, "train")
    growing = [(torch.zeros(2), 1)]
    dataset = as_dataset(growing, "train")
    growing.append((torch.zeros(2), 1))
    with pytest.raises(InvalidInputError, match="had 1 rows when it was loaded and has 2 now"):
        GATHER(dataset, torch.tensor([0]), "a test")


def test_what_goes_wrong_in_a_row_names_the_row() -> None:
    class Torn(NoisyRows):
        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            if row == 4:
                raise OSError("truncated image")
            return super().__getitem__(row)

    with pytest.raises(UserCodeError, match=r"truncated image") as caught:
        rows_of(Torn(6), [1, 4])
    assert "row 4 of data.train" in str(caught.value)
    with pytest.raises(InvalidInputError, match="holds a str"):
        rows_of(["a", "b"], [1])


def test_settings_that_do_not_go_with_the_data() -> None:
    collate = "tests.userland.data:noisy_batch"
    tensors = {"entrypoint": "tests.userland.data:classes"}
    with pytest.raises(InvalidInputError, match=r"data\.collate: belongs to data sets with len"):
        load_data(job(data={**tensors, "collate": collate}), ALLOWED, DataSources())
    cached = {"memory": "Cached"}
    with pytest.raises(InvalidInputError, match=r"execution\.memory: Cached reads each row once"):
        load_data(job(data=NOISY, execution=cached), ALLOWED, DataSources())
    with pytest.raises(InvalidInputError, match=r"execution\.memory: .*with data\.collate"):
        job(data={**NOISY, "collate": collate}, execution=cached)
    with pytest.raises(InvalidInputError, match=r"data\.collate: .*entrypoint"):
        job(data={"path": "x.safetensors", "collate": collate})


def test_labels_of_rows_divide_clients() -> None:
    spec = federated(data=NOISY, num_clients=4, partition={"method": "by_label"})
    expected = by_label(NoisyRows(50).y, 4, 2, spec.seed)
    for client in range(4):
        own = load_data(spec, ALLOWED, DataSources(), ClientShare(client, 4))["train"]
        assert isinstance(own, Subset)
        assert torch.equal(own.rows, expected[client])
    unlabelled = as_dataset([1, 2], "train")
    assert isinstance(unlabelled, RowDataset)
    with pytest.raises(InvalidInputError, match="no pairs"):
        unlabelled.labels()


class Impure:
    """What of a row differs when it is fetched again is said by `what`."""

    def __init__(self, what: str) -> None:
        self.what, self.counts = what, torch.zeros(3)
        self.generator = np.random.default_rng()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.counts[row] += 1
        first = self.counts[row].item() == 1
        return {
            "x": (
                torch.tensor(float("nan")),
                self.generator.random(2) if self.what == "generator" else np.ones(2),
            ),
            "seen": self.counts if self.what == "state" else None,
            "name": str(self.counts[0]) if self.what == "text" and row == 0 else "same",
            **({"once": 1} if self.what == "key" and first and row == 2 else {}),
            "opaque": object(),
        }


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("generator", r"row 0 .*: the row\['x'\]\[1\] differs; draw from random"),
        ("state", r"row 0 .*: the row\['seen'\] differs"),
        ("text", r"row 0 .*: the row\['name'\] differs"),
        ("key", r"row 2 .*: the row\['once'\] differs"),
    ],
)
def test_a_row_that_differs_when_it_is_fetched_again_is_refused(what: str, words: str) -> None:
    dataset = as_dataset(Impure(what), "train")
    assert isinstance(dataset, RowDataset)
    with pytest.raises(InvalidInputError, match=rf"data\.train: {words}"):
        check_purity(dataset)


def test_pure_rows_pass_and_leave_the_generators_alone() -> None:
    """They are checked when they are loaded, unless bits may change."""
    for value in (NoisyRows(20), Impure(""), [1.5], []):
        dataset = as_dataset(value, "train")
        assert isinstance(dataset, RowDataset)
        torch.manual_seed(1)
        expected = torch.rand(())
        torch.manual_seed(1)
        check_purity(dataset)
        assert torch.equal(torch.rand(()), expected)
    data = {"entrypoint": "tests.userland.data:impure_rows"}
    with pytest.raises(InvalidInputError, match=r"data\.train: row 0 is not the same"):
        load_data(job(data=data), ALLOWED, DataSources())
    load_data(job(data=data, execution={"deterministic": False}), ALLOWED, DataSources())

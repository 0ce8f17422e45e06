"""Rows that are compared with those of another process: which differ, and which are left out."""

from typing import Any

import numpy as np
import pytest
import torch

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.data.checks import check_same_rows, described_rows
from stratagem.worker.data.datasets import Dataset, Subset, as_dataset
from stratagem.worker.data.sources import DataSources, load_data, rows_to_compare
from tests.jobs import job, user_data
from tests.stream_jobs import streamed
from tests.userland.data import NoisyRows
from tests.worker.engine.support import ALLOWED

SPEC = job()


def split_of(value: Any) -> dict[str, Dataset]:
    return {"train": as_dataset(value, "train")}


def compare(first: Any, second: Any) -> None:
    check_same_rows(SPEC, split_of(second), described_rows(SPEC, split_of(first)), "here")


def test_equal_rows_pass_up_to_the_last_bits_of_what_was_computed() -> None:
    x = np.random.default_rng(0).standard_normal((1000, 4, 5))
    x[0], x[-1, 0] = 0.0, [1.0, -1.0, 0.5, 0.25, 1.0]
    y = torch.arange(1000)
    for sign in (1, -1):
        compare((x, y), (x * (1 + sign * 1e-9) + sign * 1e-12, y))
    compare(NoisyRows(20), NoisyRows(20))
    compare(({"a": torch.eye(3)},), ({"a": torch.eye(3)},))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda x, y: (x + 0.1, y), r"row 0 is not the same here: the row\[0\] differs"),
        (lambda x, y: (x, y.roll(1)), r"row 0 is not the same here: the row\[1\] differs"),
        (lambda x, y: (x.double(), y), r"the row\[0\] differs"),
        (lambda x, y: (x * torch.tensor([[1.0]] * 9 + [[2.0]]), y), r"row 9 is not the same"),
        (lambda x, y: (x.index_fill(0, torch.tensor(4), torch.nan), y), r"row 4 is not the same"),
        (lambda x, y: (x,), r"the row\[1\] differs"),
        (lambda x, y: ({"a": x}, y), r"the row\[0\] differs"),
    ],
)
def test_a_row_that_differs_is_named(changed: Any, words: str) -> None:
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    y = torch.arange(10)
    with pytest.raises(InvalidInputError, match=rf"data\.train: .*{words}"):
        compare((x, y), changed(x, y))


def test_what_need_not_be_the_same_is_not_compared() -> None:
    x, y = torch.randn(10, 3), torch.arange(10)
    known = described_rows(SPEC, split_of((x, y)))
    assert known
    others = split_of((x + 1.0, y))
    free = job(execution={"deterministic": False})
    check_same_rows(free, others, known, "here")
    check_same_rows(job(seed=4), others, known, "here")
    check_same_rows(job(data=user_data("classes", num_rows=9)), others, known, "here")
    for unreadable in ("", "no JSON", '{"of": 1}'):
        check_same_rows(SPEC, others, unreadable, "here")
    compare((x, y), (torch.cat([x, x]), torch.cat([y, y])))  # as many more as there may be
    wide = {str(number): torch.zeros(3, 1) for number in range(500)}
    assert described_rows(SPEC, split_of((wide, torch.arange(3)))) == ""
    assert described_rows(SPEC, split_of([])) == described_rows(SPEC, split_of(torch.empty(0, 2)))


def test_single_clients_and_streams_have_rows_of_their_own_and_a_silo_those_of_all() -> None:
    for data in (user_data("per_client"), streamed("plain", impure=False)):
        spec = job(data=data)
        text = rows_to_compare(spec, ALLOWED, load_data(spec, ALLOWED, DataSources()), 3)
        assert '"train":{"' not in text
    assert rows_to_compare(SPEC, ALLOWED, load_data(SPEC, ALLOWED, DataSources()), 2) == ""
    whole = split_of((torch.randn(10, 3), torch.arange(10)))
    own = {"train": Subset(whole["train"], torch.tensor([3, 4]))}
    assert described_rows(SPEC, own) == described_rows(SPEC, whole)

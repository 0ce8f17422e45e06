"""Which tensors a client keeps to itself, and patterns that make no sense for a model."""

from typing import Any

import pytest
import torch
from torch import nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.worker.plans.client_state import check_personal, personal, shared
from tests.worker.site.jobs import offered


def job_with(*patterns: str) -> JobSpec:
    return offered(options={"personal": list(patterns)} if patterns else {})


def model(tied: bool = False) -> nn.Module:
    layers = nn.ModuleDict({"body": nn.Linear(4, 4), "bn": nn.BatchNorm1d(4)})
    layers["head"] = nn.Linear(4, 4, bias=False)
    if tied:
        layers["head"].weight = layers["body"].weight
    return layers


def test_names_are_those_of_the_state_dict() -> None:
    state: dict[str, Any] = {"model/bn.running_mean": torch.zeros(4), "model/head.weight": None}
    job = job_with("*bn*")
    assert personal(job, state).keys() == {"model/bn.running_mean"}
    assert shared(job, state).keys() == {"model/head.weight"}
    assert shared(job_with(), state) == state


@pytest.mark.parametrize(
    ("patterns", "tied", "expected"),
    [
        (["head.*", "heads.*"], False, r"personal\[1\]: 'heads.\*' fits no tensor.*body.weight"),
        (["*.weight", "*.bias"], False, "fits all that is trained"),
        (["head.*"], True, "head.weight and body.weight are one tensor"),
    ],
)
def test_patterns_without_sense_are_refused(patterns: list[str], tied: bool, expected: str) -> None:
    with pytest.raises(InvalidInputError, match=expected):
        check_personal(job_with(*patterns), model(tied))
    for taken in ([], ["bn.*"], ["head.*", "body.weight"], *([] if tied else [["head.*"]])):
        check_personal(job_with(*taken), model(tied))

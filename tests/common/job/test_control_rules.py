"""Federations whose clients' steps are corrected: what a job says of it, and what does not go with
it."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from tests.jobs import document

pytestmark = pytest.mark.core

SGD = {"name": "sgd", "lr": 0.1}
FEDERATED = {
    "type": "Federated",
    "num_clients": 4,
    "rounds": 5,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "Random", "fraction": 0.5},
}
PRIVACY = {"clip": {"norm": 1.0}, "noise_multiplier": 1.0, "target": {"delta": 1e-5}}
TOGETHER = "is not possible with strategy.options.control: scaffold"


def job_with(
    options: dict[str, Any], strategy: dict[str, Any] | None = None, **sections: Any
) -> JobSpec:
    options = {"control": "scaffold", **options}
    empty = {"steps": None, "epochs": None, "checkpoint": None, "data": {"worker_local": "ward"}}
    whole = {**FEDERATED, **(strategy or {}), "options": options}
    return JobSpec.parse(document(**{**empty, "optimizer": SGD, "strategy": whole, **sections}))


def refused(*given: Any, **sections: Any) -> str:
    with pytest.raises(InvalidInputError) as error:
        job_with(*given, **sections)
    return str(error.value)


def test_it_is_read_back_and_absent_where_it_is_not_set() -> None:
    spec = job_with({})
    assert JobSpec.from_json(spec.canonical_json()) == spec
    assert '"control":"scaffold"' in spec.canonical_json()
    assert '"control"' not in job_with({"control": None}).canonical_json()
    assert "control" in refused({"control": "scafold"})


@pytest.mark.parametrize(
    ("options", "strategy", "sections"),
    [
        ({"quorum": 1, "round_deadline_s": 5.0}, {}, {}),
        ({"server_optimizer": {"name": "fedavgm"}}, {}, {}),
        ({}, {"aggregation": {"method": "FedProx", "mu": 0.0}}, {}),
        ({"strikes": {"limit": 2}, "over_select": 1, "local_epochs": 3}, {}, {}),
        ({}, {}, {"optimizer": {**SGD, "weight_decay": 0.1, "schedule": {"name": "cosine"}}}),
        ({}, {}, {"optimizer": {**SGD, "groups": [{"name": "b", "match": ["*.bias"], "lr": 0.5}]}}),
        ({}, {}, {"optimizer": {**SGD, "momentum": 0.0, "nesterov": False}}),
        ({}, {}, {"compression": {"codec": "none"}}),
        ({}, {}, {"data": {"entrypoint": "a:b"}, "evaluation": {"split": "test"}}),
    ],
)
def test_what_leaves_steps_and_sums_as_they_are_goes_with_it(
    options: dict[str, Any], strategy: dict[str, Any], sections: dict[str, Any]
) -> None:
    assert job_with(options, strategy, **sections).strategy


@pytest.mark.parametrize(
    ("options", "strategy", "expected"),
    [
        ({"q": 0.5}, {}, "options.q: is not possible with control: scaffold, in which each client"),
        ({"normalize": "fednova"}, {}, "options.normalize: is not possible with control: scaffold"),
        ({"robust": {"name": "norm_bound", "norm": 1.0}}, {}, "options.robust: is not possible"),
        ({"personal": ["head.*"]}, {}, "options.personal: is not possible with control: scaffold"),
        ({"ditto": {"lambda": 1.0}}, {}, "options.ditto: is not possible with control: scaffold"),
        ({"inner": {"type": "Local"}}, {}, "options.control: a silo trains on several workers"),
        ({"roster": {"open": True}}, {}, "options.roster.open: is not possible with control"),
        ({"secure_aggregation": {}}, {}, "options.control: is not possible with secure_aggregatio"),
        (
            {"regions": {"a": [0, 1], "b": [2, 3]}},
            {},
            "options.control: is not possible with regions: the common state of scaffold",
        ),
        (
            {"late_updates": {"discount": 0.5}, "over_select": 1},
            {},
            "options.late_updates: is not possible with control: scaffold: a late update was",
        ),
        (
            {},
            {"aggregation": {"method": "FedProx", "mu": 0.1}},
            "strategy.aggregation.mu: is not possible with control: scaffold, which takes the term",
        ),
    ],
)
def test_other_ways_of_adding_up_are_refused(
    options: dict[str, Any], strategy: dict[str, Any], expected: str
) -> None:
    assert expected in refused(options, strategy)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (
            {"name": "adam"},
            f"optimizer.name: adam {TOGETHER}, which measures gradients by steps",
        ),
        ({"momentum": 0.9}, f"optimizer.momentum: 0.9 {TOGETHER}: a step must be lr times the"),
        ({"maximize": True}, f"optimizer.maximize: True {TOGETHER}"),
        ({"clip_norm": 1.0}, f"optimizer.clip_norm: 1 {TOGETHER}: clipped steps tell no gradient"),
        (
            {"schedule": {"entrypoint": "a:b"}},
            f"optimizer.schedule.entrypoint: {TOGETHER}: rates must stay the same within a round",
        ),
        (
            {"groups": [{"name": "b", "match": ["*.bias"], "momentum": 0.5}]},
            f"optimizer.groups[0].momentum: 0.5 {TOGETHER}",
        ),
        (
            {"groups": [{"name": "b", "match": ["*"], "optimizer": {"name": "adamw", "lr": 1.0}}]},
            f"optimizer.groups[0].optimizer: adamw {TOGETHER}",
        ),
    ],
)
def test_steps_that_are_not_the_gradient_are_refused(
    optimizer: dict[str, Any], expected: str
) -> None:
    assert expected in refused({}, optimizer={**SGD, **optimizer})


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"privacy": PRIVACY},
            "strategy.options.control: is not possible with privacy: no acc",
        ),
        (
            {"compression": {"codec": "int8"}},
            "strategy.options.control: is not possible with a c",
        ),
        (
            {"hyperparameter_schedule": {"settings": [{"from_segment": 1, "values": {}}]}},
            "hyperparameter_schedule",
        ),
    ],
)
def test_other_sections_are_refused(sections: dict[str, Any], expected: str) -> None:
    assert expected in refused({}, **sections)

"""State that clients of a federation keep: what a job says of it, and what does not go with it."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from tests.jobs import document

pytestmark = pytest.mark.core

FEDERATED = {
    "type": "Federated",
    "num_clients": 4,
    "rounds": 5,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "All"},
}
WARD = {"worker_local": "ward"}


def job_with(options: dict[str, Any], **sections: Any) -> JobSpec:
    empty = {"steps": None, "epochs": None, "checkpoint": None, "data": WARD}
    strategy = {**FEDERATED, "options": options}
    return JobSpec.parse(document(**{**empty, "strategy": strategy, **sections}))


def test_a_job_without_personal_layers_has_the_text_that_it_had() -> None:
    assert "personal" not in job_with({}).canonical_json()


def test_the_patterns_are_read_back() -> None:
    spec = job_with({"personal": ["head.*", "*bn*"]})
    assert JobSpec.from_json(spec.canonical_json()) == spec
    assert '"personal":["head.*","*bn*"]' in spec.canonical_json()


def test_lambda_is_read_back_under_its_name() -> None:
    spec = job_with({"ditto": {"lambda": 0.5}})
    assert JobSpec.from_json(spec.canonical_json()) == spec
    assert '"ditto":{"lambda":0.5}' in spec.canonical_json()


@pytest.mark.parametrize(
    "options",
    [
        {"robust": {"name": "median"}},
        {"quorum": 2, "round_deadline_s": 5.0},
        {"roster": {"open": True, "min_clients": 2}},
        {"server_optimizer": {"name": "fedavgm"}},
    ],
)
def test_what_concerns_shared_tensors_alone_goes_with_it(options: dict[str, Any]) -> None:
    assert job_with({"personal": ["head.*"], **options}).strategy


@pytest.mark.parametrize(
    ("options", "sections"),
    [
        ({"personal": ["head.*"]}, {}),
        ({"ditto": {"lambda": 1.0}}, {"evaluation": {"split": "test"}}),
    ],
)
def test_simulated_clients_keep_states_too(
    options: dict[str, Any], sections: dict[str, Any]
) -> None:
    assert job_with(options, data={"entrypoint": "a:b"}, **sections).strategy


PRIVACY = {"clip": {"norm": 1.0}, "noise_multiplier": 1.0, "target": {"delta": 1e-5}}
LOCAL = {"type": "Local"}


@pytest.mark.parametrize(
    ("options", "sections", "expected"),
    [
        ({"personal": []}, {}, "strategy.options.personal: "),
        ({"personal": [""]}, {}, "strategy.options.personal"),
        ({"personal": "head.*"}, {}, "strategy.options.personal: "),
        ({"inner": LOCAL}, {}, "strategy.options.personal: a silo trains on several workers"),
        ({"ditto": {"lambda": 1.0}}, {}, "strategy.options.ditto: keeps a whole model at each"),
        (
            {},
            {"data": {"entrypoint": "a:b"}, "evaluation": {"split": "test"}},
            "evaluation: is not possible with strategy.options.personal and simulated clients",
        ),
        ({"q": 0.5}, {}, "strategy.options.personal: is not possible with q"),
        ({}, {"privacy": PRIVACY}, "strategy.options.personal: is not possible with privacy"),
    ],
)
def test_what_is_not_defined_is_refused(
    options: dict[str, Any], sections: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        job_with({"personal": ["head.*"], **options}, **sections)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("ditto", "expected"),
    [
        ({}, "strategy.options.ditto: must be {lambda: a number > 0}; is {}"),
        ({"lambda_": 1.0}, "strategy.options.ditto: must be {lambda: a number > 0}"),
        ({"lambda": 0}, "strategy.options.ditto.lambda: 0 is not allowed; must be > 0"),
        ({"lambda": "1"}, "strategy.options.ditto.lambda: '1'"),
        (0.5, "strategy.options.ditto"),
    ],
)
def test_a_wrong_lambda_is_named(ditto: Any, expected: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        job_with({"ditto": ditto})
    assert expected in str(refused.value)


def test_members_of_a_population_cannot_copy_what_clients_keep() -> None:
    inner = {**FEDERATED, "options": {"personal": ["head.*"]}}
    population = {
        "type": "PopulationBased",
        "population_size": 4,
        "generations": 2,
        "exploit": {"method": "Truncation", "fraction": 0.25},
        "explore": {"method": "Perturbation", "factor": 0.2},
        "options": {"inner": inner},
    }
    with pytest.raises(InvalidInputError, match="cannot copy what its clients keep"):
        job_with({}, strategy=population)

"""State that clients keep, and steps of theirs that are corrected: what does not go with either."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from tests.common.strategy.documents import FEDERATED, POPULATION
from tests.jobs import document

pytestmark = pytest.mark.core

SGD = {"name": "sgd", "lr": 0.1}
ADAMW = {"name": "adamw", "lr": 1.0}
RANDOM = {"client_selection": {"method": "Random", "fraction": 0.5}}
PRIVACY = {"clip": {"norm": 1.0}, "noise_multiplier": 1.0, "target": {"delta": 1e-5}}
LOCAL = {"type": "Local"}
TOGETHER = "is not possible with strategy.options.control: scaffold"


def job_with(options: Any, strategy: Any = None, **sections: Any) -> JobSpec:
    whole = FEDERATED | (strategy or {}) | {"options": options}
    empty = {"steps": None, "epochs": None, "checkpoint": None, "data": {"worker_local": "ward"}}
    return JobSpec.parse(document(**{**empty, "optimizer": SGD, "strategy": whole, **sections}))


def controlled(options: Any, strategy: Any = None, **sections: Any) -> JobSpec:
    return job_with({"control": "scaffold", **options}, RANDOM | (strategy or {}), **sections)


def refused(*given: Any, **sections: Any) -> str:
    with pytest.raises(InvalidInputError) as error:
        controlled(*given, **sections)
    return str(error.value)


def grouped(**section: Any) -> dict[str, Any]:
    return {"groups": [{"name": "b", **section}]}


def test_what_is_said_is_read_back_and_absent_where_it_is_not_set() -> None:
    plain = job_with({}).canonical_json()
    for options, text in (
        ({"personal": ["head.*", "*bn*"]}, '"personal":["head.*","*bn*"]'),
        ({"ditto": {"lambda": 0.5}}, '"ditto":{"lambda":0.5}'),
        ({"control": "scaffold"}, '"control":"scaffold"'),
    ):
        spec = job_with(options)
        assert JobSpec.from_json(spec.canonical_json()) == spec
        assert text in spec.canonical_json()
        assert text.partition(":")[0] not in plain
    assert "control" in refused({"control": "scafold"})


def test_what_concerns_shared_tensors_alone_goes_with_it_and_simulated_clients_do() -> None:
    for options in (
        {"robust": {"name": "median"}},
        {"quorum": 2, "round_deadline_s": 5.0},
        {"roster": {"open": True, "min_clients": 2}},
        {"server_optimizer": {"name": "fedavgm"}},
    ):
        assert job_with({"personal": ["head.*"], **options}).strategy
    simulated = {"entrypoint": "a:b"}
    assert job_with({"personal": ["head.*"]}, data=simulated).strategy
    assert job_with({"ditto": {"lambda": 1.0}}, data=simulated, evaluation={"split": "test"})


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
        ({"ditto": {}}, {}, "strategy.options.ditto: must be {lambda: a number > 0}; is {}"),
        ({"ditto": {"lambda_": 1.0}}, {}, "strategy.options.ditto: must be {lambda: a number > 0}"),
        ({"ditto": {"lambda": 0}}, {}, "strategy.options.ditto.lambda: 0 is not allowed; must be"),
        ({"ditto": {"lambda": "1"}}, {}, "strategy.options.ditto.lambda: '1'"),
        ({"ditto": 0.5}, {}, "strategy.options.ditto"),
    ],
)
def test_what_is_not_defined_is_refused(options: Any, sections: Any, expected: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        job_with({"personal": ["head.*"], **options}, **sections)
    assert expected in str(refused.value)


def test_members_of_a_population_cannot_copy_what_clients_keep() -> None:
    inner = {**FEDERATED, "options": {"personal": ["head.*"]}}
    with pytest.raises(InvalidInputError, match="cannot copy what its clients keep"):
        job_with({"inner": inner}, POPULATION)


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
def test_what_leaves_steps_and_sums_goes_with_it(
    options: dict[str, Any], strategy: dict[str, Any], sections: dict[str, Any]
) -> None:
    assert controlled(options, strategy, **sections).strategy


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
        ({"regions": {"a": [0, 1], "b": [2, 3]}}, {}, "options.control: is not possible with regi"),
        ({"late_updates": {"discount": 0.5}, "over_select": 1}, {}, "late_updates: is not possibl"),
        ({}, {"aggregation": {"method": "FedProx", "mu": 0.1}}, "aggregation.mu: is not possible"),
    ],
)
def test_other_ways_of_adding_up_are_refused(options: Any, strategy: Any, expected: str) -> None:
    assert expected in refused(options, strategy)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"name": "adam"}, f"optimizer.name: adam {TOGETHER}, which measures gradients by steps"),
        ({"momentum": 0.9}, f"optimizer.momentum: 0.9 {TOGETHER}: a step must be lr times the"),
        ({"maximize": True}, f"optimizer.maximize: True {TOGETHER}"),
        ({"clip_norm": 1.0}, f"optimizer.clip_norm: 1 {TOGETHER}: clipped steps tell no gradient"),
        ({"schedule": {"entrypoint": "a:b"}}, f"optimizer.schedule.entrypoint: {TOGETHER}: rates"),
        (grouped(match=["*.bias"], momentum=0.5), f"optimizer.groups[0].momentum: 0.5 {TOGETHER}"),
        (grouped(match=["*"], optimizer=ADAMW), f"optimizer.groups[0].optimizer: adamw {TOGETHER}"),
    ],
)
def test_steps_that_are_not_the_gradient_are_refused(optimizer: Any, expected: str) -> None:
    assert expected in refused({}, optimizer={**SGD, **optimizer})


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"privacy": PRIVACY}, "strategy.options.control: is not possible with privacy: no acc"),
        ({"compression": {"codec": "int8"}}, "strategy.options.control: is not possible with a c"),
        ({"hyperparameter_schedule": {"settings": [{"from_segment": 1}]}}, "hyperparameter_sched"),
    ],
)
def test_other_sections_are_refused(sections: dict[str, Any], expected: str) -> None:
    assert expected in refused({}, **sections)

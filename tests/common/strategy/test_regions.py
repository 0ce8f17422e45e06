"""The section `options.regions`: who may be where, and what goes together with it."""

from collections.abc import Mapping
from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated
from tests.coordinator.core.jobs import FEDERATED, job_text

HALVES = {"south": [1, 3], "north": [0, 2]}
NAMES = {"north": ["anna", "bern"], "south": ["cork", "dover"]}


def regional_job(regions: Any, changes: dict[str, Any] | None = None, **options: Any) -> JobSpec:
    strategy = {**FEDERATED, "options": {"regions": regions, **options}}
    return JobSpec.from_json(job_text(strategy, **(changes or {})))


def regions_of(made: JobSpec) -> Mapping[str, Any]:
    assert isinstance(made.strategy, Federated)
    assert made.strategy.options.regions is not None
    return made.strategy.options.regions


def test_regions_are_kept_in_order_of_name() -> None:
    made = regional_job(HALVES)
    assert list(regions_of(made)) == ["north", "south"]
    assert JobSpec.from_json(made.canonical_json()) == made
    assert made == regional_job(dict(reversed(HALVES.items())))
    assert "regions" not in JobSpec.from_json(job_text(FEDERATED)).canonical_json()
    made = regional_job(NAMES, {"data": {"worker_local": "ward"}})
    assert regions_of(made)["south"] == ["cork", "dover"]
    few = {"north": ["anna", "bern"], "south": ["cork"]}
    with pytest.raises(InvalidInputError, match="has 3 sites, and num_clients is 4"):
        regional_job(few, {"data": {"worker_local": "ward"}})


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "in none": ({"a": [0, 1, 3]}, {}, "2 is in no region"),
    "in two": ({"a": [0, 1, 2], "b": [2, 3]}, {}, "2 is in more than one place"),
    "twice in one": ({"a": [0, 1, 2, 3, 3]}, {}, "3 is in more than one place"),
    "no such client": ({"a": [0, 1, 2, 3, 4]}, {}, "4 is no client; they are numbered from 0 to 3"),
    "numbers and names": ({"a": [0, 1], "b": ["x", "y"]}, {}, "use one of them"),
    "no regions": ({}, {}, "no mapping of at least one region"),
    "empty region": ({"a": [0, 1, 2, 3], "b": []}, {}, "no list of at least one client"),
    "no client": ({"a": [0, 1, 2, -1]}, {}, "neither the number of a client"),
    "truth": ({"a": [0, True, 2, 3]}, {}, "neither the number of a client"),
    "no name": ({"": [0, 1, 2, 3]}, {}, "is no name of a region"),
    "names without sites": (NAMES, {}, "give data.worker_local"),
    "robust": (HALVES, {"robust": {"name": "median"}}, "a region tells only their sum"),
    "q": (HALVES, {"q": 0.5}, "depends on the losses of all others"),
    "masks": (HALVES, {"secure_aggregation": {}}, "masks go out of the sum of all clients alone"),
    "layers of their own": (HALVES, {"personal": ["head.*"]}, "is not defined by region"),
    "models of their own": (HALVES, {"ditto": {"lambda": 0.1}}, "is not defined by region"),
    "steps": (HALVES, {"normalize": "fednova"}, "depends on the steps of all clients"),
    "late": (
        HALVES,
        {"late_updates": {"discount": 0.5}, "quorum": 1, "round_deadline_s": 9},
        "another base",
    ),
    "open": (HALVES, {"roster": {"open": True, "min_clients": 2}}, "who joins later"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused(case: str) -> None:
    regions, options, said = WRONG[case]
    with pytest.raises(InvalidInputError) as error:
        regional_job(regions, **options)
    assert said in str(error.value)
    assert "options." in str(error.value)

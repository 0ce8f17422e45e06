"""The section `phases`: what it says, what is refused and under which strategies."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec, PhasesSpec
from tests.cluster.jobs import data_parallel, gossip, model_parallel
from tests.jobs import job

pytestmark = pytest.mark.core

FEDERATED = {
    "type": "Federated",
    "num_clients": 2,
    "rounds": 1,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "All"},
}
POPULATION = {
    "type": "PopulationBased",
    "population_size": 2,
    "generations": 2,
    "exploit": {"method": "Truncation", "fraction": 0.5},
    "explore": {"method": "Perturbation", "factor": 0.2},
}
STAGES = model_parallel({"0": "tag:any", "1": "tag:any"})


def wrong(phases: object, **changes: Any) -> str:
    with pytest.raises(InvalidInputError) as caught:
        job(phases=phases, **changes)
    return str(caught.value.violations[0])


def test_defaults_and_their_limits() -> None:
    spec = PhasesSpec.parse({})
    assert (spec.full_steps, spec.predict_steps, spec.correct_every) == (8, 16, 4)
    assert (spec.full_limits, spec.predict_limits) == ((4, 32), (4, 32))
    assert job().phases is None
    assert PhasesSpec.parse({"predict_steps": 0}).predict_limits == (0, 0)
    assert PhasesSpec.parse({"full_steps": 2}).full_limits == (2, 8)


@pytest.mark.parametrize(
    "phases", [{}, {"predictor": {"kind": "momentum", "momentum": 0.5}, "predict_steps": 0}]
)
def test_the_canonical_text_gives_the_job_back(phases: dict[str, Any]) -> None:
    spec = job(phases=phases)
    assert JobSpec.from_json(spec.canonical_json()) == spec


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ({"full_steps": 1}, "phases.full_steps: 1 is not allowed; must be >= 2"),
        ({"predict_steps": -1}, "phases.predict_steps: -1 is not allowed; must be >= 0"),
        ({"correct_every": 0}, "phases.correct_every: 0 is not allowed; must be >= 1"),
        ({"ful_steps": 3}, "phases.ful_steps: unknown key; did you mean full_steps?"),
        ({"trust": 0}, "phases.trust: 0 is not allowed; must be > 0"),
        ({"min_correlation": 2}, "phases.min_correlation: 2 is not allowed; must be in [-1, 1]"),
        ({"predictor": {"kind": "lsq"}}, "phases.predictor.kind: 'lsq' is not one of wls, mom"),
        ({"predictor": {"history": 1}}, "phases.predictor.history: 1 is not allowed"),
        ({"predictor": {"momentum": 0.5}}, "phases.predictor.momentum: belongs to kind momentum"),
        (
            {"predictor": {"kind": "momentum", "decay": 0.5}},
            "phases.predictor.decay: belongs to kind wls only",
        ),
        (
            {"adaptive": {"min_full_steps": 9}},
            "phases.adaptive.min_full_steps: 9 is more than full_steps, 8",
        ),
        (
            {"adaptive": {"max_predict_steps": 9}},
            "phases.adaptive.max_predict_steps: 9 is less than predict_steps, 16",
        ),
    ],
)
def test_wrong_values_are_named(phases: dict[str, Any], expected: str) -> None:
    assert wrong(phases).startswith(expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"strategy": FEDERATED, "steps": None}, "phases: not under Federated: a client begins"),
        ({"strategy": gossip(3)}, "phases: not under Decentralized: each node has gradients"),
        ({"strategy": STAGES}, "phases: not under ModelParallel: a stage sees only its own"),
        (
            {"strategy": {**data_parallel(2), "options": {"inner": STAGES}}},
            "phases: not under ModelParallel",
        ),
        (
            {"strategy": {"type": "Custom", "coordinator": "mine", "config": {}}},
            "phases: not under Custom",
        ),
        ({"execution": {"deterministic": False}}, "phases: needs execution.deterministic"),
    ],
)
def test_strategies_that_cannot_have_phases_say_why(changes: dict[str, Any], expected: str) -> None:
    assert wrong({}, **changes).startswith(expected)


@pytest.mark.parametrize("inner", [{"type": "Local"}, data_parallel(2, "ParameterServer")])
def test_members_of_a_population_have_phases_of_their_own(inner: dict[str, Any]) -> None:
    spec = job(
        phases={},
        strategy={**POPULATION, "options": {"inner": inner}},
        steps=None,
        steps_per_generation=2,
        search_space={"optimizer.lr": {"low": 0.01, "high": 0.1}},
        evaluation={"best": "loss", "mode": "min"},
    )
    assert spec.phases == PhasesSpec()

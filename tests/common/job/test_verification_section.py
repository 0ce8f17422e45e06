"""The section `verification`: what it says, and what does not go together with it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec, VerificationSpec, parse_yaml
from tests.common.strategy.documents import DATA_PARALLEL, FEDERATED, POPULATION
from tests.jobs import NOT_TRAINED, document, job

pytestmark = pytest.mark.core

HALF = {"sample": 0.5}
STAGES = {
    "type": "ModelParallel",
    "partitions": [{"node_ids": ["*"], "target": {"Tag": "x"}}],
    "communication": {"protocol": "Pipeline", "micro_batch_size": 4},
}
SERVER = {**DATA_PARALLEL, "aggregation": {"method": "ParameterServer"}}
GOSSIP = {**DATA_PARALLEL, "aggregation": {"method": "Decentralized", "topology": "ring"}}


def wrong(**sections: Any) -> list[str]:
    with pytest.raises(InvalidInputError) as refused:
        JobSpec.parse(document(**sections))
    return [str(each) for each in refused.value.violations]


@given(
    sample=st.floats(min_value=0, max_value=1, exclude_min=True),
    on=st.sampled_from(["spare", "any", "members"]),
)
def test_what_it_says_is_read_back(sample: float, on: str) -> None:
    spec = job(verification={"sample": sample, "on": on})
    assert spec.verification == VerificationSpec(sample=sample, on=on)  # type: ignore[arg-type]
    assert JobSpec.from_json(spec.canonical_json()) == spec


def test_it_is_absent_where_the_job_has_none_and_asks_spare_workers_by_default() -> None:
    assert "verification" not in job().canonical_json()
    short = parse_yaml("{sample: 1, on: any}")  # YAML 1.1 reads this key as a truth value
    assert job(verification=short).verification == VerificationSpec(sample=1, on="any")
    text = job(verification={"sample": 0.05}).canonical_json()
    assert '"verification":{"sample":0.05,"on":"spare"}' in text


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, "verification.sample: missing"),
        ({"sample": 0}, "verification.sample: 0 is not allowed; must be in (0, 1]"),
        ({"sample": 1.5}, "verification.sample: 1.5 is not allowed; must be in (0, 1]"),
        ({**HALF, "on": "all"}, "verification.on: 'all' is not one of"),
        ({**HALF, "every": 2}, "verification.every: unknown"),
    ],
)
def test_a_wrong_value_is_refused_by_field(section: Any, expected: str) -> None:
    (found,) = wrong(verification=section)
    assert found.startswith(expected)


@pytest.mark.parametrize("strategy", [{"type": "Local"}, DATA_PARALLEL, SERVER, GOSSIP, STAGES])
def test_segments_of_each_strategy_can_be_verified(strategy: Any) -> None:
    assert job(strategy=strategy, verification=HALF).verification is not None
    assert job(strategy=FEDERATED, verification=HALF).verification is not None
    assert job(**{**MEMBERS, "verification": HALF}).verification is not None


MEMBERS: dict[str, Any] = {
    "strategy": POPULATION,
    "steps_per_generation": 2,
    "evaluation": {"best": "loss"},
    "search_space": {"optimizer.lr": {"low": 0.1, "high": 1.0}},
}
EVALUATED = {**NOT_TRAINED, "evaluation": {}}
ROUNDS = {"clip": {"norm": 1.0}, "noise_multiplier": 1.0, "target": {"delta": 1e-5}}
AFTER = "verify the run after its end, with stratagem verify"


def federated(**options: Any) -> dict[str, Any]:
    return {"strategy": {**FEDERATED, "options": options}}


@pytest.mark.parametrize(
    ("sections", "field", "texts"),
    [
        (federated(secure_aggregation={}), "verification", ["secure_aggregation", AFTER]),
        (federated(roster={"open": True}), "verification", ["an open roster", AFTER]),
        ({"strategy": FEDERATED, "privacy": ROUNDS}, "verification", ["with privacy", AFTER]),
        (
            {"strategy": FEDERATED, "data": {"worker_local": "mine"}},
            "verification",
            ["data.worker_local", AFTER],
        ),
        (
            {**MEMBERS, "strategy": {**POPULATION, "options": {"asynchronous": True}}},
            "verification",
            ["with asynchronous members"],
        ),
        (EVALUATED, "verification", ["there are no segments to compute again"]),
        (
            {"execution": {"deterministic": False}},
            "verification",
            ["execution.deterministic: false"],
        ),
    ],
)
def test_what_no_other_worker_can_compute_again_is_refused(
    sections: Any, field: str, texts: list[str]
) -> None:
    assert any(
        each.startswith(f"{field}: ") and all(text in each for text in texts)
        for each in wrong(**sections, verification=HALF)
    )


@pytest.mark.parametrize("deterministic", [True, False])
def test_sums_in_any_order_are_refused_without_the_advice_to_give_up_determinism(
    deterministic: bool,
) -> None:
    ring = {**DATA_PARALLEL, "options": {"all_reduce": "ring"}}
    sections = {"strategy": ring, "execution": {"deterministic": deterministic}}
    (found,) = (each for each in wrong(**sections, verification=HALF) if "all_reduce" in each)
    assert found == (
        "strategy.options.all_reduce: ring adds in an order that depends on the workers; use "
        "direct, as verification compares bits"
    )


def test_noise_that_is_secret_cannot_be_drawn_again_and_seeded_noise_can() -> None:
    secret = wrong(strategy=FEDERATED, privacy=ROUNDS, verification=HALF)
    seeded = wrong(strategy=FEDERATED, privacy={**ROUNDS, "noise": "seeded"}, verification=HALF)
    (more,) = set(secret) - set(seeded)
    assert more.startswith("verification: is not possible with privacy.noise secret")

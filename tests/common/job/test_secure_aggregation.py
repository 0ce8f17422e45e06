"""A job with secure aggregation: what it may say, and what it may not say besides."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated
from tests.common.strategy.documents import FEDERATED, POPULATION
from tests.jobs import job

pytestmark = pytest.mark.core


PRIVACY = {"clip": {"norm": 1.0}, "noise_multiplier": 1, "target": {"delta": 1e-5}}


def secure(options: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    strategy = FEDERATED | {
        "num_clients": changes.pop("num_clients", 5),
        "client_selection": changes.pop("selection", {"method": "All"}),
        "options": {"secure_aggregation": {}, **(options or {})},
    }
    return job(strategy=strategy, optimizer={"name": "sgd", "lr": 0.1}, **changes)


def test_a_section_without_keys_stays_in_the_canonical_text() -> None:
    """Nothing would be masked if it were left out where nothing in it differs from its default."""
    again = JobSpec.from_json(secure().canonical_json())
    assert isinstance(again.strategy, Federated)
    assert again.strategy.options.secure_aggregation is not None
    assert '"secure_aggregation":{}' in secure().canonical_json()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"robust": {"name": "median"}}, "robust"),
        ({"robust": {"name": "norm_bound", "norm": 1.0}}, "robust"),
        ({"inner": {"type": "Local"}}, "inner"),
        ({"roster": {"open": True}}, "roster.open"),
        ({"on_missing_quorum": "wait"}, "on_missing_quorum"),
        ({"q": 0.2}, "q"),
    ],
)
def test_options_that_need_single_updates_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"options.{field}: is not possible with secure"):
        secure(options)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"compression": {"codec": "ternary"}}, "compression"),
        ({"privacy": PRIVACY}, "privacy"),
        ({"recording": {"client_steps": True}}, "recording.client_steps"),
        ({"data": {"worker_local": "ward"}, "evaluation": {"split": "test"}}, "evaluation"),
    ],
)
def test_sections_that_would_show_a_client_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{field}: is not possible with secure_aggreg"):
        secure(**changes)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"threshold": 0.4}, "threshold: 0.4 is not allowed"),
        ({"degree": 1}, "degree: 1 is not auto or a number from 2 to 1024"),
        ({"bits": 33}, "bits: 33 is not allowed"),
        ({"weights": "rows"}, "max_rows: missing"),
        ({"max_rows": 5}, "max_rows: has a meaning only"),
        ({"weights": "rows", "max_rows": 1 << 31, "bits": 32}, "does not fit into 64 bits"),
    ],
)
def test_a_value_that_is_wrong_is_named(section: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        secure({"secure_aggregation": section})


def test_rounds_of_few_or_of_populations_hide_nobody_and_too_many_are_too_many() -> None:
    with pytest.raises(InvalidInputError, match="a round has 2 clients, and fewer than 3"):
        secure(num_clients=2)
    with pytest.raises(InvalidInputError, match="a round has 1 clients"):
        secure(selection={"method": "Random", "fraction": 0.3})
    with pytest.raises(InvalidInputError, match="20000 clients are more than 10000"):
        secure(num_clients=20_000)
    strategy = POPULATION | {"options": {"inner": secure().document()["strategy"]}}
    with pytest.raises(InvalidInputError, match="secure_aggregation"):
        job(strategy=strategy, optimizer={"name": "sgd", "lr": 0.1})

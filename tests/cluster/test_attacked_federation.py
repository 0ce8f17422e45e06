"""The example of an attacked federation: what robust rules are worth when three of ten lie."""

from collections.abc import Iterator

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from stratagem.common.job import load_job
from tests.cluster.jobs import train
from tests.repository import ROOT

pytestmark = pytest.mark.cluster

RULES = ("{name: multi_krum, byzantine: 3}", "{name: norm_bound, norm: 1.0}")
"""A choice among updates and a bound of each; the trimmed mean is a statistic of each number."""


@pytest.fixture(scope="module")
def clients_of_digits() -> Iterator[Client]:
    local = LocalCluster(workers=2, threads=1, import_path=[ROOT], allow=["examples.*:*"])
    with local as cluster, cluster.client() as client:
        yield client


def accuracies(client: Client, *changes: str) -> list[float]:
    """Of each round."""
    path = ROOT / "examples" / "attacked_federation.yaml"
    outcome = train(client, load_job(path, ["strategy.rounds=10", *changes]))
    found = [event.payload for event in outcome.of("Evaluated")]
    return [each["metrics"]["test.accuracy"] for each in found]


def test_the_mean_learns_what_false_clients_want(clients_of_digits: Client) -> None:
    assert max(accuracies(clients_of_digits, "strategy.options={}")) < 0.5


def test_the_rule_of_the_example_keeps_the_model_right(clients_of_digits: Client) -> None:
    assert accuracies(clients_of_digits)[-1] > 0.8


@pytest.mark.sweep
def test_the_mean_learns_as_well_as_any_rule_without_them(clients_of_digits: Client) -> None:
    honest = ("strategy.options={}", "data.kwargs.num_false=0")
    assert accuracies(clients_of_digits, *honest)[-1] > 0.85


@pytest.mark.sweep
@pytest.mark.parametrize("rule", RULES)
def test_rules_of_other_kinds_keep_it_right(clients_of_digits: Client, rule: str) -> None:
    assert accuracies(clients_of_digits, f"strategy.options.robust={rule}")[-1] > 0.8


@pytest.mark.sweep
def test_bulyan_needs_fewer_false_ones(clients_of_digits: Client) -> None:
    changes = ("data.kwargs.num_false=1", "strategy.options.robust={name: bulyan, byzantine: 1}")
    assert accuracies(clients_of_digits, *changes)[-1] > 0.85

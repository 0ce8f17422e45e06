"""The example of sites that differ: what a layer and a model of their own are worth to them."""

import pytest

from examples.own_codes import VARIANTS, picture_of, sites, trained

pytestmark = [pytest.mark.cluster, pytest.mark.sweep]


def test_the_worst_site_gains_most() -> None:
    with sites() as client:
        fewer = ["strategy.rounds=8"]
        runs = {name: trained(client, change, fewer) for name, change in VARIANTS.items()}
    worst = {name: rounds[-1]["test.accuracy.client_min"] for name, rounds in runs.items()}
    assert worst["personal layer"] > worst["Ditto"] > worst["FedAvg"] + 0.2
    assert "Ditto" in picture_of(runs).svg_file

"""The winner of a population is trained again by a plain run, with the same bits."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stratagem.client.cli.main import assemble
from stratagem.client.sdk.blocking import Client
from stratagem.common.job import load_job
from tests.cluster.jobs import assert_same_bits, data_parallel, population, train
from tests.jobs import user_model
from tests.stream_jobs import streamed

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("the winner of a population is trained again by a plain run"),
]

LOW_RATES = {"optimizer.lr": {"low": 0.001, "high": 0.02, "scale": "log"}}
"""With which each generation is better than the one before: the last one wins."""

REPLAYED: dict[str, dict[str, Any]] = {
    "a schedule of rates under AllReduce": {
        "model": "dropout_mlp",
        "optimizer": {"name": "adam", "lr": 0.01, "schedule": {"name": "cosine"}},
        "options": {"inner": data_parallel(2)},
        "search_space": LOW_RATES,
    },
    "asynchronous": {"options": {"asynchronous": True}, "search_space": LOW_RATES},
    "streams": {
        "model": "dropout_mlp",
        "data": streamed("shards", streams=3, shuffle_rows=4, stateful=True),
        "search_space": LOW_RATES,
    },
    "layouts": {
        "model": user_model("tower"),
        "search_space": {
            "model.kwargs.width": {"choices": [6, 8, 12], "ordered": True},
            "model.kwargs.dropout": {"low": 0.0, "high": 0.5},
            "optimizer.name": {"choices": ["sgd", "adam"]},
            **LOW_RATES,
            "optimizer.momentum": {"low": 0.0, "high": 0.9, "when": {"optimizer.name": ["sgd"]}},
        },
        "optimizer": {"name": "sgd", "lr": 0.1},
    },
    "Federated": {
        "search_space": LOW_RATES,
        "options": {
            "inner": {
                "type": "Federated",
                "num_clients": 2,
                "rounds": 3,
                "aggregation": {"method": "FedAvg"},
                "client_selection": {"method": "All"},
            }
        },
    },
}


@pytest.mark.parametrize("case", REPLAYED)
def test_the_winner_is_trained_again_by_its_schedule(
    client: Client, case: str, tmp_path: Path
) -> None:
    """Without the population: one plain run with the parameters and the seeds of its lineage."""
    outcome = train(client, population(size=4, generations=4, **REPLAYED[case]))
    found, winner = outcome.run.population(), outcome.status.commit("best")
    assert found.best is not None
    assert winner is not None
    if case != "asynchronous":  # where who is late decides whether anybody copies
        assert len(found.schedule(found.best.member, found.best.generation)) > 1
    path = tmp_path / "winner.yaml"
    asked = ("population", outcome.run.run_id, "--schedule", str(path))
    told = CliRunner().invoke(assemble(), [*asked, "--coordinator", client.address])
    assert f"schedule written to {path}" in told.output.replace("\n", "")
    again = train(client, load_job(path, []))
    state = outcome.run.state_dict("best")
    assert_same_bits(again.state, state)
    assert again.digests[-1] == winner.digest
    assert again.status.step == winner.step

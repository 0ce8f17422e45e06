"""The nodes of one member against the reference loop: bits, state, failures."""

import math
from typing import Any

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.job import JobSpec
from stratagem.common.strategy.topology import graph_of, metropolis_hastings
from stratagem.worker.engine import Tally
from tests.every_pair import every_pair, every_value
from tests.jobs import user_data
from tests.reference.gossip_loop import gossip_loop
from tests.worker.engine.gossip_nodes import assert_nodes_equal_loop, gossip_job, trainer
from tests.worker.engine.support import ALLOWED, assert_same_bits, trainer_of

SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ADAM = {"name": "adamw", "lr": 0.01, "clip_norm": 0.5, "schedule": {"name": "cosine"}}


@pytest.mark.parametrize(
    ("model", "num_nodes", "optimizer", "precision"),
    every_pair(
        ["dropout_mlp", "batch_norm_mlp", "everything"],
        [1, 2, 3, 4],
        [SGD, ADAM],
        ["Single", "Full"],
    ),
    ids=lambda value: value["name"] if isinstance(value, dict) else str(value),
)
def test_equals_the_gossip_loop_to_the_bit(
    model: str, num_nodes: int, optimizer: dict[str, Any], precision: str
) -> None:
    rows = 42 if model == "batch_norm_mlp" else 50
    data = user_data("classes", num_rows=rows)
    execution = {"precision": precision}
    changes: dict[str, Any] = {"optimizer": optimizer, "data": data, "execution": execution}
    spec = gossip_job(model, num_nodes, steps=6, **changes)
    made, exchange = trainer(spec)
    reports = [made.train_step(exchange, range(num_nodes), num_nodes) for _ in range(6)]
    losses = [report.loss for report in reports]
    expected = gossip_loop(spec, ALLOWED)
    assert losses == expected.losses
    assert reports[0].learning_rates == {"train.lr": spec.optimizer.lr}
    apart = [report.metrics["neighbour_distance"] for report in reports]
    assert apart == pytest.approx(expected.apart, rel=1e-9, abs=1e-12)
    summary = made.end_segment(exchange, Tally())
    assert_same_bits(made.model.state_dict(), dict(expected.mean))
    assert summary.metrics["consensus_distance"] == pytest.approx(expected.distance, abs=1e-12)
    assert summary.loss == pytest.approx(
        sum(a * b for a, b in zip(losses, expected.weights, strict=True)) / sum(expected.weights)
    )
    assert (summary.metrics["mixing_distance"] > 0) == (num_nodes > 1)


@pytest.mark.parametrize("every", [1, 3])
def test_consensus_distance_is_exact_at_the_steps_that_are_asked_for(every: int) -> None:
    plain = gossip_job("batch_norm_mlp", 4, "star", batch_size=14)
    document = plain.document()
    document["strategy"] = {**document["strategy"], "options": {"consensus_every": every}}  # type: ignore[dict-item]
    made, exchange = trainer(JobSpec.parse(document))
    told = [
        made.train_step(exchange, range(4), 4).metrics.get("consensus_distance") for _ in range(7)
    ]
    expected = gossip_loop(plain, ALLOWED, 7)
    for step, distance in enumerate(told, start=1):
        last = step - step % every
        assert distance == (pytest.approx(expected.distances[last - 1]) if last else None)
    summary = made.end_segment(exchange, Tally())
    assert summary.metrics["consensus_distance"] == pytest.approx(expected.distances[-1])
    assert_same_bits(made.model.state_dict(), dict(expected.mean))


@pytest.mark.parametrize(
    ("topology", "num_nodes"),
    every_value(["ring", "star", "complete", "exponential", "random:1"], [5, 7, 2]),
)
def test_neighbour_distance_bounds_the_distance_to_the_mean(topology: str, num_nodes: int) -> None:
    """By the eigenvalues of the mixing matrix; of a complete graph they are equal."""
    expected = gossip_loop(gossip_job("mlp", num_nodes, topology), ALLOWED, 4)
    rows = metropolis_hastings(graph_of(topology, num_nodes, 0))
    matrix = torch.tensor([[row.get(j, 0.0) for j in range(num_nodes)] for row in rows]).double()
    *others, _one = torch.linalg.eigvalsh(matrix).tolist()
    low, high = (math.sqrt(1 - value) for value in (max(others), min(others)))
    for apart, spread in zip(expected.apart, expected.spreads, strict=True):
        assert spread * low * (1 - 1e-6) <= apart <= spread * high * (1 + 1e-6)
        if topology == "complete":
            assert apart == pytest.approx(spread, rel=1e-6)


@pytest.mark.parametrize("batch_size", [7, 1])
def test_nodes_without_rows_only_mix(batch_size: int) -> None:
    assert_nodes_equal_loop(gossip_job("dropout_mlp", 3, batch_size=batch_size), 10)


@pytest.mark.parametrize("at", [0, 3])
def test_goes_on_from_its_state_with_the_same_bits(at: int) -> None:
    spec = gossip_job("batch_norm_mlp", 3, optimizer=ADAM, batch_size=14)
    first, exchange = trainer(spec)
    for _ in range(at):
        first.train_step(exchange, range(3), 3)
    first.end_segment(exchange, Tally())
    tensors, metadata = first.copy_state(is_first=True)
    assert list(tensors) == sorted(tensors)
    second, exchange = trainer(spec)
    second.load_state(tensors, metadata)
    assert second.fingerprint() == first.fingerprint()
    for _ in range(10 - at):
        second.train_step(exchange, range(3), 3)
    second.end_segment(exchange, Tally())
    assert_same_bits(second.model.state_dict(), dict(gossip_loop(spec, ALLOWED).mean))


def test_state_names_keep_the_nodes_apart_from_the_mean() -> None:
    made, exchange = trainer(gossip_job("mlp", 2))
    made.train_step(exchange, range(2), 2)
    made.end_segment(exchange, Tally())
    tensors, metadata = made.copy_state(is_first=True)
    roots = {name.split("/")[0] + "/" + name.split("/")[1].split(".")[0] for name in tensors}
    assert {root.split("/")[0] for root in roots} == {"model", "node0", "node1"}
    assert all(not name.startswith("model/") for name in made.copy_state(is_first=False)[0])
    assert metadata["step"] == "1"
    plain = trainer_of(gossip_job("mlp", 2), fresh=False)
    plain.load_state(tensors, metadata)  # an evaluation needs the mean only
    assert_same_bits(plain.model.state_dict(), made.model.state_dict())


def test_loss_that_is_not_finite_ends_the_run_with_the_step() -> None:
    spec = gossip_job("mlp", 2, optimizer={"name": "sgd", "lr": 1e38})
    made, exchange = trainer(spec)
    made.train_step(exchange, range(2), 2)
    with pytest.raises(UserCodeError, match=r"non-finite (loss|gradient) at step 2"):
        made.train_step(exchange, range(2), 2)


def test_states_of_another_format_or_model_are_refused() -> None:
    made, _ = trainer(gossip_job("mlp", 2))
    tensors, metadata = made.copy_state(is_first=True)
    with pytest.raises(InvalidInputError, match="format"):
        made.load_state(tensors, {**metadata, "format": "7"})
    name = next(name for name in tensors if name.startswith("node1/model/"))
    with pytest.raises(InvalidInputError, match="missing tensors"):
        made.load_state({n: t for n, t in tensors.items() if n != name}, metadata)
    with pytest.raises(InvalidInputError, match="but the model has"):
        made.load_state({**tensors, name: torch.zeros(99)}, metadata)

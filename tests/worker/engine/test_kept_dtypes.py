"""Models that keep their own dtypes: the engine against the reference loops, and their rows."""

import pytest
import torch

from stratagem.worker.models.model_builder import build_model
from stratagem.worker.models.model_dtypes import rows_dtype
from tests.jobs import job, user_model
from tests.reference.gossip_loop import gossip_loop
from tests.reference.loops import federated_loop, sharded_loop
from tests.worker.engine import client_rounds as rounds
from tests.worker.engine import gossip_nodes as gossip
from tests.worker.engine.support import (
    ALLOWED,
    CPU,
    assert_same_bits,
    model_of,
    train,
    trainer_of,
)

KINDS = [["float64"], ["bfloat16"], ["float16", "float32"], ["float32", "float64", "bfloat16"]]
ADAM = {"name": "adam", "lr": 0.01, "clip_norm": 1.0}


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtypes", KINDS, ids="-".join)
def test_equals_the_sharded_loop_to_the_bit(dtypes: list[str], num_shards: int) -> None:
    spec = job(user_model("in_dtypes", dtypes=dtypes), optimizer=ADAM)
    trainer = trainer_of(spec)
    losses = train(trainer, num_shards, 10)
    expected = sharded_loop(spec, ALLOWED, num_shards)
    assert losses == expected.losses
    assert_same_bits(model_of(trainer), dict(expected.state))
    assert {str(tensor.dtype) for tensor in model_of(trainer).values()} == {
        f"torch.{dtype}" for dtype in dtypes
    }


@pytest.mark.parametrize("dtypes", KINDS, ids="-".join)
def test_nodes_that_gossip_and_federated_clients(dtypes: list[str]) -> None:
    model = user_model("in_dtypes", dtypes=dtypes)
    spec = gossip.gossip_job(model, 3)
    made, exchange = gossip.trainer(spec)
    losses = [made.train_step(exchange, range(3), 3).loss for _ in range(10)]
    assert losses == gossip_loop(spec, ALLOWED).losses
    federated = rounds.federated(model)
    state, losses = rounds.run(federated)
    expected = federated_loop(federated, ALLOWED)
    assert losses == expected.losses
    assert_same_bits(state, dict(expected.state))


@pytest.mark.parametrize(
    ("dtypes", "precision", "rows"),
    [
        (["float32"], None, torch.float32),
        (["float64"], None, torch.float64),
        (["bfloat16"], None, None),
        (["float32", "float64"], None, None),
        (["float32", "float64"], "Single", torch.float32),
        (["bfloat16"], "Full", torch.float64),
    ],
    ids=str,
)
def test_rows_follow_their_model(
    dtypes: list[str], precision: str | None, rows: torch.dtype | None
) -> None:
    execution = {} if precision is None else {"precision": precision}
    spec = job(user_model("in_dtypes", dtypes=dtypes), execution=execution)
    said: list[str] = []
    for fresh in (True, False):
        model = build_model(spec, ALLOWED, device=CPU, fresh=fresh, say=said.append)
        assert rows_dtype(spec, model) == rows
    assert len(said) == (0 if precision is None else 2)

"""Compiled code: the bits of the reference compiled alike, whoever computes what, and the random
numbers of eager code. Fused updates. What compiles is in the sweep: a compiler takes long."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.engine import Trainer
from stratagem.worker.engine.forward_backward import Rows, Window
from tests.jobs import job, user_data
from tests.reference.gossip_loop import gossip_loop
from tests.reference.loops import sharded_loop
from tests.worker.engine import client_rounds as rounds
from tests.worker.engine import gossip_nodes as gossip
from tests.worker.engine.support import (
    ALLOWED,
    assert_equals_loop,
    assert_same_bits,
    evaluated,
    train,
    trainer_of,
)

ROWS = user_data("classes", num_rows=42)
NUM_STEPS = 7  # batches of 16, 16 and 10 rows
LAZY = {"mode": "Lazy", "fusion": True}
HYBRID = {"mode": "Hybrid"}


def gradients(trainer: Trainer, shard: int) -> dict[str, Tensor]:
    """Of one shard of two, computed by itself."""
    trainer.model.train()
    trainer.setup.execution.begin_batch(16)
    for _, param in trainer.params:
        param.grad = None
    rows = Rows(trainer.setup.data["train"], torch.arange(8 * shard, 8 * shard + 8), "a test", ())
    trainer.turns[0].passes.add_sums(rows, Window([range(8)], key=lambda _: (3, 0, shard, 0)))
    return {name: p.grad.clone() for name, p in trainer.params if p.grad is not None}


def assert_compiled_alike(model: str, execution: dict[str, Any], num_shards: int = 2) -> None:
    spec, eager = job(model, data=ROWS, execution=execution), job(model, data=ROWS)
    expected = sharded_loop(spec, ALLOWED, num_shards, NUM_STEPS)
    assert_equals_loop(spec, num_shards, NUM_STEPS, expected=expected)
    # Other masks would show in the first digit.
    found = train(trainer_of(eager), num_shards, NUM_STEPS)
    assert expected.losses == pytest.approx(found, rel=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "execution"),
    [
        ("dropout_mlp", LAZY),
        ("everything", LAZY),
        ("batch_norm_mlp", {**HYBRID, "fusion": True}),
        ("counting_layers", {**LAZY, "gradient": {"Checkpointed": 1}, "precision": "Half"}),
    ],
    ids=str,
)
def test_models_of_all_kinds(model: str, execution: dict[str, Any]) -> None:
    if execution.get("precision") != "Half":
        assert_compiled_alike(model, execution)
    else:
        spec = job(model, data=ROWS, execution=execution)
        losses = train(trainer_of(spec), 2, NUM_STEPS)
        full = job(model, data=ROWS, execution={**execution, "mode": "Eager"})
        assert losses == pytest.approx(train(trainer_of(full), 2, NUM_STEPS), rel=0.02)


@pytest.mark.sweep
@pytest.mark.parametrize("execution", [LAZY, HYBRID], ids=["lazy", "hybrid"])
def test_it_does_not_matter_what_was_computed_before(execution: dict[str, Any]) -> None:
    spec = job("counting_layers", data=ROWS, execution=execution)
    both, second = trainer_of(spec), trainer_of(spec)
    first = gradients(both, 0)
    both.turns[0].policy.undo()
    assert_same_bits(gradients(both, 1), gradients(second, 1))
    second.turns[0].policy.undo()
    assert_same_bits(first, gradients(second, 0))


@pytest.mark.sweep
def test_only_full_batches_are_compiled() -> None:
    """What is left over takes no time to compile, of whatever size it is."""
    trainer = trainer_of(job("mlp", data=ROWS, execution=LAZY))
    train(trainer, 2, 1)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    train(trainer, 2, NUM_STEPS)
    evaluated(trainer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.sweep
def test_nodes_that_gossip_and_federated_clients() -> None:
    spec = gossip.gossip_job("dropout_mlp", 2, data=ROWS, execution=LAZY)
    made, exchange = gossip.trainer(spec)
    losses = [made.train_step(exchange, range(2), 2).loss for _ in range(NUM_STEPS)]
    assert losses == gossip_loop(spec, ALLOWED, NUM_STEPS).losses
    rounds.assert_clients_equal_loop(rounds.federated("dropout_mlp", execution=LAZY))


@pytest.mark.parametrize("mode", ["Lazy", "Hybrid"])
def test_a_worker_without_a_compiler_says_so(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    reason = rf"execution.mode: {mode} needs a C\+\+ compiler .*, which this worker does not have"
    with pytest.raises(InvalidInputError, match=reason):
        trainer_of(job("mlp", execution={"mode": mode}))


def test_an_optimizer_without_fused_kernels_is_noted() -> None:
    def notes(name: str) -> Any:
        spec = job("mlp", optimizer={"name": name, "lr": 0.01}, execution={"fusion": True})
        return trainer_of(spec).setup.notes

    assert "torch has no fused kernel for rmsprop" in notes("rmsprop")[0]
    assert not any(map(notes, ("adamw", "sgd", "adagrad")))

"""Activation checkpointing: the bits of ordinary training, for less memory."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.engine.numerics.model_blocks import blocks_of
from tests.jobs import job
from tests.reference.loops import sharded_loop
from tests.worker.engine.support import (
    ALLOWED,
    assert_same_bits,
    is_refused_here,
    model_of,
    peak_bytes,
    solo,
    train,
    trainer_of,
)

ROWS = {"entrypoint": "tests.userland.data:classes", "kwargs": {"num_rows": 42}}
MANY_ROWS = {"entrypoint": "tests.userland.data:classes", "kwargs": {"num_rows": 512}}
GRAPH: dict[str, Any] = {
    "graph": {
        "nodes": [
            {"id": "a", "module": "Linear", "kwargs": {"in_features": 12, "out_features": 8}},
            {"id": "relu", "module": "ReLU", "kwargs": {"inplace": True}},
            {"id": "drop", "module": "Dropout", "kwargs": {"p": 0.3}},
            {"id": "norm", "module": "BatchNorm1d", "kwargs": {"num_features": 8}},
            {"id": "sum", "module": "Add"},
            {"id": "z", "module": "Linear", "kwargs": {"in_features": 8, "out_features": 5}},
        ],
        "edges": [
            {"source": "a", "target": "relu"},
            {"source": "relu", "target": "drop"},
            {"source": "drop", "target": "norm"},
            {"source": "norm", "target": "sum", "port": 0},
            {"source": "drop", "target": "sum", "port": 1},
            {"source": "sum", "target": "z"},
        ],
    }
}


@pytest.mark.parametrize(
    ("model", "interval", "precision"),
    [
        (GRAPH, 1, "Single"),
        (GRAPH, 3, "Mixed"),
        (GRAPH, 100, "Half"),
        ("dropout_mlp", 2, "Half"),
        ("batch_norm_mlp", 2, "Single"),
        ("everything", 1, "Mixed"),
        ("LastOfSequence", 2, "Half"),
        ("counting_layers", 1, "Single"),
        ("counting_layers", 2, "Half"),
    ],
    ids=lambda each: "graph" if isinstance(each, dict) else str(each),
)
def test_equals_ordinary_training_to_the_bit(model: Any, interval: int, precision: str) -> None:
    execution = {"gradient": {"Checkpointed": interval}, "precision": precision}
    spec = job(model, data=ROWS, execution=execution)
    if is_refused_here(spec):
        return
    trainer = trainer_of(spec)
    losses = train(trainer, 2, 6)
    expected = sharded_loop(spec, ALLOWED, 2, 6)
    assert losses == expected.losses
    assert_same_bits(model_of(trainer), dict(expected.state))
    plain = job(model, data=ROWS, execution={"precision": precision})
    assert losses == train(trainer_of(plain), 2, 6)


def test_less_is_allocated_at_once() -> None:
    """32 layers; between their first and their last, groups of 4 keep a quarter of the values."""

    def peak(gradient: Any) -> int:
        spec = job("tall", batch_size=512, data=MANY_ROWS, execution={"gradient": gradient})
        trainer = trainer_of(spec)
        exchange = solo(trainer, 1)
        trainer.train_step(exchange, range(1), 1)
        return peak_bytes(lambda: trainer.train_step(exchange, range(1), 1))

    full = peak("Full")
    assert peak({"Checkpointed": 4}) < 0.5 * full
    assert peak({"Checkpointed": 8}) < 0.6 * full


def test_a_block_that_changes_its_input_is_refused() -> None:
    spec = job("overwriting", execution={"gradient": {"Checkpointed": 1}})
    with pytest.raises(InvalidInputError, match="a block changes its input in place"):
        train(trainer_of(spec), 1, 1)


def test_blocks_of_a_model_with_a_forward_of_its_own() -> None:
    spec = job("counting_layers", execution={"gradient": {"Checkpointed": 2}})
    trainer = trainer_of(spec)
    names = {module: name for name, module in trainer.model.named_modules()}
    found = [names[module] for module in blocks_of(trainer.model, spec).modules]
    assert found == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    (note,) = trainer.setup.notes
    assert "the blocks of CountingLayers cannot be grouped" in note

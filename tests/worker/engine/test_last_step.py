"""A model that is no longer needed is gone, with the memory of its gradients."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stratagem.common.numerics.batch_shards import assign_shards
from tests.jobs import job
from tests.worker.engine.support import in_buckets, solo, trainer_of


@contextmanager
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def used(num_shards: int, **changes: Any) -> "weakref.ref[Any]":
    """A model that has trained a step, by a weak reference; nobody else refers to it."""
    trainer = trainer_of(job(**changes))
    exchange = solo(trainer, 1) if num_shards == 1 else in_buckets(trainer, num_shards)
    trainer.train_step(exchange, assign_shards(num_shards, 1)[0], num_shards)
    exchange.close()
    return weakref.ref(next(trainer.model.parameters()))


@pytest.mark.parametrize("num_shards", [1, 2], ids=["alone", "buckets"])
def test_a_model_goes_with_the_last_reference_to_it(num_shards: int) -> None:
    used(num_shards)  # torch loads parts of itself at the first step
    with no_collector():
        assert used(num_shards)() is None


@pytest.mark.parametrize(
    "execution", [{"precision": "Mixed"}, {"gradient": {"Checkpointed": 1}}], ids=str
)
def test_a_model_that_is_changed_goes_with_the_next_collection(execution: dict[str, Any]) -> None:
    found = used(2, execution=execution)
    gc.collect()
    assert found() is None

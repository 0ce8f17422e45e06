"""Memory strategies: the bits of Standard, and the effect that each is for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.data.batch_storage import BatchPool, DatasetCache
from stratagem.worker.data.datasets import Gather, Subset, TensorDataset
from stratagem.worker.exchange.reducer import solo_exchange
from tests.jobs import job
from tests.reference.loops import sharded_loop
from tests.worker.engine import client_rounds as rounds
from tests.worker.engine import gossip_nodes as gossip
from tests.worker.engine.support import (
    ALLOWED,
    CPU,
    assert_same_bits,
    evaluated,
    in_buckets,
    model_of,
    peak_bytes,
    solo,
    train,
    trainer_of,
)

MANY_ROWS = {"entrypoint": "tests.userland.data:classes", "kwargs": {"num_rows": 256}}
MEMORY = ["Pooled", "Cached", "MinimalPeak"]
ROWS = {"entrypoint": "tests.userland.data:classes", "kwargs": {"num_rows": 42}}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("steps", [None, 3])
def test_no_bit_is_changed(memory: str, steps: int | None) -> None:
    section = None if steps is None else {"steps": steps}
    spec = job("everything", data=ROWS, execution={"memory": memory}, accumulation=section)
    trainer = trainer_of(spec)
    losses = train(trainer, 3, 7)
    expected = sharded_loop(spec, ALLOWED, 3, 7)
    assert losses == expected.losses
    assert_same_bits(model_of(trainer), dict(expected.state))
    plain = job("everything", data=ROWS, accumulation=section)
    assert evaluated(trainer) == _evaluated(plain, 7)


def _evaluated(spec: Any, num_steps: int) -> Any:
    trainer = trainer_of(spec)
    train(trainer, 3, num_steps)
    return evaluated(trainer)


@pytest.mark.parametrize("memory", MEMORY)
def test_nodes_that_gossip_and_federated_clients(memory: str) -> None:
    def gossiped(execution: dict[str, Any]) -> list[float]:
        spec = gossip.gossip_job("dropout_mlp", 2, data=ROWS, execution=execution)
        made, exchange = gossip.trainer(spec)
        return [made.train_step(exchange, range(2), 2).loss for _ in range(4)]

    def federated(execution: dict[str, Any]) -> dict[str, Tensor]:
        return rounds.run(rounds.federated(execution=execution))[0]

    assert gossiped({"memory": memory}) == gossiped({})
    assert_same_bits(federated({"memory": memory}), federated({}))


def test_a_pooled_batch_lies_where_an_earlier_one_lay_unless_somebody_holds_that() -> None:
    data = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10), 10)
    gather = Gather(torch.float32, CPU, pool=BatchPool())
    x, y = gather(Subset(data, torch.arange(5, 10)), torch.tensor([4, 0]), "a test")
    assert (x.tolist(), y.tolist()) == ([[18, 19], [10, 11]], [9, 5])
    first = x.data_ptr()
    held = x[1:]
    del x
    assert gather(data, torch.tensor([0, 1]), "a test")[0].data_ptr() != first
    assert held.tolist() == [[10, 11]]
    del held
    smaller = gather(data, torch.tensor([3]), "a test")[0]
    assert (smaller.data_ptr(), smaller.shape) == (first, (1, 2))
    assert gather(data, torch.arange(0), "a test")[0].shape == (0, 2)


def test_a_pooled_batch_that_backward_needs_is_not_overwritten() -> None:
    data = TensorDataset(torch.arange(20.0).view(10, 2), None, 10)
    gather = Gather(torch.float32, CPU, pool=BatchPool())
    weight = torch.ones(2, requires_grad=True)
    product = (gather(data, torch.tensor([1]), "a test")[0] * weight).sum()
    gather(data, torch.tensor([2]), "a test")
    product.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 3]


class Counted:
    """Counts what is taken from it; augments at random."""

    def __init__(self, shape: tuple[int, ...] = (3,)) -> None:
        self.num_taken = 0
        self.shape = shape

    def __len__(self) -> int:
        return 7

    def take(self, indices: Tensor) -> tuple[Any, Any]:
        self.num_taken += len(indices)
        x = indices.view(-1, 1).double() + torch.rand(len(indices), *self.shape)
        return {"x": x[: len(x) * len(self.shape)]}, (indices, None)


def test_cached_rows_are_taken_once_and_drawn_alike_everywhere() -> None:
    data = Counted()
    gather = Gather(torch.float32, CPU, cache=DatasetCache())
    x, (y, nothing) = gather(data, torch.tensor([6, 0]), "a test")
    assert x["x"].dtype is torch.float32
    assert (y.tolist(), nothing) == ([6, 0], None)
    torch.manual_seed(4)
    after = torch.rand(2)
    torch.manual_seed(4)
    other = Gather(torch.float32, CPU, cache=DatasetCache())
    again, _ = other(Subset(Counted(), torch.arange(7)), torch.tensor([6, 0]), "a test")
    assert torch.equal(torch.rand(2), after)
    assert torch.equal(again["x"], x["x"])
    gather(data, torch.arange(7), "a test")
    assert data.num_taken == 7


def test_cached_data_without_one_row_per_index_are_refused() -> None:
    gather = Gather(torch.float32, CPU, cache=DatasetCache())
    with pytest.raises(InvalidInputError, match="Cached needs one row per index"):
        gather(Counted(shape=()), torch.arange(2), "a test")


@pytest.mark.parametrize("make", [solo, in_buckets], ids=["alone", "buckets"])
def test_gradients_have_storage_from_backward_to_update_only(make: Any) -> None:
    """Activations of 256 rows are as large as the parameters; they shrink while gradients grow."""

    def peak(memory: str) -> int:
        spec = job("heavy", batch_size=256, data=MANY_ROWS, execution={"memory": memory})
        trainer = trainer_of(spec)
        exchange = make(trainer, 1)
        trainer.train_step(exchange, range(1), 1)
        held = sum(p.grad.nbytes for _, p in trainer.params if p.grad is not None)
        assert (held == 0) == (memory == "MinimalPeak")
        return held + peak_bytes(lambda: trainer.train_step(exchange, range(1), 1))

    assert peak("MinimalPeak") < 0.95 * peak("Standard")


def test_freed_buckets_come_back_for_several_shards_and_another_exchange() -> None:
    spec = job("dropout_mlp", data=ROWS, execution={"memory": "MinimalPeak"})
    trainer = trainer_of(spec)
    exchange = in_buckets(trainer, 3)
    losses = [trainer.train_step(exchange, range(3), 3).loss for _ in range(3)]
    other = solo_exchange(exchange.buckets, 3)
    losses += [trainer.train_step(other, range(3), 3).loss for _ in range(3)]
    assert losses == sharded_loop(spec, ALLOWED, 3, 6).losses

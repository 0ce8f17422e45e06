"""Precision against plain torch, memory strategies and checkpointing with the effect that each is
for; their bits are those of `test_equals_loops`."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.worker.data.datasets import BatchPool, DatasetCache, Gather, Subset, TensorDataset
from stratagem.worker.exchange.reducer import solo_exchange
from stratagem.worker.numerics.model import blocks_of
from stratagem.worker.numerics.precision import LossScale
from tests.jobs import job, user_data
from tests.reference.loops import plain_loop, sharded_loop
from tests.userland.data import classes
from tests.worker.engine.support import (
    ALLOWED,
    CPU,
    assert_equals_loop,
    assert_same_bits,
    in_buckets,
    is_refused_here,
    model_of,
    peak_bytes,
    solo,
    train,
    trainer_of,
)

EXECUTIONS = [
    {"precision": precision, "amp_dtype": dtype}
    for precision in ("Mixed", "Half")
    for dtype in ("bfloat16", "float16")
]
ROWS = user_data("classes", num_rows=42)


def test_mixed_is_autocast_over_float32_parameters() -> None:
    spec = job("mlp", execution={"precision": "Mixed"})
    expected = trainer_of(job("mlp")).model
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9, fused=True)
    x, y = classes()["train"]
    for epoch in range(2):
        order = torch.randperm(50, generator=torch.Generator().manual_seed(3 + epoch))
        for rows in order.split(16):
            with torch.autocast("cpu", torch.bfloat16):
                output = expected(x[rows])
            optimizer.zero_grad()
            nn.functional.cross_entropy(output.float(), y[rows]).backward()
            optimizer.step()
    assert_same_bits(dict(plain_loop(spec, ALLOWED, 8).state), dict(expected.state_dict()))


def test_half_is_a_model_of_16_bits_with_float32_masters() -> None:
    """Batch norm stays float32."""
    spec = job("batch_norm_mlp", data=ROWS, execution={"precision": "Half"})
    masters = trainer_of(job("batch_norm_mlp")).model
    low = copy.deepcopy(masters)
    for module in low:  # type: ignore[attr-defined]
        if not isinstance(module, nn.BatchNorm1d):
            module.bfloat16()
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1, momentum=0.9, fused=True)
    x, y = classes(42)["train"]
    for epoch in range(2):
        order = torch.randperm(42, generator=torch.Generator().manual_seed(3 + epoch))
        for rows in order.split(16):
            low.zero_grad()
            loss = nn.functional.cross_entropy(low(x[rows].bfloat16()).float(), y[rows])
            loss.backward()
            for param, narrow in zip(masters.parameters(), low.parameters(), strict=True):
                assert narrow.grad is not None
                param.grad = narrow.grad.float()
            optimizer.step()
            with torch.no_grad():
                for param, narrow in zip(masters.parameters(), low.parameters(), strict=True):
                    narrow.copy_(param)
    found = plain_loop(spec, ALLOWED, 6).state
    for name, param in masters.named_parameters():
        assert torch.equal(found[name], param), name
    for name, buffer in low.named_buffers():
        assert torch.equal(found[name], buffer), name


def test_gradients_too_small_for_float16_arrive() -> None:
    """Without a scale they would vanish below 6e-8."""
    spec = job("mlp", loss="tests.userland.losses:tiny", execution={"precision": "Single"})
    low = job("mlp", loss="tests.userland.losses:tiny", execution=EXECUTIONS[1])

    def step(job_spec: Any) -> dict[str, Tensor]:
        trainer = trainer_of(job_spec)
        train(trainer, 1, 1)
        return {name: p.grad.clone() for name, p in trainer.params if p.grad is not None}

    exact, found = step(spec), step(low)
    for name, grad in exact.items():
        assert 0 < grad.abs().max() < 6e-8
        torch.testing.assert_close(found[name], grad, rtol=0.02, atol=1e-10)


def test_a_step_that_overflows_is_skipped_by_all_and_the_scale_is_part_of_the_state() -> None:
    spec = job("batch_norm_mlp", data=ROWS, execution=EXECUTIONS[1])
    straight, first = trainer_of(spec), trainer_of(spec)
    before = model_of(straight)
    train(straight, 2, 1)
    assert_same_bits(model_of(straight), before)
    train(straight, 2, 7)
    train(first, 2, 4)
    tensors, metadata = first.copy_state()
    assert float(metadata["loss_scale"]) < 2**16
    second = trainer_of(spec, fresh=False)
    second.load_state(tensors, metadata)
    train(second, 2, 4)
    assert second.fingerprint() == straight.fingerprint()


def test_gradients_that_no_scale_can_save_end_the_run() -> None:
    spec = job("mlp", loss="tests.userland.losses:steep", steps=40, execution=EXECUTIONS[1])
    with pytest.raises(UserCodeError, match="non-finite gradient at step 31"):
        train(trainer_of(spec), 1, 40)


def test_the_scale_doubles_after_2000_good_steps() -> None:
    scale = LossScale(is_dynamic=True, value=2.0**20)
    for _ in range(1999):
        scale.keep()
    assert scale.value == 2.0**20
    scale.keep()
    assert scale.value == 2.0**21
    assert scale.absorbs("gradient")
    assert (scale.value, scale.num_good_steps) == (2.0**20, 0)


MANY_ROWS = user_data("classes", num_rows=256)


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
    plain = trainer_of(job(model, data=ROWS, execution={"precision": precision}))
    train(plain, 2, 5)
    assert_same_bits(model_of(assert_equals_loop(spec, 2)), model_of(plain))


def test_less_is_allocated_at_once() -> None:
    """32 layers; between their first and their last, groups of 4 keep a quarter of the values."""

    def peak(gradient: Any) -> int:
        spec = job(
            "tall",
            batch_size=512,
            data=user_data("classes", num_rows=512),
            execution={"gradient": gradient},
        )
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

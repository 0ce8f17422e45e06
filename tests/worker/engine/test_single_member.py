"""The exchange of one member with one shard, against the flat buckets that several members have."""

from typing import Any

import pytest
import torch
from torch import nn

from stratagem.worker.exchange import ExchangeError, SingleMemberReducer, StepScalars, reducer
from tests.jobs import job, user_data, user_model
from tests.worker.engine.support import assert_same_bits, in_buckets, trainer_of

ADAM = {"name": "adamw", "lr": 0.01, "clip_norm": 0.5}
TOKENS = {
    "model": user_model("token_model"),
    "data": user_data("tokens"),
    "loss": "token_cross_entropy",
}
CASES: dict[str, dict[str, Any]] = {
    "at once": {"model": "everything"},
    "micro-batches": {"model": "everything", "accumulation": {"steps": 3}},
    "sum": {"model": "mlp", "accumulation": {"steps": 3, "normalize": "sum"}},
    "tokens": TOKENS,
    "tokens in micro-batches": {**TOKENS, "accumulation": {"micro_batch_size": 3}},
    "absent from the last": {
        "model": user_model("acting_models:Told", at=2, what="leave out"),
        "batch_size": 10,
        "accumulation": {"steps": 2},
    },
}


@pytest.fixture(params=[1 << 30, -1, 1000], ids=["all at once", "as backward goes", "some of each"])
def _mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "SMALL_BYTES", request.param)


@pytest.mark.usefixtures("_mode")
@pytest.mark.parametrize("case", CASES)
def test_has_the_bits_of_the_buckets(case: str) -> None:
    spec = job(**CASES[case], optimizer=ADAM)
    left, right = trainer_of(spec), trainer_of(spec)
    assert SingleMemberReducer.fits(left.params)
    first, second = SingleMemberReducer(left.params), in_buckets(right, 1)
    for _ in range(4):
        one = left.train_step(first, range(1), 1)
        assert one == right.train_step(second, range(1), 1)
    assert_same_bits(left.state()[0], right.state()[0])
    first.close()


def test_a_closed_one_leaves_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "SMALL_BYTES", -1)
    param = nn.Parameter(torch.ones(3))
    exchange = SingleMemberReducer([("p", param)])
    exchange.begin_step(1, range(1), 1, divisor=2.0)
    exchange.begin_shard(0)
    exchange.close()
    param.sum().backward()
    assert param.grad is not None
    assert param.grad.tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_and_transposed_parameters_go_through_buckets(dtype: torch.dtype) -> None:
    assert not SingleMemberReducer.fits([("p", nn.Parameter(torch.ones(3, dtype=dtype)))])
    assert not SingleMemberReducer.fits([("p", nn.Parameter(torch.ones(3, 2).t()))])


def test_misuse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "SMALL_BYTES", -1)
    param = nn.Parameter(torch.ones(3))
    exchange = SingleMemberReducer([("p", param)])
    with pytest.raises(ValueError, match="one shard is owned here"):
        exchange.begin_step(1, range(2), 2)
    exchange.begin_step(1, range(1), 1, divisor=2.0)
    with pytest.raises(RuntimeError, match="still to be computed"):
        exchange.finish()
    exchange.begin_shard(0, num_micro_batches=2)
    with pytest.raises(RuntimeError, match="1 micro-batches are still to be computed"):
        exchange.end_shard(0, StepScalars(1.0, 0.0, 0.0, [1.0], torch.zeros(3)))
    exchange.next_micro_batch()
    with pytest.raises(RuntimeError, match="no further micro-batch"):
        exchange.next_micro_batch()
    param.sum().backward()
    with pytest.raises(RuntimeError, match="p got a gradient again after it was divided"):
        param.sum().backward()
    exchange.end_shard(0, StepScalars(1.0, 0.0, 0.0, [1.0], torch.zeros(3)))
    exchange.cut()
    with pytest.raises(ExchangeError, match="cut"):
        exchange.finish()

"""Computing in 16 bits: the engine against the reference loops, and these against plain torch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import UserCodeError
from stratagem.worker.engine import Tally
from stratagem.worker.engine.numerics.mixed_precision import LossScale
from tests.jobs import job
from tests.reference.gossip_loop import gossip_loop
from tests.reference.loops import federated_loop, plain_loop, sharded_loop
from tests.userland.data import classes
from tests.worker.engine import client_rounds as rounds
from tests.worker.engine import gossip_nodes as gossip
from tests.worker.engine.support import (
    ALLOWED,
    assert_same_bits,
    evaluated,
    is_refused_here,
    model_of,
    train,
    trainer_of,
)

EXECUTIONS = [
    {"precision": precision, "amp_dtype": dtype}
    for precision in ("Mixed", "Half")
    for dtype in ("bfloat16", "float16")
]
ROWS = {"entrypoint": "tests.userland.data:classes", "kwargs": {"num_rows": 42}}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


@pytest.mark.parametrize("execution", EXECUTIONS, ids=lambda each: "-".join(each.values()))
@pytest.mark.parametrize(
    ("model", "num_shards"),
    [("dropout_mlp", 1), ("batch_norm_mlp", 3), ("everything", 2), ("LastOfSequence", 3)],
)
def test_equals_the_sharded_loop_to_the_bit(
    model: str, num_shards: int, execution: dict[str, Any]
) -> None:
    """The last batch of an epoch has 10 rows. Scales of 2^16 are too large for the first steps."""
    spec = job(model, optimizer=SGD, data=ROWS, execution=execution)
    if is_refused_here(spec):
        return
    trainer = trainer_of(spec)
    losses = train(trainer, num_shards, 10)
    expected = sharded_loop(spec, ALLOWED, num_shards)
    assert losses == expected.losses
    assert_same_bits(model_of(trainer), dict(expected.state))
    assert all(tensor.dtype != torch.bfloat16 for tensor in model_of(trainer).values())
    assert losses != sharded_loop(job(model, optimizer=SGD, data=ROWS), ALLOWED, num_shards).losses


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


@pytest.mark.parametrize("execution", EXECUTIONS[1:3], ids=lambda each: "-".join(each.values()))
def test_nodes_that_gossip_and_federated_clients(execution: dict[str, Any]) -> None:
    spec = gossip.gossip_job("batch_norm_mlp", 3, data=ROWS, execution=execution)
    made, exchange = gossip.trainer(spec)
    losses = [made.train_step(exchange, range(3), 3).loss for _ in range(10)]
    looped = gossip_loop(spec, ALLOWED)
    assert losses == looped.losses
    made.end_segment(exchange, Tally())
    assert_same_bits(made.model.state_dict(), dict(looped.mean))
    federated = rounds.federated("dropout_mlp", local_epochs=2, execution=execution)
    state, losses = rounds.run(federated)
    expected = federated_loop(federated, ALLOWED)
    assert losses == expected.losses
    assert_same_bits(state, dict(expected.state))


def test_evaluation_is_as_precise_as_training() -> None:
    spec = job("mlp", execution={"precision": "Half"})
    assert evaluated(trainer_of(spec)) != evaluated(trainer_of(job("mlp")))

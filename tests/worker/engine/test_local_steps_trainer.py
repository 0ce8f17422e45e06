"""The replicas of one member against the reference loop: bits, state, failures."""

from typing import Any

import pytest
import torch

from stratagem.common.base.errors import UserCodeError
from stratagem.worker.engine import Tally
from tests.every_pair import every_pair, every_value
from tests.jobs import user_data, user_model
from tests.reference.local_steps_loop import local_steps_loop
from tests.reference.loops import plain_loop, sharded_loop
from tests.worker.engine.local_replicas import local_steps_job, trainer
from tests.worker.engine.support import ALLOWED, assert_same_bits, trainer_of

SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ADAM = {"name": "adamw", "lr": 0.01, "clip_norm": 0.5, "schedule": {"name": "cosine"}}
MEAN = {"name": "mean"}
DILOCO = {"name": "nesterov", "lr": 0.7, "momentum": 0.9}


@pytest.mark.parametrize(
    ("model", "shape", "optimizer", "outer"),
    every_pair(
        ["dropout_mlp", "batch_norm_mlp", "everything"],
        [(1, 2), (3, 4), (4, 1)],
        [SGD, ADAM],
        [MEAN, DILOCO],
    ),
    ids=lambda value: value["name"] if isinstance(value, dict) else str(value),
)
def test_equals_the_loop_to_the_bit(
    model: str, shape: tuple[int, int], optimizer: Any, outer: Any
) -> None:
    num_replicas, local_steps = shape
    rows = 42 if model == "batch_norm_mlp" else 50
    data = user_data("classes", num_rows=rows)
    changes: dict[str, Any] = {"optimizer": optimizer, "data": data, "options": {"outer": outer}}
    spec = local_steps_job(model, num_replicas, local_steps, steps=6, **changes)
    expected = local_steps_loop(spec, ALLOWED)
    made, exchange = trainer(spec)
    joins, losses = 0, []
    for step in range(1, 7):
        report = made.train_step(exchange, range(num_replicas), num_replicas)
        if step % local_steps == 0 or step == 6:
            losses.append(report.measured["train.loss"])
            assert_same_bits(made.model.state_dict(), dict(expected.states[joins]))
            joins += 1
        else:
            assert not report.measured
    assert losses == pytest.approx(expected.losses, rel=1e-12)
    summary = made.end_segment(exchange, Tally())
    assert summary.metrics["outer_grad_norm"] > 0
    assert_same_bits(made.model.state_dict(), dict(expected.state))


@pytest.mark.parametrize(("model", "bits"), [("batch_norm_mlp", 8), ("everything", 4)])
def test_coded_outer_gradients_equal_the_loop_to_the_bit(model: str, bits: int) -> None:
    rows = 42 if model == "batch_norm_mlp" else 50
    data = user_data("classes", num_rows=rows)
    coded, plain = (
        local_steps_job(model, 3, 2, steps=6, optimizer=ADAM, data=data, options=options)
        for options in ({"outer_bits": bits}, {})
    )
    made, exchange = trainer(coded)
    for _ in range(6):
        made.train_step(exchange, range(3), 3)
    expected = dict(local_steps_loop(coded, ALLOWED).state)
    assert_same_bits(made.model.state_dict(), expected)
    uncoded = local_steps_loop(plain, ALLOWED).state
    assert any(not torch.equal(expected[name], uncoded[name]) for name in expected)


STREAMED = [
    {"local_steps": 4, "fragments": 2},
    {"local_steps": 4, "fragments": 4, "overlap_steps": 1, "mix": 0.25},
    {"local_steps": 6, "fragments": 3, "overlap_steps": 2, "outer_bits": 8},
    {"local_steps": 3, "overlap_steps": 3, "outer": MEAN},
    {"local_steps": 3, "overlap_steps": 2, "mix": 0.0},
    {"local_steps": 5, "mix": 0.5},
]


@pytest.mark.parametrize(
    ("options", "model"),
    every_value(STREAMED, ["dropout_mlp", "batch_norm_mlp", "dropout_mlp", "everything"]),
    ids=str,
)
def test_fragments_in_flight_equal_the_loop_and_are_committed(
    options: dict[str, Any], model: str
) -> None:
    """After every second round another process goes on from what has been committed."""
    rows = 42 if model == "batch_norm_mlp" else 50
    changes: dict[str, Any] = {"data": user_data("classes", num_rows=rows), "optimizer": ADAM}
    spec = local_steps_job(model, 3, options["local_steps"], steps=14, options=options, **changes)
    expected = local_steps_loop(spec, ALLOWED)
    losses = dict(zip(expected.joined_at, expected.losses, strict=True))
    made, exchange = trainer(spec)
    for step in range(1, 15):
        report = made.train_step(exchange, range(3), 3)
        found = [p.exact["train.drift"] for p in report.parts if "train.drift" in p.exact]
        assert found == pytest.approx(expected.drifts.get(step, []), rel=1e-12)
        assert ("train.loss" in report.measured) == (step in losses)
        if step in losses:
            assert report.measured["train.loss"] == pytest.approx(losses[step], rel=1e-12)
        if step % (2 * options["local_steps"]) == options["local_steps"]:
            made.end_segment(exchange, Tally())
            state, before = made.copy_state(is_first=True), made.fingerprint()
            made, exchange = trainer(spec)
            made.load_state(*state)
            assert made.fingerprint() == before
    assert_same_bits(made.model.state_dict(), dict(expected.state))


def test_one_replica_with_the_mean_is_the_plain_loop_up_to_rounding() -> None:
    spec = local_steps_job("mlp", 1, 5, options={"outer": MEAN}, execution={"precision": "Full"})
    made, exchange = trainer(spec)
    for _ in range(10):
        made.train_step(exchange, range(1), 1)
    for name, tensor in plain_loop(spec, ALLOWED).state.items():
        torch.testing.assert_close(made.model.state_dict()[name], tensor, rtol=0, atol=1e-13)


def test_the_mean_after_each_step_of_plain_sgd_is_synchronous_training_up_to_rounding() -> None:
    data = user_data("classes", num_rows=48)
    changes: dict[str, Any] = {
        "optimizer": {"name": "sgd", "lr": 0.1},
        "execution": {"precision": "Full"},
        "data": data,
    }
    spec = local_steps_job("mlp", 4, 1, options={"outer": MEAN}, **changes)
    made, exchange = trainer(spec)
    for _ in range(10):
        made.train_step(exchange, range(4), 4)
    for name, tensor in sharded_loop(spec, ALLOWED, 4).state.items():
        torch.testing.assert_close(made.model.state_dict()[name], tensor, rtol=0, atol=1e-13)


@pytest.mark.parametrize("batch_size", [7, 1])
def test_replicas_without_rows_stay_as_they_are(batch_size: int) -> None:
    spec = local_steps_job("dropout_mlp", 3, 3, batch_size=batch_size)
    made, exchange = trainer(spec)
    for _ in range(10):
        made.train_step(exchange, range(3), 3)
    assert_same_bits(made.model.state_dict(), dict(local_steps_loop(spec, ALLOWED).state))


@pytest.mark.parametrize(("at", "optimizer"), [(0, ADAM), (3, SGD)])
def test_goes_on_from_its_state_with_the_same_bits(at: int, optimizer: dict[str, Any]) -> None:
    spec = local_steps_job("batch_norm_mlp", 3, 3, optimizer=optimizer, batch_size=14)
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
    assert_same_bits(second.model.state_dict(), dict(local_steps_loop(spec, ALLOWED).state))


def test_state_names_keep_the_replicas_apart_from_what_they_have_in_common() -> None:
    made, exchange = trainer(local_steps_job("mlp", 2, 1))
    made.train_step(exchange, range(2), 2)
    tensors, metadata = made.copy_state(is_first=True)
    assert {name.split("/")[0] for name in tensors} == {"model", "outer", "replica0", "replica1"}
    names, _ = made.copy_state(is_first=False)
    assert {name.split("/")[0] for name in names} == {"replica0", "replica1"}
    assert metadata["step"] == "1"
    plain = trainer_of(local_steps_job("mlp", 2, 1), fresh=False)
    plain.load_state(tensors, metadata)
    assert_same_bits(plain.model.state_dict(), made.model.state_dict())


def test_a_step_that_is_not_finite_is_left_out_by_its_replica() -> None:
    """The seventh pass of each replica is the third micro-batch of its second step."""
    told = user_model("acting_models:Told", at=7, what="nan")
    spec = local_steps_job(
        told,
        2,
        3,
        steps=3,
        data=user_data("classes", num_rows=48),
        optimizer=ADAM,
        accumulation={"steps": 4, "non_finite": "skip_step"},
    )
    made, exchange = trainer(spec)
    reports = [made.train_step(exchange, range(2), 2) for _ in range(3)]
    assert [(each.num_skipped, each.weight) for each in reports] == [(0, 16), (2, 0), (0, 16)]
    summary = made.end_segment(exchange, Tally())
    assert summary.metrics["skipped_steps"] == 2
    assert summary.metrics["max_grad_norm"] == max(reports[0].grad_norm, reports[2].grad_norm)
    assert_same_bits(made.model.state_dict(), dict(local_steps_loop(spec, ALLOWED).state))


def test_an_outer_gradient_that_is_not_finite_ends_the_run() -> None:
    made, exchange = trainer(local_steps_job("mlp", 2, 2))
    made.train_step(exchange, range(2), 2)
    with torch.no_grad():
        next(made.model.parameters()).fill_(torch.inf)
    with pytest.raises(UserCodeError, match="non-finite outer gradient after step 2"):
        made.train_step(exchange, range(2), 2)


def test_a_replica_that_is_not_owned_here_is_refused() -> None:
    made, exchange = trainer(local_steps_job("mlp", 2, 1))
    with pytest.raises(ValueError, match=r"the models here are \[0, 1\]"):
        made.train_step(exchange, range(1, 2), 2)

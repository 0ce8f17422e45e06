"""The training step against the reference loops: bits, rounding, failures, resuming."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from stratagem.common.base.errors import UserCodeError
from stratagem.worker.engine import EvaluationShare
from stratagem.worker.exchange import StepScalars
from tests.every_pair import every_pair
from tests.jobs import job, user_model
from tests.reference.loops import plain_loop, sharded_loop
from tests.worker.engine.support import (
    ALLOWED,
    CPU,
    assert_same_bits,
    model_of,
    solo,
    train,
    trainer_of,
)

SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
CHANGING_BUFFER = {
    "entrypoint": "tests.userland.models:BigBuffer",
    "kwargs": {"change": True},
}
ADAM = {"name": "adamw", "lr": 0.01, "clip_norm": 0.5, "schedule": {"name": "cosine"}}


@pytest.mark.parametrize(
    ("model", "num_shards", "optimizer"),
    every_pair(["mlp", "dropout_mlp", "batch_norm_mlp", "everything"], [1, 2, 3, 4], [SGD, ADAM]),
    ids=lambda value: value["name"] if isinstance(value, dict) else str(value),
)
def test_equals_the_sharded_loop_to_the_bit(
    model: str, num_shards: int, optimizer: dict[str, Any]
) -> None:
    # 50 rows in batches of 16: the last batch of an epoch has 2 rows, fewer than 3 or 4 shards.
    # Batch norm cannot train on single rows, so there the last batch has 10.
    rows = 42 if model == "batch_norm_mlp" else 50
    data = {"entrypoint": "tests.userland.data:classes", "kwargs": {"num_rows": rows}}
    spec = job(model, optimizer=optimizer, data=data)
    trainer = trainer_of(spec)
    losses = train(trainer, num_shards, 10)
    expected = sharded_loop(spec, ALLOWED, num_shards)
    assert losses == expected.losses
    assert_same_bits(model_of(trainer), dict(expected.state))


@pytest.mark.parametrize("batch_size", [7, 1, 2])
def test_uneven_and_missing_shards(batch_size: int) -> None:
    spec = job("dropout_mlp", batch_size=batch_size)
    trainer = trainer_of(spec)
    assert train(trainer, 3, 10) == sharded_loop(spec, ALLOWED, 3).losses


@pytest.mark.parametrize(
    ("precision", "num_steps", "tolerance"), [("Full", 100, 1e-12), ("Single", 10, 1e-6)]
)
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adamw"])
def test_equals_the_plain_loop_up_to_rounding(
    precision: str, num_steps: int, tolerance: float, optimizer: dict[str, Any]
) -> None:
    spec = job(optimizer=optimizer, steps=num_steps, execution={"precision": precision})
    expected = plain_loop(spec, ALLOWED)
    for num_shards in (1, 3):
        trainer = trainer_of(spec)
        train(trainer, num_shards, num_steps)
        for name, tensor in model_of(trainer).items():
            assert (tensor - expected.state[name]).abs().max() <= tolerance, name


def test_one_shard_without_randomness_equals_the_plain_loop_in_its_buffers_too() -> None:
    data = {"entrypoint": "tests.userland.data:classes", "kwargs": {"num_rows": 48}}
    spec = job("batch_norm_mlp", data=data, execution={"precision": "Full"})
    trainer = trainer_of(spec)
    train(trainer, 1, 10)
    expected = plain_loop(spec, ALLOWED).state
    for name, tensor in model_of(trainer).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "tests.userland.losses:half_squared"},
        {"loss": "tests.userland.losses:weighted"},
        {
            "model": {"entrypoint": "tests.userland.models:token_model"},
            "data": {"entrypoint": "tests.userland.data:tokens"},
            "loss": "token_cross_entropy",
        },
        {"data": {"entrypoint": "tests.userland.data:noisy"}},
        {"model": {"entrypoint": "tests.userland.models:LastOfSequence"}},
    ],
    ids=["user loss", "weighted loss", "tokens", "augmentation", "lstm"],
)
def test_losses_and_data_of_all_kinds(changes: dict[str, Any]) -> None:
    spec = job(**changes)
    trainer = trainer_of(spec)
    assert train(trainer, 3, 6) == sharded_loop(spec, ALLOWED, 3, 6).losses


def test_token_weights_make_shards_equal_the_whole_batch() -> None:
    spec = job(
        "token_model",
        data={"entrypoint": "tests.userland.data:tokens"},
        loss="token_cross_entropy",
        execution={"precision": "Full"},
    )
    trainer = trainer_of(spec)
    train(trainer, 4, 10)
    for name, tensor in plain_loop(spec, ALLOWED).state.items():
        torch.testing.assert_close(model_of(trainer)[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adamw"])
@pytest.mark.parametrize(
    "model", ["everything", "batch_norm_mlp", "HiddenTable", "reads_values", "LastOfSequence"]
)
def test_resumed_run_equals_the_undisturbed_one(model: str, optimizer: dict[str, Any]) -> None:
    data = {"entrypoint": "tests.userland.data:classes", "kwargs": {"num_rows": 44}}
    spec = job(model, optimizer=optimizer, data=data)
    straight = trainer_of(spec)
    train(straight, 3, 10)
    first = trainer_of(spec)
    train(first, 3, 5)
    tensors, metadata = first.copy_state()
    train(first, 3, 1)  # the copy must not notice
    second = trainer_of(spec, fresh=False)
    second.load_state(tensors, metadata)
    assert second.step == 5
    train(second, 3, 5)
    assert second.fingerprint() == straight.fingerprint()
    assert_same_bits(second.state()[0], straight.state()[0])


def test_state_before_the_first_step_and_fresh_build_is_repeatable() -> None:
    spec = job("everything", optimizer=ADAM)
    fresh, again = trainer_of(spec), trainer_of(spec)
    assert fresh.fingerprint() == again.fingerprint()
    tensors, metadata = fresh.copy_state()
    assert all(name.startswith("model/") for name in tensors)
    loaded = trainer_of(spec, fresh=False)
    loaded.load_state(tensors, metadata)
    train(loaded, 2, 3)
    train(fresh, 2, 3)
    assert loaded.fingerprint() == fresh.fingerprint()


def test_going_back_to_the_start_forgets_the_optimizer() -> None:
    trainer = trainer_of(job("batch_norm_mlp", batch_size=25))
    start = trainer.copy_state()
    first = train(trainer, 2, 4)
    trainer.load_state(*start)
    assert train(trainer, 2, 4) == first


def test_tied_parameters_stay_tied() -> None:
    trainer = trainer_of(job("everything"), fresh=False)
    source = trainer_of(job("everything"))
    tensors, metadata = source.copy_state()
    assert tensors["model/a.weight"] is tensors["model/b.weight"]
    trainer.load_state(tensors, metadata)
    a, b = trainer.model.get_parameter("a.weight"), trainer.model.get_parameter("b.weight")
    assert a is b
    assert [name for name, _ in trainer.params].count("a.weight") == 1


def test_frozen_and_unused_parameters_do_not_move() -> None:
    trainer = trainer_of(job("everything", optimizer=SGD))
    before = model_of(trainer)
    train(trainer, 2, 3)
    after = model_of(trainer)
    for name in ("frozen.weight", "unused.weight", "unused.bias", "mask"):
        assert torch.equal(before[name], after[name]), name
    assert not torch.equal(before["first.weight"], after["first.weight"])


def test_non_finite_loss_is_reported_with_its_step_and_changes_nothing() -> None:
    trainer = trainer_of(job(user_model("acting_models:Exploding", at_call=3)))
    train(trainer, 1, 2)
    before = trainer.fingerprint()
    with pytest.raises(UserCodeError, match="non-finite loss at step 3") as caught:
        train(trainer, 1, 1)
    assert caught.value.activity == "training step 3"
    assert trainer.fingerprint() == before
    assert trainer.step == 2


def test_failed_step_leaves_no_trace() -> None:
    class LostPeerError(Exception):
        pass

    trainer = trainer_of(job("batch_norm_mlp", batch_size=25))
    train(trainer, 2, 2)
    before = trainer.fingerprint()
    exchange = solo(trainer, 2)

    def fail() -> StepScalars:
        raise LostPeerError

    exchange.finish = fail  # type: ignore[method-assign]
    with pytest.raises(LostPeerError):
        trainer.train_step(exchange, range(2), 2)
    assert trainer.fingerprint() == before
    other = trainer_of(job("batch_norm_mlp", batch_size=25))
    assert train(trainer, 2, 2) == train(other, 2, 4)[2:]


def test_errors_of_the_user_are_wrapped_once() -> None:
    trainer = trainer_of(job(loss="tests.userland.losses:broken_loss"))
    with pytest.raises(UserCodeError) as caught:
        train(trainer, 1, 1)
    error = caught.value
    given = "the loss was called with (float32["
    assert error.type == "ValueError"
    assert error.message.startswith(f"labels are upside down; {given}")
    assert error.activity == "training step 1"
    assert "in broken_loss" in error.traceback
    assert "synchronous_trainer.py" not in error.traceback


def test_a_traceback_has_no_frames_of_the_engine_where_torch_fails() -> None:
    trainer = trainer_of(job())
    trainer.model.get_submodule("0").weight = nn.Parameter(torch.zeros(16, 3))
    with pytest.raises(UserCodeError, match="shapes cannot be multiplied") as caught:
        train(trainer, 1, 1)
    frames = re.findall(r'File "(.+)", line', caught.value.traceback)
    assert [frame for frame in frames if "/torch/" not in frame] == []
    assert frames[-1].endswith("linear.py")


def test_large_buffers_may_exist_but_not_change() -> None:
    trainer = trainer_of(job("BigBuffer"))
    train(trainer, 2, 2)
    assert trainer.num_extras < 100
    changing = trainer_of(job(CHANGING_BUFFER))
    with pytest.raises(UserCodeError, match='buffer "table" changed'):
        train(changing, 2, 1)


def test_a_model_that_an_evaluation_changes_is_told_which_buffer() -> None:
    share = EvaluationShare(["test"], 0, 1, lambda *_: None, {})
    with pytest.raises(UserCodeError, match='buffer "calls" changed while the model was eval'):
        trainer_of(job("CountsEvaluations")).evaluate(share)
    scratch = job(user_model("CountsEvaluations", is_kept=False))
    assert trainer_of(scratch).evaluate(share)


def test_wish_to_stop_and_report() -> None:
    trainer = trainer_of(job())
    report = trainer.train_step(solo(trainer, 2), range(2), 2, stop=True)
    assert (report.step, report.num_rows, report.weight, report.stop) == (1, 16, 16.0, True)
    assert trainer.setup.num_rows == {"train": 50, "test": 23}
    assert trainer.train_step(solo(trainer, 2), range(2), 2).stop is False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_trains_on_a_gpu() -> None:
    from stratagem.worker.engine import build_trainer

    device = torch.device("cuda:0")
    spec = job("everything", optimizer=ADAM)
    trainer = build_trainer(spec, ALLOWED, device=device, fresh=True)
    train(trainer, 3, 5)
    tensors, metadata = trainer.copy_state()
    assert {tensor.device for tensor in tensors.values()} == {CPU}
    again = build_trainer(spec, ALLOWED, device=device, fresh=False)
    again.load_state(tensors, metadata)
    train(again, 3, 5)
    train(trainer, 3, 5)
    assert again.fingerprint() == trainer.fingerprint()


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_gradient_of_a_wrong_shape_names_its_parameter(is_direct: bool) -> None:
    model = {
        "entrypoint": "tests.userland.acting_models:Misshapen",
        "kwargs": {"is_direct": is_direct},
    }
    with pytest.raises(UserCodeError, match=r"invalid gradient at index 1.* of parameter weight"):
        train(trainer_of(job(model)), 1, 1)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_what_is_shown_of_a_step_does_not_depend_on_who_owns_its_shards(num_shards: int) -> None:
    """Nor on its micro-batches: other members have others, and only sums are of all."""
    trainer = trainer_of(job(accumulation={"micro_batch_size": 3}))
    report = trainer.train_step(solo(trainer, num_shards), range(num_shards), num_shards)
    assert report.progress_metrics == {}

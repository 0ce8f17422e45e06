"""The training step against the reference loops: bits, rounding, failures, resuming."""

import re

import pytest
import torch
from torch import nn

from stratagem.common.base.errors import UserCodeError
from stratagem.worker.engine import EvaluationShare
from stratagem.worker.exchange import StepScalars
from tests.jobs import job, user_model
from tests.worker.engine.support import ALLOWED, CPU, model_of, solo, train, trainer_of

SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
CHANGING_BUFFER = user_model("BigBuffer", change=True)
ADAM = {"name": "adamw", "lr": 0.01, "clip_norm": 0.5, "schedule": {"name": "cosine"}}


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
    model = user_model("acting_models:Misshapen", is_direct=is_direct)
    with pytest.raises(UserCodeError, match=r"invalid gradient at index 1.* of parameter weight"):
        train(trainer_of(job(model)), 1, 1)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_what_is_shown_of_a_step_does_not_depend_on_who_owns_its_shards(num_shards: int) -> None:
    """Nor on its micro-batches: other members have others, and only sums are of all."""
    trainer = trainer_of(job(accumulation={"micro_batch_size": 3}))
    report = trainer.train_step(solo(trainer, num_shards), range(num_shards), num_shards)
    assert report.progress_metrics == {}

"""The trainer with phases against its reference loop, to the bit: members, resumes, faults."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.job import JobSpec
from stratagem.worker.engine import StepReport, Trainer, build_trainer
from stratagem.worker.exchange import StepScalars
from stratagem.worker.phases import PhaseError
from tests.cluster.jobs import data_parallel
from tests.every_pair import every_value
from tests.jobs import job, user_model
from tests.reference.loops import sharded_loop
from tests.reference.phases_loop import phases_loop
from tests.worker.engine.support import ALLOWED, assert_same_bits, model_of, solo, trainer_of
from tests.worker.phases.members import exchanges, together, train_together

SMOOTH = {"full_steps": 3, "predict_steps": 5, "correct_every": 2}
"""With the whole data in each batch gradients change little: predictions are good."""
NOISY = {
    **SMOOTH,
    "max_relative_error": 1.9,
    "min_correlation": -0.9,
    "trust": 0.5,
    "predictor": {"kind": "momentum"},
    "adaptive": {"window": 2, "loss_threshold": 0.01},
}
"""Bad predictions are taken too, some are not, and lengths change."""
DIVERGING = {**SMOOTH, "adaptive": {"window": 2}, "max_relative_error": 9, "min_correlation": -1}
"""Of a learning rate that is much too high, predictions are good enough and the loss rises."""
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
ADAM = {"name": "adamw", "lr": 0.01, "clip_norm": 0.05, "schedule": "cosine"}
STEPS = 28


def phased(phases: dict[str, Any] | None, **changes: Any) -> JobSpec:
    """Smooth unless `changes` say otherwise: the whole data in each batch, and short steps."""
    calm = {"batch_size": 50, "optimizer": {"name": "sgd", "lr": 0.05}}
    return job(**{"steps": STEPS, "phases": phases, **calm, **changes})


def letters(reports: list[StepReport]) -> str:
    return "".join(report.phase[0] for report in reports)


def train(trainer: Trainer, num_shards: int, to_step: int = STEPS) -> list[StepReport]:
    return train_together([trainer], num_shards, to_step)[0]


SPECS = {
    "smooth": phased(SMOOTH),
    "noisy": phased(NOISY, optimizer=ADAM, batch_size=16),
    "float64": phased(NOISY, execution={"precision": "Full"}, batch_size=16),
    "micro-batches": phased(SMOOTH, accumulation={"micro_batch_size": 4}),
    "fallbacks": phased({**SMOOTH, "correction_weight": 0.0}, optimizer=SGD),
    "refused": phased({**SMOOTH, "warmup_steps": 7}, batch_size=7),
    "diverging": phased(DIVERGING, optimizer={"name": "sgd", "lr": 30.0}),
    "float16": phased(
        SMOOTH, execution={"precision": "Mixed", "amp_dtype": "float16", "fusion": True}
    ),
    "sum": phased(NOISY, accumulation={"normalize": "sum"}, optimizer={"name": "sgd", "lr": 1e-3}),
}


@pytest.mark.parametrize(
    ("name", "num_members"),
    [*every_value(list(SPECS), [1, 2, 3]), ("noisy", 3), ("sum", 1), ("sum", 2)],
)
def test_equals_the_reference_to_the_bit(name: str, num_members: int) -> None:
    spec = SPECS[name]
    expected = phases_loop(spec, ALLOWED, 3, STEPS)
    trainers = [trainer_of(spec) for _ in range(num_members)]
    for trainer, reports in zip(trainers, train_together(trainers, 3, STEPS), strict=True):
        assert letters(reports) == expected.phases
        assert [report.loss for report in reports] == expected.result.losses
        assert_same_bits(model_of(trainer), dict(expected.result.state))
    assert len({trainer.fingerprint() for trainer in trainers}) == 1


@pytest.mark.parametrize("model", ["dropout_mlp", "LastOfSequence"])
def test_random_layers_keep_their_keys_while_batches_are_passed_over(model: str) -> None:
    spec = phased(NOISY, model=model, batch_size=16)  # torch's generator is one for all threads
    trainer = trainer_of(spec)
    expected = phases_loop(spec, ALLOWED, 3, STEPS)
    assert letters(train(trainer, 3)) == expected.phases
    assert_same_bits(model_of(trainer), dict(expected.result.state))


def test_the_jobs_above_come_by_every_phase() -> None:
    smooth = phases_loop(phased(SMOOTH), ALLOWED, 3, STEPS).phases
    assert smooth.startswith("FFFPPCPPCPFFF")
    noisy = phased(NOISY, optimizer=ADAM, batch_size=16)
    assert {"F", "P", "C"} == set(phases_loop(noisy, ALLOWED, 3, STEPS).phases)
    fallbacks = phases_loop(phased(SMOOTH, optimizer=SGD), ALLOWED, 3, STEPS).phases
    assert "CF" in fallbacks  # a correction that gave the cycle up
    noise = phased(SMOOTH, batch_size=7)
    refused = phases_loop(noise, ALLOWED, 3, STEPS)
    assert refused.phases == "F" * STEPS
    # Whoever is never allowed to predict trains as if there were no phases.
    plain = sharded_loop(noise.model_copy(update={"phases": None}), ALLOWED, 3, STEPS)
    assert_same_bits(dict(refused.result.state), dict(plain.state))


def test_without_predictions_it_is_the_sharded_loop() -> None:
    spec = phased({"predict_steps": 0}, model="batch_norm_mlp", batch_size=25)
    trainer = trainer_of(spec)
    train(trainer, 3, 10)
    plain = sharded_loop(spec.model_copy(update={"phases": None}), ALLOWED, 3, 10)
    assert_same_bits(model_of(trainer), dict(plain.state))


def test_a_predicted_step_reads_nothing_and_sends_nothing() -> None:
    trainer = trainer_of(phased(SMOOTH))
    train(trainer, 2, 3)

    class Untouchable:
        def __getattr__(self, name: str) -> None:
            raise AssertionError(f"the exchange was asked for {name}")

    report = trainer.train_step(Untouchable(), range(2), 2, stop=True)  # type: ignore[arg-type]
    assert (report.phase, report.step, report.weight, report.num_rows) == ("PREDICT", 4, 0.0, 0)
    assert report.stop is False  # nobody else has heard of the wish


@pytest.mark.parametrize(
    "spec", [phased(SMOOTH), phased(NOISY, optimizer=ADAM, batch_size=16)], ids=["smooth", "noisy"]
)
def test_resumed_anywhere_it_equals_the_undisturbed_run(spec: JobSpec) -> None:
    straight = trainer_of(spec)
    states = []
    exchange = solo(straight, 2)
    for _ in range(12):
        states.append(straight.copy_state())
        straight.train_step(exchange, range(2), 2)
    for tensors, metadata in states:
        resumed = trainer_of(spec, fresh=False)
        resumed.load_state(tensors, metadata)
        train(resumed, 2, 12)
        assert resumed.fingerprint() == straight.fingerprint()


def test_a_member_that_joins_in_mid_phase_goes_on_with_the_others() -> None:
    spec = phased(SMOOTH)
    trainers = [trainer_of(spec) for _ in range(2)]
    train_together(trainers, 2, 4)  # inside a Predict phase
    survivor = trainers[0]
    train(survivor, 2, 5)  # ahead by a predicted step: there is nobody to wait for
    replacement = trainer_of(spec, fresh=False)
    replacement.load_state(*survivor.copy_state())
    reports = train_together([survivor, replacement], 2, STEPS)
    assert letters(reports[0]).startswith("CPP")
    expected = phases_loop(spec, ALLOWED, 2, STEPS)
    for trainer in (survivor, replacement):
        assert_same_bits(model_of(trainer), dict(expected.result.state))


@pytest.mark.parametrize("phase", ["CORRECT", "FULL"])
def test_replicas_that_differ_after_predictions_fail_with_the_step(phase: str) -> None:
    every = 2 if phase == "CORRECT" else 9
    spec = phased({**SMOOTH, "correct_every": every})
    trainers = [trainer_of(spec) for _ in range(2)]
    at = 5 if phase == "CORRECT" else 8
    train_together(trainers, 2, at)
    assert trainers[0].phased is not None
    assert trainers[0].phased.phases.phase == phase
    with torch.no_grad():
        trainers[1].params[0][1].view(-1)[3] += 1e-6
    before = trainers[0].fingerprint()
    with exchanges(trainers, 2) as connected:

        def step(rank: int) -> UserCodeError | None:
            try:
                trainers[rank].train_step(connected[rank], range(rank, rank + 1), 2)
            except UserCodeError as error:
                return error
            return None

        errors = together([partial(step, rank) for rank in range(2)])
    for error in errors:
        assert error is not None
        assert error.type == "ReplicasDiffer"
        assert f"the replicas differ before step {at + 1}" in error.message
    assert trainers[0].fingerprint() == before


def test_a_step_that_failed_is_done_again_in_the_same_phase() -> None:
    class LostPeerError(Exception):
        pass

    trainer, other = trainer_of(phased(SMOOTH)), trainer_of(phased(SMOOTH))
    train(trainer, 2, 5)
    before = trainer.fingerprint()
    exchange = solo(trainer, 2)

    def fail() -> StepScalars:
        raise LostPeerError

    exchange.finish = fail  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(LostPeerError):
            trainer.train_step(exchange, range(2), 2)
    assert trainer.fingerprint() == before
    train(trainer, 2)
    train(other, 2)
    assert trainer.fingerprint() == other.fingerprint()


def test_what_a_codec_makes_of_gradients_is_what_is_predicted_from() -> None:
    lenient = {**NOISY, "adaptive": {"enabled": False}}
    spec = phased(lenient, compression="ternary", strategy=data_parallel(2))
    alone = [trainer_of(spec) for _ in range(2)]
    reports = train_together(alone, 2, 20)
    assert {"F", "P", "C"} == set(letters(reports[0]))
    assert [each.loss for each in reports[0]] == [each.loss for each in reports[1]]
    assert alone[0].fingerprint() == alone[1].fingerprint()


def test_a_step_that_is_skipped_leaves_the_phases_where_they_are() -> None:
    spec = phased(SMOOTH, accumulation={"non_finite": "skip_step"})
    trainer, other = trainer_of(spec), trainer_of(spec)
    train(trainer, 2, 5)
    train(other, 2, 5)
    assert trainer.phased is not None
    exchange = solo(trainer, 2)
    finish = exchange.finish

    def broken() -> StepScalars:
        return replace(finish(), loss_sum=math.inf)

    exchange.finish = broken  # type: ignore[method-assign]
    before = trainer.phased.phases.state()[1]
    report = trainer.train_step(exchange, range(2), 2)
    assert (report.phase, report.num_skipped, report.step) == ("CORRECT", 1, 6)
    assert trainer.phased.phases.state()[1] == before
    assert trainer.phased.phases.phase == "CORRECT"
    assert train(trainer, 2, 7)[0].phase == "CORRECT"
    # The whole data is in each batch, so the other one has made the same steps, in another order.
    train(other, 2, 6)
    for name, tensor in model_of(other).items():
        torch.testing.assert_close(model_of(trainer)[name], tensor)


def test_states_of_others_are_checked() -> None:
    trainer = trainer_of(phased(SMOOTH))
    train(trainer, 1, 4)
    tensors, metadata = trainer.copy_state()
    wider = trainer_of(phased(SMOOTH, model=user_model("mlp", hidden=8)))
    saved = {name: tensor for name, tensor in tensors.items() if name.startswith("phases/")}
    assert wider.phased is not None
    with pytest.raises(InvalidInputError, match="other names, shapes or dtypes"):
        wider.phased.phases.load(saved, metadata)
    # A state without phases is a beginning; a job without phases leaves them alone.
    plain = trainer_of(phased(None))
    plain.load_state(tensors, metadata)
    assert not any(name.startswith("phases/") for name in plain.state()[0])
    trainer.load_state(*plain.copy_state())
    assert trainer.phased is not None
    assert trainer.phased.phases.statistics.counts.total == 0
    assert trainer.step == 4


def test_the_call_that_does_not_fit_the_phase_is_an_error() -> None:
    trainer = trainer_of(phased(SMOOTH))
    assert trainer.phased is not None
    phases = trainer.phased.phases
    with pytest.raises(PhaseError, match="FULL step computes its gradient"):
        phases.predict()
    with pytest.raises(ValueError, match="1 gradients for 4 parameters"):
        phases.take([torch.zeros(3)], 1.0)
    with pytest.raises(ValueError, match="gradient 0 is"):
        phases.take([torch.zeros(3)] * 4, 1.0)
    train(trainer, 1, 3)
    with pytest.raises(PhaseError, match="PREDICT step computes no gradient"):
        phases.take([param for _, param in trainer.params], 1.0)


def test_metrics_say_what_was_saved() -> None:
    trainer = trainer_of(phased(SMOOTH))
    train(trainer, 2, 11)
    assert trainer.phased is not None
    metrics = trainer.phased.phases.metrics
    assert metrics["step_ratio"] == 11 / 6
    assert metrics["predicted_steps"] == 5
    assert metrics["full_loss_change"] < 0
    assert metrics["is_diverging"] == 0
    assert metrics["cost_speedup"] > 0
    assert metrics["wall_speedup"] > 0


def test_a_loss_that_diverges_is_told_and_leaves_no_step_predicted() -> None:
    trainer = trainer_of(phased(DIVERGING, optimizer={"name": "sgd", "lr": 30.0}))
    assert trainer.phased is not None
    seen, news = "", list[str]()
    for to_step in range(1, STEPS + 1):
        was_diverging = trainer.phased.phases.metrics["is_diverging"]
        reports = train(trainer, 1, to_step)
        seen += letters(reports)
        news += [sentence for report in reports for sentence in report.news]
        assert not (was_diverging and seen[-1] == "P" and seen[-2] == "F")
    assert "no gradient is predicted until it settles" in news[0]
    assert trainer.phased.phases.metrics["refused_cycles"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_resumed_on_a_gpu_it_equals_the_undisturbed_run() -> None:
    device = torch.device("cuda:0")
    spec = phased(NOISY, model="dropout_mlp", optimizer=ADAM, batch_size=16)
    straight = build_trainer(spec, ALLOWED, device=device, fresh=True)
    train(straight, 3, 9)
    state = straight.copy_state()
    seen = letters(train(straight, 3))
    assert "P" in seen
    resumed = build_trainer(spec, ALLOWED, device=device, fresh=False)
    resumed.load_state(*state)
    assert letters(train(resumed, 3)) == seen
    assert resumed.fingerprint() == straight.fingerprint()

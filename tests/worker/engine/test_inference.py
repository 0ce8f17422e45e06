"""What a worker computes for a job that trains nothing, against the plain loop."""

from typing import Any

import pytest
import torch
from torch import nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.coordinator.effects.evaluate import fold_parts
from stratagem.worker.engine import EvaluationPart, Inference, build_inference
from stratagem.worker.engine.build import _copies
from stratagem.worker.engine.state_format import given_model_state, load_model_state, model_state
from stratagem.worker.plans.train import parts_to_proto
from tests.jobs import job, user_data
from tests.reference.evaluation_loop import evaluation_loop
from tests.worker.engine.support import (
    ALLOWED,
    CPU,
    evaluated,
    evaluating,
    model_of,
    peak_bytes,
    train,
    trainer_of,
)


def inference_of(spec: Any) -> Inference:
    return build_inference(spec, ALLOWED, device=CPU, fresh=True)


def metrics_of(spec: Any, *members: Inference, num_shards: int) -> dict[str, float]:
    """Each member takes every so many-th batch, the last one first."""
    parts: list[EvaluationPart] = []
    for rank, member in reversed(list(enumerate(members))):
        mine = member.evaluator.share(["test"], rank, num_shards)
        parts += [member.part(*batch) for batch in reversed(mine)]
    means = fold_parts(parts_to_proto(parts), spec.evaluation.metrics)
    own = members[0].evaluator.own
    if own is None:
        return means
    in_order = sorted(parts, key=lambda part: part.batch)
    measured = own.measured("test", [part.kept for part in in_order if part.kept is not None])
    return {**means, **measured}


@pytest.mark.parametrize("num_test_rows", [1, 7, 23])
@pytest.mark.parametrize("num_members", [1, 3])
def test_any_number_of_members_equals_the_loop(num_test_rows: int, num_members: int) -> None:
    data = user_data("classes", num_test_rows=num_test_rows)
    spec = evaluating("everything", data=data)
    members = [inference_of(spec) for _ in range(num_members)]
    assert metrics_of(spec, *members, num_shards=num_members) == evaluation_loop(spec, ALLOWED)


@pytest.mark.parametrize(
    "execution",
    [
        {"precision": "Full"},
        {"precision": "Mixed", "memory": "Cached"},
        {"precision": "Half", "memory": "Pooled"},
        {"memory": "MinimalPeak", "fusion": True},
        pytest.param({"mode": "Lazy"}, marks=pytest.mark.sweep),
        pytest.param({"mode": "Hybrid", "fusion": True}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_settings_apply_as_in_the_loop(execution: dict[str, Any]) -> None:
    spec = evaluating("batch_norm_mlp", execution=execution)
    assert metrics_of(spec, inference_of(spec), num_shards=1) == evaluation_loop(spec, ALLOWED)


@pytest.mark.parametrize(
    "sections",
    [
        {"model": "FunctionalDropout", "data": user_data("noisy_rows")},
        {
            "model": "FunctionalDropout",
            "data": {**user_data("noisy_rows"), "collate": "tests.userland.data:noisy_batch"},
            "loss": "tests.userland.losses:loss_of_batch",
            "evaluation": {"split": "test", "batch_size": 5},
        },
        {
            "model": "dropout_mlp",
            "loss": None,
            "step": "tests.userland.steps:noisy",
            "predict": "tests.userland.steps:prediction",
        },
    ],
    ids=["rows", "collated", "step"],
)
def test_rows_and_steps_are_evaluated_as_in_the_loop(sections: dict[str, Any]) -> None:
    spec = evaluating(**sections)
    assert metrics_of(spec, inference_of(spec), num_shards=1) == evaluation_loop(spec, ALLOWED)


@pytest.mark.parametrize("num_members", [1, 3])
def test_a_batch_in_which_something_draws_has_the_seeds_of_the_loop(num_members: int) -> None:
    spec = evaluating("SometimesNoisy")
    members = [inference_of(spec) for _ in range(num_members)]
    expected = evaluation_loop(spec, ALLOWED)["test.loss"]  # metrics have a pass of their own there
    for _ in range(2):
        assert metrics_of(spec, *members, num_shards=num_members)["test.loss"] == expected


def test_modules_are_not_seeded_in_an_evaluation_that_draws_nothing() -> None:
    trainer, other = trainer_of(job("dropout_mlp")), trainer_of(job("dropout_mlp"))
    num_hooks: list[int] = []

    def count(module: nn.Module, *_: object) -> None:
        num_hooks.append(len(trainer.model.get_submodule("2")._forward_pre_hooks))

    trainer.model.get_submodule("0").register_forward_hook(count)
    for _ in range(2):
        num_hooks.clear()
        evaluated(trainer)
        assert set(num_hooks) == {0}
        assert train(trainer, 1, 2) == train(other, 1, 2)
        assert num_hooks[-1] == 1


def test_it_measures_what_training_measures() -> None:
    evaluation = {"split": "test", "every": "1 epoch", "metrics": ["accuracy"], "batch_size": 5}
    trainer = trainer_of(job(evaluation=evaluation))
    train(trainer, 1, 3)
    spec = evaluating()
    inference = inference_of(spec)
    inference.load_state(trainer.state()[0])
    parts = [inference.part(*batch) for batch in inference.evaluator.share(["test"], 0, 1)]
    own = {(part.batch, part.sums["accuracy"], part.sums["loss"]) for part in parts}
    theirs = evaluated(trainer)
    assert own == {(part.batch, part.sums["accuracy"], part.sums["loss"]) for part in theirs}


def test_it_takes_the_memory_of_weights_and_a_batch() -> None:
    spec = evaluating("heavy", batch_size=20)
    inference = inference_of(spec)
    weights = sum(param.nbytes for param in inference.model.parameters())
    assert peak_bytes(lambda: inference.part("test", 0)) < 0.2 * weights
    assert all(param.grad is None for param in inference.model.parameters())


def test_states_of_any_kind_can_be_given() -> None:
    trainer = trainer_of(job())
    train(trainer, 1, 2)
    double = inference_of(evaluating(execution={"precision": "Full"}))
    for given in (trainer.state()[0], model_of(trainer), model_state(trainer.model)):
        load_model_state(double.model, given_model_state(given, double.model), where="initial")
        for name, tensor in trainer.model.state_dict().items():
            assert torch.equal(double.model.state_dict()[name], tensor.double())


def test_a_state_of_another_model_is_refused_by_name() -> None:
    inference = inference_of(evaluating())
    given = given_model_state(model_of(trainer_of(job("batch_norm_mlp"))), inference.model)
    with pytest.raises(InvalidInputError, match="initial: missing tensors"):
        load_model_state(inference.model, given, where="initial")


def test_outputs_are_kept_by_name_where_they_have_the_rows() -> None:
    inference = inference_of(evaluating())
    outputs: dict[str, torch.Tensor] = {}
    inference.part("test", 4, outputs)
    assert {name: tuple(each.shape) for name, each in outputs.items()} == {"output": (3, 5)}
    nested = {"logits": torch.ones(2, 3), "pair": (torch.zeros(2), torch.ones(2, 1))}
    named = dict(_copies("output", nested, 2))
    assert list(named) == ["output.logits", "output.pair.0", "output.pair.1"]
    for wrong in (torch.ones(3, 2), torch.ones(()), "text"):
        with pytest.raises(InvalidInputError, match="the model's output is no tensor of 2 rows"):
            dict(_copies("output", wrong, 2))


def test_a_split_that_is_not_there_is_named() -> None:
    spec = evaluating()
    other = spec.model_copy(
        update={"evaluation": spec.evaluation.model_copy(update={"split": "x"})}
    )
    with pytest.raises(InvalidInputError, match='no split "x"; there is train, test'):
        inference_of(other)

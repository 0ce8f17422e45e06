"""Step functions against the reference loops, what they log, and what they must not do."""

from typing import Any

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.job import JobSpec
from stratagem.worker.engine import Tally, build_inference
from stratagem.worker.federated.client_trainer import ClientRunner
from tests.jobs import document, job
from tests.worker.engine.client_rounds import federated
from tests.worker.engine.gossip_nodes import gossip_job, trainer
from tests.worker.engine.support import (
    ALLOWED,
    CPU,
    assert_same_bits,
    evaluating,
    in_buckets,
    model_of,
    train,
    trainer_of,
)


def step(name: str, **changes: Any) -> dict[str, Any]:
    return {"loss": None, "step": f"tests.userland.steps:{name}", **changes}


NOISY = step("noisy", accumulation={"micro_batch_size": 3})


def test_a_segment_has_the_means_over_its_steps_of_what_was_logged() -> None:
    made = trainer_of(job("dropout_mlp", **NOISY))
    exchange, tally = in_buckets(made, 2), Tally()
    reports = [made.train_step(exchange, range(2), 2) for _ in range(4)]
    for report in reports:
        tally.add(report)
    summary = made.end_segment(exchange, tally)
    assert sorted(reports[0].logged) == ["agreement", "fit", "hits_of_0"]
    for name in reports[0].logged:
        totals, weights = zip(*(report.logged[name] for report in reports), strict=True)
        assert summary.metrics[name] == sum(totals) / sum(weights)


def test_clients_and_nodes_have_the_means_of_what_was_logged() -> None:
    spec = federated("dropout_mlp", local_epochs=2, **NOISY)
    base = {n: t for n, t in trainer_of(spec).copy_state()[0].items() if n.startswith("model/")}
    metrics = ClientRunner(spec, ALLOWED, CPU).run(base, 0, 3, 1).metrics
    assert metrics.keys() == {"max_grad_norm", "agreement", "fit", "hits_of_0"}
    made, exchange = trainer(gossip_job("dropout_mlp", 3, **NOISY))
    reports = [made.train_step(exchange, range(3), 3) for _ in range(6)]
    totals, weights = zip(*(report.logged["fit"] for report in reports), strict=True)
    summary = made.end_segment(exchange, Tally())
    assert summary.metrics["fit"] == pytest.approx(sum(totals) / sum(weights), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("without_gradient", "the loss of the step has no gradient; it must be computed from"),
        ("switched_off", "has no gradient: the step has switched gradients off"),
        ("going_backward", "does not call backward: the gradient would be counted twice"),
        ("clamping", "it must not change parameters of the model"),
        ("wrong_log", "'grad_norm' is the name of a series of ours"),
        ("long_log", "has 17 names; at most 16 are allowed"),
        ("long_name", "is no name for the log of the step; allowed are at most 32 of"),
        ("wrong_key", "returned a mapping with loss, logs; it has loss, and may have weight"),
        ("vector", "the loss of the step must be one number as a tensor, not shape (16,)"),
    ],
)
def test_what_a_step_must_not_do_is_an_error_of_the_user(name: str, words: str) -> None:
    made = trainer_of(job("mlp", **step(name)))
    before = model_of(made)
    with pytest.raises(UserCodeError) as caught:
        train(made, 1, 1)
    assert words in str(caught.value)
    assert torch.is_grad_enabled()
    if name != "clamping":
        assert_same_bits(model_of(made), before)


def test_names_that_change_are_named() -> None:
    made = trainer_of(job("mlp", **step("changing_log"), batch_size=4))
    with pytest.raises(UserCodeError) as caught:
        train(made, 2, 10)
    text = str(caught.value)
    assert "must have the same names in each micro-batch; this one lacks" in text
    assert "odd" in text
    assert "even" in text


def test_a_prediction_that_is_no_pair_is_refused() -> None:
    predict = "tests.userland.steps:prediction_only"
    spec = evaluating("mlp", **step("plain", predict=predict))
    made = build_inference(spec, ALLOWED, device=CPU, fresh=True)
    with pytest.raises(UserCodeError, match="predict returned a Tensor instead of a pair"):
        made.part("test", 0)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"loss": None}, "loss", "missing; a job has a loss, or a step that computes one"),
        ({"step": "a:b"}, "step", "loss is set already; only one of the two may be"),
        ({"predict": "a:b"}, "predict", "goes with step"),
        (
            step("plain", evaluation={"metrics": ["loss", "accuracy"]}),
            "evaluation.metrics[1]",
            "'accuracy' needs predict",
        ),
        (
            step(
                "plain",
                strategy={
                    "type": "ModelParallel",
                    "partitions": [{"node_ids": ["0"], "target": {"WorkerId": "a"}}],
                    "communication": {"protocol": "Direct"},
                },
            ),
            "step",
            "is not allowed with strategy ModelParallel",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    changes: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        JobSpec.parse(document(**changes))
    assert [v.field for v in caught.value.violations] == [field]
    assert words in caught.value.violations[0].message


def test_a_job_without_a_step_is_written_as_before() -> None:
    assert "step" not in job().document()
    assert "predict" not in job().document()
    assert "loss" not in job(**step("plain")).document()
